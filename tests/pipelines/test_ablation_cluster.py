"""Runs of an ablation as tasks of a scheduler: by resources, given to another worker when theirs is lost."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import orjson
import pytest
from distributed import Client, LocalCluster

from gristmill.pipelines import ablation_cluster
from gristmill.pipelines.ablation_cluster import on_cluster, resources_of, told_now_and_then, whole_paths
from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.connect import running_scheduler
from gristmill.pipelines.worker_check import EngineError
from gristmill.trainer.ablation_run import Planned
from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.ranking import RunRow

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from machines import free_port, gristmill, processes, wait_until
from token_texts import write_tokens


def planned(name: str, retries: int = 1) -> Planned:
    config = TrainConfig(steps=1)
    return Planned(name, name, f"{name}.yaml", 1, config, "key", "course", "tokens", f"out/{name}", None, retries)


@pytest.fixture
def scheduler():
    """A scheduler and a worker in this process."""
    cluster = LocalCluster(
        n_workers=1,
        threads_per_worker=2,
        processes=False,
        dashboard_address="127.0.0.1:0",
        resources={"GPU": 8},
        protocol="tcp",
        host="127.0.0.1",
    )
    with cluster, Client(cluster):
        yield running_scheduler(cluster.scheduler_address)


class Fake:
    """Takes the place of a run: raises as often as it is told to."""

    def __init__(self, **failures: int) -> None:
        self.failures, self.started = failures, list[str]()

    def __call__(self, job, tell) -> RunRow:
        self.started.append(job.name)
        tell({"event": "start", "run": job.name, "steps": 1})
        tell({"event": "step", "run": job.name, "step": 1, "steps": 1, "loss": 2.5, "sources": {"a": 1}})
        if self.failures.get(job.name, 0):
            self.failures[job.name] -= 1
            raise RuntimeError("the machine went away")
        return RunRow(name=job.name, mixture=job.mixture, seed=1, status="done", bits_per_byte={"docs": 1.0})


def test_what_fails_is_given_out_again_and_then_reported(scheduler, tmp_path, monkeypatch):
    fake = Fake(once=1, never=9)
    monkeypatch.setattr(ablation_cluster, "carry_out", fake)
    events: list[dict] = []
    carry = on_cluster(scheduler, {"GPU": 4}, str(tmp_path))
    jobs = [(3, planned("good")), (5, planned("once")), (7, planned("never", retries=2))]
    rows = dict(carry(jobs, events.append))
    assert {position: row.status for position, row in rows.items()} == {3: "done", 5: "done", 7: "failed"}
    assert rows[7].error == "RuntimeError: the machine went away"
    assert sorted(fake.started) == ["good", "never", "never", "never", "once", "once"]
    ends = {e["run"]: e["event"] for e in events if e["event"] in ("done", "failed")}
    assert ends == {"good": "done", "once": "done", "never": "failed"}
    steps = [e for e in events if e["event"] == "step"]
    assert all("sources" not in e for e in steps)  # the scheduler keeps what is told
    assert list(carry([], events.append)) == []


def test_a_cluster_that_cannot_take_a_run_is_refused(scheduler, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation_cluster, "carry_out", Fake())
    with pytest.raises(EngineError, match=r"No worker offers GPU=16, which each run takes. Start workers with `dask"):
        list(on_cluster(scheduler, {"GPU": 16}, str(tmp_path))([(0, planned("a"))], lambda event: None))


def test_what_a_run_takes_is_read():
    settings = ClusterSettings(**{"class": None}, scheduler="tcp://a:1", resources={"ablation": {"GPU": 8}})
    assert resources_of(settings, None) == {"GPU": 8.0}
    assert resources_of(settings, "GPU=2, big=1") == {"GPU": 2.0, "big": 1.0}
    settings.check([])
    with pytest.raises(EngineError, match="--resources GPU: write NAME=AMOUNT"):
        resources_of(settings, "GPU")


def test_steps_are_told_of_now_and_then_and_paths_are_whole():
    told: list[dict] = []
    on_event = told_now_and_then(told.append, 1_000)
    for step in range(1, 1_001):
        on_event({"event": "step", "run": "a", "step": step, "sources": {"x": 1}})
    on_event({"event": "done", "run": "a"})
    assert [e.get("step") for e in told] == [*range(20, 1_001, 20), None]
    job = whole_paths(planned("a"))
    assert (job.path, job.out) == (str(Path("a.yaml").resolve()), str(Path("out/a").resolve()))


ABLATION = """\
name: tiny
mixtures: [tidy.yaml, noise.yaml]
seeds: [1]
train:
  model: {width: 32, layers: 2, heads: 2}
  steps: 300
  seq_len: 32
  batch_windows: 8
  checkpoint_every: 50
  lr: 0.01
"""


@pytest.mark.end_to_end
def test_a_worker_that_dies_loses_no_run(tmp_path):
    """Two workers with a GPU each by name; one is killed while it trains. Every run is in the ranking."""
    tokens = write_tokens(tmp_path / "tokens", {"tidy": (400, True), "noise": (150, False)})
    for name in ("tidy", "noise"):
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmax_epochs: 1000\nsources: {{{name}: 1}}\n")
    (tmp_path / "ablation.yaml").write_text(ABLATION)
    out, address = tmp_path / "out", f"tcp://127.0.0.1:{free_port()}"
    with processes(tmp_path) as started:
        started.scheduler(address)
        workers = [started.worker(address, "--resources", "GPU=8", "--no-nanny") for _ in range(2)]
        log = (tmp_path / "log").open("wb")
        arguments = ["--tokens", str(tokens), "--out", str(out), "--scheduler", address, "--resources", "GPU=8"]
        driver = started.start(gristmill("ablate", str(tmp_path / "ablation.yaml"), *arguments), stdout=log, stderr=log)
        wait_until(lambda: list(out.glob("*/checkpoints/*/state.json")) or driver.poll() is not None, "a checkpoint")
        os.kill(workers[0].pid, signal.SIGKILL)
        wait_until(lambda: driver.poll() is not None, "the end")
        log.close()
    said = (tmp_path / "log").read_text()
    assert driver.returncode == 0, said
    ranking = orjson.loads((out / "ranking.json").read_bytes())
    assert [run["status"] for run in ranking["runs"]] == ["done"] * 2, said
    assert {row["mixture"] for row in ranking["mixtures"]} == {"tidy", "noise"}
    assert any("Going on after step" in path.read_text() for path in out.glob("*/log.txt"))  # not from its start


def test_a_run_that_was_stopped_is_no_row(scheduler, tmp_path, monkeypatch):
    def stopped(job, tell):
        raise TrainError("out/a: training was stopped from outside.")

    monkeypatch.setattr(ablation_cluster, "carry_out", stopped)
    rows = dict(on_cluster(scheduler, {}, str(tmp_path))([(0, planned("a", retries=0))], lambda event: None))
    assert (rows[0].status, rows[0].error) == ("failed", "out/a: training was stopped from outside.")
