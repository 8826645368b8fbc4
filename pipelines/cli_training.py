"""The verbs about mixtures and models: `mixture`, `train`, `ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

TokensOption = Annotated[
    str, typer.Option("--tokens", help="Folder of token shards: `tokens` in a run.", metavar="DIR")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    mixture = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Look at mixtures before a GPU is booked.",
        epilog="Example:  gristmill mixture plan mixtures/blend.yaml --tokens out/demo/run/tokens --budget 1000000",
    )
    app.add_typer(mixture, name="mixture")
    mixture.command(
        "plan",
        epilog="Example:  gristmill mixture plan mixtures/blend.yaml --tokens out/demo/run/tokens --budget 1000000",
    )(plan)
    app.command(epilog="Example:  gristmill train train.yaml --mixture mixtures/blend.yaml --tokens RUN/tokens")(train)
    app.command(epilog="Example:  gristmill ablate pipelines/recipes/ablation_demo.yaml --tokens out/demo/run/tokens")(
        ablate
    )


def plan(
    file: Annotated[str, typer.Argument(metavar="MIXTURE", help="A mixture file.")],
    tokens: TokensOption,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens that a window predicts.")] = 2048,
    budget: Annotated[int | None, typer.Option("--budget", min=1, help="Tokens of the whole run.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the order of windows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Compile a mixture to a plan: windows, tokens and epochs of each source and phase."""
    from gristmill.mixtures.mixture import Mixture
    from gristmill.tokenize.shards import TokenSet

    compiled = Mixture.load(file).plan(TokenSet.open(tokens), seq_len=seq_len, budget_tokens=budget, seed=seed)
    if as_json:
        print(orjson.dumps(compiled.data(), option=orjson.OPT_INDENT_2).decode())
    else:
        print(compiled.table(), end="")


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A file of training settings.")],
    mixture: Annotated[str, typer.Option("--mixture", help="A mixture file.", metavar="FILE")],
    tokens: TokensOption,
    out: Annotated[str, typer.Option("--out", help="Folder of the run; what it has is continued.")] = "out/train",
    as_json: JsonOption = False,
) -> None:
    """Train one model on a mixture and score it on held-out documents."""
    from gristmill.pipelines.ablation import loss_of
    from gristmill.pipelines.progress import Display
    from gristmill.stages.settings_file import load
    from gristmill.trainer.config import TrainConfig
    from gristmill.trainer.launch import run

    settings = load(TrainConfig, config)
    with Display(as_json=as_json) as display, display.phase("train", settings.total_steps) as phase:

        def on_progress(line: dict[str, Any]) -> None:
            phase.to(int(line["step"]), settings.total_steps, loss_of(line))
            display.event("step", **line)

        outcome = run(settings, mixture, tokens, out, on_progress)
    scores = outcome.scores.bits_per_byte if outcome.scores is not None else {}
    if as_json:
        body = {"event": "result", "status": outcome.status, "out": str(outcome.out), "bits_per_byte": scores}
        print(orjson.dumps(body).decode())
        return
    for source, value in scores.items():
        print(f"{source}: {value:.4f} bits per byte")
    print(f"{outcome.out}: {outcome.status}")


def ablate(
    file: Annotated[str, typer.Argument(metavar="ABLATION", help="An ablation file.")],
    tokens: TokensOption,
    out: Annotated[str | None, typer.Option("--out", help="Default: `ablation` beside the tokens.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one model per mixture and seed, score them, and rank the mixtures with intervals."""
    from gristmill.pipelines.ablation import ranking_rows, run_ablation
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.tables import console, plain_table

    folder = out or str(Path(tokens.rstrip("/")).parent / "ablation")
    with Display(as_json=as_json) as display:
        _, ranking = run_ablation(Path(file), tokens, folder, display)
    if as_json:
        print(orjson.dumps({"event": "result", "ranking": ranking}).decode())
        return
    columns, rows, verdicts = ranking_rows(ranking)
    shown = console()
    shown.print(plain_table("Ranking", columns, rows))
    for line in verdicts:
        shown.print(line, highlight=False)
