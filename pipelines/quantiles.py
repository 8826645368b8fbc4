"""Exact ranks in a stream of numbers that is read four times, in memory that does not grow with it.

The bits of a float64 are mapped to an unsigned integer of the same order, and each reading settles 16 bits of the
wanted one: a radix selection.

    rank = StreamedRank(lambda n: n // 2)          # the upper median
    for _ in range(READINGS):
        for values in stream():
            rank.show(values)
        rank.end_reading()
    rank.value, rank.count
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

READINGS = 4
_DIGIT_BITS = 64 // READINGS
_SIGN = np.uint64(1 << 63)


def ordered_bits(values: np.ndarray) -> np.ndarray:
    """values (n,) float64 without NaN -> (n,) uint64 in the same order; -0.0 and 0.0 are one."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.uint64)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


def from_ordered_bits(bits: int) -> float:
    """The value that `ordered_bits` maps to `bits`."""
    raw = bits ^ int(_SIGN) if bits & int(_SIGN) else ~bits & 0xFFFF_FFFF_FFFF_FFFF
    return float(np.uint64(raw).view(np.float64))


class StreamedRank:
    """The value at one rank, from 0 for the smallest. rank_of: number of values (at least 1) -> rank."""

    def __init__(self, rank_of: Callable[[int], int]) -> None:
        self.count = 0  # values, known after the first reading
        self.value: float | None = None  # known after the last reading; None of no values
        self._rank_of = rank_of
        self._rank = 0
        self._prefix = 0
        self._reading = 0
        self._counts = np.zeros(1 << _DIGIT_BITS, np.int64)  # pages are taken when they are first written

    def show(self, values: np.ndarray) -> None:
        """values (n,) float64, without NaN."""
        bits = ordered_bits(values)
        shift = 64 - _DIGIT_BITS * (self._reading + 1)
        if self._reading:
            bits = bits[bits >> np.uint64(shift + _DIGIT_BITS) == np.uint64(self._prefix)]
        digits = (bits >> np.uint64(shift)) & np.uint64((1 << _DIGIT_BITS) - 1)
        np.add.at(self._counts, digits.astype(np.int64), 1)

    def end_reading(self) -> None:
        """All values have been shown once more."""
        if self._reading == 0:
            self.count = int(self._counts.sum())
            self._rank = self._rank_of(self.count) if self.count else 0
        if self.count:
            up_to = np.cumsum(self._counts)
            digit = int(np.searchsorted(up_to, self._rank, side="right"))
            self._rank -= int(up_to[digit] - self._counts[digit])
            self._prefix = self._prefix << _DIGIT_BITS | digit
        self._reading += 1
        self._counts[:] = 0
        if self._reading == READINGS:
            self.value = from_ordered_bits(self._prefix) if self.count else None
            self._counts = self._counts[:0].copy()  # many ranks may follow each other
