"""How fast windows come: `python benchmarks/loader.py [--windows 20000] [--json]`.

Token shards of 256 MB (uint16) are made in a temporary folder: two sources, documents of 700 tokens. Each loader gives
batches of 64 windows of 2,049 tokens as int64, one process, no worker processes; the loaders take turns, round after
round. --corpus is accepted, as by every benchmark, and ignored. Figures are million tokens/s:

    loader.warm        of CPU time, the files in memory: ours as arrays; beside nanoGPT's get_batch (random offsets,
                       the same for x and y) and datatrove's DatatroveFileDataset under a DataLoader
    loader.warm_torch  the same of ours through torch's DataLoader, with document numbers and targets, which the others
                       do not have
    loader.cold, loader.cold_torch
                       of wall time, the files out of the page cache, each loader in a process of its own
    loader.start_ms    opening the shards, planning, first batch
    order.plan_15t_ms  opening a plan of 15e12 tokens over 200 sources, and order.plan_15t_mb, what it holds
    order.positions_1m_ms  source, epoch and window of a million positions of it
    order.start_ms     from the sizes of --documents documents in four sources to the first position, beside what
                       Megatron-LM builds for them (`megatron_index.py`); order.start_mb, what either holds then

To expect on one core of a server of 2024 (seen on a shared one): warm 790 for ours, 230 with documents and targets
as tensors, 110 for nanoGPT, 150 for datatrove, which reads in order and so cannot mix or shuffle; a plan of 15e12
tokens with a ramp of 64 steps in 0.3 s and 1 MB, a million positions in 0.13 s; 3 ms and 0.1 MB to start on 3 million
documents, where Megatron-LM takes 0.16 s and 35 MB. Cold, the disk decides.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from common import OURS, Figure, arguments, compared, in_own_process, peer, rounds, show

from gristmill.mixtures import kernels, window_kernels
from gristmill.mixtures.mixture import Mixture
from gristmill.tokenize.blocks import metadata_of
from gristmill.tokenize.pieces import index_bytes
from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, TokenManifest, TokenSet

SEQ_LEN = 2048
BATCH_WINDOWS = 64
DOCUMENT_TOKENS = 700
SOURCES = {"web": 3, "code": 1}  # shards


def make_tokens(folder: Path, megabytes: float) -> None:
    """Shards of random ids, `megabytes` in all, each a whole number of documents."""
    shard_tokens = int(megabytes * 1e6 / 2 / sum(SOURCES.values()))
    random = np.random.default_rng(0)
    infos = []
    for source, count in SOURCES.items():
        for _ in range(count):
            name = f"part-{len(infos):05}"
            ids = random.integers(1, 48_000, shard_tokens // DOCUMENT_TOKENS * DOCUMENT_TOKENS).astype("<u2")
            ids[DOCUMENT_TOKENS - 1 :: DOCUMENT_TOKENS] = 0
            documents = len(ids) // DOCUMENT_TOKENS
            columns = {
                "doc_id": [f"{name}-{i}" for i in range(documents)],
                "source": [source] * documents,
                "start": np.arange(documents, dtype=np.uint64) * DOCUMENT_TOKENS,
                "length": np.full(documents, DOCUMENT_TOKENS, np.uint32),
                "bytes": np.full(documents, 4 * DOCUMENT_TOKENS, np.uint32),
            }
            index = index_bytes(pa.table(columns, schema=INDEX_SCHEMA), metadata_of(ids.data))
            (folder / f"{name}.bin").write_bytes(ids.tobytes())
            (folder / f"{name}.idx").write_bytes(index)
            hashes = [xxhash.xxh3_128_hexdigest(data) for data in (ids.tobytes(), index)]
            infos.append(
                ShardInfo(
                    name=name,
                    source=source,
                    split="train",
                    documents=documents,
                    tokens=len(ids),
                    bytes=4 * len(ids),
                    idx_bytes=len(index),
                    bin_xxh3=hashes[0],
                    idx_xxh3=hashes[1],
                )
            )
    (folder / "tokenizer.json").write_bytes(b"{}")
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=48_000,
        eos_id=0,
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(b"{}"),
        shards=infos,
    )
    (folder / "shards.json").write_bytes(manifest.sealed())


def plan_of(folder: Path, windows: int) -> Any:
    kernels.warm()
    window_kernels.warm()
    mixture = Mixture(name="benchmark", sources={"web": 0.7, "code": 0.3}, max_epochs=1000)
    return mixture.plan(TokenSet.open(folder), SEQ_LEN, windows * SEQ_LEN, seed=1)


def ours(folder: Path, windows: int) -> Iterator[int]:
    for batch in plan_of(folder, windows).loader(batch_windows=BATCH_WINDOWS):
        yield batch.tokens.size


def ours_torch(folder: Path, windows: int) -> Iterator[int]:
    from torch.utils.data import DataLoader

    from gristmill.mixtures.torch_loader import BatchStream

    for batch in DataLoader(BatchStream(plan_of(folder, windows), 0, 1, BATCH_WINDOWS), batch_size=None):
        yield batch["tokens"].numel()


def nanogpt(folder: Path, windows: int) -> Iterator[int]:
    """get_batch of nanoGPT's train.py (3adf61e1): x and y are cut, converted and stacked apart."""
    import torch

    random = np.random.default_rng(0)
    for _ in range(windows // BATCH_WINDOWS):
        data = np.memmap(folder / "part-00000.bin", dtype=np.uint16, mode="r")
        at = random.integers(0, len(data) - SEQ_LEN - 1, BATCH_WINDOWS)
        x = torch.stack([torch.from_numpy(data[i : i + SEQ_LEN].astype(np.int64)) for i in at])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in at])
        yield x.numel() + len(y)  # tokens of the windows, counted once


