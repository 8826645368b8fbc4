"""Gopher's measures as dolma defines them (dolma 1.2.1, `taggers/gopher.py`, tagger `gopher_v2`).

A word is what `str.split()` gives: a run of characters that are not white space. A line is what
`re.split(r"\\n+", text)` gives: only the first and the last can be empty. An n-gram is n words in order, and its length
is that of its words, without what stands between them.

Words, lines and n-grams are numbered: two have one number where they are equal, byte for byte, so no hash decides a
value. A run of n words can only repeat where the two runs of n - 1 words in it repeat, so each level looks at what the
level before left.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import mix64, string_views
from gristmill.stages.kernels.memory import count_points, equal_bytes, flags_of, inner, peek8, peek64, point_at
from gristmill.stages.kernels.unicode import ALPHA, SPACE, TABLES

# Columns of `measure`.
CHARS = 0  # code points of the document
WORDS = 1
WORD_CHARS = 2  # code points of all words
MEDIAN_TWICE = 3  # twice the median of the words' code points: the sum of the two in the middle
SYMBOL_WORDS = 4  # words that hold "#" or "…"
ALPHA_WORDS = 5  # words that hold an alphabetic character
STOP_WORDS = 6  # words that are stop words, every occurrence
LINES = 7
BULLET_LINES = 8  # lines that begin with "*" or "-", white space before it not allowed
ELLIPSIS_LINES = 9  # lines that end with "…", white space behind it not allowed
DUPLICATE_LINES = 10  # lines that occur twice or more, every occurrence
DUPLICATE_LINE_CHARS = 11
TOP_2 = 12  # then 3, 4: characters of the most common n-gram, all its occurrences
DUPLICATE_5 = 15  # then 6 to 10: characters of n-grams that occur twice or more, every occurrence, overlaps counted
EVERY_5 = 21  # then 6 to 10: characters of all n-grams
COLUMNS = 27

_MULTIPLIER = 0x9FB21C651E98DF25


@inner
def _hash(p, end):  # type: ignore[no-untyped-def]
    h = uint64(end - p)
    while p + 8 <= end:
        h = (h ^ peek64(p)) * uint64(_MULTIPLIER)
        h ^= h >> uint64(29)
        p += 8
    rest = uint64(0)
    while p < end:
        rest = rest << uint64(8) | uint64(peek8(p))
        p += 1
    return mix64((h ^ rest) * uint64(_MULTIPLIER))


@inner
def _find_words(start, end, page, table, starts, ends, chars, row):  # type: ignore[no-untyped-def]
    """Fills starts, ends (addresses, int64) and chars of the words; gives their number and the longest one's chars."""
    n = total = symbols = alphas = longest = 0
    p = start
    while p < end:
        point, size = point_at(p, end)
        if flags_of(page, table, point) & SPACE:
            p += size
            continue
        word = p
        length = flags = symbol = 0
        while p < end:
            point, size = point_at(p, end)
            here = flags_of(page, table, point)
            if here & SPACE:
                break
            length += 1
            flags |= here
            symbol |= (point == 0x23) | (point == 0x2026)
            p += size
        starts[n], ends[n], chars[n] = word, p, length
        n += 1
        total += length
        symbols += symbol
        alphas += flags & ALPHA != 0
        longest = max(longest, length)
    row[WORDS], row[WORD_CHARS], row[SYMBOL_WORDS], row[ALPHA_WORDS] = n, total, symbols, alphas
    return n, longest


@inner
def _median_twice(chars, n, longest, tally):  # type: ignore[no-untyped-def]
    """Twice the median of chars[:n], none above `longest`; tally: scratch."""
    tally[: longest + 1] = 0
    for i in range(n):
        tally[chars[i]] += 1
    seen = length = int64(0)
    while seen + tally[length] <= (n - 1) // 2:
        seen += tally[length]
        length += 1
    low = length
    while seen + tally[length] <= n // 2:
        seen += tally[length]
        length += 1
    return low + length


