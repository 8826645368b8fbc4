"""Takes dropped documents through the stages that they did not reach, to count what each rule removes by itself.

Nothing of what a shard keeps, drops or books comes from here: see `stages/removals.py` for what is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.poison import mask_of
from gristmill.stages.documents import Batch, without_columns
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.hashing import hash_raw
from gristmill.stages.ledger import sizes
from gristmill.stages.removals import Removals, tally


@dataclass
class Accounting:
    """The counts of one shard in one segment.

    steps: the shard's stages in order. share: of documents that are counted, chosen by a hash of their id, the same
    ones in whatever order the stages stand.
    """

    steps: Sequence[Any]
    share: float
    found: Removals = field(default_factory=Removals)
    problem: str = ""  # the first fault of a stage on a document that was dropped before it
    _unsafe: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))

    def add(
        self, before: Sequence[Batch], dropped: Sequence[Batch], kept: Batch, unsafe: pa.Array | None = None
    ) -> None:
        """Counts one batch. before, dropped: what each step read and dropped; kept: what the last one kept; unsafe:
        ids of documents that no stage must see, which are left out."""
        self._unsafe = pa.array([], pa.string()) if unsafe is None else unsafe
        first = next((i for i, batch in enumerate(before) if "text" in batch.schema.names), None)
        if first is None or not before[first].num_rows or not self.share:
            return
        came_in = before[first]
        count = _Count(came_in["doc_id"])
        for step, batch in zip(self.steps[first:], dropped[first:], strict=True):
            count.breaks(step.key, batch)
        count.names(kept)
        left_out = self._send_on(dropped, first, count)
        if len(self._unsafe):
            left_out |= mask_of(came_in["doc_id"], self._unsafe)
        counted = ~left_out
        if self.share < 1:
            counted &= chosen(came_in["doc_id"], self.share)
        self._tally(count, sizes(came_in)[0], counted)
        self.found.left_out += int(left_out.sum())

    def _send_on(self, dropped: Sequence[Batch], first: int, count: _Count) -> np.ndarray:
        """Each dropped document through the stages after the one that dropped it -> (n,) bool, those that one of them
        could not take."""
        left_out = np.zeros(len(count.ids), bool)
        waiting: list[Batch] = []
        for i in range(first, len(self.steps)):
            if waiting:
                batch = _joined(waiting)
                try:
                    result = self.steps[i].stage(batch)
                except Exception as error:  # a document that was dropped already must not stop the run
                    self.problem = self.problem or f"{self.steps[i].key}: {type(error).__name__}: {error}"
                    left_out[count.rows(batch)] = True
                    waiting = []
                else:
                    count.breaks(self.steps[i].key, result.dropped)
                    waiting = [result.kept, _bare(result.dropped)]
            waiting = [part for part in (*waiting, self._chosen(_bare(dropped[i]))) if part.num_rows]
        for batch in waiting:
            count.names(batch)
        return left_out

    def _chosen(self, batch: Batch) -> Batch:
        if len(self._unsafe):
            batch = batch.filter(pa.array(~mask_of(batch["doc_id"], self._unsafe)))
        return batch if self.share >= 1 else batch.filter(pa.array(chosen(batch["doc_id"], self.share)))

    def _tally(self, count: _Count, chars: np.ndarray, counted: np.ndarray) -> None:
        fails = {rule: broken[counted] for rule, broken in count.fails.items()}
        languages = [name for name, of_count in zip(count.languages, counted, strict=True) if of_count]
        self.found = self.found.merge(tally(fails, chars[counted], languages))


class _Count:
    """What is known of the documents of one batch, by row of the batch that came in."""

    def __init__(self, ids: pa.Array) -> None:
        self.ids = ids
        self.fails: dict[tuple[str, str], np.ndarray] = {}  # (stage, reason) -> (n,) bool
        self.languages: list[str | None] = [None] * len(ids)

    def rows(self, batch: Batch) -> np.ndarray:
        """(m,) int64"""
        return np.asarray(pc.index_in(batch["doc_id"], value_set=self.ids).to_numpy(), np.int64)

    def breaks(self, stage: str, dropped: Batch) -> None:
        if not dropped.num_rows:
            return
        rows = self.rows(dropped)
        reasons = dropped["reasons"]
        flat = pc.dictionary_encode(pc.list_flatten(reasons))
        parents = pc.list_parent_indices(reasons).to_numpy(zero_copy_only=False)
        codes = flat.indices.to_numpy(zero_copy_only=False)
        for code, reason in enumerate(flat.dictionary.to_pylist()):
            broken = self.fails.setdefault((stage, reason), np.zeros(len(self.ids), bool))
            broken[rows[parents[codes == code]]] = True

    def names(self, batch: Batch) -> None:
        """Takes over the documents' languages."""
        if "language" in batch.schema.names:
            for row, name in zip(self.rows(batch).tolist(), batch["language"].to_pylist(), strict=True):
                self.languages[row] = name


def chosen(ids: pa.Array, share: float) -> np.ndarray:
    """(n,) bool: the documents of a sample, by a hash of their id. ids: string (n,)."""
    offsets, data = string_views(ids)
    hashes = np.empty((len(ids), 2), np.uint64)
    hash_raw(offsets, data, hashes)
    return np.asarray(hashes[:, 0] < np.uint64(min(int(share * 2.0**64), 2**64 - 1)), bool)


def _bare(dropped: Batch) -> Batch:
    """Dropped documents as the next stage expects documents; those without text end here."""
    batch = without_columns(dropped, ("reasons",))
    if "text" not in batch.schema.names:
        return batch.slice(0, 0)
    return batch.filter(pc.is_valid(batch["text"])) if batch["text"].null_count else batch


def _joined(parts: Sequence[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    names = [name for name in parts[0].schema.names if all(name in part.schema.names for part in parts)]
    table = pa.Table.from_batches([part.select(names) for part in parts]).combine_chunks()
    return table.to_batches()[0]
