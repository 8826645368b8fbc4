"""Where the fields of WARC records, and of the HTTP responses in them, stand: no Python object a record.

A frame is one record, inflated. What is taken is what fastwarc can read in one way only: headers as the standards write
them, a content of the length that is declared, one blank line behind it. A frame that is anything else ends the scan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from gristmill.stages.kernels.buffers import load8

# Columns of the table of places; of a field there are two from FIELDS on: its first byte, its length (-1: none).
KIND, CONTENT, LENGTH, STATUS, BODY, FLAGS, FIELDS = 0, 1, 2, 3, 4, 5, 6
ENCODED, BINARY, NOT_ASCII = 1, 2, 4  # flags: an encoded body; one that begins with NUL somewhere; fields over 127
_MAX_HEADER = 1 << 14  # bytes of a record's header
_MAX_HEAD = 1 << 13  # bytes of the head of an HTTP response
_SNIFFED = 1024  # bytes at the start of a body that are looked at for NUL
_VERSION = len(b"WARC/1.0\r\n")
_STATUS_LINE = len(b"HTTP/1.1 200")


class Names:
    """Names as the kernel compares them: ASCII, one after the other."""

    def __init__(self, names: Sequence[str]) -> None:
        self.bytes = np.frombuffer("".join(names).encode("ascii"), np.uint8).copy()
        self.ends = np.concatenate([[0], np.cumsum([len(name) for name in names])]).astype(np.int64)


def scan(data: bytes | np.ndarray, ends: np.ndarray, kinds: Names, fields: Names, mime: int, most: int) -> np.ndarray:
    """The frames of `data`, which end at `ends` (n,) int64 -> table of places (rows, columns) int64.

    kinds: types of records, the first is `response`. fields: of a record's header, the first two WARC-Type and
    Content-Length. mime: the field under which a response's Content-Type is put. most: bytes of a content.
    rows < n where a frame is not in order: the first such one.
    """
    table = np.empty((len(ends), FIELDS + 2 * (len(fields.ends) - 1)), np.int64)
    view = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    view.flags.writeable = False  # as `buffers.string_views`
    rows = _scan(
        view, ends, kinds.bytes, kinds.ends, fields.bytes, fields.ends, _HTTP.bytes, _HTTP.ends, mime, most, table
    )
    return table[:rows]


_HTTP = Names(("Content-Type", "Content-Encoding", "Transfer-Encoding"))


@njit(nogil=True, cache=True)
def _named(data, start, length, names, ends):  # type: ignore[no-untyped-def]
    """Which of `names` these bytes are, whatever their case -> (index or -1, spelled the same)."""
    for which in range(len(ends) - 1):
        at = ends[which]
        if ends[which + 1] - at != length:
            continue
        same, near = True, True
        for i in range(length):
            mine, other = load8(data, start + i), names[at + i]
            if mine != other:
                same = False
                if mine | 32 != other | 32 or not 97 <= mine | 32 <= 122:
                    near = False
                    break
        if near:
            return which, same
    return -1, False


@njit(nogil=True, cache=True)
def _line(data, p, end):  # type: ignore[no-untyped-def]
    """A line `name: value` at p -> (colon, start of the value, its end, next line, not ASCII); colon -1: none such."""
    start = p
    while p < end and 33 <= load8(data, p) <= 126 and load8(data, p) != 58:
        p += 1
    colon = p
    if p == start or p >= end or load8(data, p) != 58:
        return -1, 0, 0, 0, False
    p += 1
    wide = False
    while p < end:
        byte = load8(data, p)
        if byte in (13, 10, 0):
            break
        wide |= byte > 127
        p += 1
    if p + 1 >= end or load8(data, p) != 13 or load8(data, p + 1) != 10:
        return -1, 0, 0, 0, False
    low, high = colon + 1, p
    while low < high and (load8(data, low) == 32 or load8(data, low) == 9):
        low += 1
    while high > low and (load8(data, high - 1) == 32 or load8(data, high - 1) == 9):
        high -= 1
    return colon, low, high, p + 2, wide


@njit(nogil=True, cache=True)
def _number(data, start, length):  # type: ignore[no-untyped-def]
    """Digits as a number, -1 for anything else and for more than 12 of them."""
    if not 1 <= length <= 12:
        return -1
    value = np.int64(0)
    for p in range(start, start + length):
        digit = np.int64(load8(data, p)) - 48
        if not 0 <= digit <= 9:
            return -1
        value = 10 * value + digit
    return value


@njit(nogil=True, cache=True)
def _blank(data, p):  # type: ignore[no-untyped-def]
    return load8(data, p) == 13 and load8(data, p + 1) == 10


@njit(nogil=True, cache=True)
def _version_1(data, begin, name):  # type: ignore[no-untyped-def]
    """Whether `name` (7,) stands at `begin`, and 0 or 1 behind it."""
    for i in range(len(name)):
        if load8(data, begin + i) != name[i]:
            return False
    return 48 <= load8(data, begin + 7) <= 49


@njit(nogil=True, cache=True)
def _header(data, begin, stop, names, name_ends, row):  # type: ignore[no-untyped-def]
    """The header of the record at `begin` -> its content's first byte, -1 where it is not in order."""
    if stop - begin < _VERSION + 2:
        return -1
    if not _version_1(data, begin, b"WARC/1.") or not _blank(data, begin + 8):
        return -1
    p, end = begin + _VERSION, min(stop, begin + _MAX_HEADER)
    while p + 1 < end and not _blank(data, p):
        colon, low, high, following, wide = _line(data, p, end)
        if colon < 0:
            return -1
        which, same = _named(data, p, colon - p, names, name_ends)
        if which >= 0:
            if not same or row[FIELDS + 2 * which + 1] >= 0:
                return -1
            row[FIELDS + 2 * which], row[FIELDS + 2 * which + 1] = low, high - low
            if wide:
                row[FLAGS] |= NOT_ASCII
        p = following
    return p + 2 if p + 1 < end else -1


