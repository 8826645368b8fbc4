"""Blocks of bytes looked at at once: each mask against Python's own, and the hash of a word in blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import int64, njit

from gristmill.stages.kernels import ngrams
from gristmill.stages.kernels.memory import byte_class, count_bits, count_points, lowest_bit, newline_at
from gristmill.stages.kernels.unicode import TABLES

_space64 = byte_class(64, (9, 13), (28, 32))
_wide32 = byte_class(32, (0x80, 0xFF))
_letter16 = byte_class(16, (ord("a"), ord("z")), ignore_case=True)


@njit
def masks(data):  # type: ignore[no-untyped-def]
    p = int64(data.ctypes.data)
    return _space64(p), _wide32(p), _letter16(p)


@njit
def bits(mask):  # type: ignore[no-untyped-def]
    return lowest_bit(mask), count_bits(mask)


@njit
def searched(data, start, end):  # type: ignore[no-untyped-def]
    p = int64(data.ctypes.data)
    return newline_at(p + start, p + end) - p, count_points(p + start, p + end)


def as_signed(mask: int) -> int:
    return mask - (1 << 64) if mask >> 63 else mask


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=64, max_size=64))
def test_a_mask_has_the_bit_of_each_byte_of_the_class(data: bytes) -> None:
    spaces = sum(1 << i for i, b in enumerate(data) if 9 <= b <= 13 or 28 <= b <= 32)
    wide = sum(1 << i for i, b in enumerate(data[:32]) if b >= 128)
    letters = sum(1 << i for i, b in enumerate(data[:16]) if chr(b).isascii() and chr(b).isalpha())
    assert masks(np.frombuffer(data, np.uint8)) == (as_signed(spaces), wide, letters)


@pytest.mark.parametrize("mask", [1, 2, 6, 1 << 32, 1 << 62, -(1 << 63), -1])
def test_lowest_bit_and_count_by_hand(mask: int) -> None:
    binary = f"{mask & (2**64 - 1):b}"
    assert bits(mask) == (len(binary) - len(binary.rstrip("0")), binary.count("1"))
    assert bits(0) == (64, 0)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab\né。"), max_size=150), st.integers(0, 40))
def test_searches_stop_at_the_end(text: str, behind: int) -> None:
    data = text.encode()
    array = np.frombuffer(data + b"\n\x80" * behind, np.uint8)
    at = data.find(b"\n")
    assert searched(array, 0, len(data)) == (at if at >= 0 else len(data), len(text))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from("abZ9-._é。\x7f`{@["), min_size=1, max_size=20), min_size=1, max_size=8))
def test_words_in_blocks_are_measured_as_words_byte_by_byte(words: list[str]) -> None:
    sizes = np.array([len(word.encode()) for word in words])
    data = np.frombuffer("".join(words).encode(), np.uint8)
    ends = np.cumsum(sizes).astype(np.int32)
    n = len(words)
    hashes, powers, chars = np.empty(n, np.uint64), np.empty(n, np.uint64), np.empty(n, np.int32)
    places, joined = np.empty(n + 1, np.int32), np.empty(len(data) + ngrams.SPARE, np.uint8)
    out = np.empty((1, ngrams.WORD_COLUMNS), np.int64)
    ngrams.word_measures(
        data,
        np.array([0, len(data)]),
        0,
        1,
        (ends - sizes).astype(np.int32),
        ends,
        np.array([n]),
        TABLES,
        ngrams.stop_table(("ab",)),
        hashes,
        powers,
        chars,
        places,
        joined,
        out,
    )
    assert hashes.tolist() == [ngrams.word_hash(word.encode()) for word in words]
    assert powers.tolist() == [pow(ngrams._BASE, int(size), 2**64) for size in sizes]
    assert chars.tolist() == [len(word) for word in words]
    assert places.tolist() == [0, *ends.tolist()]
    assert joined[: len(data)].tobytes() == data.tobytes()
    assert out[0, ngrams.ALPHA_WORDS] == sum(any(c.isalpha() for c in word) for word in words)
    assert out[0, ngrams.STOP_WORDS] == ("ab" in words)
