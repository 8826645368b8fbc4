"""What `gristmill calibrate` found, as YAML in a recipe's form, as tables, and as JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import orjson
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.calibrate import AT_LEAST, CalibrateError, Calibration, Group, Proposal, StageLimits
from gristmill.pipelines.main_job import run_folder
from gristmill.pipelines.open_run import Run, open_run, share
from gristmill.pipelines.tables import plain_table
from gristmill.stages.shards import exists

COLUMNS = ("rule", "unit", "documents", "limit", "removes", "proposed", "would remove")


def open_run_of(path: str) -> Run:
    """A run folder, or the run of a recipe file. Raises CalibrateError when the recipe has not been run."""
    if not path.endswith((".yaml", ".yml")):
        return open_run(path)
    folder = run_folder(recipes.load(path), None)
    if not exists(folder):
        raise CalibrateError(
            f"{path} has not been run: there is no folder {folder}. `gristmill run {path}` measures the documents; if "
            "the run went elsewhere (--out), give that folder."
        )
    return open_run(folder)


def yaml_text(found: Calibration, stages: Mapping[str, Any]) -> str:
    """The stages with the proposed limits, as a recipe writes them; under `languages`, the same for each language.

    An entry holds all settings that differ from the stage's defaults, so that it can replace the recipe's. stages: key
    in the recipe -> stage class.
    """
    body = CommentedMap()
    body["stages"] = CommentedSeq(_entry(stage, stage.overall, stages[stage.key]) for stage in found.stages)
    languages = CommentedMap()
    for stage in found.stages:
        for group in stage.languages:
            if not _holds_languages(stage, stages[stage.key]):
                entries = languages.setdefault(group.language, CommentedSeq())
                entries.append(_entry(stage, group, stages[stage.key]))
    if languages:
        body["languages"] = languages
    body.yaml_set_start_comment("\n".join(_heading(found)))
    yaml = YAML(typ="rt")
    yaml.width = 10_000  # a comment never breaks a line
    text = io.StringIO()
    yaml.dump(body, text)
    return text.getvalue()


def _heading(found: Calibration) -> Iterator[str]:
    percent = f"{found.goal.share:.6%}".rstrip("%").rstrip("0").rstrip(".")
    of = "the documents that reached its stage"
    if found.goal.reference is not None:
        of = f"the documents of source {found.goal.reference} that reached its stage"
    yield f"Limits proposed by `gristmill calibrate`: each rule alone removes at most {percent} % of"
    yield f"{of} and have a value; rounded to 3 significant digits towards keeping."
    yield f"Run: {_line(found.run)}" + (f" (recipe {_line(found.recipe)})" if found.recipe else "")
    for stage in found.stages:
        groups = [f"{group.documents:,} in {group.language}" for group in stage.languages]
        passes = f" of {', '.join(stage.only)}" if stage.only else ""
        counted = "; ".join([f"{stage.overall.documents:,}{passes}", *groups])
        yield _line(f"Documents that reached {stage.label}: {counted}")
    for problem in found.problems:
        yield _line(problem)


def _line(text: str) -> str:
    return " ".join(text.split())


def _holds_languages(stage: StageLimits, kind: Any) -> bool:
    """True for a stage with a table of limits by language for each of its limits, such as `min_score_of`."""
    return all(f"{p.limit.setting}_of" in kind.model_fields for p in stage.overall.proposals)


def _entry(stage: StageLimits, group: Group, kind: Any) -> CommentedMap:
    settings = CommentedMap()
    defaults = _defaults(kind, stage.settings.get("variant"))
    for name, value in stage.settings.items():
        if name not in defaults or value != defaults[name]:
            settings[name] = value
    for proposal in group.proposals:
        name = proposal.limit.setting
        settings[name] = proposal.bound
        if f"{name}_of" in kind.model_fields:
            settings.pop(f"{name}_of", None)
            own = {g.language: p.bound for g in stage.languages for p in g.proposals if p.limit == proposal.limit}
            if own and group.language is None:
                settings[f"{name}_of"] = CommentedMap(own)
    for name in dict.fromkeys(p.limit.setting for p in group.proposals):
        texts = [_comment(p) for p in group.proposals if p.limit.setting == name]
        settings.yaml_add_eol_comment("; ".join(texts), name)
    for of_language in stage.languages if group.language is None else ():
        for proposal in of_language.proposals:
            table = settings.get(f"{proposal.limit.setting}_of")
            if isinstance(table, CommentedMap):
                table.yaml_add_eol_comment(_comment(proposal), of_language.language)
    entry = CommentedMap({stage.key: settings})
    if stage.only:
        entry["only"] = list(stage.only)
    return entry


def _defaults(kind: Any, variant: str | None) -> dict[str, Any]:
    """What each setting is that a recipe does not give, as YAML gives it back. A variant brings its own."""
    values = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    if variant is not None:
        values = dict(kind(variant=variant)) | {"variant": values["variant"]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _comment(proposal: Proposal) -> str:
    now = f"{_number(proposal.now)} removes {_share(proposal.removed_now, proposal.documents)}"
    if proposal.value is None:
        return f"{proposal.limit.reason}: as it was; {now} of {proposal.documents:,} documents"
    removes = f"removes {_share(proposal.removed, proposal.documents)} of {proposal.documents:,} documents"
    return f"{proposal.limit.reason}: {removes}; {now}"


def tables(found: Calibration) -> list[Table]:
    """Before and after, a table for each stage and language."""
    out = []
    for stage in found.stages:
        for group in (stage.overall, *stage.languages):
            title = f"{stage.label}, {group.language}" if group.language else stage.label
            out.append(plain_table(title, COLUMNS, list(_rows(group))))
    return out


def _rows(group: Group) -> Iterator[dict[str, str]]:
    for proposal in group.proposals:
        limit = proposal.limit
        sign = "≥ " if limit.side == AT_LEAST else "≤ "  # what passes
        cells = (
            limit.reason,
            limit.unit,
            f"{proposal.documents:,}",
            sign + _number(proposal.now),
            _share(proposal.removed_now, proposal.documents),
            "" if proposal.value is None else sign + _number(proposal.value),
            _share(proposal.removed, proposal.documents),
        )
        yield dict(zip(COLUMNS, cells, strict=True))
    before, after = _share(group.dropped_now, group.documents), _share(group.dropped, group.documents)
    cells = ("all rules together", "", f"{group.documents:,}", "", before, "", after)
    yield dict(zip(COLUMNS, cells, strict=True))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _share(part: int, whole: int) -> str:
    return f"{share(part, whole):.1%}"


def as_json(found: Calibration, written: str | None) -> str:
    """For programs: the figures of the tables, and where the YAML was written."""
    body = {
        "run": found.run,
        "share": found.goal.share,
        "reference": found.goal.reference,
        "stages": [
            {"stage": stage.label, "only": list(stage.only), **_figures(stage.overall)}
            | {"languages": {group.language: _figures(group) for group in stage.languages}}
            for stage in found.stages
        ],
        "problems": found.problems,
        "out": written,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()


def _figures(group: Group) -> dict[str, Any]:
    return {
        "documents": group.documents,
        "dropped": group.dropped_now,
        "would_drop": group.dropped,
        "limits": [_proposal(proposal) for proposal in group.proposals],
    }


def _proposal(proposal: Proposal) -> dict[str, Any]:
    return {
        "rule": proposal.limit.reason,
        "setting": proposal.limit.setting,
        "side": proposal.limit.side,
        "unit": proposal.limit.unit,
        "documents": proposal.documents,
        "made_from": proposal.ranked,
        "limit": proposal.now,
        "removes": proposal.removed_now,
        "proposed": proposal.value,
        "would_remove": proposal.removed,
    }


def shares(target_removal: float | None, reference: str | None, percentile: float | None) -> float:
    """The share to remove that the options ask for; 0.1 where they say nothing. Raises CalibrateError."""
    if reference is None:
        if percentile is not None:
            raise CalibrateError("--percentile is of the documents of one source: name it with --reference.")
        return 0.1 if target_removal is None else target_removal
    if target_removal is not None:
        raise CalibrateError("Give --target-removal, or --reference with --percentile, not both.")
    percentile = 5.0 if percentile is None else percentile
    if not 0 <= percentile < 50:
        raise CalibrateError(
            f"--percentile {percentile:g}: give one from 0 to below 50; an upper limit is at 100 less it."
        )
    return float(Fraction(str(percentile)) / 100)
