"""The verbs that compare models: `ablate`, `microanneal`, `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

if TYPE_CHECKING:
    from gristmill.trainer.ablate import Carry

SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", help="Train in parallel: address of a running Dask scheduler.")
]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE", help="Train in parallel: where workers come from.")
]
ResourcesOption = Annotated[
    str | None, typer.Option("--resources", help="What each run takes of its worker, such as GPU=8.")
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", help="Tasks of lm-evaluation-harness or presets, with commas between.")
]
TextOption = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="NAME=FILE", help="A text: JSONL, Parquet or plain; may be given again."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    app.command(epilog="Example:  gristmill ablate pipelines/recipes/ablation_demo.yaml --tokens out/demo/run/tokens")(
        ablate
    )
    app.command(epilog="Example:  gristmill evaluate out/train --tasks arc_easy,mine --include-path eval/tasks")(
        evaluate
    )
    app.command(
        epilog="Example:  gristmill microanneal --trunk out/trunk@2000 --control anneal.yaml --candidate maths "
        "--tokens out/run/tokens --branch-tokens 50000000 --out out/maths"
    )(microanneal)


def ablate(
    file: Annotated[str, typer.Argument(metavar="ABLATION", help="An ablation file.")],
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Folder of token shards: `tokens` in a run.", metavar="DIR")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="Default: `ablation` beside the tokens.")] = None,
    scheduler: SchedulerOption = None,
    cluster: ClusterOption = None,
    resources: ResourcesOption = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes that run the variants of a recipe.")
    ] = None,
    power: Annotated[
        float | None,
        typer.Option("--power", metavar="X", help="Train nothing: what seeing a difference of X bits per byte takes."),
    ] = None,
    noise: Annotated[
        float | None,
        typer.Option("--noise", min=0, help="Of --power: how one run varies. Default: measured in --out."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train one model per mixture and seed, score them, and rank the mixtures with intervals.

    A file with `recipe` and `vary` compares variants of a recipe: each is run, then trained on.
    """
    from gristmill.pipelines.ablation import power_of, run_ablation
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.vary import is_variation
    from gristmill.stages.settings_file import SettingsError

    folder = out or (str(Path(tokens.rstrip("/")).parent / "ablation") if tokens is not None else None)
    if power is not None:
        found = power_of(Path(file), folder, power, noise)
        print(orjson.dumps(found.data()).decode() if as_json else "\n".join(found.lines()))
        return
    if is_variation(file):
        ranking = _varied(file, tokens, out, workers, scheduler, cluster, resources, as_json=as_json)
    else:
        if tokens is None or folder is None:
            raise SettingsError("Name the token shards to train on: --tokens DIR. Only --power goes without them.")
        with Display(as_json=as_json) as display:
            carry = _carry(scheduler, cluster, resources, folder)
            _, ranking = run_ablation(Path(file), tokens, folder, display, carry)
    _show(ranking, as_json=as_json)


def _show(ranking: dict[str, Any], *, as_json: bool) -> None:
    from gristmill.pipelines.ablation import ranking_rows
    from gristmill.pipelines.tables import console, plain_table

    if as_json:
        print(orjson.dumps({"event": "result", "ranking": ranking}).decode())
        return
    columns, rows, verdicts = ranking_rows(ranking)
    shown = console()
    shown.print(plain_table("Ranking", columns, rows))
    for line in verdicts:
        shown.print(line, highlight=False)


def _varied(
    file: str,
    tokens: str | None,
    out: str | None,
    workers: int | None,
    scheduler: str | None,
    cluster: str | None,
    resources: str | None,
    *,
    as_json: bool,
) -> dict[str, Any]:
    """The ranking of variants of a recipe."""
    from gristmill.pipelines.cluster_file import load_cluster
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.run import Options
    from gristmill.pipelines.vary import load, vary
    from gristmill.stages.settings_file import SettingsError

    if tokens is not None:
        raise SettingsError(f"{file} varies a recipe, whose variants make their own tokens: leave out --tokens.")
    folder = out or f"out/{load(file)[1].name}"
    where = None if cluster is None else load_cluster(cluster, scheduler)
    options = Options(workers=workers, scheduler=scheduler, cluster=where)
    with Display(as_json=as_json) as display:
        ranking = vary(file, folder, options, display, _carry(scheduler, cluster, resources, folder))
    return ranking.model_dump(mode="json")


