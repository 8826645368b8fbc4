"""A plan for PyTorch's DataLoader: map-style by position, or iterable in ready batches. The only file here with torch.

    data = BatchStream(plan, rank, world_size, batch_windows=512, start_window=state)
    for batch in DataLoader(data, batch_size=None, num_workers=2):      # any number of workers: the same batches
        loss = model(batch["tokens"][:, :-1], targets=batch["targets"])
        state = batch["next_window"]                                    # all there is to save

    data = WindowDataset(plan, start_window=state)                      # random access, from `state` on
    for batch in DataLoader(data, batch_size=8): ...

The order is the plan's: give no shuffling sampler. Where many processes share a plan, the map-style data set is for
trainers that split positions among ranks themselves; `BatchStream` splits them as `loader.Loader` says.

In other trainers:

    # a loop like nanoGPT's: in place of get_batch("train")
    stream = iter(DataLoader(BatchStream(plan, rank, world_size, batch_windows, start), batch_size=None, num_workers=1))
    batch = next(stream); X, Y = batch["tokens"][:, :-1], batch["targets"]      # cross_entropy(ignore_index=-100)

    # Hugging Face's Trainer, which shuffles unless told otherwise and shifts the labels itself
    class InOrder(Trainer):
        def _get_train_sampler(self, *_): return SequentialSampler(self.train_dataset)
    InOrder(model, TrainingArguments(..., remove_unused_columns=False), train_dataset=WindowDataset(plan, start),
            data_collator=hugging_face_batch).train()

    # torchtitan and others that take an iterable of (inputs, labels)
    for batch in BatchStream(plan, dp_rank, dp_degree, batch_windows, start):
        yield {"input": batch["tokens"][:, :-1]}, batch["targets"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
