"""A forecast for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import orjson

from gristmill.pipelines.forecast import Forecast, Range
from gristmill.pipelines.tables import plain_table


def as_json(found: Forecast) -> str:
    """Hours, GB of 10^9 bytes, MB of memory; each range with its bounds."""
    return orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2).decode()


def shown(found: Forecast) -> Iterator[Any]:
    """Tables and lines."""
    stages = [
        {
            "phase": row.phase,
            "stage": row.stage,
            "CPU": hours(row.cpu_h.value),
            "from": _low(row.cpu_h),
            "to": _high(row.cpu_h),
        }
        for row in found.stages
    ]
    yield plain_table("CPU time by stage", list(stages[0]), stages, 2) if stages else ""
    workers = f"{found.workers:,} worker{'s' if found.workers > 1 else ''}"
    phases = [
        {
            "phase": row.phase,
            "CPU": hours(row.cpu_h.value),
            f"time, {workers}": hours(row.wall_h.value),
            "alone": "one worker" if row.serial else "",
            "memory MB": f"{row.memory_mb:,.0f}",
            "disk GB": f"{row.disk_gb.value:,.3g}",
            "of which": ", ".join(f"{kind} {gb:,.3g}" for kind, gb in row.disk.items() if gb),
        }
        for row in found.phases
    ]
    yield plain_table("Phases", list(phases[0]), phases) if phases else ""
    for row in found.phases:
        if row.serial:
            yield f"{row.phase}: by {row.how}"
    documents = f"about {found.documents.value:,.0f} documents"
    yield f"Input: {found.input_bytes / 1e9:,.3f} GB in {found.shards:,} shards, {documents}"
    yield f"CPU: {spread(found.cpu_h)}"
    serial = f"; {hours(found.serial_h)} of it is one worker's, whatever their number" if found.serial_h else ""
    yield f"Time with {workers}: {spread(found.wall_h)}{serial}"
    yield f"Memory of a worker: {found.memory_mb:,.0f} MB"
    disk = found.disk_gb
    yield f"Disk: {disk.value:,.3g} GB" + (f" ({disk.low:,.3g} to {disk.high:,.3g})" if disk.known else "")
    if found.money is not None:
        money = found.money
        bounds = f" ({money.low:,.2f} to {money.high:,.2f})" if money.known else ""
        yield f"Money: {money.value:,.2f}{bounds}, for {workers} at {found.price:,g} a core hour, waiting or not"
    yield from found.notes


def hours(value: float) -> str:
    """Of a number of hours: 3.21 s, 12.5 min, 1,204 h."""
    if value < 1 / 60:
        return f"{value * 3600:,.2f} s"
    return f"{value * 60:,.1f} min" if value < 2 else f"{value:,.0f} h" if value >= 100 else f"{value:,.1f} h"


def spread(value: Range) -> str:
    return hours(value.value) + (f" ({hours(value.low)} to {hours(value.high)})" if value.known else "")


def _low(value: Range) -> str:
    return hours(value.low) if value.known else ""


def _high(value: Range) -> str:
    return hours(value.high) if value.known else ""
