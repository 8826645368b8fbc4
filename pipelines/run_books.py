"""The sums of a run's ledgers, and what is remembered of each shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.stages.documents import heading
from gristmill.stages.ledger import ShardLedger, StageLedger
from gristmill.stages.removals import Removals


@dataclass(frozen=True)
class ShardSummary:
    """What a report says of one shard of one segment, without its histograms."""

    segment: str
    shard: int
    source: str
    input: str
    seconds: float
    read_bytes: int  # read by the first stage
    files: tuple[tuple[str, int, int, str], ...]  # path, rows, bytes, xxh3
    problems: tuple[str, ...]
    reasons: tuple[tuple[str, str], ...]  # stage and first reason of the documents that it dropped
    host: str
    ended: float | None = None  # seconds since 1970
    memory_bytes: int | None = None


@dataclass
class Books:
    """Sums of every ledger of the run. A stage's label is its name, with the segment where two segments share it."""

    recipe_order: Sequence[str | None] = ()  # headings of the recipe's stages
    overall: dict[str, StageLedger] = field(default_factory=dict)
    by_source: dict[str, dict[str, StageLedger]] = field(default_factory=dict)
    segment_of: dict[str, str] = field(default_factory=dict)
    shards: list[ShardSummary] = field(default_factory=list)
    versions: dict[str, set[str]] = field(default_factory=dict)
    removals: dict[str, dict[str, Removals]] = field(default_factory=dict)  # segment -> source

    def add(self, segment: str, ledgers: Iterable[ShardLedger]) -> None:
        """Adds the ledgers of a segment, in the order of its shards."""
        taken = set(self.overall)
        order: list[str] = []
        sums: dict[str, StageLedger] = {}
        for ledger in ledgers:
            seen: dict[str, int] = {}
            previous = -1
            for stage in ledger.stages:
                seen[stage.stage] = seen.get(stage.stage, 0) + 1
                label = stage.stage if stage.stage not in taken else f"{stage.stage} ({segment})"
                label += f" #{seen[stage.stage]}" if seen[stage.stage] > 1 else ""
                if label not in order:  # a stage for other sources only: it comes after the one before it here
                    order.insert(previous + 1, label)
                previous = order.index(label)
                of_source = self.by_source.setdefault(ledger.source, {})
                for total in (sums, of_source):
                    total[label] = total[label].merge(stage) if label in total else stage
            if ledger.removals is not None:
                parts = self.removals.setdefault(segment, {})
                parts[ledger.source] = parts.get(ledger.source, Removals()).merge(ledger.removals)
            for name, version in ledger.versions.items():
                self.versions.setdefault(name, set()).add(version)
            self.shards.append(_summary(segment, ledger))
        for label in self._in_recipe_order(order):
            self.overall[label] = sums[label]
            self.segment_of[label] = segment

    def _in_recipe_order(self, labels: list[str]) -> list[str]:
        """Sources may pass different stages; the recipe knows the order where the ledgers leave it open."""
        keys = self.recipe_order
        place = {key: i for i, key in enumerate(keys)} | {"read": -1}
        known = all(label in place for label in labels) and len(set(keys)) == len(keys)
        return sorted(labels, key=lambda label: place[label]) if known else labels


def heading_of(use: Any) -> str | None:
    """What the ledgers call a stage as the resolved recipe has it: `{key: settings, only: sources}`."""
    key = next((k for k in use if k != "only"), None) if isinstance(use, dict) else None
    settings = use[key] if key is not None else None
    return None if key is None else heading(key, settings.get("column") if isinstance(settings, dict) else None)


def _summary(segment: str, ledger: ShardLedger) -> ShardSummary:
    return ShardSummary(
        segment=segment,
        shard=ledger.shard,
        source=ledger.source,
        input=ledger.input,
        seconds=ledger.seconds,
        read_bytes=ledger.stages[0].read.bytes if ledger.stages else 0,
        files=tuple((f.path, f.rows, f.bytes, f.xxh3) for f in ledger.files),
        problems=tuple(ledger.problems),
        reasons=tuple((book.stage, reason) for book in ledger.stages for reason in book.dropped),
        host=ledger.host,
        ended=ledger.ended,
        memory_bytes=ledger.memory_bytes,
    )
