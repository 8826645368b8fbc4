"""What the leader writes down: spikes with their documents, trackers, traces."""

from __future__ import annotations

import builtins
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import launch, metrics, trackers, train
from gristmill.trainer.config import TrainError
from gristmill.trainer.feed import open_feed
from gristmill.trainer.group import ALONE
from gristmill.trainer.spikes import FEWEST, Spike, SpikeDetector


def lines(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_spike_by_hand():
    losses = [2.0, 2.2] * 16  # median 2.1, deviations all 0.1
    assert SpikeDetector(6.0, losses).observe(2.1 + 6 * 1.4826 * 0.1 - 1e-6) is None
    found = SpikeDetector(6.0, losses).observe(3.0)
    assert found == Spike(3.0, pytest.approx(2.1), pytest.approx(0.14826))
    assert SpikeDetector(6.0, losses[1:]).observe(3.0) is None  # one step too few
    assert SpikeDetector(0.0, losses).observe(99.0) is None
    flat = SpikeDetector(6.0, [2.0] * FEWEST)
    assert flat.observe(2.05) is None  # 6 times 0.5 % of the median are allowed
    assert flat.observe(2.07) is not None
    assert flat.observe(math.nan) is None
    assert len(flat.losses) == FEWEST + 2


def test_spikes_do_not_hide_the_next_one():
    detector = SpikeDetector(6.0, [2.0, 2.1, 1.9] * 20)
    found = [detector.observe(loss) for loss in [9.0, 2.0] * 10]
    assert [spike is not None for spike in found] == [True, False] * 10


@given(st.lists(st.floats(1.0, 1.05), min_size=FEWEST, max_size=200), st.floats(0, 3))
def test_what_falls_is_no_spike(noise, fall):
    """A loss that goes down by any amount, with noise below the least deviation's bar."""
    detector = SpikeDetector(12.0)
    count = len(noise)
    assert not any(detector.observe(10 - fall * i / count + (n - 1)) for i, n in enumerate(noise))


def plant(monkeypatch, steps, act):
    """Changes the gradients or sums of some steps."""
    real = train.backward

    def planted(job, windows):
        sums = real(job, windows)
        return act(job, sums) if job.progress.step + 1 in steps else sums

    monkeypatch.setattr(train, "backward", planted)


def test_a_planted_spike_names_its_documents(tmp_path, make_run, monkeypatch, capsys):
    plant(monkeypatch, {40}, lambda job, sums: sums * 4)
    monkeypatch.setattr("gristmill.trainer.journal.MAX_NAMED_DOCUMENTS", 3)
    run = make_run(tmp_path / "run", steps=45)
    train.work(run, ALONE)
    (spike,) = lines(tmp_path / "run/spikes.jsonl")
    curve = metrics.read(tmp_path / "run/metrics.jsonl")
    assert (spike["step"], spike["why"], spike["loss"]) == (40, "spike", curve[39]["loss"])
    assert spike["loss"] > spike["median"] + 6 * spike["deviation"]
    feed = open_feed(run, TokenSet.open(run.tokens))
    expected = set()  # by another way: every target of the step, one by one
    for position in range(39 * 8, 40 * 8):
        source, _, window = feed.plan.locate(position)
        held = feed.plan.tokens.sources[source]
        for token in range(window * 32, window * 32 + 32):
            doc_id, shard, _ = held.document_at(token)
            expected.add((source, shard, doc_id))
    assert {(d["source"], d["shard"], d["doc_id"]) for d in spike["documents"]} == expected
    assert len(spike["documents"]) == len(expected)
    said = capsys.readouterr().err
    assert "Step 40: loss" in said
    assert f"and {len(expected) - 3} more in spikes.jsonl" in said
    assert spike["documents"][0]["doc_id"] in said


def test_a_spike_is_found_again_after_a_restart(tmp_path, make_run, monkeypatch):
    """Losses of before the restart count, and the line is not there twice."""
    plant(monkeypatch, {36}, lambda job, sums: sums * 4)
    run = make_run(tmp_path / "run", steps=40)
    real = train.save

    def dying(job, must):
        if job.progress.step == 40:
            raise KeyboardInterrupt
        real(job, must)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            train.work(run, ALONE)
    first = lines(tmp_path / "run/spikes.jsonl")
    train.work(run, ALONE)  # from step 35 on
    assert lines(tmp_path / "run/spikes.jsonl") == first
    assert len(first) == 1


def test_a_batch_whose_loss_is_no_number(tmp_path, make_run, monkeypatch):
    """The loss itself is NaN: the model gives it for one batch."""
    run = make_run(tmp_path / "run")
    real = train.Llama.forward

    def forward(self, *args, **kwargs):
        nll, penalty = real(self, *args, **kwargs)
        forward.calls += 1
        return (nll * math.nan, penalty) if forward.calls == 9 else (nll, penalty)

    forward.calls = 0
    monkeypatch.setattr(train.Llama, "forward", forward)
    monkeypatch.setattr(train, "score", lambda *args: SimpleNamespace(encoded=lambda: b"", bits_per_byte={}, sets={}))
    train.work(run, ALONE)
    curve = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [(line["step"], line["loss"]) for line in curve if line.get("skipped")] == [(9, None)]
    (line,) = lines(tmp_path / "run/spikes.jsonl")
    assert (line["step"], line["why"]) == (9, "not a number")
    assert {document["source"] for document in line["documents"]} == {"tidy", "noise"}
    assert all(torch.isfinite(torch.tensor(line["grad_norm"])) for line in curve if not line.get("skipped"))


def test_tensorboard_has_the_curve(tmp_path, make_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "run", eval_every=5)
    assert run.config.trackers == ("tensorboard",)
    train.work(run, ALONE)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    curve = metrics.read(tmp_path / "run/metrics.jsonl")
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in curve]
    assert {"bits_per_byte/tidy", "sources/noise", "lr", "mfu", "tokens"} <= set(events.Tags()["scalars"])


