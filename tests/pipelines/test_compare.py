"""Two runs side by side."""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import wasserstein_distance

from gristmill.pipelines.compare_show import as_json, render
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.report.compare import compare, flat, wasserstein, write_comparison

sys.path.append(str(Path(__file__).parent))
import fake_run
from fake_run import HOSTILE, FakeRun


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same documents, the second time with another limit, which hits documents of 20 to 59 words."""
    root = tmp_path_factory.mktemp("runs")
    first = FakeRun(extra_texts=("the mill " * 15 + HOSTILE,)).build(root / "a")
    quality = fake_run.FakeQuality
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_run, "FakeQuality", lambda: quality(min_words=60))
        patch.setattr(fake_run, "RECIPE", fake_run.RECIPE.replace("min_words: 20", "min_words: 60"))
        second = FakeRun(extra_texts=("the mill " * 15 + HOSTILE,)).build(root / "b")
    return first, second


def test_what_differs(folders):
    first, second = (open_run(f) for f in folders)
    found = compare(first, second)
    assert found["settings"] == [{"setting": "stages.fake_quality.min_words", "a": "20", "b": "60"}]
    rows = {row["stage"]: row for row in found["funnel"]}
    assert rows["exact"]["documents_a"] == first.kept().count_rows()
    assert rows["exact"]["documents_b"] == second.kept().count_rows()
    a, b = (set(ds.dataset(f / "02-exact/kept").to_table()["doc_id"].to_pylist()) for f in folders)
    assert found["documents"]["both"] == len(a & b)
    assert found["documents"]["only_a"]["documents"] == len(a - b) > 0
    assert found["documents"]["only_b"]["documents"] == len(b - a) == 0
    assert found["documents"]["only_a"]["reasons"] == [
        {"stage": "fake_quality", "reason": "too_few_words", "documents": len(a - b)}
    ]
    examples = found["documents"]["only_a"]["examples"]
    assert {d["doc_id"] for d in examples} <= a - b
    assert len(examples) == min(12, len(a - b))
    assert all(20 <= len(d["text"].split()) < 60 for d in examples)
    shifts = {row["measure"]: row for row in found["measures"]}
    assert shifts["language_score"]["read"] == 0
    assert shifts["fake_quality.words"]["read"] == 0
    assert shifts["fake_quality.words"]["kept"] > 10


def test_a_run_and_itself_differ_in_nothing(folders):
    run = open_run(folders[0])
    found = compare(run, run)
    assert found["settings"] == []
    assert found["documents"]["only_a"] == {"documents": 0, "reasons": [], "examples": []}
    assert all(row["kept"] == 0 for row in found["measures"])


def test_runs_with_nothing_in_them(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found["funnel"] == found["measures"] == found["scores"] == []
    assert found["documents"]["both"] == 0
    assert (
        "Neither run has ledgers"
        in Path(write_comparison(tmp_path / "a", tmp_path / "b", tmp_path / "c.html")).read_text()
    )
    with pytest.raises(RunError, match="There is no run folder"):
        write_comparison(tmp_path / "a", tmp_path / "nowhere", tmp_path / "c.html")


def test_documents_the_other_run_never_read(folders, tmp_path):
    (tmp_path / "b").mkdir()
    found = compare(open_run(folders[0]), open_run(tmp_path / "b"))
    (row,) = found["documents"]["only_a"]["reasons"]
    assert (row["stage"], row["reason"]) == ("not there", "the other run did not read it")
    assert [row["documents_b"] for row in found["funnel"]] == [None] * len(found["funnel"])


def test_the_page_escapes_documents(folders, tmp_path):
    html = Path(write_comparison(*folders, tmp_path / "c.html")).read_text("utf-8")
    assert "<img" not in html
    assert html.count("</script>") == 2
    assert "stages.fake_quality.min_words" in html


def test_settings_are_named_with_dots():
    recipe = {
        "sources": {"a": {"files": ["x", "y"]}},
        "stages": [{"url": {"words": []}, "only": ["a"]}, {"url": {"n": 1}}],
    }
    assert flat(recipe) == {
        "sources.a.files": "['x', 'y']",
        "stages.url.words": "[]",
        "stages.url.only": "['a']",
        "stages.url #2.n": "1",
    }


def test_distance_by_hand():
    """All of a moves from the middle of the first bin to the middle of the third."""
    assert wasserstein([0, 1, 2, 3], [0, 4, 0, 0, 0], [0, 0, 0, 2, 0]) == pytest.approx(2)
    assert wasserstein([0, 1], [0, 0, 0], [0, 1, 0]) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=12, max_size=12), st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_distance_equals_scipy_on_points_spread_in_their_bins(a, b):
    edges = [0.0, 1, 2, 3.5, 5, 6, 8, 9, 12, 13, 20]
    a, b = a[: len(edges) + 1], b[: len(edges) + 1]
    found = wasserstein(edges, a, b)
    if not sum(a) or not sum(b):
        assert found is None
        return
    fine = 1000  # points a bin
    inner = [x + (y - x) * (np.arange(fine) + 0.5) / fine for x, y in pairwise(edges)]
    points = [np.full(fine, edges[0]), *inner, np.full(fine, edges[-1])]
    values = np.concatenate(points)
    weights = [np.repeat(np.array(c, dtype=float), fine) for c in (a, b)]
    assert found == pytest.approx(wasserstein_distance(values, values, *weights), abs=2e-3)


def shown(found, examples=3):
    out = io.StringIO()
    render(found, examples, Console(file=out, width=140, color_system=None))
    return out.getvalue()


def test_the_same_in_a_terminal(folders):
    found = compare(*(open_run(f) for f in folders))
    text = shown(found)
    alone = found["documents"]["only_a"]["documents"]
    assert "stages.fake_quality.min_words  20  60" in text
    assert f"Kept by both: {found['documents']['both']}. By A alone: {alone} of" in text
    assert f"fake_quality  too_few_words  {alone:>9}" in text
    assert f"{found['scores'][0]['a']['mean']:.4f}" in text
    assert "fake_quality.words" in text
    assert json.loads(as_json(found)) == found


def test_texts_of_examples_are_harmless_in_a_terminal(folders):
    found = compare(*(open_run(f) for f in folders))
    found["documents"]["only_a"]["examples"][0]["text"] = "\x1b[2J [bold]x[/bold]"
    found["settings"][0]["b"] = "\x1b[31m"
    text = shown(found)
    assert "\x1b" not in text
    assert "<U+001B>[2J [bold]x[/bold]" in text
    assert "[bold]" not in shown(found, 0)


def test_runs_with_nothing_to_compare_in_a_terminal(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    text = shown(compare(open_run(tmp_path / "a"), open_run(tmp_path / "b")))
    assert "Both ran with the same settings." in text
    assert "Neither run has ledgers." in text
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    found["documents"] = {"skipped": 4_000_000}
    assert "4,000,000 documents are too many" in shown(found)
