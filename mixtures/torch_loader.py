"""A plan for PyTorch's DataLoader: map-style by position, or iterable in ready batches. The only file here with torch.

    data = BatchStream(plan, rank, world_size, batch_windows=512, start_window=state)
    for batch in DataLoader(data, batch_size=None, num_workers=2):      # any number of workers: the same batches
        loss = model(batch["tokens"][:, :-1], targets=batch["targets"])
        state = batch["next_window"]                                    # all there is to save

    data = WindowDataset(plan, start_window=state)                      # random access, from `state` on
    for batch in DataLoader(data, batch_size=8): ...

The order is the plan's: give no shuffling sampler. Where many processes share a plan, the map-style data set is for
trainers that split positions among ranks themselves; `BatchStream` splits them as `loader.Loader` says, and
`StatefulBatches` puts (inputs, labels) and a state of one integer around it. In other trainers (loops like nanoGPT's,
torchtitan, Hugging Face's Trainer): `docs/mixtures.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from gristmill.mixtures.loader import Batch, Loader
from gristmill.mixtures.plan import Plan
from gristmill.mixtures.window_kernels import targets_of

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


def as_tensors(batch: Batch) -> dict[str, Any]:
    """A batch of n windows as tensors.

    tokens (n, seq_len + 1) int64; targets (n, seq_len) int64, the token that follows each but the last, IGNORED where
    it belongs to another document; documents (n, seq_len + 1) int32; source (n,) int32; position (n,) int64;
    next_window int.
    """
    documents = batch.documents
    targets = np.empty((len(documents), documents.shape[1] - 1), np.int64)
    targets_of(batch.tokens, documents, IGNORED, targets)
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


class StatefulBatches:
    """({"input": (n, seq_len)}, labels (n, seq_len)) of each step of one rank, both int64, with a state to save.

    What torchtitan's trainer asks of a data loader. The state is the number of windows that all ranks have consumed:
    it fits any number of ranks, and any batch size.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        batch_windows: int,
        start_window: int = 0,
        num_workers: int = 0,
    ) -> None:
        """batch_windows: of all ranks together. num_workers: processes that read ahead; they change nothing else."""
        self.next_window = start_window
        self._settings = (plan, rank, world_size, batch_windows)
        self._num_workers = num_workers

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        stream = BatchStream(*self._settings, start_window=self.next_window)
        for batch in DataLoader(stream, batch_size=None, num_workers=self._num_workers):
            self.next_window = batch["next_window"]
            yield {"input": batch["tokens"][:, :-1]}, batch["targets"]

    def state_dict(self) -> dict[str, int]:
        return {"next_window": self.next_window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from there at the next `iter`. An empty state changes nothing."""
        self.next_window = state.get("next_window", self.next_window)


class WindowDataset(Dataset):
    """Every window of the run from start_window on: tensors without the batch dimension."""

    def __init__(self, plan: Plan, start_window: int = 0) -> None:
        self.loader = Loader(plan, start_window=start_window)

    def __len__(self) -> int:
        return self.loader.plan.windows - self.loader.start_window

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"Window {index:,} is outside the data set, which has {len(self):,}.")
        item = as_tensors(self.loader.batch(self.loader.start_window + index))
        return {name: value[0] if isinstance(value, torch.Tensor) else value for name, value in item.items()}


def hugging_face_batch(items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Items of a WindowDataset as causal language models of transformers want them, which shift the labels themselves.

    input_ids and labels: (n, seq_len + 1) int64; a label is IGNORED where it belongs to another document than the
    token before it.
    """
    labels = torch.stack([torch.cat([item["tokens"][:1], item["targets"]]) for item in items])
    return {"input_ids": torch.stack([item["tokens"] for item in items]), "labels": labels}
