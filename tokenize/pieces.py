"""The files of a token shard while they are written: cut at a number of tokens, in the order given or shuffled.

    pieces = Pieces("out/tokens", "part-00007", dtype, max_tokens=100_000_000)
    with Spool(dtype) as spool: ...

`write.py` is the way to use them. `Pieces` writes documents as they come, and begins another pair of files when the
next document would not fit. `Spool` keeps ids in a temporary file until all have come, then gives the documents back
in the order of their keys (`order_keys`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numba import njit

from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.hashing import hash_raw
from gristmill.stages.shards import join, publish, publish_bytes
from gristmill.tokenize.blocks import BlockHashes
from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, Split, TokenError

GATHERED_IDS = 4 << 20  # given back in one go by a spool


class Rows(NamedTuple):
    """Some documents, one after the other."""

    doc_id: pa.Array  # (documents,) string
    ids: np.ndarray  # (tokens,) with end-of-text ids
    lengths: np.ndarray  # (documents,) int64, tokens in all
    utf8: pa.Array  # (documents,) uint32, bytes of the texts
    keys: np.ndarray  # (documents,) uint64, their places in a random order; all 0 where the order is to stay


def order_keys(doc_id: pa.Array, texts: pa.Array, seed: int) -> np.ndarray:
    """The place of each document in the order of a seed, as a share of 2^64: (n,) uint64.

    A hash of seed, id and text: ids alone may be the same in every file ("0", "1", ...), and would then come together.
    Documents that have both in common are the same document, so their order says nothing.
    """
    keys = np.full(len(doc_id), seed, np.uint64)
    for column in (texts, doc_id):
        hashes = np.empty((len(column), 2), np.uint64)
        hash_raw(*string_views(column), hashes)
        keys = mixed(keys ^ hashes[:, 0])
    return keys


def mixed(x: np.ndarray) -> np.ndarray:
    """A permutation of the 64-bit integers that spreads every bit: the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)


class Pieces:
    """A row of .bin and .idx files: `name`, then `name-001` and so on, each of at most `max_tokens` ids."""

    def __init__(self, folder: str, name: str, dtype: np.dtype, max_tokens: int | None) -> None:
        self.name, self.dtype = name, dtype
        self._folder, self._limit = folder, max_tokens
        self._done: list[_Piece] = []
        self._piece = _Piece(folder, name)

    def add(self, rows: Rows) -> None:
        """Raises TokenError for a document longer than `max_tokens`."""
        doc_id, ids, lengths, utf8, _ = rows
        ends = np.cumsum(lengths)
        row, at = 0, 0
        while row < len(lengths):
            stop, end = len(lengths), int(ends[-1])
            if self._limit is not None:
                stop = int(np.searchsorted(ends, at + self._limit - self._piece.tokens, side="right"))
                if stop == row and not self._piece.tokens:
                    raise TokenError(
                        f"{self.name}: document {doc_id[row].as_py()!r} has {int(lengths[row]):,} tokens, more than "
                        f"the {self._limit:,} of `max_tokens`. Raise it, or drop long documents before (`max_chars`)."
                    )
                end = int(ends[stop - 1]) if stop else 0
            if stop > row:
                self._piece.add(doc_id[row:stop], ids[at:end], lengths[row:stop], utf8[row:stop])
                row, at = stop, end
            if row < len(lengths):
                self._next()

    def _next(self) -> None:
        """Publishes the ids of a full piece and begins another one; indexes wait, for they name the source."""
        self._piece.publish_ids()
        self._done.append(self._piece)
        self._piece = _Piece(self._folder, f"{self.name}-{len(self._done):03d}")

    def finish(self, split: Split, source: str, key: str) -> list[ShardInfo]:
        """What there is; to be called after the last document."""
        return [piece.finish(split, source, key) for piece in (*self._done, self._piece)]

    def close(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The end of a block: after an error, files that are not published yet never appear."""
        for piece in (*self._done, self._piece):
            piece.close(kind, error, at)


class _Piece:
    """One .bin and one .idx."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.tokens = name, 0
        self._folder, self._index = folder, b""
        self._open = ExitStack()
        self._bin: IO[bytes] = self._open.enter_context(publish(join(folder, f"{name}.bin")))
        self._digest, self._blocks = xxhash.xxh3_128(), BlockHashes()
        self._rows: list[tuple[pa.Array, np.ndarray, pa.Array]] = []

    def add(self, doc_id: pa.Array, ids: np.ndarray, lengths: np.ndarray, utf8: pa.Array) -> None:
        data = np.ascontiguousarray(ids).data
        self._bin.write(data)
        self._digest.update(data)
        self._blocks.update(data)
        self._rows.append((doc_id, lengths, utf8))
        self.tokens += len(ids)

    def publish_ids(self) -> None:
        self._open.close()

    def close(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)
        if error is None:
            publish_bytes(join(self._folder, f"{self.name}.idx"), self._index)

    def finish(self, split: Split, source: str, key: str) -> ShardInfo:
        table = self._table(source)
        self._index = index = index_bytes(table, self._blocks.metadata())
        return ShardInfo(
            name=self.name,
            source=source,
            split=split,
            documents=table.num_rows,
            tokens=self.tokens,
            bytes=int(pc.sum(table["bytes"].cast(pa.uint64())).as_py() or 0),
            idx_bytes=len(index),
            bin_xxh3=self._digest.hexdigest(),
            idx_xxh3=xxhash.xxh3_128_hexdigest(index),
            key=key,
        )

    def _table(self, source: str) -> pa.Table:
        lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths, _ in self._rows)])
        columns = [
            pa.chunked_array([doc_id for doc_id, _, _ in self._rows], pa.string()),
            pa.array([source], pa.string()).take(pa.array(np.zeros(len(lengths), np.int32))),
            pa.array(np.cumsum(lengths) - lengths, pa.uint64()),
            pa.array(lengths, pa.uint32()),
            pa.chunked_array([utf8 for _, _, utf8 in self._rows], pa.uint32()),
        ]
        return pa.Table.from_arrays(columns, schema=INDEX_SCHEMA)


