"""Real processes: two gloo ranks under torchrun, killed and stopped; one rank as a plain process, killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from gristmill.trainer import launch, metrics, train
from gristmill.trainer.config import TrainError, pause
from gristmill.trainer.group import ALONE
from gristmill.trainer.score import Scores

pytestmark = pytest.mark.end_to_end
STEPS = 200


def curve(out: Path) -> list[dict]:
    timing = {"tokens_per_s", "mfu", "memory_bytes"}
    return [{k: v for k, v in line.items() if k not in timing} for line in metrics.read(out / "metrics.jsonl")]


def start(run, on_progress=None) -> launch.Outcome:
    return launch.run(run.config, run.mixture, run.tokens, run.out, on_progress)


def ranks_of(out: Path) -> list[psutil.Process]:
    """The training processes of the run in this folder, below this test."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "gristmill.trainer.train" in (line := child.cmdline()) and "gristmill.trainer.agent" not in line
    ]


class Once:
    """Calls a function at the first line of at least a step."""

    def __init__(self, step, act):
        self.step, self.act, self.done = step, act, False

    def __call__(self, line):
        if not self.done and line["step"] >= self.step:
            self.done = True
            self.act()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, make_run) -> Path:
    """An undisturbed run on two ranks."""
    run = make_run(tmp_path_factory.mktemp("two") / "run", steps=STEPS, ranks=2, checkpoint_every=10)
    lines: list[dict] = []
    outcome = start(run, lines.append)
    assert outcome.status == "done"
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return outcome.out


def test_one_rank_and_two_train_the_same_model(tmp_path, make_run, two_ranks):
    run = make_run(tmp_path / "one", steps=STEPS)
    train.work(run, ALONE)
    one, two = curve(tmp_path / "one"), curve(two_ranks)
    assert [line["sources"] for line in one] == [line["sources"] for line in two]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], abs=1e-3)
    a, b = (Scores.load(out / "scores.json") for out in (tmp_path / "one", two_ranks))
    for source in a.sources:
        assert a.sources[source].doc_ids == b.sources[source].doc_ids
        assert a.sources[source].bits == pytest.approx(b.sources[source].bits, abs=0.02)
    assert b.mean < 2.5 < one[0]["loss"]


def test_a_killed_rank_comes_back_and_another_world_size_goes_on(tmp_path, make_run, two_ranks, capfd):
    run = make_run(tmp_path / "run", steps=STEPS, ranks=2, checkpoint_every=10)
    out = Path(run.out)

    def kill():
        ranks = ranks_of(out)
        assert len(ranks) == 2
        ranks[1].kill()

    def stop():
        (agent,) = [c for c in psutil.Process().children() if "gristmill.trainer.agent" in c.cmdline()]
        agent.send_signal(signal.SIGTERM)  # it passes it on to the ranks

    second = Once(40, stop)
    first = Once(25, kill)

    def watch(line):
        first(line)
        if first.done:
            second(line)

    outcome = start(run, watch)
    assert first.done
    log = (out / "log.txt").read_text()
    assert "Going on after step" in log
    assert outcome.status == "stopped"
    assert outcome.scores is None
    done = curve(out)
    assert 40 <= len(done) < STEPS
    assert done == curve(two_ranks)[: len(done)]  # bit for bit, across kill and restart

    train.work(make_run(out, steps=STEPS), ALONE)
    assert f"Going on after step {len(done)} of {STEPS}" in capfd.readouterr().err
    for ours, theirs in zip(curve(out), curve(two_ranks), strict=True):
        assert ours["sources"] == theirs["sources"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-3)


