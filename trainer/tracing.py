"""`profile: true`: a trace of a few steps by PyTorch's profiler, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

FOLDER = "profile"
SKIPPED, WARM, TRACED = 1, 1, 3  # steps after each start


@contextmanager
def tracing(wanted: bool, out: Path, rank: int, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """A function to call after every step. Writes `profile/rank-0.json` in the run's folder, for each rank.

    Steps SKIPPED + WARM + 1 to SKIPPED + WARM + TRACED after the start are traced; the run goes on after them.
    """
    if not wanted:
        yield lambda: None
        return
    from torch.profiler import ProfilerActivity, profile, schedule

    path = out / FOLDER / f"rank-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    done = 0
    written = []

    def write(profiler: profile) -> None:
        if done <= SKIPPED + WARM:
            return
        half = path.with_name(path.name + ".tmp")
        profiler.export_chrome_trace(str(half))
        half.replace(path)
        written.append(path)
        say(f"Trace of {min(TRACED, done - SKIPPED - WARM)} steps: {path}")

    def step() -> None:
        nonlocal done
        done += 1
        profiler.step()

    with profile(
        activities=activities,
        schedule=schedule(wait=SKIPPED, warmup=WARM, active=TRACED, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        yield step
    if not written:
        say(f"No trace: the run had fewer than {SKIPPED + WARM + 1} steps to go.")