class Spool:
    """Documents that wait for all others, to go on in the order of their keys. Memory holds some 60 bytes a document;
    the ids lie in a temporary file."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._rows: list[tuple[pa.Array, np.ndarray, pa.Array, np.ndarray]] = []
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="gristmill-tokens-")  # noqa: SIM115

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, rows: Rows) -> None:
        self._file.write(rows.ids.data)
        self._rows.append((rows.doc_id, rows.lengths, rows.utf8, rows.keys))

    def sorted(self) -> Iterator[Rows]:
        """Everything, by key. Documents of the same key keep their order."""
        if not self._rows:
            return
        self._file.flush()
        ids = np.memmap(self._file, self._dtype, "r")
        doc_id = pa.chunked_array([rows[0] for rows in self._rows]).combine_chunks()
        lengths = np.concatenate([rows[1] for rows in self._rows])
        utf8 = pa.chunked_array([rows[2] for rows in self._rows]).combine_chunks()
        keys = np.concatenate([rows[3] for rows in self._rows])
        order = np.argsort(keys, kind="stable")
        starts = np.cumsum(lengths) - lengths
        groups = np.cumsum(lengths[order]) // GATHERED_IDS
        for rows in np.split(order, np.flatnonzero(np.diff(groups)) + 1):
            out = np.empty(int(lengths[rows].sum()), self._dtype)
            _gather(ids, starts[rows], lengths[rows], out)
            taken = pa.array(rows)
            yield Rows(doc_id.take(taken), out, lengths[rows], utf8.take(taken), keys[rows])


@njit(nogil=True, cache=True)
def _gather(ids, starts, lengths, out):  # type: ignore[no-untyped-def]
    """ids (tokens,) -> out: those of some documents, one document after the other."""
    at = 0
    for row in range(starts.shape[0]):
        for i in range(lengths[row]):
            out[at] = ids[starts[row] + i]
            at += 1


def index_bytes(table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> bytes:
    """An .idx file. One record batch, each column in buffers of its own, so that the bytes do not depend on how the
    rows were gathered: Arrow writes a slice of an array with some bytes of its neighbours.

    metadata: of the schema, the checksums of the blocks of the .bin.
    """
    schema = INDEX_SCHEMA.with_metadata(metadata)
    columns = [pa.concat_arrays([*column.chunks, column.chunk(0).slice(0, 0)]) for column in _chunked(table)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _chunked(table: pa.Table) -> list[pa.ChunkedArray]:
    """The columns, with at least one chunk each."""
    return [column if column.num_chunks else pa.chunked_array([pa.array([], column.type)]) for column in table.columns]
