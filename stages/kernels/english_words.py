# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Splitting text into English words as spaCy's blank English pipeline does.

This is what datatrove counts as words, and what the published limits of Gopher and FineWeb were run on. It follows
`spacy/tokenizer.pyx`: a run of characters without white space loses prefixes and suffixes one by one until it is a
special case or nothing comes off; what is left is a web address or is split at infixes; at last, special cases that
were taken apart are put together again.

Known difference: spaCy looks for the special cases of the last step in the whole text, so that a match across a space
(the "):" in "a) :(^") can hide one inside; here the search ends at white space.

Positions are addresses (`memory.py`).
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.english import (
    ALPHA,
    AT_FILTER,
    AT_KEYS,
    AT_KIND,
    AT_PATTERN_FILTER,
    AT_PATTERNS,
    AT_PIECES,
    AT_TAIL_KEYS,
    AT_TAIL_LAST,
    BEFORE_STOP,
    FILTER_BITS,
    ICON,
    KIND_DIGIT,
    KIND_LETTER,
    KIND_OTHER,
    KIND_SPACE,
    KIND_WIDE,
    LONGEST_SPECIAL,
    LONGEST_TAIL,
    LOWER,
    MAX_PATTERN,
    MAX_PIECES,
    PLAIN,
    PREFIX,
    QUOTE,
    SLOTS,
    SPACE,
    SUFFIX,
    TAIL_SLOTS,
    UPPER,
)
from gristmill.stages.kernels.english_address import english_flags, is_address, is_digit
from gristmill.stages.kernels.memory import (
    before,
    byte_class,
    inner,
    lowest_bit,
    peek8,
    peek16,
    peek32,
    peek64,
    point_at,
    poke32,
)

_FNV_PRIME = np.uint64(0x100000001B3)
_FNV_START = np.uint64(0xCBF29CE484222325)
_run_ends32 = byte_class(32, (9, 13), (28, 32), (0x80, 0xFF))  # white space, and what only `point_at` can tell
_letter32 = byte_class(32, (ord("a"), ord("z")), ignore_case=True)
_digit32 = byte_class(32, (ord("0"), ord("9")))
_DIGIT = 1 << 16  # a digit 0-9, among the flags that `_split_middle` carries from character to character


@inner
def _flags_at(p, end, english):  # type: ignore[no-untyped-def]
    """spaCy's classes of the character at p; 0 behind the end."""
    return english_flags(english, point_at(p, end)[0]) if p < end else 0


@inner
def _find(start, end, keys, slots):  # type: ignore[no-untyped-def]
    """The slot of the bytes [start, end) in a table of FNV-1a keys, or -1."""
    h = _FNV_START
    for p in range(start, end):
        h = (h ^ uint64(peek8(p))) * _FNV_PRIME
    slot = int64(h ^ (h >> uint64(32))) & (slots - 1)
    while True:
        key = peek64(keys + 8 * slot)
        if key == h:
            return slot
        if key == uint64(0):
            return -1
        slot = (slot + 1) & (slots - 1)


@inner
def _special(start, end, english):  # type: ignore[no-untyped-def]
    """The slot of the special case [start, end), or -1."""
    length = end - start
    if length < 2 or length > LONGEST_SPECIAL:
        return -1
    bit = (peek8(start) * 0x0B4D + peek8(start + 1) * 0x2F1 + peek8(end - 1) * 0x35 + length * 0x4E5) & (
        FILTER_BITS - 1
    )
    if not (peek8(english + AT_FILTER + (bit >> 3)) >> (bit & 7)) & 1:
        return -1
    return _find(start, end, english + AT_KEYS, SLOTS)


@inner
def _prefix(start, end, english):  # type: ignore[no-untyped-def]
    """Bytes of the prefix that spaCy's TOKENIZER_PREFIXES take off [start, end), or 0."""
    b = peek8(start)
    if b == 46:  # two or more full stops
        n = 1
        while start + n < end and peek8(start + n) == 46:
            n += 1
        return n if n > 1 else 0
    if b == 43:  # "+" unless a digit follows
        return 0 if start + 1 < end and is_digit(peek8(start + 1)) else 1
    point, n = point_at(start, end)
    if english_flags(english, point) & PREFIX:
        return n
    if (b == 65 or b == 67) and start + 1 < end and peek8(start + 1) == 36:  # A$ C$
        return 2
    if b == 85 and start + 2 < end and peek8(start + 1) == 83 and peek8(start + 2) == 36:  # US$
        return 3
    return 0


