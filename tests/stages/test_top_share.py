"""The best share of all documents: by hand, against a sort, and whatever the shards, batches and their order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages import top_share
from gristmill.stages.top_share import By, documents_in_top, find_cuts, in_top, nth_smallest, order_keys

Row = tuple[str, str, bytes, float, str | None]  # doc_id, source, text_hash, score, language

SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.binary(16)),
        ("score", pa.float64()),
        ("language", pa.string()),
    ]
)


def row(doc_id: str, score: float, source: str = "web", language: str | None = "en", text: int = 0) -> Row:
    return doc_id, source, text.to_bytes(16, "big"), score, language


def table(rows: list[Row], size: int = 3) -> pa.Table:
    """A signature table in batches of `size`."""
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    named = [[dict(zip(SCHEMA.names, r, strict=True)) for r in part] for part in parts]
    return pa.Table.from_batches([pa.RecordBatch.from_pylist(part, SCHEMA) for part in named], SCHEMA)


def top(shards: list[list[Row]], share: float, by: By | None = None, size: int = 3) -> list[Row]:
    """The rows that stay, in order."""
    tables = [table(rows, size) for rows in shards]
    cuts = find_cuts(tables, share, by)
    stays = [in_top(t, cuts) for t in tables]
    found = [r for rows, s in zip(shards, stays, strict=True) for r, keep in zip(rows, s.tolist(), strict=True) if keep]
    assert len(found) == sum(cut.in_top for cut in cuts.groups.values())
    return found


def ids(rows: list[Row]) -> list[str]:
    return [r[0] for r in rows]


def test_worked_example() -> None:
    """Seven documents, 0.4 of them: ceil(2.8) = 3. The highest are c (.9) and f (.8); of b, d and e, all .5, the one
    of the smallest id stays; a has .1, and g no score."""
    rows = [
        row("a", 0.1),
        row("b", 0.5),
        row("c", 0.9),
        row("d", 0.5),
        row("e", 0.5),
        row("f", 0.8),
        row("g", math.nan),
    ]
    cuts = find_cuts([table(rows)], 0.4, None)
    (cut,) = cuts.groups.values()
    assert cut.figures() == {
        "documents": 7,
        "in_top": 3,
        "threshold": 0.5,
        "at_threshold": 3,
        "at_threshold_in_top": 1,
        "without_score": 1,
    }
    assert ids(top([rows], 0.4)) == ["b", "c", "f"]
    assert ids(top([rows[4:], rows[:4]], 0.4)) == ["f", "b", "c"]
    assert top([rows], 1) == rows
    assert ids(top([rows], 0.01)) == ["c"]


def test_equal_scores_go_by_id_then_source_then_text() -> None:
    rows = [
        row("y", 0.5, "a", text=1),
        row("x", 0.5, "b", text=2),
        row("x", 0.5, "a", text=3),
        row("x", 0.5, "b", text=1),
        row("é", 0.5, "a"),
    ]
    order = [rows[2], rows[3], rows[1], rows[0], rows[4]]  # é is after y: ids are compared as bytes
    for n in range(1, 6):
        assert sorted(top([[r] for r in rows], n / 5)) == sorted(order[:n])


def test_documents_without_a_score_are_last_and_counted() -> None:
    rows = [row("a", math.nan), row("b", 0.0), row("c", math.nan), row("d", -0.0)]
    assert ids(top([rows], 0.5)) == ["b", "d"]
    assert ids(top([rows], 0.75)) == ["a", "b", "d"]
    (cut,) = find_cuts([table(rows)], 0.75, None).groups.values()
    assert cut.threshold is None
    assert cut.without_score == 2


def test_a_share_of_each_source_or_language() -> None:
    """Of source s four documents, of t three, of u one: 2, 2 and 1 stay of a half."""
    rows = [row("a", 0.9, "s"), row("b", 0.8, "s"), row("c", 0.7, "s"), row("d", 0.6, "s")]
    rows += [row("e", 0.2, "t", "fr"), row("f", 0.3, "t", "fr"), row("g", 0.1, "t", None), row("h", 0.0, "u", None)]
    assert ids(top([rows], 0.5)) == ["a", "b", "c", "d"]
    assert ids(top([rows], 0.5, "source")) == ["a", "b", "e", "f", "h"]
    assert ids(top([rows], 0.5, "language")) == ["a", "b", "f", "g"]
    assert list(find_cuts([table(rows)], 0.5, "language").groups) == ["en", "fr", "und"]


def test_nothing_to_cut() -> None:
    assert top([[], []], 0.5) == []
    assert top([], 0.5, "language") == []


@pytest.mark.parametrize(
    ("share", "documents", "stay"),
    [(0.1, 30, 3), (0.07, 100, 7), (0.1, 31, 4), (0.1, 1, 1), (1.0, 9, 9), (1e-9, 5, 1), (0.1, 0, 0), (0.29, 100, 29)],
)
def test_the_share_is_the_number_that_is_written(share: float, documents: int, stay: int) -> None:
    assert documents_in_top(share, documents) == stay


scores = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0, math.nan, 5e-324]), st.floats(0, 1))


@given(st.lists(scores, min_size=2, max_size=20))
def test_keys_sort_as_scores_do(values: list[float]) -> None:
    keys = order_keys(np.array(values))
    for a, b, i, j in zip(values, values[1:], keys.tolist(), keys[1:].tolist(), strict=False):
        assert (i < j) == (a < b or (math.isnan(a) and not math.isnan(b)))


names, sources, languages = st.sampled_from("abcdefgh"), st.sampled_from("st"), st.sampled_from(["en", None])
documents = st.lists(st.builds(row, names, scores, sources, languages, st.integers(0, 2)), max_size=60)
groupings = st.sampled_from([None, "source", "language"])


shares, held_keys = st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.99, 1.0]), st.sampled_from([1, 5, 1 << 20])


@given(documents, shares, groupings, st.integers(0, 2**32), st.integers(1, 7), held_keys)
@settings(max_examples=120, deadline=None)
def test_shards_batches_and_order_have_no_say(
    rows: list[Row], share: float, by: By | None, seed: int, shards: int, held: int
) -> None:
    draw = random.Random(seed)
    group = {None: lambda r: "", "source": lambda r: r[1], "language": lambda r: str(r[4])}[by]
    place = lambda r: (math.isnan(r[3]), -r[3] if r[3] == r[3] else 0, r[0].encode(), r[1].encode(), r[2])  # noqa: E731
    expected = []
    for name in {group(r) for r in rows}:
        members = sorted((r for r in rows if group(r) == name), key=place)
        expected += members[: documents_in_top(share, len(members))]
    dealt: list[list[Row]] = [[] for _ in range(shards)]
    for r in draw.sample(rows, len(rows)):
        draw.choice(dealt).append(r)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_share, "HELD", held)
        patch.setattr(top_share, "MARGIN", 1)
        patch.setattr(top_share, "READ", draw.randint(1, 20))
        found = top(dealt, share, by, size=draw.randint(1, 9))
    # Rows that differ in nothing but the language are copies for the order: any of them may stay.
    assert sorted(map(place, found)) == sorted(map(place, expected))
    assert sorted(map(group, found)) == sorted(map(group, expected))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(1, 300), st.integers(1, 40), st.integers(1, 9)
)
@settings(max_examples=100, deadline=None)
def test_quickselect(values: list[int], nth: int, sampled: int, margin: int) -> None:
    nth = min(nth, len(values))
    keys = [b"%03d" % v for v in values]

    def read() -> Iterator[pa.Array]:
        yield from (pa.array(keys[i : i + 7], pa.large_binary()) for i in range(0, len(keys), 7))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("HELD", 3), ("SAMPLED", sampled), ("MARGIN", margin)):
            patch.setattr(top_share, name, value)
        found = nth_smallest(read, len(keys), nth)
    ordered = sorted(keys)
    assert found == (ordered[nth - 1], nth - sum(key < ordered[nth - 1] for key in keys))


def test_many_ties_are_found_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand documents of score 1, of which half stay: never more than HELD keys are held."""
    monkeypatch.setattr(top_share, "HELD", 2_000)
    held = []
    whole = pa.concat_arrays
    monkeypatch.setattr(top_share.pa, "concat_arrays", lambda parts: held.append(whole(parts)) or held[-1])
    names = [f"{i:06d}" for i in range(100_000)]
    random.Random(3).shuffle(names)
    rows = [row(name, 1.0) for name in names]
    tables = [table(rows[i : i + 20_000], 5_000) for i in range(0, len(rows), 20_000)]
    cuts = find_cuts(tables, 0.5, None)
    stays = np.concatenate([in_top(t, cuts) for t in tables])
    assert len(held) == 1
    assert len(held[0]) <= 2_000
    assert sorted(np.array(names)[stays]) == sorted(names)[:50_000]
