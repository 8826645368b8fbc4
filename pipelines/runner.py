"""One pass over a plan: what every part of it shares, from the engine to the list of shards that are missing.

`missing.py` says how a pass goes on without shards that could not be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gristmill.pipelines import poison, work
from gristmill.pipelines.beacon import Beacon
from gristmill.pipelines.bundles import run_all
from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.done import (
    ledger_done,
)
from gristmill.pipelines.engine import PLAIN, Care, Engine, Failure
from gristmill.pipelines.faults import storage_message
from gristmill.pipelines.isolation import TIMEOUT_S
from gristmill.pipelines.lock import RunLock
from gristmill.pipelines.missing import MEND, Missing
from gristmill.pipelines.plan import Plan, plan_of
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import AnyStage, StageUse, stage_in
from gristmill.stages.shards import (
    Shard,
    join,
)

GUARDED = Care(guarded=True)
ALONE = Care(guarded=True, copy=lambda order: replace(order, is_copy=True))  # of a shard by itself


class RunError(RuntimeError):
    """A run could not be finished; what was done stays, and the same command goes on from there."""


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: none of it changes a byte of the result."""

    debug: bool = False
    workers: int | None = None
    scheduler: str | None = None
    cluster: ClusterSettings | None = None  # where workers come from, and what stages take of them
    refresh_inputs: bool = False
    retry_failed: bool = False  # take up the shards again that were set aside
    timeout_s: float = TIMEOUT_S  # for one batch in one stage; then the worker is stuck


@dataclass
class Outcome:
    """What a call of `run` did."""

    out: str
    done: int = 0  # pieces worked on
    found: int = 0  # pieces that were there already
    failures: list[str] = field(default_factory=list)


class Runner:
    """A pass over a plan, for the functions that do its parts in order."""

    def __init__(
        self,
        plan: Plan,
        out: str,
        engine: Engine,
        display: Display,
        outcome: Outcome,
        beacon: Beacon,
        lock: RunLock,
        options: Options,
    ) -> None:
        self.plan, self.out, self.engine, self.display, self.outcome = plan, out, engine, display, outcome
        self.beacon, self.lock, self.cluster = beacon, lock, options.cluster
        self._found = False  # poison that the plan does not know
        self.missing = Missing(out, len(plan.shards), display.say, retry_failed=options.retry_failed)

    def end(self) -> None:
        """Raises RunError with the list when shards are missing."""
        if self.missing:
            raise RunError(self.missing.message())

    def work(
        self,
        name: str,
        function: Callable[[Any], Any],
        orders: Sequence[Any],
        labels: Sequence[str],
        count: Any,
        care: Care = PLAIN,
        takes: Iterable[str] = (),
    ) -> None:
        """Does orders on the engine, with a row of the display. Shards that were given up are `missing` afterwards.

        takes: names under which the file of --cluster may say what the work takes of a worker.

        Raises RunError when the storage takes no more, and when pieces that are no shards were given up.
        """
        if not orders:
            return
        if self.cluster is not None:
            care = replace(care, resources=self.cluster.taken(takes))
        with self.display.phase(name, len(orders)) as phase:

            def show(positions: Sequence[int]) -> None:
                self.beacon.show(phase, [labels[position] for position in positions])

            def done(position: int, result: Any) -> None:
                self.lock.check()
                self.outcome.done += 1
                phase.advance(**count(result))
                if hasattr(orders[position], "poison"):
                    self._found |= _carried(orders[position]) != result["key"]
                for line in result.get("problems", ()):
                    if poison.IS_DROPPED in line:
                        self.display.say(f"  {line}")
                if hasattr(orders[position], "shard"):
                    self.missing.done(orders[position].shard, _folder(orders[position]))

            found: list[Failure] = run_all(self.engine, function, orders, done, care, show)
            failures = sorted(found, key=lambda failure: failure.position)
        for failure in failures:
            if failure.kind == "storage":
                raise RunError(storage_message(self.out, f"{labels[failure.position]}: {failure.error}"))
        listed = [f"{labels[f.position]}: {f.error}" for f in failures]
        self.outcome.failures.extend(listed)
        if failures and not hasattr(orders[0], "shard"):
            raise RunError(
                f"{len(failures):,} of {len(orders):,} pieces of {name} were given up; the others are done:\n  "
                + "\n  ".join(listed[:20])
                + f"\n{MEND}"
            )
        for failure in failures:
            order = orders[failure.position]
            self.missing.add(order.shard, _folder(order), order.key, failure)
            self._found = True  # some may have been found before it was given up

    def stage(self, use: StageUse) -> AnyStage:
        """The stage, its model as a path in the run."""
        return stage_in(self.plan.recipe, use, self.out)

    def plan_again(self) -> None:
        """Poison that was found just now is part of the keys of what comes after."""
        if self._found:
            self.plan = plan_of(self.plan.recipe, self.plan.shards, self.out)
            self._found = False

    def wait(self, what: str, indexes: Iterable[int]) -> None:
        """Raises RunError when one of these shards is missing."""
        if message := self.missing.held_up(what, indexes):
            raise RunError(message)

    def left(self, folder: str, carried: Sequence[str], ordered: Sequence[str]) -> list[tuple[Shard, str]]:
        """Shards that are not done, with the keys that they are ordered under."""
        triples = zip(self.plan.shards, carried, ordered, strict=True)
        return [(shard, key) for shard, done, key in triples if not ledger_done(self.out, folder, shard, done)]

    def poison(self, folder: str, shard: Shard, *keys: str) -> tuple[poison.Poisoned, ...]:
        """Documents of the shard that are known to kill a worker."""
        return poison.load(join(self.out, folder, "poison", f"{shard.part}.json"), keys)


def _carried(order: Any) -> str:
    """The key that comes of an order when no more poison is found."""
    return poison.key_with(order.key, order.poison)


def _folder(order: Any) -> str:
    """The segment that an order for a shard belongs to."""
    return getattr(order, "folder", "tokens")


def documents_of(card: Mapping[str, Any]) -> dict[str, int]:
    return {"documents": int(card["documents"])}


def ledger_figures(ledger: Mapping[str, Any]) -> dict[str, int]:
    figures = work.summary(ledger)
    return {"documents": figures["documents"], "kept": figures["kept"], "bytes_": figures["bytes"]}
