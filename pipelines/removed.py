"""What each rule of a run removes by itself: `gristmill rules RUN [--source S] [--language L]`.

Read from the ledgers (`stages/removals.py` says what is counted). The order of the stages in a segment does not change
these figures, except where a stage edits the text that a later one measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import orjson
from rich.table import Table

from gristmill.pipelines.open_run import Run, RunError, share
from gristmill.pipelines.tables import plain_table
from gristmill.stages.removals import Removal, Removals
from gristmill.stages.settings_file import nearest

COLUMNS = ("rule", "documents", "share", "only it", "with others", "characters", "share of characters")


@dataclass(frozen=True)
class Removed:
    """One rule."""

    segment: str
    stage: str
    reason: str
    documents: int  # that break the rule
    chars: int
    only_documents: int  # that break no other rule of the segment
    only_chars: int
    of_documents: int  # that came in
    of_chars: int


def removed(run: Run, source: str | None = None, language: str | None = None) -> list[Removed]:
    """A row a rule, in the order of segments, then by documents. Raises RunError for a source or language that the run
    does not have, and for a run whose recipe switched the count off."""
    if source is not None and source not in run.sources:
        raise RunError(f"This run has no source {source!r}.{nearest(source, list(run.sources))}")
    languages = languages_of(run)
    if language is not None and language not in languages:
        raise RunError(f"This run has no language {language!r}.{nearest(language, languages)}")
    found = {segment: _merged(parts, source) for segment, parts in run.removals.items()}
    if not any(f.came_in for part in run.removals.values() for f in part.values()):
        raise RunError("This run did not count what rules remove: its recipe says `removals_share: 0`.")
    out: list[Removed] = []
    for segment, sums in found.items():
        whole = _of(sums.came_in, language)
        rows = [
            Removed(segment, stage, reason, *_figures(_of(by_language, language)), whole.documents, whole.chars)
            for stage, reasons in sums.rules.items()
            for reason, by_language in reasons.items()
        ]
        out += sorted((r for r in rows if r.documents), key=lambda r: (-r.documents, r.stage, r.reason))
    return out


def languages_of(run: Run) -> list[str]:
    """Languages in the counts, the most frequent first; "" where a document has none."""
    sums: dict[str, int] = {}
    for parts in run.removals.values():
        for found in parts.values():
            for name, count in found.came_in.items():
                sums[name] = sums.get(name, 0) + count.documents
    return sorted(sums, key=lambda name: (-sums[name], name))


def left_out(run: Run) -> int:
    """Dropped documents that a later stage could not take."""
    return sum(found.left_out for parts in run.removals.values() for found in parts.values())


def _merged(parts: dict[str, Removals], source: str | None) -> Removals:
    out = Removals()
    for name, found in parts.items():
        if source is None or name == source:
            out = out.merge(found)
    return out


def _of(by_language: dict[str, Removal], language: str | None) -> Removal:
    if language is not None:
        return by_language.get(language, Removal())
    return sum(by_language.values(), Removal())


def _figures(found: Removal) -> tuple[int, int, int, int]:
    return found.documents, found.chars, found.only_documents, found.only_chars


def table(rows: Sequence[Removed]) -> Table:
    """For a terminal: `share` and `share of characters` are of what came in to the segment."""
    return plain_table("What each rule removes", ("stage", *COLUMNS), [_row(row) for row in rows], names=2)


def _row(row: Removed) -> dict[str, str]:
    cells = (
        row.stage,
        row.reason,
        f"{row.documents:,}",
        f"{share(row.documents, row.of_documents):.1%}",
        f"{row.only_documents:,}",
        f"{row.documents - row.only_documents:,}",
        f"{row.chars:,}",
        f"{share(row.chars, row.of_chars):.1%}",
    )
    return dict(zip(("stage", *COLUMNS), cells, strict=True))


def as_json(rows: Sequence[Removed]) -> str:
    return orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2).decode()
