"""What `gristmill calibrate` finds: limits in force and proposed, and what each removes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gristmill.pipelines.reached import Documents
from gristmill.pipelines.report.limits import SIDES
from gristmill.pipelines.stop_words import StopWords
from gristmill.stages.settings_file import SettingsError

AT_LEAST, AT_MOST = SIDES


class CalibrateError(SettingsError):
    """Limits were asked for that this run cannot tell."""


@dataclass(frozen=True)
class Goal:
    """What the limits are to do."""

    share: float = 0.1  # of documents that each rule alone may remove, from 0 to below 1
    reference: str | None = None  # the source whose documents are counted; all where not given
    by_language: bool = False


@dataclass(frozen=True)
class Limit:
    """One limit in force and the setting that holds it."""

    reason: str
    side: str  # "at_least" or "at_most"
    column: str
    unit: str
    setting: str
    integer: bool
    now: float

    def removes(self, values: np.ndarray, bound: float | np.ndarray) -> np.ndarray:
        """values (n,) -> (n,) bool, beyond the bound; a value that is missing (NaN) is not counted."""
        return values < bound if self.side == AT_LEAST else values > bound


@dataclass
class Proposal:
    """A limit for one group of documents. Shares are of `documents`."""

    limit: Limit
    now: float  # the limit in force for this group
    value: float | None = None  # proposed; None: none can be told, and the one in force stays
    ranked: int = 0  # documents with a value, of those that the proposal is made from
    documents: int = 0  # that reached the stage and have a value
    removed_now: int = 0
    removed: int = 0  # by the proposal
    looked_at: int | None = None  # documents that `removed` counts, where it does not count all

    @property
    def bound(self) -> float:
        return self.now if self.value is None else self.value

    @property
    def removed_of(self) -> int:
        return self.documents if self.looked_at is None else self.looked_at


@dataclass
class Group:
    """All documents that reached a stage, or those in one language."""

    language: str | None
    proposals: list[Proposal]
    documents: int = 0  # that reached the stage
    dropped_now: int = 0  # by all rules of the stage together
    dropped: int = 0  # with the proposals instead; by stop words as the run had them
    stop_words: StopWords | None = None  # of a language, where the stage looks for them

    def rows(self, documents: Documents) -> np.ndarray:
        """(n,) bool"""
        if self.language is None:
            return np.ones(len(documents.dropped), bool)
        return np.asarray(documents.language == self.language, bool)


@dataclass
class StageLimits:
    """What was found for one stage."""

    label: str
    key: str
    only: tuple[str, ...]
    settings: dict[str, Any]  # of the recipe
    overall: Group
    languages: list[Group] = field(default_factory=list)
    stage: Any = None  # with its settings


@dataclass
class Calibration:
    """Proposals for the stages of a run."""

    run: str
    recipe: str
    goal: Goal
    stages: list[StageLimits]
    problems: list[str]  # what could not be proposed and why, in sentences
    sources: dict[str, str] = field(default_factory=dict)  # and the files of each
