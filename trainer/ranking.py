"""From the scores of many runs to a ranking that says where it is sure: pure arithmetic, no training.

Lower is better. A mixture's score is its mean over seeds of bits per byte, each source weighing alike; `rank_by` names
other texts or tasks to rank by. Two mixtures are told apart only where the difference holds against both kinds of
chance, another seed and another sample of documents; p is the larger of the two, corrected for the number of pairs
(Holm). Else the verdict is "not distinguishable", however the means lie. Every single source, text and task is compared
as well (`measures`), as a second family of tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.trainer.comparison import (
    SAME,
    Compared,
    Measure,
    MeasureRow,
    PairRow,
    Range,
    Runs,
    Tasks,
    compared,
    measure_rows,
    measures_of,
    pair_rows,
)
from gristmill.trainer.config import TrainError
from gristmill.trainer.score import Scores
from gristmill.trainer.stats import holm, percentile_interval, smallest_difference, t_interval

__all__ = ["SAME", "Cells", "MeasureRow", "MixtureRow", "PairRow", "Range", "Ranking", "RunRow", "as_text", "rank"]

METRIC = "bits per byte on held-out documents, mean over sources; lower is better"


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
    evaluation_sets: dict[str, float] = Field(default_factory=dict)  # bits per byte of the texts given
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)  # `tasks.TaskItems.summary` of each
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


class Ranking(Settings):
    """ranking.json."""

    name: str
    metric: str = METRIC
    confidence: float
    budget_tokens: int
    sources: list[str]
    rank_by: list[str] = Field(default_factory=list)  # whose mean is the score; by default the sources
    mixtures: list[MixtureRow]  # best first
    pairs: list[PairRow]
    runs: list[RunRow]
    noise: float | None  # standard deviation of one run around its mixture and seed
    noise_degrees: int
    control: str = ""  # whose repeats count towards the noise
    control_repeats: int = 0  # on seeds of their own
    control_noise: float | None = None  # standard deviation of all runs of the control
    smallest_difference: float | None = None  # that one test over seeds can call real: anything less is noise
    measures: list[MeasureRow] = Field(default_factory=list)  # each source, text and task by itself
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


def rank(
    name: str,
    mixtures: Sequence[str],
    seeds: Sequence[int],
    cells: Cells,
    runs: Sequence[RunRow],
    budget_tokens: int,
    confidence: float = 0.95,
    tasks: Mapping[tuple[str, int], Tasks] | None = None,
    rank_by: Sequence[str] = (),
    control: str = "",
    control_seeds: Sequence[int] = (),
) -> Ranking:
    """The ranking of what finished. All scores must be over the same documents; they are, for one set of tokens.

    With nothing finished it has runs and notes only. control_seeds: further seeds that the mixture `control` was
    trained with. Raises TrainError where `rank_by` names what was not scored.
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
    tasks = tasks or {}
    again = [(control, seed) for seed in control_seeds if (control, seed) in cells and control in kept]
    found = Runs(
        kept,
        {m: [cells[m, s] for s in common] for m in kept},
        {m: [tasks.get((m, s), {}) for s in common] for m in kept},
        [(cells[cell], tasks.get(cell, {})) for cell in again],
    )
    _same_documents(found)
    by = _ranked_by(found, rank_by)
    one = compared(found, by)
    noise, degrees = one.noise
    if not degrees:
        notes.append("One seed: the spread between seeds is not known, so no difference can be called real.")
    pairs = pair_rows(kept, one, holm(one.p), confidence)
    tokens = {run.mixture: run.tokens for run in runs if run.status == "done"}
    body = {
        "sources": sorted(found.scores[kept[0]][0].sources),
        "rank_by": [measure.name for measure in by],
        "metric": METRIC if not rank_by else f"bits per byte, mean over {', '.join(rank_by)}; lower is better",
        "mixtures": _rows(found, one, pairs, common, tokens, confidence),
        "pairs": pairs,
        "noise": noise if degrees else None,
        "noise_degrees": degrees,
        "control": control if again else "",
        "control_repeats": len(again),
        "control_noise": _control_noise(kept, control, one),
        "smallest_difference": smallest_difference(noise, degrees, len(common), confidence) if degrees else None,
        "measures": measure_rows(found, confidence),
        "notes": notes,
    }
    return empty.model_copy(update=body)


