"""Is a source worth having? The same trunk, annealed with some of it and without.

    gristmill microanneal --trunk out/trunk-1@2000 --trunk out/trunk-2@2000 --control anneal.yaml --candidate maths \\
        --tokens out/run/tokens --branch-tokens 50_000_000 --out out/maths

Each trunk is continued twice while its rate falls to 0: on the control mixture, and on 30 % candidate with 70 % control
(Llama 3, arXiv 2407.21783, section 3.1.3; OLMo 2, arXiv 2501.00656, calls it microanneal). That costs a small part of a
run from the beginning. Trunks stand where an ablation has seeds: two or more show how much of a difference is noise.

The ranking is by the control's sources, not by the candidate: what is trained on its text predicts it better.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gristmill.mixtures.mixture import Mixture
from gristmill.pipelines.ablation import train_and_rank
from gristmill.pipelines.progress import Display
from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.settings_file import SettingsError, nearest, yaml_bytes
from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.ablate import Ablation, Candidate, Carry, Trials
from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.fork import branch_config, full_name
from gristmill.trainer.ranking import Ranking
from gristmill.trainer.tasks import TaskSettings

SHARE = 0.3  # of the candidate: Llama 3, section 3.1.3
CONTROL = "control"


def with_candidate(control: Mixture, source: str, share: float) -> dict[str, Any]:
    """The mixture of `share` of a source and the rest as the control has it, as values of a mixture file.

    Raises SettingsError for a control with phases, with exact wishes, or with the source in it.
    """
    wishes = {name: wish.weight for name, wish in control.sources.items()}
    if control.phases or control.unimax is not None or control.temperature is not None:
        raise SettingsError(f"Mixture {control.name}: the control of a microanneal has plain weights and no phases.")
    if any(weight is None for weight in wishes.values()):
        raise SettingsError(f"Mixture {control.name}: each source of the control needs a `weight`.")
    if source in wishes:
        raise SettingsError(
            f"Mixture {control.name} has the source {source!r} already. Leave it out of the control, so that it can be "
            "compared with and without."
        )
    total = sum(weight or 0.0 for weight in wishes.values())
    values = _values(control)
    for name, weight in wishes.items():
        values["sources"][name] = {**values["sources"][name], "weight": (1 - share) * (weight or 0.0) / total}
    values["sources"][source] = {"weight": share}
    return {**values, "name": f"with_{source}"}


def microanneal(
    trunks: Sequence[str],
    control: str,
    source: str,
    tokens: str,
    branch_tokens: int,
    out: str,
    display: Display,
    *,
    share: float = SHARE,
    tasks: TaskSettings | None = None,
    texts: dict[str, EvaluationSet] | None = None,
    carry: Carry | None = None,
    changes: dict[str, Any] | None = None,
) -> Ranking:
    """Trains what is missing, ranks `control` and `with_<source>`, writes both mixtures and the ranking below `out`.

    changes: of the trunks' training settings. Raises SettingsError, MixtureError, TrainError.
    """
    held = TokenSet.open(tokens)
    if source not in held.sources:
        raise SettingsError(
            f"{tokens} has no source {source!r}.{nearest(source, held.sources)} `gristmill tokens import` puts tokens "
            "of several places together."
        )
    if len({full_name(trunk) for trunk in trunks}) < len(trunks):
        raise SettingsError("The same trunk is named twice: branches of one checkpoint are no independent runs.")
    mixture = Mixture.load(control)
    paths = {
        CONTROL: _write(out, CONTROL, {**_values(mixture), "name": CONTROL}),
        f"with_{source}": _write(out, f"with_{source}", with_candidate(mixture, source, share)),
    }
    more = {**(changes or {}), **({"evaluation_sets": texts} if texts else {})}
    configs = {n: _branch(trunk, branch_tokens, more) for n, trunk in enumerate(trunks, 1)}
    by = [name for name in mixture.sources if name in held.holdout] + sorted(texts or {})
    ablation = Ablation(
        name=f"microanneal of {source}",
        mixtures=tuple(paths.values()),
        seeds=tuple(configs),
        train=configs[1],
        tasks=tasks,
        rank_by=tuple(by),
    )
    notes = (
        f"Each run is a branch of a trunk over {branch_tokens:,} tokens; {share:.0%} of with_{source} is {source}.",
        f"Trunks: {', '.join(f'{n} {trunk}' for n, trunk in enumerate(trunks, 1))}.",
    )
    trials = Trials(tuple(Candidate(name, path, tokens) for name, path in paths.items()), configs, notes=notes)
    _, ranking = train_and_rank(ablation, trials, out, display, carry)
    return ranking


def _branch(trunk: str, branch_tokens: int, changes: dict[str, Any]) -> TrainConfig:
    try:
        return branch_config(full_name(trunk), branch_tokens, **changes)
    except TrainError as error:
        raise TrainError(f"--trunk {trunk}: {error}") from error


def _values(mixture: Mixture) -> dict[str, Any]:
    return mixture.model_dump(mode="json", exclude_none=True, exclude_defaults=True)


def _write(out: str, name: str, values: dict[str, Any]) -> str:
    path = str(Path(out) / f"{name}.yaml")
    publish_bytes(path, yaml_bytes(values))
    return path
