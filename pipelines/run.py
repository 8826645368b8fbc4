"""Runs a recipe: does what the plan says is left, in order, and publishes the rest of the run folder.

`plan.py` decides, `work.py` does one piece, `engine.py` says where. Here is only the order of things:

    for each segment: its models -> signatures -> decisions -> shards        then tokenizer -> token shards -> manifest
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ruamel.yaml import YAML

from gristmill.pipelines import downloads
from gristmill.pipelines.beacon import Beacon
from gristmill.pipelines.done import (
    drop_signatures,
    pieces_left,
)
from gristmill.pipelines.engine import Engine, open_engine
from gristmill.pipelines.faults import LASTING, storage_message
from gristmill.pipelines.listing import frozen
from gristmill.pipelines.lock import RunLock
from gristmill.pipelines.plan import Plan, plan_of
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import Recipe, check
from gristmill.pipelines.run_segments import run_segments
from gristmill.pipelines.run_tokens import make_tokens
from gristmill.pipelines.runner import Options, Outcome, RunError, Runner
from gristmill.pipelines.warmup import warm
from gristmill.stages.readers import columns_of
from gristmill.stages.shards import (
    filesystem,
    join,
    publish_bytes,
    remove_leftovers,
)

__all__ = ["Options", "Outcome", "RunError", "prepare", "run"]

SEGMENT_FOLDER = re.compile(r"^\d{2}-[a-z0-9_]+$")
PART = re.compile(r"^((?:part|holdout)-\d+)(-\d+)?$")  # a token shard may be one of several of its part


def run(recipe: Recipe, out: str, options: Options, display: Display, lock: RunLock | None = None) -> Outcome:
    """Everything up to the token shards. lock: of the run folder, where the caller holds it already.

    Raises SettingsError, InputError and LockError before any work, RunError when pieces were given up: it names each
    of them.
    """
    with RunLock(out) if lock is None else nullcontext(lock) as held, storage_faults(out):
        if lock is None:
            announce(held, display)
        return _run(recipe, out, options, display, held)


def announce(lock: RunLock, display: Display) -> None:
    """Says it when the driver before was killed."""
    if lock.taken_over is not None:
        display.say(f"Going on for a driver that is gone: {lock.taken_over}.")


@contextmanager
def storage_faults(out: str) -> Iterator[None]:
    """A storage that takes no more is one message, wherever the driver notices it."""
    try:
        yield
    except OSError as error:
        if error.errno not in LASTING:
            raise
        raise RunError(storage_message(out, f"{type(error).__name__}: {error}")) from error


def _run(recipe: Recipe, out: str, options: Options, display: Display, lock: RunLock) -> Outcome:
    if options.cluster is not None:
        options.cluster.check(name for use in recipe.stages for name in (use.key, use.heading))
    downloads.fetch_sources(
        recipe, out, display, scheduler=options.scheduler, cluster=options.cluster, refresh=options.refresh_inputs
    )
    plan = prepare(recipe, out, refresh_inputs=options.refresh_inputs)
    outcome = Outcome(out)
    left = pieces_left(plan, out)
    outcome.found = left.found
    if not left.todo:
        for segment in plan.segments:
            drop_signatures(segment, out)
        display.say(f"Nothing to do: all {left.found:,} pieces of {out} are there and up to date.")
        return outcome
    if left.found:
        display.say(f"Going on: {left.found:,} pieces of {out} are there and up to date.")
    display.say(warm())
    opened = open_engine(
        debug=options.debug,
        workers=options.workers,
        scheduler=options.scheduler,
        cluster=options.cluster,
        timeout_s=options.timeout_s,
        out=out,
        say=display.say,
    )
    with opened as engine:
        if engine.dashboard:
            display.say(f"{engine.workers} workers; dashboard {engine.dashboard}")
        _work_through(plan, out, engine, display, outcome, lock, options)
    # A scheduler of its own begins pieces of a dead worker again without telling the driver.
    if engine.cut_short or options.scheduler is not None or options.cluster is not None:
        remove_leftovers(out)
    return outcome


def work_through(plan: Plan, out: str, engine: Engine, display: Display) -> Outcome:
    """Everything of a plan, in a folder of its own and on a given engine: what `gristmill plan` does with a sample.

    Raises RunError when pieces were given up.
    """
    outcome = Outcome(out)
    with RunLock(out) as lock, storage_faults(out):
        _work_through(plan, out, engine, display, outcome, lock, Options(debug=True))
    return outcome


def _work_through(
    plan: Plan, out: str, engine: Engine, display: Display, outcome: Outcome, lock: RunLock, options: Options
) -> None:
    with Beacon(out, engine) as beacon:
        runner = Runner(plan, out, engine, display, outcome, beacon, lock, options)
        run_segments(runner)
        make_tokens(runner)
        runner.end()


def prepare(recipe: Recipe, out: str, *, refresh_inputs: bool = False) -> Plan:
    """Checks the recipe against its input, freezes the listing, clears what no longer belongs, and plans."""
    shards = frozen(recipe, out, refresh=refresh_inputs)
    formats: dict[str, tuple[str, ...]] = {}
    for shard in shards:
        formats.setdefault(shard.source, tuple(columns_of(shard.format)))
    check(recipe, formats)
    plan = plan_of(recipe, shards, out)
    text = io.StringIO()
    YAML(typ="safe").dump(recipe.dump(), text)
    publish_bytes(join(out, "recipe.yaml"), text.getvalue().encode())
    _prune(plan, out)
    remove_leftovers(out)
    return plan


def _prune(plan: Plan, out: str) -> None:
    """Removes segments and parts that the plan does not know: they are of an earlier recipe or listing."""
    fs, inner = filesystem(out)
    known = {segment.segment.folder for segment in plan.segments}
    if plan.tokenizer is not None:
        known.add("tokens")
    parts = {name for shard in plan.shards for name in (shard.part, shard.part.replace("part-", "holdout-"))}
    for path in fs.ls(inner, detail=False):
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if name != "tokens" and not SEGMENT_FOLDER.match(name):
            continue
        if name not in known:
            fs.rm(path, recursive=True)
            continue
        for file in fs.find(path):
            stem = file.rsplit("/", 1)[-1].split(".")[0]
            if (found := PART.match(stem)) and found[1] not in parts:
                fs.rm(file)
