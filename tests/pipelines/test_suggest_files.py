"""`mixture swarm` and `mixture suggest` from files to files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError
from gristmill.pipelines.cli import main
from gristmill.pipelines.suggest import finished_runs, write_suggestion, write_swarm
from gristmill.trainer.ablate import Ablation
from gristmill.trainer.ranking import Ranking, RunRow

PRIOR = "name: prior\nsources:\n  a: {weight: 2}\n  b: {weight: 1}\n  c: {weight: 1}\n"
TRAIN = "model: 3m\nseq_len: 64\nbatch_windows: 4\nbudget_tokens: 5000\n"


def written(folder: Path) -> tuple[str, str]:
    (folder / "prior.yaml").write_text(PRIOR)
    (folder / "train.yaml").write_text(TRAIN)
    return str(folder / "prior.yaml"), str(folder / "train.yaml")


def call(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


def finish(ablation: Ablation, folder: Path) -> None:
    """What training would leave: bits per byte by a law with its optimum at a = 1/2, b = 1/2."""
    runs = []
    for path in ablation.mixtures:
        mixture = Mixture.load(path)
        share = {name: wish.weight or 0.0 for name, wish in mixture.sources.items()}
        a, b = share.get("a", 0.0), share.get("b", 0.0)
        scores = {"a": 1 + float(np.exp(-3 * a)), "b": 1 + float(np.exp(-3 * b))}
        tokens = {name: round(100_000 * value) for name, value in share.items()}
        name = mixture.name
        runs.append(RunRow(name=name, mixture=name, seed=0, status="done", bits_per_byte=scores, tokens=tokens))
    runs.append(RunRow(name="lost", mixture="lost", seed=0, status="failed", error="x"))
    ranking = Ranking(
        name="swarm", confidence=0.95, budget_tokens=1, sources=["a", "b"], mixtures=[], pairs=[], runs=runs,
        noise=None, noise_degrees=0, notes=[],
    )  # fmt: skip
    folder.mkdir()
    (folder / "ranking.json").write_bytes(ranking.encoded())


def test_from_a_prior_to_a_proposal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prior, train = written(tmp_path)
    arguments = ["mixture", "swarm", prior, "--runs", "24", "--train", train, "--out", str(tmp_path / "swarm")]
    call([*arguments, "--seed", "3"])
    ablation = Ablation.load(tmp_path / "swarm" / "ablation.yaml")
    assert (len(ablation.mixtures), ablation.seeds, ablation.train.total_tokens) == (24, (3,), 5000 // 256 * 256)
    finish(ablation, tmp_path / "runs")
    out = tmp_path / "suggested.yaml"
    call(["mixture", "suggest", str(tmp_path / "runs"), "--out", str(out)])
    assert "redicted" in capsys.readouterr().out
    found = Mixture.load(out)
    assert found.description.startswith("Predicted ")
    weights = {name: wish.weight for name, wish in found.sources.items()}
    assert weights["a"] == pytest.approx(0.5, abs=0.05)
    assert weights["b"] == pytest.approx(0.5, abs=0.05)
    refined = write_swarm(str(out), 4, 1, train, str(tmp_path / "second"), narrow=True)
    assert len(Ablation.load(refined).mixtures) == 4


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    _, train = written(tmp_path)
    even = tmp_path / "even.yaml"
    even.write_text("name: even\nsources: {a: {}, b: {}}\ntemperature: 0.5\n")
    with pytest.raises(MixtureError, match="needs a `weight`"):
        write_swarm(str(even), 3, 1, train, str(tmp_path / "x"))
    with pytest.raises(MixtureError, match=r"no ranking\.json"):
        finished_runs([str(tmp_path)])
    with pytest.raises(MixtureError, match="give --tokens"):
        write_swarm(str(tmp_path / "prior.yaml"), 3, 1, train, str(tmp_path / "x"), target_tokens=10)


def test_runs_that_failed_do_not_count_and_a_target_must_have_been_scored(tmp_path: Path) -> None:
    prior, train = written(tmp_path)
    finish(Ablation.load(write_swarm(prior, 3, 1, train, str(tmp_path / "swarm"))), tmp_path / "runs")
    sources, weights, scores = finished_runs([str(tmp_path / "runs")])
    assert (set(sources) <= {"a", "b", "c"}, weights.shape[0], scores.shape) == (True, 3, (3, 2))
    np.testing.assert_allclose(weights.sum(1), 1)
    with pytest.raises(MixtureError, match="no score on nothing"):
        finished_runs([str(tmp_path / "runs")], ["nothing"])
    with pytest.raises(MixtureError, match="3 runs are too few"):
        write_suggestion([str(tmp_path / "runs")], str(tmp_path / "out.yaml"))
