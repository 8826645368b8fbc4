"""The verb `gristmill plan`: what a run will take, before it is begun."""

from __future__ import annotations

import re
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON on standard output.")]
_EXAMPLE = "gristmill plan pipelines/recipes/demo.yaml --input-bytes 10TB --workers 64 --core-hour-price 0.05"
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def register(app: typer.Typer) -> None:
    """Adds the verb to the command."""
    app.command("plan", epilog=f"Example:  {_EXAMPLE}")(plan)


def size(text: str) -> float:
    """Bytes, of a number with or without a unit: 3000000, 300GB, 1.5TB (decimal units)."""
    found = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmgtp]?)b?\s*", text.lower())
    bytes_ = float(re.sub("[_,]", "", found[1])) * _UNITS[found[2]] if found else 0.0
    if bytes_ <= 0:
        raise typer.BadParameter(f"{text!r} is no size. Write bytes, or a number with kB, MB, GB, TB or PB: 1.5TB.")
    return bytes_


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file.")],
    input_bytes: Annotated[
        str | None,
        typer.Option("--input-bytes", help="Size of the input as it lies on disk, as 300GB. Default: the files there."),
    ] = None,
    dumps: Annotated[
        float | None,
        typer.Option("--dumps", help="Instead: so many crawls of Common Crawl in place of the WARC or WET sources."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Workers, one core each.")] = 1,
    core_hour_price: Annotated[
        float | None, typer.Option("--core-hour-price", min=0, help="What a core costs for an hour, in any currency.")
    ] = None,
    sample_mb: Annotated[
        float, typer.Option("--sample-mb", min=0.1, help="Input to measure on, MB as it lies on disk.")
    ] = 64.0,
    seed: Annotated[int, typer.Option(help="Another seed takes other pieces of the input.")] = 0,
    out: Annotated[
        str | None, typer.Option("--out", help="The run folder where downloads lie. Default: the recipe's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a recipe on a sample of its input; say what all of it takes: CPU hours, time, memory, disk, money."""
    from gristmill.pipelines import forecast_show
    from gristmill.pipelines import recipe as recipes
    from gristmill.pipelines.forecast_run import plan_run
    from gristmill.pipelines.main_job import run_folder
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.tables import console

    if input_bytes is not None and dumps is not None:
        raise typer.BadParameter("--input-bytes and --dumps both say how much there is. Give one of them.")
    if dumps is not None and dumps <= 0:
        raise typer.BadParameter(f"--dumps {dumps:g}: it is a number of crawls above 0.")
    loaded = recipes.load(recipe)
    with Display() as display:
        found = plan_run(
            loaded,
            run_folder(loaded, out),
            display,
            input_bytes=None if input_bytes is None else size(input_bytes),
            dumps=dumps,
            workers=workers,
            price=core_hour_price,
            sample_bytes=int(sample_mb * 1e6),
            seed=seed,
        )
    if as_json:
        print(forecast_show.as_json(found))
        return
    for part in forecast_show.shown(found):
        console().print(part, highlight=False)
