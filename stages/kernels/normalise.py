"""Text as CCNet documents its language-model input, cut into pieces, in one pass over the bytes.

CCNet (Wenzek et al. 2020, cc_net/text_normalizer.py) lowers case, drops accents (canonical decomposition without
category Mn), turns every digit into 0, maps typographic punctuation to ASCII and removes control characters. Its code
normalises a whole document at once, so that newlines vanish as control characters and words at line ends are glued.
Here lines stay lines, and white space of every kind separates.

A piece is a run of letters, numbers and marks; one character of a script that is written without spaces; or one
character of anything else. Pieces are separated by one space, lines by one newline, and a line without pieces is
left out:

    "Café №3,\\n\\nDÉJÀ-vu\\n"  ->  "cafe № 0 ,\\ndeja - vu"

Two departures that change no word of any text into another's: Hangul syllables are not decomposed into letters, and a
capital sigma becomes σ wherever it stands. Format characters (category Cf) vanish like control characters.

The table is a file of this package, `normalise.npz`, made once by `python -m gristmill.stages.kernels.normalise`, so
that no later Unicode version changes a score.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit, uint8, uint32

from gristmill.stages.kernels.buffers import decode, load8, string_views
from gristmill.stages.kernels.unicode import CLASS_PAGE, CLASS_TABLE, UNSEGMENTED, WORD

DROPPED, SPACE, IN_WORD, OWN = 0, 1, 2, 3  # what a code point does: vanish, separate, join a word, stand alone
_KINDS = 4  # a table entry below this is a kind and the code point stays itself; above, entry - _KINDS is a text
MAX_GROWTH = 4  # bytes out for a byte in, separators included; `build` proves it

# cc_net/text_normalizer.py, UNICODE_PUNCT. Its entry for U+FF11 never applies, for digits are mapped first.
PUNCTUATION = {
    "，": ",", "。": ".", "、": ",", "„": '"', "”": '"', "“": '"', "«": '"', "»": '"', "」": '"', "「": '"',
    "《": '"', "》": '"', "´": "'", "∶": ":", "：": ":", "？": "?", "！": "!", "（": "(", "）": ")", "；": ";",
    "–": "-", "—": " - ", "．": ". ", "～": "~", "’": "'", "…": "...", "━": "-", "〈": "<", "〉": ">", "【": "[",
    "】": "]", "％": "%", "►": "-",
}  # fmt: skip
_FILE = Path(__file__).with_name("normalise.npz")


def _normalised(char: str) -> str:
    """One character as CCNet normalises it, white space and newline apart."""
    import unicodedata

    if 0xAC00 <= ord(char) <= 0xD7A3:  # Hangul syllables: see the module's docstring
        return char
    bare = (c for c in unicodedata.normalize("NFD", char.lower()) if unicodedata.category(c) != "Mn")
    mapped = "".join(PUNCTUATION.get(c, c) for c in ("0" if unicodedata.category(c) == "Nd" else c for c in bare))
    return "".join(c for c in mapped if unicodedata.category(c) not in ("Cc", "Cf"))


def _kind(char: str) -> int:
    flags = int(CLASS_TABLE[int(CLASS_PAGE[ord(char) >> 8]) * 256 + (ord(char) & 255)])
    return IN_WORD if flags & WORD and not flags & UNSEGMENTED else OWN


def build() -> None:
    """Writes normalise.npz from this interpreter's Unicode data. To be run on purpose only: it changes scores."""
    from gristmill.stages.kernels.unicode import _two_levels

    flat = np.zeros(0x110000, np.uint16)
    texts: dict[tuple[bytes, int], int] = {}
    for point in range(0x110000):
        char = chr(point)
        if 0xD800 <= point <= 0xDFFF or char.isspace():
            flat[point] = SPACE if char.isspace() else OWN
            continue
        pieces = [c for c in _normalised(char) if not c.isspace()]
        kinds = [_kind(c) for c in pieces]
        if not pieces:
            flat[point] = DROPPED
        elif pieces == [char]:
            flat[point] = kinds[0]
        else:
            kind = IN_WORD if set(kinds) == {IN_WORD} else OWN
            text = ("" if kind == IN_WORD else " ").join(pieces).encode()
            assert len(text) + 1 <= MAX_GROWTH * len(char.encode()), (char, text)
            flat[point] = _KINDS + texts.setdefault((text, kind), len(texts))
    page, table = _two_levels(flat)
    ends = np.cumsum([0] + [len(text) for text, _ in texts])
    np.savez_compressed(
        _FILE,
        page=page,
        table=table,
        text_kind=np.array([kind for _, kind in texts], np.uint8),
        text_ends=ends.astype(np.int64),
        text_bytes=np.frombuffer(b"".join(text for text, _ in texts), np.uint8),
    )


