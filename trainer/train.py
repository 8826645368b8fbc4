"""READ FIRST: the training loop, one process of it.

    torchrun --standalone --nproc-per-node 2 -m gristmill.trainer.train --config out/run.json
    python -m gristmill.trainer.train --config out/run.json           # one rank, no process group

`launch.run` writes run.json (`config.Run`), starts the ranks, follows them, and tells what came out. Every rank does

    plan = mixture compiled over the tokens: which windows come when, as a function
    model, optimizer = from the seed, then from the newest sound checkpoint
    for each step:
        windows of this rank -> loss -> gradients, summed over ranks
        one sum over ranks: loss, squared gradient norm, wish to stop
        not a number? leave the weights alone, count it, go on; too often: stop
        clip, update, log a line, save now and then
    score the held-out documents -> scores.json; done.json last

and leaves in the folder of the run

    run.json  metrics.jsonl  checkpoints/step-00000100/...  scores.json  done.json  log.txt (from launch)

Resuming needs one integer, the number of windows consumed. On the same number of ranks the continuation is bit-equal
to an undisturbed run; on another number the windows are the same and the loss differs by rounding. SIGTERM and SIGINT
save and exit. A rank that loses its parent (the agent was killed) does the same.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any

import orjson
import psutil
import torch
from torch import Tensor

from gristmill.mixtures.consumption import CONSUMPTION_FILE
from gristmill.mixtures.plan import MixtureError
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenError, TokenSet
from gristmill.trainer import checkpoint, fork
from gristmill.trainer.checkpoint import CheckpointState, Progress
from gristmill.trainer.config import (
    DONE_FILE,
    FAILED_FILE,
    LAUNCHER,
    SCORES_FILE,
    STOPPED_FILE,
    Run,
    TrainConfig,
    TrainError,
    pause,
)
from gristmill.trainer.feed import Feed, Windows, open_feed
from gristmill.trainer.group import Group, join, shard
from gristmill.trainer.journal import Journal
from gristmill.trainer.model import Llama, count_parameters, flops_per_token, initialise
from gristmill.trainer.muon import Muon, make_optimizer
from gristmill.trainer.optim import (
    AdamW,
    decay_start_of_phase,
    learning_rate,
    scale_gradients,
    squared_norm,
)
from gristmill.trainer.parallel import defer_sums
from gristmill.trainer.saver import Saver
from gristmill.trainer.score import Yardstick, score, yardstick
from gristmill.trainer.sizing import device_peak, peak_memory
from gristmill.trainer.tracing import tracing

LOCK_FILE = ".lock"
RESERVE_FILE, RESERVE_BYTES = ".reserve", 1 << 16
FULL_DISK = {errno.ENOSPC, errno.EDQUOT}
LOCK_PATIENCE_S = 60.0  # for ranks of a group that is just ending
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Job:
    """What one rank works with."""

    run: Run
    group: Group
    tokens: TokenSet
    feed: Feed
    model: Llama
    optimizer: AdamW | Muon
    progress: Progress
    saver: Saver
    journal: Journal | None  # of the leader, while the loop runs
    decay_from: int | None  # first step of wsd's decay
    peak: float  # FLOP/s of all ranks together, as `sizing.device_peak`

    @property
    def config(self) -> TrainConfig:
        return self.run.config

    @property
    def out(self) -> Path:
        return Path(self.run.out)

    @cached_property
    def flops_per_step(self) -> float:
        return flops_per_token(self.model.shape, self.config.seq_len) * self.config.tokens_per_step

    @cached_property
    def yardstick(self) -> Yardstick:
        """Documents that are scored, encoded once."""
        return yardstick(self.tokens, self.config)


def say(text: str) -> None:
    """One line for the log; every rank may speak, the leader does. A full disk does not end the run here."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def prepare(run: Run, group: Group) -> Job:
    """Model and optimizer from the seed, or from the newest sound checkpoint."""
    config = run.config
    tokens = TokenSet.open(run.tokens)
    feed = open_feed(run, tokens)
    shape = config.shape.resolved(tokens.vocab_size)
    with torch.device("meta"):
        model = Llama(shape, DTYPES[config.dtype], config.recompute)
    if config.compile:
        model.compile_parts()
    shard(model, group)
    model.to_empty(device=group.device)
    initialise(model, config.seed)
    optimizer = make_optimizer(model, config)
    heard = say if group.leads else lambda text: None
    progress = checkpoint.load(Path(run.out) / "checkpoints", model, optimizer, feed.course, group, heard)
    if progress is None and feed.trunk is not None:
        progress = begin_fork(feed, Path(run.out), model, optimizer, group, heard)
    decay_from = decay_start_of_phase(config, feed.phases)
    if progress is not None:
        heard(f"Going on after step {progress.step} of {config.total_steps}.")
    else:
        heard(
            f"{count_parameters(shape):,} parameters, {flops_per_token(shape, config.seq_len):,.0f} FLOPs a token, "
            f"{config.total_steps:,} steps of {config.tokens_per_step:,} tokens on {group.world} ranks."
        )
    peak = sum(group.gather(device_peak(group.device, config.dtype)))
    saver = Saver(Path(run.out) / "checkpoints", model, optimizer, group, config)
    return Job(run, group, tokens, feed, model, optimizer, progress or Progress(), saver, None, decay_from, peak)