def _ranked_by(found: Runs, rank_by: Sequence[str]) -> list[Measure]:
    first = found.mixtures[0]
    known = [m for m in measures_of(found.scores[first][0], found.tasks[first][0]) if m.kind != "accuracy"]
    if not rank_by:
        return [measure for measure in known if measure.kind == "held_out"]
    by_name = {measure.name: measure for measure in known}
    for name in rank_by:
        if name not in by_name:
            raise TrainError(
                f"`rank_by` names {name!r}, which has no bits per byte here. There are: {', '.join(by_name)}."
            )
    return [by_name[name] for name in rank_by]


def _rows(
    found: Runs,
    one: Compared,
    pairs: Sequence[PairRow],
    common: list[int],
    tokens: Mapping[str, dict[str, int]],
    confidence: float,
) -> list[MixtureRow]:
    order = np.argsort(one.table.mean(axis=1), kind="stable").tolist()
    best = found.mixtures[order[0]]
    tied = {best} | {
        p.second if p.first == best else p.first for p in pairs if p.verdict == SAME and best in (p.first, p.second)
    }
    rows = []
    for place, m in enumerate(order):
        name = found.mixtures[m]
        scores = found.scores[name]
        rows.append(
            MixtureRow(
                rank=place + 1,
                mixture=name,
                seeds=common,
                score=Range.of(t_interval(one.table[m], confidence)),
                documents=Range.of(percentile_interval(float(one.table[m].mean()), one.draws[m], confidence)),
                sources={
                    source: Range.of(t_interval([run.bits_per_byte[source] for run in scores], confidence))
                    for source in sorted(scores[0].sources)
                },
                tokens=tokens.get(name, {}),
                tied_with_best=name in tied,
            )
        )
    return rows


def _control_noise(kept: Sequence[str], control: str, one: Compared) -> float | None:
    if control not in kept or not one.repeats:
        return None
    return float(np.std([*one.table[kept.index(control)], *one.repeats], ddof=1))


def _same_documents(found: Runs) -> None:
    """Asserts that every run was scored on the same documents and items in the same order."""
    scores = [run for runs in found.scores.values() for run in runs] + [run for run, _ in found.repeats]
    for name in scores[0].sources | scores[0].sets:
        ids = {tuple((run.sources | run.sets)[name].doc_ids) for run in scores}
        assert len(ids) == 1, f"runs of one ablation were scored on different documents of {name}"
    tasks = [run for runs in found.tasks.values() for run in runs] + [run for _, run in found.repeats]
    for name in tasks[0]:
        assert len({run[name].ids for run in tasks}) == 1, f"runs of one ablation have different items of {name}"


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
    if ranking.smallest_difference is not None:
        lines.append(f"Differences under {ranking.smallest_difference:.2g} are noise here.")
    for measure in ranking.measures:
        unit = "accuracy" if measure.kind == "accuracy" else "bits per byte"
        means = ", ".join(f"{name} {r.mean:.4f}" for name, r in measure.mixtures.items())
        lines.append(f"{measure.name}, {unit}: {means}")
    return lines + list(ranking.notes)


def summary(ranking: Ranking) -> dict[str, Any]:
    """The verdicts in a few words: winner, and who cannot be told from it."""
    best = ranking.mixtures[0].mixture if ranking.mixtures else None
    return {
        "best": best,
        "tied": [row.mixture for row in ranking.mixtures if row.tied_with_best and row.mixture != best],
        "failed": [run.name for run in ranking.runs if run.status == "failed"],
    }
