"""A run with blocks of datatrove: its reasons are in the books, and a wrong block is refused at its line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError

RECIPE = """name: blocks
sources:
  readmes: {{files: "{crawl}/*.jsonl"}}
stages:
  - normalize: {{ftfy: true}}
  - datatrove:
      block: datatrove.pipeline.filters.GopherQualityFilter
      arguments: {{{arguments}}}
"""


def test_reasons_of_a_block_are_booked(tmp_path: Path) -> None:
    good = "The mill grinds the grain that farmers have brought to it, and the flour is put in sacks. " * 4
    bad = [
        "Too short,  SchÃ¶n.",
        "# word another " * 60,
        "- the list of things\n" * 30,
        "the of a b c d " * 20,
        "1234 5678 and " * 40,
    ]
    texts = [good, *bad, good + "More of it.", *bad]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "blocks.yaml"
    path.write_text(RECIPE.format(crawl=tmp_path, arguments="max_non_alpha_words_ratio: 0.7"))
    with Display() as display:
        run(recipes.load(path), str(tmp_path / "run"), Options(debug=True), display)
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []
    books = opened.stages()
    assert books["normalize"].counters["changed.ftfy"] == 2
    dropped = opened.dropped().to_table().to_pylist()
    reasons = Counter(row["reasons"][0] for row in dropped if row["stage"] == "datatrove")
    assert reasons == {reason: part.documents for reason, part in books["datatrove"].dropped.items()}
    block = GopherQualityFilter(max_non_alpha_words_ratio=0.7)
    kept = opened.kept().to_table()["text"].to_pylist()
    assert kept == [text.removesuffix(" ") for text in texts if text.startswith(good)]
    assert all(block.filter(Document(text, "d")) is True for text in kept)
    wrong = [row for row in dropped if row["text"] and row["stage"] == "datatrove"]
    assert len(wrong) == 10
    assert len(reasons) == 5
    assert all(block.filter(Document(row["text"], "d")) == (False, row["reasons"][0]) for row in wrong)


def test_a_wrong_block_is_refused_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "blocks.yaml"
    path.write_text(RECIPE.format(crawl=tmp_path, arguments="max_words: 7"))
    with pytest.raises(SettingsError, match=r":6: .*no argument `max_words`. Did you mean `max_doc_words`"):
        recipes.load(path)
