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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gristmill.mixtures.plan import MixtureError, Plan


@dataclass(frozen=True)
class Batch:
    """The windows of one rank in one step: n of them, 0 where the last step has fewer windows than ranks."""

    tokens: np.ndarray  # (n, seq_len + 1) int64, or the dtype asked for
    position: np.ndarray  # (n,) int64, in the run
    source: np.ndarray  # (n,) int32, index into sources
    epoch: np.ndarray  # (n,) int64, of the source
    window: np.ndarray  # (n,) int64, of the source: its tokens begin at window * seq_len
    next_window: int  # windows that the run has consumed after this step, all ranks together
    plan: Plan

    @property
    def sources(self) -> tuple[str, ...]:
        return self.plan.sources

    @cached_property
    def starts(self) -> list[np.ndarray]:
        """For each window where documents start in it: (k,) int64, ascending, in [0, seq_len]."""
        length = self.plan.seq_len
        return [
            self.plan.tokens.sources[self.sources[s]].bounds(int(w) * length, length + 1)
            for s, w in zip(self.source, self.window, strict=True)
        ]

    @cached_property
    def documents(self) -> np.ndarray:
        """Which document of its window each token is in, counted from 0: (n, seq_len + 1) int32.

        Tokens of one window attend to each other only where these numbers are equal. The target of a document's last
        token is another document's first: mask it where documents[:, :-1] != documents[:, 1:].
        """
        out = np.zeros(self.tokens.shape, np.int32)
        for i, starts in enumerate(self.starts):
            out[i, starts[starts > 0]] = 1
        return np.cumsum(out, axis=1, dtype=np.int32)


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
        read_windows(self.plan, source, window, tokens)
        return Batch(tokens, np.arange(low, high), source, epoch, window, end, self.plan)


def read_windows(plan: Plan, source: np.ndarray, window: np.ndarray, out: np.ndarray) -> None:
    """Fills out (n, seq_len + 1) with the tokens of windows (n,) of sources (n,)."""
    length = plan.seq_len
    readers = [plan.tokens.sources[name].read for name in plan.sources]
    for i, (s, w) in enumerate(zip(source.tolist(), window.tolist(), strict=True)):
        out[i] = readers[s](w * length, length + 1)
