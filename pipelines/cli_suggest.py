"""The verbs `mixture swarm` and `mixture suggest`."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

TargetTokensOption = Annotated[
    int | None, typer.Option("--target-tokens", min=1, help="Tokens of the large run, for the caps on repetition.")
]
EpochsOption = Annotated[float, typer.Option("--max-epochs", min=0.01, help="No source more often in the large run.")]
ShardsOption = Annotated[str | None, typer.Option("--tokens", help="Folder of token shards.", metavar="DIR")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")]


def register(mixture: typer.Typer) -> None:
    """Adds the verbs to `gristmill mixture`."""
    mixture.command(
        "swarm", epilog="Example:  gristmill mixture swarm mixtures/blend.yaml --runs 64 --train train.yaml --out swarm"
    )(swarm)
    mixture.command("suggest", epilog="Example:  gristmill mixture suggest swarm/runs --out suggested.yaml")(suggest)


def swarm(
    file: Annotated[str, typer.Argument(metavar="MIXTURE", help="A mixture file: the prior.")],
    runs: Annotated[int, typer.Option("--runs", min=1, help="How many mixtures.")],
    train: Annotated[str, typer.Option("--train", help="Training settings of each run.", metavar="FILE")],
    out: Annotated[str, typer.Option("--out", help="Folder for the mixtures and ablation.yaml.", metavar="DIR")],
    seed: SeedOption = 0,
    tokens: ShardsOption = None,
    target_tokens: TargetTokensOption = None,
    max_epochs: EpochsOption = 4.0,
    narrow: Annotated[bool, typer.Option("--narrow", help="Stay near the prior: a second round.")] = False,
) -> None:
    """Write random mixtures around a prior, and the ablation that trains a small model on each."""
    from gristmill.pipelines.suggest import write_swarm

    path = write_swarm(file, runs, seed, train, out, tokens, target_tokens, max_epochs, narrow=narrow)
    print(f"{runs} mixtures. Train them: gristmill ablate {path} --tokens DIR --out {out}/runs")


def suggest(
    ablations: Annotated[list[str], typer.Argument(metavar="ABLATION...", help="Folders of finished ablations.")],
    out: Annotated[str, typer.Option("--out", help="The mixture file to write.", metavar="FILE")],
    tokens: ShardsOption = None,
    target_tokens: TargetTokensOption = None,
    max_epochs: EpochsOption = 4.0,
    target: Annotated[list[str] | None, typer.Option("--target", help="Source to score on. Default: all.")] = None,
    seed: SeedOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")] = False,
) -> None:
    """Propose a mixture from the scores of many small runs, with the score it should get."""
    from gristmill.pipelines.suggest import write_suggestion

    found = write_suggestion(ablations, out, tokens, target_tokens, max_epochs, target or (), seed)
    weights = {name: round(float(w), 6) for name, w in zip(found.sources, found.weights, strict=True)}
    if as_json:
        facts = {"weights": weights, "score": found.score, "low": found.low, "high": found.high}
        facts |= {"best_run": found.best_run, "spearman": found.spearman, "warnings": list(found.warnings)}
        print(orjson.dumps(facts).decode())
        return
    for name, weight in weights.items():
        print(f"{name:24} {weight:8.2%}")
    print(
        f"predicted {found.score:.4f} bits per byte, {found.low:.4f} to {found.high:.4f}; best run {found.best_run:.4f}"
    )
    for warning in found.warnings:
        print(warning)
