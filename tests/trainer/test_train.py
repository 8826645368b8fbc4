"""The loop on one rank, in this process: resume, damage, numbers that are none, stopping, scores."""

from __future__ import annotations

import math
import os
import resource
import signal
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch

from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import checkpoint, metrics, saver, score, train
from gristmill.trainer.config import ModelShape, Run, TrainConfig, TrainError, run_key
from gristmill.trainer.group import ALONE
from gristmill.trainer.score import Scores


def curve(out: Path) -> list[dict]:
    """metrics.jsonl without what the machine decides."""
    timing = {"tokens_per_s", "mfu", "memory_bytes"}
    return [{k: v for k, v in line.items() if k not in timing} for line in metrics.read(out / "metrics.jsonl")]


def weights(out: Path, step: int = 20) -> dict[str, bytes]:
    """Digests of the files of a checkpoint: equal digests, equal weights and moments."""
    state = orjson.loads((checkpoint.folder_of(out / "checkpoints", step) / "state.json").read_bytes())
    return {name: digest for name, digest in state["files"].items() if name.endswith(".distcp")}


def stop_at(monkeypatch, step):
    """SIGTERM to this process while the given step is on."""
    real = train.step

    def stopping(job, windows, stop):
        if job.progress.step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(job, windows, stop)

    monkeypatch.setattr(train, "step", stopping)


def test_a_model_learns_what_can_be_learned(undisturbed):
    lines = curve(undisturbed)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[0]["loss"] == pytest.approx(math.log(61), abs=0.05)  # knows nothing
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    scores = Scores.load(undisturbed / "scores.json")
    assert scores.bits_per_byte["tidy"] < scores.bits_per_byte["noise"] - 0.3
    assert lines[-1]["sources"] == {"tidy": 20 * 4 * 32, "noise": 20 * 4 * 32}
    done = orjson.loads((undisturbed / "done.json").read_bytes())
    assert (done["steps"], done["tokens"], done["skipped"]) == (20, 5120, 0)


