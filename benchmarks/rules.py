"""How fast rules are, and how equal to datatrove's: `python benchmarks/rules.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread; the peers
take turns with us, round after round.

    rules.all        MB/s: every measure of gopher_repetition, gopher_quality, c4 and fineweb on every document of --mb;
                     with --dolma-python instead on those of --peer-mb, beside dolma's taggers gopher_v2 and c4_v2
    rules.chain_all  MB/s of the same stages one after the other, each on what the one before kept
    rules.chain      the same on the documents of --peer-mb, beside datatrove's filters in the same order, its shared
                     token cache on, each document until its first failure; and beside dolma's taggers
    rules.language   MB/s of the stage `language` on the documents of --peer-mb, beside datatrove's with the same model
    rules.url        URLs/s of the stage `url` against lists of --list-entries made up domains and URLs, beside
                     datatrove's filter with the same lists
    rules.url_memory MB: the peak of a process that does it, each in its own

    --differences    instead runs each of datatrove's filters on --documents English documents of at most --max-bytes,
                     and prints those on which the decision differs, with both reasons, our measures and what may be
                     behind it; with --json as one object

To expect on one core of a server of 2024: over 30 MB/s, over 80 times datatrove's chain, no difference in 5,000
documents, under 500 MB for 3 million entries.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from common import (
    OURS,
    Figure,
    arguments,
    batches,
    compared,
    documents,
    every_document,
    megabytes_of,
    note,
    peer,
    rounds,
    show,
    speed,
)

# What loads a stage is imported where it is used: a process that measures a peer's memory imports this file.


def rule_figures(options: argparse.Namespace) -> Iterator[Figure]:
    import rules_chain as of

    texts = documents(options.corpus, options.mb * 1e6)
    few = documents(options.corpus, options.peer_mb * 1e6)
    megabytes, some_megabytes = megabytes_of(texts), megabytes_of(few)
    all_, some = batches(texts), batches(few)
    of.warm()
    kept = of.chain(some)
    jobs = {"all": speed(megabytes, lambda: of.measure_everything(all_))}
    jobs["chain_all"] = speed(megabytes, lambda: of.chain(all_))
    jobs["chain"] = speed(some_megabytes, lambda: of.chain(some))
    datatrove = peer("datatrove", options.skip, needs=["spacy"])
    if datatrove:
        filters = of.datatrove_filters()
        theirs = of.datatrove_chain(filters, few)  # it loads its tokenizer with the first document
        jobs[datatrove] = speed(some_megabytes, lambda: of.datatrove_chain(filters, few))
        note(f"rules.chain: of {len(few):,} documents we keep {kept:,}, {datatrove} keeps {theirs:,}.")
    dolma = None
    with ExitStack() as stack:
        if options.dolma_python is None:
            note("dolma is skipped: --dolma-python names no interpreter that has it.")
        else:
            dolma, tag = stack.enter_context(of.dolma_tagger(options.dolma_python, few))
            jobs["all"] = speed(some_megabytes, lambda: of.measure_everything(some))
            jobs[dolma] = lambda: some_megabytes / tag()
        found = rounds(jobs, options.rounds)
    beside_all = {dolma: found[dolma]} if dolma else {}
    beside_chain = {name: found[name] for name in (datatrove, dolma) if name}
    yield from compared("rules.all", "MB/s", {OURS: found["all"], **beside_all})
    yield from compared("rules.chain_all", "MB/s", {OURS: found["chain_all"]})
    yield from compared("rules.chain", "MB/s", {OURS: found["chain"], **beside_chain})


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    import rules_source as of

    with tempfile.TemporaryDirectory() as folder:  # first: a small process is copied faster
        entries, urls = options.list_entries, options.urls
        yield from of.url(Path(folder), entries, urls, max(1, urls // 10), options.rounds, options.skip)
    yield from of.language(documents(options.corpus, options.peer_mb * 1e6), options.rounds, options.skip)
    yield from rule_figures(options)


def show_differences(options: argparse.Namespace) -> None:
    import rules_chain as of

    texts = of.english(every_document(options.corpus), options.documents, options.max_bytes)
    if not texts:
        raise SystemExit(f"{options.corpus} holds no English document of at most {options.max_bytes} bytes.")
    note(f"{len(texts):,} English documents, {megabytes_of(texts):.1f} MB")
    found = of.differences(texts)
    if options.json:
        print(json.dumps({"documents": len(texts), "differences": found}, ensure_ascii=False))
        return
    for name, rows in found.items():
        print(f"{name}: {len(rows)} of {len(texts):,} documents differ ({len(rows) / len(texts):.3%})")
        for row in rows:
            print(f"  {row['document']}: ours {row['ours']}, datatrove {row['datatrove']}; {row['why']}")
            print(f"    {row['measures']}")
            print(f"    {row['text'][:200]!r}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--differences", action="store_true", help="compare decisions instead of speed")
    parser.add_argument("--documents", type=int, default=5_000, help="English ones to compare decisions on")
    parser.add_argument("--max-bytes", type=int, default=10_000, help="of a document to compare decisions on")
    parser.add_argument("--mb", type=float, default=60, help="of text for us")
    parser.add_argument("--peer-mb", type=float, default=4, help="of text for peers")
    parser.add_argument("--list-entries", type=int, default=3_000_000, help="of the lists for the stage url")
    parser.add_argument("--urls", type=int, default=200_000, help="to ask of the lists; peers get a tenth")
    parser.add_argument("--dolma-python", type=Path, metavar="PATH", help="an interpreter that has dolma 1.2.1")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.differences:
        show_differences(options)
    else:
        show(figures(options), options.json)


if __name__ == "__main__":
    main()
