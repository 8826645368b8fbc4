"""How the work went: speed of stages, slow and failed shards, memory, what was tried again, when what was done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from gristmill.pipelines.faults import Failed
from gristmill.pipelines.funnel import INPUT
from gristmill.pipelines.open_run import TOKENS, Run, global_seconds, share
from gristmill.pipelines.run_books import ShardSummary

SLOW = 10  # shards
SHOWN_PROBLEMS = 100
SHOWN_FAILED = 100
MARKS = 300  # ends of shards in the timeline of a segment


def operations(run: Run) -> dict[str, Any]:
    """What the page says."""
    problems = [(s.segment, s.shard, text) for s in run.shards for text in s.problems]
    failed = sorted(Failed(run.path), key=lambda record: (record.segment, record.part))
    driver = run.json("driver.json")
    return {
        "stages": list(_stages(run)),
        "segments": list(_segments(run)),
        "timeline": timeline(run),
        "hosts": list(_hosts(run)),
        "slow": [_slow(s) for s in sorted(run.shards, key=lambda s: (-s.seconds, s.segment, s.shard))[:SLOW]],
        "failed": [record.model_dump(exclude={"key", "log"}) for record in failed[:SHOWN_FAILED]],
        "more_failed": max(0, len(failed) - SHOWN_FAILED),
        "tried_again": driver.get("tried_again") if isinstance(driver, dict) else None,
        "problems": [
            {"segment": segment, "shard": shard, "problem": text} for segment, shard, text in problems[:SHOWN_PROBLEMS]
        ],
        "more_problems": max(0, len(problems) - SHOWN_PROBLEMS),
    }


def times(run: Run) -> tuple[float | None, float | None]:
    """When the first shard began and the last one ended, seconds since 1970; from the ledgers, else the files' own."""
    known = [(s.ended - s.seconds, s.ended) for s in run.shards if s.ended is not None]
    if known:
        return min(begun for begun, _ in known), max(ended for _, ended in known)
    ends = [t for s in (*run.segments, TOKENS) if (t := run.modified(f"{s}/ledger")) is not None]
    return run.modified("recipe.yaml"), max(ends, default=None)


def _stages(run: Run) -> Iterator[dict[str, Any]]:
    for label, book in run.stages().items():
        if label != INPUT:
            yield {
                "stage": label,
                "segment": run.segment_of(label),
                "seconds": book.seconds,
                "documents": book.read.documents,
                "bytes": book.read.bytes,
                "documents_per_s": share(book.read.documents, book.seconds),
                "mb_per_s": share(book.read.bytes, book.seconds) / 1e6,
            }


def _segments(run: Run) -> Iterator[dict[str, Any]]:
    for name in (*run.segments, TOKENS):
        shards = [s for s in run.shards if s.segment == name]
        if shards:
            seconds = sorted(s.seconds for s in shards)
            yield {
                "segment": name,
                "shards": len(shards),
                "seconds": sum(seconds),
                "median": seconds[len(seconds) // 2],
                "slowest": seconds[-1],
                "global_seconds": global_seconds(run.clusters.get(name, {})),
                "memory_bytes": max((s.memory_bytes for s in shards if s.memory_bytes is not None), default=None),
                "output_bytes": sum(f[2] for s in shards for f in s.files),
            }


def _hosts(run: Run) -> Iterator[dict[str, Any]]:
    """What each machine did."""
    named = sorted((s for s in run.shards if s.host), key=lambda s: s.host)
    for host, group in groupby(named, key=lambda s: s.host):
        own = list(group)
        yield {
            "host": host,
            "shards": len(own),
            "seconds": sum(s.seconds for s in own),
            "memory_bytes": max((s.memory_bytes for s in own if s.memory_bytes is not None), default=None),
        }


def timeline(run: Run) -> dict[str, Any] | None:
    """When each segment was worked on, in seconds since the first shard began; None where the ledgers do not know."""
    begun, ended = times(run)
    rows = []
    for name in (*run.segments, TOKENS):
        own = sorted((s.ended, s.seconds) for s in run.shards if s.segment == name and s.ended is not None)
        if own and begun is not None:
            every = max(1, len(own) // MARKS)
            rows.append(
                {
                    "segment": name,
                    "begun": min(end - seconds for end, seconds in own) - begun,
                    "ended": own[-1][0] - begun,
                    "ends": [end - begun for end, _ in own[::every]],
                }
            )
    if not rows or begun is None or ended is None:
        return None
    return {"begun": begun, "seconds": ended - begun, "rows": rows}


def _slow(s: ShardSummary) -> dict[str, Any]:
    return {
        "segment": s.segment,
        "shard": s.shard,
        "source": s.source,
        "input": s.input,
        "seconds": s.seconds,
        "bytes": s.read_bytes,
        "mb_per_s": share(s.read_bytes, s.seconds) / 1e6,
        "memory_bytes": s.memory_bytes,
        "host": s.host,
    }