@inner
def _stop_leaves(start, stop, english):  # type: ignore[no-untyped-def]
    """Whether the full stop at `stop` leaves the end of a word that begins at `start`."""
    if stop == start:
        return False
    p = before(start, stop)
    flags = _flags_at(p, stop, english)
    if flags & BEFORE_STOP:
        return True
    if p == start:
        return False
    point = point_at(before(start, p), p)[0]
    if flags & UPPER and english_flags(english, point) & UPPER:
        return True
    b = peek8(p) | 32  # degrees: °F. °C. °K.
    return point == 0xB0 and p + 1 == stop and (b == 99 or b == 102 or b == 107)


@inner
def _suffix(start, end, english):  # type: ignore[no-untyped-def]
    """Bytes of the suffix that spaCy's TOKENIZER_SUFFIXES take off [start, end), or 0. The longest one wins."""
    if start >= end:
        return 0
    last = peek8(end - 1)
    if last == 46:
        n = 1
        while end - n > start and peek8(end - n - 1) == 46:
            n += 1
        if n > 1:
            return n
        return 1 if _stop_leaves(start, end - 1, english) else 0
    if last == 43:
        return 1 if end - 1 > start and is_digit(peek8(end - 2)) else 0
    best = 0
    p = before(start, end)
    point = point_at(p, end)[0]
    if english_flags(english, point) & SUFFIX:
        best = end - p
        if point == 0x2026 and p > start and point_at(before(start, p), p)[0] == 0x2026:
            best = 6  # two of the character for an ellipsis
    elif (last == 115 or last == 83) and p > start:  # 's 'S and the same with a curly apostrophe
        q = before(start, p)
        point = point_at(q, p)[0]
        if point == 39 or point == 0x2019:
            best = end - q
    if peek8(english + AT_TAIL_LAST + last):  # a unit or currency behind a digit
        q = end - 1
        while q > start and end - q <= LONGEST_TAIL:
            if is_digit(peek8(q - 1)):
                if end - q > best and _find(q, end, english + AT_TAIL_KEYS, TAIL_SLOTS) >= 0:
                    best = end - q
                break
            q -= 1
    return best


@inner
def _dashes(p, end, length, dash, most, english):  # type: ignore[no-untyped-def]
    """Bytes of one to `most` equal dashes at p, each `length` bytes, that a letter follows; 0 if none does."""
    q = p
    for _ in range(most):
        q += length
        if q >= end:
            return 0
        point = point_at(q, end)[0]
        if english_flags(english, point) & ALPHA:
            return q - p
        if point != dash:
            return 0
    return 0


@inner
def _infix(point, n, p, end, left, english):  # type: ignore[no-untyped-def]
    """Bytes of the infix that spaCy's TOKENIZER_INFIXES find at p, or 0.

    point, n: the character at p and its bytes. left: flags of the character before it.
    """
    if point == 46:
        while p + n < end and peek8(p + n) == 46:
            n += 1
        if n > 1:
            return n
        return 1 if left & (LOWER | QUOTE) and _flags_at(p + 1, end, english) & (UPPER | QUOTE) else 0
    if point >= 128:
        if point == 0x2026 or english_flags(english, point) & ICON:
            return n
        if not left & (ALPHA | _DIGIT):
            return 0
        if point == 0x2013:
            return _dashes(p, end, n, point, 1, english)
        return _dashes(p, end, n, point, 2, english) if point == 0x2014 else 0
    if left & _DIGIT and p + 1 < end and (point == 43 or point == 45 or point == 42 or point == 94):
        right = peek8(p + 1)  # + - * ^ between digits
        if is_digit(right) or right == 45:
            return 1
    if point == 44:
        return 1 if left & ALPHA and _flags_at(p + 1, end, english) & ALPHA else 0
    if not left & (ALPHA | _DIGIT):
        return 0
    if point == 45:
        return _dashes(p, end, 1, point, 3, english)
    if point == 126 or point == 58 or point == 60 or point == 62 or point == 61 or point == 47:  # ~ : < > = /
        return 1 if _flags_at(p + 1, end, english) & ALPHA else 0
    return 0


@inner
def write_word(start, end, n, base, starts, ends):  # type: ignore[no-untyped-def]
    """Writes word number n. Returns n + 1."""
    poke32(starts + 4 * n, start - base)
    poke32(ends + 4 * n, end - base)
    return n + 1


@inner
def _write_special(start, end, slot, n, base, english, starts, ends):  # type: ignore[no-untyped-def]
    """Writes the words of the special case [start, end). Returns the new n."""
    for i in range(MAX_PIECES):
        if start >= end:
            break
        size = peek8(english + AT_PIECES + MAX_PIECES * slot + i)
        n = write_word(start, start + size, n, base, starts, ends)
        start += size
    return n


