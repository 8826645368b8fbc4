"""Text -> normalised words -> shingles: what two documents are compared by.

    text      "Ünï-code  costs 1,50 €. 中文"
    words     uni | code | costs | 0 | € | 中 | 文         `normalise`: UTF-8, one space between words
    hashes    64 bits for each word                        `word_hashes`: the same words, by a shorter way
    weights   4 | 2 | 4 | 2 ... of each word                `word_hashes`
    shingles  32 bits for each run of `ngram` words        `shingle`

Normalisation is datatrove's `simplify_text` (datatrove.utils.text, the one of FineWeb): lower case, each number "0",
punctuation and control characters a space, canonical decomposition without non-spacing marks (category Mn).
Deliberate differences, each with a test:
    - Words are what stands between spaces. In scripts without spaces (Han, kana, Thai, Lao, Khmer, Burmese) each
      character is a word. datatrove runs a tokenizer per language here. Such a word is short, so it weighs less in a
      shingle: see `shingle`.
    - Final sigma is sigma. Python's lower case asks for the neighbours of the letter; equal words stay equal.
    - Marks of category Mc keep their order. NFD sorts some of them by combining class (25 characters).
    - Runs of spaces that appear when a mark between them is dropped are one space.
    - Digits are those of the frozen Unicode version; datatrove's `regex` module knows newer ones.

What happens to a single code point is in the tables of `fold`.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint32, uint64

from gristmill.stages.kernels.buffers import mix64
from gristmill.stages.kernels.fold import Fold, fold
from gristmill.stages.kernels.word_hashes import GROWTH, PADDING, WORD, normalise, word_hashes

_GOLDEN = uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_INVERSE = uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))  # of the golden ratio above, modulo 2^64


@njit(nogil=True, cache=True)
def _weighted(hashes, weights, words, total, least, shingles):  # type: ignore[no-untyped-def]
    """`shingle` of words of different weight. total > 0, the weight of all; least: of a run."""
    h = uint64(0)
    factor = uint64(1)  # GOLDEN ** words of the run
    end = int64(0)
    weight = int64(0)  # of the run
    left = total  # weight of the words from i on
    count = 0
    mixed = uint64(0)
    for i in range(words):
        here = int64(weights[i])
        if here > 0:
            if count > 0 and left < least:
                break
            last = left - here < least
            while end < words and (last or weight < least):
                h = h * _GOLDEN + hashes[end]
                factor *= _GOLDEN
                weight += int64(weights[end])
                end += 1
            mixed = mix64(h)
            shingles[count] = uint32(mixed >> uint64(32))
            count += 1
        if end <= i:
            end = i + 1
            continue
        factor *= _INVERSE
        h -= hashes[i] * factor
        weight -= here
        left -= here
    return count, mixed


@njit(nogil=True, cache=True)
def _fives(hashes, words, shingles):  # type: ignore[no-untyped-def]
    """`shingle` of 5 words: five products are more than the three of a rolling hash, but need not wait for the run
    before, so that the compiler makes vectors of them."""
    count = words - 4
    first, second, third, fourth, fifth = (hashes[:count], hashes[1:], hashes[2:], hashes[3:], hashes[4:])
    h = uint64(0)
    for i in range(count):
        h = (((first[i] * _GOLDEN + second[i]) * _GOLDEN + third[i]) * _GOLDEN + fourth[i]) * _GOLDEN + fifth[i]
        shingles[i] = uint32(mix64(h) >> uint64(32))
    return count, mix64(h)


@njit(nogil=True, cache=True)
def shingle(hashes, weights, words, total, ngram, shingles):  # type: ignore[no-untyped-def]
    """Word hashes -> one hash for each run of `ngram` words; -> (how many, the 64-bit hash of the last run).

    shingles: uint32, at least max(1, words). Fewer than `ngram` words are one run. No words, no shingle. The hash of
    a run is a polynomial of its words' hashes, mixed; only its upper half is stored.

    A run begins at each word and ends as soon as its weight is WORD * ngram; the last one that gets there goes on to
    the end of the document. Words between spaces weigh WORD, so that a run has `ngram` of them. Two characters of Han
    or kana, or four letters of Thai, Lao, Khmer or Burmese, weigh as much as a word: a run of `ngram` = 5 has 10 of
    the former, 20 of the latter. Five would be too few: unrelated documents share runs of five letters (a Jaccard
    similarity up to 0.36 between unrelated books, marin-community/marin#6854).
    """
    if total == 0:
        return 0, uint64(0)
    if total != WORD * words:
        return _weighted(hashes, weights, words, total, WORD * ngram, shingles)
    size = min(ngram, words)
    if size == 5:
        return _fives(hashes, words, shingles)
    leaving = uint64(1)  # GOLDEN ** size, the factor of the word that leaves the run
    h = uint64(0)
    for i in range(size):
        h = h * _GOLDEN + hashes[i]
        leaving *= _GOLDEN
    mixed = mix64(h)
    shingles[0] = uint32(mixed >> uint64(32))
    count = 1
    for i in range(size, words):
        h = h * _GOLDEN + hashes[i] - hashes[i - size] * leaving
        mixed = mix64(h)
        shingles[count] = uint32(mixed >> uint64(32))
        count += 1
    return count, mixed


@njit(nogil=True, cache=True)
def _sort(values, count, spare, begin):  # type: ignore[no-untyped-def]
    """Sorts values[:count], hashes, in place: into about `count` buckets by the highest bits, then by insertion."""
    bits = 1
    while bits < 24 and (2 << bits) <= count:
        bits += 1
    shift = uint32(32 - bits)
    begin[: (1 << bits) + 1] = 0
    for i in range(count):
        begin[int64(values[i] >> shift) + 1] += 1
    for bucket in range(1 << bits):
        begin[bucket + 1] += begin[bucket]
    for i in range(count):
        bucket = int64(values[i] >> shift)
        spare[begin[bucket]] = values[i]
        begin[bucket] += 1
    moves = 64 * count  # what insertion may cost; a few values, often repeated, in one bucket would cost more
    for i in range(count):
        value = spare[i]
        j = i
        while j > 0 and values[j - 1] > value and moves > 0:
            values[j] = values[j - 1]
            j -= 1
            moves -= 1
        values[j] = value
    if moves == 0:
        values[:count] = spare[:count]
        values[:count].sort()


@njit(nogil=True, cache=True)
def distinct(shingles, count, cap, spare, begin):  # type: ignore[no-untyped-def]
    """Sorts shingles[:count], drops repeats and all but the `cap` smallest, in place -> how many are left.

    The smallest hashes are a uniform sample of the set, the same one wherever the set is met (bottom-k sampling).
    spare: uint32, at least `count`; begin: int32, at least `count` + 3.
    """
    _sort(shingles, count, spare, begin)
    left = 0
    for i in range(count):
        if i == 0 or shingles[i] != shingles[i - 1]:
            if left == cap:
                break
            shingles[left] = shingles[i]
            left += 1
    return left


def normalised(text: str, tables: Fold | None = None) -> str:
    """The normalised text of one document: for tests, inspection and reports, not for whole corpora."""
    data = np.frombuffer(text.encode() + bytes(PADDING), np.uint8)
    size = len(data) - PADDING
    out = np.empty(GROWTH * size + PADDING, np.uint8)
    length, _ = normalise(data, 0, size, *(tables or fold()), out, np.empty(size + 2, np.int64))
    return out[:length].tobytes().decode()


def shingle_set(text: str, ngram: int, tables: Fold | None = None) -> np.ndarray:
    """The distinct shingle hashes of one document, sorted, uint32: for tests, inspection and reports."""
    data = np.frombuffer(text.encode() + bytes(PADDING), np.uint8)
    size = len(data) - PADDING
    out, ends = np.empty(GROWTH * size + PADDING, np.uint8), np.empty(size + 2, np.int64)
    hashes, weights = np.empty(size + 2, np.uint64), np.full(size + 2, WORD, np.uint8)
    words, total = word_hashes(data, 0, size, *(tables or fold()), out, ends, hashes, weights)
    shingles = np.empty(words + 1, np.uint32)
    count, _ = shingle(hashes, weights, words, total, ngram, shingles)
    left = distinct(shingles, count, count, np.empty(count, np.uint32), np.empty(count + 3, np.int32))
    return shingles[:left].copy()


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    normalised("a")
    shingle_set("a few words, enough to compile", 5)