def test_stopped_and_started_again_is_the_same_run(tmp_path, make_run, undisturbed, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        train.work(run, ALONE)
    assert "Asked to stop: saved after step 8 of 20" in capsys.readouterr().err  # seen one step later
    assert orjson.loads((tmp_path / "run/stopped.json").read_bytes()) == {"step": 8}
    assert not (tmp_path / "run/done.json").exists()
    assert [c.name for c in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step-00000005", "step-00000008"]
    train.work(run, ALONE)
    assert "Going on after step 8 of 20" in capsys.readouterr().err
    assert curve(tmp_path / "run") == curve(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)
    assert not (tmp_path / "run/stopped.json").exists()
    assert (tmp_path / "run/scores.json").read_bytes() == (undisturbed / "scores.json").read_bytes()


def test_killed_without_warning_goes_on_from_the_last_checkpoint(tmp_path, make_run, undisturbed, monkeypatch):
    run = make_run(tmp_path / "run")
    real = train.save

    def dying(job, must):
        if job.progress.step == 15:
            raise KeyboardInterrupt  # nothing after this line of the real process either
        real(job, must)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            train.work(run, ALONE)
    assert len(curve(tmp_path / "run")) == 15
    train.work(run, ALONE)
    assert curve(tmp_path / "run") == curve(undisturbed)
    assert weights(tmp_path / "run") == weights(undisturbed)


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "truncate" else data)


@pytest.mark.parametrize(
    ("file", "how"), [("__0_0.distcp", "flip"), (".metadata", "truncate"), ("state.json", "truncate")]
)
def test_a_damaged_checkpoint_is_skipped(tmp_path, make_run, undisturbed, monkeypatch, capsys, file, how):
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_at(patch, 11)
        train.work(run, ALONE)
    damage(tmp_path / "run/checkpoints/step-00000012" / file, how)
    train.work(run, ALONE)
    said = capsys.readouterr().err
    assert "step-00000012: damaged" in said
    assert "Going on after step 10 of 20" in said
    assert curve(tmp_path / "run") == curve(undisturbed)


@pytest.mark.parametrize("change", [{"seed": 2}, {"model": {"width": 64, "layers": 2, "heads": 2}}, {"lr": 0.02}])
def test_checkpoints_of_another_run_are_refused(make_run, undisturbed, change):
    with pytest.raises(TrainError, match=r"belongs to another run: the mixture.* Train in another folder"):
        train.work(make_run(undisturbed, **change), ALONE)


def test_only_the_last_checkpoints_are_kept(tmp_path, make_run):
    train.work(make_run(tmp_path / "run", keep_last=1, checkpoint_every=7), ALONE)
    assert [p.name for p in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000020"]


def poison(monkeypatch, steps):
    """Gradients that are no number in the given steps."""
    real = train.backward

    def poisoned(job, windows):
        sums = real(job, windows)
        if job.progress.step + 1 in steps:
            job.model.norm.weight.grad[0] = math.nan
        return sums

    monkeypatch.setattr(train, "backward", poisoned)


def test_a_gradient_that_is_no_number_leaves_the_weights_alone(tmp_path, make_run, monkeypatch, capsys):
    poison(monkeypatch, {6, 7})
    run = make_run(tmp_path / "run", checkpoint_every=1, keep_last=20)
    train.work(run, ALONE)
    lines = curve(tmp_path / "run")
    assert [line["step"] for line in lines if line.get("skipped")] == [6, 7]
    assert lines[5]["grad_norm"] is None
    assert all(line["loss"] is not None and math.isfinite(line["loss"]) for line in lines)
    assert weights(tmp_path / "run", 5)["__0_0.distcp"] == weights(tmp_path / "run", 7)["__0_0.distcp"]
    assert weights(tmp_path / "run", 7)["__0_0.distcp"] != weights(tmp_path / "run", 8)["__0_0.distcp"]
    said = capsys.readouterr().err
    assert "Step 6: loss or gradient is not a number; skipped. Documents: " in said
    assert "-train-" in said  # names of documents
    done = orjson.loads((tmp_path / "run/done.json").read_bytes())
    assert (done["updates"], done["skipped"]) == (18, 2)


def test_too_many_in_a_row_stop_the_run(tmp_path, make_run, monkeypatch):
    poison(monkeypatch, set(range(8, 21)))
    with pytest.raises(TrainError, match=r"not a number in 3 steps in a row, up to step 10\. .* Lower lr"):
        train.work(make_run(tmp_path / "run", max_skipped=2), ALONE)
    assert checkpoint.complete(tmp_path / "run/checkpoints")[-1].name == "step-00000005"


def test_weights_that_are_no_number_are_never_saved(tmp_path, make_run, monkeypatch):
    real = train.update

    def ruined(job, outcome, lr):
        real(job, outcome, lr)
        if job.progress.step == 9:
            job.model.norm.weight.data[0] = math.inf

    monkeypatch.setattr(train, "update", ruined)
    with pytest.raises(TrainError, match=r"after step 10 a parameter or a moment is not finite, so nothing was saved"):
        train.work(make_run(tmp_path / "run"), ALONE)
    assert [c.name for c in checkpoint.complete(tmp_path / "run/checkpoints")] == ["step-00000005"]


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, make_run, undisturbed, monkeypatch, capsys):
    run = make_run(tmp_path / "run")
    real = saver.write

    def full(root, tensors, state, *rest):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if state.progress.step in (10, 15):
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))  # a write beyond fails like a full disk's
        try:
            return real(root, tensors, state, *rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    monkeypatch.setattr(saver, "write", full)
    train.work(run, ALONE)
    said = capsys.readouterr().err
    assert "step-00000010: the checkpoint could not be written" in said
    assert "Training goes on; older checkpoints are untouched." in said
    assert sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir()) == ["step-00000005", "step-00000020"]
    assert curve(tmp_path / "run") == curve(undisturbed)
    with monkeypatch.context() as patch:
        patch.setattr("gristmill.trainer.checkpoint.save_tensors", _no_space)
        with pytest.raises(TrainError, match=r"No space left on device.*Free some space and run again"):
            train.work(make_run(tmp_path / "other"), ALONE)


