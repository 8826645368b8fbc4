"""Tokenizing, side by side with the encoders and the pipeline that people use.

    python benchmarks/tokens.py --corpus DIR [--mb 20] [--vocab 32000] [--rounds 3] [--json]

DIR holds *.jsonl.gz with documents {"text", "id", "metadata"}. Every peer gets the same documents and the same
tokenizer (llama3 split, trained on them), cold, in a process of its own on one core; rounds are interleaved, because
shared machines change their speed by the minute. Speeds are MB of UTF-8 a CPU second; each figure comes with
`NAME_peak_mb`, the peak memory of the process with the documents in it, and those that encode with `NAME_ids`, in
millions of ids a CPU second.

    tokens.encode   Encoder.encode: ids proven to stand for the text, nothing written; beside
                    gigatoken  the same encoder without checks
                    tokenizers  encode_batch_fast, no parallelism
                    tiktoken   the same merges, encode_ordinary_batch on one thread
                    datatrove  DocumentTokenizer, one task; it cannot encode without writing
    tokens.shards   write_shard: read from Arrow, encoded, checksummed, written, synced; beside
                    datatrove  DocumentTokenizer, one task
    tokens.train    train(): sample, then `tokenizers`; beside
                    tokenizers  train_from_iterator on the same documents

Expected: gristmill at least 40 MB/s and 15 times `tokenizers` on one core of a server of 2023; training as fast as
plain `tokenizers`, since the trainer is the same. Ids are the same for all encoders; the script checks their number.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import (
    OURS,
    Figure,
    arguments,
    compared,
    documents,
    in_own_process,
    megabytes_of,
    note,
    peak_mb,
    peer,
    rounds,
    show,
)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

GROUP = 512  # documents in a batch


def arrow_batches(texts: list[str]) -> list[Any]:
    import pyarrow as pa

    names = ["doc_id", "source", "text"]
    return [
        pa.RecordBatch.from_pydict(
            dict(zip(names, ([str(i) for i in range(low, low + len(part))], ["docs"] * len(part), part), strict=True))
        )
        for low in range(0, len(texts), GROUP)
        for part in [texts[low : low + GROUP]]
    ]


# Each peer gets (texts, path of tokenizer.json) and gives a function to be timed, which gives the number of ids.
Prepare = Callable[[list[str], Path], Callable[[], int]]


def encode_gristmill(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    import pyarrow as pa

    from gristmill.tokenize.encode import Encoder

    batches = arrow_batches(texts)
    warm = Encoder(tokenizer.read_bytes())  # compiles and loads what is compiled once a machine
    warm.encode(pa.array(["warm"]))
    encoder = Encoder(tokenizer.read_bytes(), backend="gigatoken")

    def run() -> int:
        encoder.begin(batches[0]["text"])
        return sum(len(encoder.encode(batch["text"]).ids) for batch in batches)

    return run


def encode_shards(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    from gristmill.tokenize.encode import Encoder
    from gristmill.tokenize.write import write_shard

    batches = arrow_batches(texts)
    with tempfile.TemporaryDirectory() as warm:
        write_shard(arrow_batches(["warm"]), Encoder(tokenizer.read_bytes()), warm, "part-00000", 0.005)
    encoder = Encoder(tokenizer.read_bytes(), backend="gigatoken")

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            infos = write_shard(batches, encoder, folder, "part-00000", 0.005)
        return sum(info.tokens - info.documents for info in infos)

    return run


def encode_gigatoken(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    import gigatoken

    from gristmill.tokenize.tokenizer_json import plain_tokenizer

    plain = plain_tokenizer(tokenizer.read_bytes())

    def count(encoder: gigatoken.Tokenizer, group: list[str]) -> int:
        return len(encoder.encode_batch(group, parallel=False).layout.content.data)

    count(gigatoken.Tokenizer.from_json(plain), ["warm"])  # loads awkward
    encoder = gigatoken.Tokenizer.from_json(plain)
    groups = [texts[i : i + GROUP] for i in range(0, len(texts), GROUP)]
    return lambda: sum(count(encoder, group) for group in groups)


def encode_tokenizers(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    from tokenizers import Tokenizer

    from gristmill.tokenize.tokenizer_json import plain_tokenizer

    encoder = Tokenizer.from_str(plain_tokenizer(tokenizer.read_bytes()).decode())
    groups = [texts[i : i + GROUP] for i in range(0, len(texts), GROUP)]
    return lambda: sum(len(e.ids) for group in groups for e in encoder.encode_batch_fast(group))


def encode_tiktoken(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    import tiktoken

    from gristmill.tokenize.tokenizer_json import token_bytes
    from gristmill.tokenize.train import CL100K_PATTERN

    pieces = token_bytes(tokenizer.read_bytes())
    assert pieces is not None
    ranks = {piece: i for i, piece in enumerate(pieces) if piece}
    encoder = tiktoken.Encoding("trained", pat_str=CL100K_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return lambda: sum(map(len, encoder.encode_ordinary_batch(texts, num_threads=1)))


def encode_datatrove(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    pages = [Document(text=text, id=str(i)) for i, text in enumerate(texts)]

    def run() -> int:
        with tempfile.TemporaryDirectory() as folder:
            step = DocumentTokenizer(
                folder,
                tokenizer_name_or_path=str(tokenizer),
                eos_token="<|endoftext|>",
                shuffle_documents=False,
            )
            step.run(iter(pages), rank=0, world_size=1)
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.ds"))
        return size // 2 - len(texts)

    return run


def train_gristmill(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    import pyarrow as pa

    from gristmill.tokenize.train import TokenizerSettings, train

    arrays = [pa.array(texts[i : i + GROUP]) for i in range(0, len(texts), GROUP)]
    texts.clear()
    settings = TokenizerSettings(vocab_size=_vocab(tokenizer), max_bytes=2_000_000_000, max_chunk_chars=10_000_000)
    return lambda: int(train({"docs": arrays}, settings).get_vocab_size())


def train_tokenizers(texts: list[str], tokenizer: Path) -> Callable[[], int]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from gristmill.tokenize.train import pre_tokenizer

    def run() -> int:
        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizer("llama3", single_digits=False)
        trained.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=_vocab(tokenizer) - 1,
                min_frequency=2,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        return int(trained.get_vocab_size()) + 1

    return run


def _vocab(tokenizer: Path) -> int:
    return int(tokenizer.with_suffix(".vocab").read_text())


PREPARE: dict[str, dict[str, Prepare]] = {
    "tokens.encode": {
        OURS: encode_gristmill,
        "gigatoken": encode_gigatoken,
        "tokenizers": encode_tokenizers,
        "tiktoken": encode_tiktoken,
        "datatrove": encode_datatrove,
    },
    "tokens.shards": {OURS: encode_shards, "datatrove": encode_datatrove},
    "tokens.train": {OURS: train_gristmill, "tokenizers": train_tokenizers},
}


def measure(figure: str, who: str, corpus: Path, megabytes: float, tokenizer: Path) -> tuple[float, float, int, float]:
    """One cold pass in this process: (MB a CPU second, peak MB, ids or tokens of the trained vocabulary, MB)."""
    texts = documents(corpus, megabytes * 1e6)
    size = megabytes_of(texts)
    run = PREPARE[figure][who](texts, tokenizer)
    before = time.process_time()
    result = run()
    return size / (time.process_time() - before), peak_mb(), result, size


def train_once(options: argparse.Namespace, folder: Path) -> Path:
    """The path of a tokenizer trained on the documents."""
    import pyarrow as pa

    from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train

    settings = TokenizerSettings(vocab_size=options.vocab, max_bytes=10_000_000)
    tokenizer = train({"docs": [pa.array(documents(options.corpus, options.mb * 1e6))]}, settings)
    path = folder / "tokenizer.json"
    path.write_bytes(tokenizer_bytes(tokenizer))
    path.with_suffix(".vocab").write_text(str(options.vocab))
    return path


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    labels: dict[str, str | None] = {}  # one line about a peer that does not take part
    ids: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_once(options, Path(folder))
        for figure, prepare in PREPARE.items():
            peaks: dict[str, list[float]] = {}
            rates: dict[str, list[float]] = {}

            def job(
                figure: str, who: str, label: str, peaks: dict[str, list[float]], rates: dict[str, list[float]]
            ) -> float:
                speed, peak_mb, result, size = in_own_process(
                    measure, figure, who, options.corpus, options.mb, tokenizer
                )
                peaks.setdefault(label, []).append(peak_mb)
                if figure != "tokens.train":
                    ids[f"{figure} {label}"] = result
                    rates.setdefault(label, []).append(result / 1e6 * speed / size)
                return speed

            jobs = {}
            for who in prepare:
                if who not in labels:
                    labels[who] = OURS if who == OURS else peer(who, options.skip)
                if label := labels[who]:
                    jobs[label] = functools.partial(job, figure, who, label, peaks, rates)
            yield from compared(figure, "MB/s", rounds(jobs, options.rounds))
            if rates:
                yield from compared(f"{figure}_ids", "M/s", rates)
            yield from compared(f"{figure}_peak_mb", "MB", peaks, smaller_is_better=True)
    if len(set(ids.values())) != 1:
        note(f"The encoders differ in the number of ids: {ids}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=float, default=20, help="of text for each peer")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
