"""The verbs about mixtures and models: `mixture`, `train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from gristmill.pipelines.cli_suggest import register as register_suggest

if TYPE_CHECKING:
    from gristmill.mixtures.plan import Plan
    from gristmill.trainer.config import TrainConfig

MixtureArgument = Annotated[str, typer.Argument(metavar="MIXTURE", help="A mixture file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]


SeqLenOption = Annotated[
    int | None, typer.Option("--seq-len", min=1, help="Tokens that a window predicts. Default: the file's, else 2048.")
]
BudgetOption = Annotated[
    int | None, typer.Option("--budget", min=1, help="Tokens of the whole run. Default: the file's.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of the order of windows. Default: the file's, else 0.")]
TrainOption = Annotated[
    str | None,
    typer.Option("--train", help="A file of training settings, for length, budget, seed and rates.", metavar="FILE"),
]
ContinueOption = Annotated[
    str | None,
    typer.Option("--continue-from", help="Training run or checkpoint: use nothing again of it.", metavar="RUN"),
]
PlanTokensOption = Annotated[
    str | None,
    typer.Option("--tokens", help="Folder of token shards: `tokens` in a run. Default: the file's.", metavar="DIR"),
]
_TOKENS = "--tokens out/demo/run/tokens --budget 1000000"
_EXAMPLES = {
    "plan": f"gristmill mixture plan mixtures/blend.yaml {_TOKENS}",
    "plot": f"gristmill mixture plot mixtures/curriculum.yaml {_TOKENS} --out curriculum.html",
    "diff": f"gristmill mixture diff mixtures/blend.yaml mixtures/curriculum.yaml {_TOKENS}",
}


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    mixture = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="Look at mixtures before a GPU is booked.",
        epilog="Example:  gristmill mixture plan mixtures/blend.yaml --tokens out/demo/run/tokens --budget 1000000",
    )
    app.add_typer(mixture, name="mixture")
    for name, verb in (("plan", plan), ("plot", plot), ("diff", diff)):
        mixture.command(name, epilog=f"Example:  {_EXAMPLES[name]}")(verb)
    register_suggest(mixture)
    app.command(epilog="Example:  gristmill train train.yaml --mixture mixtures/blend.yaml --tokens RUN/tokens")(train)


def _compiled(
    file: str,
    tokens: str | None,
    seq_len: int | None,
    budget: int | None,
    seed: int | None,
    train: str | None = None,
    continue_from: str | None = None,
) -> tuple[Plan, Callable[[int], float] | None]:
    """The plan of a mixture file, and with training settings the learning rate after so many windows."""
    from gristmill.mixtures.consumption import Consumption
    from gristmill.mixtures.mixture import Mixture

    mixture = Mixture.load(file)
    settings = None
    if train is not None:
        from gristmill.stages.settings_file import load
        from gristmill.trainer.config import TrainConfig

        settings = load(TrainConfig, train)
        seq_len = settings.seq_len if seq_len is None else seq_len
        budget = settings.total_tokens if budget is None else budget
        seed = settings.seed if seed is None else seed
    continue_from = continue_from or mixture.continue_from
    books = None if continue_from is None else Consumption.read(continue_from)
    if books is None and mixture.seq_len is None:
        seq_len = seq_len or 2048
    target = None if settings is None else settings.target_tokens
    plan = mixture.plan(tokens, seq_len, budget, seed, books, target)
    if settings is None:
        return plan, None
    from gristmill.trainer.feed import phases_of
    from gristmill.trainer.optim import decay_start_of_phase, learning_rate

    decay_from, windows = decay_start_of_phase(settings, phases_of(plan)), settings.batch_windows
    return plan, lambda consumed: learning_rate(settings, consumed // windows, decay_from)


def plan(
    file: MixtureArgument,
    tokens: PlanTokensOption = None,
    seq_len: SeqLenOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = None,
    train: TrainOption = None,
    continue_from: ContinueOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a mixture to a plan: windows, tokens and epochs of each source and phase."""
    compiled, rate = _compiled(file, tokens, seq_len, budget, seed, train, continue_from)
    if as_json:
        print(orjson.dumps(compiled.data(rate), option=orjson.OPT_INDENT_2).decode())
    else:
        print(compiled.table(rate), end="")