def datatrove(folder: Path, windows: int) -> Iterator[int]:
    """Its data set reads in order by design; so do we here, although a run needs another order."""
    from datatrove.utils.dataset import DatatroveFileDataset
    from torch.utils.data import DataLoader, Subset

    data = DatatroveFileDataset(str(folder / "part-00000.bin"), SEQ_LEN, token_size=2)
    part = Subset(data, [i % len(data) for i in range(windows)])
    for batch in DataLoader(part, batch_size=BATCH_WINDOWS):
        yield batch["input_ids"].numel()


Loader = Callable[[Path, int], Iterator[int]]  # (folder, windows) -> tokens of each batch


def rate(loader: Loader, folder: Path, windows: int, clock: Callable[[], float]) -> float:
    """Million tokens/s, without the first batch, which opens files and loads kernels."""
    batches = loader(folder, windows)
    next(batches)
    start = clock()
    return sum(batches) / (clock() - start) / 1e6


def drop_from_cache(folder: Path) -> None:
    for path in folder.glob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order_figures() -> Iterator[Figure]:
    """A plan that needs no tokens: 15e12 of them over 200 sources, with a ramp of weights."""
    random = np.random.default_rng(0)
    sizes = {f"s{i:03}": int(t) for i, t in enumerate(random.integers(10**9, 10**12, 200))}
    weights = {name: float(10 ** random.uniform(-6, 0)) for name in sizes}
    phases = [{"name": "one", "share": 0.8}, {"name": "two", "share": 0.2, "ramp": "linear", "weights": {"s000": 1}}]
    mixture = Mixture.model_validate({"name": "m", "sources": weights, "phases": phases, "max_epochs": 1e6})
    tracemalloc.start()
    start = time.perf_counter()
    plan = mixture.plan(sizes, SEQ_LEN, 15 * 10**12, seed=1)
    plan.locate(plan.windows // 3)
    opened = time.perf_counter() - start
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start = time.perf_counter()
    plan.order.block(plan.windows // 3, plan.windows // 3 + 1_000_000)
    located = time.perf_counter() - start
    yield Figure("order.plan_15t_ms", opened * 1e3, "ms")
    yield Figure("order.plan_15t_mb", held / 1e6, "MB")
    yield Figure("order.positions_1m_ms", located * 1e3, "ms")


def start_figures(documents: int, turns: int, skip: list[str]) -> Iterator[Figure]:
    """One epoch of four sources with documents of 700 tokens or so. Ours looks at no document."""
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 2 * DOCUMENT_TOKENS, documents // 4).astype(np.int32) for _ in range(4)]
    sizes = {f"s{i}": int(each.sum(dtype=np.int64)) for i, each in enumerate(lengths)}
    mixture = Mixture(name="m", sources={name: {} for name in sizes}, temperature=1.0)
    held: dict[str, list[float]] = {}

    def timed(who: str, work: Callable[[], Any]) -> float:
        tracemalloc.start()
        start = time.perf_counter()
        kept = work()
        took = time.perf_counter() - start
        arrays = sum(array.nbytes for array in kept) if isinstance(kept, list) else tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        held.setdefault(who, []).append(arrays / 1e6)
        return took * 1e3

    def ours_started() -> Any:
        plan = mixture.plan(sizes, SEQ_LEN, sum((n - 1) // SEQ_LEN for n in sizes.values()) * SEQ_LEN, seed=1)
        plan.locate(0)
        return plan

    jobs = {OURS: functools.partial(timed, OURS, ours_started)}
    if name := peer("megatron-core", skip):
        import megatron_index

        cpp = megatron_index.helpers()
        jobs[name] = functools.partial(timed, name, functools.partial(megatron_index.build, cpp, lengths, SEQ_LEN, 1))
    yield from compared("order.start_ms", "ms", rounds(jobs, turns), smaller_is_better=True)
    yield from compared("order.start_mb", "MB", held, smaller_is_better=True)


def loaders(skip: list[str]) -> tuple[dict[str, Loader], dict[str, Loader]]:
    """(figure's suffix -> a way to get our windows, peer -> its way). All but the plain way need torch."""
    ways: dict[str, Loader] = {"": ours}
    peers: dict[str, Loader] = {}
    if peer("torch", skip):
        ways["_torch"] = ours_torch
    if nanogpt_name := peer("nanoGPT", skip, needs=["torch"], at="3adf61e1"):
        peers[nanogpt_name] = nanogpt
    if datatrove_name := peer("datatrove", skip, needs=["torch"]):
        peers[datatrove_name] = datatrove
    return ways, peers


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    kernels.warm()
    window_kernels.warm()
    yield from order_figures()
    yield from start_figures(options.documents, options.rounds, options.skip)
    ways, peers = loaders(options.skip)
    with tempfile.TemporaryDirectory() as name:
        folder, windows = Path(name), options.windows
        make_tokens(folder, options.mb)
        start = time.perf_counter()
        next(ours(folder, windows))
        yield Figure("loader.start_ms", (time.perf_counter() - start) * 1e3, "ms")

        def warm(loader: Loader) -> float:
            return rate(loader, folder, windows, time.thread_time)

        def cold(loader: Loader) -> float:
            drop_from_cache(folder)
            return float(in_own_process(rate, loader, folder, windows, time.perf_counter))

        for kind, measure in (("warm", warm), ("cold", cold)):
            jobs = {who: functools.partial(measure, loader) for who, loader in (ways | peers).items()}
            found = rounds(jobs, options.rounds)
            for way in ways:
                beside = {OURS: found[way]} | {who: found[who] for who in peers}
                yield from compared(f"loader.{kind}{way}", "M tokens/s", beside)


def main() -> None:
    parser = arguments(__doc__, corpus=False)
    parser.add_argument("--windows", type=int, default=20_000, help="two batches of 64 at least")
    parser.add_argument("--mb", type=float, default=256, help="of token files")
    parser.add_argument("--documents", type=int, default=3_000_000, help="whose order is started")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.windows < 2 * BATCH_WINDOWS:
        parser.error(f"--windows must be at least {2 * BATCH_WINDOWS}: the first batch of {BATCH_WINDOWS} is not timed")
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
