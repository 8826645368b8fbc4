"""How fast repeated spans are found: `python benchmarks/substrings.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread, on one group
of --mb of text with the stage's defaults. No program that does the same comes as a Python package; the one of Lee et
al. is built with Rust from its sources.

    substrings.signatures      MB/s of signing: who each document is, and its size
    substrings.group           MB/s of deciding over a group: texts in order, suffix array, scan, spans
    substrings.suffix_array    MB/s of the suffix array alone, libdivsufsort's
    substrings.scan            MB/s of the scan alone: from the suffix array to the spans
    substrings.scan_repeats    the same on a text that is one long repeat, the worst case
    substrings.edit            MB/s of taking the spans out of the documents
    substrings.memory_per_mb   MB for each MB of text: what a process grows by at its peak while it decides

To expect on one core of a server of 2024: 5 to 10 MB/s for a group, most of it the suffix array, and 5.2 MB a MB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import (
    OURS,
    Figure,
    arguments,
    batches,
    compared,
    documents,
    in_own_process,
    megabytes_of,
    note,
    peak_mb,
    rounds,
    show,
    speed,
)

from gristmill.stages.kernels import substrings as kernels
from gristmill.stages.substrings import Substrings

ONE_GROUP = Substrings(group_bytes=2_000_000_000)


def joined(texts: list[str]) -> np.ndarray:
    """Texts with separators and padding, as the kernels see them."""
    data = b"".join(text.encode() + b"\xff" for text in texts) + bytes(kernels.PADDING)
    return np.frombuffer(data, np.uint8).copy()


def scan(text: np.ndarray, order: np.ndarray, sizes: np.ndarray, length: int) -> int:
    marks = np.zeros((len(order) >> 3) + 1, np.uint8)
    kernels.mark_repeats(text, order, length, marks)
    at, counts, nothing = np.cumsum(sizes + 1) - sizes - 1, np.empty(len(sizes), np.int64), np.empty(0, np.uint32)
    return int(kernels.spans(text, at, sizes, marks, length, counts, nothing, nothing))


def growth_mb(file: str) -> float:
    """What this process grows by while it decides over the documents of an Arrow file as one group."""
    stage = ONE_GROUP
    few = batches(["to compile the kernels"])
    stage.cluster([pa.Table.from_batches([stage.sign(few[0])])], few)
    with pa.OSFile(file) as opened:
        texts = pa.ipc.open_file(opened).read_all().to_batches()
    signed = [pa.Table.from_batches([stage.sign(b) for b in texts])]
    before = _resident_mb()
    stage.cluster(signed, texts)
    return peak_mb() - before


def _resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    from pydivsufsort import divsufsort

    stage = ONE_GROUP
    texts = documents(options.corpus, options.mb * 1e6)
    size, parts = megabytes_of(texts), batches(texts)
    signed = [pa.Table.from_batches([stage.sign(b) for b in parts])]
    (decisions,), counted = stage.cluster(signed, parts)
    note(f"{counted['spans']:,} spans of {counted['spans_bytes'] / 1e6:,.2f} MB in {size:,.1f} MB.")
    text, sizes = joined(texts), np.array([len(text.encode()) for text in texts], np.int64)
    end = len(text) - kernels.PADDING
    order = divsufsort(text[:end])
    same = joined(["a" * (end - 1)])
    ordered, one = divsufsort(same[:end]), np.array([end - 1], np.int64)
    jobs = {
        "signatures": lambda: [stage.sign(b) for b in parts],
        "group": lambda: stage.cluster(signed, parts),
        "suffix_array": lambda: divsufsort(text[:end]),
        "scan": lambda: scan(text, order, sizes, stage.min_bytes),
        "scan_repeats": lambda: scan(same, ordered, one, stage.min_bytes),
        "edit": lambda: [stage.apply(b, decisions) for b in parts],
    }
    for name, work in jobs.items():
        yield from compared(f"substrings.{name}", "MB/s", rounds({OURS: speed(size, work)}, options.rounds))
    if not sys.platform.startswith("linux"):
        note("Memory is read from /proc, which this system lacks.")
        return
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/texts.arrow"
        with pa.OSFile(file, "wb") as opened, pa.ipc.new_file(opened, parts[0].schema) as writer:
            for batch in parts:
                writer.write_batch(batch)
        grown = in_own_process(growth_mb, file) * 2**20 / 1e6
    yield Figure("substrings.memory_per_mb", grown / size, "MB")


def main() -> None:
    parser = arguments(__doc__, peers=False)
    parser.add_argument("--mb", type=float, default=60, help="of text in the group")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
