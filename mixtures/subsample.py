"""A small run that repeats its sources as often as a large one will: each source cut down to budget / target.

    plan = mixture.plan(tokens, seq_len=2048, budget_tokens=2_000_000_000, target_tokens=200_000_000_000)

A run of 2 billion tokens on 10 billion sees nothing twice; the run of 200 billion that it stands for repeats each
document twenty times. That is why small runs choose mixtures that large ones regret (arXiv 2606.07597: one run with
matched repetition and 1/16 of the tokens comes within 0.05 of the optimum, 0.75 without). So every source keeps 1 % of
its tokens here, chosen by document.

The documents come in one fixed order, by a hash of id and size, the same for every mixture, seed and number of shards;
a share is the beginning of that order, so a smaller share is part of a larger one.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.hashing import hash_raw
from gristmill.tokenize.pieces import mixed
from gristmill.tokenize.shards import DocumentIndex, SourceTokens


def document_keys(source: SourceTokens) -> np.ndarray:
    """The place of each document in the order of all: (documents,) uint64, spread evenly.

    Of id, tokens and bytes: ids alone may be the same in every file ("0", "1", ...), and would then come together.
    """
    parts = [_keys(index) for _, _, index in source.indexes()]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _keys(index: DocumentIndex) -> np.ndarray:
    hashes = np.empty((len(index.start), 2), np.uint64)
    row = 0
    for chunk in index.doc_id.chunks:
        hash_raw(*string_views(chunk), hashes[row : row + len(chunk)])
        row += len(chunk)
    sizes = (index.bytes.astype(np.uint64) << np.uint64(32)) | index.length.astype(np.uint64)
    return mixed(hashes[:, 0] ^ mixed(sizes))


def thinned(keys: np.ndarray, tokens: np.ndarray, chosen: np.ndarray, share: Fraction) -> np.ndarray:
    """The first of the chosen documents, by key, that hold `share` of their tokens: (documents,) bool.

    keys: (documents,) uint64. tokens: (documents,) int64. Not more than the share, but for the one document that at
    least stays. Documents of one key come in the order of the source.
    """
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(keys[rows], kind="stable")]
    ends = np.cumsum(tokens[rows])
    if not len(rows):
        return chosen.copy()
    allowed = int(ends[-1]) * share
    count = int(np.searchsorted(ends, allowed.numerator // allowed.denominator, side="right"))
    out = np.zeros(len(chosen), bool)
    out[rows[: max(count, 1)]] = True
    return out
