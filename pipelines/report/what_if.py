"""What another limit would keep, told from a histogram and two counters. Nothing is recomputed.

A limit can be moved to an edge of the histogram, which is the resolution of the answer.

Tighter is simple: of the documents that the stage kept, those beyond the new limit are lost, and the histogram of the
kept ones counts them. A value that lies exactly on an edge belongs to the bin above it, so a limit `at_most` an edge
is answered for the values below it (except at the last edge, which belongs to the last bin).

Looser is a range. Documents between the two limits come back only if no other rule of the stage drops them as well.
Of F documents that break the rule (`rule.<reason>`), O break no other one (`only.<reason>`). If R of the F lie between
the limits, then at most min(R, O) come back, and at least R - (F - O). For a rule with one limit R is exact even
inside the bin that holds the limit: F minus what lies beyond the new limit, minus the documents without a value.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.stages.documents import Rule
from gristmill.stages.ledger import Histogram, StageLedger


@dataclass(frozen=True)
class WhatIf:
    """Answers for one limit. `low` and `high` bound the documents that the stage would keep; equal where exact.

    `low_chars` and `high_chars` bound their characters: those of kept documents as the stage leaves them, of others as
    they came in. Empty where the ledger does not know them.
    """

    reason: str
    side: str  # "at_least" or "at_most"
    now: float
    now_at: int  # index of the limit in force
    limits: list[float]
    low: list[int]
    high: list[int]
    low_chars: list[int]
    high_chars: list[int]

    def values(self, edges: list[float], *, integer: bool) -> list[float]:
        """What to write into a recipe for each limit: whole numbers where the setting takes no others.

        A bin's border may be no whole number, and an upper limit is answered for the values below it.
        """
        return [_value(self, i, edges, integer) for i in range(len(self.limits))]


@dataclass(frozen=True)
class _Unit:
    """What is counted: documents, or their characters. kept, dropped: under, bins, over."""

    kept: list[int]
    dropped: list[int]
    stays: int  # kept by the stage
    failing: int | None  # of documents that break the rule
    only: int | None  # of those that break no other
    missing: int  # of documents without a value, which break it


def what_ifs(rule: Rule, histogram: Histogram, book: StageLedger) -> Iterator[WhatIf]:
    """One answer for each limit of the rule."""
    units = [_documents(rule, histogram, book), _chars(rule, histogram, book)]
    for side, now in (("at_least", rule.at_least), ("at_most", rule.at_most)):
        if now is None:
            continue
        # The last edge is no lower limit to try: values on it would pass, and their bin does not tell them from others.
        tried = histogram.edges[:-1] if side == "at_least" else histogram.edges
        limits = sorted({*tried, now})
        bounds = _lower if side == "at_least" else _upper
        documents, chars = (
            [] if unit is None else [bounds(rule, now, limit, histogram.edges, unit) for limit in limits]
            for unit in units
        )
        yield WhatIf(
            rule.reason,
            side,
            now,
            limits.index(now),
            limits,
            *([bound[i] for bound in found] for found in (documents, chars) for i in (0, 1)),
        )


def _documents(rule: Rule, h: Histogram, book: StageLedger) -> _Unit:
    failing, only = (book.counters.get(f"{kind}.{rule.reason}") for kind in ("rule", "only"))
    return _Unit(h.kept, h.dropped, book.kept.documents, failing, only, h.missing)


def _chars(rule: Rule, h: Histogram, book: StageLedger) -> _Unit | None:
    if h.kept_chars is None or h.dropped_chars is None:
        return None
    failing, only = (book.counters.get(f"{kind}_chars.{rule.reason}") for kind in ("rule", "only"))
    if failing is None and f"rule.{rule.reason}" in book.counters:
        failing, only = 0, 0  # no document broke it
    missing = sum(amount.chars for amount in book.dropped.values()) - sum(h.dropped_chars)
    return _Unit(h.kept_chars, h.dropped_chars, book.kept.chars, failing, only, missing)


def _lower(rule: Rule, now: float, limit: float, edges: list[float], unit: _Unit) -> tuple[int, int]:
    """Bounds of what is kept with another lower limit."""
    if limit > now:
        left = unit.stays - _below(edges, unit.kept, limit)[0]
        return left, left
    if limit < now:
        beyond = _below(edges, unit.dropped, limit)[0]
        inside, reached = (n - beyond for n in _below(edges, unit.dropped, now))
        return _released(rule, unit, beyond, inside, reached)
    return unit.stays, unit.stays


def _upper(rule: Rule, now: float, limit: float, edges: list[float], unit: _Unit) -> tuple[int, int]:
    """Bounds of what is kept with another upper limit."""
    if limit < now:
        left = unit.stays - (sum(unit.kept) - _below(edges, unit.kept, limit)[1])
        return left, left
    if limit > now:
        below = _below(edges, unit.dropped, limit)[1]
        inside, reached = (below - n for n in _through(edges, unit.dropped, now))
        return _released(rule, unit, sum(unit.dropped) - below, inside, reached)
    return unit.stays, unit.stays


def _released(rule: Rule, unit: _Unit, beyond: int, inside: int, reached: int) -> tuple[int, int]:
    """Bounds of what is kept when a limit is loosened.

    Of what was dropped: `beyond` the new limit too; `inside` bins that lie whole between the limits; `reached` with the
    bin that holds the limit in force.
    """
    least, most = max(inside, 0), max(reached, 0)
    if unit.failing is not None and (rule.at_least is None or rule.at_most is None):
        exact = unit.failing - beyond - unit.missing
        least = most = min(max(exact, least), most)
    if unit.failing is None or unit.only is None:
        return unit.stays, unit.stays + most
    return unit.stays + max(0, least - (unit.failing - unit.only)), unit.stays + min(most, unit.only)


def _below(edges: list[float], counts: list[int], limit: float) -> tuple[int, int]:
    """Bounds of the documents with a value below the limit: bins that lie whole below it, and with its own bin.

    counts: under, bins, over. The two are equal where the limit is an edge, but the last one, which is in its bin.
    """
    at = bisect.bisect_left(edges, limit)  # edges[at - 1] < limit <= edges[at]
    if at < len(edges) - 1 and edges[at] == limit:
        return sum(counts[: at + 1]), sum(counts[: at + 1])
    return sum(counts[:at]), sum(counts[: at + 1])


def _through(edges: list[float], counts: list[int], limit: float) -> tuple[int, int]:
    """Bounds of the documents with a value up to the limit and on it, the upper one first."""
    at = bisect.bisect_right(edges, limit)  # edges[at - 1] <= limit < edges[at]
    if limit == edges[-1]:
        return sum(counts[:at]), sum(counts[:at])
    return sum(counts[: at + 1]), sum(counts[:at])


def _value(answer: WhatIf, at: int, edges: list[float], integer: bool) -> float:
    limit = answer.limits[at]
    if at == answer.now_at:
        return limit
    if not integer:
        return float(f"{limit:.6g}")
    if answer.side == "at_least":
        return math.ceil(limit)
    return math.floor(limit) if limit == edges[-1] else math.ceil(limit) - 1