def _carry(scheduler: str | None, cluster: str | None, resources: str | None, folder: str) -> Carry | None:
    """What carries the runs out, where that is a cluster."""
    from gristmill.stages.settings_file import SettingsError

    if scheduler is None and cluster is None:
        if resources is not None:
            raise SettingsError("--resources is of a cluster: name one with --scheduler or --cluster.")
        return None
    from gristmill.pipelines.ablation_cluster import on_cluster, resources_of
    from gristmill.pipelines.cluster_file import load_cluster
    from gristmill.pipelines.connect import running_scheduler

    if cluster is not None:
        settings = load_cluster(cluster, scheduler)
    else:
        assert scheduler is not None
        settings = running_scheduler(scheduler)
    return on_cluster(settings, resources_of(settings, resources), folder)


def microanneal(
    trunk: Annotated[
        list[str],
        typer.Option("--trunk", metavar="RUN@STEP", help="A checkpoint to continue; several show what is noise."),
    ],
    control: Annotated[str, typer.Option("--control", metavar="MIXTURE", help="A mixture file without the candidate.")],
    candidate: Annotated[str, typer.Option("--candidate", metavar="SOURCE", help="The source that is tried.")],
    tokens: Annotated[str, typer.Option("--tokens", metavar="DIR", help="Folder of token shards with all sources.")],
    branch_tokens: Annotated[int, typer.Option("--branch-tokens", min=1, help="Tokens that each branch trains on.")],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for runs and ranking.")],
    share: Annotated[float, typer.Option("--share", help="Of the candidate in its mixture.")] = 0.3,
    tasks: TasksOption = None,
    text: TextOption = None,
    scheduler: SchedulerOption = None,
    cluster: ClusterOption = None,
    resources: ResourcesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try a source cheaply: anneal trunks with some of it and without, and rank the two."""
    from gristmill.pipelines import microanneal as module
    from gristmill.pipelines.progress import Display
    from gristmill.stages.evaluation_sets import EvaluationSet
    from gristmill.trainer.tasks import TaskSettings

    names = _names(tasks)
    with Display(as_json=as_json) as display:
        ranking = module.microanneal(
            trunk,
            control,
            candidate,
            tokens,
            branch_tokens,
            out,
            display,
            share=share,
            tasks=TaskSettings(names=names) if names else None,
            texts={name: EvaluationSet(files=(path,)) for name, path in _named(text or []).items()},
            carry=_carry(scheduler, cluster, resources, out),
        )
    _show(ranking.model_dump(mode="json"), as_json=as_json)


def evaluate(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A training run (its newest checkpoint), or a checkpoint.")
    ] = None,
    tasks: TasksOption = None,
    include_path: Annotated[
        list[str] | None,
        typer.Option("--include-path", metavar="DIR", help="Folder with task files of your own; may be given again."),
    ] = None,
    text: TextOption = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Items of each task. 0: all.")] = 0,
    fewshot: Annotated[
        int | None, typer.Option("--fewshot", min=0, help="Examples before each item. Default: as the task says.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where tasks are computed: cpu, cuda.")] = "cpu",
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Default: evaluation/<checkpoint> in the run.")
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets of tasks, and do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Score a checkpoint: held-out documents, texts given, and tasks, item by item."""
    from gristmill.pipelines.tables import console, plain_table
    from gristmill.stages.settings_file import SettingsError
    from gristmill.trainer.tasks import TaskSettings

    shown = console()
    if presets:
        from gristmill.pipelines.evaluation import preset_rows

        if as_json:
            print(orjson.dumps(preset_rows()).decode())
        else:
            shown.print(plain_table("Presets", ["preset", "task", "why"], preset_rows()))
        return
    if run is None:
        raise SettingsError("Name a training run or one of its checkpoints.")
    wanted = None
    if tasks is not None:
        wanted = TaskSettings(names=_names(tasks), include_path=tuple(include_path or ()), limit=limit, fewshot=fewshot)
    from gristmill.pipelines import evaluation

    folder, rows = evaluation.evaluate(run, wanted, _named(text or []), out, device)
    if as_json:
        print(orjson.dumps({"out": folder, "measures": rows}).decode())
        return
    columns = [column for column in evaluation.COLUMNS if any(column in row for row in rows)]
    blank: dict[str, Any] = dict.fromkeys(columns, "")
    shown.print(plain_table("Scores", columns, [blank | row for row in rows]))
    shown.print(f"Items: {folder}", highlight=False)


def _names(tasks: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (tasks or "").split(",") if name.strip())


def _named(texts: list[str]) -> dict[str, str]:
    from gristmill.stages.settings_file import SettingsError

    out = {}
    for entry in texts:
        name, _, path = entry.partition("=")
        if not name or not path:
            raise SettingsError(f"--text {entry}: write NAME=FILE.")
        out[name] = path
    return out
