"""What Megatron-LM builds before its first batch: the arrays of megatron/core/datasets, by its own compiled helpers.

`pip install --no-deps megatron-core` (0.16.1 was measured) brings the helpers; they are loaded by themselves, because
the package around them wants a GPU's libraries. The steps in numpy between them are as in gpt_dataset.py and
blended_dataset.py: documents shuffled, samples cut, samples shuffled, for each source; then the blend.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import files
from typing import Any

import numpy as np


def helpers() -> Any:
    """The compiled module `helpers_cpp` of megatron-core."""
    path = next(f for f in files("megatron-core") or () if f.name.startswith("helpers_cpp."))
    spec = importlib.util.spec_from_file_location("helpers_cpp", str(path.locate()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(cpp: Any, sizes: list[np.ndarray], seq_len: int, seed: int) -> list[np.ndarray]:
    """One epoch of every source, mixed by its size. sizes: tokens of each document, (documents,) int32 a source."""
    arrays, samples = [], []
    for lengths in sizes:
        state = np.random.RandomState(seed)
        documents = np.arange(len(lengths), dtype=np.int32)
        state.shuffle(documents)
        tokens = int(lengths.sum(dtype=np.int64))
        count = (tokens - 1) // seq_len
        cut = cpp.build_sample_idx_int64 if 2 * (count + 1) > np.iinfo(np.int32).max else cpp.build_sample_idx_int32
        index = cut(lengths, documents, seq_len, 1, tokens, True, 1)
        order = np.arange(len(index) - 1, dtype=np.uint32)
        state.shuffle(order)
        arrays += [documents, index, order]
        samples.append(len(order))
    total = sum(samples)
    source, sample = np.empty(total, np.int16), np.empty(total, np.int64)
    weights = np.array(samples, np.float64) / total
    cpp.build_blending_indices(source, sample, weights, len(sizes), total, False)
    return [*arrays, source, sample]
