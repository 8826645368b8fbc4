"""The short form of `make train-drill`: real processes, real kills."""

from __future__ import annotations

import random
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from gristmill.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drill():
    spec = spec_from_file_location("train_drill", ROOT / "tools/train_drill.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.end_to_end
def test_ranks_and_the_agent_are_killed_and_the_curve_is_the_undisturbed_one(drill, tmp_path):
    config = TrainConfig(
        model={"width": 32, "layers": 2, "heads": 2},
        seq_len=32,
        batch_windows=8,
        steps=120,
        ranks=2,
        lr=0.01,
        checkpoint_every=7,
        trackers=(),
    )
    outcome = drill.drill(tmp_path / "drill", kills=2, others=1, seed=3, config=config, say=print)
    assert outcome["passed"], outcome["problems"]
    assert outcome["faults"] == 3


def test_the_hand_tells_a_restart_from_lines_written_before(drill, monkeypatch):
    """Lines 5 and 6 were written before the kill; the restart reads the file from 1 on and does step 5 again."""
    killed = []

    class Victim:
        def send_signal(self, number):
            killed.append(number)

    monkeypatch.setattr(drill, "processes", lambda agent: [Victim()])
    monkeypatch.setattr(drill.time, "sleep", lambda seconds: None)
    hand = drill.Hand(["rank", "rank"], random.Random(0), print, next_step=4)
    for step in (1, 2, 3, 4, 5, 6):
        hand.watch({"step": step})
    assert len(killed) == 1
    for step in (1, 2, 3):
        hand.watch({"step": step})
    assert hand.recovered_s == []
    hand.watch({"step": 4})
    assert [kind for kind, _ in hand.recovered_s] == ["rank"]
    assert hand.next_step > 4
    assert len(killed) == 1
