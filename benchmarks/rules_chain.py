"""The rule stages beside datatrove's and dolma's, for `rules.py`: what each round runs, and where decisions differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from common import batches, in_peer_python, note, with_progress

from gristmill.stages.c4 import C4
from gristmill.stages.documents import MAX_BATCH_DOCUMENTS
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import edit, measures, words
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.language import Language

STAGES = {  # in FineWeb's order and with its C4
    "gopher_repetition": GopherRepetition(),
    "gopher_quality": GopherQuality(),
    "c4": C4(require_end_punctuation=False),
    "fineweb": FineWeb(),
}


def warm() -> None:
    for module in (words, measures, edit):
        module.warm()


def measure_everything(parts: list[pa.RecordBatch]) -> None:
    for batch in parts:
        measures.forget()
        for stage in STAGES.values():
            if isinstance(stage, C4):
                stage.edit(batch["text"])
            else:
                stage.measure(batch)


def chain(parts: list[pa.RecordBatch]) -> int:
    """Documents kept by all stages."""
    kept = 0
    for part in parts:
        measures.forget()
        batch = part
        for stage in STAGES.values():
            batch = stage(batch).kept
        kept += batch.num_rows
    return kept


def datatrove_filters() -> dict[str, Any]:
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    return {
        "gopher_repetition": GopherRepetitionFilter(),
        "gopher_quality": GopherQualityFilter(),
        "c4": C4QualityFilter(filter_no_terminal_punct=False),
        "fineweb": FineWebQualityFilter(),
    }


def datatrove_chain(filters: dict[str, Any], texts: list[str]) -> int:
    from datatrove.data import Document

    kept = 0
    for text in texts:
        document = Document(text=text, id="0")
        kept += all(step.filter(document) is True for step in filters.values())
    return kept


@contextlib.contextmanager
def dolma_tagger(python: Path, texts: list[str]) -> Iterator[tuple[str, Callable[[], float]]]:
    """(dolma and its version, a function that tags the texts once and gives its CPU seconds), in a process of its own.

    python: an interpreter that has dolma. Raises SystemExit where it does not start.
    """
    with in_peer_python("--dolma-python", python, "peer_dolma.py", texts) as (version, tag):
        yield f"dolma {version}", tag


def english(texts: Iterator[str], count: int, max_bytes: int) -> list[str]:
    """The first `count` texts of at most max_bytes that the language stage calls English."""
    stage, found, part = Language(keep=("en",)), [], []
    for text in texts:
        if len(text.encode()) <= max_bytes:
            part.append(text)
        if len(part) == MAX_BATCH_DOCUMENTS // 8:
            found += [row for batch in batches(part) for row in stage(batch).kept["text"].to_pylist()]
            part = []
            note(f"{len(found):,} of {count:,} English documents")
        if len(found) >= count:
            break
    found += [row for batch in batches(part) for row in stage(batch).kept["text"].to_pylist()] if part else []
    return found[:count]


def differences(texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """For each filter the documents on which the decision differs, or for C4 the text that it leaves."""
    from datatrove.data import Document

    ours = {name: _outcomes(stage, texts) for name, stage in STAGES.items()}
    filters = datatrove_filters()
    order = sorted(filters, key=lambda name: name == "c4")  # it edits the document, and the others share their words
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in filters}
    for i, text in enumerate(with_progress(texts, "documents compared", 500)):
        document = Document(text=text, id=str(i))
        for name in order:
            verdict = filters[name].filter(document)
            reasons, left, values = ours[name][i]
            same_text = verdict is not True or reasons is not None or document.text == left
            if (verdict is True) == (reasons is None) and same_text:
                continue
            theirs = None if verdict is True else verdict[1]
            row = {"document": i, "ours": reasons, "datatrove": theirs, "why": _why(text, same_text)}
            found[name].append({**row, "measures": values, "text": text})
    return found


def _outcomes(stage: Any, texts: list[str]) -> list[tuple[list[str] | None, str, dict[str, float]]]:
    """(reasons or none, the text that is left, measures) of each document."""
    out: list[Any] = [None] * len(texts)
    names = [measure.column for measure in stage.measures]
    for batch in batches(texts):
        result = stage(batch)
        for part in (result.kept, result.dropped):
            for row in part.to_pylist():
                out[int(row["doc_id"])] = (row.get("reasons"), row["text"], {name: row[name] for name in names})
    return out


def _why(text: str, same_text: bool) -> str:
    """The first words that differ from spaCy's, or where else to look."""
    from datatrove.utils.text import split_into_words

    if not same_text:
        return "the text that is left differs"
    column = pa.array([text])
    offsets, data = string_views(column)
    group = next(words.word_groups(offsets, data))
    utf8 = np.asarray(data).tobytes()[offsets[0] :]
    mine = [utf8[a:b].decode() for a, b in zip(group.starts, group.ends, strict=True)]
    theirs = split_into_words(text)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            return f"words {i} on: {mine[i : i + 4]}, spaCy {theirs[i : i + 4]}"
    return "the words are equal" if len(mine) == len(theirs) else f"{len(mine)} words, spaCy {len(theirs)}"
