"""The perplexity of each paragraph of a document, and the document without its surprising ones.

A paragraph is a line: it ends at "\\n" and nowhere else, so that one that ends at "\\n\\n" has a blank line behind it,
which belongs to no paragraph. A line without a single piece (`kernels/normalise.py`) is blank. The language model
scores lines apart from each other, so the same pass gives documents and paragraphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def lines_of(texts: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """(n,) strings -> all their lines (m,), without the newlines, and the document of each (m,) int64, ascending."""
    lists = pc.split_pattern(texts, "\n")
    return pc.list_flatten(lists), np.asarray(pc.list_parent_indices(lists).to_numpy(), np.int64)


@dataclass(frozen=True)
class Paragraphs:
    """The lines of some documents with their perplexities."""

    documents: int
    lines: pa.Array  # strings (m,)
    document: np.ndarray  # (m,) int64, ascending
    perplexity: np.ndarray  # (m,) float64, NaN for a blank line

    def worst(self) -> np.ndarray:
        """The highest perplexity of each document's paragraphs (n,) float64; NaN where it has none."""
        out = np.full(self.documents, np.nan)
        np.fmax.at(out, self.document, self.perplexity)
        return out

    def share_above(self, limit: float) -> np.ndarray:
        """Share of the characters of a document's paragraphs that are in those above the limit (n,) float64, 0 to 1;
        NaN where it has no paragraph."""
        chars = pc.utf8_length(self.lines).to_numpy(zero_copy_only=False).astype(np.float64)
        above = np.bincount(self.document, chars * (self.perplexity > limit), self.documents)
        every = np.bincount(self.document, chars * ~np.isnan(self.perplexity), self.documents)
        return above / np.where(every > 0, every, np.nan)

    def without(self, limit: float) -> Edited:
        """The documents without the paragraphs above the limit, and without the blank lines directly behind those."""
        gone = self.perplexity > limit
        blank = np.isnan(self.perplexity)
        row = np.arange(len(gone))
        before = (
            np.maximum.accumulate(np.where(blank, -1, row)) if len(row) else row
        )  # the paragraph behind which it is
        behind = blank & (before >= 0)
        behind[behind] = gone[before[behind]] & (self.document[before[behind]] == self.document[behind])
        stays = ~gone & ~behind
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.document[stays], minlength=self.documents))])
        lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), self.lines.filter(pa.array(stays)))
        removed = np.bincount(self.document[gone], minlength=self.documents)
        left = np.bincount(self.document[~gone & ~blank], minlength=self.documents)
        return Edited(pc.binary_join(lists, "\n"), removed, (removed > 0) & (left == 0))


@dataclass(frozen=True)
class Edited:
    """Documents after paragraphs were removed."""

    texts: pa.Array  # strings (n,)
    removed: np.ndarray  # (n,) int64, paragraphs
    emptied: np.ndarray  # (n,) bool: paragraphs were removed, and none is left


def replaced(texts: pa.Array, parts: Sequence[tuple[np.ndarray, pa.Array]]) -> pa.Array:
    """texts (n,) with others at some rows. parts: (rows (k,) int64, strings (k,)), no row twice."""
    source = np.arange(len(texts))
    start = len(texts)
    for rows, values in parts:
        source[rows] = np.arange(start, start + len(values))
        start += len(values)
    return pa.concat_arrays([texts, *(values for _, values in parts)]).take(pa.array(source))
