"""Text -> normalised words -> shingles: what two documents are compared by.

    text      "Ünï-code  costs 1,50 €. 中文"
    words     uni | code | costs | 0 | € | 中 | 文         `normalise`: UTF-8, one space between words
    hashes    64 bits for each word                        `word_hashes`: the same words, by a shorter way
    shingles  32 bits for each run of `ngram` words        `shingle`

Normalisation is datatrove's `simplify_text` (datatrove.utils.text, the one of FineWeb): lower case, each number "0",
punctuation and control characters a space, canonical decomposition without non-spacing marks (category Mn).
Deliberate differences, each with a test:
    - Words are what stands between spaces. In scripts without spaces (Han, kana, Thai, Lao, Khmer, Burmese) each
      character is a word. datatrove runs a tokenizer per language here.
    - Final sigma is sigma. Python's lower case asks for the neighbours of the letter; equal words stay equal.
    - Marks of category Mc keep their order. NFD sorts some of them by combining class (24 characters).
    - Runs of spaces that appear when a mark between them is dropped are one space.
    - Digits are those of the frozen Unicode version; datatrove's `regex` module knows newer ones.

The tables are composed at the first use from `unicode.npz` and `fold.npz`; the second is written by
`python -m gristmill.stages.kernels.shingles` (it needs `datatrove`, whose punctuation defines one of the tables).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint8, uint32, uint64
from numba.extending import intrinsic

from gristmill.stages.kernels import unicode
from gristmill.stages.kernels.buffers import decode, load8, load64, mix64

SEPARATORS = ".,\u060c\u066b\u2396\u2397\u2398"  # between the digits of one number, as in datatrove's NUMBERS_PATTERN
PADDING = 64  # bytes that must follow the words in a buffer: they are read, eight at a time, and ignored
GROWTH = 3  # normalised UTF-8 is at most 3 times as long: a Hangul syllable of 3 bytes gives 3 letters of 3 bytes

_FILE = Path(__file__).with_name("fold.npz")

# An entry of the fold table: 21 bits of code point (or an index into the sequences), and flags.
_POINT = uint32(0x1FFFFF)
_SPACE = uint32(1 << 21)
_DIGIT = uint32(1 << 22)
_UNSEGMENTED = uint32(1 << 23)
_SEQUENCE = uint32(1 << 24)  # POINT is a row of `sequences`
_HANGUL = uint32(1 << 25)  # a syllable, decomposed by arithmetic (Unicode 14, section 3.12)
_SEPARATOR = uint32(1 << 26)

_GOLDEN = uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_LENGTH = uint64(0xD6E8FEB86659FD93)  # odd, random
_ONES = uint64(0xFFFFFFFFFFFFFFFF)
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


class Fold(NamedTuple):
    """What happens to each code point; see `fold`."""

    ascii: np.ndarray  # (256,) uint8: what is written for the byte; 0 = look at `table`
    page: np.ndarray  # (4352,) uint16
    table: np.ndarray  # (pages * 256,) uint32 entries
    sequences: np.ndarray  # (sequences, 4) uint32: how many, then the entries to write


def build() -> None:
    """Writes fold.npz from this interpreter's Unicode data. To be run on purpose only: it changes results."""
    import unicodedata

    from datatrove.utils.text import PUNCTUATION

    points: list[int] = []
    lengths: list[int] = []
    outputs: list[int] = []
    for point in range(0x110000):
        if 0xAC00 <= point < 0xD7A4 or 0xD800 <= point < 0xE000:
            continue  # Hangul is arithmetic; surrogates are not in valid UTF-8
        kept = [c for c in unicodedata.normalize("NFD", chr(point)) if unicodedata.category(c) != "Mn"]
        if kept != [chr(point)]:
            points.append(point)
            lengths.append(len(kept))
            outputs.extend(ord(c) for c in kept)
    np.savez_compressed(
        _FILE,
        version=np.array(unicodedata.unidata_version),
        points=np.array(points, np.int32),
        lengths=np.array(lengths, np.uint8),
        outputs=np.array(outputs, np.int32),
        punctuation=np.array(sorted(map(ord, PUNCTUATION)), np.int32),
    )


