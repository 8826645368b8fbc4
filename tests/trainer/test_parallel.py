"""Every way to share a model over ranks trains the same model: real gloo ranks, in four processes started once."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from gristmill.trainer import metrics, train
from gristmill.trainer.config import Run, TrainConfig
from gristmill.trainer.group import ALONE, join
from gristmill.trainer.parallel import holders
from gristmill.trainer.score import Scores

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]
PROCESSES, STEPS, HALF = 4, 20, 10
# 61 ids, 96 hidden units and 48 rows of keys: 3 and 4 ranks divide some of them, and none the first.
MODEL = {"width": 48, "layers": 2, "heads": 6, "kv_heads": 2, "hidden": 96, "qk_norm": True}
SETTINGS = {
    "model": MODEL,
    "batch_windows": 12,
    "steps": STEPS,
    "clip": 0.5,
    "z_loss": 1e-4,
    "mask_documents": True,
    "boundary_loss": False,  # ranks have different numbers of targets
    "checkpoint_every": HALF,
    "eval_bytes": 2_000,
}
WAYS: dict[str, dict] = {
    "fsdp-3": {"ranks": 3},
    "fsdp-4": {"ranks": 4, "micro_windows": 2},
    "hsdp-4": {"ranks": 4, "parallel": "hsdp", "recompute": "full"},
    "ddp-3": {"ranks": 3, "parallel": "ddp"},
    "tensor-2": {"ranks": 2, "tensor": 2},
    "fsdp-2-tensor-2": {"ranks": 4, "tensor": 2, "micro_windows": 4, "recompute": "selective"},
}
# Half way from a checkpoint of the first to the other.
CHANGES = {"fsdp-2-tensor-2": "hsdp-4"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def one_process(number: int, jobs: list[tuple[Run, int, str | None]]) -> None:
    """What each of the processes does: the jobs that have a rank for it, one after the other."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if "lo" in [name for _, name in socket.if_nameindex()] else "lo0"
    real = train.step
    for run, port, source in jobs:
        if number >= run.config.ranks:
            continue
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(run.config.ranks))
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
        group = join(run.config)
        if source is not None and number == 0:
            step = Path("checkpoints") / f"step-{HALF:08d}"
            shutil.copytree(Path(source) / step, Path(run.out) / step)
        group.gather(None)
        seen = []

        def watched(job, windows, stop, seen=seen):
            seen.append(windows.ids)
            return real(job, windows, stop)

        train.step = watched
        train.work(run, group)
        np.save(Path(run.out) / f"read-{group.data_rank}-{number % run.config.tensor}.npy", np.stack(seen))
        group.leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_run) -> Path:
    """Finished runs, by name of the way; `one` is a single process."""
    root = tmp_path_factory.mktemp("ways")
    jobs = [(make_run(root / name, **SETTINGS, **way), free_port(), None) for name, way in WAYS.items()]
    for before, after in CHANGES.items():
        run = make_run(root / f"{before}-then-{after}", **SETTINGS, **WAYS[after])
        jobs.append((run, free_port(), str(root / before)))
    mp.spawn(one_process, (jobs,), PROCESSES)
    train.work(make_run(root / "one", **SETTINGS), ALONE)
    return root


def lines_of(folder: Path) -> list[dict]:
    return metrics.read(folder / "metrics.jsonl")


@pytest.mark.parametrize("way", WAYS)
def test_the_curve_is_that_of_one_process(folder, way):
    one, ours = lines_of(folder / "one"), lines_of(folder / way)
    assert len(one) == len(ours) == STEPS
    for a, b in zip(one, ours, strict=True):
        for name in ("loss", "grad_norm", "z_penalty"):
            assert b[name] == pytest.approx(a[name], abs=1e-3), (name, a["step"])
        assert a["sources"] == b["sources"]
    assert one[0]["grad_norm"] > SETTINGS["clip"]  # or clipping proves nothing
    assert one[-1]["loss"] < one[0]["loss"] - 0.2
    a, b = (Scores.load(folder / name / "scores.json") for name in ("one", way))
    for source, score in a.sources.items():
        assert b.sources[source].doc_ids == score.doc_ids
        assert b.sources[source].bits == pytest.approx(score.bits, abs=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_the_windows_of_every_step_are_read_once(folder, make_run, way):
    config = TrainConfig.model_validate({**SETTINGS, **WAYS[way]})
    whole = train.open_feed(make_run(folder / "one", **SETTINGS), train.TokenSet.open(make_run(folder / "one").tokens))
    parts = []
    for reader in range(config.data_ranks):
        copies = [np.load(folder / way / f"read-{reader}-{t}.npy") for t in range(config.tensor)]
        assert all(np.array_equal(copies[0], other) for other in copies)
        parts.append(copies[0])
    read = np.concatenate(parts, axis=1)  # (steps, batch_windows, seq_len + 1)
    for step, windows in enumerate(whole.batches(0, 1, 0)):
        order = np.lexsort(read[step].T)
        assert np.array_equal(read[step][order], windows.ids[np.lexsort(windows.ids.T)])
    assert step == STEPS - 1


@pytest.mark.parametrize(("before", "after"), CHANGES.items())
def test_a_run_goes_on_under_another_way(folder, before, after):
    one, ours = lines_of(folder / "one"), lines_of(folder / f"{before}-then-{after}")
    assert [line["step"] for line in ours] == list(range(HALF + 1, STEPS + 1))
    for a, b in zip(one[HALF:], ours, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 3, "tensor": 2}, "ranks 3 must be a multiple of tensor 2"),
        (
            {"ranks": 3, "parallel": "hsdp", "batch_windows": 3},
            "hsdp: ranks 3 / tensor 1 = 3 must be a multiple of rep",
        ),
        ({"ranks": 4, "tensor": 2, "batch_windows": 3}, "batch_windows 3 must be a multiple of ranks / tensor 2 = 2"),
        ({"ranks": 4, "tensor": 4, "model": MODEL}, "tensor 4 must divide model.heads 6"),
        ({"ranks": 3, "tensor": 3, "model": MODEL}, "tensor 3 must divide model.kv_heads 2"),
        ({"ranks": 2, "tensor": 2, "model": {**MODEL, "hidden": 51}}, "tensor 2 must divide model.hidden 51"),
    ],
)
def test_ranks_that_cannot_be_laid_out_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"steps": 1, **settings})


def test_a_plain_tensor_is_held_by_all():
    assert holders(torch.zeros(3), 4) == 4
