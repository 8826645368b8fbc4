# ruff: noqa: SIM110 - a loop is compiled to better code than a generator
"""Runs of words looked up in a table: which n-grams of evaluation items stand in a document, and where.

Words are those of `shingles`. A run of `size` words has one 64-bit hash: a polynomial of its words' hashes, salted with
the size and mixed, so that all sizes share one table. A look-up asks a bit filter first, which answers nearly all of
them from the cache; then an open-address table; what is found there is compared word for word with the item's text, so
that no hash collision is a hit.

    slots    (2^k,) uint64 hash of each n-gram, 0 for an empty slot; linear probing from the low bits
    grams    (2^k,) int32 number of the n-gram
    bits     (2^j / 64,) uint64, one bit for each leading j bits of a hash
    first    (n-grams,) int64: the word of the items' text at which each n-gram begins
    text     uint8: the items' normalised words, one space between the words of a text; `begins` and `ends`, (words,)
             int64, say where each is
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import decode, load8, mix64, string_views
from gristmill.stages.kernels.fold import DIGIT, HANGUL, POINT, SEQUENCE, SPACE, UNSEGMENTED, fold
from gristmill.stages.kernels.word_hashes import (
    GROWTH,
    PADDING,
    WORD,
    _address,
    _after_number,
    _entry,
    hash_words,
    normalise,
    word_hashes,
)

_GOLDEN = uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_SALT = uint64(0xD6E8FEB86659FD93)
FILTER_BITS_PER_GRAM = 16  # at most one look-up of another n-gram in 16 passes it


class Table(NamedTuple):
    """N-grams to look for; arrays as the module says."""

    slots: np.ndarray
    grams: np.ndarray
    bits: np.ndarray
    first: np.ndarray


@njit(inline="always")
def _finish(h, size):  # type: ignore[no-untyped-def]
    """The hash of a run from its polynomial; never 0."""
    mixed = mix64(h + uint64(size) * _SALT)
    return mixed if mixed != uint64(0) else uint64(1)


@njit(inline="always")
def _leaving(size):  # type: ignore[no-untyped-def]
    """GOLDEN ** size, the factor of the word that leaves a run."""
    factor = uint64(1)
    for _ in range(size):
        factor *= _GOLDEN
    return factor


@njit(nogil=True, cache=True)
def _normalise_texts(offsets, data, ascii_, page, table, sequences, text, begins, ends, hashes, weights, first):  # type: ignore[no-untyped-def]
    """Fills the arrays of `Words` -> (bytes, words) written."""
    at = int64(0)
    words = int64(0)
    longest = int64(0)
    for i in range(len(offsets) - 1):
        longest = max(longest, offsets[i + 1] - offsets[i])
    out = np.empty(GROWTH * longest + PADDING, np.uint8)
    stops = np.empty(longest + 2, np.int64)
    for i in range(len(offsets) - 1):
        first[i] = words
        length, count = normalise(data, offsets[i], offsets[i + 1], ascii_, page, table, sequences, out, stops)
        hash_words(out, stops, count, page, table, hashes, weights, words)
        for k in range(count):
            begins[words + k] = at + (stops[k - 1] + 1 if k > 0 else 0)
            ends[words + k] = at + stops[k]
        for k in range(length):
            text[at + k] = out[k]
        text[at + length] = 32
        at += length + 1
        words += count
    first[len(offsets) - 1] = words
    return at, words


class Words(NamedTuple):
    """The normalised words of some texts. Those of text i are first[i] .. first[i + 1] - 1."""

    text: np.ndarray  # uint8: the words, a space after each
    begins: np.ndarray  # (words,) int64, into `text`
    ends: np.ndarray  # (words,) int64
    hashes: np.ndarray  # (words,) uint64
    first: np.ndarray  # (texts + 1,) int64

    def of(self, i: int) -> bytes:
        """The words of text i, one space between them."""
        begin, end = int(self.first[i]), int(self.first[i + 1])
        return self.text[self.begins[begin] : self.ends[end - 1]].tobytes() if end > begin else b""


def words_of(texts: pa.Array) -> Words:
    """A string column (n,) -> its words."""
    offsets, data = string_views(texts)
    size = int(offsets[-1] - offsets[0]) if len(texts) else 0
    text = np.empty(GROWTH * size + len(texts) + PADDING, np.uint8)
    begins, ends = (np.empty(size + len(texts), np.int64) for _ in range(2))
    hashes, first = np.empty(size + len(texts), np.uint64), np.zeros(len(texts) + 1, np.int64)
    weights = np.full(size + len(texts), WORD, np.uint8)  # of no use here: every word counts as one
    length, words = _normalise_texts(offsets, data, *fold(), text, begins, ends, hashes, weights, first)
    return Words(text[:length].copy(), begins[:words].copy(), ends[:words].copy(), hashes[:words].copy(), first)


@njit(nogil=True, cache=True)
def _gram_hashes(hashes, first, texts, sizes, out, word, which):  # type: ignore[no-untyped-def]
    count = int64(0)
    for k in range(len(texts)):
        size = sizes[k]
        leaving = _leaving(size)
        h = uint64(0)
        begin = first[texts[k]]
        for i in range(begin, first[texts[k] + 1]):
            h = h * _GOLDEN + hashes[i]
            if i >= begin + size:
                h -= hashes[i - size] * leaving
            if i >= begin + size - 1:
                out[count] = _finish(h, size)
                word[count] = i - size + 1
                which[count] = texts[k]
                count += 1
    return count


def gram_hashes(words: Words, texts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The runs of sizes[k] words of text texts[k], for each k -> (hash uint64, word at which it begins, text)."""
    room = int(np.maximum(0, np.diff(words.first)[texts] - sizes + 1).sum())
    out, word, which = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64)
    _gram_hashes(words.hashes, words.first, texts.astype(np.int64), sizes.astype(np.int64), out, word, which)
    return out, word, which


