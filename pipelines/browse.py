"""All documents of a run, page by page, straight from its Parquet files: what `gristmill serve` answers with.

    found = page(run, Query(kept=False, wanted=Filter(reason="too_few_words")), None, 20)
    found.documents, found.next            # give `next` as `after` for the following page

Pages follow the files: parts in order, row groups in order, rows in order. A row group has at most 8,192 documents, and
only the columns of the conditions are read of it until rows match. A look ends after `seconds` with what it has found
and the place to go on from, so that a search through a large run never hangs.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.pipelines.inspect import Filter, check_names, document
from gristmill.pipelines.open_run import Run, RunError

MAX_PAGE = 100  # documents
MAX_SORTED = 1_000  # documents that an order by a measure can be leafed through
SECONDS = 3.0  # of one look

Place = tuple[int, int, int]  # part (of those that the query reads), row group, row


@dataclass(frozen=True)
class Query:
    """Which documents. kept: True, False, or None for both, the dropped ones first."""

    kept: bool | None = None
    wanted: Filter = field(default_factory=Filter)
    segment: str | None = None  # kept documents of this one; the last where None


@dataclass(frozen=True)
class Page:
    """documents: as `inspect.document` gives them, with `kept` and `place`."""

    documents: list[dict[str, Any]]
    next: Place | None  # None: nothing is left
    looked_at: int  # documents, for this page
    timed_out: bool = False  # it ended before the page was full


def query(
    run: Run,
    kept: bool | None,
    stage: str | None,
    reason: str | None,
    source: str | None,
    wanted: Filter,
) -> Query:
    """Checks names as `inspect` does, and puts them into the filter. Raises RunError."""
    check_names(run, stage, reason, source, kept is True, wanted.ranges)
    found_in = run.segment_of(stage) if stage is not None else None
    segment = found_in if kept is True else None
    name = stage.partition(" ")[0] if stage is not None and kept is not True else None
    only = False if kept is None and (stage is not None or reason is not None) else kept  # only dropped ones have such
    filled = Filter(name, reason, source, wanted.language, wanted.text, wanted.ranges, wanted.address)
    return Query(only, filled, segment)


def parts_of(run: Run, asked: Query) -> list[str]:
    """The Parquet files that a query reads, in the order of pages."""
    dropped = [] if asked.kept is True else run.parts("dropped")
    kept = [] if asked.kept is False else run.parts("kept", asked.segment)
    return [*dropped, *kept]


def page(run: Run, asked: Query, after: Place | None, n: int, seconds: float = SECONDS) -> Page:
    """Up to n documents behind a place."""
    parts = parts_of(run, asked)
    n, until = min(n, MAX_PAGE), time.monotonic() + seconds
    found: list[dict[str, Any]] = []
    looked_at = 0
    for at, group, rows, size in _matches(run, parts, asked.wanted, after):
        looked_at += size
        room = n - len(found)
        found += _read(run, parts[at], at, group, rows[:room].tolist())
        if len(rows) > room:
            return Page(found, (at, group, int(rows[room]) - 1), looked_at)
        if len(found) == n or time.monotonic() > until:
            following = _behind(run, parts, at, group)
            return Page(found, following, looked_at, following is not None and len(found) < n)
    return Page(found, None, looked_at)


def _behind(run: Run, parts: Sequence[str], at: int, group: int) -> Place | None:
    """The place before the first row of the next row group, in words of `after`."""
    with run.open_parquet(parts[at]) as file:
        if group + 1 < file.num_row_groups:
            return at, group + 1, -1
    return (at + 1, 0, -1) if at + 1 < len(parts) else None


def _matches(
    run: Run, parts: Sequence[str], wanted: Filter, after: Place | None
) -> Iterator[tuple[int, int, np.ndarray, int]]:
    """(part, row group, matching rows (n,) int64, documents looked at) behind a place."""
    first, first_group, first_row = after or (0, 0, -1)
    for at in range(first, len(parts)):
        with run.open_parquet(parts[at]) as file:
            columns = [c for c in file.schema_arrow.names if c in {"doc_id", *wanted.columns()}]
            for group in range(first_group if at == first else 0, file.num_row_groups):
                table = file.read_row_group(group, columns=columns)
                rows = np.flatnonzero(wanted.matches(table))
                if (at, group) == (first, first_group):
                    rows = rows[rows > first_row]
                yield at, group, rows, table.num_rows


def _read(run: Run, part: str, at: int, group: int, rows: list[int]) -> list[dict[str, Any]]:
    if not rows:
        return []
    with run.open_parquet(part) as file:
        found = file.read_row_group(group).take(pa.array(rows)).to_pylist()
    segment, kind, _ = part.split("/")
    return [
        {**document({**row, "segment": segment}), "kept": kind == "kept", "part": part, "place": [at, group, i]}
        for i, row in zip(rows, found, strict=True)
    ]


def ordered(run: Run, asked: Query, measure: str, n: int, skip: int, *, descending: bool) -> Page:
    """Documents by a measure, from the lowest or the highest: `n` behind the first `skip`; MAX_SORTED at most.

    Reads that column of all documents: about a second for a million. `next` counts documents: (0, 0, skip + n).
    """
    n = min(n, MAX_PAGE)
    if skip + n > MAX_SORTED:
        raise RunError(f"An order by a measure shows the first {MAX_SORTED:,} documents. Narrow the range to go on.")
    parts = parts_of(run, asked)
    heap: list[tuple[float, Place]] = []
    looked_at = 0
    for at, part in enumerate(parts):
        with run.open_parquet(part) as file:
            if measure not in file.schema_arrow.names:
                continue
            columns = [c for c in file.schema_arrow.names if c in {measure, *asked.wanted.columns()}]
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=columns)
                looked_at += table.num_rows
                values = table[measure].cast(pa.float64()).to_numpy()
                rows = np.flatnonzero(asked.wanted.matches(table) & ~np.isnan(values))
                keys = values[rows] if descending else -values[rows]
                best = np.argsort(-keys, kind="stable")[: skip + n + 1]
                heap += [(float(keys[i]), (-at, -group, -int(rows[i]))) for i in best]
        heap = heapq.nlargest(skip + n + 1, heap)
    more = len(heap) > skip + n
    found = []
    for _, (at, group, row) in heap[skip : skip + n]:
        found += _read(run, parts[-at], -at, -group, [-row])
    return Page(found, (0, 0, skip + n) if more else None, looked_at)


def count(run: Run, asked: Query, seconds: float = SECONDS) -> tuple[int, bool]:
    """How many documents match, and whether all were looked at in that time."""
    until, total = time.monotonic() + seconds, 0
    for _, _, rows, _ in _matches(run, parts_of(run, asked), asked.wanted, None):
        total += len(rows)
        if time.monotonic() > until:
            return total, False
    return total, True


def document_at(run: Run, part: str, group: int, row: int) -> dict[str, Any]:
    """One document with its whole text. Raises RunError for a place that the run does not have."""
    known = part.split("/")
    if len(known) == 3 and known[1] in ("kept", "dropped") and part in run.parts(known[1], known[0]):
        with run.open_parquet(part) as file:
            if 0 <= group < file.num_row_groups and 0 <= row < file.metadata.row_group(group).num_rows:
                return _read(run, part, 0, group, [row])[0]
    raise RunError("This run has no document at that place. It may have been made anew: load the page again.")
