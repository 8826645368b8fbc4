"""Stop words of each language, from the documents of a run: as FineWeb2 takes them from what it has of a language.

A stop word is a word that makes up more than MIN_SHARE of all words with a letter; where fewer than MIN_STOP_WORDS do,
the most frequent ones fill up to that number (Penedo et al. 2025, FineWeb2). Words are those of the splitter that the
language has in the run, in the case written, for that is how `gopher_quality` looks for them.

Texts are those that the run has: of documents that the segment kept, and of the sample of dropped ones that reached the
stage. Of a language with more documents than the two limits below, those with the smallest hashes of their id are
taken: the same whatever the shards. Words are counted in the half with the higher language scores: pages that are half
English would make English stop words those of every language.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gristmill.pipelines.reached import Reached
from gristmill.stages.documents import column
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.words import Splitter, word_groups

MIN_SHARE = 0.008  # of all words with a letter
MIN_STOP_WORDS = 8
WORDS_OF_DOCUMENTS = 2_000  # of a language, whose words are counted
MEASURED_DOCUMENTS = 20_000  # of a language, in which stop words are then looked for
BATCH_DOCUMENTS = 1_024


@dataclass
class StopWords:
    """What was found for one language."""

    words: tuple[str, ...] = ()  # the most frequent first
    documents: int = 0  # whose words were counted
    bytes: int = 0  # of those
    all_documents: int = 0  # that the run has of the language at this stage
    all_bytes: int = 0
    found: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (m,) float64: different stop words of a document
    counted: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # (m,) bool: documents of the reference


def stop_words_of(
    reached: Reached, stage: Any, languages: Sequence[str], documents: Mapping[str | None, int], reference: str | None
) -> dict[str, StopWords]:
    """Language -> its stop words, and how many different ones each document has.

    stage: `gopher_quality` as the run had it. documents: how many of a language reached it. reference: the source whose
    documents words are taken from; all where not given.
    """
    out = {language: StopWords() for language in languages}
    words: dict[str, Counter[str]] = {language: Counter() for language in languages}
    sure = _middle_scores(reached, languages, documents)
    for batch in _documents(reached, languages, ("text", "language_score")):
        for language, own in _by_language(batch):
            entry = out[language]
            entry.all_documents += own.num_rows
            entry.all_bytes += int(pc.sum(own["bytes"]).as_py() or 0)
            some = _sampled(own.filter(pc.is_valid(own["text"])), WORDS_OF_DOCUMENTS, documents[language])
            if reference is not None:
                some = some.filter(pc.equal(some["source"], reference))
            some = some.filter(pa.array(_scores(some) >= sure[language]))
            entry.documents += some.num_rows
            entry.bytes += int(pc.sum(some["bytes"]).as_py() or 0)
            words[language].update(count_words(some["text"], stage.for_language(language).words))
    for language, counts in words.items():
        out[language].words = most_frequent(counts)
    _look_for(reached, stage, out, documents, reference)
    return out


def _middle_scores(reached: Reached, languages: Sequence[str], documents: Mapping[str | None, int]) -> dict[str, float]:
    """Language -> the median of its language scores, of the documents whose words are counted."""
    scores: dict[str, list[np.ndarray]] = {language: [] for language in languages}
    for batch in _documents(reached, languages, ("language_score",)):
        for language, own in _by_language(batch):
            scores[language].append(_scores(_sampled(own, WORDS_OF_DOCUMENTS, documents[language])))
    return {name: float(np.median(np.concatenate(found))) if found else 0.0 for name, found in scores.items()}


def _scores(batch: pa.RecordBatch) -> np.ndarray:
    """(n,) float64; 0 where a document has none."""
    return np.nan_to_num(column(batch, "language_score"))


def most_frequent(counts: Mapping[str, int]) -> tuple[str, ...]:
    """The words whose share is above MIN_SHARE, or else the MIN_STOP_WORDS most frequent; ties by code points."""
    total = sum(counts.values())
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    above = sum(counts[word] > MIN_SHARE * total for word in ordered[: int(1 / MIN_SHARE) + 1])
    return tuple(ordered[: max(above, MIN_STOP_WORDS)])


def count_words(text: pa.Array, splitter: Splitter) -> dict[str, int]:
    """string (n,) -> each word with a letter, and how often it occurs."""
    out: Counter[str] = Counter()
    offsets, data = string_views(text)
    for group in word_groups(offsets, data, splitter):
        of_word = np.repeat(offsets[group.first : group.last], group.counts[group.first : group.last])
        # A string array whose elements are words and, between them, what is no word: nothing is copied.
        bounds = np.zeros(2 * len(group.starts) + 1, np.int64)
        bounds[0:-1:2], bounds[1::2] = of_word + group.starts, of_word + group.ends
        bounds[-1] = bounds[-2] if len(bounds) > 1 else 0
        buffers = [None, pa.py_buffer(bounds), pa.py_buffer(data)]
        pieces = pa.LargeStringArray.from_buffers(2 * len(group.starts), buffers[1], buffers[2])
        counts = pc.value_counts(pieces.take(pa.array(np.arange(0, 2 * len(group.starts), 2))))
        lettered = counts.filter(pc.match_substring_regex(counts.field("values"), r"\pL"))
        out.update(dict(zip(lettered.field("values").to_pylist(), lettered.field("counts").to_pylist(), strict=True)))
    return dict(out)


def _look_for(
    reached: Reached,
    stage: Any,
    out: Mapping[str, StopWords],
    documents: Mapping[str | None, int],
    reference: str | None,
) -> None:
    """Sets `found` and `counted` of every language."""
    found: dict[str, list[np.ndarray]] = {language: [] for language in out}
    counted: dict[str, list[np.ndarray]] = {language: [] for language in out}
    for batch in _documents(reached, list(out), ("text",)):
        for language, own in _by_language(batch):
            some = _sampled(own.filter(pc.is_valid(own["text"])), MEASURED_DOCUMENTS, documents[language])
            if not some.num_rows or not out[language].words:
                continue
            tuned = stage.for_language(language).model_copy(update={"stop_words": out[language].words})
            found[language].append(tuned.measure(some.select(["text"]))["gopher_quality.stop_words"])
            of_reference = pc.equal(some["source"], reference or "").to_numpy(zero_copy_only=False)
            counted[language].append(np.ones(some.num_rows, bool) if reference is None else of_reference)
    for language, entry in out.items():
        if found[language]:
            entry.found, entry.counted = np.concatenate(found[language]), np.concatenate(counted[language])


def _documents(reached: Reached, languages: Sequence[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """doc_id, source, language and `columns` of the documents that reached the stage; `bytes` where `text` is one of
    them: the text is null where it is gone. A column that the run does not have is null."""
    for kind in ("kept", "dropped"):
        for part in reached.run.parts(kind, reached.segment):
            with reached.run.open_parquet(part) as file:
                asked = ["doc_id", "source", "language", *columns, *(("stage", "bytes") if kind == "dropped" else ())]
                there = set(file.schema_arrow.names)
                for batch in file.iter_batches(BATCH_DOCUMENTS, columns=[name for name in asked if name in there]):
                    own = batch.filter(_wanted(reached, batch, languages))
                    if "text" in columns and kind == "kept":
                        own = own.append_column("bytes", pc.binary_length(own["text"]).cast(pa.int64()))
                    for name in columns:
                        if name not in there:
                            own = own.append_column(name, pa.nulls(own.num_rows, pa.float64()))
                    yield own


def _wanted(reached: Reached, batch: pa.RecordBatch, languages: Sequence[str]) -> pa.Array:
    """(n,) bool: documents in one of the languages that reached the stage."""
    rows = pc.is_in(batch["language"], value_set=pa.array(languages, pa.string()))
    if reached.only:
        rows = pc.and_(rows, pc.is_in(batch["source"], value_set=pa.array(reached.only)))
    if "stage" in batch.schema.names:
        rows = pc.and_(rows, pc.is_in(batch["stage"], value_set=pa.array((reached.stage, *reached.later))))
    return rows


def _by_language(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    for language in pc.unique(batch["language"]).to_pylist():
        yield language, batch.filter(pc.equal(batch["language"], language))


def _sampled(batch: pa.RecordBatch, wanted: int, of: int) -> pa.RecordBatch:
    """About `wanted` of the `of` documents of a language; all where there are no more."""
    if of <= wanted:
        return batch
    below = int(wanted / of * 2**64)
    return batch.filter(
        pa.array([xxhash.xxh3_64_intdigest(i) < below for i in batch["doc_id"].to_pylist()], pa.bool_())
    )