@inner
def _split_middle(start, end, n, base, english, starts, ends):  # type: ignore[no-untyped-def]
    """Writes what prefixes and suffixes left: one address, or the parts between infixes. Returns the new n."""
    asked = False
    word = p = start
    left = 0
    while p < end:
        point = peek8(p)
        size = 1
        if point < 128:
            kind = peek8(english + AT_KIND + point)
            if kind == KIND_DIGIT:
                left = _DIGIT
                p += 1
                continue
            flags = english_flags(english, point)
        else:
            point, size = point_at(p, end)
            flags = english_flags(english, point)
        length = 0 if flags & PLAIN else _infix(point, size, p, end, left, english)
        left = flags
        if length and p > start:
            if not asked and is_address(start, end, english):
                break
            asked = True
            if p > word:
                n = write_word(word, p, n, base, starts, ends)
            n = write_word(p, p + length, n, base, starts, ends)
            word = p + length
        p += length if length else size  # an infix of several characters is one character repeated
    return write_word(word, end, n, base, starts, ends) if word < end else n


@inner
def _taken_apart(i, m, base, english, starts, ends):  # type: ignore[no-untyped-def]
    """The slot of the special case that words i..i+m make together, word by word as its pattern says, or -1."""
    start = base + peek32(starts + 4 * i)
    slot = _special(start, base + peek32(ends + 4 * (i + m)), english)
    if slot < 0:
        return -1
    pattern = english + AT_PATTERNS + MAX_PATTERN * slot
    for j in range(m + 1):
        if peek8(pattern + j) != peek32(ends + 4 * (i + j)) - peek32(starts + 4 * (i + j)):
            return -1
    return slot if m + 1 == MAX_PATTERN or peek8(pattern + m + 1) == 0 else -1


@inner
def _any_taken_apart(first, n, base, english, starts, ends):  # type: ignore[no-untyped-def]
    """Whether words first..n-1 hold a special case that was taken apart."""
    for i in range(first, n - 1):
        start = base + peek32(starts + 4 * i)
        pair = peek16(start)  # a word follows, so there are two bytes
        if not (peek8(english + AT_PATTERN_FILTER + (pair >> 3)) >> (pair & 7)) & 1:
            continue
        for m in range(1, min(MAX_PATTERN, n - i)):
            if peek32(ends + 4 * (i + m)) - peek32(starts + 4 * i) > LONGEST_SPECIAL:
                break
            if _taken_apart(i, m, base, english, starts, ends) >= 0:
                return True
    return False


@inner
def _restore_specials(first, n, base, english, starts, ends):  # type: ignore[no-untyped-def]
    """Puts special cases together again among the words first..n-1 of one run. Returns the new n.

    As spaCy does: the longest match first, then the leftmost; a match that overlaps an earlier one is passed over, and
    still hides what it overlaps.
    """
    words = n - first
    hidden = np.zeros(words, np.uint8)
    chosen = np.zeros(words, np.int64)  # words in the match that begins here, less one
    for m in range(MAX_PATTERN - 1, 0, -1):
        for i in range(words - m):
            if _taken_apart(first + i, m, base, english, starts, ends) >= 0:
                if not hidden[i] and not hidden[i + m]:
                    chosen[i] = m
                for j in range(i, i + m + 1):
                    hidden[j] = 1
    # A special case has at most as many words as its pattern or one more ("°C." is three, found as two), and what is
    # written before word i must not reach it: so the old bounds are copied.
    old = np.empty((words, 2), np.int64)
    for i in range(words):
        old[i, 0] = base + peek32(starts + 4 * (first + i))
        old[i, 1] = base + peek32(ends + 4 * (first + i))
    n, i = first, 0
    while i < words:
        m = chosen[i]
        start, end = old[i, 0], old[i + m, 1]
        if m:
            n = _write_special(start, end, _find(start, end, english + AT_KEYS, SLOTS), n, base, english, starts, ends)
        else:
            n = write_word(start, end, n, base, starts, ends)
        i += m + 1
    return n


@inner
def _split_run(start, end, n, base, english, starts, ends, capacity):  # type: ignore[no-untyped-def]
    """Splits one run without white space, [start, end). Returns the new n. Suffixes wait at the arrays' far end."""
    first, top = n, capacity
    slot = _special(start, end, english)
    while slot < 0 and start < end:
        pre = _prefix(start, end, english)
        if pre and start + pre < end:
            slot = _special(start + pre, end, english)
            if slot >= 0:
                n = write_word(start, start + pre, n, base, starts, ends)
                start += pre
                break
        suf = _suffix(start + pre, end, english)
        if suf and start < end - suf:
            slot = _special(start, end - suf, english)
            if slot >= 0:
                top -= 1
                write_word(end - suf, end, top, base, starts, ends)
                end -= suf
                break
        if not pre and not suf:
            break
        if pre:
            n = write_word(start, start + pre, n, base, starts, ends)
            start += pre
        if suf:
            top -= 1
            write_word(end - suf, end, top, base, starts, ends)
            end -= suf
        slot = _special(start, end, english)
    if slot >= 0:
        n = _write_special(start, end, slot, n, base, english, starts, ends)
    elif start < end:
        n = _split_middle(start, end, n, base, english, starts, ends)
    while top < capacity:
        n = write_word(base + peek32(starts + 4 * top), base + peek32(ends + 4 * top), n, base, starts, ends)
        top += 1
    if n - first > 1 and _any_taken_apart(first, n, base, english, starts, ends):
        n = _restore_specials(first, n, base, english, starts, ends)
    return n


