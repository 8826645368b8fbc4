# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""The line rules of RefinedWeb as DCLM runs them, in one pass: `refinedweb_lines` writes what they leave.

Source: DCLM, `baselines/mappers/modifiers.py` with `baselines_configs/dclm_baseline_refinedweb.yaml`. Lines end at
"\\n". DCLM applies one rule after the other to the whole text and strips it in between; here one pass looks at each
line as it stands in the stripped text. The two differ only where white space at an end of a line becomes an end of the
text halfway. Case is that of ASCII in the phrases and of Unicode in the share of upper case.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit

from gristmill.stages.kernels.lines import skip_space, trim_space
from gristmill.stages.kernels.memory import before, flags_of, inner, peek8, point_at, poke8
from gristmill.stages.kernels.unicode import ALPHA, DIGIT, NUMBER, SPACE, TABLES, UPPER

# Columns of `refinedweb_lines`: lines, counted once, under the first rule that takes them. Empty lines always stay.
LINES = 0  # not empty
UPPER_LINES = 1
NUMBER_LINES = 2
COUNTER_LINES = 3
SHORT_LINES = 4
PHRASE_LINES = 5  # nothing but phrases
KEPT_LINES = 6
PHRASES = 7  # taken out of lines
COLUMNS = 8

_CART, _MORE, _SIGN = b"items in cart", b"read more", b"sign-in"
_COUNTED = (
    b"likes",
    b"shares",
    b"comments",
    b"retweets",
    b"reposts",
    b"quotes",
    b"bookmarks",
    b"upvotes",
    b"downvotes",
    b"downloads",
    b"views",
    b"followers",
)
# All phrases, each closed by 0: the first three, then what counters count.
STRINGS = np.frombuffer(b"\0".join((_CART, _MORE, _SIGN, *_COUNTED)) + b"\0", np.uint8).copy()
_AT_MORE = len(_CART) + 1
_AT_SIGN = _AT_MORE + len(_MORE) + 1
_AT_COUNTED = _AT_SIGN + len(_SIGN) + 1
_COUNTED_WORDS = len(_COUNTED)
_MORE_BYTES, _SIGN_BYTES = len(_MORE), len(_SIGN)


@inner
def _matches(p, end, phrase):  # type: ignore[no-untyped-def]
    """Bytes of the phrase (lower case, closed by 0) if the text at p begins with it in any ASCII case, else 0."""
    n = 0
    while peek8(phrase + n):
        if p + n >= end:
            return 0
        b = peek8(p + n)
        if b != peek8(phrase + n) and not (65 <= b <= 90 and b + 32 == peek8(phrase + n)):
            return 0
        n += 1
    return n


@inner
def _is_upper(point, flags):  # type: ignore[no-untyped-def]
    """str.isupper of one character: upper-case letters but not title-case ones, and letters in circles and the like."""
    if flags & UPPER:
        title = point == 0x1C5 or point == 0x1C8 or point == 0x1CB or point == 0x1F2
        greek = 0x1F88 <= point <= 0x1FFC and (point & 0xF8 in (0x88, 0x98, 0xA8) or point & 0xFF in (0xBC, 0xCC, 0xFC))
        return not title and not greek
    return (
        0x2160 <= point <= 0x216F
        or 0x24B6 <= point <= 0x24CF
        or 0x1F130 <= point <= 0x1F149
        or 0x1F150 <= point <= 0x1F169
        or 0x1F170 <= point <= 0x1F189
    )


@inner
def _in_word(point, flags):  # type: ignore[no-untyped-def]
    return point == 95 or flags & (ALPHA | NUMBER) != 0


@inner
def _skip_marks(p, end, page, table):  # type: ignore[no-untyped-def]
    """The first character from p on that is a letter, number or "_", or `end`."""
    while p < end:
        point, size = point_at(p, end)
        if _in_word(point, flags_of(page, table, point)):
            break
        p += size
    return p


@inner
def _is_counter(p, end, page, table, strings):  # type: ignore[no-untyped-def]
    """Whether the line is a counter: "3 likes", "1.2k views"."""
    p = _skip_marks(p, end, page, table)
    digits = 0
    while p < end:
        point, size = point_at(p, end)
        if not flags_of(page, table, point) & DIGIT and (digits == 0 or (point != 44 and point != 46)):
            break
        digits += 1
        p += size
    if digits == 0:
        return False
    if p < end:
        b = peek8(p) | 32
        p += b == 107 or b == 109 or b == 98  # k m b
    word = skip_space(p, end, page, table)
    if word == p:
        return False
    phrase = strings + _AT_COUNTED
    for _ in range(_COUNTED_WORDS):
        n = _matches(word, end, phrase)
        if n and _skip_marks(word + n, end, page, table) == end:
            return True
        while peek8(phrase):
            phrase += 1
        phrase += 1
    return False


