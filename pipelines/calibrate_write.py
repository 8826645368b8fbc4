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
from gristmill.pipelines.limits_found import AT_LEAST, CalibrateError, Calibration, Group, Proposal, StageLimits
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
    """The stages with the proposed limits for all documents, as a recipe writes them.

    An entry holds all settings that differ from the stage's defaults, so that it can replace the recipe's; limits by
    language go. stages: key in the recipe -> stage class.
    """
    body = CommentedMap()
    body["stages"] = CommentedSeq(_entry(stage, stages[stage.key]) for stage in found.stages)
    body.yaml_set_start_comment("\n".join(heading(found)))
    yaml = YAML(typ="rt")
    yaml.width = 10_000  # a comment never breaks a line
    text = io.StringIO()
    yaml.dump(body, text)
    return text.getvalue()


def heading(found: Calibration) -> Iterator[str]:
    percent = f"{found.goal.share:.6%}".rstrip("%").rstrip("0").rstrip(".")
    of = "the documents that reached its stage"
    if found.goal.reference is not None:
        of = f"the documents of source {found.goal.reference} that reached its stage"
    yield f"Limits proposed by `gristmill calibrate`: each rule alone removes at most {percent} % of"
    yield f"{of} and have a value; rounded to 3 significant digits towards keeping."
    yield f"Run: {one_line(found.run)}" + (f" (recipe {one_line(found.recipe)})" if found.recipe else "")
    for stage in found.stages:
        passes = f" of {', '.join(stage.only)}" if stage.only else ""
        yield one_line(f"Documents that reached {stage.label}: {stage.overall.documents:,}{passes}")
    for problem in found.problems:
        yield one_line(problem)


def one_line(text: str) -> str:
    return " ".join(text.split())


def _entry(stage: StageLimits, kind: Any) -> CommentedMap:
    settings = CommentedMap()
    proposals = stage.overall.proposals
    by_language = {"by_language", *(f"{p.limit.setting}_of" for p in proposals)}
    defaults = _defaults(kind, stage.settings.get("variant"))
    for name, value in stage.settings.items():
        if name not in by_language and (name not in defaults or value != defaults[name]):
            settings[name] = value
    for proposal in proposals:
        settings[proposal.limit.setting] = proposal.bound
    for name in dict.fromkeys(p.limit.setting for p in proposals):
        texts = [comment_of(p) for p in proposals if p.limit.setting == name]
        settings.yaml_add_eol_comment("; ".join(texts), name)
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


def comment_of(proposal: Proposal) -> str:
    """What the proposal and the limit in force remove."""
    now = f"{_number(proposal.now)} removes {_share(proposal.removed_now, proposal.documents)}"
    if proposal.value is None:
        return f"{proposal.limit.reason}: as it was; {now} of {proposal.documents:,} documents"
    removes = f"removes {_share(proposal.removed, proposal.removed_of)} of {proposal.removed_of:,} documents"
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
            _share(proposal.removed, proposal.removed_of),
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
    words = {} if group.stop_words is None else {"stop_words": list(group.stop_words.words)}
    return words | {
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
        "would_remove_of": proposal.removed_of,
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
