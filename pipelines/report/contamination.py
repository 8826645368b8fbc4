"""Contamination: which evaluation items stood in the run's documents, and where; as `decontaminate` wrote it down."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gristmill.pipelines.contamination import recorded, stage_of
from gristmill.pipelines.open_run import Run, RunError

ITEMS = 100  # shown, and so many of those that cannot be checked
MODES = {"drop": "dropped", "mark": "marked and kept", "cut": "cut"}


def contamination(run: Run) -> dict[str, Any] | None:
    """What the page says; None where the run has no `decontaminate`."""
    found = recorded(run)
    if found is None:
        return None
    try:
        stage = stage_of(run)
    except RunError:
        stage = None  # `found.problem` says it
    worst = found.worst()
    return {
        "documents": found.documents,
        "contaminated": found.contaminated,
        "mode": MODES[stage.mode] if stage is not None else "",
        "problem": found.problem,
        "rows": found.rows(),
        "found": [asdict(item) for item in worst[:ITEMS]],
        "more": max(0, len(worst) - ITEMS),
        "unchecked": found.unchecked[:ITEMS],
        "unchecked_count": len(found.unchecked),
    }
