"""ARPA files into the table of `ngram_table`: the models that other programs estimate, scored as ours are.

An n-gram is a line: log10 of its probability, a tab, its words with spaces between, and below the highest order a tab
and log10 of its back-off weight (none is 0).
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int64, njit, uint8, uint64

from gristmill.stages.kernels.buffers import load8
from gristmill.stages.kernels.counting import BOS, MAX_ORDER, piece_key
from gristmill.stages.kernels.ngram_table import RESERVED, _left, slots

_BOS_LOG10 = -99.0  # of <s>, which no text predicts


@njit(inline="always")
def _number(data, p, end):  # type: ignore[no-untyped-def]
    """A decimal number at data[p:end], up to the first byte that is none of its -> (float64, the index after it)."""
    negative = p < end and load8(data, p) == uint8(45)
    if negative:
        p += 1
    value, scale = 0.0, 0
    seen_point = False
    while p < end:
        b = load8(data, p)
        if b == uint8(46):
            seen_point = True
        elif uint8(48) <= b <= uint8(57):
            value = value * 10.0 + float64(b - uint8(48))
            scale -= int64(seen_point)
        else:
            break
        p += 1
    if p < end and (load8(data, p) | uint8(32)) == uint8(101):  # e or E
        p += 1
        minus = p < end and load8(data, p) == uint8(45)
        if minus or (p < end and load8(data, p) == uint8(43)):
            p += 1
        exponent = 0
        while p < end and uint8(48) <= load8(data, p) <= uint8(57):
            exponent = exponent * 10 + int64(load8(data, p) - uint8(48))
            p += 1
        scale += -exponent if minus else exponent
    value *= 10.0**scale
    return (-value if negative else value), p


@njit(nogil=True, cache=True)
def enter_lines(data, start, end, order, reserved, table, values):  # type: ignore[no-untyped-def]
    """Enters the n-grams of the lines data[start:end] -> how many; -1 - (the index of the line) where one is wrong.

    data (m,) uint8; reserved: `ngram_table.RESERVED`; values: `table` seen as (slots, 4) float32.
    """
    at = 0
    bos = uint64(0)
    for _ in range(BOS + 1):
        bos, at = piece_key(reserved, at, reserved.shape[0])
        at += 1
    words = np.zeros(MAX_ORDER, np.uint64)
    mask = table.shape[0] - 1
    n = int64(0)
    p = start
    while p < end:
        line = p
        prob, p = _number(data, p, end)
        if p == line or p >= end or load8(data, p) != uint8(9):
            return -1 - line
        stop = p + 1  # of the words
        while stop < end and load8(data, stop) != uint8(9) and load8(data, stop) != uint8(10):
            stop += 1
        found = 0
        while p < stop:
            if found == order:
                return -1 - line
            words[found], p = piece_key(data, p + 1, stop)
            found += 1
        if found != order:
            return -1 - line
        backoff = 0.0
        if stop < end and load8(data, stop) == uint8(9):
            backoff, p = _number(data, stop + 1, end)
        if p < end and load8(data, p) != uint8(10):
            return -1 - line
        p += 1
        key = words[order - 1]
        for i in range(order - 2, -1, -1):
            key = _left(key, words[i])
        s = int64(key & uint64(mask))
        while table[s, 0] != uint64(0) and table[s, 0] != key:
            s = (s + 1) & mask
        if table[s, 0] == uint64(0):
            table[s, 0] = key
            values[s, 2] = float32(_BOS_LOG10) if order == 1 and key == bos else float32(prob)
            values[s, 3] = float32(backoff)
        n += 1
    return n


def warm() -> None:
    """Compiles the kernel for the types of production."""
    table = np.zeros((slots(2), 2), np.uint64)
    data = np.frombuffer(b"-0.5\ta\t-0.1\n", np.uint8)
    enter_lines(data, 0, len(data), 1, RESERVED, table, table.view(np.float32))
