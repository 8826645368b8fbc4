"""The command `gristmill`. One verb, one thing; exit code 0 done, 1 it went wrong, 2 it was asked wrongly."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.pipelines.tables import console
from gristmill.stages.settings_file import SettingsError

app = typer.Typer(
    help="Raw crawl in, ranked pretraining mixtures out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

OutOption = Annotated[str | None, typer.Option("--out", help="Run folder. Default: the recipe's `out`, else out/NAME.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Worker processes. Default: one a core.")]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", help="Address of a running Dask scheduler, tcp://HOST:8786.")
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="FILE", help="File that says where workers come from: SLURM, Kubernetes, TLS."),
]
DebugOption = Annotated[bool, typer.Option("--debug", help="Do everything in this process, without a cluster.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
RefreshOption = Annotated[
    bool, typer.Option("--refresh-inputs", help="Take the input files as they are now, not as frozen.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")]


def example(text: str) -> str:
    """The end of a verb's help."""
    return f"Example:  {text}"


@app.command(epilog=example("gristmill run pipelines/recipes/demo.yaml --workers 4"))
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file.")],
    out: OutOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    cluster: ClusterOption = None,
    debug: DebugOption = False,
    refresh_inputs: RefreshOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is left to do, and do nothing.")] = False,
    no_ablation: Annotated[bool, typer.Option("--no-ablation", help="Stop after the tokens and the report.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Take up shards again that were set aside in an earlier start.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=1, help="Seconds for one batch in one stage; then the worker is stuck.")
    ] = 1800.0,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe, or go on with it: what is done and unchanged is not done again."""
    from gristmill.pipelines.main_job import dry_run as plan_only
    from gristmill.pipelines.main_job import main_job
    from gristmill.pipelines.run import Options

    settings = None
    if cluster is not None:
        from gristmill.pipelines.cluster_file import load_cluster

        if workers is not None or debug:
            raise SettingsError("--cluster says where the workers are: leave out --workers and --debug.")
        settings = load_cluster(cluster, scheduler)
    options = Options(
        debug=debug,
        workers=workers,
        scheduler=scheduler,
        cluster=settings,
        refresh_inputs=refresh_inputs,
        retry_failed=retry_failed,
        timeout_s=timeout_s,
    )
    if dry_run:
        print(plan_only(recipe, out, options, as_json=as_json))
        return
    main_job(recipe, out, options, as_json=as_json, ablation=not no_ablation)


@app.command(epilog=example("gristmill demo"))
def demo(
    workers: WorkersOption = None,
    debug: DebugOption = False,
    no_ablation: Annotated[bool, typer.Option("--no-ablation", help="Stop after the tokens and the report.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build a small crawl from this Python installation under out/demo, and run the demo recipe on it."""
    from gristmill.pipelines import demo_corpus
    from gristmill.pipelines.main_job import main_job
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.run import Options

    with Display(as_json=as_json) as display, display.phase("demo corpus", 1) as phase:
        demo_corpus.build(
            "out/demo/corpus", demo_corpus.DemoCorpusSettings(), lambda what, done, total: phase.to(done, total, what)
        )
    recipe = Path(__file__).parent / "recipes" / "demo.yaml"
    main_job(str(recipe), None, Options(debug=debug, workers=workers), as_json=as_json, ablation=not no_ablation)


@app.command(epilog=example("gristmill status out/demo/run"))
def status(
    run_folder: RunArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again while somebody works on it.")] = False,
    every_s: Annotated[float, typer.Option("--every-s", min=0.1, help="Seconds between looks, with --watch.")] = 2.0,
    as_json: JsonOption = False,
) -> None:
    """Say how far a run is, also while it runs: shards done, left and given up, rates, time left, slowest shards."""
    from gristmill.pipelines import status as statuses
    from gristmill.pipelines.open_run import open_run

    if watch:
        statuses.watch(run_folder, every_s, console(), as_lines=as_json)
        return
    found = statuses.Looking(open_run(run_folder)).status()
    if as_json:
        print(statuses.as_json(found))
    else:
        console().print(statuses.shown(found))


@app.command(epilog=example("gristmill rules out/demo/run --source docs"))
def rules(
    run_folder: RunArgument,
    source: Annotated[str | None, typer.Option(help="Only documents of this source.")] = None,
    language: Annotated[str | None, typer.Option(help="Only documents in this language.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each rule removes: alone, and together with others, whatever the order of the stages."""
    from gristmill.pipelines import removed
    from gristmill.pipelines.open_run import open_run

    run = open_run(run_folder)
    rows = removed.removed(run, source, language)
    if as_json:
        print(removed.as_json(rows))
        return
    console().print(removed.table(rows))
    if count := removed.left_out(run):
        print(f"{count:,} dropped documents are not in these figures: a later stage could not take them.")


@app.command("dedupe-audit", epilog=example("gristmill dedupe-audit out/demo/run"))
def dedupe_audit(
    run_folder: RunArgument,
    documents: Annotated[int, typer.Option(min=10, help="Edited copies to plant.")] = 1_000,
    pairs: Annotated[int, typer.Option(min=0, help="Removed documents to compare with the one that stayed.")] = 500,
    seed: Annotated[int, typer.Option(help="Another seed takes other documents.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure what minhash finds and what it wrongly removes: edited copies of the run's documents, and true pairs."""
    from gristmill.pipelines import dedupe_audit as auditing
    from gristmill.pipelines.open_run import open_run
    from gristmill.pipelines.tables import plain_table

    found = auditing.audit(open_run(run_folder), documents, pairs, seed)
    if as_json:
        print(auditing.as_json(found))
        return
    for title, columns, rows in auditing.tables(found):
        print(title)
        console().print(plain_table("", columns, rows))
    for similarity, gone, stays in found.lowest[:3]:
        print(f"Least alike, {similarity:.2f}: {gone} went, {stays} stayed")


@app.command(epilog=example("gristmill contamination out/demo/run --tasks eval/arc.jsonl --out contaminated.jsonl"))
def contamination(
    corpus: Annotated[str, typer.Argument(metavar="RUN|TOKENS", help="A run folder, or a folder of token shards.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks",
            "--sets",
            metavar="[NAME=]FILE",
            help="Evaluation items: JSON lines, text, or a task file of lm-evaluation-harness; can be given again. "
            "Default: the sets of the run's `decontaminate`.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", help="Write the items that were found, one JSON object a line.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say which evaluation items stand in a corpus, and in which documents: what to leave out of a score."""
    from gristmill.pipelines import contamination as checking
    from gristmill.pipelines.tables import plain_table

    found = checking.check(corpus, checking.sets_of(tasks or ()))
    if out is not None:
        checking.write_items(found, out)
    if as_json:
        print(checking.as_json(found))
        return
    console().print(plain_table("Evaluation items", checking.COLUMNS, found.rows()))
    for item in found.worst()[:20]:
        first = item.examples[0]
        print(f"{item.item}: {item.documents:,} documents, first {first['doc_id']}: {first['text'][:100]!r}")
    if len(found.items) > 20:
        print(f"{len(found.items) - 20:,} more items; --out writes all.")
    print(f"{found.contaminated:,} of {found.documents:,} documents hold an item.")
    for entry in found.unchecked[:5]:
        print(f"Cannot be checked: {entry['item']}: {entry['why']}")
    if len(found.unchecked) > 5:
        print(f"{len(found.unchecked) - 5:,} more cannot be checked; --json lists all.")


@app.command(epilog=example("gristmill calibrate out/demo/run --target-removal 0.1 --out limits.yaml"))
def calibrate(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the recipe file of a run.")],
    target_removal: Annotated[
        float | None, typer.Option(help="Share of documents that each rule alone may remove. Default: 0.1.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage; can be given again.")] = None,
    by_language: Annotated[
        bool,
        typer.Option(
            "--by-language",
            help="For each language with at least 50 documents: a table for `by_language`, with its stop words.",
        ),
    ] = False,
    reference: Annotated[
        str | None, typer.Option(help="Take limits from the documents of this source, at --percentile.")
    ] = None,
    percentile: Annotated[
        float | None, typer.Option(help="Of the reference, for lower limits; upper ones at 100 less it. Default: 5.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="YAML file to write. Default: it is printed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Propose limits from the measures of a finished run, with what they remove before and after."""
    from gristmill.pipelines import calibrate_write as written
    from gristmill.pipelines.calibrate import calibrate as propose
    from gristmill.pipelines.calibrate_table import table_text
    from gristmill.pipelines.limits_found import Goal
    from gristmill.pipelines.recipe import STAGES
    from gristmill.stages.shards import publish_bytes

    share = written.shares(target_removal, reference, percentile)
    found = propose(written.open_run_of(run_folder), STAGES, Goal(share, reference, by_language), stage or ())
    text = table_text(found) if by_language else written.yaml_text(found, STAGES)
    if out is not None:
        publish_bytes(out, text.encode())
    if as_json:
        print(written.as_json(found, out))
        return
    for table in written.tables(found):
        console().print(table)
    for problem in found.problems:
        print(problem, file=sys.stderr)
    print(text if out is None else f"Limits: {out}\n", end="")


@app.command(epilog=example("gristmill verify out/demo/run"))
def verify(run_folder: RunArgument, as_json: JsonOption = False) -> None:
    """Prove that a run is what its ledgers say: sums, checksums, recounted documents, token shards."""
    from gristmill.pipelines.open_run import open_run
    from gristmill.pipelines.verify import verify as check

    problems = check(open_run(run_folder))
    if as_json:
        print(json.dumps({"run": run_folder, "sound": not problems, "problems": problems}, indent=1))
    else:
        for problem in problems:
            print(problem)
        print(f"{run_folder}: {'sound' if not problems else f'{len(problems):,} problems'}.")
    if problems:
        raise typer.Exit(1)


@app.command(epilog=example("gristmill warmup"))
def warmup() -> None:
    """Compile the kernels into numba's cache, so that the first run and its workers find them there."""
    from gristmill.pipelines.warmup import warm

    print(warm())


def _add_verbs() -> None:
    from gristmill.pipelines import (
        cli_documents,
        cli_download,
        cli_evaluate,
        cli_look,
        cli_models,
        cli_plan,
        cli_tokens,
        cli_training,
    )

    cli_documents.register(app)
    cli_download.register(app)
    cli_evaluate.register(app)
    cli_look.register(app)
    cli_models.register(app)
    cli_plan.register(app)
    cli_tokens.register(app)
    cli_training.register(app)


_add_verbs()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; every error that a user can mend is one message, without a traceback."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app(args=arguments, standalone_mode=True)
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to go on.", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(error, file=sys.stderr)
        raise SystemExit(code) from None


def _stop(_signal: int, _frame: object) -> None:
    """SIGTERM ends like Ctrl-C: workers and training processes are stopped too, and nothing half-written stays."""
    raise KeyboardInterrupt


def _exit_code(error: Exception) -> int | None:
    """2 when the user asked wrongly, 1 when the work failed, None for a fault of the program."""
    asked: tuple[type[Exception], ...] = (SettingsError,)  # RecipeError and MixtureError are such
    failed: tuple[type[Exception], ...] = ()
    names: dict[str, Any] = sys.modules
    for module, name, is_asked in (
        ("gristmill.pipelines.downloads", "InputError", True),
        ("gristmill.pipelines.forecast_sample", "SampleError", True),
        ("gristmill.pipelines.open_run", "RunError", True),
        ("gristmill.pipelines.engine", "EngineError", False),
        ("gristmill.pipelines.lock", "LockError", False),
        ("gristmill.pipelines.run", "RunError", False),
        ("gristmill.stages.kneser_ney", "ModelError", False),
        ("gristmill.stages.ledger", "LedgerError", False),
        ("gristmill.stages.shards", "ShardError", False),
        ("gristmill.stages.stores", "StoreLost", False),
        ("gristmill.tokenize.shards", "TokenError", False),
        ("gristmill.trainer.config", "TrainError", False),
    ):
        kind = getattr(names.get(module), name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            asked, failed = ((*asked, kind), failed) if is_asked else (asked, (*failed, kind))
    if isinstance(error, failed):
        return 1
    return 2 if isinstance(error, asked) else None


if __name__ == "__main__":
    main()
