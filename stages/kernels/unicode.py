"""Character classes and lower case for the kernels, frozen at one Unicode version.

The interpreter's own tables change with the Python version, and with them a keep or a drop. So the tables are a file
of this package, `unicode.npz`, made once by `python -m gristmill.stages.kernels.unicode` (it needs `datatrove`,
whose punctuation sets define two of the classes) and read by every version of Python.

Both tables have two levels: `page = PAGE[code point >> 8]`, `entry = TABLE[page * 256 + (code point & 255)]`. Page 0
of each is the page of ASCII and Latin-1, so `TABLE[byte]` is the entry of an ASCII byte.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numba import int64, njit, uint8, uint32

SPACE = 1  # str.isspace
ALPHA = 2  # str.isalpha
NUMBER = 4  # categories Nd, Nl, No
PUNCTUATION = 8  # datatrove.utils.text.PUNCTUATION_SET
MARK = 16  # categories Mn, Mc, Me
UNSEGMENTED = 32  # scripts written without spaces: Han, kana, Thai, Lao, Khmer, Burmese
UPPER = 64  # categories Lu, Lt
WORD = 128  # categories L*, N*, M*
TERMINAL = 256  # datatrove.utils.text.TERMINAL_PUNCTUATION
CONTROL = 512  # category Cc
DIGIT = 1024  # category Nd
LOWER = 2048  # category Ll

_UNSEGMENTED_RANGES = (
    (0x0E00, 0x0E7F),  # Thai
    (0x0E80, 0x0EFF),  # Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # hiragana, katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # half-width katakana
    (0x20000, 0x3FFFF),
)
_FILE = Path(__file__).with_name("unicode.npz")


def _two_levels(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """flat (0x110000,) -> (page of each block of 256 (4352,) uint16, table (pages * 256,)); block 0 is page 0."""
    blocks = flat.reshape(-1, 256)
    pages: dict[bytes, int] = {}
    index = np.array([pages.setdefault(block.tobytes(), len(pages)) for block in blocks], np.uint16)
    table = np.concatenate([np.frombuffer(page, flat.dtype) for page in pages])
    return index, table


def build() -> None:
    """Writes unicode.npz from this interpreter's Unicode data. To be run on purpose only: it changes results."""
    import unicodedata

    from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION

    classes = np.zeros(0x110000, np.uint16)
    lower = np.arange(0x110000, dtype=np.int32)
    for point in range(0x110000):
        char = chr(point)
        category = unicodedata.category(char)
        flags = (
            (SPACE if char.isspace() else 0)
            | (ALPHA if char.isalpha() else 0)
            | (NUMBER if category[0] == "N" else 0)
            | (PUNCTUATION if char in PUNCTUATION_SET else 0)
            | (MARK if category[0] == "M" else 0)
            | (UPPER if category in ("Lu", "Lt") else 0)
            | (WORD if category[0] in "LNM" else 0)
            | (TERMINAL if char in TERMINAL_PUNCTUATION else 0)
            | (CONTROL if category == "Cc" else 0)
            | (DIGIT if category == "Nd" else 0)
            | (LOWER if category == "Ll" else 0)
        )
        if category[0] in "LNM" and any(low <= point <= high for low, high in _UNSEGMENTED_RANGES):
            flags |= UNSEGMENTED
        classes[point] = flags
        if len(char.lower()) == 1:
            lower[point] = ord(char.lower())
    class_page, class_table = _two_levels(classes)
    lower_page, lower_delta = _two_levels(lower - np.arange(0x110000, dtype=np.int32))
    np.savez_compressed(
        _FILE,
        version=np.array(unicodedata.unidata_version),
        class_page=class_page,
        class_table=class_table,
        lower_page=lower_page,
        lower_delta=lower_delta,
    )


if not _FILE.exists() and __name__ == "__main__":
    build()

with np.load(_FILE) as _tables:
    UNICODE_VERSION = str(_tables["version"])
    CLASS_PAGE = _tables["class_page"]
    CLASS_TABLE = _tables["class_table"]
    LOWER_PAGE = _tables["lower_page"]
    LOWER_DELTA = _tables["lower_delta"]
TABLES = (CLASS_PAGE, CLASS_TABLE)
ASCII_CLASS = CLASS_TABLE[:256].copy()  # class of a byte < 128


@njit(inline="always")
def class_of(class_page, class_table, point):  # type: ignore[no-untyped-def]
    """Flags of a code point, uint16."""
    return class_table[int64(class_page[point >> uint32(8)]) * 256 + int64(point & uint32(255))]


@njit(inline="always")
def lower_of(lower_page, lower_delta, point):  # type: ignore[no-untyped-def]
    """Lower case of a code point where that is one code point, else the code point itself; uint32."""
    return uint32(
        int64(point) + int64(lower_delta[int64(lower_page[point >> uint32(8)]) * 256 + int64(point & uint32(255))])
    )


@njit(inline="always")
def is_continuation(byte):  # type: ignore[no-untyped-def]
    """True for the second and later bytes of a UTF-8 sequence."""
    return (byte & uint8(0xC0)) == uint8(0x80)


if __name__ == "__main__":
    build()
