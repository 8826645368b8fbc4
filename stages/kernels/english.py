"""Tables of spaCy's English word rules, frozen, for the word splitter in `english_words.py`.

datatrove splits English into words with `spacy.blank("en")`, and the published limits of Gopher and FineWeb were run on
those words: a comma is a word, "don't" is two. So the rules are taken over exactly, as tables: classes of characters,
the special cases ("Mr.", "don't", ":-)"), and the endings that leave a number ("km", "€"). The file `english.npz` is
made once by `python -m gristmill.stages.kernels.english` (it needs spaCy) and read ever after.

Source: spaCy 3.8, `spacy/lang/punctuation.py`, `char_classes.py`, `en/tokenizer_exceptions.py` (MIT licence).
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# Classes of one character, bits of a uint16.
PREFIX = 1  # leaves the front of a word
SUFFIX = 2  # leaves the end of a word
BEFORE_STOP = 4  # a full stop after it leaves the end of a word
ALPHA = 8  # spaCy's ALPHA: cased letters and the uncased scripts it knows
LOWER = 16  # ALPHA_LOWER: lower case and uncased
UPPER = 32  # ALPHA_UPPER: upper case and uncased
QUOTE = 64
ICON = 128  # emoji, dingbats: split out of the middle of a word
PUNCTUATION = 256  # category P*: spaCy's is_punct
SENTENCE = 512  # ends a sentence (Sentencizer.default_punct_chars)
SPACE = 1024  # str.isspace
PLAIN = 2048  # a letter without any rule
IN_WORD = 4096  # \w of Python's re

# Kinds of one byte.
KIND_LETTER = 1
KIND_DIGIT = 2
KIND_OTHER = 4
KIND_SPACE = 8
KIND_WIDE = 16  # part of a character of several bytes

SLOTS = 4096  # of the hash table of special cases
TAIL_SLOTS = 512
MAX_PIECES = 3  # words of a special case
MAX_PATTERN = 11  # words that the rules alone make of a special case
LONGEST_SPECIAL = 29  # bytes
LONGEST_TAIL = 10  # bytes
FILTER_BITS = 1 << 16

# Where each table begins in the one buffer that the kernel gets. The table of classes is last, as its size varies.
AT_KIND = 0  # kind of each byte
AT_TAIL_LAST = AT_KIND + 256  # 1 for the last byte of an ending that leaves a number
AT_FILTER = AT_TAIL_LAST + 256  # a bit for each special case
AT_PATTERN_FILTER = AT_FILTER + FILTER_BITS // 8  # a bit for the first two bytes of those that the rules take apart
AT_KEYS = AT_PATTERN_FILTER + (1 << 16) // 8  # uint64, hash table of special cases
AT_TAIL_KEYS = AT_KEYS + 8 * SLOTS  # uint64, hash table of endings
AT_PIECES = AT_TAIL_KEYS + 8 * TAIL_SLOTS  # bytes of each word of a special case
AT_PATTERNS = AT_PIECES + MAX_PIECES * SLOTS  # bytes of each word that the rules alone make of it; 0 if they find none
AT_PAGE = AT_PATTERNS + MAX_PATTERN * SLOTS  # uint16, page of each block of 256 characters
AT_TABLE = AT_PAGE + 2 * 4352  # uint16, classes of the characters of each page
_FNV_PRIME = 0x100000001B3
_FNV_START = 0xCBF29CE484222325
_FILE = Path(__file__).with_name("english.npz")


def fnv1a(data: bytes) -> int:
    """FNV-1a of 64 bits, the key of a special case; 0 stands for an empty slot."""
    h = _FNV_START
    for byte in data:
        h = ((h ^ byte) * _FNV_PRIME) & (2**64 - 1)
    return h


def filter_bit(first: int, second: int, last: int, length: int) -> int:
    """Where a string of `length` bytes has its bit in the filter that spares most look-ups."""
    return (first * 0x0B4D + second * 0x2F1 + last * 0x35 + length * 0x4E5) & (FILTER_BITS - 1)


def _insert(keys: np.ndarray, data: bytes) -> int:
    h, mask = fnv1a(data), len(keys) - 1
    slot = (h ^ (h >> 32)) & mask
    while keys[slot]:
        if keys[slot] == h:
            raise ValueError(f"Two special cases share the key {h}.")
        slot = (slot + 1) & mask
    keys[slot] = h
    return slot


def _classes(tokenizer: Any) -> np.ndarray:
    """(0x110000,) uint16, asked of spaCy's own expressions one character at a time."""
    import re
    import unicodedata

    from spacy.lang import char_classes as c
    from spacy.lang.punctuation import TOKENIZER_SUFFIXES
    from spacy.pipeline import Sentencizer

    prefix = tokenizer.prefix_search
    suffix = tokenizer.suffix_search
    before_stop = re.compile(next(s for s in TOKENIZER_SUFFIXES if s.startswith(r"(?<=[0-9") and s.endswith(r"])\.")))
    inside = {
        flag: re.compile(f"[{chars}]")
        for flag, chars in ((ALPHA, c.ALPHA), (LOWER, c.ALPHA_LOWER), (UPPER, c.ALPHA_UPPER), (QUOTE, c.CONCAT_QUOTES))
    }
    inside[ICON] = re.compile(f"[{c.CONCAT_ICONS}]")
    enders = set(Sentencizer.default_punct_chars)
    classes = np.zeros(0x110000, np.uint16)
    for point in range(0x110000):
        char = chr(point)
        flags = 0
        if prefix(char) and char != "+":  # "+" depends on what follows
            flags |= PREFIX
        if suffix(char):
            flags |= SUFFIX
        if before_stop.search(char + "."):
            flags |= BEFORE_STOP
        for flag, pattern in inside.items():
            if pattern.match(char):
                flags |= flag
        if unicodedata.category(char)[0] == "P":
            flags |= PUNCTUATION
        if char in enders:
            flags |= SENTENCE
        if char.isspace():
            flags |= SPACE
        if char.isalpha() and not flags & (PREFIX | SUFFIX | ICON):
            flags |= PLAIN
        if char.isalnum() or char == "_":
            flags |= IN_WORD
        classes[point] = flags
    return classes