def _flat(page: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Two-level tables -> one entry a code point (0x110000,)."""
    return table.reshape(-1, 256)[page].reshape(-1)


@lru_cache(maxsize=8)
def fold(lowercase: bool = True, numbers: bool = True, punctuation: bool = True, diacritics: bool = True) -> Fold:
    """The tables of a normalisation. The switches are those of datatrove's TextNormConfig, with its defaults."""
    with np.load(_FILE) as stored:
        points, lengths, outputs = stored["points"], stored["lengths"], stored["outputs"]
        marks = stored["punctuation"]
    classes = _flat(*unicode.TABLES)
    lower = np.arange(0x110000, dtype=np.int64)
    if lowercase:
        lower += _flat(unicode.LOWER_PAGE, unicode.LOWER_DELTA)
        lower[0x130] = ord("i")  # İ, the one letter whose lower case is two code points: i and a dot above
        lower[0x3C2] = lower[0x3A3]  # final sigma

    entry = lower.astype(np.uint32)  # of the lower-case letters, before `lower` is applied
    entry[:] = np.arange(0x110000)
    unsegmented = (classes & unicode.UNSEGMENTED) > 0
    entry[unsegmented] |= _UNSEGMENTED
    entry[[ord(c) for c in SEPARATORS]] |= _SEPARATOR
    sequences = np.zeros((1, 4), np.uint32)  # row 0 writes nothing
    if diacritics:
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        one = lengths == 1
        entry[points[one]] = entry[outputs[starts[one]]]
        entry[points[lengths == 0]] = _SEQUENCE
        many = np.nonzero(lengths > 1)[0]
        sequences = np.zeros((1 + len(many), 4), np.uint32)
        for row, i in enumerate(many, start=1):
            sequences[row, 0] = lengths[i]
            sequences[row, 1 : 1 + lengths[i]] = entry[outputs[starts[i] : starts[i] + lengths[i]]]
            entry[points[i]] = uint32(row) | _SEQUENCE
        entry[0xAC00:0xD7A4] |= _HANGUL
    elif lowercase:
        sequences = np.array([[0, 0, 0, 0], [2, ord("i"), 0x307, 0]], np.uint32)
    entry[(classes & unicode.SPACE) > 0] = _SPACE
    if punctuation:
        entry[marks] = _SPACE | (entry[marks] & _SEPARATOR)
    if numbers:  # after the punctuation: datatrove's holds "１", which is a number first
        entry[(classes & unicode.DIGIT) > 0] = _DIGIT
    entry = entry[lower]
    if lowercase and not diacritics:
        entry[0x130] = uint32(1) | _SEQUENCE

    ascii_ = np.zeros(256, np.uint8)
    low = entry[:128]
    plain = (low & ~(_POINT | _SEPARATOR)) == 0
    ascii_[:128][plain] = (low[plain] & _POINT).astype(np.uint8)
    ascii_[:128][(low & _SPACE) > 0] = ord(" ")
    page, table = unicode._two_levels(entry)
    return Fold(ascii_, page, table, sequences)


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
        if entry & _DIGIT:
            p += length
        elif entry & _SEPARATOR and not separated and p + length < end:
            following, width = decode(data, p + length, end)
            if not _entry(page, table, following) & _DIGIT:
                return p
            separated = True
            p += length + width
        else:
            return p
    return p


@njit(nogil=True, cache=True)
def normalise(data, start, end, ascii_, page, table, sequences, out, ends):  # type: ignore[no-untyped-def]
    """The words of data[start:end], one space between them -> (bytes written, words).

    out: uint8, at least GROWTH * (end - start) + PADDING bytes. ends: int64, at least (end - start) // 2 + 2; gets
    where each word ends in `out`, so that word i is out[ends[i - 1] + 1 : ends[i]].

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
        if entry & (_SPACE | _SEQUENCE | _HANGUL | _UNSEGMENTED | _DIGIT) == 0:
            o = _write(out, o, entry & _POINT)
            gap = False
        elif entry & _SPACE:
            if not gap:
                ends[words] = o
                words += 1
                out[o] = 32
                o += 1
                gap = True
        elif entry & _DIGIT:
            p = _after_number(data, p, end, page, table)
            out[o] = 48
            o += 1
            gap = False
        elif entry & _HANGUL:
            syllable = (entry & _POINT) - uint32(0xAC00)
            o = _write(out, o, uint32(0x1100) + syllable // uint32(588))
            o = _write(out, o, uint32(0x1161) + (syllable % uint32(588)) // uint32(28))
            if syllable % uint32(28):
                o = _write(out, o, uint32(0x11A7) + syllable % uint32(28))
            gap = False
        else:
            row = int64(entry & _POINT) if entry & _SEQUENCE else 0
            count = int64(sequences[row, 0]) if entry & _SEQUENCE else 1
            for k in range(count):
                part = sequences[row, 1 + k] if entry & _SEQUENCE else entry
                if not part & _UNSEGMENTED:
                    o = _write(out, o, part & _POINT)
                    gap = False
                    continue
                if not gap:
                    ends[words] = o
                    words += 1
                    out[o] = 32
                    o += 1
                o = _write(out, o, part & _POINT)
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


@njit(nogil=True, cache=True)
def hash_words(out, ends, words, hashes, first):  # type: ignore[no-untyped-def]
    """A 64-bit hash for each word that `normalise` wrote -> hashes[first : first + words], uint64."""
    start = int64(0)
    for i in range(words):
        end = ends[i]
        h = uint64(end - start) * _LENGTH
        while end - start > 8:
            h = _head(h, load64(out, start))
            start += 8
        tail = load64(out, start) & (_ONES >> uint64(64 - 8 * (end - start)))
        hashes[first + i] = _head(h, tail)
        start = end + 1


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
def word_hashes(data, start, end, ascii_, page, table, sequences, out, ends, hashes):  # type: ignore[no-untyped-def]
    """The hash of each normalised word of data[start:end] -> how many. Arrays as `normalise` and `hash_words` take.

    A word of up to 15 ASCII letters between ASCII separators is hashed from the text, eight bytes at a time. All else
    goes through `normalise`, in stretches that end where such a word begins. Reads nothing outside start:end.
    """
    words = int64(0)
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
        hash_words(out, ends, found, hashes, words)
        words += found
        p = stop
    return words


@njit(nogil=True, cache=True)
def shingle(hashes, words, ngram, shingles):  # type: ignore[no-untyped-def]
    """Word hashes -> one hash for each run of `ngram` words; -> (how many, the 64-bit hash of the last run).

    shingles: uint32, at least max(1, words). Fewer than `ngram` words are one run. No words, no shingle. The hash of
    a run is a polynomial of its words' hashes, mixed; only its upper half is stored.
    """
    if words == 0:
        return 0, uint64(0)
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
    length, _ = normalise(data, 0, size, *(tables or fold()), out, np.empty(size // 2 + 2, np.int64))
    return out[:length].tobytes().decode()


def shingle_set(text: str, ngram: int, tables: Fold | None = None) -> np.ndarray:
    """The distinct shingle hashes of one document, sorted, uint32: for tests, inspection and reports."""
    data = np.frombuffer(text.encode() + bytes(PADDING), np.uint8)
    size = len(data) - PADDING
    out, ends = np.empty(GROWTH * size + PADDING, np.uint8), np.empty(size // 2 + 2, np.int64)
    hashes = np.empty(size // 2 + 2, np.uint64)
    words = word_hashes(data, 0, size, *(tables or fold()), out, ends, hashes)
    shingles = np.empty(words + 1, np.uint32)
    count, _ = shingle(hashes, words, ngram, shingles)
    left = distinct(shingles, count, count, np.empty(count, np.uint32), np.empty(count + 3, np.int32))
    return shingles[:left].copy()


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    normalised("a")
    shingle_set("a few words, enough to compile", 5)


if __name__ == "__main__":
    build()