def plot(
    file: MixtureArgument,
    tokens: PlanTokensOption = None,
    seq_len: SeqLenOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = None,
    train: TrainOption = None,
    continue_from: ContinueOption = None,
    out: Annotated[
        str | None, typer.Option("--out", help="HTML file to write. Default: the terminal.", metavar="FILE")
    ] = None,
) -> None:
    """Draw a mixture over the run: the share of each source, and the learning rate."""
    from gristmill.pipelines.mixture_plot import page, show
    from gristmill.pipelines.tables import console
    from gristmill.stages.shards import publish_bytes

    compiled, rate = _compiled(file, tokens, seq_len, budget, seed, train, continue_from)
    if out is None:
        show(compiled, console(), rate)
    else:
        publish_bytes(out, page(compiled, rate))
        print(out)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A mixture file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    tokens: PlanTokensOption = None,
    seq_len: SeqLenOption = None,
    budget: BudgetOption = None,
    seed: SeedOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two mixtures: what each source gives in one and the other, and how far they are the same run."""
    from gristmill.mixtures.difference import difference_data, difference_table

    plans = [_compiled(file, tokens, seq_len, budget, seed)[0] for file in (a, b)]
    if as_json:
        print(orjson.dumps(difference_data(*plans), option=orjson.OPT_INDENT_2).decode())
    else:
        print(difference_table(*plans), end="")


def train(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A file of training settings. Default with --from: the trunk's."),
    ] = None,
    mixture: Annotated[str | None, typer.Option("--mixture", help="A mixture file.", metavar="FILE")] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Folder of token shards: `tokens` in a run.", metavar="DIR")
    ] = None,
    begin_from: Annotated[
        str | None,
        typer.Option("--from", help="Fork a run from one of its checkpoints.", metavar="RUN[@STEP]"),
    ] = None,
    branch_tokens: Annotated[
        int | None,
        typer.Option("--branch-tokens", min=1, help="With --from: train so many tokens more, the rate falling to 0."),
    ] = None,
    out: Annotated[str, typer.Option("--out", help="Folder of the run; what it has is continued.")] = "out/train",
    plan: Annotated[bool, typer.Option("--plan", help="Train nothing: print size, compute, time and memory.")] = False,
    gpu: Annotated[str, typer.Option("--gpu", help="Of the plan: the GPU of each rank.")] = "h100",
    mfu: Annotated[float, typer.Option("--mfu", help="Of the plan: share of the GPU's peak that is reached.")] = 0.4,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write traces of a few steps by PyTorch's profiler into the run's folder.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train one model on a mixture and score it on held-out documents; or with --plan, say what that would take."""
    from gristmill.pipelines.ablation import loss_of
    from gristmill.pipelines.progress import Display
    from gristmill.stages.settings_file import SettingsError
    from gristmill.trainer.launch import run

    settings = _settings(config, begin_from, branch_tokens)
    if profile:
        settings = settings.model_copy(update={"profile": True})
    if plan:
        _show_sizing(settings, tokens, gpu, mfu, as_json)
        return
    if mixture is None or tokens is None:
        raise SettingsError("Name the data: --mixture FILE and --tokens DIR. Only --plan goes without them.")
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


def _settings(config: str | None, begin_from: str | None, branch_tokens: int | None) -> TrainConfig:
    """The settings of a file, of a trunk, or of both together."""
    from gristmill.stages.settings_file import SettingsError, load
    from gristmill.trainer.config import TrainConfig
    from gristmill.trainer.fork import branch_config

    settings = load(TrainConfig, config).below(Path(config).parent) if config is not None else None
    if begin_from is not None and branch_tokens is not None:
        return branch_config(begin_from, branch_tokens, settings)
    if branch_tokens is not None:
        raise SettingsError("--branch-tokens counts from a fork: name it with --from RUN[@STEP].")
    if settings is None:
        raise SettingsError("Name the settings: a CONFIG file, or --from RUN[@STEP] with --branch-tokens N.")
    return settings if begin_from is None else settings.model_copy(update={"init_from": begin_from})


def _show_sizing(settings: TrainConfig, tokens: str | None, gpu: str, mfu: float, as_json: bool) -> None:
    from gristmill.tokenize.shards import read_manifest
    from gristmill.trainer.sizing import size

    sizing = size(settings, read_manifest(tokens).vocab_size if tokens is not None else 0, gpu, mfu)
    print(orjson.dumps(sizing.data(), option=orjson.OPT_INDENT_2).decode() if as_json else sizing.table().rstrip())