def build() -> None:
    """Writes english.npz from the installed spaCy. To be run on purpose only: it changes results."""
    import spacy
    from spacy.attrs import ORTH
    from spacy.lang import char_classes as c
    from spacy.tokenizer import Tokenizer

    from gristmill.stages.kernels.unicode import _two_levels

    nlp = spacy.blank("en")
    tokenizer: Any = nlp.tokenizer
    bare = Tokenizer(
        nlp.vocab,
        {},
        prefix_search=tokenizer.prefix_search,
        suffix_search=tokenizer.suffix_search,
        infix_finditer=tokenizer.infix_finditer,
        url_match=tokenizer.url_match,
    )
    keys = np.zeros(SLOTS, np.uint64)
    pieces = np.zeros((SLOTS, MAX_PIECES), np.uint8)
    patterns = np.zeros((SLOTS, MAX_PATTERN), np.uint8)
    seen = np.zeros(FILTER_BITS // 8, np.uint8)
    apart = np.zeros((1 << 16) // 8, np.uint8)
    longest = 0
    for text, substrings in sorted(tokenizer.rules.items()):
        data = text.encode()
        if any(char.isspace() for char in text) or len(data) < 2:
            continue  # white space never is a word, and a single byte is split the same way without a rule
        longest = max(longest, len(data))
        slot = _insert(keys, data)
        for i, piece in enumerate(substrings):
            pieces[slot, i] = len(piece[ORTH].encode())
        if tokenizer.find_prefix(text) or tokenizer.find_infix(text) or tokenizer.find_suffix(text):
            for i, token in enumerate(bare(text)):
                patterns[slot, i] = len(token.text.encode())
            pair = data[0] | data[1] << 8
            apart[pair >> 3] |= 1 << (pair & 7)
        bit = filter_bit(data[0], data[1], data[-1], len(data))
        seen[bit >> 3] |= 1 << (bit & 7)

    tails = {s.replace("\\", "").encode() for group in (c.UNITS, c.CURRENCY) for s in group.split("|") if s}
    tail_keys = np.zeros(TAIL_SLOTS, np.uint64)
    tail_last = np.zeros(256, np.uint8)
    for tail in sorted(tails):
        _insert(tail_keys, tail)
        tail_last[tail[-1]] = 1

    kind = np.zeros(256, np.uint8)
    for byte in range(128):
        char = chr(byte)
        kind[byte] = (
            KIND_SPACE
            if char.isspace()
            else KIND_DIGIT
            if char.isdigit()
            else KIND_LETTER
            if char.isalpha()
            else KIND_OTHER
        )
    kind[128:] = KIND_WIDE
    class_page, class_table = _two_levels(_classes(tokenizer))
    if longest > LONGEST_SPECIAL or max(len(t) for t in tails) > LONGEST_TAIL:
        raise ValueError("This spaCy has longer special cases or units: raise LONGEST_SPECIAL or LONGEST_TAIL.")
    parts = (kind, tail_last, seen, apart, keys, tail_keys, pieces, patterns, class_page, class_table)
    buffer = b"".join(part.tobytes() for part in parts)
    np.savez_compressed(_FILE, spacy=np.array(version("spacy")), buffer=np.frombuffer(buffer, np.uint8))


if not _FILE.exists() and __name__ == "__main__":
    build()

with np.load(_FILE) as _tables:
    SPACY_VERSION = str(_tables["spacy"])
    ENGLISH = _tables["buffer"]  # uint8, the tables at AT_KIND to AT_TABLE

if __name__ == "__main__":
    build()
