"""How deep the tags of a page are nested, without parsing it.

HTML engines take quadratic time in the depth, in C code that no signal interrupts: `<div>` 20,000 times, a page of
100 KB, holds resiliparse 2 for 16 s. Counting tags takes 1 ms per MB, so it is done first.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import njit

from gristmill.stages.kernels.buffers import load8, string_views

# Elements that have no end tag, or whose end tag is left out so often that counting them says nothing about depth.
_UNCOUNTED = (
    "area base br col embed hr img input link meta param source track wbr p li dt dd td th tr tbody thead tfoot "
    "option optgroup colgroup rp rt html head body"
).split()


def _key(name: str) -> int:
    """Up to 8 letters of a tag's name as one number, as the kernel packs them."""
    return int.from_bytes(name.encode().ljust(8, b"\0")[:8], "little")


_UNCOUNTED_KEYS = np.array(sorted(_key(name) for name in _UNCOUNTED), np.uint64)


def tag_depths(pages: pa.Array) -> np.ndarray:
    """pages: binary or string (n,) -> the most elements that are open at once in each, int64 (n,); a rough count."""
    ends, data = string_views(pages)
    return _depths(data, ends, _UNCOUNTED_KEYS)


@njit(nogil=True, cache=True)
def _depths(data, ends, uncounted):  # type: ignore[no-untyped-def]
    depths = np.zeros(len(ends) - 1, np.int64)
    for row in range(len(ends) - 1):
        depth, deepest = 0, 0
        p, end = ends[row], ends[row + 1]
        while p < end - 1:
            if load8(data, p) != 60:  # "<"
                p += 1
                continue
            p += 1
            closing = load8(data, p) == 47  # "/"
            if closing:
                p += 1
            key, letters = np.uint64(0), 0
            while p < end:
                letter = load8(data, p) | 32
                if not (97 <= letter <= 122 or (letters and 48 <= letter <= 57)):
                    break
                if letters < 8:
                    key |= np.uint64(letter) << np.uint64(8 * letters)
                letters += 1
                p += 1
            if letters == 0:
                continue
            at = np.searchsorted(uncounted, key)
            if at < len(uncounted) and uncounted[at] == key:
                continue
            if closing:
                depth = max(0, depth - 1)
            else:
                depth += 1
                deepest = max(deepest, depth)
        depths[row] = deepest
    return depths


def warm() -> None:
    """Compiles the kernel for the types that the stage uses."""
    tag_depths(pa.array([b"<a>"], pa.binary()))
