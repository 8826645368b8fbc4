"""Looks at documents of a run: what was dropped, why, and what was kept. `gristmill inspect` and the report use it.

    inspect(open_run("out/demo/run"), reason="too_few_words", n=3)

A choice of n documents is fair and repeatable: the n whose hash of (seed, source, doc_id) is lowest, whatever the
number of shards, batches or workers. Dropped documents keep their text for a sample of each reason only, so those that
have it come first.
"""

from __future__ import annotations

import difflib
import heapq
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gristmill.pipelines.open_run import Run, RunError
from gristmill.stages.documents import BASE_FIELDS

NOT_MEASURES = {*BASE_FIELDS, "text", "html", "language", "stage", "reasons", "chars", "bytes"}


@dataclass(frozen=True)
class Range:
    """A condition on a measure: from `low` to `high`, both inclusive; None leaves a side open."""

    measure: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def parse(cls, text: str) -> Range:
        """`gopher_quality.words=10:50`, `...=10:` or `...=:50`. Raises RunError."""
        measure, equals, bounds = text.partition("=")
        low, colon, high = bounds.partition(":")
        try:
            if not (measure and equals and colon):
                raise ValueError(text)
            return cls(measure, *(float(bound) if bound.strip() else None for bound in (low, high)))
        except ValueError:
            raise RunError(
                f"{text!r} is no range of a measure. Write NAME=LOW:HIGH, for example gopher_quality.words=10:50; "
                "a side may be left out."
            ) from None

    def passes(self, values: np.ndarray) -> np.ndarray:
        """values (n,) float64 -> (n,) bool. A document without a value does not pass."""
        rows = ~np.isnan(values)
        if self.low is not None:
            rows &= values >= self.low
        if self.high is not None:
            rows &= values <= self.high
        return rows


@dataclass(frozen=True)
class Filter:
    """Which documents to look at. None asks for no condition."""

    stage: str | None = None  # that dropped it
    reason: str | None = None  # any of its reasons, not only the first
    source: str | None = None
    language: str | None = None
    text: str | None = None  # words in the text, whatever their case
    ranges: tuple[Range, ...] = ()
    address: bool = False  # the words of `text` may stand in the address as well

    def columns(self) -> list[str]:
        """Columns that the conditions read."""
        asked = {
            "stage": self.stage,
            "reasons": self.reason,
            "source": self.source,
            "language": self.language,
            "text": self.text,
        }
        names = [name for name, wanted in asked.items() if wanted is not None]
        return [*names, *(["url"] if self.text is not None and self.address else []), *(r.measure for r in self.ranges)]

    def matches(self, table: pa.Table) -> np.ndarray:
        """Rows of the table -> (n,) bool. A column that the table lacks matches nothing."""
        rows = np.ones(table.num_rows, dtype=bool)
        for name, wanted in (("stage", self.stage), ("source", self.source), ("language", self.language)):
            if wanted is not None:
                rows &= _bool(pc.equal(table[name], wanted)) if name in table.schema.names else False
        if self.reason is not None:
            rows &= _has_reason(table, self.reason)
        if self.text is not None:
            rows &= self._has_text(table)
        for wanted_range in self.ranges:
            if wanted_range.measure in table.schema.names:
                values = table[wanted_range.measure].cast(pa.float64()).to_numpy()
                rows &= wanted_range.passes(np.asarray(values, np.float64))
            else:
                rows[:] = False
        return rows

    def _has_text(self, table: pa.Table) -> np.ndarray:
        rows = np.zeros(table.num_rows, dtype=bool)
        for name in ("text", "url") if self.address else ("text",):
            if name in table.schema.names:
                rows |= _bool(pc.match_substring(table[name], self.text, ignore_case=True))
        return rows


def inspect(
    run: Run,
    stage: str | None = None,
    reason: str | None = None,
    source: str | None = None,
    kept: bool = False,
    text: str | None = None,
    n: int = 10,
    seed: int = 0,
    *,
    language: str | None = None,
    ranges: Sequence[Range] = (),
) -> list[dict[str, Any]]:
    """Up to n documents, ready for JSON: doc_id, source, url, stage, reasons, chars, bytes, measures, text and so on.

    Dropped documents by default; with `kept`, those that the last segment kept, or the segment of `stage`. `text` is
    None where a dropped document's text was not sampled. Raises RunError for a stage, reason, source or measure that
    the run does not have.
    """
    if n < 1:
        raise RunError(f"n is {n}; ask for 1 document or more.")
    check_names(run, stage, reason, source, kept, ranges)
    segment = run.segment_of(stage) if stage is not None else None
    name = stage.partition(" ")[0] if stage is not None and not kept else None  # the label may name a segment as well
    wanted = Filter(name, reason, source, language, text, tuple(ranges))
    parts = run.parts("kept" if kept else "dropped", segment)
    return [document(row) for row in pick(run, parts, wanted, n, seed)]


