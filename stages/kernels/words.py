# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Splitting text into words, as bounds in the UTF-8 buffer: no string is built.

`english_words` splits as spaCy's blank English pipeline does, which is what datatrove counts as words and what the
published limits of Gopher and FineWeb were run on. It follows `spacy/tokenizer.pyx`: a run of characters without white
space loses prefixes and suffixes one by one until it is a special case or nothing comes off; what is left is a web
address or is split at infixes; at last, special cases that were taken apart are put together again.

Known differences: spaCy looks for the special cases of the last step in the whole text, so that a match across a
space ("a ) :") can hide one inside; here the search ends at white space.

`unicode_words` is for every other alphabet, and asks for no table of a language: a word is a run of letters, marks and
numbers. An apostrophe, a middle dot or a joiner between letters stays inside, so does a full stop or comma between
digits, and "_". Every other character is a word of its own, but a run of full stops is one. Scripts that are written
without spaces have no word that a table of characters could find, so there a character with its marks is one word: Han,
kana, Thai, Lao, Khmer, Burmese. Their measures are then of characters, as FineWeb2's limits for them are not: derive
limits from your own data.

A word is (start, end), int32, in bytes from the start of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.english import (
    ALPHA,
    AT_FILTER,
    AT_KEYS,
    AT_KIND,
    AT_PAGE,
    AT_PATTERN_FILTER,
    AT_PATTERNS,
    AT_PIECES,
    AT_TABLE,
    AT_TAIL_KEYS,
    AT_TAIL_LAST,
    BEFORE_STOP,
    ENGLISH,
    FILTER_BITS,
    ICON,
    IN_WORD,
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
from gristmill.stages.kernels.memory import before, flags_of, inner, peek8, peek16, peek32, peek64, point_at, poke32
from gristmill.stages.kernels.unicode import ALPHA as LETTERS
from gristmill.stages.kernels.unicode import DIGIT, MARK, TABLES, UNSEGMENTED, WORD
from gristmill.stages.kernels.unicode import SPACE as SPACE_OF_TEXT

_FNV_PRIME = np.uint64(0x100000001B3)
_FNV_START = np.uint64(0xCBF29CE484222325)
_DIGIT = 1 << 16  # a digit 0-9, among the flags that `_split_middle` carries from character to character


@inner
def _flags(english, point):  # type: ignore[no-untyped-def]
    """spaCy's classes of a code point."""
    return flags_of(english + AT_PAGE, english + AT_TABLE, point)


@inner
def _flags_at(p, end, english):  # type: ignore[no-untyped-def]
    """spaCy's classes of the character at p; 0 behind the end."""
    return _flags(english, point_at(p, end)[0]) if p < end else 0


@inner
def _is_digit(byte):  # type: ignore[no-untyped-def]
    return 48 <= byte <= 57


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
        return 0 if start + 1 < end and _is_digit(peek8(start + 1)) else 1
    point, n = point_at(start, end)
    if _flags(english, point) & PREFIX:
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
    if flags & UPPER and _flags(english, point) & UPPER:
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
        return 1 if end - 1 > start and _is_digit(peek8(end - 2)) else 0
    best = 0
    p = before(start, end)
    point = point_at(p, end)[0]
    if _flags(english, point) & SUFFIX:
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
            if _is_digit(peek8(q - 1)):
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
        if _flags(english, point) & ALPHA:
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
        if point == 0x2026 or _flags(english, point) & ICON:
            return n
        if not left & (ALPHA | _DIGIT):
            return 0
        if point == 0x2013:
            return _dashes(p, end, n, point, 1, english)
        return _dashes(p, end, n, point, 2, english) if point == 0x2014 else 0
    if left & _DIGIT and p + 1 < end and (point == 43 or point == 45 or point == 42 or point == 94):
        right = peek8(p + 1)  # + - * ^ between digits
        if _is_digit(right) or right == 45:
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
def _host_byte(byte):  # type: ignore[no-untyped-def]
    """Whether the byte can be in a label of a host name, apart from _ and -."""
    return _is_digit(byte) or 97 <= (byte | 32) <= 122 or byte >= 128


@inner
def _address_ends(p, end):  # type: ignore[no-untyped-def]
    """Whether an optional port and path, `(:\\d{2,5})?([/?#].*)?`, reach from p to the end."""
    if p < end and peek8(p) == 58:
        n = 1
        while p + n < end and _is_digit(peek8(p + n)):
            n += 1
        if n < 3 or n > 6:
            return False
        p += n
    if p == end:
        return True
    b = peek8(p)
    return b == 47 or b == 63 or b == 35


@inner
def _is_host(start, end, english):  # type: ignore[no-untyped-def]
    """Whether [start, end) is a host name with optional port and path: labels, then a lower-case last label."""
    p = start
    while p < end:
        if p > start:  # a last label of 2 to 63 lower-case letters
            q, letters = p, 0
            while q < end:
                point, n = point_at(q, end)
                if not _flags(english, point) & LOWER:
                    break
                q += n
                letters += 1
            if 2 <= letters <= 63 and _address_ends(q, end):
                return True
        q, chars = p, 0
        while q < end:
            b = peek8(q)
            if not (_host_byte(b) or b == 95 or b == 45):
                break
            point, n = point_at(q, end)
            if point > 0xFFFF or 0x80 <= point < 0xA1:  # the expression knows U+00A1 to U+FFFF
                break
            q += n
            chars += 1
        if q >= end or peek8(q) != 46 or chars == 0 or chars > 64:
            return False
        if not _host_byte(peek8(p)) or not _host_byte(peek8(q - 1)):
            return False
        p = q + 1
    return False


@inner
def _is_ip(start, end):  # type: ignore[no-untyped-def]
    """Whether [start, end) is a public IPv4 address with optional port and path, by spaCy's expression."""
    p = start
    first = second = 0
    for i in range(4):
        if i:
            if p >= end or peek8(p) != 46:
                return False
            p += 1
        octet = n = 0
        while p + n < end and n < 3 and _is_digit(peek8(p + n)):
            octet = octet * 10 + peek8(p + n) - 48
            n += 1
        if n == 0 or (peek8(p) == 48 and (n == 3 or i == 0 or i == 3)):
            return False
        if octet > 255 or (i == 0 and octet > 223) or (i == 3 and octet > 254):
            return False
        first = octet if i == 0 else first
        second = octet if i == 1 else second
        p += n
    if first == 10 or first == 127 or (first == 169 and second == 254):
        return False
    if (first == 192 and second == 168) or (first == 172 and 16 <= second <= 31):
        return False
    return _address_ends(p, end)


@inner
def _is_address(start, end, english):  # type: ignore[no-untyped-def]
    """Whether spaCy's URL_PATTERN matches [start, end): scheme://user@host:port/path, all but the host optional.

    The host may begin at the front, behind a scheme, or behind any "@".
    """
    stops = False
    for p in range(start, end):
        if peek8(p) == 46:
            stops = True
            break
    if not stops:
        return False
    scheme = True  # what came so far may be a scheme
    p = start
    while p < end:
        b = peek8(p)
        host = int64(0)
        if p == start:
            host = p
        elif b == 64:
            host = p + 1
        elif b == 58 and scheme and p - start >= 2 and p + 2 < end and peek8(p + 1) == 47 and peek8(p + 2) == 47:
            host = p + 3
        if host and (_is_ip(host, end) or _is_host(host, end, english)):
            return True
        point, size = point_at(p, end)
        scheme = scheme and (point == 43 or point == 45 or point == 46 or _flags(english, point) & IN_WORD != 0)
        p += size
    return False


@inner
def _write(start, end, n, base, starts, ends):  # type: ignore[no-untyped-def]
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
        n = _write(start, start + size, n, base, starts, ends)
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
            flags = _flags(english, point)
        else:
            point, size = point_at(p, end)
            flags = _flags(english, point)
        length = 0 if flags & PLAIN else _infix(point, size, p, end, left, english)
        left = flags
        if length and p > start:
            if not asked and _is_address(start, end, english):
                break
            asked = True
            if p > word:
                n = _write(word, p, n, base, starts, ends)
            n = _write(p, p + length, n, base, starts, ends)
            word = p + length
        p += length if length else size  # an infix of several characters is one character repeated
    return _write(word, end, n, base, starts, ends) if word < end else n


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
            n = _write(start, end, n, base, starts, ends)
        i += m + 1
    return n


@inner
def _english_run(start, end, n, base, english, starts, ends, capacity):  # type: ignore[no-untyped-def]
    """Splits one run without white space, [start, end). Returns the new n. Suffixes wait at the arrays' far end."""
    first, top = n, capacity
    slot = _special(start, end, english)
    while slot < 0 and start < end:
        pre = _prefix(start, end, english)
        if pre and start + pre < end:
            slot = _special(start + pre, end, english)
            if slot >= 0:
                n = _write(start, start + pre, n, base, starts, ends)
                start += pre
                break
        suf = _suffix(start + pre, end, english)
        if suf and start < end - suf:
            slot = _special(start, end - suf, english)
            if slot >= 0:
                top -= 1
                _write(end - suf, end, top, base, starts, ends)
                end -= suf
                break
        if not pre and not suf:
            break
        if pre:
            n = _write(start, start + pre, n, base, starts, ends)
            start += pre
        if suf:
            top -= 1
            _write(end - suf, end, top, base, starts, ends)
            end -= suf
        slot = _special(start, end, english)
    if slot >= 0:
        n = _write_special(start, end, slot, n, base, english, starts, ends)
    elif start < end:
        n = _split_middle(start, end, n, base, english, starts, ends)
    while top < capacity:
        n = _write(base + peek32(starts + 4 * top), base + peek32(ends + 4 * top), n, base, starts, ends)
        top += 1
    if n - first > 1 and _any_taken_apart(first, n, base, english, starts, ends):
        n = _restore_specials(first, n, base, english, starts, ends)
    return n


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
            run = p
            kinds = kind = 0
            while p < end:  # one run of characters without white space
                b = peek8(p)
                k = peek8(english + AT_KIND + b)
                size = 1
                if k == KIND_WIDE:
                    point, size = point_at(p, end)
                    flags = _flags(english, point)
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
                    n = _english_run(run, p, n, base, english, first_start, first_end, capacity)
                else:
                    slot = _special(run, p, english) if kinds & KIND_LETTER else -1
                    if slot < 0:
                        n = _write(run, p, n, base, first_start, first_end)
                    else:
                        n = _write_special(run, p, slot, n, base, english, first_start, first_end)
            if p < end:
                p += point_at(p, end)[1]
        counts[document] = n - n_before
    return n


@inner
def _joins(point, left, right):  # type: ignore[no-untyped-def]
    """Whether the character stays inside a word between two characters of the classes left and right."""
    if point == 0x5F or point == 0x200C or point == 0x200D or point == 0xAD:  # _ and what joins letters unseen
        return True
    if point == 0x27 or point == 0x2019 or point == 0xB7:  # ' ’ ·
        return left & LETTERS != 0 and right & LETTERS != 0
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
            if flags & SPACE_OF_TEXT:
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
            n = _write(start, p, n, base, first_start, first_end)
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