def test_one_rank_is_started_again_as_well(tmp_path, make_run, undisturbed, monkeypatch):
    """A stand-in for the process: it kills itself once, then is done."""
    run = make_run(tmp_path / "run")
    finished = f"cp {undisturbed}/*.json* {run.out}"
    script = f"cd {tmp_path}; if test -e lived; then {finished}; else touch lived; kill -9 $$; fi"
    monkeypatch.setattr(launch, "command", lambda config, folder: ["bash", "-c", script])
    lines: list[dict] = []
    outcome = start(run, lines.append)
    assert "The process ended with signal SIGKILL; starting again." in (tmp_path / "run/log.txt").read_text()
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert outcome.done["steps"] == 20
    assert launch.finished(outcome.out, outcome.done["key"]) == outcome
    assert launch.finished(outcome.out, "another") is None


def test_an_error_of_the_user_is_told_and_not_repeated(tmp_path, make_run, monkeypatch):
    mixture = tmp_path / "odd.yaml"
    mixture.write_text("name: odd\nsources: {tidi: 1}\n")
    run = make_run(tmp_path / "run", mixture=mixture)
    run.save(tmp_path / "run/run.json")
    assert train.main(["--config", str(tmp_path / "run/run.json")]) == 1
    failed = tmp_path / "run/failed.json"
    assert "tidi" in failed.read_text()
    failed.rename(tmp_path / "failed.json")
    monkeypatch.setattr(launch, "command", lambda config, folder: ["cp", str(tmp_path / "failed.json"), str(failed)])
    with pytest.raises(TrainError, match="tidi"):
        start(run)
    assert "starting again" not in (tmp_path / "run/log.txt").read_text()


def test_a_run_that_always_dies_shows_the_end_of_its_log(tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path / "run", max_restarts=1)
    monkeypatch.setattr(launch, "command", lambda config, folder: ["bash", "-c", "echo no such luck; exit 3"])
    with pytest.raises(TrainError, match=r"ended with exit code 3 and was started again at most 1 times(.|\n)*luck"):
        start(run)


def test_a_run_that_dies_goes_on_while_it_gets_further(tmp_path, make_run, monkeypatch):
    """Ten lives with max_restarts=1: each ends with a new checkpoint, but for the last two."""
    run = make_run(tmp_path / "run", max_restarts=1)
    monkeypatch.setattr(launch, "pause", lambda tries: 0.0)
    script = (
        "cd checkpoints 2>/dev/null || mkdir checkpoints && cd checkpoints; n=$(ls | wc -l); "
        "test $n -lt 8 && mkdir step-0000000$n && touch step-0000000$n/state.json; exit 3"
    )
    monkeypatch.setattr(launch, "command", lambda config, folder: ["bash", "-c", f"cd {run.out}; {script}"])
    with pytest.raises(TrainError, match="exit code 3"):
        start(run)
    assert (tmp_path / "run/log.txt").read_text().count("starting again") == 9


def test_what_is_stopped_before_it_begins_is_no_failure(tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path / "run")
    for code in (143, 130):
        monkeypatch.setattr(launch, "command", lambda config, folder, code=code: ["bash", "-c", f"exit {code}"])
        assert start(run).status == "stopped"
    monkeypatch.setattr(launch, "command", lambda config, folder: ["bash", "-c", "kill -TERM $$"])
    assert start(run).status == "stopped"
    assert "starting again" not in (tmp_path / "run/log.txt").read_text()


def test_pauses_grow():
    assert [pause(tries) for tries in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]


def test_an_interrupt_ends_the_process(tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(launch, "command", lambda config, folder: ["sleep", "100"])

    def interrupt(follower, on_progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(run)
    alive = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    assert not [c for c in alive if "sleep" in c.cmdline()]


def test_the_environment_of_the_ranks(make_run, tmp_path):
    config = make_run(tmp_path / "run", ranks=2, threads=3).config
    environment = launch.environment(config)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert environment["PATH"] == os.environ["PATH"]
    assert "--nproc-per-node=2" in launch.command(config, tmp_path)
    assert "gristmill.trainer.agent" not in launch.command(make_run(tmp_path / "run").config, tmp_path)
