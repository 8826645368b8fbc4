"""Training on windows packed by best fit: padding is not trained on, and what a run has used is in its checkpoints."""

from __future__ import annotations

import shutil

import numpy as np
import orjson
import pytest
import torch

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import metrics, train
from gristmill.trainer.feed import NO_TARGET
from gristmill.trainer.group import ALONE


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "packed.yaml"
    path.write_text("name: packed\nmax_epochs: 1000\npacking: best_fit\nsources: {tidy: 0.5, noise: 0.5}\n")
    return path


def test_padding_and_rests_of_cut_documents_are_no_targets(tmp_path, make_run, packed):
    job = train.prepare(make_run(tmp_path / "run", packed, mask_documents=True), ALONE)
    plan = job.feed.plan
    windows = next(job.feed.batches(0, 1, 0))
    expected = np.full((8, 32), NO_TARGET)
    for i in range(8):
        source, _, window = plan.locate(i)
        held, at = plan.tokens.sources[source], 0
        for k, (start, length) in enumerate(plan.pieces(source, window)):
            for j in range(length):
                whole = len(held.bounds(start, 1)) == 1
                if at + j > 0 and (j > 0 or (k > 0 and whole)):
                    expected[i, at + j - 1] = held.read(start + j, 1)[0]
            at += length
    assert (windows.targets == expected).all()
    assert windows.predicted == (expected != NO_TARGET).sum() < 8 * 32
    # The mean over the targets alone, by the plain formula.
    ids, targets = torch.from_numpy(windows.ids[:, :-1]), torch.from_numpy(expected)
    logits = job.model.logits(ids, torch.from_numpy(windows.documents))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
    assert train.step(job, windows, False).loss == pytest.approx(loss.item(), rel=1e-5)
    # Whatever is put into the padding, nothing changes.
    spoiled = windows.ids.copy()
    pad = windows.documents[:, -1] > windows.documents[:, -2]  # a place of padding is a document of its own
    assert pad.any()
    spoiled[pad, -2:] = 7
    again = job.model.logits(torch.from_numpy(spoiled[:, :-1]), torch.from_numpy(windows.documents))
    wanted = expected != NO_TARGET
    assert torch.equal(again[torch.from_numpy(wanted)], logits[torch.from_numpy(wanted)])


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_knows_the_targets_of_the_whole_batch(tmp_path, make_run, packed, world):
    feed = train.prepare(make_run(tmp_path / "run", packed), ALONE).feed
    ranks = [list(feed.batches(rank, world, 8)) for rank in range(world)]
    for step in zip(*ranks, strict=True):
        assert {w.predicted for w in step} == {sum((w.targets != NO_TARGET).sum() for w in step)}
    whole = sum(w.predicted for w in feed.batches(0, 1, 0))
    assert feed.predicted(20 * 8) == whole


def test_a_packed_run_reports_its_padding_and_resumes(tmp_path, make_run, packed):
    run = make_run(tmp_path / "run", packed)
    train.work(run, ALONE)
    lines = metrics.read(tmp_path / "run/metrics.jsonl")
    done = orjson.loads((tmp_path / "run/done.json").read_bytes())
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(0 < line["padding_share"] < 0.5 for line in lines)
    assert done["padding_share"] == pytest.approx(np.mean([line["padding_share"] for line in lines]), abs=1e-6)
    for late in (15, 20):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{late:08d}")
    train.work(run, ALONE)
    again = metrics.read(tmp_path / "run/metrics.jsonl")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert [line["padding_share"] for line in again] == [line["padding_share"] for line in lines]


def test_checkpoints_carry_the_books_and_a_fork_reuses_nothing(tmp_path, make_run, tokens_folder):
    tokens = TokenSet.open(tokens_folder)
    mixture = tmp_path / "trunk.yaml"
    mixture.write_text("name: trunk\nsources: {tidy: 0.5, noise: 0.5}\n")
    train.work(make_run(tmp_path / "trunk", mixture, steps=4, batch_windows=4, checkpoint_every=2), ALONE)
    trunk = Mixture.load(mixture).plan(tokens, 32, 4 * 4 * 32, seed=1)
    for step in (2, 4):
        folder = tmp_path / f"trunk/checkpoints/step-{step:08d}"
        assert Consumption.read(folder) == Consumption.after(trunk, step * 4)
    assert Consumption.read(tmp_path / "trunk") == Consumption.after(trunk, 16)
    seen = {trunk.locate(i) for i in range(16)}
    for name, weights in (("a", "{tidy: 0.9, noise: 0.1}"), ("b", "{tidy: 0.2, noise: 0.8}")):
        fork = tmp_path / f"{name}.yaml"
        fork.write_text(f"name: {name}\nmax_epochs: 1\ncontinue_from: {tmp_path}/trunk\nsources: {weights}\n")
        train.work(make_run(tmp_path / name, fork, steps=3, batch_windows=4, checkpoint_every=0), ALONE)
        plan = Mixture.load(fork).plan(tokens, 32, 3 * 4 * 32, seed=1)
        here = {plan.locate(i) for i in range(12)}
        assert not here & seen
        books = Consumption.read(tmp_path / name)
        assert {n: use.windows for n, use in books.sources.items()} == {
            n: trunk.counts(16)[n] + plan.counts(12)[n] for n in ("tidy", "noise")
        }
    with pytest.raises(
        MixtureError, match=r"no consumption\.json to continue from\. Name the folder of a training run"
    ):
        Consumption.read(tmp_path / "none")


def test_without_boundary_loss_no_document_is_begun(tmp_path, make_run):
    plain, bare = (make_run(tmp_path / str(b), boundary_loss=b, mask_documents=True) for b in (True, False))
    jobs = [train.prepare(run, ALONE) for run in (plain, bare)]
    one, two = (next(job.feed.batches(0, 1, 0)) for job in jobs)
    begins = one.ids[:, :-1] == jobs[0].tokens.eos_id  # an end of text is the input
    assert 0 < begins.sum() < begins.size
    assert np.array_equal(two.targets, np.where(begins, NO_TARGET, one.targets))
    assert two.counted(ALONE).predicted == (~begins).sum()
    losses = []
    for job, windows in zip(jobs, (one, two), strict=True):
        losses.append(train.step(job, windows, False).loss)
        with torch.no_grad():
            nll = job.model(*(torch.from_numpy(a) for a in (one.ids[:, :-1], one.targets, one.documents)), each=True)
        kept = nll if windows is one else nll[torch.from_numpy(~begins)]
        assert losses[-1] == pytest.approx(float(kept.double().mean()), rel=1e-5)
    assert losses[0] != losses[1]
