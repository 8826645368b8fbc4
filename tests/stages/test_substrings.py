"""Repeated spans of bytes, against a brute-force oracle and by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages import substrings
from gristmill.stages.documents import slices
from gristmill.stages.kernels import substrings as kernels
from gristmill.stages.signatures import ClusterError
from gristmill.stages.substrings import COLUMN, Substrings, memory_bytes, repeated, runs

Shards = list[pa.RecordBatch]


def batch(texts: list[str], start: int = 0, **columns: Any) -> pa.RecordBatch:
    n = len(texts)
    ids, sources = [f"d{i:04d}" for i in range(start, start + n)], ["web"] * n
    base = {"doc_id": pa.array(ids, pa.string()), "source": pa.array(sources, pa.string())}
    return pa.RecordBatch.from_pydict(
        {**base, "dump": pa.nulls(n, pa.string()), "text": pa.array(texts, pa.string()), **columns}
    )


def decided(stage: Substrings, shards: Shards) -> tuple[list[pa.Table], dict[str, int]]:
    """As a run does it: groups of shards, then each for itself; the figures summed."""
    tables = [pa.Table.from_batches([stage.sign(b)]) for b in shards]
    sizes = [(t.num_rows, int(sum(t["bytes"].to_pylist()))) for t in tables]
    decisions: list[pa.Table] = []
    figures: dict[str, int] = {}
    for group in stage.groups(sizes):
        found, counted = stage.cluster([tables[i] for i in group], iter([shards[i] for i in group]))
        decisions += found
        figures = {k: figures.get(k, 0) + v for k, v in counted.items()}
    return decisions, figures


def result(stage: Substrings, shards: Shards) -> tuple[dict[str, str], list[str], dict[str, int]]:
    """-> what is kept, by doc_id; the documents dropped; figures"""
    decisions, figures = decided(stage, shards)
    kept: dict[str, str] = {}
    dropped: list[str] = []
    for shard, table in zip(shards, decisions, strict=True):
        found, met = stage.apply(shard, table)
        assert met == table.num_rows
        kept |= dict(zip(found.kept["doc_id"].to_pylist(), found.kept["text"].to_pylist(), strict=True))
        dropped += found.dropped["doc_id"].to_pylist()
    return kept, dropped, figures


def left(texts: list[str], n: int, **settings_: Any) -> list[str]:
    """What stays of each document; the first one given stays before the others."""
    stage = Substrings(min_bytes=n, policy="first", min_chars_left=0, **settings_)
    kept, dropped, _ = result(stage, [batch(texts)])
    assert not dropped
    return [kept[f"d{i:04d}"] for i in range(len(texts))]


def oracle(texts: list[str], n: int) -> list[str]:
    """The definition, window by window: documents in the order in which they keep what they share."""
    seen: set[bytes] = set()
    out = []
    for text in texts:
        data = text.encode()
        gone = [False] * len(data)
        for p in range(len(data) - n + 1):
            if data[p : p + n] in seen:
                gone[p : p + n] = [True] * n
            seen.add(data[p : p + n])
        out.append("".join(_characters_left(text, gone)))
    return out


def _characters_left(text: str, gone: list[bool]) -> Iterator[str]:
    """A character goes when all its bytes do."""
    at = 0
    for character in text:
        size = len(character.encode())
        if not all(gone[at : at + size]):
            yield character
        at += size


# Characters of one to four bytes, some of which share their last bytes: 一丁 E4 B8 80, E4 B8 81; 🀀🁀 differ inside.
CHARACTERS = st.sampled_from(["a", "b", "\n", "é", "ũ", "一", "丁", "伀", "🀀", "🁀", "😀"])
TEXTS = st.lists(st.lists(CHARACTERS, max_size=30).map("".join), min_size=1, max_size=6)
NARROW = st.lists(st.text(alphabet="ab", max_size=60), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(st.one_of(TEXTS, NARROW), st.integers(1, 20))
def test_equals_the_definition(texts: list[str], n: int) -> None:
    assert left(texts, n) == oracle(texts, n)


@pytest.mark.parametrize("n", [7, 8, 9, 16, 23, 24, 50])
def test_equals_the_definition_on_longer_texts(n: int) -> None:
    """Of words, so that repeats of every length come up, over the ends of documents as well."""
    rng = random.Random(n)
    words = ["the ", "miller ", "grinds ", "粉", "を", "挽く。", "🙂🙂", "\n", "naïve "]
    texts = ["".join(rng.choices(words, k=rng.randrange(120))) for _ in range(80)]
    expected = oracle(texts, n)
    assert left(texts, n) == expected
    assert sum(map(len, expected)) < sum(map(len, texts))


def test_equals_the_definition_on_this_module_and_its_stage() -> None:
    with open(__file__, encoding="utf-8") as one, open(substrings.__file__, encoding="utf-8") as other:
        texts = [one.read(), other.read()]
    for n in (12, 20, 33):
        assert left(texts, n) == oracle(texts, n)


SPAN = "Subscribe to our newsletter and never miss a story."  # 51 bytes
A = "The first page says something of its own.\n"
B = "Another page, about other matters! "


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        (A + SPAN + " Bye.", SPAN + "| " + B, "| " + B),  # at the start
        (A + SPAN, B + SPAN, B),  # at the end
        (A + SPAN + "1", B + SPAN + "2" + B[:20], B + "2" + B[:20]),  # in the middle
        (SPAN, SPAN, ""),  # the whole
        (A + SPAN + "!", B + SPAN + "." + SPAN + "?", B + ".?"),  # twice in one document
    ],
)
def test_planted_repeats_go_and_nothing_else(first: str, second: str, stays: str) -> None:
    assert left([first, second], len(SPAN)) == [first, stays]
    assert left([first, second], len(SPAN) + 1) == [first, second]


def test_spans_that_overlap_go_together() -> None:
    """The second page has the end of one span run into the start of the other: all of it has an earlier copy."""
    first, second = "0123456789abcdefghij", "efghijKLMNOPQRSTUVWXYZ"
    page = "<" + first[5:] + second[6:] + ">"
    assert left([first, second, page], 10) == [first, second, "<>"]


def test_spans_that_touch_are_one() -> None:
    first, second = "0123456789", "KLMNOPQRST"
    decisions, figures = decided(Substrings(min_bytes=10, policy="first"), [batch([first, second, first + second])])
    assert decisions[0]["spans"].to_pylist() == [[{"start": 0, "end": 20}]]
    assert figures["spans"] == 1


def test_a_span_inside_a_longer_one() -> None:
    """The short copy is found by itself, the long one whole."""
    long = "x1 " + SPAN + " y2"
    assert left([A + long + "#", B + long + "+", SPAN + B[:9]], 40) == [A + long + "#", B + "+", B[:9]]


def test_three_documents_in_three_shards_keep_one_copy() -> None:
    shards = [batch([text + SPAN], i) for i, text in enumerate([A, B, "Short>"])]
    kept, _, figures = result(Substrings(min_bytes=50), shards)
    assert kept == {"d0000": A + SPAN, "d0001": B, "d0002": "Short>"}
    assert (figures["spans"], figures["spans_bytes"], figures["documents_edited"]) == (2, 2 * 51, 2)


def test_chinese_and_emoji_go_by_whole_characters() -> None:
    """ "一" is E4 B8 80, "丁" E4 B8 81 and "伀" E4 BC 80: 12 bytes that begin or end inside of them are repeats too."""
    assert left(["今天天气很好一", "他说天天气很好丁"], 15) == ["今天天气很好一", "他说丁"]
    assert left(["一天天气很", "丁天天气很"], 14) == ["一天天气很", "丁天天气很"]
    assert left(["一天天气很", "伀天天气很"], 13) == ["一天天气很", "伀"]  # 13 with the byte 80 before
    assert left(["hi 😀😁😂🤣 there", "😀😁😂🤣"], 16) == ["hi 😀😁😂🤣 there", ""]
    assert left(["x😀😁😃", "z😀😁😂"], 11) == ["x😀😁😃", "z😂"]  # 8 bytes and F0 9F 98, which is no character


def test_a_text_that_repeats_itself_keeps_the_first_repetition() -> None:
    assert left(["ab" * 30], 10) == ["ab"]
    assert left(["a" * 30, "a" * 9, "a" * 10], 10) == ["a", "a" * 9, ""]


def test_no_repeat_goes_over_the_end_of_a_document() -> None:
    """The order of the documents brings "end" before "start" twice."""
    assert left(["12345", "67890", "x12345", "67890y"], 6) == ["12345", "67890", "x12345", "67890y"]
    assert left(["", "", "ab", "", "ab"], 2) == ["", "", "ab", "", ""]


def test_the_policy_says_who_keeps_a_span() -> None:
    texts = [A + SPAN, B + SPAN + B]
    assert result(Substrings(min_bytes=50), [batch(texts)])[0] == {"d0000": A, "d0001": texts[1]}
    dated = batch(texts, date=["2020", "2021"])
    stage = Substrings(min_bytes=50, policy="earliest")
    assert "date" in stage.needs
    assert result(stage, [dated])[0] == {"d0000": texts[0], "d0001": B + B}
    scored = batch(texts, **{"edu.score": [0.1, 0.2]})
    assert result(Substrings(min_bytes=50, policy="best(-edu.score)"), [scored])[0]["d0000"] == texts[0]
    with pytest.raises(ValidationError, match="keep is longest"):
        Substrings(policy="shortest")


def test_what_is_left_may_be_too_little() -> None:
    one = batch([A + SPAN, "Hi! " + SPAN])
    found = result(Substrings(min_bytes=50, min_chars_left=10), [one])
    assert found[:2] == ({"d0000": A + SPAN}, ["d0001"])


def test_marking_changes_no_text() -> None:
    one = batch(["é" * 3 + SPAN, A + SPAN])
    stage = Substrings(min_bytes=51, mode="mark", min_chars_left=1000)
    (decisions,), _ = decided(stage, [one])
    found, met = stage.apply(one, decisions)
    assert met == 1
    assert found.dropped.num_rows == 0
    assert found.kept["text"] == one["text"]
    assert found.kept[COLUMN].to_pylist() == [51 / 54, 0.0]
    assert {k: v for k, v in found.counters.items() if "." not in k} == {
        "spans_marked": 1,
        "chars_marked": 51,
        "documents_marked": 1,
    }


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.integers(1, 9), st.data())
def test_shards_and_batches_of_one_group_do_not_matter(texts: list[str], n: int, data: st.DataObject) -> None:
    stage = Substrings(min_bytes=n, min_chars_left=0)
    whole = batch(texts)
    expected, _, figures = result(stage, [whole])
    cut = data.draw(st.integers(0, len(texts)))
    for shards in ([whole.slice(0, cut), whole.slice(cut)], [whole.slice(cut), whole.slice(0, cut)]):
        assert result(stage, shards) == (expected, [], figures)
    signed = pa.Table.from_batches([stage.sign(whole)])
    one_by_one = slices(whole, np.full(len(texts), 1 << 30))
    assert stage.cluster([signed], one_by_one)[0] == decided(stage, [whole])[0]


def test_groups_follow_from_the_sizes_alone() -> None:
    assert runs([], 10) == []
    assert runs([4, 6, 1, 30, 0, 10], 10) == [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    assert runs([0, 0], 10) == [range(0, 2)]
    assert Substrings(group_bytes=100).groups([(1, 49), (1, 49), (1, 0)]) == [range(0, 2), range(2, 3)]
    said = Substrings(group_bytes=10**6).plan([(1000, 900_000), (1000, 900_000)])
    assert said == "1.8 MB of text in groups of at most 1.0 MB, 2 in all; a worker needs 4.8 MB for one"
    assert Substrings().plan([]) == "no documents to compare"
    assert memory_bytes(8_000, 0) == 41_000


def test_copies_in_two_groups_are_not_seen() -> None:
    """Three shards of about 90 bytes each; two fit in a group. One of the shards alone is cut between documents."""
    shards = [batch([text + SPAN], i) for i, text in enumerate([A, A, A])]
    assert [len(t) for t in result(Substrings(min_bytes=50, group_bytes=190), shards)[0].values()] == [93, 93]
    one = batch([A + SPAN] * 3)
    kept, dropped, figures = result(Substrings(min_bytes=50, group_bytes=190), [one])
    assert (list(kept), dropped) == (["d0000", "d0002"], ["d0001"])
    assert figures["comparisons"] == 2
    assert len(result(Substrings(min_bytes=50, group_bytes=1), [one])[0]) == 3


def test_no_documents() -> None:
    kept, dropped, figures = result(Substrings(), [batch([]), batch([""]), batch([])])
    assert (kept, dropped) == ({"d0000": ""}, [])
    assert figures["documents"] == 1


def test_a_foreign_decision_is_refused() -> None:
    stage = Substrings(min_bytes=50)
    (decisions,), _ = decided(stage, [batch([A + SPAN, SPAN])])
    with pytest.raises(ClusterError, match=r"decision on d0001 is of another text\. Delete"):
        stage.apply(batch([A + SPAN, SPAN[::-1]]), decisions)


@pytest.mark.parametrize(
    ("texts", "message"),
    [([A], "1 documents fewer"), ([A, B, B], "more documents"), ([A, A], "a document of another size")],
)
def test_other_texts_than_those_signed_are_refused(texts: list[str], message: str) -> None:
    stage = Substrings()
    with pytest.raises(ClusterError, match=message):
        stage.cluster([pa.Table.from_batches([stage.sign(batch([A, B]))])], [batch(texts)])


def test_signatures_of_another_stage_are_refused() -> None:
    signed = pa.Table.from_batches([batch([A])])
    with pytest.raises(ClusterError, match="made with"):
        Substrings().cluster([signed], [batch([A])])


def test_a_group_that_32_bits_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substrings, "MAX_BYTES", 10)
    with pytest.raises(ClusterError, match="too large to compare"):
        repeated([pa.array(["a" * 10])], np.array([10]), np.zeros(1), 5)


def test_kernels_read_and_write_nothing_outside() -> None:
    """Guards of "a" on both sides of every buffer, so that a step too far would find a longer repeat."""
    text = np.full(40, ord("a"), np.uint8)
    inside = text[8 : 8 + 7 + kernels.PADDING]
    data = np.frombuffer(b"aaaaaa" + b"aaaa", np.uint8)
    at = np.array([0, 4], np.int64)
    kernels.place(np.array([3, 6, 8], np.int64), data, at, inside)
    assert bytes(inside) == b"aaa\xffaa\xff" + b"a" * 8
    order = np.array(sorted(range(7), key=lambda i: bytes(inside[i:7])), np.int32)
    marks = np.zeros(3, np.uint8)
    assert kernels.mark_repeats(inside, order, 2, marks[:1]) == 2
    assert marks.tolist() == [0b10010, 0, 0]
    assert kernels.mark_repeats(inside, order, 4, marks[1:2]) == 0
    assert bytes(text[:8]) == bytes(text[-8:]) == b"a" * 8
