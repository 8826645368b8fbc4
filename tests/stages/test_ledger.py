"""The books: exact sums that balance, and a stage that loses or invents a document is found out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.stages.documents import Measure, Rule, cut, judge, with_columns
from gristmill.stages.ledger import (
    Amount,
    Histogram,
    LedgerError,
    ShardLedger,
    StageLedger,
    book,
    count_measures,
    merge,
)


def batch(texts: list[str]) -> pa.RecordBatch:
    ids = [f"d{i}" for i in range(len(texts))]
    return pa.RecordBatch.from_pydict({"doc_id": pa.array(ids, pa.string()), "text": pa.array(texts, pa.string())})


def test_worked_example() -> None:
    """Three documents; "héé" (3 characters, 5 bytes) is dropped, "abcd" loses its d."""
    before = batch(["abcd", "héé", "xy"])
    result = cut(before, {"accented": np.array([False, True, False]), "never": np.zeros(3, bool)})
    kept = with_columns(result.kept, {"text": pa.array(["abc", "xy"])})
    books = StageLedger(stage="s")
    book(books, before, kept, result.dropped, result.counters)
    assert books.read == Amount(documents=3, chars=9, bytes=11)
    assert books.kept == Amount(documents=2, chars=5, bytes=5)
    assert books.dropped == {"accented": Amount(documents=1, chars=3, bytes=5)}
    assert books.edited == Amount(chars=1, bytes=1)
    documents = {"rule.accented": 1, "only.accented": 1, "rule.never": 0, "only.never": 0}
    assert books.counters == documents | {"rule_chars.accented": 3, "only_chars.accented": 3}
    books.check("here")


@given(st.lists(st.tuples(st.text(max_size=8), st.integers(0, 7)), max_size=40), st.integers(1, 7))
def test_books_balance_and_batches_do_not_matter(rows: list[tuple[str, int]], size: int) -> None:
    whole = batch([text for text, _ in rows])
    bits = np.array([bits for _, bits in rows], dtype=int)

    def booked(pieces: list[tuple[int, int]]) -> StageLedger:
        books = StageLedger(stage="s")
        for start, stop in pieces:
            part = whole.slice(start, stop - start)
            fails = {name: (bits[start:stop] >> i) & 1 == 1 for i, name in enumerate("abc")}
            result = cut(part, fails)
            book(books, part, result.kept, result.dropped, result.counters)
        books.check("here")
        return books

    one = booked([(0, len(rows))])
    many = booked([(i, min(i + size, len(rows))) for i in range(0, len(rows), size)])
    many.counters = {**dict.fromkeys(one.counters, 0), **many.counters}
    assert many == one
    assert one.dropped.get("a", Amount()).documents == sum(int(b) & 1 for b in bits)


@pytest.mark.parametrize(
    ("kept", "dropped"),
    [(["d0"], []), (["d0", "d1", "d1"], []), (["d0", "d1"], ["d1"]), (["d0", "other"], []), (["d0", "d0"], [])],
)
def test_a_stage_that_loses_or_invents_a_document_is_found(kept: list[str], dropped: list[str]) -> None:
    before = batch(["a", "b"])

    def rows(ids: list[str]) -> pa.RecordBatch:
        made = pa.RecordBatch.from_pydict({"doc_id": pa.array(ids, pa.string()), "text": pa.array(ids, pa.string())})
        return with_columns(made, {"reasons": pa.array([["r"]] * len(ids), pa.list_(pa.string()))})

    with pytest.raises(LedgerError, match="gave back"):
        book(StageLedger(stage="s"), before, rows(kept), rows(dropped), {})


def test_characters_of_overlapping_rules() -> None:
    """Lengths 1, 2, 4: a drops the first two, b the last two."""
    before = batch(["x", "yy", "zzzz"])
    result = cut(before, {"a": np.array([True, True, False]), "b": np.array([False, True, True])})
    books = StageLedger(stage="s")
    book(books, before, result.kept, result.dropped, result.counters)
    named = {name: n for name, n in books.counters.items() if "chars" in name}
    assert named == {"rule_chars.a": 3, "only_chars.a": 1, "rule_chars.b": 6, "only_chars.b": 4}


def test_an_unbalanced_ledger_says_where() -> None:
    books = StageLedger(stage="s", read=Amount(documents=2), kept=Amount(documents=1))
    with pytest.raises(
        LedgerError, match=r"part-7: stage s does not balance: read 2 documents.*unaccounted for: 1 doc"
    ):
        books.check("part-7")


def test_stages_chain() -> None:
    one = StageLedger(stage="one", read=Amount(documents=2), kept=Amount(documents=2))
    two = StageLedger(stage="two", read=Amount(documents=1), kept=Amount(documents=1))
    shard = ShardLedger(key="k", segment="01-x", shard=0, source="a", input="f", stages=[one, two])
    with pytest.raises(LedgerError, match=r"stage one kept 2 documents.*stage two read 1 documents"):
        shard.check("part-0")


def test_a_sealed_ledger_opens_and_a_changed_one_does_not() -> None:
    shard = ShardLedger(key="k", segment="01-x", shard=0, source="a", input="f")
    data = shard.sealed()
    assert ShardLedger.opened(data, "x").key == "k"
    with pytest.raises(LedgerError, match="was changed after it was written"):
        ShardLedger.opened(data.replace(b'"shard":0', b'"shard":1'), "x")
    with pytest.raises(LedgerError, match="not a ledger"):
        ShardLedger.opened(b"{", "x")


@given(st.lists(st.floats(-2, 3) | st.just(float("nan")), max_size=60), st.integers(0, 60))
def test_histograms_merge_exactly(values: list[float], at: int) -> None:
    measure = Measure("m", "1", (0.0, 0.5, 1.0))
    whole, left, right = (Histogram.empty(measure) for _ in range(3))
    whole.add(np.array(values, dtype=float), kept=True)
    left.add(np.array(values[:at], dtype=float), kept=True)
    right.add(np.array(values[at:], dtype=float), kept=True)
    assert left.merge(right) == whole
    under, low, high, over = whole.kept
    known = [v for v in values if v == v]
    assert under == sum(v < 0 for v in known)
    assert low == sum(0 <= v < 0.5 for v in known)
    assert high == sum(0.5 <= v <= 1 for v in known)
    assert over == sum(v > 1 for v in known)
    assert whole.missing == len(values) - len(known)


def test_judge_books_measures_of_kept_and_dropped_apart() -> None:
    measured = with_columns(batch(["a", "b", "c"]), {"s.x": pa.array([0.1, 0.6, None])})
    result = judge(measured, (Rule("too_high", "s.x", at_most=0.5),))
    assert result.dropped["doc_id"].to_pylist() == ["d1", "d2"]  # a missing value breaks a limit
    books = StageLedger(stage="s")
    count_measures(books, (Measure("s.x", "1", (0.0, 0.5, 1.0)),), result.kept, result.dropped)
    histogram = books.histograms["s.x"]
    assert (histogram.kept, histogram.dropped, histogram.missing) == ([0, 1, 0, 0], [0, 0, 1, 0], 1)


def test_merge_is_by_stage_in_order() -> None:
    a = StageLedger(stage="a", read=Amount(documents=1), kept=Amount(documents=1), counters={"x": 1})
    b = StageLedger(stage="b", read=Amount(documents=1), failed={"e": Amount(documents=1)})
    total = merge([a, b, a, b])
    assert list(total) == ["a", "b"]
    assert total["a"].counters == {"x": 2}
    assert total["b"].failed == {"e": Amount(documents=2)}
