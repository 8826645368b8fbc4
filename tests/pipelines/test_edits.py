"""What editing stages changed, found again after the run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.edits import Edit, as_json_lines, changes, edits, render
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run

sys.path.append(str(Path(__file__).parent))

PROSE = "The mill stands by the river and grinds the grain of the whole valley every single day.\n"
NAMES = "oats rye spelt millet barley rice maize emmer durum teff fonio sorghum".split()  # digits count as equal
FOOTER = "All of the rights to these pages are reserved by the owner of the mill.\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Texts with a line that c4 takes out (too short), an address that pii replaces, a paragraph that all share."""
    root = tmp_path_factory.mktemp("edits")
    for source, count in (("web", 12), ("books", 3)):
        rows = []
        for i in range(count):
            own = f"Sentence number {i} {NAMES[i]} of {source} is about the stones that turn under the wheel.\n"
            mail = f"Write to miller{i}@mill-of-{source}.org for a sack of the finest flour of this year.\n"
            rows.append({"id": f"{source}-{i}", "text": FOOTER + PROSE * 3 + own + "Menu\n" + (mail if i % 2 else "")})
        (root / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(
        f"""
name: edits
sources:
  web: {{files: "{root}/web.jsonl"}}
  books: {{files: "{root}/books.jsonl"}}
stages:
  - gopher_quality: {{min_words: 5, min_stop_words: 0, min_mean_word_chars: 2}}
  - c4: {{min_sentences: 1}}
    only: [web]
  - pii
  - paragraphs: {{min_words: 3}}
"""
    )
    with Display() as display:
        run(recipes.load(root / "recipe.yaml"), str(root / "run"), Options(debug=True), display)
    return root / "run"


def test_lines_that_c4_took_out(folder):
    found = edits(open_run(folder), "c4", n=100)
    assert {e.doc_id for e in found} == {f"web-{i}" for i in range(12)}
    for edit in found:
        assert "Menu" in edit.before
        assert "Menu" not in edit.after
        assert PROSE.strip() in edit.after
        assert not edit.dropped


def test_addresses_that_pii_replaced(folder):
    found = edits(open_run(folder), "pii", n=100)
    assert {e.doc_id for e in found} == {"web-1", "web-3", "web-5", "web-7", "web-9", "web-11", "books-1"}
    web = next(e for e in found if e.doc_id == "web-3")
    assert "miller3@mill-of-web.org" in web.before
    assert "miller3@mill-of-web.org" not in web.after
    assert "Menu" not in web.before  # what c4 left, not the input
    assert len(web.after.split("\n")) == len(web.before.split("\n"))


def test_what_a_stage_over_all_documents_took_out(folder):
    """A line that all documents share stays in one of them."""
    found = edits(open_run(folder), "paragraphs", n=100)
    whole = {row["doc_id"]: row["text"] for row in open_run(folder).kept("01-gopher_quality").to_table().to_pylist()}
    assert len(found) == 15  # one line stands three times in each
    for edit in found:
        assert edit.before == whole[edit.doc_id]
        assert "Sentence number" in edit.after
    assert sum(FOOTER.strip() in edit.after for edit in found) == 1


def test_the_choice_obeys_source_text_number_and_seed(folder):
    opened = open_run(folder)
    assert {e.source for e in edits(opened, "pii", source="books", n=9)} == {"books"}
    assert [e.doc_id for e in edits(opened, "c4", text="sorghum of", n=9)] == ["web-11"]
    assert edits(opened, "c4", n=2, seed=1) == edits(opened, "c4", n=12, seed=1)[:2]
    assert edits(opened, "c4", n=12, seed=1) != edits(opened, "c4", n=12, seed=2)
    assert edits(opened, "gopher_quality") == []


def test_questions_that_have_no_answer(folder, tmp_path):
    with pytest.raises(RunError, match="no stage 'nope'"):
        edits(open_run(folder), "nope")
    with pytest.raises(RunError, match="'read' edits nothing"):
        edits(open_run(folder), "read")


def test_an_input_that_is_gone_is_told(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    (copy / "inputs.json").write_text((folder / "inputs.json").read_text().replace("web.jsonl", "gone.jsonl"))
    with pytest.raises(RunError, match="no longer there"):
        edits(open_run(copy), "c4")


def test_changed_lines_with_their_neighbours():
    before = "\n".join("abcdefgh")
    after = "\n".join("abcdeXgh")
    assert changes(before, after) == [
        ("cut", "… 3 equal lines …"),
        ("same", "d"),
        ("same", "e"),
        ("before", "f"),
        ("after", "X"),
        ("same", "g"),
        ("same", "h"),
    ]
    assert changes("a", "a") == [("cut", "… 1 equal line …")]


def test_shown_without_harm():
    out = io.StringIO()
    edit = Edit("a", "s", None, "same\n\x1b[2J evil [bold] " + "x " * 200, "same\n", dropped=True)
    render([edit], "c4", Console(file=out, width=100, color_system=None))
    assert "c4: edited, then dropped" in out.getvalue()
    assert "<U+001B>[2J evil [bold]" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert "more characters" in out.getvalue()
    render([], "c4", Console(file=out, width=100))
    assert "changed the text of none" in out.getvalue()
    assert json.loads(as_json_lines([edit]))["before"] == edit.before