@inner
def _count_stop_words(starts, ends, n, stops, stop_offsets):  # type: ignore[no-untyped-def]
    """How many of the words are one of the stop words, whose bytes lie behind each other from address `stops` on."""
    sizes = uint64(0)  # bit of the sizes that stop words have; 63 for all above
    for k in range(len(stop_offsets) - 1):
        sizes |= uint64(1) << uint64(min(stop_offsets[k + 1] - stop_offsets[k], 63))
    found = 0
    for i in range(n):
        size = ends[i] - starts[i]
        if not sizes >> uint64(min(size, 63)) & uint64(1):
            continue
        for k in range(len(stop_offsets) - 1):
            same = stop_offsets[k + 1] - stop_offsets[k] == size
            if same and equal_bytes(stops + stop_offsets[k], starts[i], size):
                found += 1
                break
    return found


@inner
def _find_lines(start, end, starts, ends, chars, row):  # type: ignore[no-untyped-def]
    """Fills starts, ends and chars of the lines; gives their number."""
    n = bullets = ellipses = 0
    p = start
    while True:
        line = p
        while p < end and peek8(p) != 10:
            p += 1
        starts[n], ends[n], chars[n] = line, p, count_points(line, p)
        n += 1
        if p > line:
            bullets += (peek8(line) == 42) | (peek8(line) == 45)
        if p - line >= 3:
            ellipses += (peek8(p - 3) == 0xE2) & (peek8(p - 2) == 0x80) & (peek8(p - 1) == 0xA6)
        if p == end:
            break
        while p < end and peek8(p) == 10:
            p += 1
    row[LINES], row[BULLET_LINES], row[ELLIPSIS_LINES] = n, bullets, ellipses
    return n


@inner
def _number(starts, ends, n, hashes, slots, ids, counts):  # type: ignore[no-untyped-def]
    """Numbers the pieces [starts[i], ends[i]): ids[i] is one number for equal pieces, counts[id] how many they are."""
    size = 16
    while size < 2 * n:
        size *= 2
    slots[:size] = -1
    distinct = 0
    for i in range(n):
        h = _hash(starts[i], ends[i])
        hashes[i] = h
        slot = int64(h & uint64(size - 1))
        while slots[slot] >= 0:
            k = slots[slot]
            same = hashes[k] == h and ends[k] - starts[k] == ends[i] - starts[i]
            if same and equal_bytes(starts[k], starts[i], ends[i] - starts[i]):
                break
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot] = i
            ids[i] = distinct
            counts[distinct] = 0
            distinct += 1
        else:
            ids[i] = ids[slots[slot]]
        counts[ids[i]] += 1


@inner
def _ngrams(n_words, before, ids, counts, left, grams, keys, numbers, tally, row):  # type: ignore[no-untyped-def]
    """Fills the columns of n-grams. before (words + 1,) int64: characters of the words before each word.

    ids, counts: of the words, as `_number` gave them; the rest is scratch. left: places of n-grams that may repeat;
    grams: the number of the n-gram at each place.
    """
    live = 0
    for i in range(n_words - 1):
        grams[i] = ids[i]
        if counts[ids[i]] > 1 and counts[ids[i + 1]] > 1:
            left[live] = i
            live += 1
    for n in range(2, min(n_words, 10) + 1):
        size = 16
        while size < 2 * live:
            size *= 2
        keys[:size] = 0
        distinct = 0
        for t in range(live):
            i = left[t]
            key = (uint64(grams[i]) << uint64(32) | uint64(ids[i + n - 1])) + uint64(1)  # 0 stands for an empty slot
            slot = int64(mix64(key) & uint64(size - 1))
            while keys[slot] != uint64(0) and keys[slot] != key:
                slot = (slot + 1) & (size - 1)
            if keys[slot] == uint64(0):
                keys[slot], numbers[slot], tally[distinct] = key, distinct, 0
                distinct += 1
            grams[i] = numbers[slot]
            tally[grams[i]] += 1
        most, at = int64(1), int64(0)  # of equally common n-grams the first; one that does not repeat counts too
        repeated = int64(0)
        for t in range(live):
            i = int64(left[t])
            times = int64(tally[grams[i]])
            if times > most:
                most, at = times, i
            if times > 1:
                repeated += before[i + n] - before[i]
        if n < 5:
            row[TOP_2 + n - 2] = most * (before[at + n] - before[at])
        else:
            every = int64(0)
            for i in range(n_words - n + 1):
                every += before[i + n] - before[i]
            row[DUPLICATE_5 + n - 5], row[EVERY_5 + n - 5] = repeated, every
        kept = 0
        for t in range(live - 1):
            i = left[t]
            if left[t + 1] == i + 1 and tally[grams[i]] > 1 and tally[grams[i + 1]] > 1:
                left[kept] = i
                kept += 1
        live = kept