@njit(nogil=True, cache=True)
def _http(data, begin, stop, names, name_ends, mime, row):  # type: ignore[no-untyped-def]
    """The head of a response -> the body's first byte, -1 where it leaves a choice. Fills status, flags and mime."""
    if stop - begin < _STATUS_LINE + 2:
        return -1
    status = _number(data, begin + 9, 3)
    if not _version_1(data, begin, b"HTTP/1.") or load8(data, begin + 8) != 32 or status < 0:
        return -1
    p, end = begin + _STATUS_LINE, min(stop, begin + _MAX_HEAD)
    if load8(data, p) != 32 and load8(data, p) != 13:
        return -1
    while p < end and load8(data, p) != 13 and load8(data, p) != 10 and load8(data, p) != 0:
        p += 1
    if p + 1 >= end or not _blank(data, p):
        return -1
    p += 2
    seen = 0
    while p + 1 < end and not _blank(data, p):
        colon, low, high, following, wide = _line(data, p, end)
        if colon < 0:
            return -1
        which, _ = _named(data, p, colon - p, names, name_ends)
        if which >= 0 and not seen & (1 << which):
            seen |= 1 << which
            if which > 0:
                row[FLAGS] |= ENCODED if high > low else 0
            else:
                row[FIELDS + 2 * mime], row[FIELDS + 2 * mime + 1] = low, high - low
                row[FLAGS] |= NOT_ASCII if wide else 0
        p = following
    if p + 1 >= end:
        return -1
    row[STATUS] = status
    return p + 2


@njit(nogil=True, cache=True)
def _scan(data, ends, kinds, kind_ends, names, name_ends, http, http_ends, mime, most, table):  # type: ignore[no-untyped-def]
    begin = 0
    for i in range(len(ends)):
        row, stop = table[i], ends[i]
        row[:] = -1
        row[FLAGS] = 0
        content = _header(data, begin, stop, names, name_ends, row)
        if content < 0:
            return i
        kind, same = _named(data, row[FIELDS], row[FIELDS + 1], kinds, kind_ends)
        length = _number(data, row[FIELDS + 2], row[FIELDS + 3])
        if not same or not 0 <= length <= most or content + length + 4 != stop:
            return i
        if not _blank(data, stop - 4) or not _blank(data, stop - 2):
            return i
        row[KIND], row[CONTENT], row[LENGTH] = kind, content, length
        if kind == 0:
            row[BODY] = _http(data, content, content + length, http, http_ends, mime, row)
        if row[BODY] >= 0:
            for p in range(row[BODY], min(row[BODY] + _SNIFFED, content + length)):
                if load8(data, p) == 0:
                    row[FLAGS] |= BINARY
                    break
        begin = stop
    return len(ends)


def warm() -> None:
    """Compiles the kernel for the types that the reader uses."""
    page = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 21\r\n\r\nHTTP/1.1 200 OK\r\n\r\nhi\r\n\r\n"
    names = Names(("WARC-Type", "Content-Length", "A"))
    scan(page, np.array([len(page)], np.int64), Names(("response",)), names, 2, 1 << 20)
