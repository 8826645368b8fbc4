"""Tables for people, on a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:  # only names of types: `gristmill --help` should not load the kernels
    from gristmill.pipelines.funnel import FunnelRow
    from gristmill.pipelines.status import SegmentStatus


def console() -> Console:
    """Standard output; as wide as the terminal, or 120 columns where there is none."""
    shown = Console()
    return shown if shown.is_terminal else Console(width=120)


@contextmanager
def paged(*, wanted: bool = True) -> Iterator[Console]:
    """A console whose output a pager shows where it goes to a terminal and `wanted`; else as it comes.

    less shows colours and ends by itself where all fits on the screen; whoever has set LESS keeps it.
    """
    shown = console()
    if not (wanted and shown.is_terminal):
        yield shown
        return
    os.environ.setdefault("LESS", "-RFX")
    with shown.pager(styles=True):
        yield shown


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def funnel_table(rows: Sequence[FunnelRow]) -> Table:
    """What was left after each stage, all sources together."""
    table = _table("Funnel", ["stage"], ["documents", "dropped", "failed", "characters", "MB", "tokens", "left"])
    for row in rows:
        if row.source is None:
            table.add_row(
                row.stage,
                f"{row.documents:,}",
                f"{row.dropped:,}" if row.dropped else "",
                f"{row.failed:,}" if row.failed else "",
                f"{row.chars:,}" if row.chars else "",
                f"{row.bytes / 1e6:,.1f}",
                f"{row.tokens:,}" if row.tokens else "",
                f"{row.kept_share:.1%}",
            )
    return table


def status_table(rows: Sequence[SegmentStatus]) -> Table:
    """A row a segment."""
    right = ["done", "left", "given up", "read", "kept", "kept share", "failed", "worker s", "docs/s", "MB/s", "ETA"]
    table = _table("Segments (rates of one worker)", ["segment", "stages"], right)
    for row in rows:
        table.add_row(
            row.segment,
            row.stages,
            f"{row.done:,}/{row.shards:,}",
            f"{row.left:,}",
            f"{row.set_aside:,}",
            f"{row.read:,}",
            f"{row.kept:,}",
            "" if row.kept_share is None else f"{row.kept_share:.1%}",
            f"{row.failed:,}",
            f"{row.seconds:,.1f}",
            "" if row.docs_per_s is None else f"{row.docs_per_s:,.0f}",
            "" if row.mb_per_s is None else f"{row.mb_per_s:,.1f}",
            "" if row.eta_s is None else duration(row.eta_s),
        )
    return table


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 under an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], names: int = 1) -> Table:
    """Rows of plain data; the first `names` columns to the left and never cut short, numbers to the right."""
    table = _table(title, columns[:names], columns[names:])
    for column in table.columns[:names]:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
