"""Spans of text that occur again, in the same document or in another: all copies but one go, or are counted.

    substrings:
      min_bytes: 200        # a span counts from this length
      group_bytes: 256_000_000
      mode: remove          # or mark: nothing goes, and `substrings.repeated_chars` says how much would

After Lee et al. 2022, "Deduplicating training data makes language models better", section 4.1, EXACTSUBSTR: a suffix
array brings equal spans together. They take 50 tokens, of which English has about four bytes each: 200 bytes, some
65 characters of Chinese. Their program takes away every copy; here one stays.

What goes, exactly. The documents of a group lie one after the other, those that stay before others first (`policy`, as
with `paragraphs`). A byte goes when it lies in `min_bytes` bytes of one document that occur earlier as well, in this
document or in one before it. What lies together goes as one span, without the characters that are cut at either end.
So a copy longer than `min_bytes` goes whole, of overlapping copies every byte that has an earlier one, and of a text
that repeats itself (`ababab...`) all but the first repetition. Bytes count as they are: no case, no punctuation is
folded, and text that was joined from both sides of a span is not looked at again.

Groups. A group is shards in a row of the frozen listing whose texts together have at most `group_bytes`; a shard that
has more alone is cut between documents. Copies in two groups are not seen. So the result depends on the listing and on
`group_bytes`, as in the published method on the parts of its data set, and on nothing else: not on workers or batches.

Memory of one group: 5.125 bytes for each byte of text and each document (the text, a suffix array of 32 bits a byte,
a bit a byte for what was found), some 150 bytes a document, and a batch of at most 32 MiB. Each worker works on one
group. A document larger than `group_bytes` is a group of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from gristmill.stages import parts
from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, cut, with_columns
from gristmill.stages.kernels import substrings as kernels
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.signatures import (
    ClusterError,
    Needs,
    check_keep,
    check_settings,
    identity,
    text_hashes,
    with_settings,
)

MAX_BYTES = 2**31 - 1  # of text and separators that a suffix array of 32 bits can hold
BYTES_PER_DOCUMENT = 150  # who it is, while documents are brought in order
SPANS = pa.list_(pa.struct([("start", pa.uint32()), ("end", pa.uint32())]))
COLUMN = "substrings.repeated_chars"


def runs(sizes: Iterable[int], limit: int) -> list[range]:
    """Items in a row whose sizes together are at most `limit`; one that is larger is alone."""
    out: list[range] = []
    start = total = end = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > limit:
            out.append(range(start, i))
            start, total = i, 0
        total += size
        end = i + 1
    return [*out, range(start, end)] if end else out


def memory_bytes(text_bytes: int, documents: int) -> int:
    """What one group takes, without the batch that is being read."""
    return (text_bytes + documents) * 41 // 8 + documents * BYTES_PER_DOCUMENT


def _said(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


class Substrings(Settings):
    """Removes or counts spans that occur earlier as well; drops documents that have too little left."""

    name: ClassVar[str] = "substrings"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = cast(Any, Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = {COLUMN: pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure(COLUMN, "share of characters"),)
    after_signing: ClassVar[tuple[str, ...]] = ("min_bytes", "group_bytes", "mode", "min_chars_left")
    after_clustering: ClassVar[tuple[str, ...]] = ("mode", "min_chars_left")

    min_bytes: int = Field(200, ge=1, le=10_000)  # the scan may take an eighth of it in steps for each byte of text
    group_bytes: int = Field(256_000_000, ge=1, le=2_000_000_000)  # of text that is compared with each other
    mode: Literal["remove", "mark"] = "remove"
    policy: str = "longest"  # which document keeps a span: longest, earliest, first, best(COLUMN)
    min_chars_left: int = Field(1, ge=0)  # of a document that lost something; fewer drop it

    _check_policy = field_validator("policy")(check_keep)

    def rules(self) -> Sequence[Rule]:
        return ()

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        return f"substrings {self.version}"

    def sign(self, batch: Batch) -> Batch:
        """-> identity, bytes uint32: what a text needs in its group."""
        size = pc.binary_length(batch["text"]).cast(pa.uint32())
        return with_settings({**identity(batch, self.policy), "bytes": size}, self.described())

    def groups(self, sizes: Sequence[tuple[int, int]]) -> list[range]:
        """(documents, bytes) of each shard -> the shards of each group, in a row."""
        return runs((documents + size for documents, size in sizes), self.group_bytes)

    def plan(self, sizes: Sequence[tuple[int, int]]) -> str:
        """What the work will take, in words. sizes: (documents, bytes) of each shard."""
        groups = self.groups(sizes)
        totals = [tuple(sum(sizes[i][k] for i in group) for k in (0, 1)) for group in groups]
        if not totals:
            return "no documents to compare"
        largest = max(memory_bytes(min(size, self.group_bytes), documents) for documents, size in totals)
        return (
            f"{_said(sum(size for _, size in totals))} of text in groups of at most {_said(self.group_bytes)}, "
            f"{len(groups):,} in all; a worker needs {_said(largest)} for one"
        )

    def cluster(self, signatures: Sequence[pa.Table], texts: Iterable[Batch]) -> tuple[list[pa.Table], dict[str, int]]:
        """Decisions over one group -> for each shard doc_id, text_hash (of the text that they are of), spans in bytes;
        figures: documents, bytes, comparisons (parts of the group that were compared), spans, spans_bytes,
        documents_edited.

        texts: batches with the column `text`, the documents of `signatures` in their order.
        """
        check_settings(signatures, self.described(), ("bytes",))
        sizes = np.concatenate([np.zeros(0, np.int64), *(t["bytes"].to_numpy().astype(np.int64) for t in signatures)])
        priority = parts.priorities(signatures)
        reader = _Reader(texts)
        counts, found = np.zeros(len(sizes), np.int64), [np.zeros((2, 0), np.uint32)]
        pieces = runs((sizes + 1).tolist(), self.group_bytes)
        for piece in pieces:
            rows = slice(piece.start, piece.stop)
            counts[rows], spans = repeated(reader.take(sizes[rows]), sizes[rows], priority[rows], self.min_bytes)
            found.append(spans)
        reader.close()
        spans = np.concatenate(found, axis=1)
        decisions = _by_shard(signatures, counts, spans)
        figures = {
            "documents": len(sizes),
            "bytes": int(sizes.sum()),
            "comparisons": len(pieces),
            "spans": spans.shape[1],
            "spans_bytes": int((spans[1].astype(np.int64) - spans[0]).sum()),
            "documents_edited": int(np.count_nonzero(counts)),
        }
        return decisions, figures

    def apply(self, batch: Batch, decisions: pa.Table) -> tuple[Result, int]:
        """The documents without their spans, or as they are, with the share of characters in spans."""
        at = pc.index_in(batch["doc_id"], value_set=decisions["doc_id"].combine_chunks())
        rows = np.flatnonzero(at.is_valid().to_numpy(zero_copy_only=False))
        share, too_short = np.zeros(batch.num_rows), np.zeros(batch.num_rows, bool)
        spans = characters = 0
        if len(rows):
            which = decisions.take(at.take(pa.array(rows)))
            new, lost, chars = _without(batch["text"].take(pa.array(rows)), which)
            share[rows] = lost / np.maximum(chars, 1)
            spans, characters = int(pc.sum(pc.list_value_length(which["spans"])).as_py()), int(lost.sum())
            if self.mode == "remove":
                too_short[rows] = chars - lost < self.min_chars_left
                mask = np.zeros(batch.num_rows, bool)
                mask[rows] = True
                batch = with_columns(batch, {"text": pc.replace_with_mask(batch["text"], pa.array(mask), new)})
        done, touched = ("removed", "edited") if self.mode == "remove" else ("marked", "marked")
        counters = {f"spans_{done}": spans, f"chars_{done}": characters, f"documents_{touched}": len(rows)}
        return cut(with_columns(batch, {COLUMN: share}), {"too_few_chars_left": too_short}, counters), len(rows)


class _Reader:
    """Documents in order, some at a time, whatever the batches that they come in."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._left: pa.Array = pa.array([], pa.string())

    def take(self, sizes: np.ndarray) -> Iterator[pa.Array]:
        """The next documents. Raises ClusterError when they do not have the sizes (n,) that were signed."""
        done = 0
        while done < len(sizes):
            if not len(self._left):
                batch = next(self._batches, None)
                if batch is None:
                    raise ClusterError(_other_texts(f"{len(sizes) - done:,} documents fewer"))
                self._left = batch["text"]
            texts, self._left = self._left.slice(0, len(sizes) - done), self._left.slice(len(sizes) - done)
            here = pc.binary_length(texts).to_numpy(zero_copy_only=False)
            if (here != sizes[done : done + len(texts)]).any():
                raise ClusterError(_other_texts("a document of another size"))
            done += len(texts)
            yield texts

    def close(self) -> None:
        """Raises ClusterError when there are documents left."""
        if len(self._left) or any(batch.num_rows for batch in self._batches):
            raise ClusterError(_other_texts("more documents"))


