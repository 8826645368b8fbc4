"""What the benchmarks share: documents, rounds in turns, and one form of figures.

    python benchmarks/NAME.py --corpus DIR [--json]

With --json a benchmark prints one line of JSON a figure and peer:

    {"bench": "dedupe.signatures", "value": 231.0, "unit": "MB/s",
     "peer": "datatrove 0.10.1", "peer_value": 0.6, "ratio": 385.0}

`value` is ours, the median of the rounds; `peer` is a package and its installed version; `ratio` is the median of the
ratios of each round, because a shared machine changes its speed from one round to the next: how many times better we
are, so `value / peer_value` of speeds and `peer_value / value` of seconds and memory. The keys of the peer are null
where a figure has none. Without --json the same rows come as a table. Everything else goes to standard error.

MB is a million bytes of UTF-8.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

if TYPE_CHECKING:
    import pyarrow as pa  # imported where it is used: a peer's memory is measured without it

Item = TypeVar("Item")
OURS = "gristmill"
BATCH_BYTES = 16 << 20  # as a run cuts its batches


@dataclass(frozen=True)
class Figure:
    """One row: what we reach in `unit`, beside one peer or none."""

    bench: str
    value: float
    unit: str
    peer: str | None = None  # package and version
    peer_value: float | None = None
    ratio: float | None = None  # how many times better we are, median of the rounds


def arguments(doc: str | None, *, corpus: bool = True, peers: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has. Without `corpus` the folder is accepted and not used."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    use = "folder of *.jsonl.gz with {text, id, metadata}" if corpus else "ignored: this benchmark makes its own data"
    parser.add_argument("--corpus", type=Path, required=corpus, metavar="DIR", help=use)
    parser.add_argument("--json", action="store_true", help="one line of JSON a figure and peer instead of a table")
    if peers:
        parser.add_argument("--skip", nargs="*", default=[], metavar="PEER", help="peers to leave out, by package")
    return parser


def every_document(folder: Path) -> Iterator[str]:
    """Texts of the folder, one of each file in turn. Empty texts are left out."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(gzip.open(path, "rb")) for path in sorted(folder.rglob("*.jsonl.gz"))}
        while files:
            for path, file in list(files.items()):
                line = file.readline()
                if not line:
                    del files[path]
                elif text := text_of(line, path):
                    yield text


def documents(folder: Path, limit_bytes: float) -> list[str]:
    """`every_document` of the folder until they hold limit_bytes of UTF-8."""
    texts: list[str] = []
    total = 0
    for text in every_document(folder):
        texts.append(text)
        total += len(text.encode())
        if total >= limit_bytes:
            break
    if not texts:
        raise SystemExit(
            f"{folder} holds no documents in *.jsonl.gz. Give --corpus a folder with lines of {{text, id, metadata}}."
        )
    return texts


