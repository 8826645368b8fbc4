"""Ablations as the command line shows them: progress while they train, the ranking as a table."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

from gristmill.pipelines.progress import Display
from gristmill.stages.settings_file import SettingsError
from gristmill.trainer.ablate import RANKING_FILE, Ablation, Carry, Trials, ablate, one_after_the_other, plan_runs
from gristmill.trainer.config import SCORES_FILE
from gristmill.trainer.power import Needs, needs
from gristmill.trainer.ranking import SAME, Ranking
from gristmill.trainer.score import Scores

Rows = list[dict[str, Any]]


def run_ablation(
    file: Path, tokens: str, out: str, display: Display, carry: Carry | None = None
) -> tuple[int, dict[str, Any]]:
    """Trains what is missing and ranks -> (runs trained now, the ranking as plain data). carry: as `trainer.ablate`.

    Raises SettingsError for a faulty file, MixtureError for a mixture that cannot be met, TrainError when no run
    finished.
    """
    trained, ranking = train_and_rank(Ablation.load(file), tokens, out, display, carry)
    return trained, ranking.model_dump(mode="json")


def train_and_rank(
    ablation: Ablation, what: str | Trials, out: str, display: Display, carry: Carry | None = None
) -> tuple[int, Ranking]:
    """`run_ablation` of whatever is compared: as `trainer.ablate` takes it -> (runs trained now, the ranking)."""
    planned = plan_runs(ablation, what, out)
    steps = planned[0].config.total_steps
    trained = 0
    reached: dict[int, int] = {}  # steps of each run; several may go on at a time
    display.say(f"ablation: {len(planned)} runs of {planned[0].config.total_tokens:,} tokens")
    for warning in ablation.warnings:
        display.say(warning)
    with display.phase("ablation", len(planned) * steps) as phase:

        def on_event(event: dict[str, Any]) -> None:
            nonlocal trained
            kind = event["event"]
            reached[event["index"]] = int(event["step"]) if kind == "step" else steps * (kind != "start")
            said = f"{event['run']}  {loss_of(event)}" if kind == "step" else str(event["run"])
            phase.to(sum(reached.values()), len(planned) * steps, said)
            if kind == "done":
                trained += 1
                scores = "  ".join(f"{source} {value:.3f}" for source, value in event["bits_per_byte"].items())
                display.say(f"  {event['run']:<28} bits per byte: {scores}")
            elif kind == "failed":
                display.say(f"  {event['run']} failed: {event['error']}")
            display.event("ablation", **{k: v for k, v in event.items() if k != "event"}, state=kind)

        ranking = ablate(ablation, what, out, on_event, carry or one_after_the_other, planned)
    if not trained:
        display.say(f"Nothing to train: all {len(planned)} runs are there and up to date.")
    return trained, ranking


def power_of(file: Path, folder: str | None, difference: float, noise: float | None) -> Needs:
    """What it takes to see a difference in an ablation. noise: None takes what its ranking in the folder measured.

    Raises SettingsError where neither is known.
    """
    ablation = Ablation.load(file)
    error, size, path = None, None, Path(folder or "") / RANKING_FILE
    if noise is None:
        if folder is None or not path.is_file():
            raise SettingsError(
                f"{path}: there is no ranking, so the noise of a run is not known. Name the folder of a finished "
                "ablation with --out or --tokens, or assume a noise: --noise 0.004."
            )
        ranking = Ranking.load(path)
        if ranking.noise is None:
            raise SettingsError(
                f"{path}: with one seed and no repeats the noise of a run is not known. Assume one: --noise 0.004."
            )
        noise = ranking.noise
        error, size = _documents_error(ranking), _scored_bytes(ranking, Path(folder))
    return needs(
        noise,
        difference,
        len(ablation.mixtures),
        ablation.train.total_tokens,
        ablation.confidence,
        repeats=len(ablation.control_seeds),
        seeds_now=len(ablation.seeds),
        documents_error=error,
        scored_bytes=size,
    )


def _documents_error(ranking: Ranking) -> float | None:
    """Standard error of a pair's difference over documents: the largest, from the widths of the intervals."""
    ranges = [pair.documents for pair in ranking.pairs]
    widths = [r.high - r.low for r in ranges if r.high is not None and r.low is not None]
    quantile = NormalDist().inv_cdf((1 + ranking.confidence) / 2)
    return max(widths) / 2 / quantile if widths else None


def _scored_bytes(ranking: Ranking, folder: Path) -> int | None:
    """UTF-8 bytes of what one run was scored on, of the names that the ranking is by."""
    run = next((run for run in ranking.runs if run.status == "done"), None)
    if run is None or not (folder / run.name / SCORES_FILE).is_file():
        return None
    scores = Scores.load(folder / run.name / SCORES_FILE)
    return sum(sum(source.bytes) for name, source in (scores.sources | scores.sets).items() if name in ranking.rank_by)


def loss_of(line: dict[str, Any]) -> str:
    """The loss of a line of metrics; a step whose loss was no number has none."""
    return "skipped" if line.get("loss") is None else f"loss {line['loss']:.3f}"


def ranking_rows(ranking: dict[str, Any]) -> tuple[list[str], Rows, list[str]]:
    """(columns, rows, verdicts) of a ranking: bits per byte with 95 % intervals, best first."""
    sources = ranking["sources"]
    percent = f"{ranking['confidence']:.0%}"
    columns = ["mixture", "bits/byte", f"{percent} seeds", f"{percent} documents", *sources]
    rows = [
        {
            "mixture": f"{row['rank']}. {row['mixture']}",
            "bits/byte": row["score"]["mean"],
            columns[2]: _range(row["score"]),
            columns[3]: _range(row["documents"]),
            **{source: row["sources"][source]["mean"] for source in sources},
        }
        for row in ranking["mixtures"]
    ]
    verdicts = [
        f"{p['first']} and {p['second']}: {p['verdict']}" + (f" (p = {p['p']:.2g})" if p["p"] is not None else "")
        for p in ranking["pairs"]
    ]
    return columns, rows, [*verdicts, *_floor(ranking), *_other_measures(ranking), *ranking["notes"]]


def _floor(ranking: dict[str, Any]) -> list[str]:
    """What is noise."""
    if ranking["smallest_difference"] is None:
        return []
    repeats = f", {ranking['control_repeats']} repeats of {ranking['control']} included" if ranking["control"] else ""
    return [
        f"One run varies by {ranking['noise']:.2g} ({ranking['noise_degrees']} degrees of freedom{repeats}): "
        f"differences under {ranking['smallest_difference']:.2g} are noise."
    ]


def _other_measures(ranking: dict[str, Any]) -> list[str]:
    """Texts and tasks, which the columns do not have: means in the order of the ranking, and who is better."""
    lines = []
    for row in ranking["measures"]:
        if row["kind"] == "held_out":
            continue
        unit = "accuracy" if row["kind"] == "accuracy" else "bits/byte"
        means = ", ".join(f"{m['mixture']} {row['mixtures'][m['mixture']]['mean']:.4f}" for m in ranking["mixtures"])
        chance = f"; chance {row['baseline']:.3f}" if row["baseline"] is not None else ""
        found = [f"{p['first']} - {p['second']}: {p['verdict']}" for p in row["pairs"] if p["verdict"] != SAME]
        lines.append(f"{row['name']}, {unit}: {means}{chance}; {', '.join(found) or 'nothing distinguishable'}")
    return lines


def _range(value: dict[str, Any]) -> str:
    return "" if value["low"] is None else f"{value['low']:.3f} to {value['high']:.3f}"
