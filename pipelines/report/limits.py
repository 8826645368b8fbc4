"""Which limits were in force in a run: the recipe's stages are built again and asked for their rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from gristmill.pipelines.open_run import Run
from gristmill.pipelines.run_books import heading_of
from gristmill.stages.documents import Rule
from gristmill.stages.language_limits import differing

SIDES = ("at_least", "at_most")


@dataclass(frozen=True)
class Setting:
    """What holds a limit."""

    name: str
    integer: bool  # it takes whole numbers only


@dataclass(frozen=True)
class StageRules:
    """The rules of a stage as the run used it."""

    key: str  # in the recipe
    only: tuple[str, ...]  # sources that pass it; empty for all
    rules: tuple[Rule, ...]
    settings: dict[tuple[str, str], Setting]  # by reason and side
    table: str | None = None  # of limits by language
    languages: dict[str, list[str]] = field(default_factory=dict)  # reason -> those with a limit of their own


def rules_of(run: Run, stages: Mapping[str, type]) -> tuple[dict[str, StageRules], list[str]]:
    """Stage label -> its rules, and what could not be read, in sentences.

    stages: key in the recipe -> stage class. A stage whose settings the present version does not take is left out and
    told of: its limits are not drawn, and its figures stay.
    """
    uses = run.recipe.get("stages")
    found: dict[str, StageRules] = {}
    problems = []
    labels = list(run.stages())
    for use in uses if isinstance(uses, list) else []:
        key = next((k for k in use if k != "only"), None) if isinstance(use, dict) else None
        label = next((n for n in labels if n.partition(" ")[0] == heading_of(use)), None)
        if key is None or label is None or key not in stages:
            continue
        labels.remove(label)
        settings = dict(use[key] or {})
        try:
            stage = stages[key](**settings)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            problems.append(f"The limits of stage {label} are not drawn: this version refuses its settings ({why}).")
            continue
        rules = tuple(stage.rules())
        only = use.get("only") or ()
        found[label] = StageRules(
            key,
            tuple([only] if isinstance(only, str) else only),
            rules,
            _settings(stage, rules),
            settings.get("by_language"),
            differing(stage),
        )
    return found, problems


def _settings(stage: Any, rules: tuple[Rule, ...]) -> dict[tuple[str, str], Setting]:
    """Finds the setting behind each limit by moving one setting at a time and looking which limit follows."""
    out: dict[tuple[str, str], Setting] = {}
    if not isinstance(stage, BaseModel):
        return out
    for name, value in stage:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not any(value == getattr(rule, side) for rule in rules for side in SIDES):
            continue
        moved = value + 1
        after = stage.model_copy(update={name: moved}).rules()  # type: ignore[attr-defined]
        for before_rule, after_rule in zip(rules, after, strict=False):
            for side in SIDES:
                if getattr(before_rule, side) == value and getattr(after_rule, side) == moved:
                    out[before_rule.reason, side] = Setting(name, isinstance(value, int))
    return out
