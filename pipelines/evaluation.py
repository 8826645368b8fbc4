"""`gristmill evaluate`: one checkpoint on held-out documents, on texts given, and on tasks, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.shards import publish_bytes
from gristmill.trainer.config import SCORES_FILE
from gristmill.trainer.evaluate import evaluate_tasks, score_texts
from gristmill.trainer.score import Texts
from gristmill.trainer.stats import bootstrap_scores, percentile_interval
from gristmill.trainer.tasks import ITEMS_FILE, PRESETS, TaskSettings, read_items
from gristmill.trainer.trained import open_trained

Rows = list[dict[str, Any]]
COLUMNS = ["measure", "items", "bits/byte", "interval", "accuracy", "per byte", "chance", "accuracy's interval"]


def evaluate(
    run: str, tasks: TaskSettings | None, texts: Mapping[str, str], out: str | None, device: str
) -> tuple[str, Rows]:
    """Scores a checkpoint -> (folder of the results, a row for each measure). Raises TrainError and SettingsError.

    Held-out documents are scored unless tasks alone were asked for. Results: scores.json, items.parquet, tasks.json.
    """
    trained = open_trained(run)
    folder = Path(out) if out is not None else trained.folder / "evaluation" / trained.checkpoint.name
    rows: Rows = []
    if texts or tasks is None:
        scores = score_texts(trained, {name: EvaluationSet(files=(files,)) for name, files in texts.items()}, device)
        publish_bytes(str(folder / SCORES_FILE), scores.encoded())
        for name, source in (scores.sources | scores.sets).items():
            rows.append({"measure": name, "items": len(source.doc_ids), **_bits(source.texts)})
    if tasks is not None:
        evaluate_tasks(trained, tasks, str(folder), device)
        for name, items in read_items(folder / ITEMS_FILE).items():
            summary = items.summary()
            row = {"measure": name, "items": summary["items"], **(_bits(items.answers) if items.answers else {})}
            if (right := items.right()) is not None:
                row |= {"accuracy": summary["accuracy"], "chance": summary["baseline"]}
                row |= {"per byte": summary["accuracy_bytes"], "accuracy's interval": _interval(right)}
            rows.append(row)
    return str(folder), rows


def _bits(texts: Texts) -> dict[str, Any]:
    return {"bits/byte": texts.bits_per_byte, "interval": _interval(texts)}


def _interval(texts: Texts) -> str:
    """95 %, by drawing documents again."""
    found = percentile_interval(texts.bits_per_byte, bootstrap_scores([[texts]])[0])
    return f"{found.low:.3f} to {found.high:.3f}"


def preset_rows() -> Rows:
    """Every preset, its tasks, and why each is among them."""
    return [
        {"preset": preset, "task": task, "why": why} for preset, tasks in PRESETS.items() for task, why in tasks.items()
    ]
