"""Perplexity of paragraphs: by hand on a tiny model, what is removed from a text, what becomes of the document."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages.documents import Result
from gristmill.stages.kernels import ngram_table
from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.perplexity import Perplexity
from gristmill.stages.perplexity_paragraphs import Paragraphs, lines_of, replaced


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of three words, each as likely as the end of a line: 1/4, whatever stands before; 1/100 for others.

    Of English and of French; other languages have none."""
    folder = tmp_path_factory.mktemp("uniform")
    text, ends = np.frombuffer(b"<unk><s></s>abc", np.uint8).copy(), np.array([5, 8, 12, 13, 14, 15], np.int64)
    prob = np.array([0.01, 0, 0.25, 0.25, 0.25, 0.25], np.float32)
    table = np.zeros((ngram_table.slots(6), 2), np.uint64)
    nothing = np.zeros(0, np.int32)
    words = (np.arange(6, dtype=np.int32), *[nothing] * 5)
    keys = ngram_table.word_keys(text, ends, 6)
    ngram_table.enter(1, words, words, prob, np.ones(6, np.float32), keys, table, table.view(np.float32))
    np.save(folder / "lm.npy", table)
    entry = {"table": "lm.npy", "percentiles": [float(x) for x in range(2, 103)]}
    description = {"kind": "kenlm", "format": 1, "order": 2, "languages": {"en": entry, "fr": entry}}
    (folder / "model.json").write_text(json.dumps(description))
    return str(folder)


def batch(texts: list[str], languages: list[str | None] | None = None) -> pa.RecordBatch:
    columns = {"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())}
    return pa.RecordBatch.from_pydict({**columns, "language": pa.array(languages or ["en"] * len(texts), pa.string())})


def everything(result: Result) -> list[dict[str, object]]:
    rows = [*result.kept.to_pylist(), *result.dropped.to_pylist()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


Z = (4 * 100) ** 0.5  # one unknown word at 1/100 and the end of the line at 1/4: 20


def test_worked_example(uniform: str) -> None:
    """`a b` has 4, `z` has 20, `a z` the cube root of 4 * 100 * 4. Of the first text's 3 + 1 characters in paragraphs
    the one of `z` is above 5; the document has three words and two line ends: the fifth root of 4^4 * 100."""
    stage = Perplexity(model=uniform, unit="paragraph", max_paragraph_perplexity=5)
    result = stage(batch(["a b\n\nz\n", "a z", "a b", "", " \n\n"]))
    assert list(result.kept.schema.names) == [
        "doc_id",
        "text",
        "language",
        "perplexity.perplexity",
        "perplexity.percentile",
        "perplexity.bucket",
        "perplexity.worst_paragraph",
        "perplexity.paragraphs_above",
    ]
    assert list(stage.adds) == result.kept.schema.names[3:]
    assert [m.column for m in stage.measures] == [name for name in stage.adds if name != "perplexity.bucket"]
    found = result.kept
    assert found["perplexity.worst_paragraph"].to_pylist() == [
        pytest.approx(Z, rel=1e-5),
        pytest.approx(1600 ** (1 / 3), rel=1e-5),
        pytest.approx(4, rel=1e-5),
        None,
        None,
    ]
    assert found["perplexity.paragraphs_above"].to_pylist() == [0.25, 1, 0, None, None]
    assert found["text"].to_pylist()[0] == "a b\n\nz\n"
    by_document = Perplexity(model=uniform)(batch(["a b\n\nz\n", "a z", "a b", "", " \n\n"])).kept
    assert set(by_document.schema.names).isdisjoint({"perplexity.worst_paragraph", "perplexity.paragraphs_above"})
    for name in ("perplexity.perplexity", "perplexity.percentile"):
        pairs = zip(found[name].to_pylist(), by_document[name].to_pylist(), strict=True)
        assert all(a is b is None or a == pytest.approx(b, rel=1e-12) for a, b in pairs)
    assert found["perplexity.bucket"] == by_document["perplexity.bucket"]
    assert "perplexity.paragraphs_above" not in Perplexity(model=uniform, unit="paragraph").adds


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a b\n\nz\n\nc", "a b\n\nc"),
        ("z\n\na", "a"),
        ("a\nz", "a"),
        ("a\n\nz\n", "a\n"),
        ("a\nz\n \n\t\nz z\n\nb\n\n\nc", "a\nb\n\n\nc"),
        ("\n\na\n", "\n\na\n"),
        ("", ""),
    ],
)
def test_paragraphs_go_with_the_blank_lines_behind_them(uniform: str, text: str, left: str) -> None:
    stage = Perplexity(model=uniform, unit="paragraph", max_paragraph_perplexity=5, remove_paragraphs=True)
    result = stage(batch([text, "a b c"]))
    assert result.dropped.num_rows == 0
    assert result.kept["text"].to_pylist() == [left, "a b c"]


