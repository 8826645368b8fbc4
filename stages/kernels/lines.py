# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Measures of lines and paragraphs: everything that Gopher and FineWeb ask of them, in one pass over a column.

Two kinds of line. Gopher's bullets and ellipses are counted on the lines of Python's `str.splitlines` (which also ends
a line at \\r, \\v, \\f, U+001C to U+001E, U+0085, U+2028 and U+2029), repetition and FineWeb's rules on lines that
end at "\\n" only. That is what datatrove does, and what the published limits were run on.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import mix64
from gristmill.stages.kernels.memory import (
    before,
    byte_class,
    count_bits,
    count_points,
    equal_bytes,
    flags_of,
    inner,
    lowest_bit,
    newline_at,
    peek8,
    peek64,
    point_at,
)
from gristmill.stages.kernels.unicode import SPACE, TABLES, TERMINAL

# Columns of `line_measures`.
CHARS = 0  # code points of the document
HASHES = 1  # "#"
ELLIPSES = 2  # "..." (not overlapping) and "…"
NEWLINES = 3  # "\n"
SPLIT_LINES = 4  # lines of str.splitlines
BULLET_LINES = 5  # of these: begin with "•" or "-" after white space
ELLIPSIS_LINES = 6  # of these: end with "..." or "…" before white space
PARAGRAPHS = 7  # parts of the stripped text between two or more "\n"; an empty text is one
DUPLICATE_PARAGRAPHS = 8  # second and later copies
DUPLICATE_PARAGRAPH_CHARS = 9
LINES = 10  # parts of the text between one or more "\n"
DUPLICATE_LINES = 11  # second and later copies
DUPLICATE_LINE_CHARS = 12
FULL_LINES = 13  # lines with a character that is not white space
TERMINAL_LINES = 14  # of these: the last character is terminal punctuation
SHORT_LINES = 15  # of these: at most `short_chars` characters
DUPLICATE_FULL_LINE_CHARS = 16  # characters of second and later copies of these
LINE_COLUMNS = 17

_behind_first64 = byte_class(64, (0x80, 0xBF))
_hash64 = byte_class(64, (35, 35))
_newline64 = byte_class(64, (10, 10))
_stop64 = byte_class(64, (46, 46))
_e2_64 = byte_class(64, (0xE2, 0xE2))
_80_64 = byte_class(64, (0x80, 0x80))
_a6_64 = byte_class(64, (0xA6, 0xA6))
_break64 = byte_class(64, (10, 13), (0x1C, 0x1E), (0xC2, 0xC2), (0xE2, 0xE2))  # what a line break can begin with


@inner
def skip_space(p, end, page, table):  # type: ignore[no-untyped-def]
    """The first character from p on that is not white space, or `end`: the left side of str.strip."""
    while p < end:
        point, size = point_at(p, end)
        if not flags_of(page, table, point) & SPACE:
            break
        p += size
    return p


@inner
def trim_space(start, end, page, table):  # type: ignore[no-untyped-def]
    """The end of [start, end) without white space before it: the right side of str.strip."""
    while end > start:
        p = before(start, end)
        if not flags_of(page, table, point_at(p, end)[0]) & SPACE:
            break
        end = p
    return end


@inner
def line_break(p, end):  # type: ignore[no-untyped-def]
    """Bytes of the line break of str.splitlines at p, or 0."""
    b = peek8(p)
    if b < 0x20:
        if b == 13:
            return 2 if p + 1 < end and peek8(p + 1) == 10 else 1
        return 1 if 10 <= b <= 12 or 0x1C <= b <= 0x1E else 0
    if b == 0xC2:
        return 2 if p + 1 < end and peek8(p + 1) == 0x85 else 0
    if b == 0xE2 and p + 2 < end and peek8(p + 1) == 0x80:
        return 3 if peek8(p + 2) == 0xA8 or peek8(p + 2) == 0xA9 else 0
    return 0


@inner
def line_end(p, end):  # type: ignore[no-untyped-def]
    """Where the line of str.splitlines that p is in ends -> (end of the line, bytes of its line break)."""
    while p + 64 <= end:
        found = _break64(p)
        while found:
            at = p + lowest_bit(found)
            size = line_break(at, end)
            if size:
                return at, size
            found &= found - 1
        p += 64
    while p < end:
        size = line_break(p, end)
        if size:
            return p, size
        p += 1
    return end, 0


@inner
def ends_with_ellipsis(start, end):  # type: ignore[no-untyped-def]
    """Whether [start, end) ends with "..." or "…"."""
    if end - start < 3:
        return False
    a, b, c = peek8(end - 3), peek8(end - 2), peek8(end - 1)
    return (a == 46 and b == 46 and c == 46) or (a == 0xE2 and b == 0x80 and c == 0xA6)


@inner
def _hash(p, end):  # type: ignore[no-untyped-def]
    h = uint64(end - p)
    while p + 8 <= end:
        h = (h ^ peek64(p)) * uint64(0x9FB21C651E98DF25)
        h ^= h >> uint64(29)
        p += 8
    while p < end:
        h = (h ^ uint64(peek8(p))) * uint64(0x100000001B3)
        p += 1
    return mix64(h)