@njit(nogil=True, cache=True)
def _insert(hashes, slots, grams, bits, shift):  # type: ignore[no-untyped-def]
    mask = uint64(len(slots) - 1)
    for gram in range(len(hashes)):
        h = hashes[gram]
        bit = h >> uint64(shift)
        bits[bit >> uint64(6)] |= uint64(1) << (bit & uint64(63))
        at = h & mask
        while slots[at] != 0:
            at = (at + uint64(1)) & mask
        slots[at] = h
        grams[at] = gram


def table_of(hashes: np.ndarray, first: np.ndarray) -> Table:
    """hashes (n,) uint64, each once, none 0; first (n,) int64 -> the table; n-gram i is number i."""
    size = 1 << max(4, int(2 * len(hashes)).bit_length())  # at most half full
    slots, grams = np.zeros(size, np.uint64), np.full(size, -1, np.int32)
    width = max(6, (FILTER_BITS_PER_GRAM * len(hashes)).bit_length())
    bits = np.zeros(1 << (width - 6), np.uint64)
    _insert(hashes, slots, grams, bits, 64 - width)
    return Table(slots, grams, bits, first.astype(np.int64))


@njit(inline="always")
def _gram_of(slots, grams, h):  # type: ignore[no-untyped-def]
    """The number of the n-gram with this hash, -1 where there is none."""
    mask = uint64(len(slots) - 1)
    at = h & mask
    while slots[at] != 0:
        if slots[at] == h:
            return int64(grams[at])
        at = (at + uint64(1)) & mask
    return int64(-1)


@njit(nogil=True, cache=True)
def _candidates(hashes, words, sizes, slots, grams, bits, shift, document, matches, count):  # type: ignore[no-untyped-def]
    """Appends (document, size, word, n-gram) for each run whose hash is in the table -> the count, which goes on where
    `matches` is full."""
    for k in range(len(sizes)):
        size = sizes[k]
        leaving = _leaving(size)
        h = uint64(0)
        for i in range(min(size - 1, words)):
            h = h * _GOLDEN + hashes[i]
        for i in range(size - 1, words):
            h = h * _GOLDEN + hashes[i]
            if i >= size:
                h -= hashes[i - size] * leaving
            mixed = _finish(h, size)
            bit = mixed >> uint64(shift)
            if (bits[bit >> uint64(6)] >> (bit & uint64(63))) & uint64(1):
                gram = _gram_of(slots, grams, mixed)
                if gram >= 0:
                    if count < len(matches):
                        matches[count, 0] = document
                        matches[count, 1] = size
                        matches[count, 2] = i - size + 1
                        matches[count, 3] = gram
                    count += 1
    return count


@njit(nogil=True, cache=True)
def _same(out, ends, word, size, text, begin, end):  # type: ignore[no-untyped-def]
    """Whether words word..word+size-1 of a document are text[begin:end]."""
    start = ends[word - 1] + 1 if word > 0 else 0
    if ends[word + size - 1] - start != end - begin:
        return False
    for i in range(end - begin):
        if out[start + i] != text[begin + i]:
            return False
    return True


@njit(nogil=True, cache=True)
def find(  # type: ignore[no-untyped-def]
    offsets,
    data,
    ascii_,
    page,
    table,
    sequences,
    sizes,
    inexact,
    slots,
    grams,
    bits,
    first,
    text,
    begins,
    ends,
    matches,
):
    """The runs of each document that are n-grams of the table -> how many there are.

    offsets (n + 1,) int64, data uint8: as `string_views` gives them. ascii_ to sequences: `fold()`. sizes: int64, in
    words. inexact: the size whose runs are not compared word for word, -1 for none. matches (room, 4) int64: document,
    size, word at which the run begins, n-gram; in the order of documents, then sizes, then words. Where the result is
    more than `room`, matches are incomplete: call again with that much room.
    """
    n = len(offsets) - 1
    longest = int64(0)
    for i in range(n):
        longest = max(longest, offsets[i + 1] - offsets[i])
    out = np.empty(GROWTH * longest + PADDING, np.uint8)
    stops = np.empty(longest + 2, np.int64)
    hashes = np.empty(longest + 2, np.uint64)
    weights = np.full(longest + 2, WORD, np.uint8)  # of no use here: every word counts as one
    width = 6
    while (1 << (width - 6)) < len(bits):
        width += 1
    shift = 64 - width
    count = int64(0)
    for i in range(n):
        words, _ = word_hashes(
            data, offsets[i], offsets[i + 1], ascii_, page, table, sequences, out, stops, hashes, weights
        )
        found = _candidates(hashes, words, sizes, slots, grams, bits, shift, i, matches, count)
        if found > len(matches):
            count = found  # no room: the rest is counted only
            continue
        known = False
        left = count
        for m in range(count, found):
            size, word, gram = matches[m, 1], matches[m, 2], matches[m, 3]
            if size != inexact:
                if not known:
                    normalise(data, offsets[i], offsets[i + 1], ascii_, page, table, sequences, out, stops)
                    known = True
                begin, end = begins[first[gram]], ends[first[gram] + size - 1]
                if not _same(out, stops, word, size, text, begin, end):
                    continue
            for column in range(4):
                matches[left, column] = matches[m, column]
            left += 1
        count = left
    return count


