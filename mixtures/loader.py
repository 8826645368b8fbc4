"""Batches of a plan, in plain numpy. The state of a run is one integer: how many windows it has consumed.

    for batch in plan.loader(rank=0, world_size=2, batch_windows=16, start_window=0):
        batch.tokens              # (8, seq_len + 1) int64; inputs are [:, :-1], targets [:, 1:]
        batch.next_window         # 16: what to give as start_window to go on after this batch

Step t takes positions start + t * batch_windows up to the next step's, whatever the world size: rank r gets the r-th of
world_size consecutive parts, so the ranks' parts in a row are the global batch. Batches of another size or another
world size go on from the same integer with no window left out or seen twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gristmill.mixtures.plan import MixtureError, Plan
from gristmill.mixtures.reader import Reader
from gristmill.mixtures.window_kernels import number_documents


@dataclass(frozen=True)
class Batch:
    """The windows of one rank in one step: n of them, 0 where the last step has fewer windows than ranks."""

    tokens: np.ndarray  # (n, seq_len + 1) int64, or the dtype asked for
    position: np.ndarray  # (n,) int64, in the run
    source: np.ndarray  # (n,) int32, index into sources
    epoch: np.ndarray  # (n,) int64, of the source
    window: np.ndarray  # (n,) int64, of the source: its tokens begin at window * seq_len
    padding: np.ndarray  # (n,) int64: so many tokens at the end are none; 0 with packing concat
    next_window: int  # windows that the run has consumed after this step, all ranks together
    plan: Plan
    reader: Reader = field(repr=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.plan.sources

    @cached_property
    def starts(self) -> list[np.ndarray]:
        """For each window where documents, or pieces of them, start in it: (k,) int64, ascending, in [0, seq_len].

        Every place of padding counts as a document.
        """
        return [self._starts(self.sources[s], int(w)) for s, w in zip(self.source, self.window, strict=True)]

    def _starts(self, source: str, window: int) -> np.ndarray:
        pieces = self.plan.pieces(source, window)
        if self.plan.packing == "concat":
            return self.plan.tokens.sources[source].bounds(*pieces[0])
        ends = np.cumsum([length for _, length in pieces])
        return np.concatenate([[0], ends[:-1], np.arange(ends[-1], self.plan.seq_len + 1)])

    @cached_property
    def predicted(self) -> np.ndarray | None:
        """Which targets a model is trained on: (n, seq_len) bool, target t being token t + 1; None: all of them.

        With packing best_fit all but padding and the first tokens of what is left of documents that were cut.
        """
        packings = [self.plan.sizes[name].packing for name in self.sources]
        if self.plan.packing == "concat":
            return None
        rows = [
            packing.predicted(int(w)) if (packing := packings[s]) is not None else np.ones(self.plan.seq_len, bool)
            for s, w in zip(self.source, self.window, strict=True)
        ]
        return np.array(rows, bool).reshape(len(rows), self.plan.seq_len)

    @cached_property
    def documents(self) -> np.ndarray:
        """Which document of its window each token is in, counted from 0: (n, seq_len + 1) int32.

        Tokens of one window attend to each other only where these numbers are equal. The target of a document's last
        token is another document's first: mask it where documents[:, :-1] != documents[:, 1:].
        """
        out = np.empty(self.tokens.shape, np.int32)
        if self.plan.packing == "concat":
            self.reader.number_documents(self.source, self.window, out)
            return out
        starts = self.starts
        ends = np.cumsum([0, *(len(of_window) for of_window in starts)])
        number_documents(np.concatenate([np.zeros(0, np.int64), *starts]), ends, out)
        return out


class Loader:
    """An iterator factory: each `iter` begins at start_window. Every rank has the same number of batches."""

    def __init__(
        self,
        plan: Plan,
        rank: int = 0,
        world_size: int = 1,
        batch_windows: int = 1,
        start_window: int = 0,
        dtype: Any = None,
    ) -> None:
        """batch_windows: of all ranks together. dtype: of the tokens, int64 unless given.

        Raises MixtureError for a plan without token shards or impossible numbers.
        """
        if plan.tokens is None:
            raise MixtureError(
                f"Plan {plan.mixture} was made from sizes alone. To load windows, plan with a TokenSet: "
                'mixture.plan(TokenSet.open("run/tokens"), ...).'
            )
        if not 0 <= rank < world_size:
            raise MixtureError(f"rank {rank} of world_size {world_size}: ranks go from 0 to world_size - 1.")
        if batch_windows < 1:
            raise MixtureError(f"batch_windows is {batch_windows}; a batch has at least 1 window.")
        if not 0 <= start_window <= plan.windows:
            raise MixtureError(
                f"start_window is {start_window:,}, but the plan has {plan.windows:,} windows. A checkpoint of another "
                "plan? Compare the plans' hashes."
            )
        self.plan, self.rank, self.world_size = plan, rank, world_size
        self.batch_windows, self.start_window = batch_windows, start_window
        self.dtype = np.dtype(dtype if dtype is not None else np.int64)
        self._reader: Reader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __len__(self) -> int:
        """Batches from start_window to the end of the plan; the last may be short."""
        return (self.plan.windows - self.start_window + self.batch_windows - 1) // self.batch_windows

    def __iter__(self) -> Iterator[Batch]:
        for begin in range(self.start_window, self.plan.windows, self.batch_windows):
            yield self.batch(begin)

    def batch(self, begin: int) -> Batch:
        """This rank's part of the global batch that begins at a position."""
        end = min(begin + self.batch_windows, self.plan.windows)
        low = begin + (end - begin) * self.rank // self.world_size
        high = begin + (end - begin) * (self.rank + 1) // self.world_size
        source, epoch, window = self.plan.order.block(low, high)
        tokens = np.empty((high - low, self.plan.seq_len + 1), self.dtype)
        if self._reader is None:
            self._reader = Reader(self.plan)
        padding = self._reader.read(source, window, tokens)
        return Batch(tokens, np.arange(low, high), source, epoch, window, padding, end, self.plan, self._reader)
