"""Training speed: our loop beside a plain one, Hugging Face's Trainer and LitGPT, same shapes, threads and allocator.

    python benchmarks/train.py --threads 2                         # figure train.10m
    python benchmarks/train.py --shape 124m --seq-len 512 --batch 4 --rounds 5
    python benchmarks/train.py --litgpt-python LITGPT/bin/python   # LitGPT 0.5.13 in an environment of its own
    python benchmarks/train.py --device cuda                       # where there is a GPU; never tried yet
    python benchmarks/train.py --shape 1m --no-compile --steps 1 --rounds 1 --skip transformers      # a quick look

Each loop runs in a process of its own (`peer_train.py` says in which mode), turn by turn, by the clock on the wall.
--corpus is accepted, as by every benchmark, and ignored: ids are random. --tcmalloc puts the library before all of
them; with --glibc all have its allocator with the settings that `gristmill train` gives its ranks.

    train.10m, train.124m ...    tokens/s of each
    train.share_of_matrix_limit  tokens/s of ours as a share of those that the matrix products of a step alone allow,
                                 forward and backward, on the same sizes, in the same rounds
    train.memory                 peak MB of our process; on a CPU it also holds torch and the compiler's packages
    train.memory_by_formula      MB of one rank, as `gristmill train --plan` computes them
    train.overhead               share of a run of ours that is not the step: data, checks, logging, and a checkpoint
                                 every --checkpoint-every steps

Torch compiles each loop first: a minute or two the first time, less with its cache warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import OURS, Figure, arguments, compared, note, peer, rounds, show
from peer_train import our_job

from gristmill.trainer.config import PRESETS, ModelShape, TrainConfig
from gristmill.trainer.launch import KEEP_MEMORY
from gristmill.trainer.model import count_parameters
from gristmill.trainer.sizing import memory

TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIMIT = "limit"


class Loop:
    """A process of `peer_train.py`, ready for its first turn."""

    def __init__(self, python: Path, name: str, settings: dict[str, Any], environment: dict[str, str]):
        script = str(Path(__file__).parent / "peer_train.py")
        self.name, self.memory_mb = name, 0.0
        self.process = subprocess.Popen(
            [str(python), script, name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.version: str = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"The loop {self.name} ended; its error stands above. --skip {self.name} leaves it out.")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self) -> float:
        """Of one turn."""
        self.process.stdin.write("turn\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        found = self._answer()
        self.memory_mb = found["memory_mb"]
        return float(found["seconds"])

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.kill()
        self.process.wait()


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Threads and the allocator, the same for all."""
    threads = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    if not options.tcmalloc:
        return {**KEEP_MEMORY, **os.environ, **threads}
    return {**os.environ, **threads, "LD_PRELOAD": str(options.tcmalloc)}


def settings_of(options: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    return {
        "shape": shape.model_dump(),
        "vocab": shape.vocab_size,
        "seq_len": options.seq_len,
        "batch": options.batch,
        "steps": options.steps,
        "dtype": options.dtype,
        "compile": options.compile,
        "device": options.device,
        "threads": options.threads,
    }


def loops(options: argparse.Namespace, stack: contextlib.ExitStack, shape: ModelShape) -> dict[str, Loop]:
    """Started and warm, one after the other, by package and version; ours is OURS, the bare products are LIMIT."""
    here = Path(sys.executable)
    wanted = {OURS: here, LIMIT: here}
    for name, needs in (("torch", ()), ("transformers", ("accelerate",))):
        if peer(name, options.skip, needs=needs):
            wanted[name] = here
    if options.litgpt_python and "litgpt" not in options.skip:
        wanted["litgpt"] = options.litgpt_python
    found: dict[str, Loop] = {}
    for name, python in wanted.items():
        note(f"{name}: starting")
        loop = Loop(python, name, settings_of(options, shape), environment(options))
        stack.callback(loop.close)
        found[name if name in (OURS, LIMIT) else loop.version] = loop
    return found


def predicted_mb(options: argparse.Namespace, shape: ModelShape) -> float:
    """By formula, of one rank."""
    config = TrainConfig(
        model=shape,
        seq_len=options.seq_len,
        batch_windows=options.batch,
        dtype=options.dtype,
        compile=options.compile,
        device=options.device,
        steps=1,
    )
    return memory(shape, config).total / 2**20


def overhead(options: argparse.Namespace, shape: ModelShape) -> float:
    """Share of a run's time that is not the step: data, checks, logging, checkpoints."""
    from gristmill.trainer import train

    settings = SimpleNamespace(**settings_of(options, shape) | {"compile": False})
    steps = options.checkpoint_every
    with tempfile.TemporaryDirectory() as folder:
        job = our_job(settings, Path(folder), steps=steps + 1, checkpoint_every=steps)
        inside = [0.0]

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: object) -> Any:
                began = time.perf_counter()
                result = function(*arguments)
                inside[0] += time.perf_counter() - began
                return result

            return call

        real = train.step, train.update
        train.step, train.update = timed(train.step), timed(train.update)
        try:
            began = time.perf_counter()
            train.loop(job)
            return 1 - inside[0] / (time.perf_counter() - began)
        finally:
            train.step, train.update = real


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    torch.set_num_threads(options.threads)
    shape = PRESETS[options.shape].resolved(options.vocab)
    tokens = options.steps * options.batch * options.seq_len
    where = f"{options.threads} threads" if options.device == "cpu" else torch.cuda.get_device_name()
    note(f"{options.shape}: {count_parameters(shape):,} parameters, {options.dtype}, {where}.")
    with contextlib.ExitStack() as stack:
        running = loops(options, stack, shape)

        def job(loop: Loop) -> Callable[[], float]:
            return lambda: tokens / loop.seconds()

        found = rounds({name: job(loop) for name, loop in running.items()}, options.rounds)
        megabytes = running[OURS].memory_mb
    share = statistics.median(ours / bare for ours, bare in zip(found[OURS], found.pop(LIMIT), strict=True))
    yield from compared(f"train.{options.shape}", "tokens/s", found)
    yield Figure("train.share_of_matrix_limit", share, "share")
    yield Figure("train.memory", megabytes, "MB")
    yield Figure("train.memory_by_formula", predicted_mb(options, shape), "MB")
    if options.checkpoint_every:
        yield Figure("train.overhead", overhead(options, shape), "share")


def found_tcmalloc() -> Path | None:
    """Where Debian and Ubuntu put it."""
    folders = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"))
    places = [folder / name for folder in folders for name in TCMALLOC]
    return next((place for place in places if place.exists()), None)


def main() -> None:
    parser = arguments(__doc__, corpus=False)
    parser.add_argument("--shape", default="10m", choices=["1m", "3m", "10m", "124m"])
    parser.add_argument("--vocab", type=int, default=8_192, help="ids")
    parser.add_argument("--dtype", default="bf16", choices=["float32", "bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps; of train.overhead, 0 leaves it out")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="all loops as they are written")
    parser.add_argument("--litgpt-python", type=Path, metavar="PYTHON", help="interpreter with litgpt")
    parser.add_argument(
        "--tcmalloc", type=Path, default=found_tcmalloc(), metavar="LIBRARY", help="put before all loops"
    )
    parser.add_argument("--glibc", dest="tcmalloc", action="store_const", const=None, help="its allocator instead")
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
