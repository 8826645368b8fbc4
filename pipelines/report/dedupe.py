"""Duplicates, looked at: which source copies which, and some pairs with their differences marked.

A dropped duplicate names the document that stays in its place (`<stage>.cluster`). A doc_id is unique within its shard
only, so a name that several documents have is counted as unknown, never guessed.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.inspect import Filter, pick
from gristmill.pipelines.open_run import Run

LIMIT = 1_000_000  # documents that may be searched for those that stay; above it there are no pairs and no matrix
PAIRS = 8  # shown for each stage
DIFF_TOKENS = 700  # of each text; the comparison takes the product of both
CONTEXT_CHARS = 120  # of equal text on each side of a difference
UNKNOWN = "unknown"
PIECES = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True)
class Duplicates:
    """matrix: rows (source of the copy, source of the document that stays, copies); pairs: as `pair` gives them."""

    matrix: list[tuple[str, str, int]]
    pairs: list[dict[str, Any]]
    skipped: int = 0  # documents in the segment, where they are too many to look at


def duplicates(run: Run, segment: str, stage: str) -> Duplicates:
    """What the global stage that begins a segment removed. Empty where it removed nothing."""
    copies = run.dropped(segment)
    column = f"{stage}.cluster"
    if column not in copies.schema.names:
        return Duplicates([], [])
    names = ["doc_id", "source", "stage", column]
    rows = copies.count_rows() + run.kept(segment).count_rows()
    if rows > LIMIT:
        return Duplicates([], [], rows)
    table = copies.to_table(columns=names)
    is_copy = pc.equal(table["stage"], stage)
    removed = table.filter(is_copy)
    staying = pa.concat_tables(
        [
            run.kept(segment).to_table(columns=["doc_id", "source"]),
            table.filter(pc.invert(is_copy)).select(["doc_id", "source"]),  # dropped by a later stage of the segment
        ]
    )
    counts = pc.value_counts(staying["doc_id"])
    known = counts.field("values").filter(pc.equal(counts.field("counts"), 1))
    staying = staying.filter(pc.is_in(staying["doc_id"], value_set=known))
    return Duplicates(_matrix(removed, staying, column), _pairs(run, segment, stage, known))


def _matrix(removed: pa.Table, staying: pa.Table, column: str) -> list[tuple[str, str, int]]:
    if not removed.num_rows:
        return []
    at = pc.index_in(removed[column], value_set=staying["doc_id"].combine_chunks())
    source = pc.fill_null(staying["source"].combine_chunks().take(at.combine_chunks()), UNKNOWN)
    pairs = (
        pa.table({"copy": removed["source"], "stays": source})
        .group_by(["copy", "stays"])
        .aggregate([([], "count_all")])
    )
    return sorted((row["copy"], row["stays"], row["count_all"]) for row in pairs.to_pylist())


def _pairs(run: Run, segment: str, stage: str, known: pa.Array) -> list[dict[str, Any]]:
    chosen = pick(run, run.parts("dropped", segment), Filter(stage=stage), 3 * PAIRS, 0)
    label = f"{stage}.cluster"
    wanted = pc.is_in(pa.array([row.get(label) for row in chosen], pa.string()), value_set=known).to_pylist()
    chosen = [row for row, there in zip(chosen, wanted, strict=True) if there and row.get("text")]
    staying = _find(run, segment, {row[label] for row in chosen})
    found = [pair(row, staying[row[label]]) for row in chosen if row[label] in staying]
    return sorted(found, key=lambda p: (p["same"] == 1, p["same"], p["copy"]))[:PAIRS]


def _find(run: Run, segment: str, ids: set[str]) -> dict[str, dict[str, Any]]:
    """Kept documents by id."""
    out: dict[str, dict[str, Any]] = {}
    value_set = pa.array(sorted(ids), pa.string())
    for part in run.parts("kept", segment) if ids else []:
        for rows in run.rows_by_id(part, value_set, ("doc_id", "source", "url", "text")):
            out |= {row["doc_id"]: row for row in rows.to_pylist()}
    return out


def pair(copy: dict[str, Any], stays: dict[str, Any]) -> dict[str, Any]:
    """Two documents and what differs: `parts` are (kind, text), kind "same", "copy", "stays" or "cut"."""
    one, other = (_pieces(row["text"]) for row in (stays, copy))
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    parts: list[tuple[str, str]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            parts += _shortened("".join(one[a:b]), first=not parts)
            continue
        parts += [(who, "".join(text)) for who, text in (("stays", one[a:b]), ("copy", other[c:d])) if text]
    return {
        "copy": copy["doc_id"],
        "copy_source": copy["source"],
        "copy_url": copy.get("url"),
        "stays": stays["doc_id"],
        "stays_source": stays["source"],
        "stays_url": stays.get("url"),
        "same": matcher.ratio(),
        "parts": parts,
    }


def _pieces(text: str) -> list[str]:
    return PIECES.findall(text[: 20 * DIFF_TOKENS])[:DIFF_TOKENS]


def _shortened(text: str, first: bool) -> list[tuple[str, str]]:
    """Equal text, its middle left out where it is long."""
    if len(text) <= 3 * CONTEXT_CHARS:
        return [("same", text)]
    start = [] if first else [("same", text[:CONTEXT_CHARS])]
    left_out = len(text) - CONTEXT_CHARS * (1 if first else 2)
    return [*start, ("cut", f"{left_out:,} equal characters"), ("same", text[-CONTEXT_CHARS:])]
