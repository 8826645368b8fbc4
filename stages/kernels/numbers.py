# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Where a text has runs of digits and separators that could be telephone numbers.

The scan only finds candidates; what they are is for a library to say. It looks at UTF-8 bytes: digits and most
separators are ASCII, and of the others it knows the no-break spaces and the hyphens of U+2010 to U+2015 by their bytes.
Each byte is looked at a bounded number of times, whatever the text.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gristmill.stages.kernels.buffers import load8

MIN_DIGITS = 9  # of a number without "+": seven are too many other things
MIN_DIGITS_PLUS = 8
MAX_DIGITS = 15  # E.164
MAX_DIGITS_PLUS = 24  # behind "+" another number may follow in the same run
_MAX_GAP = 3  # separators in a row: ") - "

_DIGIT, _JOINS, _GAP = 1, 2, 4
_CLASS = np.zeros(256, np.uint8)
for _char in b"0123456789":
    _CLASS[_char] |= _DIGIT | _JOINS
for _char in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_+-./,#$%&@\\~^*<":
    _CLASS[_char] |= _JOINS  # before a number, it makes the number a part of something longer, or a price
for _char in b" -./()":
    _CLASS[_char] |= _GAP
del _char


def find_numbers(data: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """data, ends: from `string_views` -> (found, 3) int64: document, first byte, byte after; in text order."""
    found: np.ndarray = _find(data, ends, _CLASS)
    return found


@njit(nogil=True, cache=True)
def _is(classes, data, p, flag):  # type: ignore[no-untyped-def]
    return (classes[load8(data, p)] & flag) != 0


@njit(nogil=True, cache=True)
def _gap(classes, data, p, high):  # type: ignore[no-untyped-def]
    """Bytes of the separator at p, 0 where there is none."""
    byte = load8(data, p)
    if classes[byte] & _GAP:
        return 1
    if byte == 0xC2 and p + 1 < high and load8(data, p + 1) == 0xA0:  # no-break space
        return 2
    if byte == 0xE2 and p + 2 < high and load8(data, p + 1) == 0x80:
        last = load8(data, p + 2)
        if 0x90 <= last <= 0x95 or last == 0x89 or last == 0xAF:  # hyphens and dashes; thin spaces
            return 3
    return 0


@njit(nogil=True, cache=True)
def _currency(data, p, low, high):  # type: ignore[no-untyped-def]
    """A currency sign or "%" that begins at byte p: $, %, U+00A2 to U+00A5, U+20A0 to U+20CF."""
    if p < low or p >= high:
        return False
    byte = load8(data, p)
    if byte == 36 or byte == 37:
        return True
    if byte == 0xC2 and p + 1 < high:
        return 0xA2 <= load8(data, p + 1) <= 0xA5
    if byte == 0xE2 and p + 2 < high:
        middle = load8(data, p + 1)
        last = load8(data, p + 2)
        return (middle == 0x82 and last >= 0xA0) or (middle == 0x83 and last <= 0x8F)
    return False


@njit(nogil=True, cache=True)
def _apart(classes, data, start, low, high):  # type: ignore[no-untyped-def]
    """Whether a number can begin at byte `start`: nothing before makes it a part of something, or a price."""
    p = start
    if p > low and load8(data, p - 1) == 32:
        p -= 1  # "$ 1 234"
    elif p > low and _is(classes, data, p - 1, _JOINS):
        return False
    elif p - 1 > low and load8(data, p - 1) == 58 and _is(classes, data, p - 2, _DIGIT):
        return False  # a time
    if p > low and load8(data, p - 1) == 36:
        return False
    return not (_currency(data, p - 2, low, high) or _currency(data, p - 3, low, high)) or load8(data, p - 1) < 128


@njit(nogil=True, cache=True)
def _ends_well(classes, data, stop, high):  # type: ignore[no-untyped-def]
    """Whether a number can end before byte `stop`: no letter, no decimals, time or price go on."""
    if stop >= high:
        return True
    byte = load8(data, stop)
    more = stop + 1 < high and _is(classes, data, stop + 1, _DIGIT)
    if byte == 120 and more:  # "x", an extension
        return True
    if 48 <= byte <= 57 or 65 <= byte <= 90 or 97 <= byte <= 122 or byte == 95 or byte == 64:
        return False
    if more and (byte == 44 or byte == 58):
        return False
    if byte == 45 and stop + 1 < high and _is(classes, data, stop + 1, _JOINS):
        return False  # "0-201-15790-X"
    at = stop + 1 if byte == 32 else stop
    return not _currency(data, at, stop, high)


@njit(nogil=True, cache=True)
def _run(classes, data, start, high):  # type: ignore[no-untyped-def]
    """Digits and separators from byte `start`, a digit -> (byte after the last digit, digits, whether the groups are
    those of a number without "+": more than one, none of a single digit but the first, not all of three)."""
    p, stop, digits = start, start, 0
    groups, size, threes, single, gap = 0, 0, True, False, 0
    spaced = True
    while p < high:
        if _is(classes, data, p, _DIGIT):
            if gap or digits == 0:
                if groups:
                    single |= size == 1 and groups > 1
                    threes &= size == 3 or groups == 1
                groups += 1
                size = 0
            digits += 1
            size += 1
            gap = 0
            p += 1
            stop = p
            continue
        width = _gap(classes, data, p, high)
        gap += 1
        if width == 0 or gap > _MAX_GAP or (digits > 4 and load8(data, p) == 40):
            break  # "(" stands around a country or area code; later it begins a remark
        if width == 1 and load8(data, p) != 32 and load8(data, p) != 46:
            spaced = False
        p += width
    threes &= size == 3
    single |= size == 1
    thousands = threes and spaced  # "12 345 678"
    return stop, digits, groups > 1 and not single and not thousands


@njit(nogil=True, cache=True)
def _next(classes, data, p, high):  # type: ignore[no-untyped-def]
    while p < high and not classes[load8(data, p)] & _DIGIT:
        p += 1
    return p


@njit(nogil=True, cache=True)
def _find(data, ends, classes):  # type: ignore[no-untyped-def]
    found = np.empty((64, 3), np.int64)
    count = 0
    for row in range(len(ends) - 1):
        low, high = ends[row], ends[row + 1]
        p = _next(classes, data, low, high)
        while p < high:
            stop, digits, shaped = _run(classes, data, p, high)
            first, plus = p, False
            if first > low and load8(data, first - 1) == 40:  # "("
                first -= 1
            if first > low and load8(data, first - 1) == 43:  # "+"
                first -= 1
                plus = load8(data, p) != 48
                if first > low and load8(data, first - 1) == 40:
                    first -= 1
            fits = (
                MIN_DIGITS_PLUS <= digits <= MAX_DIGITS_PLUS if plus else MIN_DIGITS <= digits <= MAX_DIGITS and shaped
            )
            if fits and _apart(classes, data, first, low, high) and _ends_well(classes, data, stop, high):
                if count == len(found):
                    grown = np.empty((2 * count, 3), np.int64)
                    grown[:count] = found
                    found = grown
                found[count, 0], found[count, 1], found[count, 2] = row, first, stop
                count += 1
            p = _next(classes, data, stop, high)
    return found[:count]


def warm() -> None:
    """Compiles every kernel of this module for the types that the stage uses."""
    find_numbers(np.frombuffer(b"+1 202-555-0100", np.uint8), np.array([0, 15]))
