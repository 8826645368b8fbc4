"""Tokenizing, side by side with the encoders and the pipeline that people use.

    python benchmarks/tokens.py --corpus DIR [--mb 20] [--vocab 32000] [--rounds 3] [--json]

DIR holds *.jsonl.gz with documents {"text", "id", "metadata"}. Every peer gets the same documents and the same
tokenizer (llama3 split, trained on them), cold, in a process of its own on one core; rounds are interleaved, because
shared machines change their speed by the minute. Figures: MB of UTF-8 text a CPU second (best round), tokens a CPU
second, peak memory of the process with the documents in it.

    tokens.encode   gristmill  Encoder.encode: ids proven to stand for the text, nothing written
                    gristmill shards  write_shard: read from Arrow, encoded, checksummed, written, synced
                    gigatoken  the same encoder without checks
                    tokenizers  encode_batch_fast, no parallelism
                    tiktoken   the same merges, encode_ordinary_batch on one thread (where it is installed)
                    datatrove  DocumentTokenizer, one task (where it is installed)
    tokens.train    gristmill  train(): sample, then `tokenizers`
                    tokenizers train_from_iterator on the same documents

Expected: gristmill at least 40 MB/s and 15 times `tokenizers` on one core of a server of 2023; training as fast as
plain `tokenizers`, since the trainer is the same. Ids are the same for all encoders; the script checks their number.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")

GROUP = 512  # documents in a batch


def documents(corpus: Path, megabytes: float) -> list[str]:
    """The first documents of the corpus, in the order of file names, up to a size."""
    texts, left = [], megabytes * 1e6
    for path in sorted(corpus.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                text = json.loads(line)["text"]
                if left <= 0:
                    return texts
                if text:
                    texts.append(text)
                    left -= len(text.encode())
    if not texts:
        raise SystemExit(f"{corpus}: no documents in *.jsonl.gz files.")
    return texts


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

    encoder = gigatoken.Tokenizer.from_json(plain_tokenizer(tokenizer.read_bytes()))
    groups = [texts[i : i + GROUP] for i in range(0, len(texts), GROUP)]
    return lambda: sum(len(encoder.encode_batch(group, parallel=False).layout.content.data) for group in groups)


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


PEERS: dict[str, dict[str, Prepare]] = {
    "tokens.encode": {
        "gristmill": encode_gristmill,
        "gristmill shards": encode_shards,
        "gigatoken": encode_gigatoken,
        "tokenizers": encode_tokenizers,
        "tiktoken": encode_tiktoken,
        "datatrove": encode_datatrove,
    },
    "tokens.train": {"gristmill": train_gristmill, "tokenizers": train_tokenizers},
}


def measure(figure: str, peer: str, corpus: Path, megabytes: float, tokenizer: Path) -> dict[str, Any]:
    """One cold pass in this process."""
    texts = documents(corpus, megabytes)
    size = sum(len(text.encode()) for text in texts)
    count = len(texts)
    run = PEERS[figure][peer](texts, tokenizer)
    before, wall = time.process_time(), time.perf_counter()
    result = run()
    seconds, wall = time.process_time() - before, time.perf_counter() - wall
    return {
        "documents": count,
        "bytes": size,
        "result": result,  # ids, or tokens of the trained vocabulary
        "cpu_s": seconds,
        "wall_s": wall,
        "mb_per_s": size / 1e6 / seconds,
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    """Peak memory of this process. `ru_maxrss` of a child starts at its parent's, so /proc comes first."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(figure: str, peer: str, arguments: argparse.Namespace, tokenizer: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--corpus", str(arguments.corpus), "--mb", str(arguments.mb)]
    command += ["--one", figure, peer, str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{figure} {peer} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def train_once(arguments: argparse.Namespace, folder: Path) -> Path:
    import pyarrow as pa

    from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train

    settings = TokenizerSettings(vocab_size=arguments.vocab, max_bytes=10_000_000)
    tokenizer = train({"docs": [pa.array(documents(arguments.corpus, arguments.mb))]}, settings)
    path = folder / "tokenizer.json"
    path.write_bytes(tokenizer_bytes(tokenizer))
    path.with_suffix(".vocab").write_text(str(arguments.vocab))
    return path


def compare(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """figure -> peer -> the round with the least CPU time, and the speeds of all rounds."""
    out: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_once(arguments, Path(folder))
        for figure, peers in PEERS.items():
            rounds: dict[str, list[dict[str, Any]]] = {}
            for _ in range(arguments.rounds):
                for peer in peers:
                    if peer not in ("tiktoken", "datatrove") or importlib.util.find_spec(peer):
                        rounds.setdefault(peer, []).append(in_own_process(figure, peer, arguments, tokenizer))
            out[figure] = {
                peer: min(results, key=lambda result: float(result["cpu_s"]))
                | {"rounds_mb_per_s": [round(float(result["mb_per_s"]), 2) for result in results]}
                for peer, results in rounds.items()
            }
    counts = {peer: result["result"] for peer, result in out["tokens.encode"].items()}
    if len(set(counts.values())) != 1:
        print(f"The encoders differ in the number of ids: {counts}", file=sys.stderr)
    return out


def table(figures: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = []
    for figure, peers in figures.items():
        base = peers["tokenizers"]["mb_per_s"]
        lines += [figure, f"  {'peer':18}{'MB/s':>9}{'M ids/s':>9}{'x tokenizers':>14}{'peak MB':>9}   rounds, MB/s"]
        for peer, result in peers.items():
            speed = result["result"] / result["cpu_s"] / 1e6 if figure == "tokens.encode" else float("nan")
            lines.append(
                f"  {peer:18}{result['mb_per_s']:9.2f}{speed:9.2f}{result['mb_per_s'] / base:14.1f}"
                f"{result['peak_mb']:9.0f}   {result['rounds_mb_per_s']}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--mb", type=float, default=20, help="MB of text for each peer")
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("FIGURE", "PEER", "TOKENIZER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        figure, peer, tokenizer = arguments.one
        print(json.dumps(measure(figure, peer, arguments.corpus, arguments.mb, Path(tokenizer))))
        return
    figures = compare(arguments)
    print(json.dumps(figures, indent=2) if arguments.json else table(figures))


if __name__ == "__main__":
    main()
