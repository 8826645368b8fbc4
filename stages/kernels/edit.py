# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Editing lines: the line rules of C4, and counting sentences as spaCy's sentencizer does.

`c4_lines` writes the lines that stay into a new buffer and says where each begins and ends; `count_sentences` counts
the sentences of those lines; `pack` makes the new column.

Most of a text is passed over in blocks: what the rules look for (a "[", a phrase, a full stop) is rare, so a search for
bytes that it must have comes first, and only where it finds some is the text looked at byte by byte.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gristmill.stages.kernels.english import AT_PAGE, AT_TABLE, ENGLISH, PUNCTUATION, SENTENCE
from gristmill.stages.kernels.english import SPACE as ENGLISH_SPACE
from gristmill.stages.kernels.english_words import run_words
from gristmill.stages.kernels.lines import ends_with_ellipsis, line_end, skip_space, trim_space
from gristmill.stages.kernels.memory import (
    before,
    byte_class,
    flags_of,
    inner,
    lowest_bit,
    peek8,
    peek16,
    peek64,
    point_at,
    poke8,
    poke64,
)
from gristmill.stages.kernels.unicode import DIGIT, SPACE, TABLES

# Columns of `c4_lines`: lines, counted once, under the first rule that takes them.
LINES = 0
LONG_WORD_LINES = 1
UNFINISHED_LINES = 2  # without terminal punctuation, or with an ellipsis
FEW_WORD_LINES = 3
JAVASCRIPT_LINES = 4
POLICY_LINES = 5
KEPT_LINES = 6
LOREM_IPSUM_LINES = 7  # of the lines that reach this rule; they count as what the later rules make of them
CURLY_BRACKET_LINES = 8
CITATIONS = 9  # taken out of kept lines
C4_COLUMNS = 10

# Phrases, each a bit of what `_phrases` finds.
_LOREM_IPSUM, _JAVASCRIPT, _CURLY_BRACKET = 1, 2, 1 << 8
_POLICY = 0xFC
_PHRASES = (
    b"lorem ipsum",
    b"javascript",
    b"terms of use",
    b"privacy policy",
    b"cookie policy",
    b"uses cookies",
    b"use of cookies",
    b"use cookies",
)
_LONGEST = 16


def _phrase_table() -> np.ndarray:
    """(3 * 256 + 8 * 16,) uint8: which phrases can have a byte first, second, third, in any case; then the phrases."""
    table = np.zeros(3 * 256 + 8 * _LONGEST, np.uint8)
    for bit, phrase in enumerate(_PHRASES):
        for place in range(3):
            for byte in {phrase[place], phrase[place : place + 1].upper()[0]}:
                table[256 * place + byte] |= 1 << bit
        table[768 + _LONGEST * bit :][: len(phrase)] = np.frombuffer(phrase, np.uint8)
    return table


PHRASES = _phrase_table()


_bracket64 = byte_class(64, (91, 91))
_curly64 = byte_class(64, (123, 123))
_a64, _c64, _i64, _j64, _k64, _m64, _o64, _p64, _r64, _s64, _v64 = (
    byte_class(64, (letter, letter), ignore_case=True) for letter in b"acijkmoprsv"
)
_kelvin64 = byte_class(64, (0xE2, 0xE2))
_ender64 = byte_class(
    64, (33, 33), (46, 46), (63, 63), (0xD6, 0xD6), (0xD8, 0xD8), (0xDB, 0xDC), (0xDF, 0xE3), (0xEA, 0xEA), (0xEF, 0xF0)
)  # what a character that ends sentences can begin with


@inner
def _bracket_at(p, end):  # type: ignore[no-untyped-def]
    """Where the first "[" in [p, end) is, or `end`."""
    while p + 64 <= end:
        found = _bracket64(p)
        if found:
            return p + lowest_bit(found)
        p += 64
    while p < end and peek8(p) != 91:
        p += 1
    return p


@inner
def _phrase_near(p, end):  # type: ignore[no-untyped-def]
    """A place in [p, end) before which no "{" lies, and no letters by which a phrase is found; `end` where p is that.

    The letters, in any case: j-a-v, v-a-c, r-m-s, i-p-s, and o-k-i of "cookie", whose k may be the Kelvin sign.
    """
    while p + 66 <= end:
        a, s = _a64(p + 1), _s64(p + 2)
        found = _curly64(p) | _j64(p) & a & _v64(p + 2) | _v64(p) & a & _c64(p + 2)
        found |= _r64(p) & _m64(p + 1) & s | _i64(p) & _p64(p + 1) & s
        found |= _o64(p) & (_k64(p + 1) & _i64(p + 2) | _kelvin64(p + 1))
        if found:
            return p + lowest_bit(found)
        p += 64
    return p


