"""Forks from a trunk: the same mixture is the continuation bit for bit, another one goes on with the trunk's books."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from gristmill.mixtures.consumption import Consumption
from gristmill.pipelines.cli_training import _settings
from gristmill.pipelines.trace_step import documents_of_step
from gristmill.stages.settings_file import SettingsError
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import checkpoint, fork, metrics, train
from gristmill.trainer.config import RUN_FILE, TrainError
from gristmill.trainer.feed import open_feed
from gristmill.trainer.group import ALONE
from gristmill.trainer.optim import learning_rate

TIMING = {"tokens_per_s", "mfu", "memory_bytes"}


def curve(out: Path, after: int = 0) -> list[dict]:
    lines = metrics.read(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in TIMING} for line in lines if line["step"] > after]


def digests(out: Path, step: int) -> dict[str, str]:
    files = orjson.loads((checkpoint.folder_of(out / "checkpoints", step) / "state.json").read_bytes())["files"]
    return {name: digest for name, digest in files.items() if name.endswith(".distcp")}


def trained(run) -> Path:
    run.save(Path(run.out) / RUN_FILE)
    train.work(run, ALONE)
    return Path(run.out)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory, make_run) -> Path:
    """20 steps at a constant rate, a checkpoint every 5."""
    run = make_run(tmp_path_factory.mktemp("fork") / "trunk", schedule="wsd", decay=0.0, warmup=2, keep_last=9)
    return trained(run)


@pytest.fixture(scope="module")
def skewed(trunk) -> Path:
    path = trunk.parent / "skewed.yaml"
    path.write_text("name: skewed\nmax_epochs: 1000\nsources: {tidy: 0.9, noise: 0.1}\n")
    return path


def test_a_fork_with_the_same_mixture_is_the_continuation(tmp_path, make_run, trunk, capsys):
    same = {"schedule": "wsd", "decay": 0.0, "warmup": 2}
    out = trained(make_run(tmp_path / "fork", init_from=f"{trunk}@10", **same))
    said = capsys.readouterr().err
    assert "Forked from" in said
    assert "Mixture even begins as the trunk's did, and goes on in the same order." in said
    assert [line["step"] for line in curve(out)] == list(range(11, 21))
    assert curve(out) == curve(trunk, after=10)
    assert digests(out, 20) == digests(trunk, 20)

    longer = trained(make_run(tmp_path / "fork2", init_from=str(out), steps=25, **same))
    whole = trained(make_run(tmp_path / "whole", steps=25, **same))
    assert curve(longer) == curve(whole, after=20)  # a fork of a fork


def test_a_fork_goes_on_after_a_stop_and_needs_its_trunk_no_more(tmp_path, make_run, trunk, skewed, monkeypatch):
    settings = {"mixture": skewed, "steps": 16, "schedule": "wsd", "decay": "fork", "warmup": 2}
    whole = trained(make_run(tmp_path / "whole", init_from=f"{trunk}@10", **settings))
    away = tmp_path / "trunk"
    away.symlink_to(trunk)
    run = make_run(tmp_path / "run", init_from=f"{away}@10", checkpoint_every=3, **settings)
    real = train.save

    def dying(job, must):
        if job.progress.step > 13:
            raise KeyboardInterrupt
        real(job, must)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save", dying)
        with pytest.raises(KeyboardInterrupt):
            trained(run)
    kept = fork.Trunk.model_validate_json((tmp_path / "run/fork.json").read_bytes())
    assert kept.step == 10
    monkeypatch.setattr(fork, "find_trunk", None)
    trained(run)
    assert curve(tmp_path / "run") == curve(whole)
    assert digests(tmp_path / "run", 16) == digests(whole, 16)


def test_several_branches_with_another_mixture(tmp_path, make_run, trunk, skewed, capsys):
    config = fork.branch_config(f"{trunk}@10", branch_tokens=6 * 8 * 32 + 100)
    assert (config.steps, config.schedule, config.decay, config.lr) == (16, "wsd", "fork", 0.01)
    rates = [learning_rate(config, step, 10) for step in range(9, 16)]
    assert rates == pytest.approx([0.01, *(0.01 * (1 - n / 6) for n in range(1, 7))])
    ends = []
    for mixture in (skewed, skewed.parent / "even.yaml"):
        if not mixture.exists():
            mixture.write_text("name: even\nmax_epochs: 1000\nsources: {tidy: 0.5, noise: 0.5}\n")
        run = make_run(tmp_path / mixture.stem, mixture=mixture, **config.model_dump(exclude={"budget_tokens"}))
        out = trained(run)
        lines = curve(out)
        assert [line["lr"] for line in lines] == pytest.approx(rates[1:])
        assert sum(lines[-1]["sources"].values()) == 16 * 8 * 32 == lines[-1]["tokens"]
        ends.append(lines[-1]["sources"])
    assert "Mixture skewed begins here, and takes up each source where the trunk stopped." in capsys.readouterr().err
    half, total = 10 * 8 * 32 // 2, 6 * 8 * 32
    assert ends[0]["tidy"] - half == pytest.approx(0.9 * total, abs=32)
    assert ends[1]["tidy"] - half == total // 2


def test_a_branch_uses_nothing_again_of_the_trunk(make_run, tmp_path, trunk, skewed):
    run = make_run(tmp_path / "run", mixture=skewed, init_from=f"{trunk}@10", steps=16)
    tokens = TokenSet.open(run.tokens)
    feed = open_feed(run, tokens)
    assert (feed.begin, feed.continues) == (80, False)
    assert feed.phases["fork"] == 80
    before = open_feed(make_run(tmp_path / "x"), tokens)
    seen = {before.plan.locate(i) for i in range(80)}
    ours = {feed.plan.locate(i) for i in range(6 * 8)}
    assert not seen & ours
    assert feed.books(80) == Consumption.read(checkpoint.folder_of(trunk / "checkpoints", 10))
    named = feed.documents(80, 88)
    assert named
    run.save(Path(run.out) / RUN_FILE)
    _, documents = documents_of_step(run.out, 11)
    assert {one.doc_id for one in documents} == {one["doc_id"] for one in named}
    assert {(one.shard, one.source) for one in documents} == {(one["shard"], one["source"]) for one in named}
    assert documents[0].position == 80
    with pytest.raises(SettingsError, match="was forked after step 10"):
        documents_of_step(run.out, 10)


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        ("@7", {}, r"no checkpoint of that step.* has 5, 10, 15, 20\. `keep_every`"),
        ("/nowhere", {}, "neither a training run with a checkpoint nor a checkpoint"),
        ("@10", {"steps": 10}, "after step 10, but the run ends with step 10"),
        ("@10", {"batch_windows": 4}, r"batch_windows 8 \(here 4\)"),
        ("@10", {"optimizer": "muon", "seed": 3}, r"optimizer adamw \(here muon\), seed 1 \(here 3\)"),
        ("@10", {"model": {"width": 64, "layers": 2, "heads": 2}}, "another shape of the model"),
    ],
)
def test_what_cannot_be_forked_says_why(tmp_path, make_run, trunk, where, change, message):
    run = make_run(tmp_path / "run", init_from=f"{trunk}{where}", **change)
    with pytest.raises(TrainError, match=message):
        open_feed(run, TokenSet.open(run.tokens))


def test_a_trunk_that_changed_is_not_begun_from(tmp_path, make_run, trunk):
    run = make_run(tmp_path / "run", init_from=f"{trunk}@10", steps=21)
    found = fork.find_trunk(f"{trunk}@10")
    fork.keep(found.model_copy(update={"digest": "0" * 32}), tmp_path / "run")
    with pytest.raises(TrainError, match="not the one that this run was planned with"):
        train.work(run, ALONE)


def test_a_branch_shorter_than_a_step(trunk):
    with pytest.raises(TrainError, match="A branch of 100 tokens is less than one step of 256"):
        fork.branch_config(str(trunk), branch_tokens=100)


def test_the_settings_of_a_branch_on_the_command_line(tmp_path, trunk):
    assert _settings(None, f"{trunk}@10", 6 * 256) == fork.branch_config(f"{trunk}@10", 6 * 256)
    file = tmp_path / "train.yaml"
    file.write_text("model: 1m\nsteps: 30\n")
    assert _settings(str(file), f"{trunk}@10", None).init_from == f"{trunk}@10"
    with pytest.raises(SettingsError, match="--branch-tokens counts from a fork"):
        _settings(str(file), None, 100)
    with pytest.raises(SettingsError, match="Name the settings"):
        _settings(None, str(trunk), None)
