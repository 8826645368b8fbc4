"""The fault drill of the trainer: ranks and the agent are killed, and the curve must be that of an undisturbed run.

    python tools/train_drill.py --folder build/train-drill            # 20 kills of a rank, 6 other faults

A seeded hand picks the step, the moment within it, and the rank. Faults after the first `--kills` are, in turn: kill -9
of torchrun's agent, SIGTERM to it followed by the same command, kill -9 of all ranks at once, and of a rank twice, the
second time while it may still be starting. A run that ends
before the last fault is followed by one in a folder of its own. The model is tiny and its text is made up, so that
faults fall everywhere: start-up, steps, checkpoints, scores.

Passed when every fault was followed by more steps without anybody's help (after SIGTERM: with the same command), and
metrics.jsonl, the last checkpoint and the scores are those of the undisturbed run, bit for bit. Prints one line of
JSON in the end. Exit code 0 passed, 1 not.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from gristmill.trainer import launch, metrics
from gristmill.trainer.checkpoint import complete, read_state
from gristmill.trainer.config import TrainConfig, TrainError

ROOT = Path(__file__).resolve().parent.parent
TIMING = {"tokens_per_s", "mfu", "memory_bytes"}
OTHERS = ("agent", "SIGTERM", "all ranks", "rank, and one that starts")
STARTING_S = (0.5, 6.0)  # after a kill: when the next one falls on a rank that starts


def data(folder: Path) -> tuple[Path, Path]:
    """Token shards and a mixture: those of the trainer's tests."""
    spec = spec_from_file_location("trainer_conftest", ROOT / "tests/trainer/conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    mixture = folder / "even.yaml"
    mixture.write_text("name: even\nmax_epochs: 1000\nsources: {tidy: 0.5, noise: 0.5}\n")
    return module.write_tokens(folder / "tokens", {"tidy": (400, True), "noise": (150, False)}), mixture


def result(out: Path) -> dict[str, Any]:
    """What must be the same."""
    last = complete(out / "checkpoints")[-1]
    files = read_state(last).files
    return {
        "curve": [{k: v for k, v in line.items() if k not in TIMING} for line in metrics.read(out / "metrics.jsonl")],
        "checkpoint": {"step": last.name, **{n: d for n, d in files.items() if n.endswith(".distcp")}},
        "scores": (out / "scores.json").read_text(),
    }


def processes(agent: bool) -> list[psutil.Process]:
    """The agent, or the ranks, below this process."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "gristmill.trainer.train" in line and ("gristmill.trainer.agent" in line) == agent:
            found.append(child)
    return found


@dataclass
class Hand:
    """Strikes at random steps of the runs that it watches; a line of metrics after a fault means that it came back."""

    faults: list[str]
    rng: random.Random
    say: Callable[[str], None]
    recovered_s: list[tuple[str, float]] = field(default_factory=list)
    next_step: int = 0
    last_step: int = 0
    struck: tuple[str, int, float] | None = None  # kind, step, when
    back: bool = False  # whether a restart was seen since

    def plan(self, after: int) -> None:
        self.next_step = after + self.rng.randint(2, 40)

    def watch(self, line: dict[str, Any]) -> None:
        """A restart reads metrics.jsonl from its beginning again: the step goes back. It has come back for good when
        the step of the fault is done again."""
        step = int(line["step"])
        went_back, self.last_step = step <= self.last_step, step
        if self.struck is not None:
            kind, when_step, when = self.struck
            self.back |= went_back
            if self.back and step >= when_step:
                self.recovered_s.append((kind, round(time.monotonic() - when, 2)))
                self.struck = None
                self.plan(step)
        elif self.faults and step >= self.next_step:
            self.strike(step)

    def strike(self, step: int) -> None:
        kind = self.faults[0]
        time.sleep(self.rng.random() * 0.1)
        victims = processes(agent=kind in ("agent", "SIGTERM"))
        if not victims:
            return
        if kind.startswith("rank"):
            victims = [self.rng.choice(victims)]
        for victim in victims:
            victim.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        if kind == "rank, and one that starts":
            threading.Timer(self.rng.uniform(*STARTING_S), self.strike_again).start()
        self.faults.pop(0)
        self.struck, self.back = (kind, step, time.monotonic()), False
        self.say(f"step {step}: {kind}")

    def strike_again(self) -> None:
        ranks = processes(agent=False)
        if ranks:
            with suppress(psutil.NoSuchProcess):
                self.rng.choice(ranks).kill()


def drill(
    folder: Path, kills: int, others: int, seed: int, config: TrainConfig, say: Callable[[str], None]
) -> dict[str, Any]:
    """-> the line of JSON; its "passed" says it all."""
    folder.mkdir(parents=True)
    tokens, mixture = data(folder)
    launch.run(config, str(mixture), str(tokens), str(folder / "undisturbed"))
    expected = result(folder / "undisturbed")
    faults = ["rank"] * kills + [OTHERS[i % len(OTHERS)] for i in range(others)]
    hand = Hand(faults, random.Random(seed), say)  # noqa: S311
    problems: list[str] = []
    runs = 0
    while (hand.faults or hand.struck) and len(problems) < 3:
        runs += 1
        out = folder / f"run-{runs}"
        hand.plan(0)
        hand.last_step = 0
        try:
            while launch.run(config, str(mixture), str(tokens), str(out), hand.watch).status == "stopped":
                say("the same command again")
        except TrainError as error:
            problems.append(f"{out.name}: {hand.struck}: {error}")
            hand.struck = None
            continue
        hand.struck = None  # struck after the last step: nothing more was to come
        found = result(out)
        problems += [f"{out.name}: another {name}" for name in expected if found[name] != expected[name]]
    seconds = {
        kind: [s for k, s in hand.recovered_s if k == kind] for kind in dict.fromkeys(k for k, _ in hand.recovered_s)
    }
    return {
        "passed": not problems,
        "faults": kills + others - len(hand.faults),
        "came_back": {kind: len(each) for kind, each in seconds.items()},
        "median_seconds": {kind: median(each) for kind, each in seconds.items()},
        "worst_seconds": {kind: max(each) for kind, each in seconds.items()},
        "runs": runs,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks of a training run again and again.")
    parser.add_argument("--folder", type=Path, default=Path("build/train-drill"), help="must not exist")
    parser.add_argument("--kills", type=int, default=20, help="of a random rank")
    parser.add_argument("--others", type=int, default=6, help="faults of the other kinds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    config = TrainConfig.model_validate(
        {
            "model": {"width": 32, "layers": 2, "heads": 2},
            "seq_len": 32,
            "batch_windows": 4 * args.ranks,
            "steps": args.steps,
            "ranks": args.ranks,
            "lr": 0.01,
            "checkpoint_every": 7,
            "trackers": [],
        }
    )
    outcome = drill(args.folder, args.kills, args.others, args.seed, config, lambda text: print(text, flush=True))
    print(json.dumps(outcome))
    return 0 if outcome["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
