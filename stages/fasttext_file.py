"""fastText models, read from their files: .bin, and .ftz, whose rows are quantized.

    model = read_model("lid.176.ftz")          # None where the file is of a kind that only fastText itself knows
    labels, probabilities = model.best(texts)

The format is that of fastText 0.9.2 (version 12 of the file), which knows no other description than its source:
`fasttext.cc`, `dictionary.cc`, `quantmatrix.cc` and `productquantizer.cc`. Nothing in a file is run.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.stages.kernels import fasttext_lines as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fasttext_labels import best_labels, label_probabilities
from gristmill.stages.kernels.fasttext_lines import EACH, SAMPLED, SOFTMAX, TREE, Network

_MAGIC, _VERSION = 793712314, 12
_SUPERVISED = 3  # fastText's model_name::sup
_LONGEST_NGRAM = 64  # of letters; lid.176 has 4. Longer ones are left to fastText
_MOST_PRUNED = 1 << 27  # buckets of which some are left out; a table of 32 MB says which
_ENTRY_BYTES = 10  # of a word in the file, and what it is long
_MOST_OFTEN = 10**15  # fastText's own "more than any" when it builds its tree
_CENTROIDS = 256
_SIGMOIDS, _FARTHEST = 512, 8  # of fastText's table of the sigmoid


class FileError(ValueError):
    """Not a fastText file, or one that is cut short or contradicts itself."""


@dataclass(frozen=True)
class Model:
    """A supervised model, ready for texts. It is read only: threads share it."""

    labels: tuple[str, ...]
    network: Network

    def best(self, texts: pa.Array, sample_bytes: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The most probable label of each text -> (its number (n,) int32 or -1 where no word is known, probability (n,)
        float64, up to 1.00001 as fastText gives it). sample_bytes: of a text, evenly spread; none: all of it."""
        plan, means, seen = self._means(texts, sample_bytes)
        chosen, probabilities = np.empty(len(seen), np.int32), np.empty(len(seen))
        best_labels(plan, means, seen, chosen, probabilities)
        return chosen, _numbers(probabilities, np.zeros(len(seen), bool))

    def probabilities(self, texts: pa.Array, label: str) -> np.ndarray:
        """(n,) float64, up to 1.00001; 0 where fastText does not name the label; NaN where no word is known."""
        plan, means, seen = self._means(texts, None)
        probabilities = np.empty(len(seen))
        label_probabilities(plan, means, seen, self.labels.index(label), probabilities)
        return _numbers(probabilities, seen == 0)

    def _means(self, texts: pa.Array, sample_bytes: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> the plan; the mean row of each text (n, dim) float32; how many rows it is of, (n,) int64."""
        offsets, data = string_views(texts)
        plan, n = self.network.plan(), len(offsets) - 1
        means, seen = np.zeros((n, self.network.inputs.shape[1]), np.float32), np.zeros(n, np.int64)
        scratch = np.empty(kernel.scratch_bytes(offsets, self.network.word_ngrams), np.uint8)
        kernel.hidden(plan, data, offsets, sample_bytes or 0, scratch, means, seen)
        return plan, means, seen


def _numbers(probabilities: np.ndarray, may_be_nan: np.ndarray) -> np.ndarray:
    """As given. Raises FileError, as fastText raises "Encountered NaN", where the model has numbers that are none."""
    if (np.isnan(probabilities) & ~may_be_nan).any():
        raise FileError("The model gives a probability that is not a number. It is damaged, or was trained too fast.")
    return probabilities


def read_model(path: str | Path) -> Model | None:
    """None where the model is of a kind that is left to fastText. Raises FileError, OSError."""
    if not Path(path).stat().st_size:
        raise FileError(f"{path} is empty.")
    return _Reader(np.asarray(np.memmap(path, np.uint8, "r")), str(path)).model()


class _Reader:
    """Reads a file from its first byte to its last."""

    def __init__(self, data: np.ndarray, name: str) -> None:
        self.data, self.name, self.at = data, name, 0

    def model(self) -> Model | None:
        magic, version = self.numbers("<2i")
        if magic != _MAGIC:
            raise FileError(f"{self.name} is not a fastText model.")
        dim, _, _, _, _, word_ngrams, loss, kind, buckets, minn, maxn, _, _ = self.numbers("<12id")
        known = loss in (TREE, SAMPLED, SOFTMAX, EACH) and kind == _SUPERVISED and version == _VERSION
        if not (known and maxn <= _LONGEST_NGRAM and 0 <= buckets < 1 << 31 and dim > 0):
            return None
        entries, word_rows, labels, _, pruned_buckets = self.numbers("<iiiqq")
        if not 0 < labels == entries - word_rows or word_rows < 0:
            raise FileError(f"{self.name}: a model of {labels} labels and {word_rows} words of {entries} in all.")
        if _ENTRY_BYTES * entries > len(self.data):
            raise FileError(f"{self.name} is cut short: it has no room for {entries:,} words.")
        begun = self.at
        ends, counts, kinds, size = kernel.read_entries(self.data[begun:], entries)
        if size < 0:
            raise FileError(f"{self.name} is cut short: it ends among its words.")
        self.at += size
        if kinds[:word_rows].any() or not kinds[word_rows:].all():
            return None  # words and labels mixed: not as fastText writes them
        if counts.min() < 0 or counts.max() >= _MOST_OFTEN:
            raise FileError(f"{self.name} says that a word came {counts.max():,} times.")
        if pruned_buckets >= 0 and buckets > _MOST_PRUNED:
            return None
        pairs = self.array(np.int32, 2 * max(pruned_buckets, 0)).reshape(-1, 2)
        quantized = self.numbers("<?")[0]
        inputs, scale = self.matrix(quantized)
        if quantized:
            inputs *= scale[:, None]
        outputs, scale = self.matrix(self.numbers("<?")[0] and quantized)
        words, word_ends, slots = kernel.dictionary(self.data[begun:], ends, entries)
        table = np.zeros((0, 2), np.uint64)
        if pruned_buckets >= 0:
            inputs, table = self.pruned(inputs, pairs, word_rows, buckets)
        self.check(inputs, outputs, word_rows, len(pairs) if pruned_buckets >= 0 else buckets, labels, dim)
        children, paths, path_ends = _tree(counts[word_rows:]) if loss == TREE else _tree(np.zeros(1, np.int64))
        names = tuple(words[word_ends[i] : word_ends[i + 1]].tobytes().decode() for i in range(word_rows, entries))
        network = Network(
            words=words, word_ends=word_ends, slots=slots, pruned=table, inputs=inputs, outputs=outputs, scale=scale,
            children=children, paths=paths, path_ends=path_ends, sigmoids=_sigmoids(), word_rows=word_rows,
            labels=labels, min_letters=minn, max_letters=maxn, word_ngrams=word_ngrams, buckets=buckets, kind=loss,
        )  # fmt: skip
        return Model(names, network)

    def numbers(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        return struct.unpack(form, self.array(np.uint8, size).tobytes())

    def array(self, kind: Any, count: int) -> np.ndarray:
        """The next `count` numbers, in memory of their own."""
        size = np.dtype(kind).itemsize * count
        if count < 0 or self.at + size > len(self.data):
            raise FileError(f"{self.name} is cut short: {len(self.data):,} bytes, and more are needed.")
        found = self.data[self.at : self.at + size].copy().view(kind)
        self.at += size
        return found

    def matrix(self, quantized: bool) -> tuple[np.ndarray, np.ndarray]:
        """(rows, dim) float32 and what each row is to be multiplied by, (rows,) float32."""
        if not quantized:
            rows, dim = self.numbers("<2q")
            return self.array(np.float32, rows * dim).reshape(rows, dim), np.ones(rows, np.float32)
        has_norms, rows, dim, size = self.numbers("<?qqi")
        codes = self.array(np.uint8, size)
        parts = self.centroids(dim)
        if size != rows * len(parts):
            raise FileError(f"{self.name}: {size} codes for {rows} rows of {len(parts)} parts.")
        codes = codes.reshape(rows, len(parts))
        decoded = np.concatenate([part[codes[:, i]] for i, part in enumerate(parts)], axis=1)
        if not has_norms:
            return decoded, np.ones(rows, np.float32)
        of_row = self.array(np.uint8, rows)
        return decoded, self.centroids(1)[0][of_row, 0]

    def centroids(self, dim: int) -> list[np.ndarray]:
        """Of each part of a row: (256, columns) float32."""
        found, parts, width, last = self.numbers("<4i")
        if found != dim or parts < 1 or width * (parts - 1) + last != dim:
            raise FileError(f"{self.name}: rows of {dim} are quantized as {parts} parts of {width}.")
        flat = self.array(np.float32, dim * _CENTROIDS)
        widths = [width] * (parts - 1) + [last]
        ends = np.cumsum([0, *(_CENTROIDS * w for w in widths)])
        return [flat[ends[i] : ends[i + 1]].reshape(_CENTROIDS, w) for i, w in enumerate(widths)]

    def pruned(
        self, inputs: np.ndarray, pairs: np.ndarray, word_rows: int, buckets: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """pairs: (kept buckets, 2) int32, bucket and its row behind the words' -> rows in the order of the buckets, and
        the table of `Network.pruned`."""
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        place = pairs[:, 0].astype(np.int64)
        rows = word_rows + pairs[:, 1].astype(np.int64)
        inside = not len(pairs) or (
            place[0] >= 0 and place[-1] < buckets and rows.min() >= word_rows and rows.max() < len(inputs)
        )
        if not inside:
            raise FileError(f"{self.name}: buckets outside of 0 to {buckets:,}, or without rows.")
        bits = np.zeros(64 * (-(-buckets // 64) or 1), np.uint8)
        bits[place] = 1
        words = np.packbits(bits, bitorder="little").view(np.uint64)
        before = np.concatenate([[0], np.cumsum(np.bitwise_count(words).astype(np.uint64))[:-1]]).astype(np.uint64)
        return np.concatenate([inputs[:word_rows], inputs[rows]]), np.stack([words, before], axis=1)

    def check(
        self, inputs: np.ndarray, outputs: np.ndarray, word_rows: int, buckets: int, labels: int, dim: int
    ) -> None:
        """Raises FileError where a row that the kernel may look up is not there."""
        if inputs.shape[1] != dim or outputs.shape[1] != dim or len(inputs) < word_rows + buckets:
            raise FileError(f"{self.name}: {inputs.shape} inputs for {word_rows} words and {buckets} buckets of {dim}.")
        if len(outputs) < labels:
            raise FileError(f"{self.name}: {len(outputs)} rows of output for {labels} labels.")


def _sigmoids() -> np.ndarray:
    """(513,) float32 from -8 to 8. The exponential is rounded once, as in the C library; numpy's float32 is not."""
    x = (np.arange(_SIGMOIDS + 1, dtype=np.float32) * 2 * _FARTHEST) / np.float32(_SIGMOIDS) - np.float32(_FARTHEST)
    exponentials = np.array([math.exp(-value) for value in x.tolist()], np.float32)
    return (1.0 / (1.0 + exponentials.astype(np.float64))).astype(np.float32)


def _tree(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Huffman's tree over the labels, most frequent first, as fastText builds it anew from their counts.

    -> (children (labels - 1, 2) int32; paths; path_ends), as in `Network`. Nodes are numbered behind the leaves.
    """
    n = len(counts)
    weight = [*counts.tolist(), *[_MOST_OFTEN] * n]
    parent, goes_right = [-1] * (2 * n), [0] * (2 * n)
    children = np.zeros((n - 1, 2), np.int32)
    leaf, node = n - 1, n
    for made in range(n, 2 * n - 1):
        for side in range(2):
            if leaf >= 0 and weight[leaf] < weight[node]:
                least, leaf = leaf, leaf - 1
            else:
                least, node = node, node + 1
            children[made - n, side] = least
            parent[least], goes_right[least] = made, side
        weight[made] = sum(weight[child] for child in children[made - n].tolist())
    paths: list[int] = []
    ends = [0]
    for label in range(n):
        steps, at = [], label
        while parent[at] >= 0:
            steps.append(2 * (parent[at] - n) + goes_right[at])
            at = parent[at]
        paths += reversed(steps)
        ends.append(len(paths))
    return children, np.array(paths, np.int64), np.array(ends, np.int64)
