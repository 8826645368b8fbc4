"""What models said of documents: how they fell into head, middle and tail, and what stands just at a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.inspect import spread
from gristmill.pipelines.open_run import Run
from gristmill.pipelines.report.limits import StageRules

KEYS = ("perplexity", "classifier")  # stages that score by a model
PARTS = 12  # files of kept and of dropped documents that are looked into
EACH_SIDE = 3  # examples
TEXT_CHARS = 700


def scored(run: Run, rules: Mapping[str, StageRules], buckets: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """One entry for each limit on a model's score. buckets: column -> kept documents by bucket."""
    out = []
    for label, found in rules.items():
        book = run.stages()[label]
        if found.key not in KEYS:
            continue
        named = {c: counts for c, counts in buckets.items() if c.split(".")[0] == label.split(" ")[0].split(".")[-1]}
        for rule in found.rules:
            limit = rule.at_least if rule.at_least is not None else rule.at_most
            if rule.column not in book.histograms or limit is None:
                continue
            out.append(
                {
                    "stage": label,
                    "reason": rule.reason,
                    "measure": rule.column,
                    "side": "at_least" if rule.at_least is not None else "at_most",
                    "limit": limit,
                    "buckets": _ordered(next(iter(named.values()), {})),
                    "examples": list(at_limit(run, label, rule.column, limit)),
                }
            )
    return out


def _ordered(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    order = {"head": 0, "middle": 1, "tail": 2}
    return sorted(((name or "not scored", n) for name, n in counts.items()), key=lambda b: (order.get(b[0], 3), b[0]))


def at_limit(run: Run, stage: str, column: str, limit: float) -> Iterator[dict[str, Any]]:
    """The documents whose value is nearest to a limit, on either side, from the lowest; of PARTS files at most."""
    near: list[tuple[float, float, str, int, int]] = []  # distance, value, part, row group, row
    sides = (run.parts("kept"), run.parts("dropped", run.segment_of(stage)))
    for part in (parts[i] for parts in sides for i in spread(len(parts), PARTS)):
        with run.open_parquet(part) as file:
            if column not in file.schema_arrow.names:
                continue
            sampled = ["text"] if "/dropped/" in part else []  # dropped documents have their text for a sample only
            for group in spread(file.num_row_groups, 2):
                table = file.read_row_group(group, columns=[column, *sampled])
                values = table[column].cast(pa.float64()).to_numpy()
                there = ~np.isnan(values)
                for name in sampled:
                    there &= pc.is_valid(table[name]).to_numpy()
                for mask in (there & (values < limit), there & (values >= limit)):
                    rows = np.flatnonzero(mask)
                    best = rows[np.argsort(np.abs(values[rows] - limit), kind="stable")[:EACH_SIDE]]
                    near += [(abs(float(values[r]) - limit), float(values[r]), part, group, int(r)) for r in best]
    below, above = (sorted(n for n in near if (n[1] < limit) == is_below)[:EACH_SIDE] for is_below in (True, False))
    for _, value, part, group, row in sorted([*below, *above], key=lambda n: n[1]):
        with run.open_parquet(part) as file:
            found = file.read_row_group(group).slice(row, 1).to_pylist()[0]
        yield {
            "value": value,
            "kept": "/kept/" in part,
            "reasons": list(found.get("reasons") or []),
            "stage": found.get("stage"),
            "source": found.get("source"),
            "url": found.get("url"),
            "doc_id": found.get("doc_id"),
            "text": (found.get("text") or "")[:TEXT_CHARS],
            "more_chars": max(0, len(found.get("text") or "") - TEXT_CHARS),
        }
