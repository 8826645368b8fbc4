"""Two runs side by side: what was set differently, what that did to documents, measures and scores.

    found = compare(open_run("out/a"), open_run("out/b"))
    write_comparison("out/a", "out/b", "out/a-b.html")

Documents are matched by source and doc_id, so both runs must have read the same input; the counts say how many matched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.inspect import Filter, document, pick
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.report.ablation import ablation
from gristmill.stages.ledger import Histogram
from gristmill.stages.shards import publish_bytes

LIMIT = 3_000_000  # documents that are matched by id; above it only ledgers are compared
EXAMPLES = 12  # documents kept by one run only
TEXT_CHARS = 1_500
MISSING = "–"


def compare(first: Run, second: Run) -> dict[str, Any]:
    """Everything that differs, as plain data; `a` and `b` are the two runs in the order given."""
    return {
        "a": _name(first),
        "b": _name(second),
        "settings": _settings(first.recipe, second.recipe),
        "funnel": _funnel(first, second),
        "measures": _measures(first, second),
        "documents": _documents(first, second),
        "scores": _scores(first, second),
    }


def write_comparison(first: str | Path, second: str | Path, out: str | Path) -> str:
    """Writes the comparison of two runs as a page like the report -> its path. Raises RunError, LedgerError."""
    from gristmill.pipelines.report.write import render

    page = compare(open_run(first), open_run(second))
    publish_bytes(str(out), render({"compare": page}, "compare.html").encode("utf-8", errors="replace"))
    return str(out)


def _name(run: Run) -> dict[str, str]:
    return {"path": run.path, "name": str(run.recipe.get("name") or run.path.rsplit("/", 1)[-1])}


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings -> dotted names. A list of stages is named by their keys, other lists are one value."""
    if isinstance(value, Mapping):
        out: dict[str, str] = {}
        for key, inner in value.items():
            out |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return out or {prefix: "{}"}
    if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
        out, seen = {}, Counter[str]()
        for entry in value:
            key = next((str(k) for k in entry if k != "only"), "")
            seen[key] += 1
            label = key if seen[key] == 1 else f"{key} #{seen[key]}"
            inner = {label if k == key else f"{label}.{k}": v for k, v in entry.items()}
            out |= flat(inner, prefix)
        return out
    return {prefix: str(value)}


def _settings(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, str]]:
    a, b = (flat({k: v for k, v in recipe.items() if k not in ("name", "out")}) for recipe in (first, second))
    names = [*a, *(name for name in b if name not in a)]
    return [
        {"setting": name, "a": a.get(name, MISSING), "b": b.get(name, MISSING)}
        for name in names
        if a.get(name) != b.get(name)
    ]


def _funnel(first: Run, second: Run) -> list[dict[str, Any]]:
    """Documents and tokens left after each stage; None where a run lacks the stage."""
    a, b = ({row.stage: row for row in funnel(run, sources=False)} for run in (first, second))
    order = list(a)
    for before, label in pairwise(["", *b]):
        if label not in order:
            order.insert(order.index(before) + 1 if before in order else 0, label)
    return [
        {
            "stage": label,
            **{
                f"{figure}_{side}": getattr(rows[label], figure) if label in rows else None
                for figure in ("documents", "bytes", "tokens", "kept_share")
                for side, rows in (("a", a), ("b", b))
            },
        }
        for label in order
    ]


def _measures(first: Run, second: Run) -> list[dict[str, Any]]:
    """How far each measure moved, among the documents that reached the stage and among those it kept."""
    out = []
    for column, mine in first.measures.items():
        other = second.measures.get(column)
        if other is None or other.histogram.edges != mine.histogram.edges:
            continue
        a, b = mine.histogram, other.histogram
        width = a.edges[-1] - a.edges[0]
        read, kept = _distance(a, b, dropped=True), _distance(a, b, dropped=False)
        out.append(
            {
                "stage": mine.stage,
                "measure": column,
                "unit": a.unit,
                "read": read,
                "kept": kept,
                "kept_share": kept / width if kept is not None and width else None,
            }
        )
    return sorted(out, key=lambda row: -(row["kept_share"] or 0))