@inner
def _letters_and_mark(start, end, n, base, english, starts, ends, capacity):  # type: ignore[no-untyped-def]
    """`_split_run` for ASCII letters and one mark at the end: most words before a comma or full stop."""
    mark = peek8(end - 1)
    if mark == 46:
        leaves = _stop_leaves(start, end - 1, english)
    else:
        leaves = english_flags(english, mark) & SUFFIX
    if not leaves or _special(start, end, english) >= 0 or _special(start, end - 1, english) >= 0:
        return _split_run(start, end, n, base, english, starts, ends, capacity)
    n = write_word(start, end - 1, n, base, starts, ends)
    return write_word(end - 1, end, n, base, starts, ends)


@inner
def _ascii_run(run, size, n, base, english, starts, ends, capacity):  # type: ignore[no-untyped-def]
    """`_split_run` for fewer than 32 bytes of ASCII, in a block that may be read whole. Returns the new n."""
    every = (1 << size) - 1
    marks = every & ~_letter32(run)
    if size <= 1:
        return write_word(run, run + 1, n, base, starts, ends) if size else n
    if not marks:
        slot = _special(run, run + size, english)
        if slot >= 0:
            return _write_special(run, run + size, slot, n, base, english, starts, ends)
        return write_word(run, run + size, n, base, starts, ends)
    if marks == 1 << (size - 1):
        return _letters_and_mark(run, run + size, n, base, english, starts, ends, capacity)
    if marks == every and marks == every & _digit32(run):
        return write_word(run, run + size, n, base, starts, ends)
    return _split_run(run, run + size, n, base, english, starts, ends, capacity)


@inner
def run_words(run, end, limit, n, base, english, starts, ends, capacity):  # type: ignore[no-untyped-def]
    """Splits one run without white space, [run, end), of a text that may be read up to `limit`. Returns the new n."""
    if run + 32 <= limit and lowest_bit(_run_ends32(run) | 1 << 32) >= end - run and end - run < 32:
        return _ascii_run(run, end - run, n, base, english, starts, ends, capacity)
    return _split_run(run, end, n, base, english, starts, ends, capacity)


@njit(nogil=True, cache=True)
def english_words(data, offsets, first, last, tables, starts, ends, counts):  # type: ignore[no-untyped-def]
    """Splits documents first..last-1 into English words as spaCy does. Returns the number of words.

    data (bytes,) uint8, offsets (documents + 1,) int64: an Arrow column as `string_views` gives it.
    tables: `gristmill.stages.kernels.english.ENGLISH`.
    starts, ends (bytes of these documents,) int32: filled, document after document, with the words' bounds.
    counts (documents,) int64: filled with the number of words of each document.
    """
    text, english = int64(data.ctypes.data), int64(tables.ctypes.data)
    first_start, first_end, capacity = int64(starts.ctypes.data), int64(ends.ctypes.data), len(starts)
    n = 0
    for document in range(first, last):
        base, end = text + offsets[document], text + offsets[document + 1]
        n_before = n
        p = base
        while p < end:
            if p + 32 <= end:  # in most runs: ASCII, and the white space behind it
                size = lowest_bit(_run_ends32(p) | 1 << 32)
                if size < 32 and peek8(p + size) < 128:
                    run, p = p, p + size + 1
                    n = _ascii_run(run, size, n, base, english, first_start, first_end, capacity)
                    continue
            run = p
            kinds = kind = 0
            while p < end:  # one run of characters without white space
                b = peek8(p)
                k = peek8(english + AT_KIND + b)
                size = 1
                if k == KIND_WIDE:
                    point, size = point_at(p, end)
                    flags = english_flags(english, point)
                    if flags & SPACE:
                        break
                    k = KIND_LETTER if flags & PLAIN else KIND_OTHER
                elif k == KIND_SPACE:
                    break
                p += size
                kind = k
                kinds |= k
            if p > run:
                if kinds & KIND_OTHER or (kinds & KIND_DIGIT and kind != KIND_DIGIT):
                    n = _split_run(run, p, n, base, english, first_start, first_end, capacity)
                else:
                    slot = _special(run, p, english) if kinds & KIND_LETTER else -1
                    if slot < 0:
                        n = write_word(run, p, n, base, first_start, first_end)
                    else:
                        n = _write_special(run, p, slot, n, base, english, first_start, first_end)
            if p < end:
                p += point_at(p, end)[1]
        counts[document] = n - n_before
    return n