def _no_space(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_micro_batches_change_nothing_but_rounding(tmp_path, make_run, undisturbed):
    train.work(make_run(tmp_path / "run", micro_windows=3, steps=20), ALONE)
    for ours, theirs in zip(curve(tmp_path / "run"), curve(undisturbed), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-3)


def test_evaluation_on_the_way_and_masked_documents(tmp_path, make_run):
    train.work(make_run(tmp_path / "run", eval_every=8, mask_documents=True, z_loss=1e-3, dtype="bf16"), ALONE)
    lines = curve(tmp_path / "run")
    assert [line["step"] for line in lines if "bits_per_byte" in line] == [8, 16]
    assert set(lines[7]["bits_per_byte"]) == {"tidy", "noise"}
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.25
    assert 10 < lines[0]["z_penalty"] < 25  # log(61)^2 = 16.9


def test_the_mask_follows_stored_boundaries(tmp_path, make_run):
    run = make_run(tmp_path / "run", mask_documents=True)
    job = train.prepare(run, ALONE)
    windows = next(job.feed.batches(0, 1, 0))
    ids, documents = windows.ids, windows.documents
    assert ids.shape == (8, 33)
    assert documents.shape == (8, 32)
    ends = ids[:, :-1] == job.tokens.eos_id
    assert ends.any()
    # The number rises where an input is an end-of-text token: it opens the next document.
    rises = np.diff(documents, axis=1) == 1
    assert (rises == ends[:, 1:]).all()


def test_a_run_with_the_wrong_number_of_ranks_says_so(tmp_path, make_run, monkeypatch, capsys):
    run = make_run(tmp_path / "run", ranks=2)
    run.save(tmp_path / "run/run.json")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert train.main(["--config", str(tmp_path / "run/run.json")]) == 1
    assert "ask for 2 ranks, but 1 were started. Start with `torchrun --nproc-per-node 2`" in capsys.readouterr().err
    assert "ask for 2 ranks" in orjson.loads((tmp_path / "run/failed.json").read_bytes())["message"]


def test_two_groups_cannot_share_a_folder(tmp_path, make_run, monkeypatch):
    monkeypatch.setattr(train, "LOCK_PATIENCE_S", 0.0)
    make_run(tmp_path / "run")
    with (
        train.only_writer(tmp_path / "run", True),
        pytest.raises(TrainError, match="another run is training in this folder"),
        train.only_writer(tmp_path / "run", True),
    ):
        pass


def test_the_key_knows_what_matters():
    config = TrainConfig(steps=10)
    same = config.model_copy(update={"checkpoint_every": 3, "trackers": (), "max_restarts": 0})
    assert run_key(config, "a") == run_key(same, "a")
    others = [config.model_copy(update=u) for u in ({"seed": 2}, {"lr": 1e-3}, {"ranks": 2}, {"eval_bytes": 1})]
    assert len({run_key(c, "a") for c in [config, *others]} | {run_key(config, "b")}) == 6


def test_scores_equal_an_independent_computation(undisturbed, make_run):
    """Every document alone, one window after the other, from full logits."""
    run = make_run(undisturbed, seq_len=32)
    job = train.prepare(run, ALONE)
    model, tokens = job.model, TokenSet.open(run.tokens)
    on = score.yardstick(tokens, run.config.model_copy(update={"eval_bytes": 0}))
    got = score.score(model, on, ALONE, 20)
    for source, held in tokens.holdout.items():
        expected = {}
        for doc_id, ids, _ in held.documents():
            whole = [tokens.eos_id, *ids.tolist()]
            nats, predicted = 0.0, 0
            while predicted < len(ids):
                stop = min(predicted + 32, len(ids))
                begin = max(0, stop - 32)
                with torch.no_grad():
                    logits = model.logits(torch.tensor([whole[begin:stop]]))[0].double()
                for position in range(predicted, stop):
                    row = logits[position - begin]
                    nats += float(torch.logsumexp(row, 0) - row[whole[position + 1]])
                predicted = stop
            expected[doc_id] = nats / math.log(2)
        part = got.sources[source]
        assert len(part.doc_ids) == len(expected) > 20
        np.testing.assert_allclose(part.bits, [expected[d] for d in part.doc_ids], rtol=1e-5)
        sizes = {doc_id: size for doc_id, _, size in held.documents()}
        assert part.bytes == [sizes[d] for d in part.doc_ids]
        assert part.bits_per_byte == pytest.approx(sum(expected.values()) / sum(sizes.values()), rel=1e-5)
        assert max(part.tokens) > 32  # some documents were cut


def test_rolling_windows_by_hand():
    assert score.rolling(3, 4) == [(-1, 0, 3)]
    assert score.rolling(4, 4) == [(-1, 0, 4)]
    # 10 tokens: two full windows, the last two tokens with as much context as fits.
    assert score.rolling(10, 4) == [(-1, 0, 4), (3, 4, 8), (5, 8, 10)]
    for tokens in range(1, 30):
        cuts = score.rolling(tokens, 7)
        assert [t for _, first, stop in cuts for t in range(first, stop)] == list(range(tokens))
        assert all(stop - begin - 1 <= 7 for begin, _, stop in cuts)


def test_the_sample_of_held_out_documents():
    documents = [score.Held(f"d{i}", np.zeros(1, np.uint16), size) for i, size in enumerate([40, 50, 0, 60, 10])]
    assert {d.doc_id for d in score.choose(documents, 0)} == {"d0", "d1", "d3", "d4"}
    taken = score.choose(documents, 100)
    assert 60 <= sum(d.bytes for d in taken) <= 100
    assert [d.doc_id for d in taken] == [d.doc_id for d in score.choose(reversed(documents), 100)]
    assert [d.doc_id for d in score.choose(documents, 5)] == ["d4"]  # none fits: the smallest


def test_the_beginning_of_a_document():
    lengths = np.array([3, 4, 0])
    document = score.Held("d", np.array([0, 1, 0, 1, 2]), 14)  # 3 + 4 + 3 + 4 bytes, then the end of text
    assert score.beginning(document, 14, lengths) == document
    for limit, tokens, size in ((13, 3, 10), (10, 3, 10), (9, 2, 7), (1, 1, 3)):
        cut = score.beginning(document, limit, lengths)
        assert (cut.ids.tolist(), cut.bytes) == ([0, 1, 0, 1, 2][:tokens], size)


def test_scores_of_beginnings(tmp_path, make_run, monkeypatch):
    run = make_run(tmp_path / "run", eval_document_bytes=20)
    tokens = TokenSet.open(run.tokens)
    monkeypatch.setattr(score, "token_byte_lengths", lambda data: np.array([2] * 60 + [0]))
    chosen = score.held_out(tokens, run.config)
    assert max(d.bytes for d in chosen["tidy"]) == 20
    whole = [d.ids[-1] == tokens.eos_id for d in chosen["tidy"]]
    assert any(whole)
    assert not all(whole)
    assert all(len(d.ids) == 10 for d, w in zip(chosen["tidy"], whole, strict=True) if not w)
    monkeypatch.setattr(score, "token_byte_lengths", lambda data: None)
    with pytest.raises(TrainError, match="do not stand for fixed bytes of text"):
        score.held_out(tokens, run.config)


def test_without_held_out_documents_nothing_can_be_scored(tmp_path, make_run):
    run = make_run(tmp_path / "run")
    tokens = TokenSet.open(run.tokens)
    bare = TokenSet(tokens.folder, tokens.manifest, tokens.sources, {})
    with pytest.raises(TrainError, match="no source has held-out documents"):
        score.held_out(bare, run.config)


def test_metrics_forget_what_will_be_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.LinesFile(path, 0)
    follower = metrics.Follower(path)
    for step in (1, 2, 3):
        log.add({"step": step})
    log.close()
    assert [line["step"] for line in follower.new()] == [1, 2, 3]
    with path.open("ab") as file:
        file.write(b'{"step": 4')  # cut off
    assert follower.new() == []
    assert [line["step"] for line in metrics.read(path)] == [1, 2, 3]
    log = metrics.LinesFile(path, 2)
    log.add({"step": 3, "again": True})
    log.close()
    assert metrics.read(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [line["step"] for line in follower.new()] == [1, 2, 3]  # the file is another one


def test_a_preset_names_a_shape_and_a_run_can_be_read_back(tmp_path, make_run):
    run = make_run(tmp_path / "run", model=ModelShape(width=64, heads=2).model_dump())
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(TrainError, match=r"run\.json: cannot read the run"):
        Run.load(tmp_path / "run.json")