def test_the_numbers_of_a_line():
    line = {"step": 3, "loss": 1.5, "tokens": 10, "skipped": True, "grad_norm": None, "sources": {"a": 4}}
    assert trackers.values_of(line) == {"loss": 1.5, "tokens": 10.0, "sources/a": 4.0}


def test_a_missing_tracker_is_told_before_training(tmp_path, make_run, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    run = make_run(tmp_path / "run", trackers=["wandb"])
    with pytest.raises(TrainError, match=r"trackers: wandb needs the package wandb.*`pip install wandb`"):
        launch.run(run.config, run.mixture, run.tokens, run.out)
    assert not (tmp_path / "run/run.json").exists()


def test_a_tracker_that_fails_is_given_up(tmp_path, make_run, monkeypatch, capsys):
    class Broken:
        def add(self, step, values):
            if step == 3:
                raise ConnectionError("nobody there")

        def close(self):
            raise AssertionError("closed after it was given up")

    monkeypatch.setattr("gristmill.trainer.journal.open_trackers", lambda *args: {"wandb": Broken()})
    train.work(make_run(tmp_path / "run"), ALONE)
    said = capsys.readouterr().err
    assert said.count("Tracker wandb failed and is given up: ConnectionError: nobody there. Training goes on.") == 1
    assert len(metrics.read(tmp_path / "run/metrics.jsonl")) == 20


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_optional_trackers_get_the_curve(tmp_path, make_run, monkeypatch, name):
    """A stand-in with the calls that we make; docs/training.md says with which versions they were tried."""
    calls: list[tuple] = []
    tracked = SimpleNamespace(
        log=lambda values, step=None: calls.append(("log", step if step is not None else values["step"], values)),
        finish=lambda: calls.append(("finish",)),
        define_metric=lambda *args, **kwargs: None,
    )
    module = SimpleNamespace(init=lambda **settings: calls.append(("init", settings)) or tracked)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(trackers, "find_spec", lambda name: builtins.object())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    train.work(make_run(tmp_path / "run", trackers=[name], steps=3), ALONE)
    settings = calls[0][1]
    assert (settings["project"], settings["resume"], settings["config"]["steps"]) == ("gristmill", "allow", 3)
    if name == "wandb":
        assert settings["mode"] == "offline"
    assert [call[1] for call in calls if call[0] == "log"] == [1, 2, 3]
    curve = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [call[2]["loss"] for call in calls if call[0] == "log"] == [line["loss"] for line in curve]
    assert calls[-1] == ("finish",)


def test_a_trace_of_some_steps(tmp_path, make_run, undisturbed, capsys):
    train.work(make_run(tmp_path / "run", profile=True), ALONE)
    trace = orjson.loads((tmp_path / "run/profile/rank-0.json").read_bytes())
    named = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep#") for name in named) == 3
    assert "aten::mm" in named
    assert "Trace of 3 steps" in capsys.readouterr().err
    losses = [[line["loss"] for line in metrics.read(out / "metrics.jsonl")] for out in (tmp_path / "run", undisturbed)]
    assert losses[0] == losses[1]
    train.work(make_run(tmp_path / "short", profile=True, steps=2), ALONE)
    assert "No trace: the run had fewer than 3 steps to go." in capsys.readouterr().err