@inner
def _ender_at(p, stop, limit):  # type: ignore[no-untyped-def]
    """Where the first byte in [p, stop) is that a character that ends sentences can begin with, or `stop`.

    limit: the end of what may be read, at or behind `stop`.
    """
    while p < stop and p + 64 <= limit:
        found = _ender64(p)
        if found:
            return min(p + lowest_bit(found), stop)
        p += 64
    while p < stop:
        b = peek8(p)
        if b == 33 or b == 46 or b == 63 or b >= 0xD6:
            return p
        p += 1
    return stop


@inner
def _is_phrase(p, end, phrase):  # type: ignore[no-untyped-def]
    """Whether the text at p, in lower case, begins with the phrase (ASCII, closed by 0)."""
    while True:
        wanted = peek8(phrase)
        if wanted == 0:
            return True
        if p >= end:
            return False
        b = peek8(p)
        if b == 0xE2 and p + 2 < end and peek8(p + 1) == 0x84 and peek8(p + 2) == 0xAA:
            b = 107  # the Kelvin sign: the one character outside ASCII whose lower case is in a phrase
            p += 2
        if b != wanted and not (65 <= b <= 90 and b + 32 == wanted):
            return False
        p += 1
        phrase += 1


@inner
def _phrases(start, end, table):  # type: ignore[no-untyped-def]
    """Bits of the phrases in [start, end), and _CURLY_BRACKET for a "{"."""
    found = 0
    for p in range(start, end):
        b = peek8(p)
        if b == 123:
            found |= _CURLY_BRACKET
        may = peek8(table + b)
        if may and p + 2 < end:
            may &= peek8(table + 256 + peek8(p + 1)) & peek8(table + 512 + peek8(p + 2)) & ~found
            bit = 0
            while may:
                if may & 1 and _is_phrase(p, end, table + 768 + _LONGEST * bit):
                    found |= 1 << bit
                may >>= 1
                bit += 1
    return found


@inner
def _space_size(p, end, page, table):  # type: ignore[no-untyped-def]
    """Bytes of the white space at p, or 0."""
    b = peek8(p)
    if b < 128:
        return 1 if peek16(table + 2 * b) & SPACE else 0
    if b == 0xC2 or 0xE1 <= b <= 0xE3:  # all white space outside ASCII begins with these
        point, size = point_at(p, end)
        return size if flags_of(page, table, point) & SPACE else 0
    return 0


@inner
def _has_words(start, end, wanted, page, table):  # type: ignore[no-untyped-def]
    """Whether [start, end) has as many words between white space."""
    words = 0
    inside = False
    p = start
    while p < end and words < wanted:
        size = _space_size(p, end, page, table)
        words += not size and not inside
        inside = size == 0
        p += size if size else 1
    return words >= wanted


@inner
def _has_long_word(start, end, limit, page, table):  # type: ignore[no-untyped-def]
    """Whether [start, end) has a word between white space of more than `limit` characters."""
    space = start - 1  # a longer word has more bytes: there is none where ASCII white space comes often enough
    while space + limit + 1 < end:
        p = space + limit + 1
        while p > space and not (peek8(p) < 128 and peek16(table + 2 * peek8(p)) & SPACE):
            p -= 1
        if p == space:
            break
        space = p
    if space + limit + 1 >= end:
        return False
    length = 0
    p = space + 1
    while p < end:
        size = _space_size(p, end, page, table)
        length = 0 if size else length + (peek8(p) & 0xC0 != 0x80)
        if length > limit:
            return True
        p += size if size else 1
    return False


@inner
def _copy(start, end, to):  # type: ignore[no-untyped-def]
    """Copies [start, end) and returns the end of the copy."""
    while start + 8 <= end:
        poke64(to, peek64(start))
        start += 8
        to += 8
    while start < end:
        poke8(to, peek8(start))
        start += 1
        to += 1
    return to


