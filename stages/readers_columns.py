"""Base columns of many records at once, from columns of a table: what `base_row` gives record by record.

The common types are done column by column. A batch with anything else (nested metadata, dates, decimals, text that is
not UTF-8) goes the way of `base_row`, which is the definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import Batch
from gristmill.stages.readers_common import READ_FIELDS, Reading
from gristmill.stages.readers_record import MOVED, base_row


def base_columns(reading: Reading, records: Batch, positions: np.ndarray) -> list[pa.Array]:
    """The columns of READ_FIELDS for records without their text. positions (n,) int64: their rows in the file."""
    columns = _whole_columns(reading, records, positions)
    if columns is not None:
        return columns
    rows = records.to_pylist() if records.num_columns else [{} for _ in range(len(positions))]
    based = [base_row(reading, record, int(at)) for record, at in zip(rows, positions, strict=True)]
    values = zip(*based, strict=True)
    return [pa.array(one, kind) for one, kind in zip(values, READ_FIELDS.values(), strict=True)]


def _whole_columns(reading: Reading, records: Batch, positions: np.ndarray) -> list[pa.Array] | None:
    """None where a column is of a kind that only `base_row` knows."""
    count, names = len(positions), reading.names
    own = {name: names.get(name, name) for name in MOVED}
    id_name = names.get("doc_id", "id")
    given = dict(zip(records.schema.names, records.columns, strict=True))
    if not count or len(given) != records.num_columns or "metadata" in given:
        return None
    if len({id_name, *own.values()}) != len(MOVED) + 1 or ("date" not in names and "created" in given):
        return None  # one column for two things: which of them gets it is decided record by record
    nothing = pa.nulls(count, pa.string())
    score = _score(given.pop(own.pop("language_score"), nothing))
    ids = _string(given.pop(id_name, nothing))
    moved = {name: _string(given.pop(key, nothing)) for name, key in own.items()}
    metadata = _metadata(given, count)
    if score is None or ids is None or metadata is None or any(column is None for column in moved.values()):
        return None
    if reading.shard.dump is not None:
        moved["dump"] = pc.fill_null(moved["dump"], reading.shard.dump)
    found = {
        "doc_id": _identified(reading, ids, positions),
        "source": pa.repeat(reading.shard.source, count),
        **moved,
        "metadata": metadata,
        "language_score": score,
        "position": pa.array(positions).cast(pa.string()),
    }
    return [found[name] for name in READ_FIELDS]


def _string(column: pa.Array) -> pa.Array | None:
    """As `string_of`: NUL becomes U+FFFD, "" null."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_null(kind):
        return column.cast(pa.string())
    strings = _strings(column)
    if strings is None:
        return None
    if has_nul(strings):
        strings = pc.replace_substring(strings, "\0", "\ufffd")
    return pc.if_else(pc.equal(strings, ""), pa.scalar(None, pa.string()), strings)


def has_nul(texts: pa.Array) -> bool:
    """True where a string has a zero byte; bytes between the strings count too. string or large_string."""
    offsets, data = texts.buffers()[1:]
    if data is None or not len(texts):
        return False
    wide = pa.types.is_large_string(texts.type) or pa.types.is_large_binary(texts.type)
    edges = np.frombuffer(offsets, np.int64 if wide else np.int32)
    first, last = int(edges[texts.offset]), int(edges[texts.offset + len(texts)])
    return bool(np.frombuffer(data, np.uint8)[first:last].min(initial=1) == 0)


def _score(column: pa.Array) -> pa.Array | None:
    """As `_number` of base_row, for numbers."""
    kind = column.type
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return pa.nulls(len(column), pa.float64())
    if (pa.types.is_floating(kind) and not pa.types.is_float16(kind)) or pa.types.is_integer(kind):
        return column.cast(pa.float64(), safe=False)
    return pa.nulls(len(column), pa.float64()) if column.null_count == len(column) else None


def _metadata(others: dict[str, pa.Array], count: int) -> pa.Array | None:
    """What is left of the records as JSON objects, in the order of the columns; null where nothing is left."""
    pieces = []
    for name, column in others.items():
        values = _json_values(column)
        if values is None:
            return None
        key = f",{orjson.dumps(name).decode()}:"
        pieces.append(pc.binary_join_element_wise(key, values, "").fill_null(""))  # null where the value is
    if not pieces:
        return pa.nulls(count, pa.string())
    # Not null_handling="skip": in pyarrow 26 a row of nulls alone is then missing from the result.
    inner = pc.binary_join_element_wise(*pieces, "")
    whole = pc.binary_join_element_wise("{", pc.utf8_slice_codeunits(inner, 1), "}", "")
    return pc.if_else(pc.equal(inner, ""), pa.scalar(None, pa.string()), whole)


def _json_values(column: pa.Array) -> pa.Array | None:
    """Each value as orjson writes it, null for null; None for kinds that are not plain."""
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        written = orjson.dumps(column.to_pylist())[1:-1].decode().split(",")
        values = pa.array(written, pa.string())
    else:
        strings = _strings(column)
        if strings is None:
            return None
        values = pa.array(
            [None if value is None else orjson.dumps(value).decode() for value in strings.to_pylist()], pa.string()
        )
    return pc.if_else(column.is_valid(), values, pa.scalar(None, pa.string()))


def _strings(column: pa.Array) -> pa.Array | None:
    """A column of strings of any kind as `string`; None for another kind, over 2 GiB, or where it is not UTF-8."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not any(is_kind(kind) for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        return None
    try:
        strings = column.cast(pa.string())
        strings.validate(full=True)
    except pa.ArrowInvalid:
        return None
    return strings


def _identified(reading: Reading, ids: pa.Array, positions: np.ndarray) -> pa.Array:
    """As `Reading.identify`, all at once where no id is missing or was seen before."""
    values: list[Any] = ids.to_pylist()
    if ids.null_count == 0 and reading.are_new(values):
        return ids
    named = zip(values, positions.tolist(), strict=True)
    return pa.array([reading.identify(own, at) for own, at in named], pa.string())
