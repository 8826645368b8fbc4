"""Where e-mail and IP addresses stand in a text, and a text with them replaced.

All the patterns are ASCII, so they are found on UTF-8 bytes: a byte under 128 is never part of another character, and
offsets are right in every script. Each byte is looked at a bounded number of times, whatever the text.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from gristmill.stages.kernels.buffers import load8

EMAIL, IPV4, IPV6 = 0, 1, 2

_ALNUM, _ATOM, _HEX, _DIGIT, _JOINS = 1, 2, 4, 8, 16
_CLASS = np.zeros(256, np.uint8)
for _char in b"0123456789":
    _CLASS[_char] |= _ALNUM | _ATOM | _HEX | _DIGIT
for _char in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ":
    _CLASS[_char] |= _ALNUM | _ATOM
for _char in b"abcdefABCDEF":
    _CLASS[_char] |= _HEX
for _char in b"!#$%&'*+/=?^_`{|}~-":  # RFC 5322, atext
    _CLASS[_char] |= _ATOM
for _char in b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ._":
    _CLASS[_char] |= _JOINS  # before a number, it makes the number a part of something longer
del _char

# IANA's special-purpose registry as of 2024: (first address, last address) of the blocks that are not globally
# reachable. 192.0.0.9 and .10 are exceptions inside 192.0.0.0/24. Kept here, as Python's own list changes with patches.
_NOT_GLOBAL = np.array(
    [
        (0x00000000, 0x00FFFFFF),  # 0.0.0.0/8
        (0x0A000000, 0x0AFFFFFF),  # 10.0.0.0/8
        (0x64400000, 0x647FFFFF),  # 100.64.0.0/10
        (0x7F000000, 0x7FFFFFFF),  # 127.0.0.0/8
        (0xA9FE0000, 0xA9FEFFFF),  # 169.254.0.0/16
        (0xAC100000, 0xAC1FFFFF),  # 172.16.0.0/12
        (0xC0000000, 0xC0000008),  # 192.0.0.0/24
        (0xC000000B, 0xC00000FF),
        (0xC0000200, 0xC00002FF),  # 192.0.2.0/24, documentation
        (0xC0A80000, 0xC0A8FFFF),  # 192.168.0.0/16
        (0xC6120000, 0xC613FFFF),  # 198.18.0.0/15
        (0xC6336400, 0xC63364FF),  # 198.51.100.0/24, documentation
        (0xCB007100, 0xCB0071FF),  # 203.0.113.0/24, documentation
        (0xF0000000, 0xFFFFFFFF),  # 240.0.0.0/4
    ],
    np.int64,
)


def find_addresses(data: np.ndarray, ends: np.ndarray, emails: bool, ipv4: bool, ipv6: bool) -> np.ndarray:
    """data, ends: from `string_views` -> (found, 4) int64: document, first byte, byte after, kind; in text order.

    IPv6 rows are candidates: hexadecimal groups and colons that begin with 2 or 3, still to be parsed.
    """
    found: np.ndarray = _find(data, ends, _CLASS, _NOT_GLOBAL, emails, ipv4, ipv6)
    return found


@njit(nogil=True, cache=True)
def _is(classes, data, p, flag):  # type: ignore[no-untyped-def]
    return (classes[load8(data, p)] & flag) != 0


@njit(nogil=True, cache=True)
def _email(classes, data, at, low, high):  # type: ignore[no-untyped-def]
    """The address around the "@" at byte `at`, inside low..high -> (first byte, byte after); first is -1 for none."""
    start = at
    while start > low and (
        _is(classes, data, start - 1, _ATOM)
        or (load8(data, start - 1) == 46 and start < at and load8(data, start) != 46)  # a dot, not before a dot or "@"
    ):
        start -= 1
    while start < at and not (_is(classes, data, start, _ALNUM) or load8(data, start) == 95):
        start += 1  # quotes, dots and the like before an address are not part of it
    if start == at:
        return -1, -1
    p, stop, labels = at + 1, -1, 0
    while p < high and _is(classes, data, p, _ALNUM):
        last = p
        while p < high and (_is(classes, data, p, _ALNUM) or load8(data, p) == 45):
            if load8(data, p) != 45:
                last = p
            p += 1
        labels += 1
        stop = last + 1
        if p != stop or p >= high or load8(data, p) != 46:  # a label ends with a hyphen, or no dot follows
            break
        p += 1
    return (start, stop) if labels >= 2 else (-1, -1)


@njit(nogil=True, cache=True)
def _ipv4(classes, blocks, data, p, high):  # type: ignore[no-untyped-def]
    """A public dotted quad that begins at p -> (byte after it, -1 where there is none; byte to look on from)."""
    address, octets = np.int64(0), 0
    start = p
    while True:
        value, digits, first = np.int64(0), 0, p
        while p < high and digits < 4 and _is(classes, data, p, _DIGIT):
            value = value * 10 + np.int64(load8(data, p)) - 48
            digits += 1
            p += 1
        if digits == 0 or digits > 3 or value > 255 or (digits > 1 and load8(data, first) == 48):
            return -1, max(p, start + 1)
        address = address * 256 + value
        octets += 1
        if octets == 4:
            break
        if p >= high or load8(data, p) != 46:
            return -1, max(p, start + 1)
        p += 1
    if p < high and (_is(classes, data, p, _ALNUM) or load8(data, p) == 95):
        return -1, p
    if p + 1 < high and load8(data, p) == 46 and _is(classes, data, p + 1, _ALNUM):
        return -1, p
    for i in range(len(blocks)):
        if blocks[i, 0] <= address <= blocks[i, 1]:
            return -1, p
    return p, p


@njit(nogil=True, cache=True)
def _ipv6(classes, data, start, high):  # type: ignore[no-untyped-def]
    """The run of hexadecimal groups and colons from `start` -> byte after it, -1 where it cannot be an address."""
    p = start
    while p < high and (_is(classes, data, p, _HEX) or load8(data, p) == 58):
        p += 1
    if p - start <= 6 or load8(data, start + 4) != 58 or (p < high and _is(classes, data, p, _ALNUM)):
        return np.int64(-1)
    while load8(data, p - 1) == 58 and load8(data, p - 2) != 58:
        p -= 1  # a colon of the sentence
    return p


@njit(nogil=True, cache=True)
def _next(classes, data, p, high, after):  # type: ignore[no-untyped-def]
    """The next "@", or digit that begins a number -> (its place or `high`, the byte before it).

    A function of its own for speed: inside the loop of `_find`, which holds an array that grows, it takes 30 times as
    long.
    """
    while p < high:
        byte = load8(data, p)
        if byte == 64 or ((classes[byte] & _DIGIT) and not (classes[after] & _JOINS)):
            break
        after = byte
        p += 1
    return p, after


@njit(nogil=True, cache=True)
def _find(data, ends, classes, blocks, emails, ipv4, ipv6):  # type: ignore[no-untyped-def]
    found = np.empty((64, 4), np.int64)
    count = 0
    for row in range(len(ends) - 1):
        low, high = ends[row], ends[row + 1]
        p = low
        after = np.uint8(0)
        while True:
            p, after = _next(classes, data, p, high, after)
            if p == high:
                break
            byte = load8(data, p)
            first, stop, kind = np.int64(-1), np.int64(-1), 0
            onward = p + 1
            if byte == 64:
                if emails:
                    first, stop = _email(classes, data, p, low, high)
                    kind = EMAIL
            else:
                if ipv6 and after != 58 and (byte == 50 or byte == 51):  # noqa: PLR1714  # "2", "3": 2000::/3
                    stop = _ipv6(classes, data, p, high)
                    first, kind = (p, IPV6) if stop >= 0 else (np.int64(-1), 0)
                if ipv4 and first < 0:
                    stop, onward = _ipv4(classes, blocks, data, p, high)
                    first, kind = (p, IPV4) if stop >= 0 else (np.int64(-1), 0)
            if first >= 0:
                if count == len(found):
                    grown = np.empty((2 * count, 4), np.int64)
                    grown[:count] = found
                    found = grown
                found[count, 0], found[count, 1], found[count, 2], found[count, 3] = row, first, stop, kind
                count += 1
                low = stop  # the next address begins behind this one
                onward = stop
            after = load8(data, onward - 1)
            p = onward
    return found[:count]


@njit(nogil=True, cache=True)
def replace_spans(data, ends, spans, values, value_ends):  # type: ignore[no-untyped-def]
    """A new column with every span replaced by the value of its kind -> (bytes (m,) uint8, offsets (n + 1,) int64).

    spans: (found, 4) as from `find_addresses`, in order, without overlap. values, value_ends: the values end to end.
    """
    size = ends[-1] - ends[0]
    for i in range(len(spans)):
        kind = spans[i, 3]
        size += value_ends[kind + 1] - value_ends[kind] - (spans[i, 2] - spans[i, 1])
    out = np.empty(size, np.uint8)
    offsets = np.zeros(len(ends), np.int64)
    q, i = 0, 0
    for row in range(len(ends) - 1):
        p = ends[row]
        while i < len(spans) and spans[i, 0] == row:
            length = spans[i, 1] - p
            out[q : q + length] = data[p : spans[i, 1]]
            q += length
            kind = spans[i, 3]
            length = value_ends[kind + 1] - value_ends[kind]
            out[q : q + length] = values[value_ends[kind] : value_ends[kind + 1]]
            q += length
            p = spans[i, 2]
            i += 1
        length = ends[row + 1] - p
        out[q : q + length] = data[p : ends[row + 1]]
        q += length
        offsets[row + 1] = q
    return out, offsets


def warm() -> None:
    """Compiles every kernel of this module for the types that the stage uses."""
    data, ends = np.frombuffer(b"a@b.c", np.uint8), np.array([0, 5])
    replace_spans(data, ends, find_addresses(data, ends, True, True, True), data, np.array([0, 1, 2, 3]))
