"""Copies of paragraphs, and lines that a whole site has."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import parts as kernels
from gristmill.stages.kernels.fold import fold
from gristmill.stages.kernels.shingles import normalised
from gristmill.stages.lines_across import LinesAcross, domains_of
from gristmill.stages.paragraphs import Paragraphs
from gristmill.stages.parts import split
from gristmill.stages.signatures import ClusterError

Shards = list[pa.RecordBatch]


def batch(texts: list[str], start: int = 0, **columns: Any) -> pa.RecordBatch:
    n = len(texts)
    base = {"doc_id": [f"d{i:04d}" for i in range(start, start + n)], "source": ["web"] * n}
    nothing = pa.nulls(n, pa.string())
    return pa.RecordBatch.from_pydict(
        {**base, "dump": nothing, "url": nothing, "text": pa.array(texts, pa.string()), **columns}
    )


def result(stage: Any, shards: Shards) -> tuple[dict[str, str], list[str], dict[str, Any]]:
    """-> what is kept, by doc_id; the documents dropped; figures"""
    tables = [pa.Table.from_batches([stage.sign(b)]) for b in shards]
    decisions, figures = stage.cluster(tables)
    kept: dict[str, str] = {}
    dropped: list[str] = []
    for shard, table in zip(shards, decisions, strict=True):
        found, met = stage.apply(shard, table)
        assert met == table.num_rows
        kept |= dict(zip(found.kept["doc_id"].to_pylist(), found.kept["text"].to_pylist(), strict=True))
        dropped += found.dropped["doc_id"].to_pylist()
    return kept, dropped, figures


def oracle(texts: list[str], breaks: str = "\n", keep: str = "first") -> list[str]:
    """The same with dicts, over documents in the order of who keeps a paragraph: longest first, then by doc_id."""
    pieces = {i: _pieces(text, breaks) for i, text in enumerate(texts)}
    names = {i: [normalised(piece, fold()) for piece in of] for i, of in pieces.items()}
    counts = Counter(name for of in names.values() for name in of if name.strip())
    seen: set[str] = set()
    out = dict.fromkeys(range(len(texts)), "")
    for i in sorted(pieces, key=lambda i: (-len(texts[i]), i)):
        left = []
        for piece, name in zip(pieces[i], names[i], strict=True):
            gone = bool(name.strip()) and (name in seen if keep == "first" else counts[name] > 1)
            seen.add(name)
            left.append(None if gone else piece)
        text = "".join(piece for piece in left if piece is not None)
        out[i] = text.rstrip("\n") if left and left[-1] is None else text
    return [out[i] for i in range(len(texts))]


def _pieces(text: str, breaks: str) -> list[str]:
    out, at = [], 0
    while at < len(text):
        end = text.find(breaks, at)
        end = len(text) if end < 0 else end + len(breaks)
        while end < len(text) and text[end] == "\n" and breaks == "\n\n":
            end += 1
        out.append(text[at:end])
        at = end
    return out


def test_three_documents_by_hand() -> None:
    """The longest keeps what it shares. "Menu: home, about" differs in case and marks only."""
    texts = ["Menu: Home, About\nThe first story is long enough.\n", "menu home about\nAnother one.\n", "Another one."]
    kept, dropped, figures = result(Paragraphs(), [batch(texts)])
    assert kept == {"d0000": texts[0], "d0001": "Another one.\n"}
    assert dropped == ["d0002"]
    assert (figures["paragraphs"], figures["removed"], figures["documents_edited"]) == (5, 2, 2)


def test_as_ccnet_no_copy_stays() -> None:
    kept, dropped, _ = result(Paragraphs(keep="none"), [batch(["a menu\nOne.", "a menu\nTwo.", "a menu"])])
    assert kept == {"d0000": "One.", "d0001": "Two."}
    assert dropped == ["d0002"]


def test_blank_lines_can_end_a_paragraph() -> None:
    texts = ["one\ntwo\n\nthree here\n", "one\ntwo\n\n\nfour", "two"]
    kept, _, _ = result(Paragraphs(unit="paragraph"), [batch(texts)])
    assert kept == {"d0000": texts[0], "d0001": "four", "d0002": "two"}


def test_short_paragraphs_can_be_left_alone() -> None:
    texts = ["Introduction\nthree words here", "Introduction\nthree words here\nmore and more words"]
    kept, _, _ = result(Paragraphs(min_words=2), [batch(texts)])
    assert kept == {"d0000": "Introduction", "d0001": texts[1]}


def test_copies_within_a_document_count_and_nothing_else_changes() -> None:
    text = "ä line\n\n\n  ä  line!\nrest\n"
    kept, _, _ = result(Paragraphs(), [batch([text])])
    assert kept == {"d0000": "ä line\n\n\nrest\n"}


def test_groups_of_shards_are_apart() -> None:
    shards = [batch(["a copy"], 0), batch(["a copy"], 1), batch(["a copy"], 2)]
    assert len(result(Paragraphs(), shards)[0]) == 1
    assert len(result(Paragraphs(group_shards=2), shards)[0]) == 2


def test_the_policy_says_who_keeps_a_paragraph() -> None:
    one = batch(["a copy", "a copy\nand more"], date=["2020", "2021"])
    stage = Paragraphs(policy="earliest")
    assert "date" in stage.needs
    assert result(stage, [one])[0] == {"d0000": "a copy", "d0001": "and more"}


def test_sources_can_be_apart() -> None:
    one = batch(["a copy", "a copy", "a copy"], source=["a", "a", "b"])
    assert set(result(Paragraphs(scope="source"), [one])[0]) == {"d0000", "d0002"}


LINE = st.sampled_from(
    ["home", "Home!", "日本語", "🙂", "a b c", "A  b c", "", " ", "2019", "1", "é", "\u0301", "x" * 40]
)
TEXTS = st.lists(st.lists(LINE, max_size=6).map("\n".join), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.sampled_from(["first", "none"]), st.sampled_from(["line", "paragraph"]), st.data())
def test_equals_dicts_for_any_sharding(texts: list[str], keep: Any, unit: Any, data: st.DataObject) -> None:
    stage = Paragraphs(keep=keep, unit=unit, min_chars_left=0, sort_bytes=1 << 10)
    expected = {f"d{i:04d}": t for i, t in enumerate(oracle(texts, "\n" if unit == "line" else "\n\n", keep))}
    cut = data.draw(st.integers(0, len(texts)))
    whole = batch(texts)
    for shards in ([whole], [whole.slice(0, cut), whole.slice(cut)], [whole.slice(cut), whole.slice(0, cut)]):
        kept, dropped, _ = result(stage, shards)
        assert kept == expected
        assert dropped == []


def test_many_passes_give_the_same() -> None:
    rng = random.Random(0)
    texts = ["\n".join(f"line {rng.randrange(300)}" for _ in range(20)) for _ in range(200)]
    shards = [batch(texts[i : i + 50], i) for i in range(0, 200, 50)]
    few = result(Paragraphs(), shards)
    many = result(Paragraphs(sort_bytes=2 << 10), shards)
    assert few == many
    left = [line for text in few[0].values() for line in text.split("\n")]
    assert len(left) == len(set(left))


def test_a_foreign_decision_is_refused() -> None:
    stage = Paragraphs()
    decisions, _ = stage.cluster([pa.Table.from_batches([stage.sign(batch(["a\nb", "a"]))])])
    with pytest.raises(ClusterError, match=r"d0001 has 3 parts, its decision is of a text with 1\. Delete"):
        stage.apply(batch(["a\nb", "a\nb\nc"]), decisions[0])


def test_signatures_of_other_settings_are_refused() -> None:
    signed = pa.Table.from_batches([Paragraphs(unit="line").sign(batch(["a"]))])
    with pytest.raises(ClusterError, match="made with"):
        Paragraphs(unit="paragraph").cluster([signed])


@settings(deadline=None)
@given(st.lists(st.text(alphabet="a\n\u0301é🙂", max_size=30), max_size=8), st.sampled_from([1, 2]))
def test_parts_are_the_whole_and_slices_do_not_matter(texts: list[str], breaks: int) -> None:
    column = pa.array(["before", *texts, "after"], pa.string()).slice(1, len(texts))
    first, starts = split(column, breaks)
    data = b"".join(text.encode() for text in texts)
    found = [data[a - starts[0] : b - starts[0]] for a, b in pairwise(starts)]
    assert b"".join(found) == data
    expected = [_pieces(text, "\n" * breaks) for text in texts]
    assert np.diff(first).tolist() == [len(pieces) for pieces in expected]
    assert [piece.decode() for piece in found] == [piece for pieces in expected for piece in pieces]


def test_kernels_read_nothing_outside() -> None:
    guard = b"\n\n"
    data = np.frombuffer(guard + b"a\nb" + guard, np.uint8)
    offsets, counts = np.array([2, 5], np.int64), np.empty(1, np.int64)
    kernels.count_parts(offsets, data, 1, counts)
    assert counts[0] == 2


# Lines of a site


def test_lines_of_one_site_by_hand() -> None:
    """Of four pages of a.com three have the menu: more than two may have it. b.com is another site."""
    urls = ["https://a.com/1", "https://www.a.com/2", "http://A.com:80/3", "https://a.com/4"]
    texts = ["Home | About\nOne", "home about\nTwo", "Home - About", "Four\nOne"]
    pages = batch([*texts, "Home | About", "Home | About"], url=[*urls, "https://b.com/", None])
    kept, dropped, figures = result(LinesAcross(max_documents=2), [pages])
    assert kept == {
        "d0000": "One",
        "d0001": "Two",
        "d0003": "Four\nOne",
        "d0004": "Home | About",
        "d0005": "Home | About",
    }
    assert dropped == ["d0002"]
    assert (figures["removed"], figures["without_domain"]) == (3, 1)
    (commonest,) = figures["commonest"]
    assert commonest == {"domain": "a.com", "documents": 3, "shard": 0, "doc_id": "d0000", "line": 0}
    shown = LinesAcross().illustrate(figures, lambda shard, ids: {"d0000": texts[0]})["commonest"]
    assert shown == [{"domain": "a.com", "documents": 3, "text": "Home | About"}]


def test_a_line_twice_on_one_page_is_one_document() -> None:
    pages = batch(["menu\nmenu\nmenu", "menu"], url=["https://a.com/1", "https://a.com/2"])
    assert result(LinesAcross(max_documents=2), [pages])[0] == {"d0000": "menu\nmenu\nmenu", "d0001": "menu"}


def test_a_share_of_a_large_site() -> None:
    pages = batch([f"menu\ntext {chr(97 + i)}" for i in range(10)], url=["https://a.com/"] * 10)
    assert result(LinesAcross(max_documents=2, max_share=1.0), [pages])[2]["removed"] == 0
    assert result(LinesAcross(max_documents=2, max_share=0.9), [pages])[2]["removed"] == 10


@settings(deadline=None, max_examples=40)
@given(TEXTS, st.integers(1, 3), st.data())
def test_lines_equal_dicts_for_any_sharding(texts: list[str], most: int, data: st.DataObject) -> None:
    sites = [data.draw(st.sampled_from(["https://a.com/", "https://b.com/x", None])) for _ in texts]
    having: dict[tuple[str, str], set[int]] = defaultdict(set)
    for i, (text, site) in enumerate(zip(texts, sites, strict=True)):
        for line in text.split("\n"):
            if site is not None and (name := normalised(line, fold()).strip()):
                having[site, name].add(i)
    expected = {}
    for i, (text, site) in enumerate(zip(texts, sites, strict=True)):
        gone = [len(having.get((site or "", normalised(line, fold()).strip()), ())) > most for line in text.split("\n")]
        pieces = _pieces(text, "\n")
        left = "".join(piece for piece, is_gone in zip(pieces, gone, strict=False) if not is_gone)
        expected[f"d{i:04d}"] = left.rstrip("\n") if pieces and gone[len(pieces) - 1] else left
    whole = batch(texts, url=pa.array(sites, pa.string()))
    cut = data.draw(st.integers(0, len(texts)))
    for shards in ([whole], [whole.slice(cut), whole.slice(0, cut)]):
        kept, _, _ = result(LinesAcross(max_documents=most, min_chars_left=0, sort_bytes=1 << 10), shards)
        assert kept == expected


def test_registered_domains() -> None:
    urls = ["https://www.news.example.co.uk/a", "http://user@localhost:80/", "ftp://1.2.3.4/", None, "no address"]
    assert domains_of(pa.array(urls)).to_pylist() == ["example.co.uk", "localhost", "1.2.3.4", None, None]