@inner
def _bytes_pass(start, end, row):  # type: ignore[no-untyped-def]
    """Counts characters, "#", "\\n" and ellipses."""
    chars, hashes, newlines, ellipses = end - start, 0, 0, 0
    p = counted = start  # an ellipsis is counted before p; it may reach beyond a block
    while counted < end:
        if counted + 66 <= end:
            behind = counted + 64
            chars -= count_bits(_behind_first64(counted))
            hashes += count_bits(_hash64(counted))
            newlines += count_bits(_newline64(counted))
            three = _stop64(counted) & _stop64(counted + 1)
            if not three | (_e2_64(counted) & _80_64(counted + 1) & _a6_64(counted + 2)):
                counted = behind
                continue
        else:
            behind = end
            for q in range(counted, end):
                b = peek8(q)
                chars -= b & 0xC0 == 0x80
                hashes += b == 35
                newlines += b == 10
        p = max(p, counted)
        while p < min(behind, end - 2):
            b = peek8(p)
            if b == 46 and peek8(p + 1) == 46 and peek8(p + 2) == 46:
                ellipses += 1
                p += 3
            else:
                if b == 0xE2:
                    ellipses += peek8(p + 1) == 0x80 and peek8(p + 2) == 0xA6
                p += 1
        counted = behind
    row[CHARS], row[HASHES], row[NEWLINES], row[ELLIPSES] = chars, hashes, newlines, ellipses


@inner
def _split_lines_pass(start, end, page, table, row):  # type: ignore[no-untyped-def]
    """Counts the lines of str.splitlines, bullets and ellipses among them."""
    lines = bullets = ellipses = 0
    while start < end:
        stop, size = line_end(start, end)
        lines += 1
        head = skip_space(start, stop, page, table)
        if head < stop:
            point, _ = point_at(head, stop)
            bullets += point == 45 or point == 0x2022
            ellipses += ends_with_ellipsis(head, trim_space(head, stop, page, table))
        start = stop + size
    row[SPLIT_LINES], row[BULLET_LINES], row[ELLIPSIS_LINES] = lines, bullets, ellipses


@inner
def _pieces_pass(start, end, page, table, short_chars, paragraphs, pieces, slots, row):  # type: ignore[no-untyped-def]
    """Counts the lines that end at "\\n", or the paragraphs of stripped text, and their second and later copies.

    pieces (n, 3) uint64: scratch, start and end and hash of each piece; slots (m,) int32: scratch, a hash table of them
    with m a power of two > n. Equal pieces are found by hash and compared byte by byte.
    """
    mask = len(slots) - 1
    n = lines = copies = copied_chars = full = terminal = short = full_copied_chars = 0
    piece = start
    while piece <= end:
        p = newline_at(piece, end)
        if paragraphs:
            while p < end and not (p + 1 < end and peek8(p + 1) == 10):
                p = newline_at(p + 1, end)
        # Between two runs of "\\n" no line is empty; before the first and behind the last one it is.
        if p > piece or piece == start or p == end:
            lines += 1
            h = _hash(piece, p)
            slot = int64(h) & mask
            copy = False
            while slots[slot] >= 0 and not copy:
                other = slots[slot]
                same = pieces[other, 2] == h and int64(pieces[other, 1] - pieces[other, 0]) == p - piece
                copy = same and equal_bytes(int64(pieces[other, 0]), piece, p - piece)
                slot = (slot + 1) & mask
            if not copy:
                slots[slot] = n
                pieces[n, 0], pieces[n, 1], pieces[n, 2] = piece, p, h
                n += 1
            # Only the length of a copy and of a line that may be short is needed.
            chars = count_points(piece, p) if copy or p - piece <= 4 * short_chars else short_chars + 1
            copies += copy
            copied_chars += chars if copy else 0
            if not paragraphs and skip_space(piece, p, page, table) < p:
                full += 1
                short += chars <= short_chars
                full_copied_chars += chars if copy else 0
                terminal += flags_of(page, table, point_at(before(piece, p), p)[0]) & TERMINAL != 0
        piece = p + 1
        if paragraphs and p < end:
            while piece < end and peek8(piece) == 10:
                piece += 1
    if paragraphs:
        row[PARAGRAPHS], row[DUPLICATE_PARAGRAPHS], row[DUPLICATE_PARAGRAPH_CHARS] = lines, copies, copied_chars
    else:
        row[LINES], row[DUPLICATE_LINES], row[DUPLICATE_LINE_CHARS] = lines, copies, copied_chars
        row[FULL_LINES], row[TERMINAL_LINES], row[SHORT_LINES] = full, terminal, short
        row[DUPLICATE_FULL_LINE_CHARS] = full_copied_chars


@njit(nogil=True, cache=True)
def line_measures(offsets, data, classes, short_chars, out):  # type: ignore[no-untyped-def]
    """Measures every document of a column. offsets, data: as `string_views` gives them.

    classes: `unicode.TABLES`. short_chars: the longest line that FineWeb calls short, in characters.
    out (documents, LINE_COLUMNS) int64, filled.
    """
    text = int64(data.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    slots = np.empty(16, np.int32)
    pieces = np.empty((16, 3), np.uint64)
    for document in range(len(offsets) - 1):
        start, end = text + offsets[document], text + offsets[document + 1]
        row = out[document]
        row[:] = 0
        _bytes_pass(start, end, row)
        size = 16
        while size < 2 * (row[NEWLINES] + 2):
            size *= 2
        if size > len(slots):
            slots = np.empty(size, np.int32)
            pieces = np.empty((size, 3), np.uint64)
        _split_lines_pass(start, end, page, table, row)
        if start < end:
            slots[:size] = -1
            _pieces_pass(start, end, page, table, short_chars, False, pieces, slots[:size], row)
        head = skip_space(start, end, page, table)
        tail = trim_space(head, end, page, table)
        slots[:size] = -1
        _pieces_pass(head, tail, page, table, short_chars, True, pieces, slots[:size], row)


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    out = np.empty((1, LINE_COLUMNS), np.int64)
    line_measures(np.array([0, 3]), np.frombuffer(b"a\nb", np.uint8), TABLES, 30, out)
