"""What stays of the checkpoints, writing beside the loop, and disks that refuse."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import orjson
import pytest
import torch

from gristmill.trainer import checkpoint, metrics, saver, train
from gristmill.trainer.checkpoint import CheckpointState, Progress
from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.group import ALONE
from gristmill.trainer.journal import JUDGED

TIMING = {"tokens_per_s", "mfu", "memory_bytes"}


def curve(out: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in TIMING} for line in metrics.read(out / "metrics.jsonl")]


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def pretend(root: Path, step: int, **loss: float) -> Path:
    """A complete checkpoint without files."""
    folder = checkpoint.folder_of(root, step)
    folder.mkdir(parents=True)
    state = CheckpointState(course="c", progress=Progress(step=step), world=1, loss=loss)
    (folder / "state.json").write_text(state.model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({"keep_last": 1}, [6]),
        ({"keep_last": 2, "keep_every": 3}, [3, 5, 6]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 6]),  # of the equal ones 2 and 3 the later would be second
        ({"keep_last": 1, "keep_best": 1, "best_by": "evaluation", "eval_every": 5}, [3, 6]),
    ],
)
def test_what_stays(tmp_path, settings, stay):
    training = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0, 6: 9.0}
    for step, loss in training.items():
        pretend(tmp_path, step, training=loss, **({"evaluation": abs(step - 3.0)} if step < 5 else {}))
    config = TrainConfig(steps=10, **settings)
    assert sorted(path.name for path in saver.kept(tmp_path, config)) == [f"step-{step:08d}" for step in stay]
    assert checkpoint.best(tmp_path).name == "step-00000003"


def test_of_equal_ones_the_later_is_better(tmp_path):
    folders = [pretend(tmp_path, step, training=2.0) for step in (1, 2)]
    assert checkpoint.by_loss(folders, "training") == folders[::-1]
    assert checkpoint.by_loss(folders, "evaluation") == []
    (pretend(tmp_path, 3, training=1.0) / "state.json").write_text("{")
    assert (
        checkpoint.by_loss(checkpoint.complete(tmp_path), "training") == folders[::-1]
    )  # a damaged one is no candidate
    bare = pretend(tmp_path / "bare", 1)
    with pytest.raises(TrainError, match="no checkpoint says how good it is"):
        checkpoint.best(bare.parent)


def test_the_best_of_a_run_stay(tmp_path, make_run):
    run = make_run(
        tmp_path / "run", keep_last=1, keep_best=2, best_by="evaluation", eval_every=5, checkpoint_every=5, steps=24
    )
    train.work(run, ALONE)
    scored = {
        line["step"]: sum(line["bits_per_byte"].values()) / 2
        for line in metrics.read(tmp_path / "run/metrics.jsonl")
        if "bits_per_byte" in line
    }
    assert list(scored) == [5, 10, 15, 20]
    best = sorted(scored, key=scored.__getitem__)[:2]
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in sorted({*best, 24})]
    assert checkpoint.find_checkpoint(f"{tmp_path}/run@best").name == f"step-{best[0]:08d}"
    state = checkpoint.read_state(checkpoint.folder_of(tmp_path / "run/checkpoints", best[0]))
    assert state.loss["evaluation"] == pytest.approx(scored[best[0]])
    losses = [line["loss"] for line in metrics.read(tmp_path / "run/metrics.jsonl")][: best[0]]
    assert state.loss["training"] == pytest.approx(sum(losses[-JUDGED:]) / len(losses[-JUDGED:]))


def test_best_by_evaluation_needs_evaluations():
    with pytest.raises(ValueError, match=r"eval_every \(3\) must divide checkpoint_every \(10\)"):
        TrainConfig(steps=10, keep_best=1, best_by="evaluation", eval_every=3, checkpoint_every=10)


def test_a_thread_writes_what_stood_at_the_step(tmp_path, make_run, undisturbed, monkeypatch):
    """Writing waits until the loop has gone on: the files are those of a run that saves in the loop."""
    gone_on, threads = threading.Event(), []
    real_write, real_step = saver.write, train.step

    def late(*args):
        threads.append(threading.current_thread().name)
        if args[2].progress.step == 5:
            assert gone_on.wait(60)
        return real_write(*args)

    def stepping(job, windows, stop):
        if job.progress.step == 8:  # three updates after the save
            gone_on.set()
        return real_step(job, windows, stop)

    monkeypatch.setattr(saver, "write", late)
    monkeypatch.setattr(train, "step", stepping)
    train.work(make_run(tmp_path / "run"), ALONE)
    assert threads[0] == "checkpoint" != threads[-1]  # the last one is waited for in the loop
    train.work(make_run(tmp_path / "loop", async_save=False), ALONE)
    for step in (5, 10, 20):
        ours, theirs = (
            orjson.loads((checkpoint.folder_of(out / "checkpoints", step) / "state.json").read_bytes())["files"]
            for out in (tmp_path / "run", tmp_path / "loop")
        )
        assert {n: d for n, d in ours.items() if n != ".metadata"} == {
            n: d for n, d in theirs.items() if n != ".metadata"
        }
    assert curve(tmp_path / "run") == curve(undisturbed)


def test_an_error_of_the_thread_comes_to_the_loop(tmp_path, make_run, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(saver, "write", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        train.work(make_run(tmp_path / "run"), ALONE)


def test_a_moment_that_is_no_number_is_not_saved(tmp_path):
    tensors = {"model": {"w": torch.ones(2)}, "optimizer": {"w": {"second": torch.tensor([1.0, float("inf")])}}}
    with pytest.raises(TrainError, match="after step 7 a parameter or a moment is not finite"):
        checkpoint.refuse_infinite(tmp_path, 7, tensors, ALONE)


def test_a_damaged_checkpoint_takes_no_place_of_a_sound_one(tmp_path, make_run, capsys):
    out = tmp_path / "run"
    train.work(make_run(out, steps=20, keep_last=2, checkpoint_every=5), ALONE)
    assert names(out) == ["step-00000015", "step-00000020"]
    file = out / "checkpoints/step-00000020/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    train.work(make_run(out, steps=20, keep_last=2, checkpoint_every=5), ALONE)
    assert "set aside as step-00000020.damaged. Trying the one before." in capsys.readouterr().err
    assert names(out) == ["step-00000015", "step-00000020", "step-00000020.damaged"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """A file that takes all space but `leave` bytes."""
    path = disk / "filler"
    path.unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    path.write_bytes(bytes(max(free - leave, 0)))
    return path


def at_step(monkeypatch, step, act):
    real = train.step

    def stepping(job, windows, stop):
        if job.progress.step == step:
            job.saver.settle()
            act()
        return real(job, windows, stop)

    monkeypatch.setattr(train, "step", stepping)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_room_for_a_checkpoint(small_disk, make_run, undisturbed, monkeypatch, capsys, asynchronous):
    out = small_disk / "run"
    settings = {"async_save": asynchronous, "trackers": []}
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: fill(small_disk, 100_000))  # a checkpoint takes 350 kB
        with pytest.raises(TrainError, match=r"step-00000020.*No space left on device.*Free some space and run again"):
            train.work(make_run(out, **settings), ALONE)
    said = capsys.readouterr().err
    assert "step-00000010: the checkpoint could not be written" in said
    assert "Training goes on; older checkpoints are untouched." in said
    assert names(out) == ["step-00000005"]
    assert [line["step"] for line in curve(out)] == list(range(1, 21))
    (small_disk / "filler").unlink()
    train.work(make_run(out, **settings), ALONE)
    assert "Going on after step 5 of 20" in capsys.readouterr().err
    assert curve(out) == curve(undisturbed)


def test_no_room_at_all_is_one_message(small_disk, tmp_path, make_run, monkeypatch, capsys):
    out, settings = small_disk / "run", {"trackers": [], "steps": 60, "keep_last": 1}
    run = make_run(out, **settings)
    run.save(out / "run.json")
    with monkeypatch.context() as patch:
        at_step(patch, 7, lambda: fill(small_disk, 0))
        assert train.main(["--config", str(out / "run.json")]) == 1
    message = orjson.loads((out / "failed.json").read_bytes())["message"]
    assert "metrics.jsonl: step" in message
    assert "No space left on device. Free some space and run again" in message
    assert names(out) == ["step-00000005"]
    fill(small_disk, 0)
    with pytest.raises(TrainError, match=r"run: cannot be written to: No space left on device"):
        train.work(run, ALONE)
    (small_disk / "filler").unlink()
    capsys.readouterr()
    assert train.main(["--config", str(out / "run.json")]) == 0
    assert "Going on after step 5 of 60" in capsys.readouterr().err
    train.work(make_run(tmp_path / "whole", **settings), ALONE)
    assert curve(out) == curve(tmp_path / "whole")
    assert not (out / train.RESERVE_FILE).exists()
