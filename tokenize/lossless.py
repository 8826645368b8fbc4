"""Proof, token by token, that ids stand for the text that they were made from. For byte-level tokenizers.

An encoder that loses, changes or reorders a single byte of any document is caught here, whatever it is. It costs a
few per cent of the time that the fastest encoder takes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numba import int64, njit, uint64

from gristmill.stages.kernels.buffers import load8, load64, string_views

_PADDING = bytes(8)  # so that 8 bytes can be loaded from the start of the last piece


class Pieces:
    """The bytes of each token, one after the other."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.data = np.frombuffer(b"".join(pieces) + _PADDING, np.uint8)
        self.offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)

    def first_difference(self, texts: pa.Array, ids: np.ndarray, lengths: np.ndarray) -> int:
        """The first document whose ids do not stand for its text, byte by byte; -1 when there is none.

        ids (tokens,) of all documents, each below the number of pieces; lengths (documents,) int64.
        """
        offsets, data = string_views(texts)
        ends = np.cumsum(lengths)
        return int(_first_difference(ids, ends, offsets, data, int(offsets[-1]), self.offsets, self.data))


@njit(nogil=True, cache=True)
def _first_difference(ids, ends, offsets, data, limit, piece_offsets, pieces):  # type: ignore[no-untyped-def]
    """data is read up to `limit` and no further; pieces has 8 bytes of padding."""
    token = int64(0)
    for row in range(ends.shape[0]):
        at, end = int64(offsets[row]), int64(offsets[row + 1])
        while token < ends[row]:
            piece = piece_offsets[int64(ids[token])]
            length = piece_offsets[int64(ids[token]) + 1] - piece
            if length > end - at:
                return row
            if length <= 8 and at + 8 <= limit:
                # shifting out the bytes beyond the piece; a shift by 64 would be undefined
                difference = load64(data, at) ^ load64(pieces, piece)
                if length > 0 and (difference << uint64(8 * (8 - length))) != uint64(0):
                    return row
            else:
                for k in range(length):
                    if load8(data, at + k) != load8(pieces, piece + k):
                        return row
            at += length
            token += 1
        if at != end:
            return row
    return -1
