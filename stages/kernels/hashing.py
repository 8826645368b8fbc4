"""One 128-bit hash for each document of a column: MurmurHash3_x64_128 (Appleby 2011, public domain), seed 0.

128 bits, because 64 are not enough: among ten billion documents two share a 64-bit hash by chance with probability
0.93, and a shared hash removes a document. With 128 bits it is 1.5e-19. The function is not keyed: whoever wants to
can build two texts with the same hash, and lose one of them.
"""

from __future__ import annotations

import numpy as np
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import load8, load64, mix64
from gristmill.stages.kernels.fold import fold
from gristmill.stages.kernels.memory import count_points
from gristmill.stages.kernels.word_hashes import GROWTH, PADDING, WORD, word_hashes

_C1 = uint64(0x87C37B91114253D5)
_C2 = uint64(0x4CF5AD432745937F)


@njit(inline="always")
def _rotate(x, bits):  # type: ignore[no-untyped-def]
    return (x << uint64(bits)) | (x >> uint64(64 - bits))


@njit(nogil=True, cache=True)
def hash128(data, start, end):  # type: ignore[no-untyped-def]
    """data[start:end] -> (low, high) uint64. Reads nothing outside."""
    h1 = uint64(0)
    h2 = uint64(0)
    p = start
    while p + 16 <= end:
        h1 ^= _rotate(load64(data, p) * _C1, 31) * _C2
        h1 = (_rotate(h1, 27) + h2) * uint64(5) + uint64(0x52DCE729)
        h2 ^= _rotate(load64(data, p + 8) * _C2, 33) * _C1
        h2 = (_rotate(h2, 31) + h1) * uint64(5) + uint64(0x38495AB5)
        p += 16
    k1 = uint64(0)
    k2 = uint64(0)
    for i in range(end - p):
        if i < 8:
            k1 |= uint64(load8(data, p + i)) << uint64(8 * i)
        else:
            k2 |= uint64(load8(data, p + i)) << uint64(8 * (i - 8))
    h2 ^= _rotate(k2 * _C2, 33) * _C1
    h1 ^= _rotate(k1 * _C1, 31) * _C2
    size = uint64(end - start)
    h1 ^= size
    h2 ^= size
    h1 += h2
    h2 += h1
    h1 = mix64(h1)
    h2 = mix64(h2)
    h1 += h2
    return h1, h2 + h1


@njit(nogil=True, cache=True)
def hash_raw(offsets, data, hashes):  # type: ignore[no-untyped-def]
    """The hash of each document's bytes. offsets (n + 1,) int64 -> hashes (n, 2) uint64, low and high."""
    for i in range(offsets.shape[0] - 1):
        hashes[i, 0], hashes[i, 1] = hash128(data, offsets[i], offsets[i + 1])


@njit(nogil=True, cache=True)
def count_characters(offsets, data, counts):  # type: ignore[no-untyped-def]
    """Code points of each document -> counts (n,) float64."""
    at = int64(data.ctypes.data)
    for i in range(offsets.shape[0] - 1):
        counts[i] = count_points(at + offsets[i], at + offsets[i + 1])


@njit(nogil=True, cache=True)
def hash_normalised(offsets, data, ascii_, page, table, sequences, hashes, words):  # type: ignore[no-untyped-def]
    """The hash of the hashes of each document's normalised words -> hashes (n, 2) uint64, words (n,) int64.

    White space that counts as a word (see `fold`) is in the hash and not in `words`: a document of nothing else has 0.
    """
    n = offsets.shape[0] - 1
    longest = int64(0)
    for i in range(n):
        longest = max(longest, offsets[i + 1] - offsets[i])
    out = np.empty(GROWTH * longest + PADDING, np.uint8)
    ends = np.empty(longest + 2, np.int64)
    of_words = np.empty(longest + 2, np.uint64)
    weights = np.full(longest + 2, WORD, np.uint8)
    for i in range(n):
        found, total = word_hashes(
            data, offsets[i], offsets[i + 1], ascii_, page, table, sequences, out, ends, of_words, weights
        )
        hashes[i, 0], hashes[i, 1] = hash128(of_words, 0, 8 * found)
        words[i] = found if total > 0 else 0
        if total != WORD * found:
            weights[:found] = WORD


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    offsets, data, hashes = np.array([0, 2], np.int64), np.frombuffer(b"ab", np.uint8), np.empty((1, 2), np.uint64)
    hash_raw(offsets, data, hashes)
    count_characters(offsets, data, np.empty(1))
    hash_normalised(offsets, data, *fold(), hashes, np.empty(1, np.int64))
