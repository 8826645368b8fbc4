"""Duplicates, looked at: which source copies which, and some pairs with their differences marked.

A dropped duplicate names the document that stays in its place (`<stage>.cluster`). A doc_id is unique within its shard
only, so a name that several documents have is counted as unknown, never guessed.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.inspect import Filter, pick
from gristmill.pipelines.open_run import Run

LIMIT = 1_000_000  # documents that may be searched for those that stay; above it there are no pairs and no matrix
CLUSTERS = 6  # biggest ones, with two copies each
PAIRS = 6  # of other clusters
DIFF_TOKENS = 700  # of each text; the comparison takes the product of both
CONTEXT_CHARS = 120  # of equal text on each side of a difference
UNKNOWN = "unknown"
PIECES = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True)
class Duplicates:
    """matrix: rows (source of the copy, source of the document that stays, copies); dumps: the same of dumps; pairs: as
    `pair` gives them, with the `size` of their cluster, those of the biggest clusters first."""

    matrix: list[tuple[str, str, int]]
    pairs: list[dict[str, Any]]
    dumps: list[tuple[str, str, int]] = field(default_factory=list)
    skipped: int = 0  # documents in the segment, where they are too many to look at


def duplicates(run: Run, segment: str, stage: str) -> Duplicates:
    """What the global stage that begins a segment removed. Empty where it removed nothing."""
    book = run.stages().get(stage)
    if book is not None and book.read.documents > LIMIT:
        return Duplicates([], [], skipped=book.read.documents)
    copies = run.dropped(segment)
    column = f"{stage}.cluster"
    if column not in copies.schema.names:
        return Duplicates([], [])
    where = [name for name in ("source", "dump") if name in copies.schema.names]
    table = copies.to_table(columns=["doc_id", *where, "stage", column])
    is_copy = pc.equal(table["stage"], stage)
    removed = table.filter(is_copy)
    kept = run.kept(segment)
    where = [name for name in where if name in kept.schema.names]
    staying = pa.concat_tables(
        [
            kept.to_table(columns=["doc_id", *where]),
            table.filter(pc.invert(is_copy)).select(["doc_id", *where]),  # dropped by a later stage of the segment
        ],
        promote_options="permissive",
    )
    counts = pc.value_counts(staying["doc_id"])
    known = counts.field("values").filter(pc.equal(counts.field("counts"), 1))
    staying = staying.filter(pc.is_in(staying["doc_id"], value_set=known))
    dumps = _matrix(removed, staying, column, "dump") if "dump" in where else []
    return Duplicates(
        _matrix(removed, staying, column, "source"),
        _pairs(run, segment, stage, known, removed[column]),
        dumps if len(dumps) > 1 else [],
    )


def _matrix(removed: pa.Table, staying: pa.Table, column: str, what: str) -> list[tuple[str, str, int]]:
    if not removed.num_rows:
        return []
    at = pc.index_in(removed[column], value_set=staying["doc_id"].combine_chunks())
    stays = pc.fill_null(staying[what].combine_chunks().take(at.combine_chunks()), UNKNOWN)
    pairs = (
        pa.table({"copy": pc.fill_null(removed[what], UNKNOWN), "stays": stays})
        .group_by(["copy", "stays"])
        .aggregate([([], "count_all")])
    )
    return sorted((row["copy"], row["stays"], row["count_all"]) for row in pairs.to_pylist())


def _pairs(run: Run, segment: str, stage: str, known: pa.Array, clusters: pa.ChunkedArray) -> list[dict[str, Any]]:
    """Two copies of each of the biggest clusters, and some of others."""
    label = f"{stage}.cluster"
    counts = pc.value_counts(clusters)
    counts = counts.filter(pc.is_in(counts.field("values"), value_set=known))
    ranked = sorted(counts.to_pylist(), key=lambda c: (-c["counts"], c["values"]))
    sizes = {c["values"]: c["counts"] + 1 for c in ranked}
    biggest = {c["values"] for c in ranked[:CLUSTERS]}

    def group(table: pa.Table) -> list[str]:
        names = table[label].to_pylist()
        return [name if name in biggest else "" if name in sizes else UNKNOWN for name in names]

    chosen = pick(run, run.parts("dropped", segment), Filter(stage=stage), PAIRS, 0, group, columns=[label])
    chosen = [row for row in chosen if row[label] in sizes and (row["rank"] < 2 or row[label] not in biggest)]
    _add_texts(run, segment, chosen)
    staying = _find(run, segment, {row[label] for row in chosen})
    found = [
        {**pair(row, staying[row[label]]), "size": sizes[row[label]]}
        for row in chosen
        if row[label] in staying and row.get("text")
    ]
    return sorted(found, key=lambda p: (p["stays"] not in biggest, -p["size"], p["stays"], p["same"], p["copy"]))


def _add_texts(run: Run, segment: str, rows: list[dict[str, Any]]) -> None:
    """A dropped document whose text was not sampled still has it in the segment before."""
    at = run.segments.index(segment)
    for row in rows:
        before = f"{run.segments[at - 1]}/kept/{row['part'].rsplit('/', 1)[-1]}"
        if row.get("text") is None and at and before in run.parts("kept", run.segments[at - 1]):
            for found in run.rows_by_id(before, pa.array([row["doc_id"]], pa.string()), ("doc_id", "text")):
                row["text"] = found["text"][0].as_py()


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
