"""Windows in compiled code: ids out of mapped files, which document each token is in, and what is to be predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def _load_from_address(bits: int) -> Any:
    result: Any = {16: types.uint16, 32: types.uint32}[bits]

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()), align=1)

        return result(types.int64), generate

    return load


_load16 = _load_from_address(16)
_load32 = _load_from_address(32)


@njit(nogil=True, cache=True)
def gather(address, item_bytes, out):  # type: ignore[no-untyped-def]
    """Copies the ids that lie at address (n,) int64 in memory, item_bytes (2 or 4) each, to out (n, length).

    out is of any integer dtype. An address of 0 is left out. Nothing is checked: the caller holds the memory.
    """
    n, length = out.shape
    for i in range(n):
        start = address[i]
        if start == 0:
            continue
        if item_bytes == 2:
            for j in range(length):
                out[i, j] = _load16(start + 2 * j)
        else:
            for j in range(length):
                out[i, j] = _load32(start + 4 * j)


@njit(nogil=True, cache=True)
def gather_pieces(address, length, first, item_bytes, fill, rows, out):  # type: ignore[no-untyped-def]
    """Fills row rows[i] of out with the pieces first[i] .. first[i + 1] - 1, one after the other, and `fill` behind.

    address, length: (pieces,) int64, where the ids of a piece lie in memory, and how many; item_bytes each (2 or 4).
    Nothing is checked: the caller holds the memory, and the pieces of a row fit into it.
    """
    for i in range(len(rows)):
        row, at = rows[i], 0
        for p in range(first[i], first[i + 1]):
            start = address[p]
            if item_bytes == 2:
                for j in range(length[p]):
                    out[row, at + j] = _load16(start + 2 * j)
            else:
                for j in range(length[p]):
                    out[row, at + j] = _load32(start + 4 * j)
            at += length[p]
        out[row, at:] = fill


@njit(nogil=True, cache=True)
def number_documents(starts, ends, out):  # type: ignore[no-untyped-def]
    """Fills out (n, length) int32: which document of its window each token is in, counted from 0.

    starts: where documents start, all windows in a row, ascending in each; window i has starts[ends[i] : ends[i + 1]].
    A start at 0 begins document 0.
    """
    n, length = out.shape
    for i in range(n):
        at, document = 0, 0
        for k in range(ends[i], ends[i + 1]):
            while at < starts[k]:
                out[i, at] = document
                at += 1
            document += 1 if starts[k] > 0 else 0
        while at < length:
            out[i, at] = document
            at += 1


@njit(nogil=True, cache=True)
def number_ranges(starts, low, rows, out):  # type: ignore[no-untyped-def]
    """The same for ranges of one row of documents: fills rows rows[i] of out, whose range begins at low[i].

    starts (documents,) int64, ascending; low, rows (n,) int64.
    """
    length = out.shape[1]
    for i in range(len(rows)):
        k = np.searchsorted(starts, low[i], side="right")
        at, document = 0, 0
        while at < length:
            until = min(starts[k] - low[i], length) if k < len(starts) else length
            out[rows[i], at:until] = document
            at, document, k = until, document + 1, k + 1


@njit(nogil=True, cache=True)
def targets_of(tokens, documents, ignored, out):  # type: ignore[no-untyped-def]
    """Fills out (n, length - 1) with the token that follows, `ignored` where it is of another document.

    tokens (n, length) of an integer dtype, documents (n, length) int32.
    """
    for i in range(len(tokens)):
        for j in range(tokens.shape[1] - 1):
            out[i, j] = tokens[i, j + 1] if documents[i, j] == documents[i, j + 1] else ignored


def warm() -> None:
    """Compiles the kernels, or loads them from numba's cache."""
    gather(np.zeros(1, np.int64), 2, np.zeros((1, 1), np.int64))
    none = np.zeros(0, np.int64)
    gather_pieces(none, none, np.zeros(2, np.int64), 2, 0, np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
    number_ranges(np.zeros(1, np.int64), none, none, np.zeros((1, 1), np.int32))
    targets_of(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int32), -1, np.zeros((1, 0), np.int64))
    number_documents(np.zeros(1, np.int64), np.array([0, 1]), np.zeros((1, 1), np.int32))
