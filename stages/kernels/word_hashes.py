"""Text -> normalised words -> a hash and a weight for each: what shingles and exact hashes are made of.

`normalise` writes the words, `hash_words` hashes what it wrote, `word_hashes` gives the same hashes by a shorter way.
What normalisation is, and where it differs from datatrove's, is in `shingles`; what happens to a single code point is
in the tables of `fold`.

Inner functions take addresses (see `memory`): an array handed from function to function costs more than a word's work.
"""

from __future__ import annotations

from numba import int64, njit, uint64

from gristmill.stages.kernels.fold import (
    DIGIT,
    HANGUL,
    POINT,
    SEPARATOR,
    SEQUENCE,
    SPACE,
    UNSEGMENTED,
)
from gristmill.stages.kernels.memory import (
    byte_class,
    inner,
    lowest_bit,
    peek8,
    peek16,
    peek32,
    peek64,
    point_at,
    poke8,
    poke32,
    poke64,
)

PADDING = 64  # bytes that must follow the words in a buffer: they are read, eight at a time, and ignored
WORD = 4  # weight of a word between spaces in a shingle
CHARACTER = 2  # of a character of Han or kana
LETTER = 1  # of a letter of Thai, Lao, Khmer, Burmese
GROWTH = 3  # normalised UTF-8 is at most 3 times as long: a Hangul syllable of 3 bytes gives 3 letters of 3 bytes

_GOLDEN = uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_LENGTH = uint64(0xD6E8FEB86659FD93)  # odd, random
_ONES = uint64(0xFFFFFFFFFFFFFFFF)
_SMALL = uint64(0x2020202020202020)  # makes ASCII letters small
_BLOCK = 64  # bytes looked at at once
_LONGEST = 16  # letters of a word that is hashed from the text

_letters = byte_class(_BLOCK, (0x61, 0x7A), ignore_case=True)
_others = byte_class(_BLOCK, (0x30, 0x39), (0x80, 0xFF))  # neither ASCII letters nor ASCII separators


@njit(inline="always")
def _address(array):  # type: ignore[no-untyped-def]
    """int64, because numba makes a float of the sum of a signed and an unsigned number."""
    return int64(array.ctypes.data)


@inner
def _entry(page, table, point):  # type: ignore[no-untyped-def]
    """The entry of a code point, int64, given the addresses of the two tables."""
    return peek32(table + 4 * (peek16(page + 2 * (point >> 8)) * 256 + (point & 255)))


@inner
def _write(o, point):  # type: ignore[no-untyped-def]
    """Writes a code point as UTF-8 at the address o, and up to 3 bytes behind it -> where the next one goes."""
    last = (point & 0x3F) | 0x80
    middle = ((point >> 6) & 0x3F) | 0x80
    if point >= 0x10000:
        poke32(o, (point >> 18) | 0xF0 | (((point >> 12) & 0x3F) | 0x80) << 8 | middle << 16 | last << 24)
        return o + 4
    two = (point >> 6) | 0xC0 | last << 8
    three = (point >> 12) | 0xE0 | middle << 8 | last << 16
    poke32(o, point if point < 0x80 else two if point < 0x800 else three)  # chosen without a branch
    return o + 1 + (point >= 0x80) + (point >= 0x800)


@inner
def _after_number(p, end, page, table):  # type: ignore[no-untyped-def]
    """Where the number that begins with the digit before p ends: digits, one separator, digits. Addresses."""
    separated = False
    while p < end:
        point, length = point_at(p, end)
        entry = _entry(page, table, point)
        if entry & DIGIT:
            p += length
        elif entry & SEPARATOR and not separated and p + length < end:
            following, width = point_at(p + length, end)
            if not _entry(page, table, following) & DIGIT:
                return p
            separated = True
            p += length + width
        else:
            return p
    return p


@inner
def _end_word(begin, o, ends, words):  # type: ignore[no-untyped-def]
    """Ends the word before the address o with a space -> where the next one goes, words."""
    poke64(ends + 8 * words, uint64(o - begin))
    poke8(o, 32)
    return o + 1, words + 1


@inner
def _write_part(begin, o, entry, ends, words, gap):  # type: ignore[no-untyped-def]
    """Writes a character, with a space on either side where it is a word -> where the next one goes, words, gap."""
    if not entry & UNSEGMENTED:
        return _write(o, entry & POINT), words, False
    if not gap:
        o, words = _end_word(begin, o, ends, words)
    o = _write(o, entry & POINT)
    o, words = _end_word(begin, o, ends, words)
    return o, words, True


