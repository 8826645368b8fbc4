"""The documents of a source in a random order over all its shards, with bounded memory: sort each part, then merge.

    for i, batches in enumerate(shards):                                        # any order, any worker
        cards.append(scatter_shard(batches, encoder, "out/tokens", f"part-{i:05d}", 0.005, seed=1))
    for i in range(len(shards)):                                                # when all of them are there
        infos += gather_shard("out/tokens", cards, i, f"part-{i:05d}")

Every document has a key, a hash of seed, id and text (`pieces.order_keys`). `scatter_shard` encodes a shard of
documents and lays its training documents down in the order of keys, in two files below `shuffle/`. The keys are cut
into as many equal ranges as the source has shards; `gather_shard` merges one range of all parts into a token shard. So
the source's token shards, one after the other, hold its documents in the order of keys: it depends on the documents
and the seed, not on how they were dealt to shards, nor on workers. Held-out documents stay in their part, in that order
as well.

    shuffle/part-00000.ids       ids with end-of-text ids, like a .bin
    shuffle/part-00000.rows      Arrow IPC, one row a document: `ROWS_SCHEMA`, by key

Disk: the ids of the source a second time until its shards are done, and those of a part in a temporary file. Memory:
some 60 bytes for a document of the part or range at hand. A range is read from each part in one piece; with very many
shards these pieces get small (10,000 shards of 100 million ids: 20 kB each).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from gristmill.stages.documents import Batch
from gristmill.stages.shards import join, publish
from gristmill.stages.stores import local_copy
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.pieces import Pieces, Rows, Spool
from gristmill.tokenize.shards import ShardInfo, Split, TokenError, map_file
from gristmill.tokenize.write import fill

SHUFFLE_FOLDER = "shuffle"
ROWS_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("key", pa.uint64(), nullable=False),  # ascending
        pa.field("start", pa.uint64(), nullable=False),  # position of the first id
        pa.field("length", pa.uint32(), nullable=False),  # ids, with the end-of-text id
        pa.field("bytes", pa.uint32(), nullable=False),  # UTF-8 bytes of the text
    ]
)


class Scattered(BaseModel):
    """What `scatter_shard` wrote of one shard of documents."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # "part-00000"
    source: str
    dtype: Literal["uint16", "uint32"]
    eos_id: int
    documents: int  # of the training part
    tokens: int
    bytes: int  # UTF-8
    rows_bytes: int  # size of the .rows file; that of the .ids follows from tokens and dtype
    holdout: tuple[ShardInfo, ...]

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def files(self) -> dict[str, int]:
        """Path below the folder of tokens -> size in bytes."""
        itemsize = self.numpy_dtype.itemsize
        of_holdout = {info.bin: info.tokens * itemsize for info in self.holdout}
        of_holdout |= {info.idx: info.idx_bytes for info in self.holdout}
        return {
            f"{SHUFFLE_FOLDER}/{self.name}.ids": self.tokens * itemsize,
            f"{SHUFFLE_FOLDER}/{self.name}.rows": self.rows_bytes,
        } | of_holdout


def range_of(key: int, shards: int) -> int:
    """Which of a source's shards a key belongs to, from 0: its place among `shards` equal ranges of the 64-bit keys."""
    return key * shards >> 64


def scatter_shard(
    batches: Iterable[Batch],
    encoder: Encoder,
    folder: str,
    part_name: str,
    holdout_share: float = 0.0,
    *,
    seed: int,
    source: str | None = None,
    key: str = "",
    max_tokens: int | None = None,
) -> Scattered:
    """Encodes a shard of documents and sorts it; its held-out part is finished with it. Parameters and errors are those
    of `write_shard`; max_tokens is that of the held-out token shards here, and checked for the others too."""
    with ExitStack() as files:
        holdout = Pieces(folder, part_name.replace("part-", "holdout-", 1), encoder.dtype, max_tokens)
        sinks: dict[Split, Spool] = {"train": files.enter_context(Spool(encoder.dtype))}
        if holdout_share > 0:
            files.push(holdout.close)
            sinks["holdout"] = files.enter_context(Spool(encoder.dtype))
        source = fill(sinks, batches, encoder, part_name, holdout_share, source=source, seed=seed)
        for rows in sinks["holdout"].sorted() if holdout_share > 0 else ():
            holdout.add(rows)
        infos = tuple(holdout.finish("holdout", source, key)) if holdout_share > 0 else ()
        stem = join(folder, SHUFFLE_FOLDER, part_name)
        ids_file = files.enter_context(publish(f"{stem}.ids"))
        table = _laid_down(sinks["train"], ids_file, part_name, max_tokens)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, ROWS_SCHEMA) as writer:
            writer.write_table(table)
        data = sink.getvalue()
        files.enter_context(publish(f"{stem}.rows")).write(data)
    return Scattered(
        name=part_name,
        source=source,
        dtype="uint16" if encoder.dtype.itemsize == 2 else "uint32",
        eos_id=encoder.eos_id,
        documents=table.num_rows,
        tokens=int(pc.sum(table["length"].cast(pa.uint64())).as_py() or 0),
        bytes=int(pc.sum(table["bytes"].cast(pa.uint64())).as_py() or 0),
        rows_bytes=data.size,
        holdout=infos,
    )


