# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Splitting text into words, as bounds in the UTF-8 buffer: no string is built.

`word_groups` goes through a column with one of two splitters:

- `english`: spaCy's English words, for limits that were published for datatrove (`english_words.py`).
- `unicode`: every other alphabet, without a table of any language. A word is a run of letters, marks and numbers. An
  apostrophe, a middle dot or a joiner between letters stays inside, so does a full stop or comma between digits, and
  "_". Every other character is a word of its own, but a run of full stops is one. Scripts that are written without
  spaces have no word that a table of characters could find, so there a character with its marks is one word: Han, kana,
  Thai, Lao, Khmer, Burmese. Limits published for segmented words do not hold for them: derive your own.

A word is (start, end), int32, in bytes from the start of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numba import int64, njit

from gristmill.stages.kernels.english import ENGLISH
from gristmill.stages.kernels.english_words import english_words, write_word
from gristmill.stages.kernels.memory import flags_of, inner, peek8, point_at
from gristmill.stages.kernels.unicode import ALPHA, DIGIT, MARK, SPACE, TABLES, UNSEGMENTED, WORD


@inner
def _joins(point, left, right):  # type: ignore[no-untyped-def]
    """Whether the character stays inside a word between two characters of the classes left and right."""
    if point == 0x5F or point == 0x200C or point == 0x200D or point == 0xAD:  # _ and what joins letters unseen
        return True
    if point == 0x27 or point == 0x2019 or point == 0xB7:  # ' ’ ·
        return left & ALPHA != 0 and right & ALPHA != 0
    if point == 0x2E or point == 0x2C:
        return left & DIGIT != 0 and right & DIGIT != 0
    return False


@njit(nogil=True, cache=True)
def unicode_words(data, offsets, first, last, classes, starts, ends, counts):  # type: ignore[no-untyped-def]
    """Splits documents first..last-1 into words of any alphabet; returns their number. As `english_words`.

    classes: `unicode.TABLES`.
    """
    text = int64(data.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    first_start, first_end = int64(starts.ctypes.data), int64(ends.ctypes.data)
    n = 0
    for document in range(first, last):
        base, end = text + offsets[document], text + offsets[document + 1]
        n_before = n
        p = base
        while p < end:
            start = p
            point, size = point_at(p, end)
            flags = flags_of(page, table, point)
            p += size
            if flags & SPACE:
                continue
            if flags & UNSEGMENTED:
                while p < end:  # the marks of this character
                    point, size = point_at(p, end)
                    if not flags_of(page, table, point) & MARK:
                        break
                    p += size
            elif flags & WORD or point == 0x5F:
                while p < end:
                    point, size = point_at(p, end)
                    right = flags_of(page, table, point)
                    if right & UNSEGMENTED:
                        break
                    if not right & WORD:
                        q = p + size
                        following = flags_of(page, table, point_at(q, end)[0]) if q < end else 0
                        if following & UNSEGMENTED or not following & WORD or not _joins(point, flags, following):
                            break
                    flags = right
                    p += size
            elif point == 0x2E:
                while p < end and peek8(p) == 0x2E:
                    p += 1
            n = write_word(start, p, n, base, first_start, first_end)
        counts[document] = n - n_before
    return n


Splitter = Literal["english", "unicode"]
GROUP_BYTES = 1 << 19  # text whose word bounds are held at once; small enough for the processor's cache


@dataclass(frozen=True)
class WordGroup:
    """The words of documents first..last-1 of a column, document after document."""

    first: int
    last: int
    starts: np.ndarray  # (words,) int32, bytes from the start of the document
    ends: np.ndarray  # (words,) int32
    counts: np.ndarray  # (documents of the column,) int64; those of first..last-1 are set


def word_groups(offsets: np.ndarray, data: np.ndarray, splitter: Splitter = "english") -> Iterator[WordGroup]:
    """Splits a column's documents, group after group; the arrays of a group are overwritten by the next."""
    documents = len(offsets) - 1
    counts = np.zeros(documents, np.int64)
    starts = ends = np.empty(0, np.int32)
    first = 0
    while first < documents:
        reach = int(np.searchsorted(offsets, offsets[first] + GROUP_BYTES, side="right")) - 1
        last = min(max(reach, first + 1), documents)
        size = int(offsets[last] - offsets[first])
        if size > len(starts):  # a word has at least one byte; pages that are never written cost nothing
            starts, ends = np.empty(size, np.int32), np.empty(size, np.int32)
        if splitter == "english":
            n = english_words(data, offsets, first, last, ENGLISH, starts, ends, counts)
        else:
            n = unicode_words(data, offsets, first, last, TABLES, starts, ends, counts)
        yield WordGroup(first, last, starts[:n], ends[:n], counts)
        first = last


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    for splitter in get_args(Splitter):
        list(word_groups(np.array([0, 3]), np.frombuffer(b"a-b", np.uint8), splitter))
