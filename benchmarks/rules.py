"""How fast rules are, and how equal to datatrove's: `python benchmarks/rules.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread; the peer
takes turns with us, round after round.

    rules.all        MB/s: every measure of gopher_repetition, gopher_quality, c4 and fineweb on every document of --mb
    rules.chain_all  MB/s of the same stages one after the other, each on what the one before kept
    rules.chain      the same on the documents of --peer-mb, beside datatrove's filters in the same order, its shared
                     token cache on, each document until its first failure
    --differences    instead runs each of datatrove's filters on every document of --peer-mb, and prints the documents
                     on which the decision differs, with both reasons; with --json as one object

To expect on one core of a server of 2024: over 30 MB/s, over 80 times datatrove's chain, no difference in 5,000
documents.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from common import OURS, Figure, arguments, batches, compared, documents, megabytes_of, note, peer, rounds, show, speed

from gristmill.stages.c4 import C4
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import edit, measures, words

STAGES = {  # in FineWeb's order and with its C4
    "gopher_repetition": GopherRepetition(),
    "gopher_quality": GopherQuality(),
    "c4": C4(require_end_punctuation=False),
    "fineweb": FineWeb(),
}


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


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    texts = documents(options.corpus, options.mb * 1e6)
    few = documents(options.corpus, options.peer_mb * 1e6)
    megabytes, some_megabytes = megabytes_of(texts), megabytes_of(few)
    all_, some = batches(texts), batches(few)
    for module in (words, measures, edit):
        module.warm()
    kept = chain(some)
    jobs = {
        "rules.all": speed(megabytes, lambda: measure_everything(all_)),
        "rules.chain_all": speed(megabytes, lambda: chain(all_)),
        OURS: speed(some_megabytes, lambda: chain(some)),
    }
    if datatrove := peer("datatrove", options.skip, needs=["spacy"]):
        filters = datatrove_filters()
        theirs = datatrove_chain(filters, few)  # it loads its tokenizer with the first document
        jobs[datatrove] = speed(some_megabytes, lambda: datatrove_chain(filters, few))
        note(f"rules.chain: of {len(few):,} documents we keep {kept:,}, {datatrove} keeps {theirs:,}.")
    found = rounds(jobs, options.rounds)
    for name in ("rules.all", "rules.chain_all"):
        yield from compared(name, "MB/s", {OURS: found.pop(name)})
    yield from compared("rules.chain", "MB/s", found)


def show_differences(texts: list[str], as_json: bool) -> None:
    found = differences(texts)
    if as_json:
        print(json.dumps({"documents": len(texts), "differences": found}, ensure_ascii=False))
        return
    for name, rows in found.items():
        print(f"{name}: {len(rows)} of {len(texts):,} documents differ ({len(rows) / len(texts):.3%})")
        for row in rows:
            print(f"  {row['document']}: ours {row['ours']}, datatrove {row['datatrove']}: {row['text']!r}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--differences", action="store_true", help="compare decisions instead of speed")
    parser.add_argument("--mb", type=float, default=60, help="of text for us")
    parser.add_argument("--peer-mb", type=float, default=4, help="of text for datatrove")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.differences:
        show_differences(documents(options.corpus, options.peer_mb * 1e6), options.json)
    else:
        show(figures(options), options.json)


if __name__ == "__main__":
    main()
