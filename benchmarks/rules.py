"""How fast rules are, and how equal to datatrove's: `python benchmarks/rules.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread; the peer
takes turns with us, round after round, and the medians are printed with the ratio of each round.

    rules.all     MB/s of UTF-8: every measure of gopher_repetition, gopher_quality, c4 and fineweb on every document
    rules.chain   MB/s of the same stages one after the other, each on what the one before kept, beside datatrove's
                  filters in the same order, its shared token cache on, each document until its first failure
    --differences instead runs each of datatrove's filters on every document of --peer-mb, and prints the documents on
                  which the decision differs, with both reasons

To expect on one core of a server of 2024: over 30 MB/s, over 80 times datatrove's chain, no difference in 5,000
documents.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from gristmill.stages.c4 import C4
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import edit, measures, words

BATCH_BYTES = 16 << 20
STAGES = {  # in FineWeb's order and with its C4
    "gopher_repetition": GopherRepetition(),
    "gopher_quality": GopherQuality(),
    "c4": C4(require_end_punctuation=False),
    "fineweb": FineWeb(),
}


def documents(folder: Path, limit_bytes: int) -> list[str]:
    """Texts from DIR, a little of each file in turn, up to limit_bytes of UTF-8."""
    paths = sorted(folder.rglob("*.jsonl.gz"))
    if not paths:
        raise SystemExit(f"{folder} holds no *.jsonl.gz. Name a folder with documents: {{text, id, metadata}}.")
    texts: list[str] = []
    total = 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(gzip.open(path, "rb")) for path in paths]
        while files and total < limit_bytes:
            for file in list(files):
                line = file.readline()
                if not line:
                    files.remove(file)
                    continue
                text = orjson.loads(line)["text"]
                total += len(text.encode())
                texts.append(text)
    return texts


def batches(texts: list[str]) -> list[pa.RecordBatch]:
    """The documents as batches of about 16 MiB."""
    out, start, size = [], 0, 0
    for i, text in enumerate(texts, start=1):
        size += len(text.encode())
        if size >= BATCH_BYTES or i == len(texts):
            ids = [f"{j:08d}" for j in range(start, i)]
            out.append(pa.RecordBatch.from_pydict({"doc_id": ids, "text": pa.array(texts[start:i], pa.string())}))
            start, size = i, 0
    return out


def measure_everything(parts: list[pa.RecordBatch]) -> None:
    for batch in parts:
        measures.forget()
        for stage in STAGES.values():
            if isinstance(stage, C4):
                stage.edit(batch["text"])
            else:
                stage.measure(batch)


def chain(parts: list[pa.RecordBatch]) -> int:
    """Documents kept by all stages."""
    kept = 0
    for part in parts:
        measures.forget()
        batch = part
        for stage in STAGES.values():
            batch = stage(batch).kept
        kept += batch.num_rows
    return kept


def datatrove_filters() -> dict[str, Any]:
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    return {
        "gopher_repetition": GopherRepetitionFilter(),
        "gopher_quality": GopherQualityFilter(),
        "c4": C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": FineWebQualityFilter(),
    }


def datatrove_chain(filters: dict[str, Any], texts: list[str]) -> int:
    from datatrove.data import Document

    kept = 0
    for text in texts:
        document = Document(text=text, id="0")
        kept += all(step.filter(document) is True for step in filters.values())
    return kept


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def compare_speed(texts: list[str], peer_texts: list[str], rounds: int) -> dict[str, float]:
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    peer_megabytes = sum(len(text.encode()) for text in peer_texts) / 1e6
    ours, small, filters = batches(texts), batches(peer_texts), datatrove_filters()
    for module in (words, measures, edit):
        module.warm()
    kept, expected = chain(small), datatrove_chain(filters, peer_texts[:5])
    rows = []
    for _ in range(rounds):
        rows.append(
            (
                megabytes / seconds(lambda: measure_everything(ours)),
                megabytes / seconds(lambda: chain(ours)),
                peer_megabytes / seconds(lambda: chain(small)),
                peer_megabytes / seconds(lambda: datatrove_chain(filters, peer_texts)),
            )
        )
    expected = datatrove_chain(filters, peer_texts)
    return {
        "rules.all MB/s": statistics.median(row[0] for row in rows),
        "rules.chain MB/s": statistics.median(row[1] for row in rows),
        "rules.chain MB/s, peer's documents": statistics.median(row[2] for row in rows),
        "datatrove chain MB/s": statistics.median(row[3] for row in rows),
        "times datatrove, lowest round": min(row[2] / row[3] for row in rows),
        "times datatrove, highest round": max(row[2] / row[3] for row in rows),
        "kept": kept,
        "kept by datatrove": expected,
        "documents": len(peer_texts),
    }


def differences(texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """For each filter the documents on which the decision differs."""
    from datatrove.data import Document

    out: dict[str, list[dict[str, Any]]] = {}
    for name, step in datatrove_filters().items():
        result_of: dict[int, list[str]] = {}
        for batch in batches(texts):
            for row in STAGES[name](batch).dropped.select(["doc_id", "reasons"]).to_pylist():
                result_of[int(row["doc_id"])] = row["reasons"]
        found = out.setdefault(name, [])
        for i, text in enumerate(texts):
            verdict = step.filter(Document(text=text, id="0"))
            if (verdict is not True) != (i in result_of):
                theirs = None if verdict is True else verdict[1]
                found.append({"document": i, "ours": result_of.get(i), "datatrove": theirs, "text": text[:200]})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with *.jsonl.gz")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--differences", action="store_true", help="compare decisions instead of speed")
    parser.add_argument("--mb", type=float, default=60, help="megabytes for us")
    parser.add_argument("--peer-mb", type=float, default=4, help="megabytes for datatrove")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    peer_texts = documents(options.corpus, int(options.peer_mb * 1e6))
    if options.differences:
        found = differences(peer_texts)
        if options.json:
            print(json.dumps({"documents": len(peer_texts), "differences": found}, ensure_ascii=False))
            return
        for name, rows in found.items():
            print(f"{name}: {len(rows)} of {len(peer_texts):,} documents differ ({len(rows) / len(peer_texts):.3%})")
            for row in rows:
                print(f"  {row['document']}: ours {row['ours']}, datatrove {row['datatrove']}: {row['text']!r}")
        return
    figures = compare_speed(documents(options.corpus, int(options.mb * 1e6)), peer_texts, options.rounds)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:36s} {value:10,.2f}")


if __name__ == "__main__":
    main()
