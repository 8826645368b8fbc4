"""Forks: several branches from one checkpoint of a trunk, each with a mixture and a schedule of its own.

    config = branch_config("out/trunk@2000", branch_tokens=50_000_000)          # a decay to 0 from there
    launch.run(config, "mixtures/anneal.yaml", tokens, "out/anneal-a")

`init_from` in the settings names the trunk: a run (its newest checkpoint), `RUN@STEP`, `RUN@best`, or one checkpoint.
Weights, moments, and the counts of steps and windows carry over, so `steps` and `budget_tokens` count the trunk's too,
and the schedule goes on at the trunk's step. With `schedule: wsd` and `decay: fork` the decay begins at the fork.

Which windows come: where the mixture, compiled for the whole run, begins as the trunk did, the fork is the trunk's
continuation, window for window. Otherwise the mixture fills what is left of the run, and takes up each source where
the trunk stopped (`mixtures/consumption.py`): its phases count from the fork. The log says which.

fork.json in the fork's folder keeps what must be known of the trunk, which may be deleted once the fork has a
checkpoint of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xxhash

from gristmill.mixtures.consumption import CONSUMPTION_FILE, Consumption
from gristmill.stages.documents import Settings
from gristmill.stages.shards import publish_bytes
from gristmill.trainer import metrics
from gristmill.trainer.checkpoint import STATE_FILE, find_checkpoint, read_state, split_mark
from gristmill.trainer.config import RUN_FILE, Run, TrainConfig, TrainError
from gristmill.trainer.optim import warmup_steps

FORK_FILE = "fork.json"


class Trunk(Settings):
    """A checkpoint to begin from."""

    named: str  # as `full_name` gives it
    checkpoint: str  # folder
    step: int
    windows: int  # consumed
    digest: str  # of its state.json, so of all its files
    prefix: str  # identity of the windows consumed
    counts: dict[str, int]  # windows of each source, of the run with those of its own trunk
    used: Consumption
    tokenizer: str
    config: TrainConfig
    before: Trunk | None = None  # where the trunk itself was forked from


def full_name(init_from: str) -> str:
    """The same with an absolute path."""
    path, mark = split_mark(init_from)
    return f"{path.resolve()}@{mark}" if mark else str(path.resolve())


def find_trunk(init_from: str) -> Trunk:
    """Reads what is needed of the trunk. Raises TrainError."""
    folder = find_checkpoint(init_from)
    state = read_state(folder)
    if not state.prefix:
        raise TrainError(f"{folder}: of an earlier version, which cannot be forked. Let its run save another one.")
    above = folder.parents[1] / FORK_FILE
    return Trunk(
        named=full_name(init_from),
        checkpoint=str(folder),
        step=state.progress.step,
        windows=state.progress.windows,
        digest=xxhash.xxh3_128_hexdigest((folder / STATE_FILE).read_bytes()),
        prefix=state.prefix,
        counts=state.counts,
        used=Consumption.read(folder / CONSUMPTION_FILE),
        tokenizer=state.tokenizer,
        config=Run.load(folder.parents[1] / RUN_FILE).config,
        before=_read(above) if above.exists() else None,
    )


def trunk_of(run: Run) -> Trunk | None:
    """The trunk of a run, from its own folder once it has begun. None for a run that is no fork."""
    if not run.config.init_from:
        return None
    kept = Path(run.out) / FORK_FILE
    if kept.exists():
        trunk = _read(kept)
        if trunk.named == full_name(run.config.init_from):
            return trunk
    return find_trunk(run.config.init_from)


def _read(path: Path) -> Trunk:
    try:
        return Trunk.model_validate_json(path.read_bytes())
    except ValueError as error:
        raise TrainError(f"{path}: not what a fork keeps of its trunk: {error}") from error


def ancestors(trunk: Trunk) -> list[Trunk]:
    """Where the trunk was forked itself, the earliest first."""
    return [] if trunk.before is None else [*ancestors(trunk.before), trunk.before]


def keep(trunk: Trunk, out: Path) -> None:
    """Writes fork.json."""
    publish_bytes(str(out / FORK_FILE), trunk.model_dump_json(indent=1).encode() + b"\n")


def check(trunk: Trunk, config: TrainConfig, tokenizer: str) -> None:
    """Raises TrainError where the fork could not go on from the trunk's state. tokenizer: digest, of the fork's."""
    theirs = trunk.config
    different = [
        f"{name} {_short(getattr(theirs, name))} (here {_short(getattr(config, name))})"
        for name in ("optimizer", "seq_len", "batch_windows", "seed")
        if getattr(theirs, name) != getattr(config, name)
    ]
    if theirs.shape != config.shape:
        different.append("another shape of the model")
    if trunk.tokenizer != tokenizer:
        different.append("another tokenizer")
    if different:
        raise TrainError(
            f"init_from: {trunk.checkpoint}: the trunk has {', '.join(different)}. A fork goes on with its weights, "
            "its optimizer and its books, so these must be the same; rate, schedule, mixture and length may change."
        )
    if config.total_steps <= trunk.step:
        raise TrainError(
            f"init_from: {trunk.checkpoint}: after step {trunk.step}, but the run ends with step {config.total_steps}. "
            "`steps` and `budget_tokens` count the trunk's too: give more."
        )


def _short(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def branch_config(init_from: str, branch_tokens: int, config: TrainConfig | None = None, **changes: Any) -> TrainConfig:
    """Settings of a branch: the trunk's, or `config`, with a linear decay to 0 over `branch_tokens` from the fork.

    The rate begins where the trunk's stood. changes: of single settings; they win. Raises TrainError.
    """
    trunk = find_trunk(init_from)
    base = trunk.config if config is None else config
    steps = branch_tokens // base.tokens_per_step
    if not steps:
        raise TrainError(
            f"A branch of {branch_tokens:,} tokens is less than one step of {base.tokens_per_step:,}. Give more."
        )
    lines = metrics.read(Path(trunk.checkpoint).parents[1] / metrics.METRICS_FILE)
    rate = next((line["lr"] for line in reversed(lines) if line["step"] == trunk.step), base.lr)
    settings = {
        **base.model_dump(),
        "init_from": init_from,
        "steps": trunk.step + steps,
        "budget_tokens": 0,
        "lr": rate,
        "warmup": float(min(trunk.step, warmup_steps(base))),
        "schedule": "wsd",
        "decay": "fork",
        "min_lr_ratio": 0.0,
        **changes,
    }
    return TrainConfig.model_validate(settings)