def pick(
    run: Run,
    parts: Sequence[str],
    wanted: Filter,
    n: int,
    seed: int,
    group_of: Callable[[pa.Table], Sequence[Any]] | None = None,
    row_groups: int | None = None,
    columns: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Rows of Parquet files that match: the n with the lowest hash, of each group if `group_of` gives one a row.

    Only columns with conditions are read in the first pass, and only the row groups of the chosen rows in the second.
    Rows come with the `segment` and `part` that they are from and their `rank` in their group, lowest first.
    row_groups: how many row groups of each file to look into, spread evenly; None reads all. columns: that `group_of`
    needs beside source, stage and reasons.
    """
    heaps: dict[Any, list[tuple[bool, int, int, int, int]]] = {}  # negated key, then where: part, row group, row
    for at, part in enumerate(parts):
        with run.open_parquet(part) as file:
            names = file.schema_arrow.names
            dropped = "reasons" in names
            read = {"doc_id", "source", *columns, *wanted.columns()}
            read |= {"stage", "reasons", "text"} if dropped else set()
            for group in spread(file.num_row_groups, row_groups):
                table = file.read_row_group(group, columns=[c for c in names if c in read])
                rows = np.flatnonzero(wanted.matches(table))
                table = table.take(pa.array(rows))
                silent = pc.is_null(table["text"]).to_pylist() if dropped else [False] * len(rows)
                keys = _keys(table, seed)
                groups = group_of(table) if group_of else [None] * len(rows)
                for row, key, quiet, bucket in zip(rows, keys, silent, groups, strict=True):
                    heap = heaps.setdefault(bucket, [])
                    entry = (not quiet, -key, at, group, int(row))
                    if len(heap) < n:
                        heapq.heappush(heap, entry)
                    elif entry > heap[0]:
                        heapq.heapreplace(heap, entry)
    chosen = [(entry, rank) for heap in heaps.values() for rank, entry in enumerate(sorted(heap, reverse=True))]
    return _rows(run, parts, chosen)


def _rows(
    run: Run, parts: Sequence[str], chosen: Sequence[tuple[tuple[bool, int, int, int, int], int]]
) -> list[dict[str, Any]]:
    """The chosen rows, with `segment` and `rank` (in their group, from 0), in order of rank, then of key."""
    places: dict[int, dict[int, list[tuple[Any, int]]]] = {}
    for entry, rank in chosen:
        loud, key, at, group, row = entry
        places.setdefault(at, {}).setdefault(group, []).append(((rank, not loud, -key), row))
    out = []
    for at, by_group in sorted(places.items()):
        with run.open_parquet(parts[at]) as file:
            for group, wanted in sorted(by_group.items()):
                rows = [row for _, row in wanted]
                found = file.read_row_group(group).take(pa.array(rows)).to_pylist()
                segment = parts[at].partition("/")[0]
                for (order, _), row_found in zip(wanted, found, strict=True):
                    out.append((order, {**row_found, "segment": segment, "part": parts[at], "rank": order[0]}))
    return [row for _, row in sorted(out, key=lambda pair: pair[0])]


def document(row: dict[str, Any]) -> dict[str, Any]:
    """A row of kept or dropped -> what a person wants to see of it; measures under one key, NaN as None.

    `labels` are other columns of stages, such as the document that a duplicate is a copy of.
    """
    measures = {
        name: None if value is None or not math.isfinite(value) else float(value)
        for name, value in row.items()
        if name not in NOT_MEASURES and isinstance(value, float)
    }
    labels = {
        name: value
        for name, value in row.items()
        if "." in name and name not in measures and isinstance(value, str | int) and not isinstance(value, bool)
    }
    text = row.get("text")
    chars, size = row.get("chars"), row.get("bytes")
    return {
        "doc_id": row.get("doc_id"),
        "source": row.get("source"),
        "url": row.get("url"),
        "dump": row.get("dump"),
        "date": row.get("date"),
        "segment": row.get("segment"),
        "position": row.get("position"),
        "stage": row.get("stage"),
        "reasons": list(row.get("reasons") or []),
        "language": row.get("language"),
        "chars": chars if chars is not None or text is None else len(text),
        "bytes": size if size is not None or text is None else len(text.encode()),
        "measures": measures,
        "labels": labels,
        "text": text,
    }


def spread(count: int, limit: int | None) -> list[int]:
    """Up to `limit` of the numbers 0 to count - 1, evenly spread."""
    if limit is None or count <= limit:
        return list(range(count))
    return [(2 * i + 1) * count // (2 * limit) for i in range(limit)]


def check_names(
    run: Run,
    stage: str | None,
    reason: str | None,
    source: str | None,
    kept: bool,
    ranges: Sequence[Range] = (),
) -> None:
    """Raises RunError for a name that the run does not have, with those that it has."""
    for wanted in ranges:
        if wanted.measure not in run.measures:
            near = difflib.get_close_matches(wanted.measure, run.measures, 3, 0.5) or list(run.measures)
            raise RunError(f"This run has no measure {wanted.measure!r}. It has: {', '.join(near) or 'none'}.")
    if source is not None and source not in run.sources:
        raise RunError(f"This run has no source {source!r}. It has: {', '.join(run.sources) or 'none'}.")
    if reason is None:
        return
    if kept:
        raise RunError("A kept document has no reason. Ask for a reason, or for kept documents.")
    books = run.stages()
    chosen = [books[stage]] if stage in books else list(books.values())
    known = {r for book in chosen for r in book.dropped}
    known |= {c.partition(".")[2] for book in chosen for c in book.counters if c.startswith("rule.")}
    if reason not in known:
        where = f"Stage {stage}" if stage else "This run"
        raise RunError(f"{where} drops nothing for {reason!r}. Reasons: {', '.join(sorted(known)) or 'none'}.")


def _keys(table: pa.Table, seed: int) -> list[int]:
    sources, ids = table["source"].to_pylist(), table["doc_id"].to_pylist()
    return [xxhash.xxh3_64_intdigest(f"{seed}\0{s}\0{d}") for s, d in zip(sources, ids, strict=True)]


def _bool(array: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(pc.fill_null(array, False).to_numpy(), dtype=bool)


def _has_reason(table: pa.Table, reason: str) -> np.ndarray:
    rows = np.zeros(table.num_rows, dtype=bool)
    if "reasons" in table.schema.names and table.num_rows:
        lists = table["reasons"].combine_chunks()
        parents = pc.list_parent_indices(lists).to_numpy()
        rows[parents[pc.equal(pc.list_flatten(lists), reason).to_numpy(zero_copy_only=False)]] = True
    return rows


# In a terminal


def visible(text: str) -> str:
    """Text that a terminal cannot take for commands: control and direction-changing characters are spelt out."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else _spelt(c) for c in text)


def _spelt(character: str) -> str:
    joiners = "\u200c\u200d"  # shape letters of Persian, Indic scripts and emoji; harmless
    return character if character in joiners else f"<U+{ord(character):04X}>"


def render(documents: Iterable[dict[str, Any]], console: Console, max_chars: int | None = 2_000) -> None:
    """Prints documents as panels. max_chars: of each text; None prints all of it."""
    shown = 0
    for shown, found in enumerate(documents, 1):  # noqa: B007
        console.print(panel(found, max_chars))
    if not shown:
        console.print("No document matches. Take a condition away, or see the reasons in `gristmill report`.")


def panel(found: dict[str, Any], max_chars: int | None = 2_000) -> Panel:
    """One document: who and where, why it was dropped, its measures, its text."""
    parts: list[Any] = [_facts(found)]
    if own := own_measures(found):
        parts.append(_measures(own))
    parts.append(Text())
    text = found["text"]
    if text is None:
        parts.append(Text("(The text was not kept: only a sample for each reason keeps it.)", style="dim italic"))
    else:
        cut = text if max_chars is None else text[:max_chars]
        parts.append(Text(visible(cut)))
        if len(cut) < len(text):
            parts.append(Text(f"... {len(text) - len(cut):,} more characters", style="dim italic"))
    reasons = ", ".join(found["reasons"])
    title = Text(
        visible(f"{found['stage']}: {reasons}") if reasons else "kept", style="bold red" if reasons else "bold green"
    )
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def own_measures(found: dict[str, Any]) -> dict[str, float | None]:
    """The measures of the stage that dropped a document: what speaks for the reason. All of them for a kept one."""
    prefix = (
        f"{found['stage']}".rpartition(".")[2] + "."
    )  # of a use with columns of its own their name: documents.heading
    own = {name: value for name, value in found["measures"].items() if name.startswith(prefix)}
    return own or found["measures"]


def _facts(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    size = f"{found['chars']:,} characters, {found['bytes']:,} bytes" if found["chars"] is not None else None
    facts = {key: found[key] for key in ("doc_id", "source", "url", "dump", "date", "language")} | {"size": size}
    facts |= found["labels"]
    for name, value in facts.items():
        if value is not None:
            table.add_row(Text(name, style="dim"), Text(visible(str(value))))
    return table


def _measures(measures: dict[str, float | None]) -> Text:
    pairs = [f"{name} {'-' if value is None else format(value, ',.6g')}" for name, value in measures.items()]
    return Text(visible("   ".join(pairs)), style="cyan")


def as_json_lines(documents: Iterable[dict[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(found, ensure_ascii=False) + "\n" for found in documents)
