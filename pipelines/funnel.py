"""What was left of the input after each stage: the funnel of the report, the terminal and the data cards.

for row in funnel(open_run("out/demo/run")): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gristmill.pipelines.open_run import Run, share
from gristmill.stages.ledger import Amount, StageLedger


@dataclass(frozen=True)
class FunnelRow:
    """What was left after a stage. The first row of a source, `input`, is what was there to read.

    A stage that only some sources pass leaves the others as they were: `documents` to `tokens` count them as well.
    """

    stage: str
    segment: str
    source: str | None  # None: all sources
    documents: int
    chars: int
    bytes: int
    tokens: int
    dropped: int  # documents, by rules
    failed: int  # documents, by errors
    held_out: int  # documents that `tokenize` keeps apart from training; not lost, and not in `dropped`
    stage_share: float  # kept by the stage, of the documents that it read, 0 to 1
    kept_share: float  # left, of the documents of the input, 0 to 1
    seconds: float  # of workers, summed


INPUT = "input"
HELD_OUT = "holdout"  # the reason under which `tokenize` books held-out documents


def funnel(run: Run, sources: bool = True) -> list[FunnelRow]:
    """One row a stage for all sources together, then for each source. Empty for a run without ledgers."""
    books = {source: run.stages(source) for source in run.sources}
    rows = _funnel(run, run.stages(), books, None)
    for source in run.sources if sources else ():
        rows += _funnel(run, books[source], {source: books[source]}, source)
    return rows


def _funnel(
    run: Run, labels: Mapping[str, StageLedger], by_source: Mapping[str, Mapping[str, StageLedger]], source: str | None
) -> list[FunnelRow]:
    if not labels:
        return []
    left = {name: next(iter(books.values())).read for name, books in by_source.items() if books}
    start = _total(left)
    rows = [_row(INPUT, "", source, start, StageLedger(stage=INPUT, read=start, kept=start), start)]
    for label, book in labels.items():
        left |= {name: books[label].kept for name, books in by_source.items() if label in books}
        rows.append(_row(label, run.segment_of(label), source, _total(left), book, start))
    return rows


def _row(stage: str, segment: str, source: str | None, left: Amount, book: StageLedger, start: Amount) -> FunnelRow:
    return FunnelRow(
        stage,
        segment,
        source,
        **left.model_dump(),
        dropped=sum(amount.documents for reason, amount in book.dropped.items() if reason != HELD_OUT),
        held_out=book.dropped.get(HELD_OUT, Amount()).documents,
        failed=sum(amount.documents for amount in book.failed.values()),
        stage_share=share(book.kept.documents, book.read.documents),
        kept_share=share(left.documents, start.documents),
        seconds=book.seconds,
    )


def _total(amounts: Mapping[str, Amount]) -> Amount:
    total = Amount()
    for amount in amounts.values():
        total = total + amount
    return total
