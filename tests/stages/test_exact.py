"""Exact duplicates and the 128-bit hash."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datatrove.utils.text import simplify_text
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages.documents import apply_decisions
from gristmill.stages.exact import Exact, normalise_urls, union_equal
from gristmill.stages.kernels import cluster, hashing
from gristmill.stages.signatures import ClusterError

MASK = 2**64 - 1


def batch(texts: list[str], **columns: Any) -> pa.RecordBatch:
    ids = pa.array([f"d{i:04d}" for i in range(len(texts))], pa.string())
    base = {"doc_id": ids, "source": pa.array(["web"] * len(texts), pa.string())}
    base |= {name: pa.nulls(len(texts), pa.string()) for name in ("dump", "url")}
    return pa.RecordBatch.from_pydict({**base, "text": pa.array(texts, pa.string()), **columns})


def removed(stage: Exact, batches: list[pa.RecordBatch]) -> set[str]:
    decisions, _ = stage.cluster([pa.Table.from_batches([stage.sign(b)]) for b in batches])
    out: set[str] = set()
    for one, table in zip(batches, decisions, strict=True):
        result, met = apply_decisions(stage, one, table)
        assert met == table.num_rows
        out |= set(result.dropped["doc_id"].to_pylist())
    return out


# Hash


def hash128(data: bytes, before: bytes = b"", after: bytes = b"") -> str:
    buffer = np.frombuffer(before + data + after, np.uint8)
    low, high = hashing.hash128(buffer, len(before), len(before) + len(data))
    return f"{int(low):016x}{int(high):016x}"


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", "00000000000000000000000000000000"),
        (b"The quick brown fox jumps over the lazy dog", "e34bbc7bbc071b6c7a433ca9c49a9347"),
        (b"The quick brown fox jumps over the lazy cog", "658ca970ff85269a43fee3eaa68e5c3e"),
    ],
)
def test_published_digests(data: bytes, digest: str) -> None:
    """Digests of MurmurHash3_x64_128 as widely published (Wikipedia's sentence, other implementations' tests)."""
    assert hash128(data) == digest


def murmur(data: bytes) -> str:
    def rotate(x: int, n: int) -> int:
        return (x << n | x >> 64 - n) & MASK

    def final(k: int) -> int:
        k = (k ^ k >> 33) * 0xFF51AFD7ED558CCD & MASK
        k = (k ^ k >> 33) * 0xC4CEB9FE1A85EC53 & MASK
        return k ^ k >> 33

    c1, c2 = 0x87C37B91114253D5, 0x4CF5AD432745937F
    h1 = h2 = 0
    whole = len(data) // 16 * 16
    for i in range(0, whole, 16):
        k1, k2 = (int.from_bytes(data[j : j + 8], "little") for j in (i, i + 8))
        h1 ^= rotate(k1 * c1 & MASK, 31) * c2 & MASK
        h1 = ((rotate(h1, 27) + h2) * 5 + 0x52DCE729) & MASK
        h2 ^= rotate(k2 * c2 & MASK, 33) * c1 & MASK
        h2 = ((rotate(h2, 31) + h1) * 5 + 0x38495AB5) & MASK
    tail = data[whole:]
    h2 ^= rotate(int.from_bytes(tail[8:], "little") * c2 & MASK, 33) * c1 & MASK
    h1 ^= rotate(int.from_bytes(tail[:8], "little") * c1 & MASK, 31) * c2 & MASK
    h1, h2 = h1 ^ len(data), h2 ^ len(data)
    h1 = (h1 + h2) & MASK
    h2 = (h2 + h1) & MASK
    h1, h2 = final(h1), final(h2)
    h1 = (h1 + h2) & MASK
    return f"{h1:016x}{(h2 + h1) & MASK:016x}"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=70), st.binary(max_size=9), st.binary(max_size=9))
def test_hash_equals_slow_python_between_guard_bytes(data: bytes, before: bytes, after: bytes) -> None:
    assert hash128(data, before, after) == murmur(data)


# Stage


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("aAé́ .1中"), max_size=4), max_size=25), st.sampled_from(["text", "normalized"]))
def test_groups_are_those_of_equal_keys(texts: list[str], by: str) -> None:
    groups = defaultdict(list)
    for i, text in enumerate(texts):
        key = text
        if by == "normalized":
            key = " ".join(simplify_text(text).replace("中", " 中 ").split())
        if key or by == "text":
            groups[key].append(f"d{i:04d}")
    expected = {one for group in groups.values() for one in group[1:]}
    assert removed(Exact(by=by, keep="first"), [batch(texts)]) == expected


def test_worked_example() -> None:
    whole = batch(["a b", "A  B!", "a b", "c", "", "?"])
    stage = Exact(by="normalized")
    decisions, figures = stage.cluster([pa.Table.from_batches([stage.sign(whole)])])
    assert decisions[0].to_pylist() == [
        {"doc_id": "d0000", "reason": "exact_duplicate", "exact.cluster": "d0001", "exact.copies": 3.0},
        {"doc_id": "d0001", "reason": None, "exact.cluster": "d0001", "exact.copies": 3.0},
        {"doc_id": "d0002", "reason": "exact_duplicate", "exact.cluster": "d0001", "exact.copies": 3.0},
    ]
    assert figures == {
        "documents": 6,
        "clusters": 1,
        "removed": 2,
        "removed_for_older": 0,
        "sizes": {"3": 1},
        "biggest": [{"cluster": "d0001", "size": 3, "doc_ids": ["d0001", "d0000", "d0002"]}],
        "not_comparable": 2,
    }
    assert removed(Exact(keep="first"), [whole]) == {"d0002"}


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://www.Example.com/a/B", "https://example.com/a/B/"),
        ("http://example.com:80/a", "https://example.com:443/a#part"),
        ("https://me@example.com/?q=1", "example://example.com/?q=1"),
        ("  //example.com ", "https://example.com/"),
    ],
)
def test_addresses_that_are_the_same(url: str, same: str) -> None:
    one, two = normalise_urls(pa.array([url, same])).to_pylist()
    assert one == two


def test_addresses_without_anything_in_them() -> None:
    stage = Exact(by="url", keep="first")
    assert removed(stage, [batch(["v", "w", "x"], url=pa.array(["", "", "  "]))]) == set()


@pytest.mark.parametrize(
    ("values", "gone", "missing"),
    [
        (pa.array(["x", "y", "x", None, None, "", ""]), {"d0002"}, 4),
        (pa.array([1, 2, 1, None, None, 0, 0]), {"d0002", "d0006"}, 2),
        (pa.array([1.5, float("nan"), 1.5, float("nan"), None, 0.0, 2.0]), {"d0002"}, 3),
    ],
)
def test_any_column(values: pa.Array, gone: set[str], missing: int) -> None:
    """Strings, whole numbers, numbers; what is missing, empty or no number is never merged, and counted."""
    stage = Exact(by="column", column="site.id", keep="first")
    assert "site.id" in stage.needs
    whole = batch(list("abcdefg"), **{"site.id": values})
    assert removed(stage, [whole]) == gone
    _, figures = stage.cluster([pa.Table.from_batches([stage.sign(whole.select(["doc_id", *stage.needs]))])])
    assert figures["not_comparable"] == missing


def test_a_key_of_the_metadata() -> None:
    stage = Exact(by="column", column="metadata.isbn", keep="first")
    assert stage.needs == ("text", "source", "dump", "metadata")
    metadata = ['{"isbn": "7"}', '{"isbn": 7.0}', '{"isbn": 7}', '{"isbn": [7]}', '{"isbn": [7]}', "{}", "{}", None]
    metadata += ['{"isbn": true}', '{"isbn": true}', '{"isbn": 7.5}', '{"isbn": ""}', '{"isbn": ""}']
    whole = batch([str(i) for i in range(len(metadata))], metadata=pa.array(metadata))
    assert removed(stage, [whole]) == {"d0001", "d0002"}
    _, figures = stage.cluster([pa.Table.from_batches([stage.sign(whole)])])
    assert figures["not_comparable"] == 9


def test_a_column_that_cannot_be_compared_is_an_error() -> None:
    whole = batch(["a"], flags=pa.array([True]))
    with pytest.raises(ValueError, match=r"there is no column isbn\. These documents have .*metadata\.isbn"):
        Exact(by="column", column="isbn").sign(whole)
    with pytest.raises(ValueError, match="flags is of type bool; strings and numbers can be compared"):
        Exact(by="column", column="flags").sign(whole)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"by": "column"}, "by: column and column: NAME go together"),
        ({"column": "isbn"}, "by: column and column: NAME go together"),
        ({"normalize": {"numbers": False}}, "normalize says what by: normalized does not look at; by is text"),
        ({"by": "normalized", "normalize": {"number": False}}, "Extra inputs"),
    ],
)
def test_wrong_settings(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Exact(**given_)


@pytest.mark.parametrize(
    ("switch", "other"),
    [
        ("lowercase", "A b 1, é"),
        ("numbers", "a b 2, é"),
        ("punctuation", "a b 1. é"),
        ("diacritics", "a b 1, e"),
        ("whitespace", "a  b 1, é"),
    ],
)
def test_each_part_of_the_normalisation_can_be_switched_off(switch: str, other: str) -> None:
    """The other text differs in one respect: the same document, unless that respect counts."""
    whole = batch(["a b 1, é", other, "a b 1, é"])
    on, off = Exact(by="normalized", keep="first"), Exact(by="normalized", keep="first", normalize={switch: False})
    assert removed(on, [whole]) == {"d0001", "d0002"}
    assert removed(off, [whole]) == {"d0002"}
    assert on.described() != off.described()


def test_a_document_of_white_space_is_never_merged() -> None:
    stage = Exact(by="normalized", normalize={"whitespace": False})
    assert removed(stage, [batch([" ", " ", "\n\n", "\n\n", "a ", "a "])]) == {"d0005"}


def test_addresses_that_differ() -> None:
    urls = ["http://a.com/x", "http://a.com/X", "http://a.com/x?q", "http://a.com:8080/x", "http://b.com/x"]
    assert len(set(normalise_urls(pa.array(urls)).to_pylist())) == len(urls)
    assert normalise_urls(pa.array([None], pa.string())).to_pylist() == [None]


def test_documents_without_an_address_stay() -> None:
    urls = pa.array(["http://a/b", None, None, "https://A/b/"])
    stage = Exact(by="url", keep="first")
    assert removed(stage, [batch(["w", "x", "y", "z"], url=urls)]) == {"d0003"}
    _, figures = stage.cluster([pa.Table.from_batches([stage.sign(batch(["w", "x", "y", "z"], url=urls))])])
    assert figures["not_comparable"] == 2


def test_needs_name_the_address_where_it_is_compared() -> None:
    assert Exact.needs == Exact(by="normalized").needs == ("text", "source", "dump")
    stage = Exact(by="url", keep="earliest")
    assert stage.needs == ("text", "source", "dump", "date", "url")
    stage.sign(batch(["a"], url=["x"], date=["2024"], other=[1]).select(["doc_id", *stage.needs]))


def test_half_a_hash_is_not_a_hash() -> None:
    """Rows 0, 1, 3 share the lower 64 bits; only 0 and 3 share all 128."""
    parent = np.arange(5, dtype=np.uint32)
    low, high = np.array([7, 7, 8, 7, 9], np.uint64), np.array([1, 2, 1, 1, 1], np.uint64)
    order = np.argsort(low, kind="stable").astype(np.uint32)
    union_equal(low[order], order, lambda rows: high[rows], parent)
    cluster.flatten(parent)
    assert parent.tolist() == [0, 1, 2, 0, 4]


@pytest.mark.parametrize("keep", ["longest", "first"])
def test_result_depends_neither_on_shards_nor_on_order(keep: str) -> None:
    rng = random.Random(1)
    texts = [rng.choice(["a b", "A b", "c", "C.", "d e f", "中", "x" * rng.randrange(9)]) for _ in range(120)]
    stage = Exact(by="normalized", keep=keep)
    whole = batch(texts)
    expected = removed(stage, [whole])
    for seed in range(3):
        order = list(range(len(texts)))
        random.Random(seed).shuffle(order)
        mixed = whole.take(pa.array(order))
        assert removed(stage, [mixed.slice(0, 50), mixed.slice(50, 0), mixed.slice(50)]) == expected


def test_scope_keeps_sources_apart() -> None:
    whole = batch(["a", "a", "a"], source=pa.array(["x", "y", "x"]))
    assert removed(Exact(scope="source", keep="first"), [whole]) == {"d0002"}


def test_empty_corpora_and_doubled_ids() -> None:
    stage = Exact()
    assert len(stage.cluster([])[0]) == 0
    empty = pa.Table.from_batches([stage.sign(batch([]))])
    assert stage.cluster([empty])[0][0].num_rows == 0
    twice = pa.Table.from_batches([stage.sign(batch(["a", "b"], doc_id=["x", "x"]))])
    with pytest.raises(ClusterError, match=r"more than once, for example \['x'\]"):
        stage.cluster([twice])
