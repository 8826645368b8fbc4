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
    """Answers for one limit. `low` and `high` bound the documents that the stage would keep; equal where exact."""

    reason: str
    side: str  # "at_least" or "at_most"
    now: float
    now_at: int  # index of the limit in force
    limits: list[float]
    low: list[int]
    high: list[int]

    def values(self, edges: list[float], *, integer: bool) -> list[float]:
        """What to write into a recipe for each limit: whole numbers where the setting takes no others.

        A bin's border may be no whole number, and an upper limit is answered for the values below it.
        """
        return [_value(self, i, edges, integer) for i in range(len(self.limits))]


def what_ifs(rule: Rule, histogram: Histogram, book: StageLedger) -> Iterator[WhatIf]:
    """One answer for each limit of the rule."""
    if rule.at_least is not None:
        yield _lower(rule, rule.at_least, histogram, book)
    if rule.at_most is not None:
        yield _upper(rule, rule.at_most, histogram, book)


def _lower(rule: Rule, now: float, h: Histogram, book: StageLedger) -> WhatIf:
    points = []
    # The last edge is no limit to try: the values on it would pass, and its bin does not tell them from others.
    for limit in sorted({*h.edges[:-1], now}):
        low = high = book.kept.documents
        if limit > now:
            low = high = book.kept.documents - _below(h.edges, h.kept, limit)[0]
        elif limit < now:
            beyond = _below(h.edges, h.dropped, limit)[0]
            inside, reached = (n - beyond for n in _below(h.edges, h.dropped, now))
            low, high = _released(rule, book, h, beyond, inside, reached)
        points.append((limit, low, high))
    return _answer(rule, "at_least", now, points)


def _upper(rule: Rule, now: float, h: Histogram, book: StageLedger) -> WhatIf:
    points = []
    for limit in sorted({*h.edges, now}):
        low = high = book.kept.documents
        if limit < now:
            low = high = book.kept.documents - (sum(h.kept) - _below(h.edges, h.kept, limit)[1])
        elif limit > now:
            below = _below(h.edges, h.dropped, limit)[1]
            inside, reached = (below - n for n in _through(h.edges, h.dropped, now))
            low, high = _released(rule, book, h, sum(h.dropped) - below, inside, reached)
        points.append((limit, low, high))
    return _answer(rule, "at_most", now, points)


def _released(rule: Rule, book: StageLedger, h: Histogram, beyond: int, inside: int, reached: int) -> tuple[int, int]:
    """Bounds of the documents kept when a limit is loosened.

    Dropped documents: `beyond` the new limit too; `inside` bins that lie whole between the limits; `reached` with the
    bin that holds the limit in force.
    """
    least, most = max(inside, 0), max(reached, 0)
    failing = book.counters.get(f"rule.{rule.reason}")
    only = book.counters.get(f"only.{rule.reason}")
    if failing is not None and (rule.at_least is None or rule.at_most is None):
        exact = failing - beyond - h.missing
        least = most = min(max(exact, least), most)
    if failing is None or only is None:
        return book.kept.documents, book.kept.documents + most
    return (
        book.kept.documents + max(0, least - (failing - only)),
        book.kept.documents + min(most, only),
    )


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


def _answer(rule: Rule, side: str, now: float, points: list[tuple[float, int, int]]) -> WhatIf:
    limits = [point[0] for point in points]
    return WhatIf(
        rule.reason,
        side,
        now,
        limits.index(now),
        limits,
        [point[1] for point in points],
        [point[2] for point in points],
    )
