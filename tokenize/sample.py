"""Which documents are held out, and which the tokenizer learns from. Both follow from a document's text alone.

Neither depends on the order of documents, on the shards that they lie in, or on what else the corpus holds (for the
held-out split) or will hold (a growing corpus changes a sample little by little).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gristmill.stages.kernels.buffers import string_views
from gristmill.tokenize.shards import TokenError

HOLDOUT_SEED = 0
SAMPLE_SEED = 1  # another order than the held-out split's, whose documents would come first otherwise


def text_hashes(texts: pa.Array | pa.ChunkedArray, seed: int) -> np.ndarray:
    """xxh3-64 of the UTF-8 bytes of each text: (n,) uint64."""
    offsets, data = string_views(texts)
    view = data.data
    hashes = [xxhash.xxh3_64_intdigest(view[low:high], seed) for low, high in pairwise(offsets.tolist())]
    return np.array(hashes, np.uint64)


def is_held_out(texts: pa.Array | pa.ChunkedArray, share: float) -> np.ndarray:
    """(n,) bool: documents whose text hashes into the lowest `share` of all hashes."""
    if not 0 <= share < 1:
        raise TokenError(f"holdout_share is a share of the documents, from 0 to below 1, not {share}.")
    if share == 0:
        return np.zeros(len(texts), bool)
    return text_hashes(texts, HOLDOUT_SEED) < np.uint64(int(share * 2**64))


class Sample:
    """The documents with the lowest hashes, up to a number of bytes: a uniform sample of documents, in one pass.

    Memory is bounded by `max_bytes` and one document. The same documents in any order give the same sample.
    """

    def __init__(self, max_bytes: int, max_chars: int) -> None:
        self.max_bytes, self.max_chars = max_bytes, max_chars
        self.bytes = 0  # held now; the last document may go beyond max_bytes
        self._heap: list[tuple[int, bytes]] = []  # (-hash, text), so that the highest hash is popped first

    def add(self, texts: pa.Array | pa.ChunkedArray) -> None:
        """Considers documents. Each counts with its first `max_chars` characters; null texts are skipped."""
        texts = texts.drop_null()
        hashes = text_hashes(texts, SAMPLE_SEED)
        if self.bytes >= self.max_bytes:
            rows = np.flatnonzero(hashes <= np.uint64(-self._heap[0][0])) if self._heap else np.zeros(0, np.int64)
            texts, hashes = texts.take(pa.array(rows)), hashes[rows]
        for text, value in zip(_cut(texts, self.max_chars), hashes.tolist(), strict=True):
            heapq.heappush(self._heap, (-value, text))
            self.bytes += len(text)
            while self.bytes - len(self._heap[0][1]) >= self.max_bytes:
                self.bytes -= len(heapq.heappop(self._heap)[1])

    def texts(self) -> list[bytes]:
        """The sample, UTF-8, in the order of hashes; the last document is cut so that `max_bytes` is kept."""
        ordered = [text for _, text in sorted(self._heap, key=lambda item: (-item[0], item[1]))]
        excess = self.bytes - self.max_bytes
        if excess > 0:
            last = ordered.pop()
            ordered.append(last[: len(last) - excess].decode(errors="ignore").encode())
        return [text for text in ordered if text]


def sample(texts: Iterable[pa.Array], max_bytes: int, max_chars: int, holdout_share: float = 0.0) -> list[bytes]:
    """A uniform sample of documents that are not held out; see `Sample`."""
    out = Sample(max_bytes, max_chars)
    for array in texts:
        known = array.drop_null()
        out.add(known.filter(pa.array(~is_held_out(known, holdout_share))) if holdout_share else known)
    return out.texts()


def _cut(texts: pa.Array | pa.ChunkedArray, max_chars: int) -> list[bytes]:
    cut = pc.utf8_slice_codeunits(texts, 0, max_chars)
    return cut.cast(pa.large_binary()).to_pylist()
