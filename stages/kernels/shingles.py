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

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint8, uint32, uint64
from numba.extending import intrinsic

from gristmill.stages.kernels.buffers import decode, load8, load64, mix64
from gristmill.stages.kernels.fold import (
    DIGIT,
    HANGUL,
    POINT,
    SEPARATOR,
    SEQUENCE,
    SPACE,
    UNSEGMENTED,
    Fold,
    fold,
)

PADDING = 64  # bytes that must follow the words in a buffer: they are read, eight at a time, and ignored
WORD = 4  # weight of a word between spaces in a shingle
CHARACTER = 2  # of a character of Han or kana
LETTER = 1  # of a letter of Thai, Lao, Khmer, Burmese
GROWTH = 3  # normalised UTF-8 is at most 3 times as long: a Hangul syllable of 3 bytes gives 3 letters of 3 bytes

_GOLDEN = uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_LENGTH = uint64(0xD6E8FEB86659FD93)  # odd, random
_ONES = uint64(0xFFFFFFFFFFFFFFFF)
_INVERSE = uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))  # of the golden ratio above, modulo 2^64
_SMALL = uint64(0x2020202020202020)  # makes ASCII letters small
_LOW = uint64(0x7F7F7F7F7F7F7F7F)
_HIGH = uint64(0x8080808080808080)


