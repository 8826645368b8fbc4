"""Where the documents stand that a segment begins with: in the input, or in what the segment before kept.

A first segment that begins with a global stage reads the input twice, for signatures and for decisions, and no copy of
the input is written. Every reading gives the same documents under the same ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.pipelines.recipe import Recipe, segments
from gristmill.stages.documents import MAX_BATCH_DOCUMENTS, Batch, slices
from gristmill.stages.ledger import Amount, StageLedger
from gristmill.stages.readers import READ_FIELDS, columns_of, read_batches
from gristmill.stages.readers_common import CONTENT_FIELDS
from gristmill.stages.shards import Shard, ShardError, filesystem, join


def parts_of(out: str, folder: str, kind: str, shard: Shard, ending: str) -> str:
    return join(out, folder, kind, f"{shard.part}.{ending}")


@dataclass(frozen=True)
class Upstream:
    """The documents before a segment, shard by shard."""

    out: str  # run folder
    folder: str | None  # of the segment before; None: the input
    max_chars: int
    count_unreadable: bool  # a file that cannot be read is a failed document, not the end of the run

    def batches(self, shard: Shard, columns: Sequence[str] | None = None) -> Iterator[Batch]:
        """The documents of a shard. columns: those wanted; the others are not read where that can be avoided."""
        if self.folder is not None:
            yield from kept_batches(parts_of(self.out, self.folder, "kept", shard, "parquet"), columns)
            return
        for batch in self.read(shard, StageLedger(stage="read"), []):
            yield batch if columns is None else batch.select(list(columns))

    def read(self, shard: Shard, account: StageLedger, problems: list[str]) -> Iterator[Batch]:
        """The documents of a shard of the input, booked; with `count_unreadable`, a file that cannot be read too."""
        batches = read_batches(shard, account, problems, self.max_chars)
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches, None)
            except ShardError as error:
                if not self.count_unreadable:
                    raise
                lost = Amount(documents=1, bytes=shard.size)
                account.read, account.failed["unreadable"] = account.read + lost, lost
                problems.append(f"unreadable: {error}")
                batch = None
            account.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def rows(self, shard: Shard, ids: pa.Array, columns: Sequence[str]) -> Iterator[Batch]:
        """The documents of a shard that have one of these ids (n,) string. columns: `doc_id` among them."""
        for batch in self.batches(shard, columns):
            found = batch.filter(pc.is_in(batch["doc_id"], value_set=ids))
            if found.num_rows:
                yield found

    def empty(self, shard: Shard, columns: Sequence[str]) -> Batch:
        """No document, with the columns named."""
        if self.folder is None:
            schema = pa.schema(READ_FIELDS | {name: CONTENT_FIELDS[name] for name in columns_of(shard.format)})
        else:
            fs, inner = filesystem(parts_of(self.out, self.folder, "kept", shard, "parquet"))
            with fs.open(inner, "rb") as file:
                schema = pq.ParquetFile(file).schema_arrow
        arrays = [pa.array([], schema.field(name).type) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def upstream_of(recipe: Recipe, out: str, folder: str) -> Upstream:
    """The documents before a segment of a run. folder: of the segment."""
    before: str | None = None
    for segment in segments(recipe):
        if segment.folder == folder:
            break
        before = segment.folder
    else:
        raise ValueError(f"The recipe has no segment {folder}.")
    return Upstream(out, before, recipe.max_chars, recipe.unreadable == "count")


def kept_batches(path: str, columns: Sequence[str] | None = None) -> Iterator[Batch]:
    """The documents of a kept part in batches of the size that stages expect. Raises ShardError when it is missing."""
    fs, inner = filesystem(path)
    try:
        opened = fs.open(inner, "rb")
    except FileNotFoundError as error:
        raise ShardError(
            f"{path} is missing, though its ledger says that it was written. Run the recipe again."
        ) from error
    with opened as file:
        for batch in pq.ParquetFile(file).iter_batches(
            batch_size=MAX_BATCH_DOCUMENTS, columns=None if columns is None else list(columns)
        ):
            if "text" in batch.schema.names:
                yield from slices(batch, pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False))
            else:
                yield batch
