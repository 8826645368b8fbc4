"""Paragraphs that other documents have too: all copies but one go, or all of them, as in CCNet.

    paragraphs:
      unit: line            # or paragraph: blank lines between
      scope: global         # or source, dump
      keep: first           # or none: CCNet's, which removes the first copy with the others

Paragraphs are compared by 64 bits of their normalised words: case, punctuation, digits, marks and spaces do not count
(kernels/fold.py), much as in CCNet (Wenzek et al. 2020, section 3.1; cc_net/dedup.py, which compares 64 bits of SHA-1).
Among ten billion different paragraphs about three pairs share their 64 bits by chance; then one paragraph is lost.

A copy within one document counts as well. Which document keeps the paragraph says `policy`, as with whole documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator

from gristmill.stages import duplicates, parts
from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings
from gristmill.stages.kernels import hashing
from gristmill.stages.kernels import parts as kernels
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fold import fold
from gristmill.stages.signatures import Needs, check_keep, check_settings

BREAKS = {"line": 1, "paragraph": 2}  # "\n" in a row that end a part


def normalised_keys(text: pa.Array, breaks: int, min_words: int) -> tuple[np.ndarray, np.ndarray]:
    """-> keys (parts,) uint64, NOT_COMPARED for parts of fewer than `min_words` words; first (documents + 1,) int64."""
    first, starts = parts.split(text, breaks)
    hashes, words = np.empty((len(starts) - 1, 2), np.uint64), np.empty(len(starts) - 1, np.int64)
    hashing.hash_normalised(starts, string_views(text)[1], *fold(), hashes, words)
    keys = np.maximum(hashes[:, 0], np.uint64(1))
    keys[words < min_words] = kernels.NOT_COMPARED
    return keys, first


class Paragraphs(Settings):
    """Removes paragraphs that are copies; drops documents that have too little left."""

    name: ClassVar[str] = "paragraphs"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = cast(Any, Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = {"paragraphs.removed_chars": pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure("paragraphs.removed_chars", "share of characters"),)
    without_effect: ClassVar[tuple[str, ...]] = ("sort_bytes",)
    after_signing: ClassVar[tuple[str, ...]] = ("scope", "group_shards", "keep", "min_chars_left")

    unit: Literal["line", "paragraph"] = "line"  # CCNet's paragraphs are lines
    min_words: int = Field(1, ge=1)  # shorter paragraphs are never removed
    scope: duplicates.Scope = "global"
    group_shards: int | None = Field(None, ge=1)  # compare within so many shards in a row only; CCNet: 50
    keep: Literal["first", "none"] = "first"
    policy: str = "longest"  # which document keeps a paragraph: longest, earliest, first, best(COLUMN)
    min_chars_left: int = Field(1, ge=0)  # of a document that lost something; fewer drop it. CCNet: 300
    sort_bytes: int = Field(1 << 30, ge=1 << 10)  # memory for sorting; more paragraphs take more passes

    _check_policy = field_validator("policy")(check_keep)

    def rules(self) -> Sequence[Rule]:
        return ()

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        return f"paragraphs {self.version} unit {self.unit} min_words {self.min_words}"

    def sign(self, batch: Batch) -> Batch:
        """-> identity, keys large_list<uint64>: one for each paragraph, 0 for those that are never removed."""
        keys, first = normalised_keys(batch["text"], BREAKS[self.unit], self.min_words)
        return parts.signed(batch, self.policy, parts.keys_column(keys, first), self.described(), {})

    def cluster(self, signatures: Sequence[pa.Table]) -> tuple[list[pa.Table], Mapping[str, Any]]:
        """-> decisions for each shard (see `parts.py`), figures: documents, paragraphs, removed, documents_edited."""
        check_settings(signatures, self.described(), ("keys",))
        duplicates.row_starts(signatures)
        keys = parts.Keys(signatures, self.sort_bytes)
        removed = 0

        def use(ordered: np.ndarray, places: np.ndarray, owner: np.ndarray, part: np.ndarray) -> None:
            nonlocal removed
            removed += kernels.mark_copies(ordered, places, owner, part, self.keep == "first", keys.marks)

        everyone = np.ones(keys.documents, bool)
        keys.sorted_ranges(everyone, self._salts(signatures), parts.priorities(signatures), use)
        decisions = keys.decisions(len(signatures))
        figures = {
            "documents": keys.documents,
            "paragraphs": keys.parts,
            "removed": removed,
            "documents_edited": sum(table.num_rows for table in decisions),
        }
        return decisions, figures

    def _salts(self, tables: Sequence[pa.Table]) -> np.ndarray:
        salts = duplicates.salts(tables, self.scope)
        if self.group_shards is None:
            return salts
        groups = np.repeat(np.arange(len(tables), dtype=np.uint64) // self.group_shards, [t.num_rows for t in tables])
        mixed = (groups + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return mixed if not len(salts) else np.asarray(mixed ^ salts)

    def apply(self, batch: Batch, decisions: pa.Table) -> tuple[Result, int]:
        """The documents without their copies."""
        breaks = BREAKS[self.unit]
        return parts.edited(batch, decisions, breaks, self.name, "paragraphs", self.min_chars_left)
