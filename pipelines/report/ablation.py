"""Mixtures and ablations, as far as the run has them: what was trained on, loss curves, scores, ranking.

What the trainer wrote is read with every key optional: an ablation that is still running has curves and no ranking.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gristmill.pipelines.open_run import Run, share
from gristmill.pipelines.report.charts import thin

RUN_NAME = re.compile(r"(?P<mixture>.+)-seed(?P<seed>\d+)")
SUGGESTED = "ablation/suggested.yaml"  # what the report shows as the proposal of `gristmill mixture suggest`
NOT_SHOWN = ("tokens", "bits_per_byte", "evaluation_sets", "tasks")  # of a run: the table has a row for it
STRETCHES = 48  # of a training run, in the picture of what it was trained on


def ablation(run: Run) -> dict[str, Any]:
    """Empty when the run has none."""
    ranking, training = run.ranking, run.training()
    if not ranking and not training:
        return {}
    curves = {name: _curve(name, steps) for name, steps in training.items()}
    mixtures = [_mixture(row, ranking) for row in _dicts(ranking.get("mixtures"))]
    named = [*(row["mixture"] for row in mixtures), *(curve["mixture"] for curve in curves.values())]
    diets = _diets(training, curves)
    tokens = [row["tokens"] for row in mixtures]
    available = _available(run)
    for row in mixtures:
        row["epochs"] = {k: n / available[k] for k, n in row["tokens"].items() if available.get(k)}
    return {
        "metric": ranking.get("metric") or "score",
        "confidence": ranking.get("confidence"),
        "budget_tokens": ranking.get("budget_tokens"),
        "noise": ranking.get("noise"),
        "verdict": _verdict(mixtures),
        "names": list(dict.fromkeys(named)),
        "sources": sorted({s for row in [*tokens, *(d["shares"] for d in diets)] for s in row}),
        "mixtures": mixtures,
        "pairs": _dicts(ranking.get("pairs")),
        "runs": [{k: v for k, v in row.items() if k not in NOT_SHOWN} for row in _runs(ranking)],
        "notes": [str(note) for note in ranking.get("notes") or []],
        "diets": diets,
        "curves": curves,
        "suggested": _suggested(run),
        "score_curves": _score_curves(training, curves, ranking),
        "measures": [row for row in _dicts(ranking.get("measures")) if row.get("kind") != "held_out"],
        "smallest_difference": ranking.get("smallest_difference"),
    }


def _available(run: Run) -> dict[str, int]:
    """Training tokens of each source."""
    out: dict[str, int] = {}
    for shard in run.token_shards.get("shards") or []:
        if isinstance(shard, dict) and shard.get("split") == "train":
            out[str(shard.get("source"))] = out.get(str(shard.get("source")), 0) + int(shard.get("tokens") or 0)
    return out


def _suggested(run: Run) -> dict[str, Any] | None:
    """The mixture that `gristmill mixture suggest` proposed, where it was written to SUGGESTED; None otherwise."""
    text = run.text(SUGGESTED)
    if text is None:
        return None
    try:
        data = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        data = None
    sources = data.get("sources") if isinstance(data, dict) else None
    if not isinstance(sources, dict):
        return {"text": text, "weights": {}, "description": f"{SUGGESTED} is no mixture file."}
    asked = {str(k): v.get("weight") for k, v in sources.items() if isinstance(v, dict)}
    weights = {name: float(weight) for name, weight in asked.items() if isinstance(weight, int | float)}
    return {"text": text, "weights": weights, "description": str(data.get("description") or "")}


def colours(names: Iterable[str]) -> dict[str, int]:
    """A number for each name, in order."""
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _runs(ranking: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _dicts(ranking.get("runs"))


def _mixture(row: Mapping[str, Any], ranking: Mapping[str, Any]) -> dict[str, Any]:
    name = str(row.get("mixture"))
    own = [r for r in _runs(ranking) if r.get("mixture") == name and _is_number(r.get("score"))]
    counted = row.get("seeds")
    tokens = {str(k): v for k, v in (row.get("tokens") or {}).items() if _is_number(v)}
    total = sum(tokens.values())
    return {
        "mixture": name,
        "rank": row.get("rank"),
        "tied_with_best": bool(row.get("tied_with_best")),
        "score": _range(row.get("score")),
        "documents": _range(row.get("documents")),
        "sources": {str(k): _range(v) for k, v in (row.get("sources") or {}).items()},
        "tokens": tokens,
        "shares": {k: share(v, total) for k, v in tokens.items()},
        "points": [r["score"] for r in own if counted is None or r.get("seed") in counted],
    }


def _range(value: Any) -> dict[str, float | None]:
    found = value if isinstance(value, dict) else {"mean": value}
    return {key: found.get(key) if _is_number(found.get(key)) else None for key in ("mean", "low", "high")}


def _verdict(mixtures: Sequence[Mapping[str, Any]]) -> str:
    """Who is best, in a sentence that does not claim more than the tests do."""
    if not mixtures:
        return ""
    best, *others = sorted(mixtures, key=lambda m: (m["rank"] is None, m["rank"] or 0))
    tied = [m["mixture"] for m in others if m["tied_with_best"]]
    if not others:
        return f"Only {best['mixture']} was scored: there is nothing to compare it with."
    if not tied:
        return f"Best: {best['mixture']}. The tests tell it apart from every other mixture."
    return f"Best mean: {best['mixture']}. It cannot be told apart from {', '.join(tied)}."


def _curve(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    found = RUN_NAME.fullmatch(name)
    axis = "tokens" if all(_is_number(step.get("tokens")) for step in steps) else "step"
    points = [
        (float(step[axis]), float(step["loss"]))
        for step in steps
        if _is_number(step.get(axis)) and _is_number(step.get("loss"))
    ]
    rates = [float(step["lr"]) for step in steps if _is_number(step.get("lr"))]
    speeds = sorted(float(step["tokens_per_s"]) for step in steps if _is_number(step.get("tokens_per_s")))
    return {
        "mixture": found["mixture"] if found else name,
        "seed": int(found["seed"]) if found else None,
        "axis": axis,
        "points": thin(points),
        "steps": len(steps),
        "last_loss": points[-1][1] if points else None,
        "highest_rate": max(rates, default=None),
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "skipped": sum(bool(step.get("skipped")) for step in steps),
    }


def _score_curves(
    training: Mapping[str, list[dict[str, Any]]], curves: Mapping[str, Mapping[str, Any]], ranking: Mapping[str, Any]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Source or text -> run -> its bits per byte over tokens or steps; only where it was scored while it was trained.

    The last score is the finished model's, from the ranking.
    """
    ends = {str(row.get("name")): row for row in _runs(ranking)}
    out: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, steps in training.items():
        axis = curves[name]["axis"]
        found: dict[str, list[tuple[float, float]]] = {}
        for step in steps:
            for key, value in _scored(step).items():
                found.setdefault(key, []).append((float(step[axis]), value))
        for key, value in _scored(ends.get(name, {})).items():
            if key in found and _is_number(steps[-1].get(axis)):
                found[key].append((float(steps[-1][axis]), value))
        for key, points in found.items():
            out.setdefault(key, {})[name] = points
    return {key: out[key] for key in sorted(out)}


