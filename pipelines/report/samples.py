"""Documents for the page: for every stage, reason and source a few dropped ones, and some that were kept.

The choice is by hash, so the same run gives the same page, and bounded: a few shards for every kind of document, a
budget of bytes for all texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.inspect import Filter, document, pick, spread
from gristmill.pipelines.open_run import Run
from gristmill.pipelines.originals import original

PER_REASON = 6  # dropped documents for each stage, first reason and source
PER_SOURCE = 24  # kept documents
SHARDS_EACH = 4  # shards looked into for each of those
TEXT_CHARS = 3_000  # of each text; the page tells how many more there are
BUDGET_BYTES = 2_500_000  # of all texts, in UTF-8
ORIGINALS = 8  # of kept and of dropped documents each, whose page is shown beside the text
HTML_CHARS = 20_000  # of such a page


@dataclass(frozen=True)
class Samples:
    """Documents as `inspect` gives them, with `kept` and `more_chars`."""

    documents: list[dict[str, Any]]
    left_out: int  # chosen, but over the budget


def sample(run: Run, budget: int = BUDGET_BYTES) -> Samples:
    """Dropped and kept documents, those that every group has at least one of first."""
    dropped = pick(run, _dropped_parts(run), Filter(), PER_REASON, 0, _dropped_groups)
    kept = pick(run, _kept_parts(run), Filter(), PER_SOURCE, 0, _sources, row_groups=2)
    chosen = [_short(row, kept=False) for row in dropped if row.get("text") is not None]
    chosen += [_short(row, kept=True) for row in kept]
    out, used = [], 0
    for found in sorted(chosen, key=lambda found: found["rank"]):
        used += len(found["text"].encode()) + 400  # its other facts
        if used > budget:
            break
        out.append(found)
    _add_originals(run, out)
    return Samples([{k: v for k, v in found.items() if k != "part"} for found in out], len(chosen) - len(out))


def _add_originals(run: Run, found: list[dict[str, Any]]) -> None:
    """The page beside the text that was extracted from it, for some that still have it."""
    for kept in (True, False):
        left = ORIGINALS
        for entry in found:
            if left and entry["kept"] == kept and entry["stage"] != "extract":
                html = original(run, entry["part"], entry)
                if html is not None:
                    entry |= {"html": html[:HTML_CHARS], "more_html": max(0, len(html) - HTML_CHARS)}
                    left -= 1


def _short(row: dict[str, Any], kept: bool) -> dict[str, Any]:
    found = {**document(row), "part": row["part"]}
    text = found["text"] or ""
    cut = text[:TEXT_CHARS]
    return {**found, "kept": kept, "text": cut, "more_chars": len(text) - len(cut), "rank": row["rank"]}


def _dropped_groups(table: pa.Table) -> Sequence[Any]:
    if not table.num_rows:
        return []
    first = pc.list_element(table["reasons"].combine_chunks(), 0).to_pylist()
    return list(zip(table["stage"].to_pylist(), first, table["source"].to_pylist(), strict=True))


def _sources(table: pa.Table) -> Sequence[Any]:
    return list(table["source"].to_pylist())


def _dropped_parts(run: Run) -> list[str]:
    """Parts that hold, for each stage, reason and source, up to SHARDS_EACH shards with such documents."""
    there = set(run.parts("dropped"))
    met: dict[tuple[str, str, str], int] = defaultdict(int)
    shards = run.shards
    out = []
    for at in spread_order(len(shards)):
        shard = shards[at]
        name = f"{shard.segment}/dropped/part-{shard.shard:05d}.parquet"
        kinds = [(stage, reason, shard.source) for stage, reason in shard.reasons]
        if name in there and any(met[kind] < SHARDS_EACH for kind in kinds):
            out.append(name)
            for kind in kinds:
                met[kind] += 1
    return sorted(out)


def _kept_parts(run: Run) -> list[str]:
    parts = run.parts("kept")
    if not parts:
        return []
    segment = parts[0].partition("/")[0]
    by_source: dict[str, list[str]] = defaultdict(list)
    source_of = {f"{segment}/kept/part-{s.shard:05d}.parquet": s.source for s in run.shards if s.segment == segment}
    for part in parts:
        by_source[source_of.get(part, "")].append(part)
    return sorted(names[i] for names in by_source.values() for i in spread(len(names), SHARDS_EACH))


def spread_order(count: int) -> list[int]:
    """0 to count - 1, so that every prefix is spread over the whole: bits reversed."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(format(i, f"0{bits}b")[::-1], 2) for i in range(1 << bits))
    return [i for i in reversed_bits if i < count]
