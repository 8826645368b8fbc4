"""Everything that the rule stages measure of a text, in one call, remembered for the stages that follow.

Repetition, quality and FineWeb's rules all need the words of a document. When they follow each other in a recipe, the
second stage gets most of the documents that the first one got. So the figures of the last call of each way to find
words are kept, by a hash of 128 bits of the text, and only documents that are new are split. Nothing depends on it but
time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numba import int64, njit, uint64

from gristmill.stages.kernels import lines, ngrams, words
from gristmill.stages.kernels.buffers import mix64, string_views
from gristmill.stages.kernels.memory import peek8, peek64
from gristmill.stages.kernels.unicode import TABLES

GOPHER_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # Rae et al. 2021, appendix A1.1
SHORT_LINE_CHARS = 30  # FineWeb


@dataclass(frozen=True)
class Measures:
    """Counts of each document, int64; columns are named in the kernel modules."""

    lines: np.ndarray  # (documents, lines.LINE_COLUMNS)
    words: np.ndarray  # (documents, ngrams.WORD_COLUMNS)
    ngrams: np.ndarray  # (documents, ngrams.NGRAM_COLUMNS)


@njit(nogil=True, cache=True)
def _text_keys(offsets, data, keys):  # type: ignore[no-untyped-def]
    """keys (documents, 2) uint64: a hash of 128 bits of each text."""
    text = int64(data.ctypes.data)
    for document in range(len(offsets) - 1):
        p, end = text + offsets[document], text + offsets[document + 1]
        a, b = uint64(end - p) ^ uint64(0x9E3779B97F4A7C15), uint64(0xC2B2AE3D27D4EB4F)
        while p < end:
            if p + 8 <= end:
                word = peek64(p)
            else:
                word = uint64(0)
                for q in range(p, end):
                    word = (word << uint64(8)) | uint64(peek8(q))
            a = (a ^ word) * uint64(0x9FB21C651E98DF25)
            a ^= a >> uint64(32)
            b = (b + word) * uint64(0xD6E8FEB86659FD93)
            b ^= b >> uint64(29)
            p += 8
        keys[document, 0], keys[document, 1] = mix64(a), mix64(b)


@njit(nogil=True, cache=True)
def _look_up(known, keys, rows):  # type: ignore[no-untyped-def]
    """rows (m,) int64: for each of keys (m, 2) the row of known (n, 2) that equals it, or -1."""
    size = 16
    while size < 2 * len(known):
        size *= 2
    slots = np.full(size, -1, np.int32)
    for i in range(len(known)):
        slot = int64(known[i, 0]) & (size - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        slots[slot] = i
    for i in range(len(keys)):
        slot = int64(keys[i, 0]) & (size - 1)
        rows[i] = -1
        while slots[slot] >= 0:
            k = slots[slot]
            if known[k, 0] == keys[i, 0] and known[k, 1] == keys[i, 1]:
                rows[i] = k
                break
            slot = (slot + 1) & (size - 1)


@dataclass(frozen=True)
class _Settings:
    splitter: words.Splitter
    stop_words: tuple[str, ...]
    short_line_chars: int


@dataclass
class _Memory:
    with_ngrams: bool
    keys: np.ndarray  # (documents, 2) uint64
    measures: Measures


REMEMBERED = 32_768  # documents, of all settings: with limits by language a batch is measured in groups
_last = threading.local()  # .memories: dict[_Settings, _Memory] of this thread's last calls, the latest last


def measure(
    text: pa.Array,
    *,
    with_ngrams: bool,
    splitter: words.Splitter = "english",
    stop_words: tuple[str, ...] = GOPHER_STOP_WORDS,
    short_line_chars: int = SHORT_LINE_CHARS,
) -> Measures:
    """The counts of every document of a string column. Without `with_ngrams` those of n-grams may be missing (0)."""
    settings = _Settings(splitter, stop_words, short_line_chars)
    offsets, data = string_views(text)
    keys = np.empty((len(text), 2), np.uint64)
    _text_keys(offsets, data, keys)
    memories: dict[_Settings, _Memory] = _last.__dict__.setdefault("memories", {})
    memory = memories.get(settings)
    rows = np.full(len(text), -1, np.int64)
    if memory is not None and (memory.with_ngrams or not with_ngrams):
        _look_up(memory.keys, keys, rows)
    new = np.flatnonzero(rows < 0)
    if memory is None or len(new) == len(text):
        found = _measure_all(offsets, data, settings, with_ngrams)
    elif len(new) == 0:
        found = _take(memory.measures, rows)
    else:
        fresh = _measure_all(*string_views(text.take(pa.array(new))), settings, with_ngrams)
        found = _take(memory.measures, np.maximum(rows, 0))
        for mine, theirs in ((found.lines, fresh.lines), (found.words, fresh.words), (found.ngrams, fresh.ngrams)):
            mine[new] = theirs
    # A stage that counts no n-grams must not make the next one forget them.
    complete = with_ngrams or (memory is not None and memory.with_ngrams and len(new) == 0)
    if complete or len(new):
        memories.pop(settings, None)
        memories[settings] = _Memory(complete, keys, found)
        while len(memories) > 1 and sum(len(m.keys) for m in memories.values()) > REMEMBERED:
            del memories[next(iter(memories))]
    return found


def _take(measures: Measures, rows: np.ndarray) -> Measures:
    return Measures(measures.lines[rows], measures.words[rows], measures.ngrams[rows])


def _measure_all(offsets: np.ndarray, data: np.ndarray, settings: _Settings, with_ngrams: bool) -> Measures:
    documents = len(offsets) - 1
    of_lines = np.empty((documents, lines.LINE_COLUMNS), np.int64)
    of_words = np.empty((documents, ngrams.WORD_COLUMNS), np.int64)
    of_ngrams = np.zeros((documents, ngrams.NGRAM_COLUMNS), np.int64)
    lines.line_measures(offsets, data, TABLES, settings.short_line_chars, of_lines)
    stops = ngrams.stop_table(settings.stop_words)
    hashes = powers = np.empty(0, np.uint64)
    chars, places = np.empty(0, np.int32), np.empty(1, np.int32)
    joined = np.empty(0, np.uint8)
    for group in words.word_groups(offsets, data, settings.splitter):
        if len(group.starts) > len(chars):
            hashes, powers = np.empty(len(group.starts), np.uint64), np.empty(len(group.starts), np.uint64)
            chars, places = np.empty(len(group.starts), np.int32), np.empty(len(group.starts) + 1, np.int32)
        size = int(offsets[group.last] - offsets[group.first]) + ngrams.SPARE
        if size > len(joined):
            joined = np.empty(size, np.uint8)
        ngrams.word_measures(
            data,
            offsets,
            group.first,
            group.last,
            group.starts,
            group.ends,
            group.counts,
            TABLES,
            stops,
            hashes,
            powers,
            chars,
            places,
            joined,
            of_words,
        )
        if with_ngrams:
            ngrams.ngram_measures(
                group.first, group.last, group.counts, hashes, powers, chars, places, joined, of_ngrams
            )
    return Measures(of_lines, of_words, of_ngrams)


def ratio(count: np.ndarray, of: np.ndarray) -> np.ndarray:
    """count / of, (n,) float64; 0 where there is nothing to count in, so that an empty document has a value."""
    return np.divide(count, of, out=np.zeros(len(count), np.float64), where=of != 0)


def forget() -> None:
    """Drops what this thread remembers of its last call."""
    _last.memories = {}


def warm() -> None:
    """Compiles every kernel that `measure` calls, for the types that the stages use."""
    forget()
    column = pa.array(["a-b c\n", ""])
    measure(column, with_ngrams=True)
    measure(column, with_ngrams=True)
    forget()
