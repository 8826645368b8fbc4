"""MinHash as a statistic: estimates, recall, agreement with datasketch, against theory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import datasketch
import numpy as np
import pyarrow as pa
import pytest

from gristmill.stages.kernels import minhash as kernel
from gristmill.stages.minhash import MinHash, recall


def batch(texts: Sequence[str]) -> pa.RecordBatch:
    n = len(texts)
    columns = {name: pa.nulls(n, pa.string()) for name in ("dump", "date")}
    columns |= {"doc_id": pa.array([f"d{i:04d}" for i in range(n)]), "source": pa.array(["web"] * n)}
    return pa.RecordBatch.from_pydict({**columns, "text": pa.array(texts, pa.string())})


def words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count)]


def pairs(rng: np.random.Generator, n: int, similarity: float, count: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Pairs of sets of n hashes each with this Jaccard similarity -> (count, n) uint32 twice, the true similarity."""
    shared = round(2 * n * similarity / (1 + similarity))
    union = 2 * n - shared
    hashes = rng.integers(0, 2**32, (count, union), dtype=np.uint32)
    a, b = hashes[:, :n], np.concatenate([hashes[:, :shared], hashes[:, n:]], axis=1)
    return np.ascontiguousarray(a), np.ascontiguousarray(b), shared / union


def signatures(sets: np.ndarray, k: int, seed: int) -> np.ndarray:
    factors, summands = kernel.permutations(k, seed)
    out = np.empty((len(sets), len(factors)), np.uint32)
    for i, row in enumerate(sets):
        buffer = np.concatenate([row, np.zeros(32, np.uint32)])
        kernel.signature(buffer, len(row), factors, summands, out[i])
    return out[:, :k]


LEVELS = [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
SIZES = [20, 50, 200, 1_000, 5_000]
SHAPES = [(14, 8), (20, 5), (9, 12)]


@dataclass(frozen=True)
class Cell:
    """Pairs of one size and similarity: what was found, in standard errors from what theory says."""

    size: int
    level: float
    pairs: int
    estimate: float  # of the mean
    spread: float  # of the estimates, in parts of theory's
    recall: tuple[tuple[float, float, float], ...]  # of each shape: found, expected, variance; sums over the pairs


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """Every size and similarity, each pair under permutations of its own seed out of eight."""
    out = []
    k = 112
    for size in SIZES:
        for level in LEVELS:
            rng = np.random.default_rng([size, round(100 * level)])
            count = 160 if size == 5_000 else 400 if size == 1_000 else 2_000
            a, b, true = pairs(rng, size, level, count)
            same = np.concatenate(
                [signatures(a[seed::8], k, seed) == signatures(b[seed::8], k, seed) for seed in range(8)]
            )
            estimates = same.mean(axis=1)
            deviation = math.sqrt(true * (1 - true) / k)
            found = []
            for bands, rows in SHAPES:
                hits = same[:, : bands * rows].reshape(count, bands, rows).all(axis=2).any(axis=1)
                p = recall(true, bands, rows)
                found.append((float(hits.sum()), count * p, count * p * (1 - p)))
            z = (estimates.mean() - true) / (deviation / math.sqrt(count))
            out.append(Cell(size, level, count, z, estimates.std() / deviation, tuple(found)))
    return out


def errors(cells: list[Cell], shape: int) -> float:
    """Hits of some cells together against theory, in standard errors; a hit counts for one at least."""
    found, expected, variance = (sum(c.recall[shape][i] for c in cells) for i in range(3))
    return abs(found - expected) / math.sqrt(max(variance, 1))


def test_estimates_are_unbiased(cells: list[Cell]) -> None:
    """Mean and spread. All 50 cells together, each size and each level within three standard errors, each within four:
    three would be passed by chance by one cell in seven draws of all."""
    assert max(abs(c.estimate) for c in cells) < 4
    for key in ("size", "level"):
        for value in {getattr(c, key) for c in cells}:
            some = [c.estimate for c in cells if getattr(c, key) == value]
            assert abs(sum(some)) / math.sqrt(len(some)) < 3, (key, value)
    assert abs(sum(c.estimate for c in cells)) / math.sqrt(len(cells)) < 3
    assert all(0.75 < c.spread < 1.25 for c in cells)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_recall_follows_the_s_curve(cells: list[Cell], shape: int) -> None:
    """1 - (1 - s^rows)^bands: each size and each level within three standard errors, each cell within four."""
    for key in ("size", "level"):
        for value in {getattr(c, key) for c in cells}:
            assert errors([c for c in cells if getattr(c, key) == value], shape) < 3, (key, value)
    assert max(errors([c], shape) for c in cells) < 4


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
def test_recall_of_edited_documents(share: float) -> None:
    """Whole stage: copies with a share of words replaced, against their true similarity; within three errors."""
    rng = random.Random(int(share * 100))
    texts = []
    for _ in range(300):
        original = words(rng, 120)
        edited = [w if rng.random() > share else words(rng, 1)[0] for w in original]
        texts += [" ".join(original), " ".join(edited)]
    stage = MinHash()
    signed = stage.sign(batch(texts))
    keys = np.stack([signed[f"band_{i:02d}"].to_numpy() for i in range(14)])
    hits = (keys[:, ::2] == keys[:, 1::2]).any(axis=0)
    expected = []
    for a, b in zip(texts[::2], texts[1::2], strict=True):
        x, y = (set(zip(*(t.split()[i:] for i in range(5)), strict=False)) for t in (a, b))
        expected.append(recall(len(x & y) / len(x | y), 14, 8))
    p = np.array(expected)
    assert abs(hits.sum() - p.sum()) <= 3 * math.sqrt((p * (1 - p)).sum()) + 1


def test_agreement_with_datasketch() -> None:
    """Two unbiased estimates of the same pairs differ by sampling error only."""
    rng = random.Random(3)
    k, count = 128, 60
    texts = []
    for i in range(count):
        original = words(rng, 80)
        texts += [" ".join(original), " ".join(w if rng.random() > i / 400 else words(rng, 1)[0] for w in original)]
    stage = MinHash(bands=16, rows=8, verify="signature")
    ours = np.array(stage.sign(batch(texts))["signature"].to_pylist())
    own = (ours[::2] == ours[1::2]).mean(axis=1)
    peers = []
    for a, b in zip(texts[::2], texts[1::2], strict=True):
        sketches = []
        for text in (a, b):
            sketch = datasketch.MinHash(num_perm=k, seed=1)
            parts = text.split()
            sketch.update_batch([" ".join(parts[i : i + 5]).encode() for i in range(len(parts) - 4)])
            sketches.append(sketch)
        peers.append(sketches[0].jaccard(sketches[1]))
    difference = own - np.array(peers)
    error = np.sqrt(2 * own * (1 - own) / k).mean()
    assert abs(difference.mean()) < 3 * error / math.sqrt(count)
    assert np.sqrt((difference**2).mean()) < 1.5 * error
