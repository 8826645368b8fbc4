"""A plan for PyTorch's DataLoader: map-style by position, or iterable in ready batches. The only file here with torch.

    data = BatchStream(plan, rank, world_size, batch_windows=512, start_window=state)
    for batch in DataLoader(data, batch_size=None, num_workers=2):      # any number of workers: the same batches
        loss = model(batch["tokens"][:, :-1], targets=batch["targets"])
        state = batch["next_window"]                                    # all there is to save

    data = WindowDataset(plan)                                          # len(plan.windows), random access by position
    for batch in DataLoader(data, batch_size=8, sampler=range(state, plan.windows)): ...

The order is the plan's: give no shuffling sampler. Of a plan that many processes share, the map-style data set is for
trainers that split positions among ranks themselves; `BatchStream` splits them as `loader.Loader` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from gristmill.mixtures.loader import Batch, Loader
from gristmill.mixtures.plan import Plan

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


def as_tensors(batch: Batch) -> dict[str, Any]:
    """A batch of n windows as tensors.

    tokens (n, seq_len + 1) int64; targets (n, seq_len) int64, the token that follows each but the last, IGNORED where
    it belongs to another document; documents (n, seq_len + 1) int32; source (n,) int32; position (n,) int64;
    next_window int.
    """
    documents = batch.documents
    targets = np.where(documents[:, :-1] == documents[:, 1:], batch.tokens[:, 1:], IGNORED)
    return {
        "tokens": torch.from_numpy(batch.tokens),
        "targets": torch.from_numpy(targets),
        "documents": torch.from_numpy(documents),
        "source": torch.from_numpy(batch.source),
        "position": torch.from_numpy(batch.position),
        "next_window": batch.next_window,
    }


class BatchStream(IterableDataset):
    """The batches of one rank, as `as_tensors` gives them. Worker w of W makes every W-th, which a DataLoader puts
    back in order; so give it batch_size=None."""

    def __init__(self, plan: Plan, rank: int, world_size: int, batch_windows: int, start_window: int = 0) -> None:
        super().__init__()
        self.loader = Loader(plan, rank, world_size, batch_windows, start_window)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for i in range(first, len(self.loader), step):
            yield as_tensors(self.loader.batch(self.loader.start_window + i * self.loader.batch_windows))


class WindowDataset(Dataset):
    """Every window of the run by its position: tensors without the batch dimension."""

    def __init__(self, plan: Plan) -> None:
        self.loader = Loader(plan)

    def __len__(self) -> int:
        return self.loader.plan.windows

    def __getitem__(self, position: int) -> dict[str, Any]:
        if not 0 <= position < len(self):
            raise IndexError(f"Position {position:,} is outside the run, which has {len(self):,} windows.")
        item = as_tensors(self.loader.batch(position))
        return {name: value[0] if isinstance(value, torch.Tensor) else value for name, value in item.items()}
