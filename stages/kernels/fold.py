"""What normalisation makes of each code point: the tables behind `word_hashes.normalise`.

Lower case, spaces, numbers, punctuation and marks are decided here, for each code point by itself; `shingles` says
what the words are. The tables are composed at the first use from `unicode.npz` and `fold.npz`. The second is written
by `python -m gristmill.stages.kernels.fold` (it needs `datatrove`, whose punctuation defines one of the tables).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import uint32

from gristmill.stages.kernels import unicode

SEPARATORS = ".,\u060c\u066b\u2396\u2397\u2398"  # between the digits of one number, as in datatrove's NUMBERS_PATTERN
_FILE = Path(__file__).with_name("fold.npz")

# An entry of the fold table: 21 bits of code point (or an index into the sequences), and flags.
POINT = uint32(0x1FFFFF)
SPACE = uint32(1 << 21)
DIGIT = uint32(1 << 22)
UNSEGMENTED = uint32(1 << 23)
SEQUENCE = uint32(1 << 24)  # POINT is a row of `sequences`
HANGUL = uint32(1 << 25)  # a syllable, decomposed by arithmetic (Unicode 14, section 3.12)
SEPARATOR = uint32(1 << 26)


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
def fold(
    lowercase: bool = True,
    numbers: bool = True,
    punctuation: bool = True,
    diacritics: bool = True,
    whitespace: bool = True,
) -> Fold:
    """The tables of a normalisation. The switches are those of datatrove's TextNormConfig, with its defaults.

    Without `whitespace` each white-space character is a word of its own, which counts for nothing in the length of a
    shingle; spaces that stand for punctuation are no characters of the text and are never words.
    """
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
    entry[unsegmented] |= UNSEGMENTED
    entry[[ord(c) for c in SEPARATORS]] |= SEPARATOR
    sequences = np.zeros((1, 4), np.uint32)  # row 0 writes nothing
    if diacritics:
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        one = lengths == 1
        entry[points[one]] = entry[outputs[starts[one]]]
        entry[points[lengths == 0]] = SEQUENCE
        many = np.nonzero(lengths > 1)[0]
        sequences = np.zeros((1 + len(many), 4), np.uint32)
        for row, i in enumerate(many, start=1):
            sequences[row, 0] = lengths[i]
            sequences[row, 1 : 1 + lengths[i]] = entry[outputs[starts[i] : starts[i] + lengths[i]]]
            entry[points[i]] = uint32(row) | SEQUENCE
        entry[0xAC00:0xD7A4] |= HANGUL
    elif lowercase:
        sequences = np.array([[0, 0, 0, 0], [2, ord("i"), 0x307, 0]], np.uint32)
    spaces = (classes & unicode.SPACE) > 0
    entry[spaces] = SPACE if whitespace else (np.arange(0x110000, dtype=np.uint32)[spaces] | UNSEGMENTED)
    if punctuation:
        entry[marks] = SPACE | (entry[marks] & SEPARATOR)
    if numbers:  # after the punctuation: datatrove's holds "１", which is a number first
        entry[(classes & unicode.DIGIT) > 0] = DIGIT
    entry = entry[lower]
    if lowercase and not diacritics:
        entry[0x130] = uint32(1) | SEQUENCE

    ascii_ = np.zeros(256, np.uint8)
    low = entry[:128]
    plain = (low & ~(POINT | SEPARATOR)) == 0
    ascii_[:128][plain] = (low[plain] & POINT).astype(np.uint8)
    ascii_[:128][(low & SPACE) > 0] = ord(" ")
    page, table = unicode._two_levels(entry)
    return Fold(ascii_, page, table, sequences)


if __name__ == "__main__":
    build()
