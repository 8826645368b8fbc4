"""From the scores of many runs to a ranking that says where it is sure: pure arithmetic, no training.

Lower is better. A mixture's score is its mean over seeds of bits per byte, each source weighing alike. Two mixtures
are told apart only where the difference holds against both kinds of chance, another seed and another sample of
documents; p is the larger of the two, corrected for the number of pairs (Holm). Else the verdict is
"not distinguishable", however the means lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.trainer.score import Scores, Texts
from gristmill.trainer.stats import (
    Interval,
    bootstrap_p,
    bootstrap_scores,
    holm,
    percentile_interval,
    seed_noise,
    seed_tests,
    t_interval,
)

METRIC = "bits per byte on held-out documents, mean over sources; lower is better"
SAME = "not distinguishable"


class Range(Settings):
    """A mean with an interval; null bounds where one value says nothing about the spread."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, interval: Interval) -> Range:
        known = not math.isnan(interval.low)
        return cls(mean=interval.mean, low=interval.low if known else None, high=interval.high if known else None)


class RunRow(Settings):
    """One training run."""

    name: str  # its folder
    mixture: str
    seed: int
    status: str  # "done", or "failed"
    error: str = ""
    reused: bool = False  # found finished, with the same key
    score: float | None = None
    bits_per_byte: dict[str, float] = Field(default_factory=dict)
    tokens: dict[str, int] = Field(default_factory=dict)  # trained on, by source
    skipped: int = 0  # steps whose loss was no number
    seconds: float = 0.0


class MixtureRow(Settings):
    """One mixture, over its seeds."""

    rank: int  # 1 is best by mean
    mixture: str
    seeds: list[int]  # whose runs count
    score: Range  # over seeds, Student's t
    documents: Range  # over resampled documents, bootstrap
    sources: dict[str, Range]  # bits per byte of each source, over seeds
    tokens: dict[str, int]  # trained on in one run, by source
    tied_with_best: bool  # the best one by mean itself included


class PairRow(Settings):
    """Two mixtures compared; differences are first minus second, so negative means that the first is better."""

    first: str
    second: str
    difference: Range  # over seeds
    documents: Range  # over resampled documents
    p_seeds: float | None  # null with one seed: no spread is known
    p_documents: float
    p: float | None  # the larger one, Holm-adjusted over all pairs
    verdict: str  # "<name> is better", or "not distinguishable"


class Ranking(Settings):
    """ranking.json."""

    name: str
    metric: str = METRIC
    confidence: float
    budget_tokens: int
    sources: list[str]
    mixtures: list[MixtureRow]  # best first
    pairs: list[PairRow]
    runs: list[RunRow]
    noise: float | None  # standard deviation of one run around its mixture and seed
    noise_degrees: int
    notes: list[str]  # what a reader must know: failed runs, seeds left out, one seed only

    def encoded(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2)

    @classmethod
    def load(cls, path: Path) -> Ranking:
        return cls.model_validate(orjson.loads(path.read_bytes()))


Cells = Mapping[tuple[str, int], Scores]  # (mixture, seed) -> scores of a finished run


def usable(mixtures: Sequence[str], seeds: Sequence[int], cells: Cells) -> tuple[list[str], list[int], list[str]]:
    """Mixtures with a finished run, seeds that all of those finished, and notes on what is left out.

    Comparing mean scores over different seeds would compare seeds; so only complete columns count.
    """
    kept = [m for m in mixtures if any((m, s) in cells for s in seeds)]
    common = [s for s in seeds if all((m, s) in cells for m in kept)]
    notes = [f"{m} has no finished run and is not ranked." for m in mixtures if m not in kept]
    if kept and not common:
        # Rather lose the mixture with the fewest runs than everything.
        worst = min(kept, key=lambda m: (sum((m, s) in cells for s in seeds), kept.index(m)))
        rest, common, more = usable([m for m in mixtures if m != worst], seeds, cells)
        return rest, common, [*more, f"{worst} shares no finished seed with the others and is not ranked."]
    for seed in seeds:
        if seed not in common and any((m, seed) in cells for m in kept):
            notes.append(f"Seed {seed} is left out: not every mixture has a finished run with it.")
    return kept, common, notes


def texts_over_seeds(scores: Sequence[Scores], source: str) -> Texts:
    """The documents of a source with their bits averaged over runs."""
    parts = [s.sources[source].texts for s in scores]
    return Texts(np.mean([p.bits for p in parts], axis=0), parts[0].bytes)