@inner
def _normalise(p, end, ascii_, page, table, sequences, begin, ends):  # type: ignore[no-untyped-def]
    """`normalise` of addresses."""
    o = begin
    words = int64(0)
    gap = True  # nothing but a space stands before o
    while p < end:
        f = peek8(ascii_ + peek8(p))
        if f != 0:
            letter = f != 32
            poke8(o, f)
            poke64(ends + 8 * words, uint64(o - begin))
            words += int64((not letter) & (not gap))
            o += int64(letter | (not gap))
            gap = not letter
            p += 1
            continue
        point, length = point_at(p, end)
        p += length
        entry = _entry(page, table, point)
        if entry & (SPACE | SEQUENCE | HANGUL | UNSEGMENTED | DIGIT) == 0:
            o = _write(o, entry & POINT)
            gap = False
        elif entry & (SPACE | SEQUENCE | HANGUL | DIGIT) == 0:
            o, words, gap = _write_part(begin, o, entry, ends, words, gap)
        elif entry & SPACE:
            if not gap:
                o, words = _end_word(begin, o, ends, words)
                gap = True
        elif entry & DIGIT:
            p = _after_number(p, end, page, table)
            poke8(o, 48)
            o += 1
            gap = False
        elif entry & HANGUL:
            syllable = (entry & POINT) - 0xAC00
            o = _write(o, 0x1100 + syllable // 588)
            o = _write(o, 0x1161 + (syllable % 588) // 28)
            if syllable % 28:
                o = _write(o, 0x11A7 + syllable % 28)
            gap = False
        else:
            row = sequences + 16 * (entry & POINT)
            for k in range(1, peek32(row) + 1):
                o, words, gap = _write_part(begin, o, peek32(row + 4 * k), ends, words, gap)
    if not gap:
        poke64(ends + 8 * words, uint64(o - begin))
        words += 1
    elif o > begin:
        o -= 1  # the last separator
    return o - begin, words


@njit(nogil=True, cache=True)
def normalise(data, start, end, ascii_, page, table, sequences, out, ends):  # type: ignore[no-untyped-def]
    """The words of data[start:end], one space between them -> (bytes written, words).

    out: uint8, at least GROWTH * (end - start) + PADDING bytes. ends: int64, at least end - start + 2; gets where
    each word ends in `out`, so that word i is out[ends[i - 1] + 1 : ends[i]].

    ASCII takes no branch but the loop's: a separator after a separator is written over, and the end of a word is
    stored at each byte and counted at the byte that ends a word.
    """
    at = _address(data)
    return _normalise(
        at + start, at + end, _address(ascii_), _address(page), _address(table), _address(sequences),
        _address(out), _address(ends),
    )  # fmt: skip


@inner
def _head(h, eight):  # type: ignore[no-untyped-def]
    """Takes eight bytes of a word into its hash."""
    h = (h ^ eight) * _GOLDEN
    return h ^ (h >> uint64(32))


@inner
def _weight(point):  # type: ignore[no-untyped-def]
    """Of a character that is a word: Thai, Lao, Burmese, Khmer lie below U+2000, Han and kana above; else a space."""
    if 0x0E00 <= point < 0x1800 and point != 0x1680:
        return int64(LETTER)
    return int64(CHARACTER) if point > 0x3000 else int64(0)


@inner
def _short_hash(length, first, second):  # type: ignore[no-untyped-def]
    """The hash of a word of 1 to 16 bytes, of which `first` holds the first eight and `second` the next. What stands
    behind the word does not matter. No branch: which words have over eight bytes cannot be foreseen."""
    missing = 64 - 8 * min(length, 8)
    h = _head(uint64(length) * _LENGTH, first & (_ONES >> uint64(missing)))
    longer = _head(h, second & (_ONES >> uint64((128 - 8 * length) & 63)))
    return longer if length > 8 else h


@inner
def _hash_words(out, ends, words, page, table, hashes, weights):  # type: ignore[no-untyped-def]
    """`hash_words` of addresses; those of the first hash and the first weight."""
    start = int64(0)
    lacking = int64(0)
    spaces = _entry(page, table, 32) & UNSEGMENTED != 0  # white space is words too
    for i in range(words):
        end = int64(peek64(ends + 8 * i))
        p = out + start
        length = end - start
        if (peek8(p) >= 0xE0 or spaces) and length <= 4:  # Thai, Han and the like take three bytes or four
            point, width = point_at(p, p + length)
            if width == length and _entry(page, table, point) & UNSEGMENTED:
                weight = _weight(point)
                poke8(weights + i, weight)
                lacking += WORD - weight
        if length <= _LONGEST:
            h = _short_hash(length, peek64(p), peek64(p + 8))
        else:
            h = uint64(length) * _LENGTH
            while length > 8:
                h = _head(h, peek64(p))
                p += 8
                length -= 8
            h = _head(h, peek64(p) & (_ONES >> uint64(64 - 8 * length)))
        poke64(hashes + 8 * i, h)
        start = end + 1
    return WORD * words - lacking


@njit(nogil=True, cache=True)
def hash_words(out, ends, words, page, table, hashes, weights, first):  # type: ignore[no-untyped-def]
    """A 64-bit hash for each word that `normalise` wrote -> hashes[first : first + words], uint64; -> their weight.

    weights: uint8, WORD everywhere; gets the weight of each word that weighs less.
    """
    return _hash_words(
        _address(out), _address(ends), words, _address(page), _address(table), _address(hashes) + 8 * first,
        _address(weights) + first,
    )  # fmt: skip


@inner
def _end_of_slow(p, end, ascii_):  # type: ignore[no-untyped-def]
    """From p on, the next ASCII separator that an ASCII letter follows: never one inside a number. Addresses."""
    while p + _BLOCK <= end:
        letters = uint64(_letters(p))
        found = ~(letters | uint64(_others(p))) & (letters >> uint64(1))
        if found:
            return p + lowest_bit(int64(found))
        p += _BLOCK - 1  # what follows the last byte is not known yet
    while p + 1 < end:
        if peek8(ascii_ + peek8(p)) == 32 and 97 <= (peek8(p + 1) | 32) <= 122:
            return p
        p += 1
    return end


@inner
def _slow(p, end, ascii_, page, table, sequences, out, ends, hashes, weights):  # type: ignore[no-untyped-def]
    """The words from p to `end` by way of `normalise` -> words, what they weigh. Addresses."""
    _, words = _normalise(p, end, ascii_, page, table, sequences, out, ends)
    return words, _hash_words(out, ends, words, page, table, hashes, weights)


@inner
def _word_hashes(p, end, ascii_, page, table, sequences, out, ends, hashes, weights):  # type: ignore[no-untyped-def]
    """`word_hashes` of addresses."""
    words = int64(0)
    total = int64(0)
    # Else upper case stays, or not all of punctuation and white space is a separator, and nothing takes the short way.
    plain = peek8(ascii_ + 65) == 97 and peek8(ascii_ + 46) == 32 and peek8(ascii_ + 32) == 32
    while plain and p + _BLOCK + _LONGEST <= end:  # here no word goes on from before p
        letters = uint64(_letters(p))
        rest = letters | uint64(_others(p))  # of the words that are not hashed yet
        others = rest & ~letters
        separators = ~rest
        stop = p + _BLOCK  # where to look on
        while rest:
            first = int64(lowest_bit(int64(rest)))
            behind = separators & (_ONES << uint64(first))
            last = int64(lowest_bit(int64(behind)))  # where the word ends; 64: not in this block
            word = (_ONES << uint64(first)) & ((uint64(1) << uint64(last & 63)) - uint64(1))
            here = p + first
            if behind and last - first <= _LONGEST and others & word == 0:
                h = _short_hash(last - first, peek64(here) | _SMALL, peek64(here + 8) | _SMALL)
                poke64(hashes + 8 * words, h)
                words += 1
                total += WORD
                rest &= _ONES << uint64(last)
                continue
            if not behind and first > 0:
                stop = here  # the next block begins with this word
                break
            turn = behind & (letters >> uint64(1))
            until = p + lowest_bit(int64(turn)) if turn else _end_of_slow(p + _BLOCK - 1, end, ascii_)
            found, weight = _slow(
                here, until, ascii_, page, table, sequences, out, ends, hashes + 8 * words, weights + words
            )
            words += found
            total += weight
            if not turn:
                stop = until
                break
            rest &= _ONES << uint64(until - p)
        p = stop
    while p < end:
        until = _end_of_slow(p, end, ascii_) if plain else end
        found, weight = _slow(p, until, ascii_, page, table, sequences, out, ends, hashes + 8 * words, weights + words)
        words += found
        total += weight
        p = until + 1
    return words, total


@njit(nogil=True, cache=True)
def word_hashes(data, start, end, ascii_, page, table, sequences, out, ends, hashes, weights):  # type: ignore[no-untyped-def]
    """The hash of each normalised word of data[start:end] -> (how many, what they weigh together).

    Arrays as `normalise` and `hash_words` take. Where the sum is not WORD for each word, `weights` must be set to
    WORD again before the next document.

    A word of up to 16 ASCII letters between ASCII separators is hashed from the text: blocks of 64 bytes say where
    such words begin and end. All else goes through `normalise`, in stretches that end where such a word begins. Reads
    nothing outside start:end.
    """
    at = _address(data)
    return _word_hashes(
        at + start, at + end, _address(ascii_), _address(page), _address(table), _address(sequences),
        _address(out), _address(ends), _address(hashes), _address(weights),
    )  # fmt: skip
