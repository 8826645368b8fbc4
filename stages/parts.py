"""What `paragraphs` and `lines_across` share: the parts of documents, the passes over their keys, the edited text.

A decision table has one row for each document that loses something: doc_id, `count` uint32 of its parts (so that a
decision never meets another text), `parts` list<uint32>, the numbers of those that go.

Memory of `cluster`: an eighth of a byte a part for the marks, 4 to 12 bytes a document, and BYTES_PER_KEY for the keys
of one range; more keys than `sort_bytes` allows take more passes over the signature files, which are mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import Batch, Result, cut, with_columns
from gristmill.stages.kernels import cluster, parts
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.signatures import ClusterError, identity, with_settings

BYTES_PER_KEY = 36  # key, place, their copies while they are sorted, owner, number of the part


def split(text: pa.Array, breaks: int) -> tuple[np.ndarray, np.ndarray]:
    """-> first (n + 1,) int64, the number of each document's first part; starts (m + 1,) int64, bytes in the buffer.

    breaks: "\\n" in a row that end a part, 1 for lines.
    """
    offsets, data = string_views(text)
    counts = np.empty(len(text), np.int64)
    parts.count_parts(offsets, data, breaks, counts)
    first = np.concatenate([[0], np.cumsum(counts)])
    starts = np.empty(first[-1] + 1, np.int64)
    parts.part_starts(offsets, data, breaks, first, starts)
    return first, starts


def keys_column(keys: np.ndarray, first: np.ndarray) -> pa.Array:
    """Keys of parts (m,) uint64 -> large_list<uint64>, a list a document."""
    return pa.LargeListArray.from_arrays(pa.array(first), pa.array(keys))


class Keys:
    """The keys of all documents of a clustering, read range by range."""

    def __init__(self, tables: Sequence[pa.Table], sort_bytes: int) -> None:
        self.tables, self._sort_bytes = tables, sort_bytes
        self.documents = sum(table.num_rows for table in tables)
        self.parts = sum(len(c.values) if not c.offset else int(pc.sum(pc.list_value_length(c)).as_py() or 0)
                         for t in tables for c in t["keys"].chunks)  # fmt: skip
        self.marks = np.zeros((self.parts >> 3) + 1, np.uint8)

    def chunks(self) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """(first document, first part, starts (n + 1,) int64, keys) of each chunk; nothing is copied."""
        out = []
        row = part = 0
        for table in self.tables:
            for chunk in table["keys"].chunks:
                starts = np.frombuffer(chunk.buffers()[1], np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
                if not len(chunk):
                    continue
                out.append((row, part, starts, chunk.values.to_numpy(zero_copy_only=True)))
                row, part = row + len(chunk), part + int(starts[-1] - starts[0])
        return out

    def sorted_ranges(
        self,
        alive: np.ndarray,
        salts: np.ndarray,
        priority: np.ndarray,
        use: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None],
    ) -> None:
        """Calls use(keys sorted, their entries, owners, parts) for one range of keys after the other."""
        ranges = max(1, -(-self.parts * BYTES_PER_KEY // self._sort_bytes))
        edges = [i * 2**64 // ranges for i in range(ranges + 1)]
        chunks = self.chunks()
        for low, high in pairwise(edges):
            size = min(self.parts, int(self.parts / ranges * 1.25) + 1024)
            keys, owner, part = np.empty(size, np.uint64), np.empty(size, np.uint32), np.empty(size, np.int64)
            filled = 0
            for row, first, starts, values in chunks:
                room = filled + int(starts[-1] - starts[0])
                if room > len(keys):
                    grown = max(room, len(keys) * 3 // 2)
                    keys, owner, part = (_grown(a, filled, grown) for a in (keys, owner, part))
                here = alive[row : row + len(starts) - 1]
                filled = parts.gather(
                    starts, values, here, salts, priority, np.uint64(low), np.uint64(high - 1), row, first, filled,
                    keys, owner, part,
                )  # fmt: skip
            places = np.arange(filled, dtype=np.uint32)
            ordered, places = cluster.radix_sort(
                keys[:filled], places, np.empty(filled, np.uint64), np.empty(filled, np.uint32)
            )
            use(ordered, places, owner, part)

    def decisions(self, shards: int) -> list[pa.Table]:
        """The marked parts, a table for each of the first `shards` tables."""
        out = []
        chunks = iter(self.chunks())
        for table in self.tables[:shards]:
            found = [_decided(table["doc_id"].slice(0, 0), np.zeros(1, np.int64), 0, self.marks)]
            at = 0
            for chunk in table["keys"].chunks:
                if len(chunk):
                    _, first, starts, _ = next(chunks)
                    found.append(_decided(table["doc_id"].slice(at, len(chunk)), starts, first, self.marks))
                at += len(chunk)
            out.append(pa.concat_tables(found))
        return out


def _grown(values: np.ndarray, filled: int, size: int) -> np.ndarray:
    return np.concatenate([values[:filled], np.empty(size - filled, values.dtype)])


def _decided(ids: pa.ChunkedArray, starts: np.ndarray, first: int, marks: np.ndarray) -> pa.Table:
    counts = np.zeros(len(starts) - 1, np.int64)
    total = parts.marked_of(marks, starts, first, counts, np.empty(0, np.uint32))
    places = np.empty(total, np.uint32)
    parts.marked_of(marks, starts, first, counts, places)
    rows = np.flatnonzero(counts)
    ends = np.concatenate([[0], np.cumsum(counts[rows])]).astype(np.int32)
    return pa.table(
        {
            "doc_id": ids.take(pa.array(rows)).cast(pa.string()),
            "count": pa.array(np.diff(starts)[rows].astype(np.uint32)),
            "parts": pa.ListArray.from_arrays(pa.array(ends), pa.array(places)),
        }
    )


def priorities(tables: Sequence[pa.Table]) -> np.ndarray:
    """(n,) uint32, a place for each document: smaller ones keep what they share with others. By rank, then date,
    doc_id, source and a hash of the text, as clusters are decided (`duplicates.py`)."""
    names = ("rank", "date", "doc_id", "source", "text_hash")
    table = pa.concat_tables([t.select(names) for t in tables]) if tables else None
    if table is None or not table.num_rows:
        return np.zeros(0, np.uint32)
    table = table.set_column(4, "text_hash", table["text_hash"].cast(pa.binary()))
    order = pc.sort_indices(table, sort_keys=[(name, "ascending") for name in names]).to_numpy()
    out = np.empty(len(order), np.uint32)
    out[order] = np.arange(len(order), dtype=np.uint32)
    return out


def edited(
    batch: Batch, decisions: pa.Table, breaks: int, stage: str, counter: str, min_chars_left: int
) -> tuple[Result, int]:
    """The batch without the parts that the decisions name -> (result, decisions that met a document).

    A document that lost something and has fewer than `min_chars_left` characters left is dropped. The column
    `<stage>.removed_chars` has the share that went. Counters: `<counter>_removed`, `chars_removed`, `documents_edited`.
    Raises ClusterError when a decision is of another text.
    """
    at = pc.index_in(batch["doc_id"], value_set=decisions["doc_id"].combine_chunks())
    rows = np.flatnonzero(at.is_valid().to_numpy(zero_copy_only=False))
    share, too_short = np.zeros(batch.num_rows), np.zeros(batch.num_rows, bool)
    counters = {f"{counter}_removed": 0, "chars_removed": 0, "documents_edited": len(rows)}
    if len(rows):
        which = decisions.take(at.take(pa.array(rows)))
        new, lost, chars = _without(batch["text"].take(pa.array(rows)), which, breaks)
        share[rows] = lost / np.maximum(chars, 1)
        too_short[rows] = chars - lost < min_chars_left
        counters[f"{counter}_removed"] = int(pc.sum(pc.list_value_length(which["parts"])).as_py())
        counters["chars_removed"] = int(lost.sum())
        mask = np.zeros(batch.num_rows, bool)
        mask[rows] = True
        batch = with_columns(batch, {"text": pc.replace_with_mask(batch["text"], pa.array(mask), new)})
    batch = with_columns(batch, {f"{stage}.removed_chars": pa.array(share)})
    return cut(batch, {"too_few_chars_left": too_short}, counters), len(rows)


def _without(texts: pa.Array, decisions: pa.Table, breaks: int) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """-> texts, characters lost (n,), characters before (n,)"""
    first, starts = split(texts, breaks)
    wrong = np.flatnonzero(np.diff(first) != decisions["count"].to_numpy())
    if len(wrong):
        raise ClusterError(
            f"{decisions['doc_id'][int(wrong[0])].as_py()} has {int(np.diff(first)[wrong[0]]):,} parts, its decision "
            f"is of a text with {decisions['count'][int(wrong[0])].as_py():,}. Delete the segment's folder `cluster` "
            "and run the recipe again."
        )
    lists = decisions["parts"].combine_chunks()
    owners = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    gone = np.zeros(len(starts) - 1, bool)
    gone[first[owners] + pc.list_flatten(lists).to_numpy(zero_copy_only=False)] = True
    offsets, data = string_views(texts)
    out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
    new_offsets, lost = np.empty(len(texts) + 1, np.int64), np.empty(len(texts), np.int64)
    parts.without(offsets, data, first, starts, gone, out, new_offsets, lost)
    buffers = [pa.py_buffer(new_offsets.astype(np.int32)), pa.py_buffer(out[: new_offsets[-1]])]
    chars = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return pa.StringArray.from_buffers(len(texts), *buffers), lost, chars


def signed(batch: Batch, keep: str, keys: pa.Array, described: str, more: dict[str, pa.Array]) -> Batch:
    """A signature table: identity, keys, and what else a stage compares."""
    return with_settings({**identity(batch, keep), **more, "keys": keys}, described)