def _trailing_zeros() -> Any:
    @intrinsic
    def count(typing_context: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.uint64(types.uint64), generate

    return count


_low_zeros = _trailing_zeros()  # bits below the lowest that is set; 64 for zero


@njit(inline="always")
def _entry(page, table, point):  # type: ignore[no-untyped-def]
    return table[int64(page[point >> uint32(8)]) * 256 + int64(point & uint32(255))]


@njit(inline="always")
def _write(out, o, point):  # type: ignore[no-untyped-def]
    """Writes a code point as UTF-8 at byte o -> where the next one goes."""
    if point < 0x80:
        out[o] = uint8(point)
        return o + 1
    if point < 0x800:
        out[o] = uint8(0xC0 | (point >> uint32(6)))
        out[o + 1] = uint8(0x80 | (point & uint32(0x3F)))
        return o + 2
    if point < 0x10000:
        out[o] = uint8(0xE0 | (point >> uint32(12)))
        out[o + 1] = uint8(0x80 | ((point >> uint32(6)) & uint32(0x3F)))
        out[o + 2] = uint8(0x80 | (point & uint32(0x3F)))
        return o + 3
    out[o] = uint8(0xF0 | (point >> uint32(18)))
    out[o + 1] = uint8(0x80 | ((point >> uint32(12)) & uint32(0x3F)))
    out[o + 2] = uint8(0x80 | ((point >> uint32(6)) & uint32(0x3F)))
    out[o + 3] = uint8(0x80 | (point & uint32(0x3F)))
    return o + 4


@njit(inline="always")
def _after_number(data, p, end, page, table):  # type: ignore[no-untyped-def]
    """Where the number that begins with the digit before byte p ends: digits, one separator, digits."""
    separated = False
    while p < end:
        point, length = decode(data, p, end)
        entry = _entry(page, table, point)
        if entry & DIGIT:
            p += length
        elif entry & SEPARATOR and not separated and p + length < end:
            following, width = decode(data, p + length, end)
            if not _entry(page, table, following) & DIGIT:
                return p
            separated = True
            p += length + width
        else:
            return p
    return p


@njit(nogil=True, cache=True)
def normalise(data, start, end, ascii_, page, table, sequences, out, ends):  # type: ignore[no-untyped-def]
    """The words of data[start:end], one space between them -> (bytes written, words).

    out: uint8, at least GROWTH * (end - start) + PADDING bytes. ends: int64, at least end - start + 2; gets where
    each word ends in `out`, so that word i is out[ends[i - 1] + 1 : ends[i]].

    ASCII takes no branch but the loop's: a separator after a separator is written over, and the end of a word is
    stored at each byte and counted at the byte that ends a word.
    """
    o = int64(0)
    words = int64(0)
    gap = True  # nothing but a space stands before o
    p = start
    while p < end:
        f = load8(ascii_, int64(load8(data, p)))
        if f != 0:
            letter = f != 32
            out[o] = f
            ends[words] = o
            words += int64((not letter) & (not gap))
            o += int64(letter | (not gap))
            gap = not letter
            p += 1
            continue
        point, length = decode(data, p, end)
        p += length
        entry = _entry(page, table, point)
        if entry & (SPACE | SEQUENCE | HANGUL | UNSEGMENTED | DIGIT) == 0:
            o = _write(out, o, entry & POINT)
            gap = False
        elif entry & SPACE:
            if not gap:
                ends[words] = o
                words += 1
                out[o] = 32
                o += 1
                gap = True
        elif entry & DIGIT:
            p = _after_number(data, p, end, page, table)
            out[o] = 48
            o += 1
            gap = False
        elif entry & HANGUL:
            syllable = (entry & POINT) - uint32(0xAC00)
            o = _write(out, o, uint32(0x1100) + syllable // uint32(588))
            o = _write(out, o, uint32(0x1161) + (syllable % uint32(588)) // uint32(28))
            if syllable % uint32(28):
                o = _write(out, o, uint32(0x11A7) + syllable % uint32(28))
            gap = False
        else:
            row = int64(entry & POINT) if entry & SEQUENCE else 0
            count = int64(sequences[row, 0]) if entry & SEQUENCE else 1
            for k in range(count):
                part = sequences[row, 1 + k] if entry & SEQUENCE else entry
                if not part & UNSEGMENTED:
                    o = _write(out, o, part & POINT)
                    gap = False
                    continue
                if not gap:
                    ends[words] = o
                    words += 1
                    out[o] = 32
                    o += 1
                o = _write(out, o, part & POINT)
                ends[words] = o
                words += 1
                out[o] = 32
                o += 1
                gap = True
    if not gap:
        ends[words] = o
        words += 1
    elif o > 0:
        o -= 1  # the last separator
    return o, words


@njit(inline="always")
def _head(h, eight):  # type: ignore[no-untyped-def]
    """Takes eight bytes of a word into its hash."""
    h = (h ^ eight) * _GOLDEN
    return h ^ (h >> uint64(32))


@njit(inline="always")
def _weight(point):  # type: ignore[no-untyped-def]
    """Of a character that is a word: Thai, Lao, Burmese, Khmer lie below U+2000, Han and kana above; else a space."""
    if 0x0E00 <= point < 0x1800 and point != 0x1680:
        return int64(LETTER)
    return int64(CHARACTER) if point > 0x3000 else int64(0)


@njit(nogil=True, cache=True)
def hash_words(out, ends, words, page, table, hashes, weights, first):  # type: ignore[no-untyped-def]
    """A 64-bit hash for each word that `normalise` wrote -> hashes[first : first + words], uint64; -> their weight.

    weights: uint8, WORD everywhere; gets the weight of each word that weighs less.
    """
    start = int64(0)
    total = int64(WORD) * words
    for i in range(words):
        end = ends[i]
        if end - start <= 4:
            point, length = decode(out, start, end)
            if length == end - start:
                entry = _entry(page, table, point)
                if entry & UNSEGMENTED:
                    weight = _weight(point)
                    weights[first + i] = uint8(weight)
                    total -= WORD - weight
        h = uint64(end - start) * _LENGTH
        while end - start > 8:
            h = _head(h, load64(out, start))
            start += 8
        tail = load64(out, start) & (_ONES >> uint64(64 - 8 * (end - start)))
        hashes[first + i] = _head(h, tail)
        start = end + 1
    return total


@njit(inline="always")
def _letters(eight):  # type: ignore[no-untyped-def]
    """How many of eight bytes, from the first, are ASCII letters: 0 to 8."""
    small = (eight | _SMALL) & _LOW
    at_least_a = small + uint64(0x1F1F1F1F1F1F1F1F)  # the high bit of each byte that is 0x61 and more
    over_z = small + uint64(0x0505050505050505)  # 0x7B and more
    return _low_zeros(~(at_least_a & ~over_z & ~eight) & _HIGH) >> uint64(3)


@njit(nogil=True, cache=True)
def _end_of_slow(data, p, end, ascii_):  # type: ignore[no-untyped-def]
    """From p on, the next ASCII separator that an ASCII letter follows; never one that can be inside a number."""
    while p + 1 < end:
        byte = load8(data, p)
        if ascii_[byte] == 32 and byte not in (44, 46):
            small = load8(data, p + 1) | uint8(32)
            if uint8(97) <= small <= uint8(122):
                return p
        p += 1
    return end


@njit(nogil=True, cache=True)
def word_hashes(data, start, end, ascii_, page, table, sequences, out, ends, hashes, weights):  # type: ignore[no-untyped-def]
    """The hash of each normalised word of data[start:end] -> (how many, what they weigh together).

    Arrays as `normalise` and `hash_words` take. Where the sum is not WORD for each word, `weights` must be set to
    WORD again before the next document.

    A word of up to 15 ASCII letters between ASCII separators is hashed from the text, eight bytes at a time. All else
    goes through `normalise`, in stretches that end where such a word begins. Reads nothing outside start:end.
    """
    words = int64(0)
    lacking = int64(0)  # weight that words have less than WORD
    p = start
    plain = ascii_[65] == 97  # else upper case stays, and nothing takes the short way
    while p < end:
        if plain and p + 17 <= end:
            eight = load64(data, p)
            count = int64(_letters(eight))
            if count == 0 and load8(ascii_, int64(load8(data, p))) == 32:
                p += 1
                continue
            if 0 < count < 8:
                if load8(ascii_, int64(load8(data, p + count))) == 32:
                    tail = (eight | _SMALL) & (_ONES >> uint64(64 - 8 * count))
                    hashes[words] = _head(uint64(count) * _LENGTH, tail)
                    words += 1
                    p += count + 1
                    continue
            elif count == 8:
                next_eight = load64(data, p + 8)
                more = int64(_letters(next_eight))
                if more < 8 and load8(ascii_, int64(load8(data, p + 8 + more))) == 32:
                    h = _head(uint64(8 + more) * _LENGTH, eight | _SMALL)
                    if more:
                        h = _head(h, (next_eight | _SMALL) & (_ONES >> uint64(64 - 8 * more)))
                    hashes[words] = h
                    words += 1
                    p += 9 + more
                    continue
        stop = _end_of_slow(data, p + 1, end, ascii_) if plain else end
        _, found = normalise(data, p, stop, ascii_, page, table, sequences, out, ends)
        lacking += WORD * found - hash_words(out, ends, found, page, table, hashes, weights, words)
        words += found
        p = stop
    return words, WORD * words - lacking


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
