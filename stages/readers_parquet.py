"""Parquet: one document a row, a range of row groups a shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.stages.documents import MAX_BATCH_BYTES, MAX_BATCH_DOCUMENTS, Batch, slices
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_columns import base_columns, has_nul
from gristmill.stages.readers_common import READ_FIELDS, Reading, clean_string
from gristmill.stages.shards import ShardError


def read_parquet(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """Row groups start:stop. A row group that cannot be decoded fails with the rows not yet read, and no other."""
    shard = reading.shard
    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise ShardError(
            f"{shard.path}: not a whole Parquet file ({error}). It may have been cut while it was copied: fetch it."
        ) from error
    groups = parquet.num_row_groups
    stop = groups if shard.stop is None else shard.stop
    if not 0 <= shard.start <= stop <= groups:
        raise ShardError(f"{shard.label}: the file has {groups} row groups. It changed since it was listed.")
    check_text(reading, parquet.schema_arrow)
    row = sum(parquet.metadata.row_group(g).num_rows for g in range(shard.start))
    for group in range(shard.start, stop):
        rows = parquet.metadata.row_group(group).num_rows
        done = 0
        try:
            for batch in parquet.iter_batches(_rows_at_a_time(parquet, group), row_groups=[group], use_threads=False):
                yield from read_rows(reading, batch, row + done)
                done += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            reading.fail("corrupt", f"row group {group}", f"{rows - done} rows lost: {error}", 0, rows - done)
        row += rows


def _rows_at_a_time(parquet: pq.ParquetFile, group: int) -> int:
    """As many rows as make about one batch of bytes, by the row group's mean."""
    metadata = parquet.metadata.row_group(group)
    mean = metadata.total_byte_size / max(1, metadata.num_rows)
    return int(np.clip(MAX_BATCH_BYTES / max(1.0, mean), 1, MAX_BATCH_DOCUMENTS))


def check_text(reading: Reading, schema: pa.Schema) -> None:
    """Raises ShardError when the file has no column of text."""
    name = reading.names.get("text", "text")
    if name not in schema.names:
        raise ShardError(
            f"{reading.shard.path}: no column {name!r}; there are {', '.join(schema.names)}. "
            "Say which one is the text with `columns: {text: <name>}`."
        )
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_kind(kind) for is_kind in _TEXT_KINDS):
        raise ShardError(f"{reading.shard.path}: the column {name!r} is {kind}, not a string.")


_TEXT_KINDS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)


def read_rows(reading: Reading, batch: Batch, first: int) -> Iterator[Batch]:
    """Rows as they were decoded -> batches of documents. first: number of the first row in the file."""
    name = reading.names.get("text", "text")
    raw = batch[name].cast(pa.large_binary())
    texts, surrogates, broken = _decode(raw)
    sizes = pc.fill_null(pc.binary_length(raw), 0).to_numpy(zero_copy_only=False)
    chars = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
    missing = raw.is_null().to_numpy(zero_copy_only=False)
    for i in np.flatnonzero(missing | broken):
        if missing[i]:
            reading.fail("no_text", f"row {first + i}", f"{name!r} is null; a string is needed", 0)
        else:
            reading.fail("not_utf8", f"row {first + i}", f"{name!r} is not valid UTF-8", int(sizes[i]))
    failed = missing | broken
    large = ~failed & (chars > reading.max_chars)
    blank = pc.fill_null(pc.utf8_is_space(texts), False).to_numpy(zero_copy_only=False) | (chars == 0)
    empty = ~failed & ~large & blank
    for reason, rows in (("too_large", large), ("empty", empty)):
        if rows.any():
            size = Amount(documents=int(rows.sum()), chars=int(chars[rows].sum()), bytes=int(sizes[rows].sum()))
            reading.drop(reason, size)
    kept = ~failed & ~large & ~empty
    if not kept.any():
        return
    # Counting takes as long as all else here, and web text has no NUL.
    nuls = int(pc.sum(pc.count_substring(texts.filter(pa.array(kept)), "\0")).as_py() or 0) if has_nul(texts) else 0
    reading.edited(nuls, int(surrogates[kept].sum()))
    clean = pc.replace_substring(texts, "\0", "\ufffd") if nuls else texts
    yield from _documents(reading, batch, clean, chars, kept, first)


def _decode(raw: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """large_binary (n,) -> (large_string (n,), lone surrogates replaced (n,) int64, not UTF-8 (n,) bool).

    Parquet files promise UTF-8 in string columns, and not every writer keeps that promise.
    """
    surrogates, broken = np.zeros(len(raw), np.int64), np.zeros(len(raw), bool)
    try:
        return raw.cast(pa.large_string()), surrogates, broken
    except pa.ArrowInvalid:
        texts: list[str | None] = []
    for i, value in enumerate(raw.to_pylist()):
        try:
            text = None if value is None else clean_string(value.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            broken[i], text = True, None
        texts.append(value.decode("utf-8", "surrogatepass") if text and not text[2] else text[0] if text else None)
        surrogates[i] = text[2] if text else 0
    return pa.array(texts, pa.large_string()), surrogates, broken


def _documents(
    reading: Reading, batch: Batch, texts: pa.Array, chars: np.ndarray, kept: np.ndarray, first: int
) -> Iterator[Batch]:
    """The rows that are kept, with their base columns, in batches of bounded size. chars (n,) int64: of each text."""
    name = reading.names.get("text", "text")
    others = batch.select([other for other in batch.schema.names if other != name])
    if not kept.all():
        others, texts = others.filter(pa.array(kept)), texts.filter(pa.array(kept))
    columns = base_columns(reading, others, np.flatnonzero(kept) + first)
    whole = pa.RecordBatch.from_arrays([*columns, texts], names=[*READ_FIELDS, "text"])
    weights = pc.binary_length(whole["text"]).to_numpy()
    far = int(weights.sum()) > np.iinfo(np.int32).max  # offsets of a string column have 32 bits
    part: pa.RecordBatch
    counted, row = chars[kept], 0
    for part in slices(whole, weights):
        near = part.take(pa.array(np.arange(part.num_rows))) if far else part
        yield reading.booked(near.cast(reading.schema), int(counted[row : row + part.num_rows].sum()))
        row += part.num_rows