def begin_fork(
    feed: Feed, out: Path, model: Llama, optimizer: AdamW | Muon, group: Group, heard: Callable[[str], None]
) -> Progress:
    """The trunk's state, for the first start of a fork."""
    trunk = feed.trunk
    assert trunk is not None
    progress = checkpoint.begin_from(Path(trunk.checkpoint), trunk.digest, model, optimizer, group)
    if group.leads:
        fork.keep(trunk, out)
    heard(
        f"Forked from {trunk.checkpoint}. "
        + (
            f"Mixture {feed.plan.mixture} begins as the trunk's did, and goes on in the same order."
            if feed.continues
            else f"Mixture {feed.plan.mixture} begins here, and takes up each source where the trunk stopped."
        )
    )
    return progress


def abandoned() -> bool:
    """Whether the process that launched the run is gone."""
    launcher = os.environ.get(LAUNCHER)
    return launcher is not None and not psutil.pid_exists(int(launcher))


class StopRequest:
    """Remembers SIGTERM, SIGINT, and the loss of the parent or of the launcher, until the step is done."""

    def __init__(self) -> None:
        self._signalled = False
        self._parent = os.getppid()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        before = {n: signal.signal(n, self._remember) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._signalled or self.orphaned

    @property
    def orphaned(self) -> bool:
        """Whether nobody is there who waits for this run: it saves, but was not asked to stop."""
        return abandoned() or os.getppid() != self._parent


@dataclass(frozen=True)
class Step:
    """What a step came to, the same on all ranks."""

    loss: float  # mean nats a target over the whole batch
    grad_norm: float  # before clipping
    penalty: float  # mean of log Z squared
    stop: bool

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def backward(job: Job, windows: Windows) -> Tensor:
    """Gradients of this rank's windows -> (2,) float64: summed nats, summed z penalty.

    The loss is the sum over this rank's targets divided by the targets of the whole batch: exact whatever the ranks
    and micro-batches. Gradients are averaged over the ranks that read different windows, so the loss is scaled back up.
    """
    config, group = job.config, job.group
    micro = config.micro_windows or len(windows.ids)
    sums = torch.zeros(2, dtype=torch.float64, device=group.device)
    for start in range(0, len(windows.ids), micro):
        defer_sums(job.model, start + micro < len(windows.ids))
        part, targets, owners = (
            None if array is None else torch.from_numpy(array[start : start + micro]).to(group.device)
            for array in (windows.ids, windows.targets, windows.documents)
        )
        assert part is not None
        assert targets is not None
        nll, penalty = job.model(part[:, :-1], targets.contiguous(), owners, config.z_loss)
        (nll * (group.data_world / max(windows.predicted, 1))).backward()
        sums += torch.stack([nll.detach(), penalty]).double()
    return sums if group.speaks else torch.zeros_like(sums)


def step(job: Job, windows: Windows, stop: bool) -> Step:
    """Gradients of one batch, and the one sum over ranks that says what they are worth."""
    if not job.config.boundary_loss:
        windows = windows.counted(job.group)
    sums = backward(job, windows)
    tail = torch.tensor([float(stop)], dtype=torch.float64, device=sums.device)
    norm = squared_norm(job.optimizer.parameters.values(), job.group.world).to(sums.device)
    sums = job.group.sum(torch.cat([sums, norm[None], tail]))
    nll, penalty, squared, stops = sums.tolist()
    targets = max(windows.predicted, 1)
    return Step(nll / targets, math.sqrt(squared) if squared >= 0 else math.nan, penalty / targets, stops > 0)


def update(job: Job, outcome: Step, lr: float) -> None:
    """Clips and updates, or leaves the weights alone where a number is not one, and counts it."""
    config, progress = job.config, job.progress
    if outcome.finite:
        if config.clip and outcome.grad_norm > config.clip:
            scale_gradients(job.optimizer.parameters.values(), config.clip / (outcome.grad_norm + 1e-6))
        job.optimizer.step(lr)
        progress.updates, progress.skipped_in_row = job.optimizer.updates, 0
    else:
        progress.skipped += 1
        progress.skipped_in_row += 1
    job.optimizer.zero_grad()


def refuse_more(job: Job) -> None:
    """Raises TrainError after too many skipped steps in a row."""
    config, progress = job.config, job.progress
    if progress.skipped_in_row > config.max_skipped:
        raise TrainError(
            f"{job.out}: loss or gradient was not a number in {progress.skipped_in_row} steps in a row, up to step "
            f"{progress.step}. The weights are those of the last sound step; spikes.jsonl has the documents. "
            f"Lower lr (now {config.lr:g}) or clip (now {config.clip:g})."
        )


def loop(job: Job) -> bool:
    """Trains to the end -> whether it got there; False when it was asked to stop, after saving."""
    config, group = job.config, job.group
    with StopRequest().listening() as stop, tracing(config.profile, job.out, group.rank, say) as traced:
        if not group.leads:
            return _steps(job, stop, traced)
        with Journal(job.out, job.progress.step, job.feed, config, say) as job.journal:
            return _steps(job, stop, traced)


def _steps(job: Job, stop: StopRequest, traced: Callable[[], None]) -> bool:
    config, group, progress = job.config, job.group, job.progress
    batches = job.feed.batches(group.data_rank, group.data_world, progress.windows)
    try:
        while progress.step < config.total_steps:
            began = time.perf_counter()
            windows = next(batches)
            outcome = step(job, windows, bool(stop))
            lr = learning_rate(config, progress.step, job.decay_from)
            update(job, outcome, lr)
            progress.step += 1
            progress.windows += config.batch_windows
            line = _line(job, outcome, lr, time.perf_counter() - began)
            if job.feed.packed:
                line["padding_share"] = round(1 - windows.predicted / config.tokens_per_step, 6)
            last = progress.step == config.total_steps
            if _due(config.eval_every, progress.step) and not last:
                scores = score(job.model, job.yardstick, group, progress.step)
                line["bits_per_byte"] = scores.bits_per_byte
                if scores.sets:
                    line["evaluation_sets"] = scores.of_sets
            if job.journal is not None:
                job.journal.add(line)
            refuse_more(job)
            if last or outcome.stop or _due(config.checkpoint_every, progress.step):
                save(job, must=last or outcome.stop)
            tell_problems(job)
            traced()
            if outcome.stop and not last:
                if group.leads:
                    say(f"Asked to stop: saved after step {progress.step} of {config.total_steps}.")
                    if not stop.orphaned:
                        publish_bytes(str(job.out / STOPPED_FILE), orjson.dumps({"step": progress.step}))
                return False
    finally:
        job.saver.settle()
    return True


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def snapshot(job: Job) -> CheckpointState:
    """What a checkpoint says of itself, but for its files."""
    windows = job.progress.windows
    return CheckpointState(
        course=job.feed.course,
        prefix=job.feed.prefix(windows),
        counts=job.feed.counts(windows),
        tokenizer=job.tokens.manifest.tokenizer_xxh3,
        progress=job.progress.model_copy(),
        world=job.group.world,
        loss=job.journal.loss_at(job.progress.step) if job.journal is not None else {},
    )


def save(job: Job, must: bool) -> None:
    """Saves a checkpoint. Where the disk refuses, training goes on without, unless this one is needed."""
    books = job.feed.books(job.progress.windows).encoded()
    try:
        job.saver.save(snapshot(job), {CONSUMPTION_FILE: books}, wait=must)
    except OSError as error:
        raise TrainError(f"{error} Free some space and run again: training goes on from the last one.") from error


def tell_problems(job: Job) -> None:
    for text in job.saver.problems():
        if job.group.leads:
            say(f"{text} Training goes on; older checkpoints are untouched.")


def _line(job: Job, outcome: Step, lr: float, seconds: float) -> dict[str, Any]:
    """A line of metrics.jsonl. Numbers that are none become null."""
    progress, config = job.progress, job.config
    line = {
        "step": progress.step,
        "tokens": progress.windows * config.seq_len,
        "loss": outcome.loss if math.isfinite(outcome.loss) else None,
        "lr": lr,
        "grad_norm": outcome.grad_norm if math.isfinite(outcome.grad_norm) else None,
        "tokens_per_s": round(config.tokens_per_step / seconds, 1),
        "mfu": round(job.flops_per_step / seconds / job.peak, 4),
        "memory_bytes": peak_memory(job.group.device),  # the leader's
        "sources": job.feed.consumed(progress.windows),
    }
    if config.z_loss:
        line["z_penalty"] = outcome.penalty
    if not outcome.finite:
        line["skipped"] = True
    return line


def finish(job: Job, seconds: float) -> None:
    """Scores the model and says that the run is done, in this order."""
    config, key = job.config, job.feed.key
    scores = score(job.model, job.yardstick, job.group, job.progress.step, key)
    if not job.group.leads:
        return
    publish_bytes(str(job.out / SCORES_FILE), scores.encoded())
    done = {
        "key": key,
        "steps": job.progress.step,
        "tokens": job.progress.windows * config.seq_len,
        "updates": job.progress.updates,
        "skipped": job.progress.skipped,
        "seconds": round(seconds, 2),  # of this start only, without loading packages
        "parameters": count_parameters(job.model.shape),
        "flops_per_token": flops_per_token(job.model.shape, config.seq_len),
        "sources": job.feed.consumed(job.progress.windows),
        "bits_per_byte": scores.bits_per_byte,
    }
    if scores.sets:
        done["evaluation_sets"] = scores.of_sets
    if job.feed.packed:
        done["padding_share"] = job.feed.padding_share(job.progress.windows)
    publish_bytes(str(job.out / DONE_FILE), orjson.dumps(done, option=orjson.OPT_INDENT_2))


@contextmanager
def only_writer(out: Path, leads: bool) -> Iterator[None]:
    """Keeps a second group out of the folder. Raises TrainError when one stays there."""
    if not leads:
        yield
        return
    file: IO[bytes]
    with (out / LOCK_FILE).open("wb") as file:
        until = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TrainError(
                        f"{out}: another run is training in this folder. Wait for it, or end it, and start again."
                    ) from None
                time.sleep(0.2)
        with reserved(out):
            yield


@contextmanager
def reserved(out: Path) -> Iterator[None]:
    """Keeps some space, so that on a full disk there is room to say what happened. Raises TrainError where it is full.

    Given back when the block ends, however it does. Random bytes: file systems that compress would keep nothing.
    """
    path = out / RESERVE_FILE
    try:
        path.write_bytes(os.urandom(RESERVE_BYTES))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise TrainError(f"{out}: cannot be written to: {error.strerror}. Free some space and run again.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def work(run: Run, group: Group) -> None:
    """One rank from start to end."""
    began = time.perf_counter()
    out = Path(run.out)
    with only_writer(out, group.leads):
        group.gather(None)  # nobody reads the folder before it is ours
        if group.leads:
            (out / STOPPED_FILE).unlink(missing_ok=True)
            for half in (out / "checkpoints").glob("*.tmp"):
                shutil.rmtree(half)
        job = prepare(run, group)
        if loop(job):
            finish(job, time.perf_counter() - began)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 also for an error that a restart cannot mend: torchrun would start the group again. It is written to
    failed.json, where `launch` finds it; without torchrun the exit code is 1."""
    parser = argparse.ArgumentParser(description="One rank of a training run; start it with torchrun.")
    parser.add_argument("--config", type=Path, required=True, help="run.json")
    run = Run.load(parser.parse_args(arguments).config)
    failed = Path(run.out) / FAILED_FILE
    if failed.exists() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        return 0  # the group failed for good; the ranks that were cut off by it need not try
    if abandoned():
        return 0  # an agent that outlived its launcher started this
    time.sleep(pause(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))
    torch.set_num_threads(run.config.threads)
    group = None
    try:
        group = join(run.config)
        work(run, group)
    except (TrainError, TokenError, MixtureError, SettingsError) as error:
        return _give_up(failed, type(error).__name__, str(error))
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        text = f"{error.filename or run.out}: {error.strerror}. Free some space and run again: training goes on from "
        return _give_up(failed, "TrainError", text + "the last checkpoint.")
    group.leave()
    return 0


def _give_up(failed: Path, kind: str, message: str) -> int:
    say(f"{kind}: {message}")
    publish_bytes(str(failed), orjson.dumps({"error": kind, "message": message}))
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else 1


if __name__ == "__main__":
    sys.exit(main())