@njit(nogil=True, cache=True)
def _measures(offsets, data, classes, stops, stop_offsets, repetition, out):  # type: ignore[no-untyped-def]
    """Measures every document of a column. offsets, data: as `string_views` gives them.

    classes: `unicode.TABLES`. stops (bytes,) uint8 and stop_offsets (stop words + 1,) int64.
    repetition: whether duplicate lines and n-grams are looked for; else their columns are 0.
    out (documents, COLUMNS) int64, filled.
    """
    text, first_stop = int64(data.ctypes.data), int64(stops.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    most = int64(0)
    for document in range(len(offsets) - 1):
        most = max(most, offsets[document + 1] - offsets[document])
    room = most // 2 + 3  # a word or a line has a byte and one behind it; the first and the last line may be empty
    slots_room = 16
    while slots_room < 2 * room:
        slots_room *= 2
    starts, ends, chars = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32)
    tally = np.empty(most + 1, np.int32)
    if not repetition:
        room = slots_room = 1
    hashes, before = np.empty(room, np.uint64), np.empty(room + 1, np.int64)
    ids, counts, left, grams = (
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
    )
    keys, slots = np.empty(slots_room, np.uint64), np.empty(slots_room, np.int32)
    for document in range(len(offsets) - 1):
        start, end = text + offsets[document], text + offsets[document + 1]
        row = out[document]
        row[:] = 0
        if start == end:
            continue
        row[CHARS] = count_points(start, end)
        n = _find_lines(start, end, starts, ends, chars, row)
        if repetition:
            _number(starts, ends, n, hashes, slots, ids, counts)
            for i in range(n):
                if counts[ids[i]] > 1:
                    row[DUPLICATE_LINES] += 1
                    row[DUPLICATE_LINE_CHARS] += chars[i]
        n, longest = _find_words(start, end, page, table, starts, ends, chars, row)
        if n == 0:
            continue
        row[MEDIAN_TWICE] = _median_twice(chars, n, longest, tally)
        row[STOP_WORDS] = _count_stop_words(starts, ends, n, first_stop, stop_offsets)
        if repetition:
            _number(starts, ends, n, hashes, slots, ids, counts)
            before[0] = 0
            for i in range(n):
                before[i + 1] = before[i] + chars[i]
            _ngrams(n, before, ids, counts, left, grams, keys, slots, tally, row)


def measure(text: pa.Array, stop_words: tuple[str, ...], *, repetition: bool) -> np.ndarray:
    """The counts of every document of a string column -> (documents, COLUMNS) int64.

    Without `repetition` the columns of duplicate lines and of n-grams are 0.
    """
    offsets, data = string_views(text)
    words = [word.encode() for word in dict.fromkeys(stop_words)]
    stop_offsets = np.cumsum([0, *map(len, words)], dtype=np.int64)
    stops = np.frombuffer(b"".join(words) + b"\0", np.uint8)
    out = np.empty((len(text), COLUMNS), np.int64)
    _measures(offsets, data, TABLES, stops, stop_offsets, repetition, out)
    return out


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    measure(pa.array(["a a\na"]), ("a",), repetition=True)