@inner
def _citation(p, end, page, table):  # type: ignore[no-untyped-def]
    """Bytes of the citation at p, or 0: `\\[\\d*]|\\[edit]|\\[citation needed]`."""
    q = p + 1
    while q < end:
        point, size = point_at(q, end)
        if not flags_of(page, table, point) & DIGIT:
            break
        q += size
    if q < end and peek8(q) == 93:
        return q + 1 - p
    if p + 6 <= end and peek8(p + 1) == 101 and peek8(p + 2) == 100 and peek8(p + 3) == 105:  # edit
        return 6 if peek8(p + 4) == 116 and peek8(p + 5) == 93 else 0
    if p + 17 > end:
        return 0
    q = p + 1
    for wanted in (99, 105, 116, 97, 116, 105, 111, 110, 32, 110, 101, 101, 100, 101, 100, 93):  # citation needed]
        if peek8(q) != wanted:
            return 0
        q += 1
    return 17


@njit(nogil=True, cache=True)
def c4_lines(  # type: ignore[no-untyped-def]
    offsets,
    data,
    classes,
    phrases,
    max_word_chars,
    min_words,
    citations,
    punctuation,
    javascript,
    policy,
    new_data,
    line_starts,
    line_ends,
    lines,
    out,
):
    """Writes the lines that C4's rules keep, stripped, each followed by "\\n" but the last of a document.

    offsets, data: as `string_views` gives them. max_word_chars, min_words: int64, -1 for no limit. citations,
    punctuation, javascript, policy: int64, whether citations are taken out and these lines removed.
    new_data (bytes of the column,) uint8; line_starts (lines + 1,) and line_ends (lines,) int64: where each kept line
    is in it; lines (documents + 1,) int64: the kept lines of document i are lines[i]..lines[i + 1] - 1.
    out (documents, C4_COLUMNS) int64. Returns the number of kept lines.
    """
    text, phrase_table = int64(data.ctypes.data), int64(phrases.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    begin = int64(new_data.ctypes.data)
    at = begin
    n = 0
    lines[0] = 0
    for document in range(len(offsets) - 1):
        end = text + offsets[document + 1]
        p = text + offsets[document]
        row = out[document]
        row[:] = 0
        first = n
        next_bracket = next_phrase = p  # there is none between p and these
        while p < end:
            stop, size = line_end(p, end)
            start = skip_space(p, stop, page, table)
            p = stop + size
            stop = trim_space(start, stop, page, table)
            row[LINES] += 1
            if max_word_chars >= 0 and _has_long_word(start, stop, max_word_chars, page, table):
                row[LONG_WORD_LINES] += 1
                continue
            enough_words = _has_words(start, stop, min_words, page, table)
            if next_bracket < stop:
                next_bracket = _bracket_at(max(next_bracket, start), end)
            if next_phrase < stop:
                next_phrase = _phrase_near(max(next_phrase, start), end)
            cited = 0
            target = at if n == first else at + 1  # room for the "\n" before it
            line, write = start, stop  # the line where it is, or, without its citations, where it goes
            if citations and next_bracket < stop:
                line = write = target
                while start < stop:
                    length = _citation(start, stop, page, table) if peek8(start) == 91 else 0
                    if length:
                        start += length
                        cited += 1
                    else:
                        poke8(write, peek8(start))
                        write += 1
                        start += 1
            if punctuation:
                last = peek8(write - 1) if write > line else 0
                ends = last == 46 or last == 63 or last == 33 or last == 34 or last == 39
                three = last == 46 and ends_with_ellipsis(line, write)
                if not ends or three:
                    row[UNFINISHED_LINES] += 1
                    continue
            if not enough_words:
                row[FEW_WORD_LINES] += 1
                continue
            found = _phrases(line, write, phrase_table) if cited or next_phrase < stop else 0
            row[LOREM_IPSUM_LINES] += (found & _LOREM_IPSUM) != 0
            if javascript and found & _JAVASCRIPT:
                row[JAVASCRIPT_LINES] += 1
                continue
            row[CURLY_BRACKET_LINES] += (found & _CURLY_BRACKET) != 0
            if policy and found & _POLICY:
                row[POLICY_LINES] += 1
                continue
            row[KEPT_LINES] += 1
            row[CITATIONS] += cited
            if target > at:
                poke8(at, 10)
            at = write if line == target else _copy(line, write, target)
            line_starts[n], line_ends[n] = target - begin, at - begin
            n += 1
        lines[document + 1] = n
    line_starts[n] = at - begin
    return n


@inner
def _run_around(p, at, stop, page, table):  # type: ignore[no-untyped-def]
    """The run of characters without white space in [p, stop) that `at` is in -> (start, end)."""
    start = at
    while start > p:
        q = before(p, start)
        if flags_of(page, table, point_at(q, start)[0]) & ENGLISH_SPACE:
            break
        start = q
    while at < stop:
        point, size = point_at(at, stop)
        if flags_of(page, table, point) & ENGLISH_SPACE:
            break
        at += size
    return start, at


@inner
def _has_ender(p, stop, page, table):  # type: ignore[no-untyped-def]
    """Whether [p, stop) has a character that ends sentences."""
    while p < stop:
        point, size = point_at(p, stop)
        if flags_of(page, table, point) & SENTENCE:
            return True
        p += size
    return False


@inner
def _is_punctuation(p, stop, page, table):  # type: ignore[no-untyped-def]
    """Whether [p, stop) has no other characters."""
    while p < stop:
        point, size = point_at(p, stop)
        if not flags_of(page, table, point) & PUNCTUATION:
            return False
        p += size
    return True


@njit(nogil=True, cache=True)
def count_sentences(data, line_starts, line_ends, tables, out):  # type: ignore[no-untyped-def]
    """Counts the sentences of each line as spaCy's sentencizer does. data, line_starts, line_ends: as `c4_lines` gives
    them. tables: `english.ENGLISH`. out (lines,) int64, filled.

    A sentence begins with the first word that is not punctuation after a word that ends sentences ("." or "?", one
    character), or with white space there that is more than one space. Every line has one at least. Only a run of
    characters that holds such a character is split into words; of others it is enough to know their characters.
    """
    text, english = int64(data.ctypes.data), int64(tables.ctypes.data)
    page, table = english + AT_PAGE, english + AT_TABLE
    limit = text + line_starts[len(line_ends)]
    starts, ends = np.empty(256, np.int32), np.empty(256, np.int32)
    for line in range(len(line_ends)):
        p, stop = text + line_starts[line], text + line_ends[line]
        sentences = 1
        ended = False
        while True:  # p is the start of the line or the end of a run
            if ended:
                run = p
                while run < stop:
                    point, size = point_at(run, stop)
                    if not flags_of(page, table, point) & ENGLISH_SPACE:
                        break
                    run += size
                if run > p and not (run - p == 1 and peek8(p) == 32):
                    sentences += 1
                    ended = False
                p = at = run
            else:
                at = _ender_at(p, stop, limit)
                while at < stop and not flags_of(page, table, point_at(at, stop)[0]) & SENTENCE:
                    at = _ender_at(at + 1, stop, limit)
            if at >= stop:
                break
            run, behind = _run_around(p, at, stop, page, table)
            p = behind
            if not _has_ender(run, behind, page, table):
                if ended and not _is_punctuation(run, behind, page, table):
                    sentences += 1
                    ended = False
                continue
            if behind - run > len(starts):
                starts, ends = np.empty(behind - run, np.int32), np.empty(behind - run, np.int32)
            words = run_words(
                run, behind, limit, 0, run, english, int64(starts.ctypes.data), int64(ends.ctypes.data), len(starts)
            )
            for w in range(words):
                q, word_end = run + starts[w], run + ends[w]
                point, size = point_at(q, word_end)
                if q + size == word_end and flags_of(page, table, point) & SENTENCE:
                    ended = True
                elif ended and not _is_punctuation(q, word_end, page, table):
                    sentences += 1
                    ended = False
        out[line] = sentences


@njit(nogil=True, cache=True)
def pack(data, line_starts, line_ends, lines, classes, new_data, new_offsets):  # type: ignore[no-untyped-def]
    """Copies each document's lines from `c4_lines` into new_data, stripped. new_offsets (documents + 1,) int32."""
    text, begin = int64(data.ctypes.data), int64(new_data.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    at = begin
    new_offsets[0] = 0
    for document in range(len(lines) - 1):
        if lines[document] < lines[document + 1]:
            start = text + line_starts[lines[document]]
            end = text + line_ends[lines[document + 1] - 1]
            start = skip_space(start, end, page, table)
            at = _copy(start, trim_space(start, end, page, table), at)
        new_offsets[document + 1] = at - begin


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    data, offsets = np.frombuffer(b"One, two.", np.uint8), np.array([0, 9])
    new, starts, ends, lines = (
        np.empty(9, np.uint8),
        np.empty(3, np.int64),
        np.empty(2, np.int64),
        np.empty(2, np.int64),
    )
    out = np.empty((1, C4_COLUMNS), np.int64)
    c4_lines(offsets, data, TABLES, PHRASES, 1000, 1, 1, 1, 1, 1, new, starts, ends, lines, out)
    count_sentences(new, starts[:2], ends[:1], ENGLISH, np.empty(1, np.int64))
    pack(new, starts, ends, lines, TABLES, np.empty(9, np.uint8), np.empty(2, np.int32))