def _scored(row: Mapping[str, Any]) -> dict[str, float]:
    """Bits per byte of a step or a finished run: of held-out documents, and of texts given."""
    both = [row.get(name) for name in ("bits_per_byte", "evaluation_sets")]
    return {str(k): float(v) for part in both if isinstance(part, dict) for k, v in part.items() if _is_number(v)}


def _diets(
    training: Mapping[str, list[dict[str, Any]]], curves: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For the first run of each mixture: the share of each source in every stretch of the training.

    `sources` of a step is what was consumed so far, so a stretch is a difference.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, steps in training.items():
        mixture = curves[name]["mixture"]
        eaten = [(step["tokens"], step["sources"]) for step in steps if _is_diet(step)]
        if mixture in out or len(eaten) < 2:
            continue
        names = sorted({source for _, so_far in eaten for source in so_far})
        marks = [(0, dict.fromkeys(names, 0))]
        marks += [
            eaten[(i + 1) * len(eaten) // STRETCHES - 1] for i in range(STRETCHES) if (i + 1) * len(eaten) >= STRETCHES
        ]
        shares: dict[str, list[float]] = {source: [] for source in names}
        ends = []
        for (before, old), (after, new) in pairwise(marks):
            total = sum(new.values()) - sum(old.values())
            if after <= before or total <= 0:
                continue
            ends.append(after)
            for source in names:
                shares[source].append(share(new.get(source, 0) - old.get(source, 0), total))
        out[mixture] = {"mixture": mixture, "ends": ends, "shares": shares}
    return list(out.values())


def _is_diet(step: Mapping[str, Any]) -> bool:
    sources = step.get("sources")
    return _is_number(step.get("tokens")) and isinstance(sources, dict) and all(map(_is_number, sources.values()))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
