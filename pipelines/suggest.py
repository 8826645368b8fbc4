"""`gristmill mixture swarm` and `gristmill mixture suggest`: mixture files out, finished ablations in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError
from gristmill.mixtures.suggest import Proposal, suggest
from gristmill.mixtures.swarm import NARROW, WIDE, caps, swarm
from gristmill.stages.settings_file import load, read, yaml_bytes
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.ablate import RANKING_FILE
from gristmill.trainer.config import TrainConfig
from gristmill.trainer.ranking import Ranking


def write_swarm(
    file: str,
    runs: int,
    seed: int,
    train: str,
    out: str,
    tokens: str | None = None,
    target_tokens: int | None = None,
    max_epochs: float = 4.0,
    *,
    narrow: bool = False,
) -> str:
    """Writes `out`/swarm-NNN.yaml and `out`/ablation.yaml; returns the path of the latter.

    The prior is the weights of the mixture file. Raises MixtureError where it has other wishes than weights.
    """
    mixture = Mixture.load(file)
    names = list(mixture.sources)
    weights = [wish.weight for wish in mixture.sources.values()]
    if mixture.phases or any(weight is None for weight in weights):
        raise MixtureError(f"{file}: the prior of a swarm needs a `weight` for every source, and no phases.")
    parts = [name for name, wish in mixture.sources.items() if wish.is_part]
    if parts:
        raise MixtureError(f"{file}: {parts[0]} is a part of a source; a swarm mixes whole sources.")
    load(TrainConfig, train)
    limit = caps(names, _available(tokens, target_tokens), target_tokens, max_epochs)
    drawn = swarm(np.array(weights, np.float64), runs, seed, limit, NARROW if narrow else WIDE)
    prefix = "refined" if narrow else "swarm"
    files = [f"{prefix}-{i:03d}.yaml" for i in range(runs)]
    for path, row in zip(files, drawn, strict=True):
        publish_bytes(str(Path(out) / path), _mixture_file(path.removesuffix(".yaml"), names, row))
    settings = {k: v for k, v in read(train).values.items() if k not in ("seed", "base")}
    ablation = {"name": prefix, "mixtures": files, "seeds": [seed], "train": settings}
    publish_bytes(str(Path(out) / "ablation.yaml"), yaml_bytes(ablation))
    return str(Path(out) / "ablation.yaml")


def write_suggestion(
    ablations: Sequence[str],
    out: str,
    tokens: str | None = None,
    target_tokens: int | None = None,
    max_epochs: float = 4.0,
    targets: Sequence[str] = (),
    seed: int = 0,
) -> Proposal:
    """Reads the rankings of finished ablations, and writes the proposal as a mixture file.

    ablations: folders with ranking.json; the runs of all are taken together. Weights are the shares trained on.
    """
    sources, weights, scores = finished_runs(ablations, targets)
    limit = caps(sources, _available(tokens, target_tokens), target_tokens, max_epochs)
    proposal = suggest(sources, weights, scores, limit, seed)
    publish_bytes(out, _mixture_file(Path(out).stem, sources, proposal.weights, _said(proposal), max_epochs))
    return proposal


def finished_runs(ablations: Sequence[str], targets: Sequence[str] = ()) -> tuple[list[str], np.ndarray, np.ndarray]:
    """-> (sources, weights (n, k), bits per byte (n, targets)). Raises MixtureError where there is nothing to read."""
    rows = []
    for folder in ablations:
        path = Path(folder) / RANKING_FILE
        if not path.is_file():
            raise MixtureError(
                f"{folder}: no {RANKING_FILE}. Give the folder that `gristmill ablate --out` wrote, when it has ended."
            )
        rows += [run for run in Ranking.load(path).runs if run.status == "done" and any(run.tokens.values())]
    if not rows:
        raise MixtureError(f"{', '.join(ablations)}: no run finished, so there is nothing to learn from.")
    sources = sorted({name for run in rows for name in run.tokens})
    wanted = list(targets) or sorted(set.intersection(*(set(run.bits_per_byte) for run in rows)))
    for run in rows:
        missing = [name for name in wanted if name not in run.bits_per_byte]
        if missing or not wanted:
            raise MixtureError(
                f"{run.name} has no score on {missing[0] if missing else 'any source of all runs'}. "
                f"It has: {', '.join(run.bits_per_byte)}."
            )
    counts = np.array([[run.tokens.get(name, 0) for name in sources] for run in rows], np.float64)
    scores = np.array([[run.bits_per_byte[name] for name in wanted] for run in rows])
    return sources, counts / counts.sum(1, keepdims=True), scores


def _available(tokens: str | None, target_tokens: int | None) -> dict[str, int]:
    if target_tokens is None:
        return {}
    if tokens is None:
        raise MixtureError("--target-tokens caps repetition by what there is of each source: give --tokens too.")
    return {name: source.tokens for name, source in TokenSet.open(tokens).sources.items()}


def _said(proposal: Proposal) -> str:
    choices = sorted({panel.choice for panel in proposal.panels})
    said = (
        f"Predicted {proposal.score:.4f} bits per byte, interval {proposal.low:.4f} to {proposal.high:.4f}; best run "
        f"{proposal.best_run:.4f}; regressors {', '.join(choices)}; Spearman on runs left out {proposal.spearman:.2f}."
    )
    return " ".join([said, *(f"{warning}." for warning in proposal.warnings)])


def _mixture_file(
    name: str, sources: Sequence[str], weights: np.ndarray, said: str = "", max_epochs: float | None = None
) -> bytes:
    shares = {source: {"weight": round(float(w), 6)} for source, w in zip(sources, weights, strict=True) if w >= 5e-7}
    values: dict[str, Any] = {"name": name}
    values |= {"description": said} if said else {}
    values |= {"sources": shares}
    values |= {"max_epochs": max_epochs} if max_epochs is not None else {}
    return yaml_bytes(values)
