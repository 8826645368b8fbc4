"""The verbs that look at runs: `inspect`, `report`, `compare`, `serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gristmill.stages.settings_file import SettingsError

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
PagerOption = Annotated[bool, typer.Option("--pager/--no-pager", help="In a terminal, show it page by page.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")]


def register(app: typer.Typer) -> None:
    """Adds the verbs to the command."""
    app.command(epilog="Example:  gristmill inspect out/demo/run --reason too_few_words -n 3")(inspect)
    app.command(epilog="Example:  gristmill report out/demo/run")(report)
    app.command(epilog="Example:  gristmill compare out/demo/run out/demo/stricter")(compare)
    app.command(epilog="Example:  gristmill serve out/demo/run")(serve)


def inspect(
    run_folder: RunArgument,
    stage: Annotated[str | None, typer.Option(help="Only documents that this stage dropped.")] = None,
    reason: Annotated[str | None, typer.Option(help="Only documents with this reason.")] = None,
    source: Annotated[str | None, typer.Option(help="Only documents of this source.")] = None,
    language: Annotated[str | None, typer.Option(help="Only documents in this language.")] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Only documents in this range of a measure; can be given again.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Only documents whose text holds these words.")] = None,
    kept: Annotated[bool, typer.Option("--kept", help="Documents that were kept, not dropped ones.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="What the stage of --stage changed in texts, before and after.")
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="The duplicates of this document, with what differs; alone.", metavar="DOC_ID")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many.")] = 10,
    seed: Annotated[int, typer.Option(help="Another seed shows other documents.")] = 0,
    as_json: JsonOption = False,
    pager: PagerOption = True,
) -> None:
    """Look at documents: dropped ones with their reasons and measures, kept ones, edits, or a cluster."""
    from gristmill.pipelines import clusters, edits
    from gristmill.pipelines import inspect as inspection
    from gristmill.pipelines.open_run import open_run
    from gristmill.pipelines.tables import paged

    run = open_run(run_folder)
    if cluster is not None:
        members = clusters.members(run, cluster, n)
        if as_json:
            sys.stdout.write(clusters.as_json_lines(members))
            return
        with paged(wanted=pager) as console:
            clusters.render(members, console)
    elif diff:
        if stage is None or reason or language or measure:
            raise SettingsError("--diff needs --stage, and takes --source, --text, -n and --seed beside it.")
        changed = edits.edits(run, stage, source, text, n, seed)
        if as_json:
            sys.stdout.write(edits.as_json_lines(changed))
            return
        with paged(wanted=pager) as console:
            edits.render(changed, stage, console)
    else:
        ranges = [inspection.Range.parse(entry) for entry in measure or ()]
        found = inspection.inspect(run, stage, reason, source, kept, text, n, seed, language=language, ranges=ranges)
        if as_json:
            sys.stdout.write(inspection.as_json_lines(found))
            return
        with paged(wanted=pager) as console:
            inspection.render(found, console)


def report(
    run_folder: RunArgument,
    other: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A second run, to compare with.")] = None,
    out: Annotated[str | None, typer.Option("--out", help="File to write. Default: in the first run.")] = None,
) -> None:
    """Write the quality report of a run, or the comparison of two: one HTML file that opens offline."""
    from gristmill.pipelines.report.compare import write_comparison
    from gristmill.pipelines.report.write import write_report

    if other is None:
        print(write_report(run_folder, out))
    else:
        print(write_comparison(run_folder, other, out or f"{run_folder.rstrip('/')}/comparison.html"))


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A run folder.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one, of the same input.")],
    n: Annotated[int, typer.Option("-n", min=0, help="Examples of documents that one run alone kept.")] = 3,
    as_json: JsonOption = False,
    pager: PagerOption = True,
) -> None:
    """Say what differs between two runs: settings, funnel, documents, measures, scores."""
    from gristmill.pipelines import compare_show
    from gristmill.pipelines.open_run import open_run
    from gristmill.pipelines.report.compare import compare as compared
    from gristmill.pipelines.tables import paged

    found = compared(open_run(first), open_run(second))
    if as_json:
        print(compare_show.as_json(found))
        return
    with paged(wanted=pager) as console:
        compare_show.render(found, n, console)


def serve(
    run_folder: RunArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1. Default: a free one.")] = 0,
) -> None:
    """Show the report in a browser of this machine, with all documents of the run, not a sample."""
    from gristmill.pipelines import serve as serving
    from gristmill.pipelines.open_run import open_run

    serving.serve(open_run(run_folder), port, lambda text: print(text, flush=True))
