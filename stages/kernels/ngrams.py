"""Measures of words and of repeated word n-grams, from word bounds.

The bounds may come from any splitter: fed with datatrove's own words, the measures are equal to datatrove's.
Everything works on 64-bit hashes of words; no string is built.

- The most common n-gram (n = 2, 3, 4) is a run of n words, compared word by word. A longer n-gram can only repeat where
  the shorter ones inside it repeat, so each level looks at what the level before left.
- Duplicated n-grams (n = 5 to 10) are compared as datatrove does, as the n words joined *without* spaces: "1 00" equals
  "10 0". That breaks the nesting, so every level is looked at in full, but through a bitmap: only hashes that meet a
  bit already set are ever put into a table.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import mix64
from gristmill.stages.kernels.memory import flags_of, inner, peek8, peek16, point_at
from gristmill.stages.kernels.unicode import ALPHA, PUNCTUATION, TABLES

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
_K = np.uint64(0xD6E8FEB86659FD93)


def word_hash(word: bytes) -> int:
    """The hash that the kernel gives a word: a polynomial in its bytes, so that hashes of joined words can be made."""
    h = 0
    for byte in word:
        h = (h * _BASE + byte + 1) & (2**64 - 1)
    return h


def stop_table(words: tuple[str, ...]) -> np.ndarray:
    """Stop words -> (slots,) uint64: their hashes by linear probing, 0 in empty slots. At most 4,096 words."""
    slots = 16
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


@njit(nogil=True, cache=True)
def word_measures(  # type: ignore[no-untyped-def]
    data, offsets, first, last, starts, ends, counts, classes, stops, hashes, powers, chars, out
):
    """Measures the words of documents first..last-1 and hashes them.

    starts, ends (words,) int32 and counts (documents,) int64: as a `WordGroup` has them.
    stops: `stop_table(...)`. hashes, powers (words,) uint64 and chars (words,) int32: filled for `ngram_measures`.
    out (documents, WORD_COLUMNS) int64: rows first..last-1 are filled.
    """
    text = int64(data.ctypes.data)
    page, table = int64(classes[0].ctypes.data), int64(classes[1].ctypes.data)
    mask = len(stops) - 1
    met = np.zeros(len(stops), np.int64)
    w = 0
    for document in range(first, last):
        base = text + offsets[document]
        alphas = non_symbols = length = distinct = 0
        begin, behind = w, w + counts[document]
        while w < behind:
            p, end = base + starts[w], base + ends[w]
            h, power = uint64(0), uint64(1)
            n = any_flags = 0
            all_flags = 0xFFFF
            while p < end:
                b = peek8(p)
                if b < 128:
                    flags = peek16(table + 2 * b)
                    h = h * _P + uint64(b + 1)
                    power *= _P
                    p += 1
                else:
                    point, size = point_at(p, end)
                    flags = flags_of(page, table, point)
                    for q in range(p, p + size):
                        h = h * _P + uint64(peek8(q) + 1)
                        power *= _P
                    p += size
                any_flags |= flags
                all_flags &= flags
                n += 1
            if any_flags & ALPHA:
                alphas += 1
            if not all_flags & PUNCTUATION:
                non_symbols += 1
                length += n
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


@inner
def _top_ngrams(hashes, chars, begin, words, grams, keys, counts, left, slots, row):  # type: ignore[no-untyped-def]
    """Fills row[TOP_2:] with the characters of the most common 2-, 3- and 4-gram, its words joined by spaces.

    Of equally common n-grams the first counts, as in datatrove; one that does not repeat counts too.
    """
    candidates = words - 1
    for i in range(words):
        grams[i] = mix64(hashes[begin + i])
        left[i] = i
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
            h = grams[i] * _P + mix64(hashes[begin + i + n - 1])
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
def _duplicate_ngrams(hashes, powers, chars, begin, words, grams, bits, keys, slots, row):  # type: ignore[no-untyped-def]
    """Fills row[DUPLICATE_5:] with the characters of n-grams seen before, left to right, without overlap.

    After a repeated n-gram the search goes on behind it; the n-grams it skipped are not remembered. As in datatrove.
    bits (m, 2) uint64: a bit for each hash seen, and for each seen again; 64 to 128 bits for each word, so that one
    word in a hundred meets another by chance.
    """
    shift = uint64(64 - 6)
    blocks = 1
    while blocks < words:
        blocks *= 2
        shift -= uint64(1)
    for i in range(words):
        grams[i] = hashes[begin + i]
    for n in range(2, 11):
        places = words - n + 1
        if places <= 0:
            break
        last = begin + n - 1
        if n < 5:
            for i in range(places):
                grams[i] = grams[i] * powers[last + i] + hashes[last + i]
            continue
        bits[:blocks] = 0
        meetings = 0
        for i in range(places):
            h = grams[i] * powers[last + i] + hashes[last + i]
            grams[i] = h
            slots[i] = ((h ^ (h >> uint64(32))) * _K) >> shift
        for i in range(places):  # apart from the arithmetic, which the compiler turns into vector instructions
            place = uint64(slots[i])
            block, bit = place >> uint64(6), uint64(1) << (place & uint64(63))
            met = bits[block, 0] & bit
            bits[block, 1] |= met
            bits[block, 0] |= bit
            meetings += met != uint64(0)
        if meetings:
            row[DUPLICATE_5 + n - 5] = _repeated_chars(chars, begin, places, n, meetings, grams, bits, keys, slots)


@inner
def _repeated_chars(chars, begin, places, n, meetings, grams, bits, keys, slots):  # type: ignore[no-untyped-def]
    """The walk of `_duplicate_ngrams` over the n-grams whose bit was met again: only these can be repeated."""
    size = 16
    while size < 4 * meetings:
        size *= 2
    mask = uint64(size - 1)
    keys[:size] = 0
    repeated, i = int64(0), 0
    while i < places:
        place = uint64(slots[i])
        if not (bits[place >> uint64(6), 1] >> (place & uint64(63))) & uint64(1):
            i += 1
            continue
        h = grams[i] if grams[i] else uint64(1)  # 0 stands for an empty slot
        slot = (h ^ (h >> uint64(32))) & mask
        while keys[slot] != uint64(0) and keys[slot] != h:
            slot = (slot + uint64(1)) & mask
        if keys[slot] == h:
            for j in range(i, i + n):
                repeated += chars[begin + j]
            i += n
        else:
            keys[slot] = h
            i += 1
    return repeated


@njit(nogil=True, cache=True)
def ngram_measures(first, last, counts, hashes, powers, chars, out):  # type: ignore[no-untyped-def]
    """Measures the repeated n-grams of documents first..last-1.

    hashes, powers, chars: as `word_measures` filled them. out (documents, NGRAM_COLUMNS) int64: rows first..last-1 are
    filled, in characters.
    """
    most = int64(1)
    for document in range(first, last):
        most = max(most, counts[document])
    size = 64
    while size < 4 * most:
        size *= 2
    keys = np.empty(size, np.uint64)
    tally = np.empty(size, np.int32)
    bits = np.empty((size, 2), np.uint64)
    grams = np.empty(most, np.uint64)
    left = np.empty(most, np.int32)
    slots = np.empty(most, np.uint32)
    begin = int64(0)
    for document in range(first, last):
        words = counts[document]
        row = out[document]
        row[:] = 0
        if words > 1:
            _top_ngrams(hashes, chars, begin, words, grams, keys, tally, left, slots, row)
            _duplicate_ngrams(hashes, powers, chars, begin, words, grams, bits, keys, slots, row)
        begin += words


def warm() -> None:
    """Compiles every kernel of this module for the types that the stages use."""
    data = np.frombuffer(b"a b", np.uint8)
    offsets, counts = np.array([0, 3]), np.array([2])
    starts, ends = np.array([0, 2], np.int32), np.array([1, 3], np.int32)
    hashes, powers, chars = np.empty(2, np.uint64), np.empty(2, np.uint64), np.empty(2, np.int32)
    words, grams = np.empty((1, WORD_COLUMNS), np.int64), np.empty((1, NGRAM_COLUMNS), np.int64)
    stops = stop_table(("a",))
    word_measures(data, offsets, 0, 1, starts, ends, counts, TABLES, stops, hashes, powers, chars, words)
    ngram_measures(0, 1, counts, hashes, powers, chars, grams)
