"""What a worker writes of a shard: the documents it keeps, and a row for each that it drops."""

from __future__ import annotations

import heapq
from collections import defaultdict
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from gristmill.stages.documents import (
    BASE_FIELDS,
    MAX_BATCH_BYTES,
    MAX_BATCH_DOCUMENTS,
    REASONS,
    Batch,
)
from gristmill.stages.shards import publish, publish_bytes

SAMPLE_CHARS = 100_000  # of the text of a sampled dropped document
LEVEL = 1  # of zstd: twice the speed of 3 and 17 % more bytes (25 MB of web text in many languages)
PAGE_BYTES = 8 << 20  # of a column in a row group; with pyarrow's 1 MiB reading takes a third more time


class KeptWriter:
    """A Parquet writer whose row groups depend on the documents alone."""

    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self.rows = 0
        self._schema = schema
        self._parquet = pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=LEVEL, data_page_size=PAGE_BYTES
        )
        self._waiting: list[Batch] = []
        self._waiting_rows = self._waiting_bytes = 0

    def __enter__(self) -> KeptWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._flush()
        self._parquet.close()

    def add(self, batch: Batch) -> None:
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += int(pc.sum(pc.binary_length(batch["text"])).as_py() or 0)
        if self._waiting_rows >= MAX_BATCH_DOCUMENTS or self._waiting_bytes >= MAX_BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
            self._parquet.write_table(table, row_group_size=table.num_rows)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


class DroppedWriter:
    """Dropped documents of a shard: a row for each, the text of a sample of every stage and reason.

    The sample is the documents with the smallest hashes of their id: the same whatever the batches.
    """

    def __init__(self, schema: pa.Schema, sample_per_reason: int) -> None:
        self._limit = sample_per_reason
        fields = {name: pa.string() for name in ("doc_id", "source", "url", "dump", "date", "stage")}
        fields |= {"reasons": REASONS, "chars": pa.int64(), "bytes": pa.int64()}
        measures = {name: kind for name, kind in _fields(schema).items() if name not in (*BASE_FIELDS, "text")}
        self._schema = pa.schema([*fields.items(), *measures.items(), ("text", pa.string())])
        self._tables: list[pa.Table] = []
        self._samples: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
        self._rows = 0

    def add(self, stage: str, before: Batch, dropped: Batch) -> None:
        if not dropped.num_rows:
            return
        original = before.take(pc.index_in(dropped["doc_id"], value_set=before["doc_id"]))
        column = "text" if "text" in original.schema.names else "html"
        contents = original[column]
        columns: dict[str, Any] = {name: dropped[name] for name in dropped.schema.names if name in self._schema.names}
        columns["stage"] = pa.array([stage] * dropped.num_rows, pa.string())
        columns["chars"] = (
            pc.utf8_length(contents).cast(pa.int64()) if column == "text" else pa.array(np.zeros(len(contents), "i8"))
        )
        columns["bytes"] = pc.binary_length(contents).cast(pa.int64())
        columns["text"] = pa.nulls(dropped.num_rows, pa.string())
        arrays = [
            columns[f.name].cast(f.type) if f.name in columns else pa.nulls(dropped.num_rows, f.type)
            for f in self._schema
        ]
        self._tables.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._sample(stage, dropped, contents)
        self._rows += dropped.num_rows

    def _sample(self, stage: str, dropped: Batch, contents: pa.Array) -> None:
        reasons = pc.list_element(dropped["reasons"], 0).to_pylist()
        for i, (doc_id, reason) in enumerate(zip(dropped["doc_id"].to_pylist(), reasons, strict=True)):
            heap = self._samples[stage, reason]
            rank = -xxhash.xxh3_64_intdigest(doc_id)
            if len(heap) < self._limit:
                heapq.heappush(heap, (rank, self._rows + i, _text(contents[i])))
            elif heap and rank > heap[0][0]:
                heapq.heapreplace(heap, (rank, self._rows + i, _text(contents[i])))

    def write(self, path: str) -> int:
        if not self._tables:
            publish_bytes(path, _without_rows(self._schema))
            return 0
        table = pa.concat_tables(self._tables).combine_chunks()
        texts: list[str | None] = [None] * table.num_rows
        for heap in self._samples.values():
            for _, row, text in heap:
                texts[row] = text
        at = self._schema.names.index("text")
        table = table.set_column(at, "text", pa.array(texts, pa.string()))
        with publish(path) as file:
            _write(table, file)
        return table.num_rows


def _write(table: pa.Table, file: Any) -> None:
    pq.write_table(table, file, compression="zstd", compression_level=3)


@lru_cache(64)
def _without_rows(schema: pa.Schema) -> bytes:
    """The file of a shard that dropped nothing: of many small ones most, and made once."""
    file = pa.BufferOutputStream()
    _write(schema.empty_table(), file)
    data: bytes = file.getvalue().to_pybytes()
    return data


def _fields(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in schema}


def _text(value: pa.Scalar) -> str:
    content = value.as_py()
    if isinstance(content, bytes):
        content = content[: 4 * SAMPLE_CHARS].decode("utf-8", "replace").replace("\0", "\ufffd")
    return str(content)[:SAMPLE_CHARS]