def _distance(a: Histogram, b: Histogram, *, dropped: bool) -> float | None:
    counts = [[k + (d if dropped else 0) for k, d in zip(h.kept, h.dropped, strict=True)] for h in (a, b)]
    return wasserstein(a.edges, *counts)


def wasserstein(edges: list[float], a: list[int], b: list[int]) -> float | None:
    """Earth mover's distance of two histograms (under, bins, over), in the unit of the edges; None where one is empty.

    The area between the two cumulative shares (Vallender 1974), taken straight inside each bin. What lies under or
    over the edges counts as if it lay on them.
    """
    if not sum(a) or not sum(b):
        return None
    total = 0.0
    gap = a[0] / sum(a) - b[0] / sum(b)
    for i, (left, right) in enumerate(pairwise(edges), 1):
        after = gap + a[i] / sum(a) - b[i] / sum(b)
        if gap * after >= 0:
            area = abs(gap + after) / 2
        else:
            area = (gap * gap + after * after) / (2 * abs(gap - after))  # the lines cross inside the bin
        total += area * (right - left)
        gap = after
    return total


def _documents(first: Run, second: Run) -> dict[str, Any]:
    """Documents kept by one run and not by the other, and why the other did without them."""
    total = sum(d.count_rows() for run in (first, second) for d in (run.kept(), run.dropped()))
    if total > LIMIT:
        return {"skipped": total}
    a, b = (_keys(run.kept()) for run in (first, second))
    both = pc.sum(pc.is_in(a, value_set=b)).as_py() or 0
    return {
        "skipped": 0,
        "kept_a": len(a),
        "kept_b": len(b),
        "both": both,
        "only_a": _only(first, a, second, b),
        "only_b": _only(second, b, first, a),
    }


def _only(mine: Run, kept: pa.Array, other: Run, kept_there: pa.Array) -> dict[str, Any]:
    alone = kept.filter(pc.invert(pc.is_in(kept, value_set=kept_there)))
    gone = other.dropped().to_table(columns=["source", "doc_id", "stage", "reasons"])
    at = pc.index_in(alone, value_set=_join(gone))
    reasons = pc.list_element(gone["reasons"].combine_chunks(), 0) if gone.num_rows else pa.array([], pa.string())
    counts: Counter[tuple[str, str]] = Counter()
    for stage, reason in zip(gone["stage"].take(at).to_pylist(), reasons.take(at).to_pylist(), strict=True):
        counts[stage or "not there", reason or "the other run did not read it"] += 1
    return {
        "documents": len(alone),
        "reasons": [{"stage": s, "reason": r, "documents": n} for (s, r), n in counts.most_common()],
        "examples": _examples(mine, alone, dict(zip(alone.to_pylist(), reasons.take(at).to_pylist(), strict=True))),
    }


def _examples(run: Run, alone: pa.Array, reason_of: Mapping[str, str | None]) -> list[dict[str, Any]]:
    if not len(alone):
        return []

    def is_alone(table: pa.Table) -> list[bool]:
        return pc.is_in(_join(table), value_set=alone).to_pylist()

    rows = pick(run, run.parts("kept"), Filter(), EXAMPLES, 0, is_alone)  # as many of the others, left out below
    found = [document(row) for row in rows if f"{row['source']}\0{row['doc_id']}" in reason_of]
    return [
        {
            "doc_id": d["doc_id"],
            "source": d["source"],
            "url": d["url"],
            "reason": reason_of[f"{d['source']}\0{d['doc_id']}"],
            "text": (d["text"] or "")[:TEXT_CHARS],
        }
        for d in found
    ]


def _keys(dataset: Any) -> pa.Array:
    return _join(dataset.to_table(columns=["source", "doc_id"]))


def _join(table: pa.Table) -> pa.Array:
    """source and doc_id as one string a document."""
    joined = pc.binary_join_element_wise(table["source"], table["doc_id"], "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _scores(first: Run, second: Run) -> list[dict[str, Any]]:
    """Mixtures that both ablations scored, or one of them."""
    a, b = ({m["mixture"]: m["score"] for m in ablation(run).get("mixtures", [])} for run in (first, second))
    empty = {"mean": None, "low": None, "high": None}
    return [{"mixture": name, "a": a.get(name, empty), "b": b.get(name, empty)} for name in dict.fromkeys([*a, *b])]