def _laid_down(spool: Spool, file: IO[bytes], part_name: str, max_tokens: int | None) -> pa.Table:
    """Writes the ids in the order of keys -> the rows. Raises TokenError for a document above max_tokens."""
    tables, at = [ROWS_SCHEMA.empty_table()], 0
    for rows in spool.sorted():
        if max_tokens is not None and int(rows.lengths.max()) > max_tokens:
            row = int(np.argmax(rows.lengths))
            raise TokenError(
                f"{part_name}: document {rows.doc_id[row].as_py()!r} has {int(rows.lengths[row]):,} tokens, more than "
                f"the {max_tokens:,} of `max_tokens`. Raise it, or drop long documents before (`max_chars`)."
            )
        file.write(rows.ids.data)
        starts = at + np.cumsum(rows.lengths) - rows.lengths
        columns = [rows.doc_id, rows.keys, starts, rows.lengths, rows.utf8]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, ROWS_SCHEMA, strict=True)]
        tables.append(pa.Table.from_arrays(arrays, schema=ROWS_SCHEMA))
        at += len(rows.ids)
    return pa.concat_tables(tables).combine_chunks()


def gather_shard(
    folder: str, parts: Sequence[Scattered], at: int, name: str, *, key: str = "", max_tokens: int | None = None
) -> list[ShardInfo]:
    """Merges the documents of one range of keys from all parts of a source -> token shards `name`, `name-001`, ...

    parts: all of one source, in one order for all calls. at: which range, from 0 to len(parts) - 1. Raises TokenError
    for parts of two sources or tokenizers, and for files that are not what `scatter_shard` wrote.
    """
    if len({(part.source, part.dtype, part.eos_id) for part in parts}) != 1:
        raise TokenError(f"{name}: parts of several sources or tokenizers cannot be merged. Run the recipe again.")
    low, high = _bound(at, len(parts)), _bound(at + 1, len(parts))
    with ExitStack() as files:
        pieces = Pieces(folder, name, parts[0].numpy_dtype, max_tokens)
        files.push(pieces.close)
        spool = files.enter_context(Spool(parts[0].numpy_dtype))
        for part in parts:
            if (rows := _range(folder, part, low, high)) is not None:
                spool.add(rows)
        for rows in spool.sorted():
            pieces.add(rows)
        return pieces.finish("train", parts[0].source, key)


def _bound(at: int, shards: int) -> int:
    """The least key that `range_of` gives to the shard `at`."""
    return -(-(at << 64) // shards)


def _range(folder: str, part: Scattered, low: int, high: int) -> Rows | None:
    """The documents of a part whose keys are in [low, high)."""
    stem = join(folder, SHUFFLE_FOLDER, part.name)
    mapped = []
    for path, size in ((f"{stem}.rows", part.rows_bytes), (f"{stem}.ids", part.tokens * part.numpy_dtype.itemsize)):
        buffer = map_file(Path(local_copy(path)))
        if buffer.size != size:
            raise TokenError(
                f"{path}: {buffer.size:,} bytes instead of {size:,}: the file was changed. Delete it and run the "
                "recipe again."
            )
        mapped.append(buffer)
    table = pa.ipc.open_file(mapped[0]).read_all()
    keys = table["key"].to_numpy()
    first, last = (int(np.searchsorted(keys, np.uint64(k))) if k < 1 << 64 else len(keys) for k in (low, high))
    if first == last:
        return None
    rows = table.slice(first, last - first).combine_chunks()
    lengths = rows["length"].to_numpy().astype(np.int64)
    start = int(rows["start"][0].as_py())
    ids = np.frombuffer(mapped[1], part.numpy_dtype)[start : start + int(lengths.sum())]
    ends = np.cumsum(lengths)
    if len(ids) != int(ends[-1]) or (ids[ends - 1] != part.eos_id).any():
        raise TokenError(
            f"{stem}.ids: a document does not end with the end-of-text id {part.eos_id}: the file was changed. Delete "
            "it and run the recipe again."
        )
    doc_id, utf8 = rows["doc_id"].combine_chunks(), rows["bytes"].combine_chunks()
    return Rows(doc_id, ids, lengths, utf8, keys[first:last])