@inner
def _shares(p, end, page, table):  # type: ignore[no-untyped-def]
    """Counts in one line -> (characters, upper-case ones, digits, words between white space)."""
    chars = upper = digits = words = 0
    inside = False
    while p < end:
        point, size = point_at(p, end)
        flags = flags_of(page, table, point)
        chars += 1
        upper += _is_upper(point, flags)
        digits += flags & DIGIT != 0
        space = flags & SPACE != 0
        words += inside and space
        inside = not space
        p += size
    return chars, upper, digits, words + inside


@inner
def _before_space(start, p, page, table):  # type: ignore[no-untyped-def]
    """p, or where the one white-space character before it begins."""
    if p > start:
        q = before(start, p)
        if flags_of(page, table, point_at(q, p)[0]) & SPACE:
            return q
    return p


@inner
def _copy_without(p, end, to, page, table, strings):  # type: ignore[no-untyped-def]
    """Copies a line without "items in cart", "read more..." at its end and "sign-in" at its front.

    A white-space character before the first two goes with them, and one behind the last. As DCLM's expression has it,
    "..." stands for any three characters. Returns (end of the copy, phrases taken out).
    """
    found = 0
    begin = to
    while p < end:
        n = _matches(p, end, strings)
        if n:
            to = _before_space(begin, to, page, table)
            found += 1
            p += n
        else:
            poke8(to, peek8(p))
            p += 1
            to += 1
    tail = to
    for _ in range(3):
        if tail > begin:
            tail = before(begin, tail)
    if tail - begin >= _MORE_BYTES and _matches(tail - _MORE_BYTES, tail, strings + _AT_MORE):
        to = _before_space(begin, tail - _MORE_BYTES, page, table)
        found += 1
    if _matches(begin, to, strings + _AT_SIGN):
        rest = begin + _SIGN_BYTES
        if rest < to:
            point, size = point_at(rest, to)
            if flags_of(page, table, point) & SPACE:
                rest += size
        found += 1
        for q in range(to - rest):
            poke8(begin + q, peek8(rest + q))
        to = begin + (to - rest)
    return to, found


@njit(nogil=True, cache=True)
def refinedweb_lines(  # type: ignore[no-untyped-def]
    offsets,
    data,
    classes,
    strings,
    max_upper,
    max_digits,
    counters,
    min_words,
    phrase_words,
    new_data,
    new_offsets,
    out,
):
    """Writes what the line rules leave of every document, stripped.

    offsets, data: as `string_views` gives them. strings: STRINGS. max_upper, max_digits: float64, shares of a line's
    characters. counters: int64, whether counters go. min_words, phrase_words: int64, the fewest words of a line, and
    the most of one from which phrases are taken.
    new_data (bytes of the column,) uint8; new_offsets (documents + 1,) int32; out (documents, COLUMNS) int64: filled.
    """
    text, string = int64(data.ctypes.data), int64(strings.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    begin = int64(new_data.ctypes.data)
    at = begin
    new_offsets[0] = 0
    for document in range(len(offsets) - 1):
        row = out[document]
        row[:] = 0
        end = text + offsets[document + 1]
        p = skip_space(text + offsets[document], end, page, table)
        end = trim_space(p, end, page, table)
        first = at
        while p < end:
            stop = p
            while stop < end and peek8(stop) != 10:
                stop += 1
            line, p = p, stop + 1
            if line == stop:
                if at > first:
                    poke8(at, 10)
                    at += 1
                continue
            row[LINES] += 1
            chars, upper, digits, words = _shares(line, stop, page, table)
            if upper / chars > max_upper:
                row[UPPER_LINES] += 1
            elif digits / chars > max_digits:
                row[NUMBER_LINES] += 1
            elif counters and _is_counter(line, stop, page, table, string):
                row[COUNTER_LINES] += 1
            elif words < min_words:
                row[SHORT_LINES] += 1
            else:
                after, found = at, 0
                if words <= phrase_words:
                    after, found = _copy_without(line, stop, at, page, table, string)
                    row[PHRASES] += found
                    if skip_space(at, after, page, table) == after:
                        row[PHRASE_LINES] += 1
                        continue
                else:
                    for q in range(line, stop):
                        poke8(after, peek8(q))
                        after += 1
                row[KEPT_LINES] += 1
                at = after
                if stop < end:
                    poke8(at, 10)
                    at += 1
        head = skip_space(first, at, page, table)
        tail = trim_space(head, at, page, table)
        for q in range(tail - head if head > first else 0):
            poke8(first + q, peek8(head + q))
        at = first + (tail - head)
        new_offsets[document + 1] = at - begin


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    data, new = np.frombuffer(b"A b", np.uint8), np.empty(3, np.uint8)
    out, ends = np.empty((1, COLUMNS), np.int64), np.empty(2, np.int32)
    refinedweb_lines(np.array([0, 3]), data, TABLES, STRINGS, 0.5, 1.0, 1, 1, 10, new, ends, out)
