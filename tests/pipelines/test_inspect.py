"""Looking at documents: the right ones, the same ones, shown without harm."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gristmill.pipelines.inspect import (
    Filter,
    Range,
    as_json_lines,
    inspect,
    own_measures,
    pick,
    render,
    spread,
    visible,
)
from gristmill.pipelines.open_run import RunError, open_run

sys.path.append(str(Path(__file__).parent))
from fake_run import FakeRun


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    extra = ("\x1b[2J\x1b]0;owned\x07 evil \u202etxt", "ten words " * 5)
    return open_run(FakeRun(extra_texts=extra).build(tmp_path_factory.mktemp("run") / "run"))


@pytest.fixture(scope="module")
def dropped(run):
    return ds.dataset(Path(run.path) / "01-extract/dropped").to_table().to_pylist()


def ids(documents):
    return {d["doc_id"] for d in documents}


def test_dropped_documents_of_a_reason(run, dropped):
    found = inspect(run, reason="too_few_words", n=1000)
    assert ids(found) == ids(d for d in dropped if "too_few_words" in d["reasons"])
    assert all(d["stage"] == "fake_quality" and d["segment"] == "01-extract" for d in found)
    one = found[0]
    (same,) = (d for d in dropped if d["doc_id"] == one["doc_id"])
    assert one["text"] == same["text"]
    assert one["measures"]["fake_quality.words"] == len(one["text"].split()) < 20


def test_a_second_reason_counts_as_well(tmp_path):
    folder = tmp_path / "01-read/dropped"
    folder.mkdir(parents=True)
    rows = [
        {"doc_id": "a", "source": "s", "stage": "q", "reasons": ["short", "ugly"], "text": "x"},
        {"doc_id": "b", "source": "s", "stage": "q", "reasons": ["short"], "text": None},
        {"doc_id": "c", "source": "s", "stage": "q", "reasons": ["ugly"], "text": "z"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "part-00000.parquet")
    run = open_run(tmp_path)
    found = pick(run, run.parts("dropped"), Filter(reason="ugly"), 9, 0)
    assert ids(found) == {"a", "c"}
    found = pick(run, run.parts("dropped"), Filter(reason="short"), 1, 0)
    assert ids(found) == {"a"}, "a document with its text comes first"
    assert pick(run, run.parts("dropped"), Filter(language="en"), 9, 0) == []


def test_conditions_are_all_met(run, dropped):
    found = inspect(run, stage="fake_quality", source="news", n=1000)
    assert ids(found) == ids(d for d in dropped if d["stage"] == "fake_quality" and d["source"] == "news")
    found = inspect(run, kept=True, text="MILL", source="docs", n=1000)
    assert found
    assert all("mill" in d["text"].lower() and d["source"] == "docs" and d["reasons"] == [] for d in found)
    assert ids(found) == ids(
        d
        for d in run.kept().to_table(columns=["doc_id", "source", "text"]).to_pylist()
        if d["source"] == "docs" and "mill" in d["text"].lower()
    )
    assert {d["language"] for d in inspect(run, kept=True, language="ar", n=5)} == {"ar"}


def test_a_duplicate_names_the_document_that_stays(run):
    found = inspect(run, stage="exact", n=1)[0]
    assert found["labels"] == {"exact.cluster": "docs-0-5"}
    assert found["measures"]["exact.copies"] > 1
    assert "exact.cluster" in rendered([found])


def rendered(documents):
    out = io.StringIO()
    render(documents, Console(file=out, width=100, color_system=None))
    return out.getvalue()


def test_kept_by_a_stage_is_what_its_segment_kept(run):
    assert len(inspect(run, stage="fake_quality", kept=True, n=10_000)) == run.kept("01-extract").count_rows()
    assert len(inspect(run, kept=True, n=10_000)) == run.kept().count_rows()


def test_the_choice_depends_on_the_seed_and_on_nothing_else(run):
    first = inspect(run, n=5, seed=1)
    assert first == inspect(run, n=5, seed=1)
    assert ids(first) != ids(inspect(run, n=5, seed=2))
    parts = run.parts("dropped")
    forward, backward = (pick(run, order, Filter(), 5, 1) for order in (parts, parts[::-1]))
    assert forward == backward
    assert first == inspect(run, n=12, seed=1)[:5]


def test_each_group_gets_its_own(run):
    by_stage = pick(run, run.parts("dropped"), Filter(), 2, 0, lambda t: t["stage"].to_pylist())
    counts = {s: [d["stage"] for d in by_stage].count(s) for s in ("read", "fake_language", "fake_quality", "exact")}
    assert counts == {"read": 2, "fake_language": 2, "fake_quality": 2, "exact": 2}
    assert [d["rank"] for d in by_stage] == [0] * 4 + [1] * 4


def test_wrong_names_are_answered_with_the_right_ones(run):
    with pytest.raises(RunError, match=r"no stage 'nope'. It has: read, fake_language"):
        inspect(run, stage="nope")
    with pytest.raises(RunError, match=r"nothing for 'nope'. Reasons: .*too_few_words"):
        inspect(run, reason="nope")
    with pytest.raises(RunError, match="Stage fake_language drops nothing for 'too_few_words'"):
        inspect(run, stage="fake_language", reason="too_few_words")
    with pytest.raises(RunError, match=r"no source 'nope'. It has: docs, forum, news"):
        inspect(run, source="nope")
    with pytest.raises(RunError, match="kept document has no reason"):
        inspect(run, kept=True, reason="too_few_words")
    with pytest.raises(RunError, match="n is 0"):
        inspect(run, n=0)


def test_an_empty_run_has_nothing_to_show(tmp_path):
    assert inspect(open_run(tmp_path)) == []
    assert inspect(open_run(tmp_path), kept=True) == []


def test_terminals_get_no_commands_from_documents(run):
    out = io.StringIO()
    render(inspect(run, text="evil", n=3), Console(file=out, width=100, color_system=None))
    text = out.getvalue()
    assert "fake_language: unsure_language" in text
    assert "<U+001B>[2J<U+001B>]0;owned<U+0007> evil <U+202E>txt" in text
    assert "\x1b" not in text


def test_the_measures_of_the_stage_that_dropped_it_are_shown(run):
    (found,) = inspect(run, reason="too_few_words", n=1)
    assert set(own_measures(found)) == {"fake_quality.words", "fake_quality.mean_word_length"}
    (language,) = inspect(run, reason="unsure_language", n=1)
    assert set(own_measures(language)) == {"language_score"}  # in a column of no stage's name
    (kept,) = inspect(run, kept=True, n=1)
    assert set(own_measures(kept)) == set(kept["measures"]) > {"language_score"}
    assert "language_score" not in rendered([found])


def test_markup_of_the_terminal_library_is_text(run):
    out = io.StringIO()
    found = {**inspect(run, n=1)[0], "text": "[bold red]x[/bold red] " * 3, "url": "http://[/]"}
    render([found], Console(file=out, width=100, color_system=None))
    assert "[bold red]x[/bold red]" in out.getvalue()


def test_long_and_missing_texts_are_told(run):
    out = io.StringIO()
    one = inspect(run, n=1)[0]
    shown = [{**one, "text": "a" * 5000}, {**one, "text": None}]
    render(shown, Console(file=out, width=100, color_system=None), max_chars=100)
    assert "... 4,900 more characters" in out.getvalue()
    assert "only a sample for each reason keeps it" in out.getvalue()
    render([], Console(file=out, width=100))
    assert "No document matches" in out.getvalue()


def test_json_lines_are_json(run):
    found = inspect(run, n=20)
    lines = as_json_lines(found).splitlines()
    assert [json.loads(line) for line in lines] == found


@given(st.text())
def test_visible_text_has_no_control_characters(text):
    shown = visible(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 for c in shown)
    if text.isalnum() and text.isascii():
        assert shown == text


@given(st.integers(0, 300), st.integers(1, 50))
def test_spread(count, limit):
    found = spread(count, limit)
    assert len(found) == min(count, limit)
    assert found == sorted(set(found))
    assert all(0 <= i < count for i in found)


def test_spread_by_hand():
    assert spread(10, 2) == [2, 7]
    assert spread(3, None) == [0, 1, 2]


def test_ranges_of_measures(run, dropped):
    found = inspect(run, ranges=[Range("fake_quality.words", 5, 12)], n=1000)
    assert ids(found) == ids(
        d for d in dropped if d["fake_quality.words"] is not None and 5 <= d["fake_quality.words"] <= 12
    )
    found = inspect(
        run, kept=True, ranges=[Range.parse("fake_quality.words=500:"), Range("language_score", None, 0.6)], n=99
    )
    rows = run.kept().to_table(columns=["doc_id", "fake_quality.words", "language_score"]).to_pylist()
    assert ids(found) == ids(d for d in rows if d["fake_quality.words"] >= 500 and d["language_score"] <= 0.6)
    assert found


def test_ranges_are_read_and_checked(run):
    assert Range.parse("a.b=1:2.5") == Range("a.b", 1, 2.5)
    assert Range.parse("a.b=:-3") == Range("a.b", None, -3)
    for text in ("a.b", "a.b=3", "a.b=x:", "=1:2"):
        with pytest.raises(RunError, match="is no range of a measure"):
            Range.parse(text)
    with pytest.raises(RunError, match=r"no measure 'fake_quality.wrods'. It has: fake_quality.words"):
        inspect(run, ranges=[Range("fake_quality.wrods", 1)])


def test_words_may_stand_in_the_address(run):
    rows = run.kept().to_table(columns=["doc_id", "source", "url", "text"])
    expected = ids(d for d in rows.to_pylist() if "korn.de" in (d["url"] or "") or "korn.de" in d["text"].lower())
    found = Filter(text="KORN.de", address=True).matches(rows)
    assert {rows["doc_id"][i].as_py() for i in found.nonzero()[0]} == expected != set()
    assert not Filter(text="korn.de").matches(rows).any()
