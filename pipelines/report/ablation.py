"""Mixtures and ablations, as far as the run has them: loss curves, scores, ranking.

What the trainer wrote is read with every key optional: an ablation that is still running has curves and no ranking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gristmill.pipelines.open_run import Run
from gristmill.pipelines.report.charts import thin

RUN_NAME = re.compile(r"(?P<mixture>.+)-seed(?P<seed>\d+)")


def ablation(run: Run) -> dict[str, Any]:
    """Empty when the run has none."""
    ranking, training = run.ranking, run.training()
    if not ranking and not training:
        return {}
    return {"curves": {name: _curve(name, steps) for name, steps in training.items()}, "ranking": ranking}


def _curve(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    found = RUN_NAME.fullmatch(name)
    axis = "tokens" if all(_is_number(step.get("tokens")) for step in steps) else "step"
    points = [
        (float(step[axis]), float(step["loss"]))
        for step in steps
        if _is_number(step.get(axis)) and _is_number(step.get("loss"))
    ]
    last = steps[-1]
    return {
        "mixture": found["mixture"] if found else name,
        "seed": int(found["seed"]) if found else None,
        "axis": axis,
        "points": thin(points),
        "steps": len(steps),
        "last": {k: v for k, v in last.items() if _is_number(v)},
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def colours(names: Mapping[str, Any] | list[str]) -> dict[str, int]:
    """A number for each name, in order; names of the same mixture get the same one."""
    out: dict[str, int] = {}
    for name in names:
        out.setdefault(name, len(out))
    return out
