"""From a recipe file to a finished run: documents, tokens, ablation, report, and the tables at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.done import pieces_left
from gristmill.pipelines.downloads import missing as downloads_missing
from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.listing import frozen
from gristmill.pipelines.lock import RunLock
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.plan import plan_of
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import Recipe, RecipeError
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, announce, run, storage_faults
from gristmill.pipelines.tables import console, funnel_table, plain_table
from gristmill.stages.shards import exists, join
from gristmill.stages.stores import is_local


def run_folder(recipe: Recipe, out: str | None) -> str:
    """Where a recipe's run goes: as asked, else as the recipe says, else out/<name>."""
    return (out or recipe.out or f"out/{recipe.name}").rstrip("/")


def main_job(recipe_path: str, out: str | None, options: Options, *, as_json: bool, ablation: bool) -> None:
    """Does what is left of a run, in order, and shows the result.

    Raises SettingsError and InputError before any work, RunError and TrainError for what could not be done.
    """
    recipe = recipes.load(recipe_path)
    folder = run_folder(recipe, out)
    if ablation and recipe.ablation is not None and not is_local(folder):
        raise RecipeError(
            f"`ablation` trains in a local folder, and this run lies at {folder}. Pass --no-ablation, then run "
            f"`gristmill ablate {recipe.ablation.file} {folder}/tokens --out FOLDER`."
        )
    ranking: dict[str, Any] | None = None
    with RunLock(folder) as lock, storage_faults(folder), Display(as_json=as_json) as display:
        announce(lock, display)
        outcome = run(recipe, folder, options, display, lock)
        changed = outcome.done > 0
        if ablation and recipe.ablation is not None:
            file = Path(recipe_path).parent / recipe.ablation.file
            trained, ranking = _ablation(recipe, file, folder, display)
            changed = changed or trained > 0
        report = join(folder, "report.html")
        if changed or not exists(report):
            with display.phase("report", 1) as phase:
                report = write_report(folder)
                phase.advance()
        display.event("done", run=folder, report=report, pieces=outcome.done, found=outcome.found)
    _show(folder, report, ranking, as_json=as_json)


def _ablation(recipe: Recipe, file: Path, folder: str, display: Display) -> tuple[int, dict[str, Any]]:
    """Trains and ranks the recipe's mixtures -> (runs trained now, the ranking)."""
    if recipe.tokenizer is None:
        raise RecipeError("`ablation` trains on token shards: the recipe needs a `tokenizer` section as well.")
    try:
        from gristmill.pipelines.ablation import run_ablation
    except ImportError as error:
        raise RecipeError(
            f"`ablation` needs the trainer's packages ({error.name} is missing). Install gristmill[train], or pass "
            "--no-ablation."
        ) from error
    return run_ablation(file, join(folder, "tokens"), join(folder, "ablation"), display)


def _show(folder: str, report: str, ranking: dict[str, Any] | None, *, as_json: bool) -> None:
    rows = funnel(open_run(folder))
    if as_json:
        result = {"event": "result", "run": folder, "report": report, "funnel": [asdict(r) for r in rows]}
        sys.stdout.buffer.write(orjson.dumps({**result, "ranking": ranking}) + b"\n")
        return
    shown = console()
    shown.print(funnel_table(rows))
    if ranking is not None:
        from gristmill.pipelines.ablation import ranking_rows

        columns, ranked, verdict = ranking_rows(ranking)
        shown.print(plain_table("Ranking", columns, ranked))
        for line in verdict:
            shown.print(line, highlight=False)
    shown.print(f"Report: {report}", highlight=False)


def _missing(folder: str, missing: Mapping[str, int]) -> str:
    """What there is to say before the files are there."""
    lines = [f"  source {source}: {count:,} files to download" for source, count in missing.items()]
    return "\n".join([f"{folder}: the shards are known when the downloads are there.", *lines])


def dry_run(recipe_path: str, out: str | None, options: Options, *, as_json: bool) -> str:
    """What `run` would do, as a text for people or programs. Writes the frozen listing, nothing else."""
    recipe = recipes.load(recipe_path)
    folder = run_folder(recipe, out)
    missing = downloads_missing(recipe, folder)
    if missing:
        return orjson.dumps({"run": folder, "to_download": missing}).decode() if as_json else _missing(folder, missing)
    plan = plan_of(recipe, frozen(recipe, folder, refresh=options.refresh_inputs), folder)
    left = pieces_left(plan, folder)
    segments = [
        {"segment": s.segment.folder, "stages": [u.heading for u in s.segment.uses], "models": list(s.models)}
        for s in plan.segments
    ]
    if as_json:
        body = {"run": folder, "shards": len(plan.shards), "segments": segments, **asdict(left)}
        return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()
    lines = [f"{folder}: {len(plan.shards):,} shards"]
    lines += [f"  {s['segment']}: {', '.join(s['stages']) or 'read'}" for s in segments]
    lines.append(f"{left.todo:,} pieces to do, {left.found:,} there and up to date.")
    return "\n".join(lines)