def test_what_is_removed_is_booked(uniform: str) -> None:
    """0 loses one of two paragraphs, 1 all, 2 is over the limit for documents, 3 has no model, 4 loses nothing."""
    stage = Perplexity(
        model=uniform, unit="paragraph", max_paragraph_perplexity=5, remove_paragraphs=True, max_perplexity=15
    )
    texts = batch(["a b c\nz", "z", "z z z\na", "z\nz", "a\nb"], ["en", "fr", "fr", "de", "en"])
    result = stage(texts)
    assert result.kept.to_pydict()["text"] == ["a b c", "z\nz", "a\nb"]
    assert result.dropped["text"].to_pylist() == ["z", "z z z\na"]
    assert result.dropped["reasons"].to_pylist() == [
        ["perplexity_too_high", "no_paragraph_left"],
        ["perplexity_too_high"],
    ]
    assert result.counters["edited_documents"] == 1
    assert result.counters["removed_paragraphs"] == 1
    assert result.counters["only.no_paragraph_left"] == 0
    assert result.kept["perplexity.worst_paragraph"].to_pylist()[1] is None
    ledger = StageLedger(stage="perplexity")
    book(ledger, texts, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert ledger.edited.chars == 2
    assert set(result.kept.schema.names) == set(texts.schema.names) | set(stage.adds)


@given(
    st.lists(st.text(alphabet="az \n", max_size=20), max_size=8),
    st.lists(st.sampled_from(["en", "fr", "de"]), min_size=8, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_it_is_what_a_loop_over_lines_gives(uniform: str, texts: list[str], languages: list[str | None]) -> None:
    """Line by line, each scored as a document of its own."""
    languages = languages[: len(texts)]
    alone = Perplexity(model=uniform)
    stage = Perplexity(model=uniform, unit="paragraph", max_paragraph_perplexity=9, remove_paragraphs=True)
    found = everything(stage(batch(texts, languages)))
    for text, language, row in zip(texts, languages, found, strict=True):
        lines = text.split("\n")
        values = [v or math.nan for v in alone(batch(lines)).kept["perplexity.perplexity"].to_pylist()]
        known = [v for v in values if v == v]
        if language == "de" or not known:
            assert row["perplexity.worst_paragraph"] is None
            assert row["text"] == text
            continue
        assert row["perplexity.worst_paragraph"] == pytest.approx(max(known))
        above = sum(len(line) for line, v in zip(lines, values, strict=True) if v > 9)
        every = sum(len(line) for line, v in zip(lines, values, strict=True) if v == v)
        assert row["perplexity.paragraphs_above"] == pytest.approx(above / every)
        left, gone = [], False
        for line, v in zip(lines, values, strict=True):
            gone = v > 9 if v == v else gone
            if not gone:
                left.append(line)
        if any(v <= 9 for v in known):
            assert row["text"] == "\n".join(left)
        else:
            assert row["reasons"] == ["no_paragraph_left"]


def test_slices_and_batches_do_not_matter(uniform: str) -> None:
    stage = Perplexity(model=uniform, unit="paragraph", max_paragraph_perplexity=5, remove_paragraphs=True)
    texts = batch(["a\nz", "z", "", "b\n\nz\n", "c c"] * 5, ["en", "fr", "de", "fr", None] * 5)
    whole = everything(stage(texts))
    parts = [row for i in range(0, 25, 4) for row in everything(stage(texts.slice(i, 4)))]
    assert parts == whole
    empty = stage(texts.slice(0, 0))
    assert set(stage.adds) <= set(empty.kept.schema.names)
    assert empty.counters["removed_paragraphs"] == 0


def test_parts_of_a_column() -> None:
    lines, document = lines_of(pa.array(["x", "a\n\nb", "", "\n"]).slice(1))
    assert lines.to_pylist() == ["a", "", "b", "", "", ""]
    assert document.tolist() == [0, 0, 0, 1, 2, 2]
    texts = pa.array(["0", "1", "2", "3"])
    parts = [(np.array([3, 0]), pa.array(["d", "a"])), (np.array([1]), pa.array(["b"]))]
    assert replaced(texts, parts).to_pylist() == ["a", "b", "2", "d"]
    none = Paragraphs(0, pa.array([], pa.string()), np.zeros(0, np.int64), np.zeros(0))
    assert len(none.without(1).texts) == len(none.worst()) == len(none.share_above(1)) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_paragraph_perplexity": 5}, "need `unit: paragraph`"),
        ({"remove_paragraphs": True}, "need `unit: paragraph`"),
        ({"unit": "paragraph", "remove_paragraphs": True}, "needs `max_paragraph_perplexity`"),
        ({"unit": "paragraph", "compat": "ccnet"}, "has no paragraphs"),
        ({"unit": "line"}, "'document' or 'paragraph'"),
        ({"unit": "paragraph", "max_paragraph_perplexity": 0}, "greater than 0"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        Perplexity(model=str(tmp_path), **given)