def _other_texts(how: str) -> str:
    return f"The documents are not those that were signed: {how}. Delete the folders `sign` and `cluster`, run again."


def repeated(
    texts: Iterable[pa.Array], sizes: np.ndarray, priority: np.ndarray, min_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """What goes of the documents of one group -> spans of each (n,) int64; starts and ends (2, spans) uint32, bytes
    from the start of their document.

    texts: the documents in any number of arrays; sizes (n,) int64 their bytes; priority (n,): smaller keeps a span.
    """
    from pydivsufsort import divsufsort  # loads a large library, in workers that need it

    total = int(sizes.sum()) + len(sizes)
    if total > MAX_BYTES:
        raise ClusterError(f"A document of {total:,} bytes is too large to compare. Lower `max_chars` of the recipe.")
    order = np.argsort(priority, kind="stable")
    at = np.empty(len(sizes), np.int64)
    at[order] = np.cumsum(sizes[order] + 1) - sizes[order] - 1
    text = np.zeros(total + kernels.PADDING, np.uint8)
    row = 0
    for array in texts:
        kernels.place(*string_views(array), at[row : row + len(array)], text)
        row += len(array)
    marks = np.zeros((total >> 3) + 1, np.uint8)
    kernels.mark_repeats(text, divsufsort(text[:total]), min_bytes, marks)
    counts, nothing = np.empty(len(sizes), np.int64), np.empty(0, np.uint32)
    spans = np.empty((2, kernels.spans(text, at, sizes, marks, min_bytes, counts, nothing, nothing)), np.uint32)
    kernels.spans(text, at, sizes, marks, min_bytes, counts, spans[0], spans[1])
    return counts, spans


def _by_shard(signatures: Sequence[pa.Table], counts: np.ndarray, spans: np.ndarray) -> list[pa.Table]:
    """Decisions, a table a shard. counts (n,) int64 spans of each document; spans (2, m) uint32."""
    out = []
    row = span = 0
    for table in signatures:
        of = counts[row : row + table.num_rows]
        rows = np.flatnonzero(of)
        ends = np.concatenate([[0], np.cumsum(of[rows])]).astype(np.int32)
        here = spans[:, span : span + ends[-1]]
        values = pa.StructArray.from_arrays([pa.array(here[0]), pa.array(here[1])], fields=list(SPANS.value_type))
        who = table.select(["doc_id", "text_hash"]).take(pa.array(rows))
        out.append(who.replace_schema_metadata(None).append_column("spans", pa.ListArray.from_arrays(ends, values)))
        row, span = row + table.num_rows, span + int(ends[-1])
    return out


def _without(texts: pa.Array, decisions: pa.Table) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """-> texts, characters lost (n,), characters before (n,)"""
    same = pc.equal(text_hashes(texts), decisions["text_hash"].combine_chunks()).to_numpy(zero_copy_only=False)
    if not same.all():
        which = decisions["doc_id"][int(np.flatnonzero(~same)[0])].as_py()
        raise ClusterError(
            f"The decision on {which} is of another text. Delete the segment's folder `cluster` and run the recipe "
            "again."
        )
    lists = decisions["spans"].combine_chunks()
    flat = pc.list_flatten(lists)
    first = np.concatenate([[0], np.cumsum(pc.list_value_length(lists).to_numpy())]).astype(np.int64)
    starts, ends = (np.ascontiguousarray(pc.struct_field(flat, name).to_numpy()) for name in ("start", "end"))
    offsets, data = string_views(texts)
    out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
    new_offsets, lost = np.empty(len(texts) + 1, np.int64), np.empty(len(texts), np.int64)
    kernels.without(offsets, data, first, starts, ends, out, new_offsets, lost)
    buffers = [pa.py_buffer(new_offsets.astype(np.int32)), pa.py_buffer(out[: new_offsets[-1]])]
    chars = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    return pa.StringArray.from_buffers(len(texts), *buffers), lost, chars