def text_of(line: bytes, path: Path) -> str:
    try:
        text = orjson.loads(line)["text"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise SystemExit(f"{path} has a line that is no document {{text, id, metadata}}: {line[:80]!r}")
    return text


def megabytes_of(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def batches(texts: list[str], batch_bytes: int = BATCH_BYTES) -> list[pa.RecordBatch]:
    """The documents as batches of about `batch_bytes`, numbered from 0 in doc_id."""
    import pyarrow as pa

    out, start, size = [], 0, 0
    for end, text in enumerate(texts, start=1):
        size += len(text.encode())
        if size >= batch_bytes or end == len(texts):
            columns = {
                "doc_id": pa.array([f"{i:08d}" for i in range(start, end)]),
                "source": pa.array(["corpus"] * (end - start)),
                "dump": pa.nulls(end - start, pa.string()),
                "text": pa.array(texts[start:end], pa.string()),
            }
            out.append(pa.RecordBatch.from_pydict(columns))
            start, size = end, 0
    return out


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def with_progress(items: Sequence[Item], what: str, every: int) -> Iterator[Item]:
    """The items, with a line on standard error after each `every` of them."""
    for i, item in enumerate(items):
        if i and i % every == 0:
            note(f"{i:,} of {len(items):,} {what}")
        yield item


def peer(package: str, skip: Iterable[str] = (), *, needs: Iterable[str] = (), at: str | None = None) -> str | None:
    """`package` and its version; or None, with a line on standard error, where it cannot or shall not take part.

    `needs` names packages without which it does not run; `at` is the version of what comes with no package.
    """
    if package in skip:
        note(f"{package} is skipped, as --skip asks.")
        return None
    for name in ([] if at else [package]) + list(needs):
        try:
            version(name)
        except PackageNotFoundError:
            of = "" if name == package else f" {name}, which it needs,"
            note(f"{package} is skipped:{of or ' it'} is not installed.")
            return None
    return f"{package} {at or version(package)}"


def speed(
    amount: float, work: Callable[[], object], clock: Callable[[], float] = time.thread_time
) -> Callable[[], float]:
    """A function that does the work once and gives `amount` a second of the clock."""

    def run() -> float:
        start = clock()
        work()
        return amount / (clock() - start)

    return run


def rounds(jobs: Mapping[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """What each job gives in each round. The jobs take turns."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(count):
        for name, job in jobs.items():
            found[name].append(job())
    return found


def ratio(ours: list[float], theirs: list[float], *, smaller_is_better: bool = False) -> float:
    """Median over the rounds of how many times better ours is."""
    pairs = zip(theirs, ours, strict=True) if smaller_is_better else zip(ours, theirs, strict=True)
    return statistics.median(a / b for a, b in pairs)


def compared(
    bench: str, unit: str, found: Mapping[str, list[float]], *, smaller_is_better: bool = False
) -> Iterator[Figure]:
    """found: OURS and peers -> the rounds' values. One figure a peer; one without a peer where there is none."""
    ours = found[OURS]
    value = statistics.median(ours)
    peers = {name: values for name, values in found.items() if name != OURS}
    for name, values in peers.items():
        times = ratio(ours, values, smaller_is_better=smaller_is_better)
        yield Figure(bench, value, unit, name, statistics.median(values), times)
    if not peers:
        yield Figure(bench, value, unit)


@contextlib.contextmanager
def in_peer_python(
    option: str, python: Path, script: str, texts: list[str], *more: str
) -> Iterator[tuple[str | None, Callable[[], float]]]:
    """(its version, a function that does its work on the texts once and gives its CPU seconds), of a peer that another
    interpreter has: `script`, a file beside this one, is run by it in a process of its own, with a file of JSON
    strings, one text a line, and `more`. It answers {"version": ...} when it is ready, null where it lacks the peer,
    and each line of its standard input with {"seconds": ...}.

    option: what named the interpreter. Raises SystemExit where it does not start, or ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        command = [str(python), str(Path(__file__).parent / script), str(path), *more]
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise SystemExit(f"{python} of {option} cannot be run ({error}).") from error
        with process:
            assert process.stdin
            assert process.stdout

            def answer() -> dict[str, Any]:
                line = process.stdout.readline()  # type: ignore[union-attr]
                if not line:
                    what = more[0] if more else script.removeprefix("peer_").removesuffix(".py")
                    raise SystemExit(f"{python} of {option} ended. Does it have {what}? See {script}.")
                found: dict[str, Any] = json.loads(line)
                return found

            def work() -> float:
                process.stdin.write("again\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                return float(answer()["seconds"])

            yield answer()["version"], work
            process.stdin.close()


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Holds this process, and those that it starts, on one core, so that all peers have the same one."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def in_own_process(function: Callable[..., Any], *parameters: Any) -> Any:
    """The function's result from a fresh process: nothing loaded, nothing of ours in its memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *parameters).result()


def peak_mb() -> float:
    """Peak memory of this process. `ru_maxrss` of a child starts at its parent's, so /proc comes first."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(figures: Iterable[Figure], as_json: bool) -> None:
    """Prints each figure when it comes."""
    if not as_json:
        print(f"{'figure':28}{'ours':>12} {'unit':12}{'peer':28}{'its':>12}{'times':>9}", flush=True)
    for figure in figures:
        if as_json:
            row = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in asdict(figure).items()}
            print(json.dumps(row), flush=True)
            continue
        line = f"{figure.bench:28}{figure.value:12,.2f} {figure.unit:12}"
        if figure.peer is not None:
            line += f"{figure.peer:28}{figure.peer_value:12,.2f}{figure.ratio:9,.2f}"
        print(line.rstrip(), flush=True)
