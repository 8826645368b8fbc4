"""Measures of words and of repeated word n-grams, from word bounds.

The bounds may come from any splitter: fed with datatrove's own words, the measures are equal to datatrove's.
Everything works on 64-bit hashes of words; no string is built.

- The most common n-gram (n = 2, 3, 4) is a run of n words, compared word by word. A longer n-gram can only repeat where
  the shorter ones inside it repeat, so each level looks at what the level before left.
- Duplicated n-grams (n = 5 to 10) are compared as datatrove does, as the n words joined *without* spaces: "1 00" equals
  "10 0". That breaks the nesting of words, but not that of bytes: two equal n-grams of at least 12 bytes begin with the
  same 12 bytes. So the levels look only at places whose first 12 bytes come again, and at n-grams that are shorter.

Which pairs of words, and which 12 bytes, come again is asked of a bitmap, where one in fifty does by chance; only those
are put into a table.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import mix64
from gristmill.stages.kernels.memory import (
    byte_class,
    flags_of,
    inner,
    peek8,
    peek32,
    peek64,
    point_at,
    poke8,
    poke64,
)
from gristmill.stages.kernels.unicode import ALPHA, ASCII_CLASS, PUNCTUATION, TABLES

# Columns of `word_measures`.
WORDS = 0
NON_SYMBOL_WORDS = 1  # words with a character outside datatrove's PUNCTUATION_SET
NON_SYMBOL_CHARS = 2  # their characters
ALPHA_WORDS = 3  # words with an alphabetic character
STOP_WORDS = 4  # distinct stop words met
WORD_COLUMNS = 5

# Columns of `ngram_measures`, in characters.
TOP_2 = 0  # then 3, 4
DUPLICATE_5 = 3  # then 6 to 10
NGRAM_COLUMNS = 9

_BASE = 0x9FB21C651E98DF25  # of the polynomial hash of a word's bytes: odd, no structure
_P = np.uint64(_BASE)
_P2 = np.uint64(_BASE**2 % 2**64)
_P4 = np.uint64(_BASE**4 % 2**64)
_P8 = np.uint64(_BASE**8 % 2**64)
_K = np.uint64(0xD6E8FEB86659FD93)
_BLOCK = 16  # bytes of a word that are hashed at once
# For a word of n bytes, n up to _BLOCK: the power of the base; its inverse for the bytes that a block has behind the
# word; the sum of the powers below n, for the 1 that is added to every byte.
_POWERS = np.array([_BASE**n % 2**64 for n in range(_BLOCK + 1)], np.uint64)
_UNDO = np.array([pow(_BASE, n - 8 if n <= 8 else n - _BLOCK, 2**64) for n in range(_BLOCK + 1)], np.uint64)
_ONES = np.array([sum(_BASE**k for k in range(n)) % 2**64 for n in range(_BLOCK + 1)], np.uint64)
_BEGINNING = 12  # bytes of an n-gram that must come again
SPARE = 16  # bytes behind the joined words that may be read and written
_BITS = 5  # 2**5 bits for each word at least


def _ascii_ranges(flag: int) -> list[tuple[int, int]]:
    """The ranges of ASCII characters of a class, both ends included."""
    members = np.flatnonzero(ASCII_CLASS[:128] & flag)
    return [(int(part[0]), int(part[-1])) for part in np.split(members, np.flatnonzero(np.diff(members) > 1) + 1)]


_alpha16 = byte_class(16, *_ascii_ranges(ALPHA))
_punctuation16 = byte_class(16, *_ascii_ranges(PUNCTUATION))
_wide16 = byte_class(16, (0x80, 0xFF))


def word_hash(word: bytes) -> int:
    """The hash that the kernel gives a word: a polynomial in its bytes, so that hashes of joined words can be made."""
    h = 0
    for byte in word:
        h = (h * _BASE + byte + 1) & (2**64 - 1)
    return h


def stop_table(words: tuple[str, ...]) -> np.ndarray:
    """Stop words -> (slots,) uint64: their hashes by linear probing, 0 in empty slots. At most 4,096 words."""
    slots = 256  # few words meet a slot that is taken
    while slots < 4 * len(words):
        slots *= 2
    table = np.zeros(slots, np.uint64)
    for word in dict.fromkeys(words):
        h = word_hash(word.encode())
        slot = (h ^ (h >> 29)) & (slots - 1)
        while table[slot]:
            slot = (slot + 1) & (slots - 1)
        table[slot] = h
    return table


@inner
def _eight(word):  # type: ignore[no-untyped-def]
    """The polynomial of the 8 bytes of a uint64, lowest byte first, without the 1 for every byte."""
    low = uint64(0xFF)
    a = (word & low) * _P + (word >> uint64(8) & low)
    b = (word >> uint64(16) & low) * _P + (word >> uint64(24) & low)
    c = (word >> uint64(32) & low) * _P + (word >> uint64(40) & low)
    d = (word >> uint64(48) & low) * _P + (word >> uint64(56))
    return (a * _P2 + b) * _P4 + (c * _P2 + d)


@inner
def _short_hash(p, size):  # type: ignore[no-untyped-def]
    """`word_hash` of the `size` <= _BLOCK bytes at p; _BLOCK bytes may be read."""
    if size <= 8:
        first = peek64(p) & (uint64(0xFFFFFFFFFFFFFFFF) >> uint64(64 - 8 * size))
        return _eight(first) * _UNDO[size] + _ONES[size]
    rest = peek64(p + 8) & (uint64(0xFFFFFFFFFFFFFFFF) >> uint64(128 - 8 * size))
    return (_eight(peek64(p)) * _P8 + _eight(rest)) * _UNDO[size] + _ONES[size]


@inner
def _any_word(p, end, page, table):  # type: ignore[no-untyped-def]
    """The word [p, end) -> (hash, power, characters, whether any is alphabetic, whether all are punctuation)."""
    h, power = uint64(0), uint64(1)
    n = any_flags = 0
    all_flags = 0xFFFF
    while p < end:
        point, size = point_at(p, end)
        flags = flags_of(page, table, point)
        for q in range(p, p + size):
            h = h * _P + uint64(peek8(q) + 1)
            power *= _P
        p += size
        any_flags |= flags
        all_flags &= flags
        n += 1
    return h, power, n, any_flags & ALPHA != 0, all_flags & PUNCTUATION != 0


@njit(nogil=True, cache=True)
def word_measures(  # type: ignore[no-untyped-def]
    data, offsets, first, last, starts, ends, counts, classes, stops, hashes, powers, chars, places, joined, out
):
    """Measures the words of documents first..last-1 and hashes them.

    starts, ends (words,) int32 and counts (documents,) int64: as a `WordGroup` has them.
    stops: `stop_table(...)`. Filled for `ngram_measures`: hashes, powers (words,) uint64, chars (words,) int32, joined
    (bytes of the words + SPARE,) uint8 and places (words + 1,) int32: the words without what lies between them, and
    where each begins there.
    out (documents, WORD_COLUMNS) int64: rows first..last-1 are filled.
    """
    text, to = int64(data.ctypes.data), int64(joined.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    mask = len(stops) - 1
    met = np.zeros(len(stops), np.int64)
    w = at = 0
    for document in range(first, last):
        base = text + offsets[document]
        limit = text + offsets[document + 1]
        alphas = non_symbols = length = distinct = 0
        begin, behind = w, w + counts[document]
        while w < behind:
            p, end = base + starts[w], base + ends[w]
            size = end - p
            places[w] = at
            every = (1 << min(size, _BLOCK)) - 1
            if 0 < size <= _BLOCK and p + _BLOCK <= limit and not _wide16(p) & every:
                h, power, n = _short_hash(p, size), _POWERS[size], size
                poke64(to + at, peek64(p))
                poke64(to + at + 8, peek64(p + 8))
                alpha, symbol = _alpha16(p) & every != 0, _punctuation16(p) & every == every
            else:
                h, power, n, alpha, symbol = _any_word(p, end, page, table)
                for i in range(size):
                    poke8(to + at + i, peek8(p + i))
            at += size
            alphas += alpha
            non_symbols += not symbol
            length += 0 if symbol else n
            slot = int64(h ^ (h >> uint64(29))) & mask
            while stops[slot] != uint64(0):
                if stops[slot] == h:
                    if met[slot] != document + 1:
                        met[slot] = document + 1
                        distinct += 1
                    break
                slot = (slot + 1) & mask
            hashes[w], powers[w], chars[w] = h, power, n
            w += 1
        out[document, WORDS] = behind - begin
        out[document, NON_SYMBOL_WORDS] = non_symbols
        out[document, NON_SYMBOL_CHARS] = length
        out[document, ALPHA_WORDS] = alphas
        out[document, STOP_WORDS] = distinct
    places[w] = at


@inner
def _mark(slots, n, bits):  # type: ignore[no-untyped-def]
    """Sets the bits slots[:n] and returns how many were set before.

    slots (n,) uint32: places of bits; bits (m, 2) uint64, zeros: those set, and those set again.
    """
    meetings = 0
    for i in range(n):
        place = uint64(slots[i])
        block, bit = place >> uint64(6), uint64(1) << (place & uint64(63))
        met = bits[block, 0] & bit
        bits[block, 1] |= met
        bits[block, 0] |= bit
        meetings += met != uint64(0)
    return meetings


@inner
def _again(slot, bits):  # type: ignore[no-untyped-def]
    """1 if the bit was set again, else 0."""
    place = uint64(slot)
    return int64((bits[place >> uint64(6), 1] >> (place & uint64(63))) & uint64(1))


@inner
def _bitmap_size(words):  # type: ignore[no-untyped-def]
    """(blocks of 64 bits, shift that leaves a bit's place of a uint64) for so many words."""
    blocks, shift = 1, uint64(64 - 6)
    while blocks << (6 - _BITS) < words:
        blocks *= 2
        shift -= uint64(1)
    return blocks, shift


@inner
def _top_ngrams(hashes, chars, begin, words, grams, keys, counts, left, bits, slots, row):  # type: ignore[no-untyped-def]
    """Fills row[TOP_2:] with the characters of the most common 2-, 3- and 4-gram, its words joined by spaces.

    Of equally common n-grams the first counts, as in datatrove; one that does not repeat counts too.
    """
    for i in range(words):
        grams[i] = mix64(hashes[begin + i])
    blocks, shift = _bitmap_size(words)
    bits[:blocks] = 0
    for i in range(words - 1):
        slots[i] = ((grams[i] * _P + grams[i + 1]) * _K) >> shift
    candidates = 0
    if _mark(slots, words - 1, bits):
        for i in range(words - 1):
            left[candidates] = i
            candidates += _again(slots[i], bits)
    for n in range(2, 5):
        if words < n:
            break
        size = 64
        while size < 2 * candidates:
            size *= 2
        mask = uint64(size - 1)  # unsigned: no negative index to look out for
        keys[:size] = 0
        live = 0
        for t in range(candidates):
            i = left[t]
            if i + n > words:
                break
            h = grams[i] * _P + mix64(hashes[begin + i + n - 1])  # grams[i + n - 1] has grown meanwhile
            h = h if h else uint64(1)  # 0 stands for an empty slot
            grams[i] = h
            slot = (h ^ (h >> uint64(32))) & mask
            while keys[slot] != h:
                if keys[slot] == uint64(0):
                    keys[slot], counts[slot] = h, 0
                    break
                slot = (slot + uint64(1)) & mask
            counts[slot] += 1
            slots[t] = slot
            live += 1
        most, at = int64(1), int64(0)
        for t in range(live):
            if counts[slots[t]] > most:
                most, at = int64(counts[slots[t]]), int64(left[t])
        length = int64(n - 1)
        for i in range(at, at + n):
            length += chars[begin + i]
        row[TOP_2 + n - 2] = length * most
        # the n-gram at i can repeat at the next level only if those at i and i + 1 repeat at this one
        candidates = 0
        for t in range(live - 1):
            i = left[t]
            if left[t + 1] == i + 1 and counts[slots[t]] > 1 and counts[slots[t + 1]] > 1:
                left[candidates] = i
                candidates += 1


@inner
def _duplicate_ngrams(  # type: ignore[no-untyped-def]
    hashes, powers, chars, places, text, begin, words, grams, keys, left, bits, slots, row
):
    """Fills row[DUPLICATE_5:] with the characters of n-grams seen before, left to right, without overlap.

    After a repeated n-gram the search goes on behind it; the n-grams it skipped are not remembered. As in datatrove.
    text: address of the joined words.
    """
    blocks, shift = _bitmap_size(words)
    bits[:blocks] = 0
    for i in range(words - 4):
        p = text + places[begin + i]
        h = (peek64(p) ^ (uint64(peek32(p + 8)) * _P)) * _K
        slots[i] = ((h ^ (h >> uint64(32))) * _K) >> shift
    _mark(slots, words - 4, bits)
    candidates = 0
    for i in range(words - 4):
        short = int64(places[begin + i + 5] - places[begin + i] < _BEGINNING)
        left[candidates] = i
        candidates += _again(slots[i], bits) | short
    for t in range(candidates):
        i = begin + left[t]
        h = hashes[i]
        for k in range(i + 1, i + 4):
            h = h * powers[k] + hashes[k]
        grams[t] = h
    blocks, shift = _bitmap_size(candidates)
    for n in range(5, 11):
        while candidates and left[candidates - 1] + n > words:
            candidates -= 1
        bits[:blocks] = 0
        for t in range(candidates):
            last = begin + left[t] + n - 1
            h = grams[t] * powers[last] + hashes[last]
            grams[t] = h
            slots[t] = ((h ^ (h >> uint64(32))) * _K) >> shift
        meetings = _mark(slots, candidates, bits)
        if meetings:
            row[DUPLICATE_5 + n - 5] = _repeated_chars(
                chars, begin, left, candidates, n, meetings, grams, bits, keys, slots
            )


@inner
def _repeated_chars(chars, begin, left, candidates, n, meetings, grams, bits, keys, slots):  # type: ignore[no-untyped-def]
    """The walk of `_duplicate_ngrams` over the n-grams whose bit was met again: only these can be repeated."""
    size = 16
    while size < 4 * meetings:
        size *= 2
    mask = uint64(size - 1)
    keys[:size] = 0
    repeated, free = int64(0), int64(0)  # no n-gram that begins before `free` counts
    for t in range(candidates):
        i = int64(left[t])
        if i < free or not _again(slots[t], bits):
            continue
        h = grams[t] if grams[t] else uint64(1)  # 0 stands for an empty slot
        slot = (h ^ (h >> uint64(32))) & mask
        while keys[slot] != uint64(0) and keys[slot] != h:
            slot = (slot + uint64(1)) & mask
        if keys[slot] == h:
            for j in range(begin + i, begin + i + n):
                repeated += chars[j]
            free = i + n
        else:
            keys[slot] = h
    return repeated


@njit(nogil=True, cache=True)
def ngram_measures(first, last, counts, hashes, powers, chars, places, joined, out):  # type: ignore[no-untyped-def]
    """Measures the repeated n-grams of documents first..last-1.

    hashes, powers, chars, places, joined: as `word_measures` filled them. out (documents, NGRAM_COLUMNS) int64: rows
    first..last-1 are filled, in characters.
    """
    most = int64(1)
    for document in range(first, last):
        most = max(most, counts[document])
    size = 64
    while size < 4 * most:
        size *= 2
    keys = np.empty(size, np.uint64)
    tally = np.empty(size, np.int32)
    bits = np.empty((_bitmap_size(most)[0], 2), np.uint64)
    grams = np.empty(most, np.uint64)
    left = np.empty(most, np.int32)
    slots = np.empty(most, np.uint32)
    begin, text = int64(0), int64(joined.ctypes.data)
    for document in range(first, last):
        words = counts[document]
        row = out[document]
        row[:] = 0
        if words > 1:
            _top_ngrams(hashes, chars, begin, words, grams, keys, tally, left, bits, slots, row)
        if words > 4:
            _duplicate_ngrams(hashes, powers, chars, places, text, begin, words, grams, keys, left, bits, slots, row)
        begin += words


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    data = np.frombuffer(b"a b", np.uint8)
    offsets, counts = np.array([0, 3]), np.array([2])
    starts, ends = np.array([0, 2], np.int32), np.array([1, 3], np.int32)
    hashes, powers, chars = np.empty(2, np.uint64), np.empty(2, np.uint64), np.empty(2, np.int32)
    words, grams = np.empty((1, WORD_COLUMNS), np.int64), np.empty((1, NGRAM_COLUMNS), np.int64)
    stops = stop_table(("a",))
    places, joined = np.empty(3, np.int32), np.empty(2 + SPARE, np.uint8)
    word_measures(
        data, offsets, 0, 1, starts, ends, counts, TABLES, stops, hashes, powers, chars, places, joined, words
    )
    ngram_measures(0, 1, counts, hashes, powers, chars, places, joined, grams)