if not _FILE.exists() and __name__ == "__main__":
    build()

with np.load(_FILE) as _tables:
    TABLES: Any = tuple(_tables[name] for name in ("page", "table", "text_kind", "text_ends", "text_bytes"))


@njit(nogil=True, cache=True)
def _normalise(offsets, data, page, table, text_kind, text_ends, text_bytes, apart, out, ends, pieces, lines):  # type: ignore[no-untyped-def]
    """Writes the pieces of documents offsets (n + 1,) of `data` to `out`; fills ends (n + 1,), pieces, lines (n,).

    Without `apart`, white space alone separates pieces.
    """
    o = 0
    ends[0] = 0
    for doc in range(offsets.shape[0] - 1):
        p, end = offsets[doc], offsets[doc + 1]
        start = o  # of the document's output
        in_word = False
        fresh = True  # no piece on this line yet
        n_pieces = n_lines = 0
        while p < end:
            b = load8(data, p)
            if b < uint8(0x80):
                size = 1
                entry = table[b]  # ASCII is page 0
                if b == uint8(10):
                    in_word = False
                    fresh = True
                    p += 1
                    continue
            else:
                point, size = decode(data, p, end)
                entry = table[np.int64(page[point >> uint32(8)]) * 256 + np.int64(point & uint32(255))]
            kind = np.int64(entry)
            if entry >= _KINDS:
                kind = np.int64(text_kind[entry - _KINDS])
            if kind <= SPACE:
                in_word = in_word and kind == DROPPED
                p += size
                continue
            if not apart:
                kind = np.int64(IN_WORD)
            if not (in_word and kind == IN_WORD):
                if fresh:
                    if o > start:
                        out[o] = 10
                        o += 1
                    n_lines += 1
                    fresh = False
                else:
                    out[o] = 32
                    o += 1
                n_pieces += 1
            in_word = kind == IN_WORD
            if entry < _KINDS:
                for i in range(size):
                    out[o + i] = load8(data, p + i)
                o += size
            else:
                for i in range(text_ends[entry - _KINDS], text_ends[entry - _KINDS + 1]):
                    if text_bytes[i] == 32:
                        if not apart:
                            continue
                        n_pieces += 1
                    out[o] = text_bytes[i]
                    o += 1
            p += size
        if o > start:
            out[o] = 10
            o += 1
        ends[doc + 1] = o
        pieces[doc] = n_pieces
        lines[doc] = n_lines


class Pieces:
    """The documents of a column as pieces: `data` (bytes), `ends` (n + 1,) int64 into it, `pieces` and `lines` (n,).

    Each line in `data` ends with a newline, so that the documents may be read as one text. Without `apart`, only white
    space separates pieces: "cafe №0,", the form in which SentencePiece learns and cuts.
    """

    def __init__(self, texts: pa.Array | pa.ChunkedArray, *, apart: bool = True) -> None:
        offsets, data = string_views(texts)
        rows = len(offsets) - 1
        out = np.empty(MAX_GROWTH * int(offsets[-1] - offsets[0]) + 8, np.uint8)
        self.ends = np.zeros(rows + 1, np.int64)
        self.pieces = np.zeros(rows, np.int64)
        self.lines = np.zeros(rows, np.int64)
        page, table, kind, ends, text = TABLES
        _normalise(offsets, data, page, table, kind, ends, text, apart, out, self.ends, self.pieces, self.lines)
        self.data = out[: self.ends[-1]]

    def __len__(self) -> int:
        return len(self.pieces)

    def document(self, i: int) -> bytes:
        """Document i: pieces separated by spaces, lines by newlines; b"" where it has none."""
        return self.data[self.ends[i] : max(self.ends[i], self.ends[i + 1] - 1)].tobytes()


def warm() -> None:
    """Compiles the kernel for the types of production."""
    Pieces(pa.array(["A bé。", ""]))


if __name__ == "__main__":
    build()
