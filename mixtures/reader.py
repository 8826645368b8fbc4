"""Windows out of memory-mapped token shards: where they lie is looked up for many at a time, then one kernel copies.

    reader = Reader(plan)
    padding = reader.read(source, window, out)        # fills out (n, seq_len + 1)

A window of `concat` over a whole source is one stretch of a file. One over chosen documents, or packed by best fit, is
several pieces, each part of one document and so in one file.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gristmill.mixtures.packing import Packing
from gristmill.mixtures.plan import Plan
from gristmill.mixtures.selection import SelectedTokens
from gristmill.mixtures.window_kernels import gather, gather_pieces, number_ranges

FEW_WINDOWS = 8  # below it, looking up addresses costs more than reading window by window


class Reader:
    """Copies windows of a plan out of its token shards. Holds the maps of the shards that were asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sources = [plan.tokens.sources[name] for name in plan.sources]
        self._packings = [plan.sizes[name].packing for name in plan.sources]
        shards: dict[int, _Shards] = {}  # parts of one source share its maps
        wholes = [s.whole if isinstance(s, SelectedTokens) else s for s in self._sources]
        self._shards = [shards.setdefault(id(whole), _Shards(whole)) for whole in wholes]

    def read(self, source: np.ndarray, window: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Fills out (n, seq_len + 1) with the tokens of windows (n,) of sources (n,), the end-of-text id where nothing
        is left -> tokens of padding (n,)."""
        padding, address = np.zeros(len(source), np.int64), np.zeros(len(source), np.int64)
        whole = np.ones(len(source), bool)
        for s in np.unique(source).tolist():
            rows = np.flatnonzero(source == s)
            packing, held = self._packings[s], self._sources[s]
            if packing is not None or isinstance(held, SelectedTokens):
                whole[rows] = False
                padding[rows] = self._read_pieces(s, packing, window[rows], rows, out)
            elif len(source) >= FEW_WINDOWS:
                address[rows] = self._shards[s].addresses(window[rows] * self._plan.seq_len, out.shape[1])
        if address.any():
            gather(address, self._plan.tokens.dtype.itemsize, out)
        for i in np.flatnonzero(whole & (address == 0)).tolist():  # few windows, or one that lies in two shards
            out[i] = self._sources[source[i]].read(int(window[i]) * self._plan.seq_len, out.shape[1])
        return padding

    def number_documents(self, source: np.ndarray, window: np.ndarray, out: np.ndarray) -> None:
        """Fills out (n, seq_len + 1) int32 with the number, in its window, of the document that each token is in.

        For windows of `concat`; see `Batch.documents`.
        """
        for s in np.unique(source).tolist():
            rows = np.flatnonzero(source == s)
            begin, held = window[rows] * self._plan.seq_len, self._sources[s]
            if isinstance(held, SelectedTokens):
                number_ranges(held.offset, begin, rows, out)
                continue
            shard, low, inside = self._shards[s].places(begin, out.shape[1])
            for at in np.unique(shard[inside]).tolist():
                mine = inside & (shard == at)
                number_ranges(held.files(at).index.start, low[mine], rows[mine], out)
            for i in np.flatnonzero(~inside).tolist():
                number_ranges(held.bounds(int(begin[i]), out.shape[1]), np.zeros(1, np.int64), rows[i : i + 1], out)

    def _read_pieces(
        self, s: int, packing: Packing | None, window: np.ndarray, rows: np.ndarray, out: np.ndarray
    ) -> np.ndarray:
        held = self._sources[s]
        if packing is None:
            first, start, length = stretches(held.offset, window * self._plan.seq_len, out.shape[1])
        else:
            first, at = ranges(packing.offset[window], packing.offset[window + 1])
            start, length = packing.start[at], packing.length[at].astype(np.int64)
        if isinstance(held, SelectedTokens):
            start = held.places(start)
        address = self._shards[s].addresses(start, length)
        assert address.all()  # a piece is part of one document
        gather_pieces(address, length, first, held.dtype.itemsize, self._plan.tokens.eos_id, rows, out)
        return out.shape[1] - np.add.reduceat(length, first[:-1])


def ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers low[i] .. high[i] - 1 of all i in a row -> (where those of each i begin (n + 1,), the numbers)."""
    first = np.concatenate([[0], np.cumsum(high - low)])
    return first, np.arange(first[-1]) + np.repeat(low - first[:-1], high - low)


def stretches(offset: np.ndarray, begin: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges of `length` from begin (n,), cut where documents begin, which is at offset (documents + 1,).

    -> (first stretch of each range (n + 1,), first token of each stretch (k,), tokens of each (k,)), all int64.
    """
    low = np.searchsorted(offset, begin, side="right") - 1
    high = np.searchsorted(offset, begin + length, side="left")
    first, document = ranges(low, high)
    of = np.repeat(np.arange(len(begin)), high - low)
    start = np.maximum(offset[document], begin[of])
    return first, start, np.minimum(offset[document + 1], begin[of] + length) - start


class _Shards:
    """Where the ids of one source lie in memory. A shard is mapped when its first window is asked for."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.starts = np.cumsum([0, *(shard.tokens for shard in source.shards)])  # in ids; then the total
        self.views: list[np.ndarray | None] = [None] * len(source.shards)  # kept, because addresses point into them
        self.first = np.zeros(len(source.shards), np.int64)  # address of the first id of each shard, 0: not mapped

    def addresses(self, begin: np.ndarray, length: int | np.ndarray) -> np.ndarray:
        """Addresses (n,) int64 of the ranges that start at begin (n,); 0 where a range lies in more than one shard.

        Raises TokenError when the ids of one were changed since they were written.
        """
        shard, offset, whole = self.places(begin, length)
        for s in np.unique(shard[whole]).tolist():
            files = self.source.files(s)
            if self.views[s] is None:
                self.views[s], self.first[s] = files.ids, files.ids.ctypes.data
            if files.compares:
                mine = whole & (shard == s)
                files.compare(offset[mine], (offset + length)[mine])
        return np.where(whole, self.first[shard] + offset * self.source.dtype.itemsize, 0)

    def places(self, begin: np.ndarray, length: int | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, place in it, whether the range of `length` ends in it too), (n,) each, of positions begin (n,)."""
        shard = np.searchsorted(self.starts, begin, side="right") - 1
        return shard, begin - self.starts[shard], begin + length <= self.starts[shard + 1]
