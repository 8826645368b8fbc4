"""Two plans side by side: what each source gives in one and in the other, and how far they are the same run.

print(difference_table(plan_a, plan_b))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gristmill.mixtures.plan import Plan, Row


@dataclass(frozen=True)
class SourceDifference:
    """One source in both plans; None where a plan does not have it."""

    source: str
    a: Row | None
    b: Row | None

    @property
    def weight_change(self) -> float:
        """Of the share of all tokens, from a to b."""
        return (self.b.weight if self.b else 0.0) - (self.a.weight if self.a else 0.0)


def differences(a: Plan, b: Plan) -> list[SourceDifference]:
    """Every source of either plan, those of `a` first."""
    rows_a, rows_b = ({row.source: row for row in plan.totals()} for plan in (a, b))
    return [SourceDifference(name, rows_a.get(name), rows_b.get(name)) for name in dict.fromkeys([*rows_a, *rows_b])]


def shared_windows(a: Plan, b: Plan) -> int:
    """How many windows from the first on are known to be the same, in the same order, without comparing them."""
    low, high = 0, min(a.windows, b.windows)
    if a.prefix_hash(0) != b.prefix_hash(0):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a.prefix_hash(middle) == b.prefix_hash(middle):
            low = middle
        else:
            high = middle - 1
    return low


def difference_data(a: Plan, b: Plan) -> dict[str, Any]:
    """The differences as plain values."""
    plans = {
        side: {"mixture": plan.mixture, "hash": plan.hash, "budget_tokens": plan.budget_tokens}
        for side, plan in (("a", a), ("b", b))
    }
    sources = [
        {"source": d.source, "weight_change": d.weight_change}
        | {side: None if row is None else vars(row) for side, row in (("a", d.a), ("b", d.b))}
        for d in differences(a, b)
    ]
    return {**plans, "same_tokens": shared_windows(a, b) * a.seq_len, "sources": sources}


def difference_table(a: Plan, b: Plan) -> str:
    """The differences as text of fixed width."""
    head = ("source", "tokens", "tokens", "share", "share", "change", "epochs", "epochs")
    rows: list[tuple[str, ...]] = [head]
    for pair in differences(a, b):
        tokens, shares, epochs = [], [], []
        for row in (pair.a, pair.b):
            tokens.append("-" if row is None else f"{row.tokens:,}")
            shares.append("-" if row is None else f"{row.weight:.2%}")
            epochs.append("-" if row is None else f"{row.epochs_after:.2f}")
        rows.append((pair.source, *tokens, *shares, f"{pair.weight_change:+.2%}", *epochs))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        f"a: {a.mixture}, {a.budget_tokens:,} tokens, plan {a.hash}",
        f"b: {b.mixture}, {b.budget_tokens:,} tokens, plan {b.hash}",
        f"the same up to {shared_windows(a, b) * a.seq_len:,} tokens; of each pair of columns the first is a's",
        "",
    ]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
