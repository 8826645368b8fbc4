"""Ablations as the command line shows them: progress while they train, the ranking as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gristmill.pipelines.progress import Display
from gristmill.trainer.ablate import Ablation, ablate, plan_runs

Rows = list[dict[str, Any]]


def run_ablation(file: Path, tokens: str, out: str, display: Display) -> tuple[int, dict[str, Any]]:
    """Trains what is missing and ranks -> (runs trained now, the ranking as plain data).

    Raises SettingsError for a faulty file, MixtureError for a mixture that cannot be met, TrainError when no run
    finished.
    """
    ablation = Ablation.load(file)
    planned = plan_runs(ablation, tokens, out)
    steps = ablation.train.total_steps
    trained = 0
    display.say(f"ablation: {len(planned)} runs of {ablation.train.total_tokens:,} tokens")
    for warning in ablation.warnings:
        display.say(warning)
    with display.phase("ablation", len(planned) * steps) as phase:

        def on_event(event: dict[str, Any]) -> None:
            nonlocal trained
            kind, done = event["event"], int(event["index"]) * steps
            if kind == "step":
                phase.to(done + int(event["step"]), len(planned) * steps, f"{event['run']}  {loss_of(event)}")
            elif kind in ("done", "found"):
                trained += kind == "done"
                phase.to(done + steps, len(planned) * steps, str(event["run"]))
                if kind == "done":
                    scores = "  ".join(f"{source} {value:.3f}" for source, value in event["bits_per_byte"].items())
                    display.say(f"  {event['run']:<28} bits per byte: {scores}")
            elif kind == "failed":
                display.say(f"  {event['run']} failed: {event['error']}")
            display.event("ablation", **{k: v for k, v in event.items() if k != "event"}, state=kind)

        ranking = ablate(ablation, tokens, out, on_event)
    if not trained:
        display.say(f"Nothing to train: all {len(planned)} runs are there and up to date.")
    return trained, ranking.model_dump(mode="json")


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
    return columns, rows, [*verdicts, *ranking["notes"]]


def _range(value: dict[str, Any]) -> str:
    return "" if value["low"] is None else f"{value['low']:.3f} to {value['high']:.3f}"
