"""Which rule removes what, whatever the order of the stages.

A document that a stage drops is not seen by the stages after it, so the figures of a stage depend on what stands before
it. Here they do not: documents that were dropped go on through the later stages of the segment, for the count alone,
and a rule is asked of every document. `documents` are those that break the rule; `only_documents` those that break no
other rule of any stage of the segment, which is what switching the rule off would bring back. Characters are those
that the document came in with.

    removals = ledger.removals
    removals.rules["gopher_quality"]["too_few_words"]["en"].only_documents

Language is what the `language` stage said, "" where none did. All figures are sums, so shards merge exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Removal(BaseModel):
    """What one rule removes."""

    model_config = ConfigDict(extra="forbid")

    documents: int = 0
    chars: int = 0
    only_documents: int = 0
    only_chars: int = 0

    def __add__(self, other: Removal) -> Removal:
        return Removal(
            documents=self.documents + other.documents,
            chars=self.chars + other.chars,
            only_documents=self.only_documents + other.only_documents,
            only_chars=self.only_chars + other.only_chars,
        )


class Removals(BaseModel):
    """What the rules of one segment remove of the documents that came in."""

    model_config = ConfigDict(extra="forbid")

    came_in: dict[str, Removal] = Field(default_factory=dict)  # by language: all; `only`: those that no rule removes
    rules: dict[str, dict[str, dict[str, Removal]]] = Field(default_factory=dict)  # stage -> reason -> language
    left_out: int = 0  # dropped documents that a later stage could not take; in none of the figures above

    def merge(self, other: Removals) -> Removals:
        """Exact sum of two shards' counts."""
        rules = {stage: dict(reasons) for stage, reasons in self.rules.items()}
        for stage, reasons in other.rules.items():
            into = rules.setdefault(stage, {})
            for reason, languages in reasons.items():
                into[reason] = _add(into.get(reason, {}), languages)
        return Removals(came_in=_add(self.came_in, other.came_in), rules=rules, left_out=self.left_out + other.left_out)


def _add(a: Mapping[str, Removal], b: Mapping[str, Removal]) -> dict[str, Removal]:
    return {key: a.get(key, Removal()) + b.get(key, Removal()) for key in sorted({*a, *b})}


def tally(fails: Mapping[tuple[str, str], np.ndarray], chars: np.ndarray, languages: Sequence[str | None]) -> Removals:
    """Counts one batch. fails: (stage, reason) -> (n,) bool; chars: (n,) int64; languages: n, None for unknown."""
    names, of_document = np.unique(np.array([name or "" for name in languages], dtype=object), return_inverse=True)
    votes = np.zeros(len(chars), np.int64)
    for broken in fails.values():
        votes += broken
    out = Removals(came_in=_by_language(np.ones(len(chars), bool), votes == 0, chars, names, of_document))
    for (stage, reason), broken in fails.items():
        reasons = out.rules.setdefault(stage, {})
        reasons[reason] = _by_language(broken, broken & (votes == 1), chars, names, of_document)
    return out


def _by_language(
    every: np.ndarray, only: np.ndarray, chars: np.ndarray, names: np.ndarray, of_document: np.ndarray
) -> dict[str, Removal]:
    """every, only: (n,) bool; of_document: (n,) positions in names -> language -> counts, where there are any."""
    out = {}
    for at in np.unique(of_document[every]):
        here = of_document == at
        out[str(names[at])] = Removal(
            documents=int((every & here).sum()),
            chars=int(chars[every & here].sum()),
            only_documents=int((only & here).sum()),
            only_chars=int(chars[only & here].sum()),
        )
    return out
