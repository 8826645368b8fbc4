"""Batches, rules and decisions: what every stage builds on."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.stages.documents import (
    MAX_BATCH_BYTES,
    MAX_BATCH_DOCUMENTS,
    Rule,
    Settings,
    apply_decisions,
    cut,
    judge,
    slices,
    with_columns,
    without_columns,
)


def batch(n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"doc_id": [f"d{i}" for i in range(n)], "text": ["x" * i for i in range(n)]})


def test_limits_are_inclusive_and_nan_fails() -> None:
    values = np.array([0.9, 1.0, 2.0, 2.1, math.nan])
    assert Rule("r", "c", at_least=1, at_most=2).fails(values).tolist() == [True, False, False, True, True]
    assert Rule("r", "c").fails(values).tolist() == [False] * 5  # no limit, no failure


def test_all_reasons_are_kept_in_order_and_counted() -> None:
    measured = with_columns(batch(3), {"s.a": pa.array([0.0, 1.0, 0.0]), "s.b": pa.array([9.0, 9.0, 0.0])})
    result = judge(measured, (Rule("a_low", "s.a", at_least=0.5), Rule("b_high", "s.b", at_most=5)), {"more": 4})
    assert result.kept.num_rows == 0
    assert result.dropped["reasons"].to_pylist() == [["a_low", "b_high"], ["b_high"], ["a_low"]]
    assert result.counters == {"more": 4, "rule.a_low": 2, "only.a_low": 1, "rule.b_high": 2, "only.b_high": 1}


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), max_size=30))
def test_cut_keeps_every_document_once(table: list[list[bool]]) -> None:
    whole = batch(len(table)) if table else batch(1).slice(0, 0)
    fails = {name: np.array([row[i] for row in table], dtype=bool) for i, name in enumerate("abc")}
    result = cut(whole, fails)
    ids = result.kept["doc_id"].to_pylist() + result.dropped["doc_id"].to_pylist()
    assert sorted(ids) == sorted(whole["doc_id"].to_pylist())
    expected = [[name for name, failed in zip("abc", row, strict=True) if failed] for row in table if any(row)]
    assert result.dropped["reasons"].to_pylist() == expected


def test_columns_are_set_in_place_or_appended() -> None:
    changed = with_columns(batch(2), {"text": pa.array(["a", "b"]), "new": pa.array([1.0, 2.0])})
    assert changed.schema.names == ["doc_id", "text", "new"]
    assert changed["text"].to_pylist() == ["a", "b"]
    assert without_columns(changed, ["text", "never"]).schema.names == ["doc_id", "new"]


def test_slices_obey_both_limits() -> None:
    many = batch(MAX_BATCH_DOCUMENTS + 1)
    assert [p.num_rows for p in slices(many, np.ones(many.num_rows))] == [MAX_BATCH_DOCUMENTS, 1]
    weights = np.array([MAX_BATCH_BYTES // 2, MAX_BATCH_BYTES // 2, 1, 3 * MAX_BATCH_BYTES, 1])
    assert [p.num_rows for p in slices(batch(5), weights)] == [2, 1, 1, 1]  # a huge document goes alone
    assert list(slices(batch(1).slice(0, 0), np.zeros(0))) == []


class Judge:
    """A global stage as far as `apply_decisions` is concerned."""

    adds: ClassVar = {"judge.cluster": pa.string()}

    def rules(self) -> tuple[Rule, ...]:
        return ()


class Scorer:
    """A global stage whose measure has a limit as well."""

    adds: ClassVar = {"scorer.score": pa.float64()}

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("score_too_low", "scorer.score", at_least=0.5),)


def test_decisions_are_joined_by_id_and_counted() -> None:
    decisions = pa.table(
        {
            "doc_id": ["d2", "d0", "elsewhere"],
            "reason": pa.array(["double", None, "double"], pa.string()),
            "judge.cluster": ["d0", "d0", "d9"],
        }
    )
    result, met = apply_decisions(Judge(), batch(3), decisions)  # type: ignore[arg-type]
    assert met == 2  # the runner finds that one decision met no document
    assert result.kept["doc_id"].to_pylist() == ["d0", "d1"]
    assert result.kept["judge.cluster"].to_pylist() == ["d0", None]
    assert result.dropped["reasons"].to_pylist() == [["double"]]


def test_rules_of_a_global_stage_judge_what_was_decided() -> None:
    """d0 breaks the limit, d1 was turned down, d2 both; d3, of which nothing was said, has no score."""
    decisions = pa.table(
        {
            "doc_id": ["d0", "d1", "d2"],
            "reason": pa.array([None, "not_in_top", "not_in_top"], pa.string()),
            "scorer.score": [0.1, 0.9, 0.2],
        }
    )
    result, met = apply_decisions(Scorer(), batch(5).slice(0, 4), decisions)  # type: ignore[arg-type]
    assert met == 3
    assert result.kept.num_rows == 0
    assert result.dropped["reasons"].to_pylist() == [
        ["score_too_low"],
        ["not_in_top"],
        ["score_too_low", "not_in_top"],
        ["score_too_low"],
    ]
    assert result.counters["only.not_in_top"] == 1


def test_settings_are_frozen_and_closed() -> None:
    class Own(Settings):
        limit: int = 1

    with pytest.raises(ValueError, match="frozen"):
        Own().limit = 2  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Own(other=1)  # type: ignore[call-arg]
