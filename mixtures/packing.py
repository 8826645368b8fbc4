"""Best-fit packing: windows in which documents are whole where they fit, instead of cut wherever a window ends.

    packing = best_fit(starts, tokens, seq_len=2048)
    packing.windows, packing.padding_tokens
    packing.pieces(17)            # [(120_448, 1900), (88_012, 149)]: (first token in the source, tokens)

A document longer than a window is cut into windows that overlap by one token, so that no target is lost; what is left
of it, and every shorter document, is a piece. Pieces go, the longest first, each into the window with the least room
that still holds it (Ding et al. 2024, "Fewer truncations improve language modeling"). That is done in
groups of GROUP_PIECES consecutive pieces, so that the memory it needs, beside the result, does not grow; the same
documents give the same windows on every machine. What stays free at the end of a window is padding.

Unlike `concat`, where windows follow from a number, the result is 13 bytes a piece and 12 a window.

A window is trained on all its tokens but its first, the padding, and those that begin the rest of a document that was
cut: what comes before them is of another document, and they are a target of the window before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import int64, njit, uint64

from gristmill.mixtures.kernels import dequeue, enqueue, lowest_bit

GROUP_PIECES = 1 << 16  # the last windows of a group stay emptier: under 0.1 % of it for pieces of 500 tokens


@dataclass(frozen=True)
class Packing:
    """What lies in each window of a source."""

    offset: np.ndarray  # (windows + 1,) int64: window w holds pieces offset[w] .. offset[w + 1] - 1
    start: np.ndarray  # (pieces,) int64, first token in the source
    length: np.ndarray  # (pieces,) int32, tokens
    opens: np.ndarray  # (pieces,) bool: the piece begins its document
    seq_len: int

    @property
    def windows(self) -> int:
        return len(self.offset) - 1

    @property
    def padding_tokens(self) -> int:
        return self.windows * (self.seq_len + 1) - int(self.length.sum())

    @property
    def padding_share(self) -> float:
        """Of all places in the windows."""
        return self.padding_tokens / max(self.windows * (self.seq_len + 1), 1)

    @cached_property
    def targets(self) -> np.ndarray:
        """Tokens that each window is trained on: (windows,) int32."""
        lost = ~self.opens
        lost[self.offset[:-1]] = True  # the first token of a window is nobody's target
        return np.add.reduceat(self.length - lost, self.offset[:-1]).astype(np.int32)

    def predicted(self, window: int) -> np.ndarray:
        """Which of the targets of a window it is trained on: (seq_len,) bool; target t is token t + 1."""
        low, high = int(self.offset[window]), int(self.offset[window + 1])
        ends = np.cumsum(self.length[low:high])
        out = np.arange(1, self.seq_len + 1) < ends[-1]
        out[ends[:-1] - 1] &= self.opens[low + 1 : high]
        return out

    def pieces(self, window: int) -> list[tuple[int, int]]:
        """(first token in the source, tokens) of each piece of a window, in order."""
        low, high = int(self.offset[window]), int(self.offset[window + 1])
        return list(zip(self.start[low:high].tolist(), self.length[low:high].tolist(), strict=True))


def best_fit(starts: np.ndarray, tokens: int, seq_len: int, group_pieces: int = GROUP_PIECES) -> Packing:
    """Packs the documents of a source into windows of seq_len + 1 tokens.

    starts: (documents,) int64, first token of each document, ascending from 0; tokens: where the last one ends.
    """
    room = seq_len + 1
    ends = np.append(starts[1:], tokens)
    # A document of n > room tokens gives windows at 0, seq_len, 2 seq_len, ... while more than `room` are left.
    full = np.maximum(0, (ends - starts - 2) // seq_len)
    first, length = np.empty(len(starts) + int(full.sum()), np.int64), np.empty(len(starts) + int(full.sum()), np.int32)
    _cut(starts, ends, full, seq_len, first, length)
    window, place = np.empty(len(length), np.int64), np.empty(len(length), np.int64)
    windows = 0
    for low in range(0, len(length), group_pieces):
        part = slice(low, low + group_pieces)
        order = np.argsort(-length[part], kind="stable")
        windows += _pack(length[part], order, room, windows, window[part], place[part])
    by_window = np.lexsort((place, window))
    offset = np.searchsorted(window[by_window], np.arange(windows + 1))
    opens = np.zeros(len(first), bool)
    opens[np.cumsum(full + 1) - (full + 1)] = True
    return Packing(offset.astype(np.int64), first[by_window], length[by_window], opens[by_window], seq_len)


@njit(nogil=True, cache=True)
def _cut(starts, ends, full, seq_len, first, length):  # type: ignore[no-untyped-def]
    """Fills first and length of the pieces of each document: its full windows, then what is left of it."""
    at = 0
    for d in range(len(starts)):
        begin = starts[d]
        for _ in range(full[d]):
            first[at], length[at] = begin, seq_len + 1
            begin += seq_len
            at += 1
        first[at], length[at] = begin, ends[d] - begin
        at += 1


@njit(nogil=True, cache=True)
def _pack(length, order, room, before, window, place):  # type: ignore[no-untyped-def]
    """Best fit of the pieces in the given order. Fills window (from `before` on) and place in it; -> windows opened."""
    windows = 0
    queue = np.full(room + 1, -1, np.int64)  # lists of windows by the room that is left in them
    words, tops = np.zeros((room >> 6) + 1, np.uint64), np.zeros((room >> 12) + 1, np.uint64)
    following = np.full(len(length), -1, np.int64)
    pieces = np.zeros(len(length), np.int64)
    for i in order:
        free = _least_from(words, tops, int64(length[i]))
        if free < 0:
            w, free = windows, int64(room)
            windows += 1
        else:
            w = dequeue(queue, words, tops, following, free)
        window[i], place[i] = before + w, pieces[w]
        pieces[w] += 1
        if free > length[i]:
            enqueue(queue, words, tops, following, free - length[i], w)
    return windows


@njit(inline="always")
def _least_from(words, tops, least):  # type: ignore[no-untyped-def]
    """The least value, at least `least`, whose list is not empty; -1 where there is none."""
    word = least >> 6
    if word < len(words):
        here = words[word] >> uint64(least & 63)
        if here != uint64(0):
            return least + lowest_bit(here)
    word += 1
    top = word >> 6
    while top < len(tops):
        above = tops[top]
        if top == word >> 6:
            above = (above >> uint64(word & 63)) << uint64(word & 63)
        if above != uint64(0):
            found = (top << 6) + lowest_bit(above)
            return (found << 6) + lowest_bit(words[found])
        top += 1
    return int64(-1)