def rank(
    name: str,
    mixtures: Sequence[str],
    seeds: Sequence[int],
    cells: Cells,
    runs: Sequence[RunRow],
    budget_tokens: int,
    confidence: float = 0.95,
) -> Ranking:
    """The ranking of what finished. All scores must be over the same documents; they are, for one set of tokens.

    With nothing finished it has runs and notes only.
    """
    kept, common, notes = usable(mixtures, seeds, cells)
    notes += [f"{run.name} failed: {run.error.splitlines()[0]}" for run in runs if run.status == "failed"]
    empty = Ranking(
        name=name,
        confidence=confidence,
        budget_tokens=budget_tokens,
        sources=[],
        mixtures=[],
        pairs=[],
        runs=list(runs),
        noise=None,
        noise_degrees=0,
        notes=notes,
    )
    if not kept:
        return empty
    if len(common) == 1:
        notes.append("One seed: the spread between seeds is not known, so no difference can be called real.")
    scores = {m: [cells[m, s] for s in common] for m in kept}
    sources = sorted(scores[kept[0]][0].sources)
    _same_documents(scores, sources)
    table = np.array([[run.mean for run in scores[m]] for m in kept])  # (mixtures, seeds)
    draws = bootstrap_scores([[texts_over_seeds(scores[m], source) for m in kept] for source in sources])
    pairs = _pairs(kept, table, draws, confidence)
    noise, degrees = seed_noise(table)
    order = np.argsort(table.mean(axis=1), kind="stable").tolist()
    best = kept[order[0]]
    tied = {best} | {
        p.second if p.first == best else p.first for p in pairs if p.verdict == SAME and best in (p.first, p.second)
    }
    tokens = {run.mixture: run.tokens for run in runs if run.status == "done"}
    rows = [
        MixtureRow(
            rank=place + 1,
            mixture=kept[m],
            seeds=common,
            score=Range.of(t_interval(table[m], confidence)),
            documents=Range.of(percentile_interval(float(table[m].mean()), draws[m], confidence)),
            sources={
                s: Range.of(t_interval([run.bits_per_byte[s] for run in scores[kept[m]]], confidence)) for s in sources
            },
            tokens=tokens.get(kept[m], {}),
            tied_with_best=kept[m] in tied,
        )
        for place, m in enumerate(order)
    ]
    found = {
        "sources": sources,
        "mixtures": rows,
        "pairs": pairs,
        "noise": noise if degrees else None,
        "noise_degrees": degrees,
        "notes": notes,
    }
    return empty.model_copy(update=found)


def _pairs(kept: Sequence[str], table: np.ndarray, draws: np.ndarray, confidence: float) -> list[PairRow]:
    tests = seed_tests(table)
    differences = [draws[a] - draws[b] for a, b in combinations(range(len(kept)), 2)]
    by_documents = [bootstrap_p(d) for d in differences]
    # Both must reject, so the larger p counts (an intersection-union test). NaN: no spread between seeds is known.
    together = [math.nan if math.isnan(t.p) else max(t.p, q) for t, q in zip(tests, by_documents, strict=True)]
    rows = []
    for test, difference, p_documents, p in zip(tests, differences, by_documents, holm(together), strict=True):
        first, second = kept[test.first], kept[test.second]
        sure = p < 1 - confidence  # false for NaN
        rows.append(
            PairRow(
                first=first,
                second=second,
                difference=Range.of(test.interval(confidence)),
                documents=Range.of(percentile_interval(test.difference, difference, confidence)),
                p_seeds=None if math.isnan(test.p) else test.p,
                p_documents=p_documents,
                p=None if math.isnan(p) else p,
                verdict=f"{first if test.difference < 0 else second} is better" if sure else SAME,
            )
        )
    return rows


def _same_documents(scores: Mapping[str, Sequence[Scores]], sources: Sequence[str]) -> None:
    """Asserts that every run was scored on the same documents in the same order."""
    for source in sources:
        ids = {tuple(run.sources[source].doc_ids) for runs in scores.values() for run in runs}
        assert len(ids) == 1, f"runs of one ablation were scored on different documents of {source}"


def as_text(ranking: Ranking) -> list[str]:
    """The ranking in plain lines, for a terminal or a log."""

    def span(r: Range) -> str:
        return f"{r.mean:.4f}" + (f" ({r.low:.4f} to {r.high:.4f})" if r.low is not None else "")

    lines: list[str] = []
    for row in ranking.mixtures:
        tie = " = best" if row.tied_with_best and row.rank > 1 else ""
        per_source = ", ".join(f"{s} {r.mean:.3f}" for s, r in row.sources.items())
        lines.append(f"{row.rank}. {row.mixture}{tie}: {span(row.score)} bits per byte; {per_source}")
    for pair in ranking.pairs:
        p = "unknown" if pair.p is None else f"{pair.p:.2g}"
        lines.append(f"{pair.first} - {pair.second}: {span(pair.difference)}, p = {p}: {pair.verdict}")
    return lines + list(ranking.notes)


def summary(ranking: Ranking) -> dict[str, Any]:
    """The verdicts in a few words: winner, and who cannot be told from it."""
    best = ranking.mixtures[0].mixture if ranking.mixtures else None
    return {
        "best": best,
        "tied": [row.mixture for row in ranking.mixtures if row.tied_with_best and row.mixture != best],
        "failed": [run.name for run in ranking.runs if run.status == "failed"],
    }
