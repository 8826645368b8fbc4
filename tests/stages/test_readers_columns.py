"""Base columns of many records at once equal those of `base_row`, record by record."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.stages import readers_columns
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers_columns import base_columns, has_nul
from gristmill.stages.readers_common import READ_FIELDS, Reading
from gristmill.stages.readers_record import base_row
from gristmill.stages.shards import Shard

TEXTS = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.just("a")
INTEGERS = st.none() | st.integers(-(2**63), 2**63 - 1)
FLOATS = st.none() | st.floats() | st.just(1e16)
KINDS: dict[str, tuple[Any, list[pa.DataType]]] = {
    "text": (TEXTS, [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]),
    "integer": (INTEGERS, [pa.int64()]),
    "small": (st.none() | st.integers(0, 255), [pa.uint8(), pa.int16()]),
    "float": (FLOATS, [pa.float64()]),
    "half": (st.none() | st.floats(width=32), [pa.float32()]),
    "bool": (st.none() | st.booleans(), [pa.bool_()]),
    "null": (st.none(), [pa.null()]),
    "date": (st.none() | st.dates(), [pa.date32()]),
    "list": (st.none() | st.lists(st.integers(0, 9), max_size=2), [pa.list_(pa.int64())]),
}
NAMES = ("id", "url", "dump", "date", "created", "language", "language_score", "metadata", "file_path", 'a "name"', "n")


def reading(**names: str) -> Reading:
    shard = Shard(
        index=0, source="web", path="a.parquet", name="a.parquet", size=1, stamp="s", format="parquet", dump="D"
    )
    return Reading(shard, StageLedger(stage="read"), [], 1_000, names, ("text",))


def one_by_one(into: Reading, records: pa.RecordBatch, positions: np.ndarray) -> list[list[Any]]:
    rows = [base_row(into, record, int(at)) for record, at in zip(records.to_pylist(), positions, strict=True)]
    return [list(column) for column in zip(*rows, strict=True)]


@st.composite
def tables(draw: st.DrawFn) -> pa.RecordBatch:
    count = draw(st.integers(1, 6))
    arrays, names = [], []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        values, kinds = KINDS[draw(st.sampled_from(sorted(KINDS)))]
        column = pa.array(draw(st.lists(values, min_size=count, max_size=count)), draw(st.sampled_from(kinds)))
        arrays.append(column)
        names.append(name)
    return pa.RecordBatch.from_arrays(arrays, names=names)


@given(tables(), tables(), st.sampled_from([{}, {"doc_id": "n"}, {"url": "id"}, {"date": "created"}]))
def test_equal_to_record_by_record(first: pa.RecordBatch, second: pa.RecordBatch, names: dict[str, str]) -> None:
    together, apart = reading(**names), reading(**names)
    for records in (first, second):  # ids of the first are seen when the second comes
        positions = np.arange(records.num_rows) * 3
        expected = one_by_one(apart, records, positions)
        found = base_columns(together, records, positions)
        assert [column.type for column in found] == list(READ_FIELDS.values())
        shown = [[repr(value) for value in column.to_pylist()] for column in found]  # NaN equals itself as text
        assert shown == [[repr(value) for value in column] for column in expected]
    assert together.ledger.counters == apart.ledger.counters


def test_a_table_of_web_pages_needs_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_columns, "base_row", None)
    records = pa.RecordBatch.from_pydict(
        {
            "id": ["a", "b"],
            "dump": ["CC-MAIN-2024-10", ""],
            "url": ["https://e.org/\0", None],
            "file_path": ['s3://x/"y"', None],
            "token_count": [3, None],
            "score": [0.5, None],
        }
    )
    found = dict(zip(READ_FIELDS, base_columns(reading(), records, np.array([4, 9])), strict=True))
    assert found["url"].to_pylist() == ["https://e.org/\ufffd", None]
    assert found["dump"].to_pylist() == ["CC-MAIN-2024-10", "D"]
    assert found["metadata"].to_pylist() == ['{"file_path":"s3://x/\\"y\\"","token_count":3,"score":0.5}', None]
    assert found["position"].to_pylist() == ["4", "9"]


def test_dates_and_nested_values_go_record_by_record() -> None:
    records = pa.RecordBatch.from_pydict({"id": ["a"], "date": [datetime.date(2024, 2, 29)], "tags": [["x"]]})
    found = dict(zip(READ_FIELDS, base_columns(reading(), records, np.array([0])), strict=True))
    assert found["date"].to_pylist() == ["2024-02-29"]
    assert found["metadata"].to_pylist() == ['{"tags":["x"]}']


def test_has_nul_looks_at_the_slice_alone() -> None:
    texts = pa.array(["\0", "a", None, "b"], pa.large_string())
    assert has_nul(texts)
    assert not has_nul(texts.slice(1))
    assert not has_nul(texts.slice(0, 0))
    assert not has_nul(pa.nulls(2, pa.string()))