@njit(nogil=True, cache=True)
def word_spans(data, start, end, ascii_, page, table, sequences, spans):  # type: ignore[no-untyped-def]
    """Where the words of data[start:end] stand -> how many. The words are those of `normalise`, in its order.

    spans: int64, at least (end - start, 2); gets the bytes [begin, end) of each word, from the first to behind the last
    letter. A character that is several words gives each of them its own span.
    """
    at, page_at, table_at = _address(data), _address(page), _address(table)
    words = int64(0)
    inside = False
    p = start
    while p < end:
        f = ascii_[load8(data, p)]
        if f == 32:
            inside = False
            p += 1
            continue
        entry = int64(SPACE)
        length = 1
        if f == 0:
            point, length = decode(data, p, end)
            entry = _entry(page_at, table_at, int64(point))
        begin = p
        p += length
        if f == 0 and entry & DIGIT and not entry & (SPACE | SEQUENCE | HANGUL | UNSEGMENTED):
            p = _after_number(at + p, at + end, page_at, table_at) - at
        elif f == 0 and entry & SPACE:
            inside = False
            continue
        elif f == 0 and entry & (SEQUENCE | UNSEGMENTED) and not entry & HANGUL:
            row = int64(entry & POINT) if entry & SEQUENCE else 0
            parts = int64(sequences[row, 0]) if entry & SEQUENCE else 1
            for k in range(parts):
                part = sequences[row, 1 + k] if entry & SEQUENCE else entry
                if not inside or part & UNSEGMENTED:
                    spans[words, 0] = begin
                    words += 1
                spans[words - 1, 1] = p
                inside = not part & UNSEGMENTED
            continue
        if not inside:
            spans[words, 0] = begin
            words += 1
        spans[words - 1, 1] = p
        inside = True
    return words


@njit(nogil=True, cache=True)
def _densest(at, thing, things, length, width):  # type: ignore[no-untyped-def]
    inside = np.zeros(things, np.int64)
    distinct = int64(0)
    best, first, last = int64(0), int64(0), int64(0)
    begin = 0
    for i in range(len(at)):
        distinct += inside[thing[i]] == 0
        inside[thing[i]] += 1
        while at[begin] <= at[i] + width - 1 - length:
            inside[thing[begin]] -= 1
            distinct -= inside[thing[begin]] == 0
            begin += 1
        if distinct > best:
            best, first, last = distinct, at[begin], at[i] + width - 1
    return best, first, last


def densest(places: Sequence[Sequence[int]], length: int, width: int) -> tuple[int, tuple[int, int]]:
    """The stretch of at most `length` words in which most things occur -> (how many, its first and last word).

    places: for each thing the words at which it begins; it is `width` words long. The first stretch of several equal.
    """
    at = np.fromiter((a for found in places for a in found), np.int64)
    thing = np.repeat(np.arange(len(places)), [len(found) for found in places])
    order = np.argsort(at, kind="stable")
    best, first, last = _densest(at[order], thing[order], len(places), length, width)
    return int(best), (int(first), int(last))


def spans_of(text: bytes) -> np.ndarray:
    """The words of one document -> (words, 2) int64, bytes of the text."""
    data = np.frombuffer(text, np.uint8)
    spans = np.empty((3 * len(data) + 1, 2), np.int64)
    found: np.ndarray = spans[: word_spans(data, 0, len(data), *fold(), spans)]
    return found


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    words = words_of(pa.array(["one two"]))
    hashes, first, _ = gram_hashes(words, np.zeros(1, np.int64), np.full(1, 2, np.int64))
    table = table_of(hashes, first)
    data = string_views(pa.array(["One, two."]))[1]
    spans_of(b"One, two.")
    densest([[0], [1]], 4, 2)
    matches = np.empty((4, 4), np.int64)
    offsets, sizes = np.array([0, 9], np.int64), np.array([2], np.int64)
    find(offsets, data, *fold(), sizes, -1, *table, words.text, words.begins, words.ends, matches)
