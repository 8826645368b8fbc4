"""Rankings of made-up scores: who wins, who cannot be told apart, what is left out and said."""

from __future__ import annotations

import numpy as np
import pytest

from gristmill.trainer.ranking import SAME, Ranking, RunRow, as_text, rank, summary, usable
from gristmill.trainer.score import Scores, SourceScore

DOCUMENTS = 80


def scores(level: float, seed: int, noise: float = 0.002, sources=("docs", "code")) -> Scores:
    """A model that needs about `level` bits per byte; documents are the same for every model."""
    out = {}
    for number, source in enumerate(sources):
        sizes = np.random.default_rng(number).integers(100, 900, DOCUMENTS)
        hard = np.random.default_rng([number, 1]).normal(0, 0.2, DOCUMENTS)
        own = np.random.default_rng([number, seed, int(level * 1e6)]).normal(0, 0.01, DOCUMENTS)
        shift = np.random.default_rng([seed, int(level * 1e6)]).normal(0, noise)
        out[source] = SourceScore(
            doc_ids=[f"{source}{i}" for i in range(DOCUMENTS)],
            bits=((level + number * 0.5 + hard + own + shift) * sizes).tolist(),
            bytes=sizes.tolist(),
            tokens=[1] * DOCUMENTS,
        )
    return Scores(step=1, sources=out)


def ranked(levels: dict[str, float], seeds=(1, 2), missing=(), failed=()) -> Ranking:
    cells = {(m, s): scores(level, s) for m, level in levels.items() for s in seeds if (m, s) not in missing}
    runs = [
        RunRow(
            name=f"{m}-seed{s}", mixture=m, seed=s, status="done" if (m, s) in cells else "failed", error="out of luck"
        )
        for m in levels
        for s in seeds
    ]
    return rank("test", list(levels), list(seeds), cells, runs, 1000)


def test_clear_differences_are_found_and_close_ones_are_not():
    ranking = ranked({"poor": 1.40, "good": 1.20, "twin": 1.2005})
    assert {row.mixture for row in ranking.mixtures[:2]} == {"good", "twin"}
    assert ranking.mixtures[2].mixture == "poor"
    assert [row.rank for row in ranking.mixtures] == [1, 2, 3]
    verdicts = {(p.first, p.second): p.verdict for p in ranking.pairs}
    assert verdicts == {
        ("poor", "good"): "good is better",
        ("poor", "twin"): "twin is better",
        ("good", "twin"): SAME,
    }
    assert [row.tied_with_best for row in ranking.mixtures] == [True, True, False]
    assert ranking.noise_degrees == 2
    assert ranking.noise < 0.01
    assert summary(ranking)["tied"] == [ranking.mixtures[1].mixture]


def test_numbers_of_a_ranking():
    ranking = ranked({"a": 1.3, "b": 1.2})
    best = ranking.mixtures[0]
    both = [scores(1.2, s) for s in (1, 2)]
    assert best.mixture == "b"
    assert best.score.mean == pytest.approx(np.mean([s.mean for s in both]))
    assert best.sources["code"].mean == pytest.approx(np.mean([s.bits_per_byte["code"] for s in both]))
    assert both[0].mean == pytest.approx((both[0].bits_per_byte["code"] + both[0].bits_per_byte["docs"]) / 2)
    assert best.documents.low < best.score.mean < best.documents.high
    (pair,) = ranking.pairs
    assert pair.difference.mean == pytest.approx(ranking.mixtures[1].score.mean - best.score.mean)
    assert pair.documents.low < pair.difference.mean < pair.documents.high
    assert pair.p == max(pair.p_seeds, pair.p_documents)  # one pair: nothing to correct
    assert Ranking.model_validate_json(ranking.encoded()) == ranking
    assert "b is better" in as_text(ranking)[2]


def test_a_large_difference_with_one_seed_is_not_called_real():
    ranking = ranked({"a": 1.9, "b": 1.2}, seeds=(1,))
    assert ranking.mixtures[0].mixture == "b"
    assert ranking.mixtures[0].score.low is None
    (pair,) = ranking.pairs
    assert (pair.verdict, pair.p, pair.p_seeds) == (SAME, None, None)
    assert any("One seed" in note for note in ranking.notes)


def test_a_failed_run_is_reported_and_its_seed_left_out():
    ranking = ranked({"a": 1.3, "b": 1.2}, seeds=(1, 2, 3), missing={("a", 2)})
    assert ranking.mixtures[0].seeds == [1, 3]
    assert "Seed 2 is left out: not every mixture has a finished run with it." in ranking.notes
    assert "a-seed2 failed: out of luck" in ranking.notes
    assert summary(ranking)["failed"] == ["a-seed2"]


def test_a_mixture_without_runs_is_reported_and_the_rest_ranked():
    ranking = ranked({"a": 1.3, "b": 1.2, "c": 1.1}, missing={("c", 1), ("c", 2)})
    assert [row.mixture for row in ranking.mixtures] == ["b", "a"]
    assert "c has no finished run and is not ranked." in ranking.notes
    nothing = ranked({"a": 1.3}, missing={("a", 1), ("a", 2)})
    assert nothing.mixtures == []
    assert summary(nothing)["best"] is None


def test_seeds_that_do_not_meet():
    kept, common, notes = usable(
        ["a", "b", "c"], [1, 2], {("a", 1): None, ("a", 2): None, ("b", 1): None, ("c", 2): None}
    )
    assert (kept, common) == (["a", "c"], [2])
    assert notes[0] == "Seed 1 is left out: not every mixture has a finished run with it."
    assert notes[1] == "b shares no finished seed with the others and is not ranked."


def test_two_copies_are_told_apart_no_more_often_than_the_level_says():
    """A false-positive rate, measured: 60 pairs of mixtures of one quality, two seeds each."""
    wrong = 0
    for trial in range(60):
        cells = {(m, s): scores(1.2, 10_000 * trial + 10 * k + s) for k, m in enumerate("ab") for s in (1, 2)}
        runs = [RunRow(name=f"{m}{s}", mixture=m, seed=s, status="done") for m, s in cells]
        wrong += rank("t", ["a", "b"], [1, 2], cells, runs, 1).pairs[0].verdict != SAME
    assert wrong <= 8  # 3 expected at most; more than 8 has a chance of 0.6 %
