"""A run with blocks of datatrove: its reasons are in the books, and a wrong block is refused at its line."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.error import URLError

import fasttext
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import BpeTrainer

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.train_fasttext import _zeroed_memory

RECIPE = """name: blocks
sources:
  readmes: {{files: "{crawl}/*.jsonl"}}
stages:
  - normalize: {{ftfy: true}}
  - datatrove:
      block: datatrove.pipeline.filters.GopherQualityFilter
      arguments: {{{arguments}}}
"""

ONE = """name: one
sources:
  pages: {{files: "{crawl}/*.jsonl"}}
stages:
  - datatrove: {block}
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


PAGES = [
    ("https://mill.org/a", "The mill grinds the grain that farmers brought, and the flour is put in sacks. " * 4),
    ("https://casino.org/b", "Buy now.\n***\nSchÃ¶n! Write to a@b.org or 8.8.8.8.\n---\nBuy now."),
    ("https://www.list.org/", "- one thing\n" * 30),
    ("https://mill.org/c", "\n\n".join(["A paragraph that has some words in it, which end in a full stop."] * 6)),
]
BLOCKS = {
    "filters.C4ParagraphFilter": {},
    "filters.C4QualityFilter": {"min_num_sentences": 2},
    "filters.FineWebQualityFilter": {},
    "filters.GopherRepetitionFilter": {},
    "filters.RegexFilter": {"regex_exp": "flour"},
    "filters.SamplerFilter": {"rate": 1.0},
    "filters.URLFilter": {"use_integrated_lists": False, "extra_domains": ["casino.org"]},
    "filters.FastTextClassifierFilter": {"model_url": "{model}", "keep_labels": [["good", 0.5]]},
    "formatters.FTFYFormatter": {},
    "formatters.PIIFormatter": {},
    "formatters.SymbolLinesFormatter": {"symbols_to_remove": ["-", "*"]},
    "stats.DocStats": {},
    "stats.LineStats": {},
    "stats.ParagraphStats": {},
    "stats.SentenceStats": {},
    "stats.WordStats": {},
    "stats.TokenStats": {"tokenizer_name_or_path": "{tokenizer}"},
    "stats.WordsContaminationStats": {"words": ["flour"]},
}


@pytest.fixture(scope="module")
def local_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A fastText classifier of two labels, and a tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "train.txt").write_text("__label__good the mill grinds the grain\n__label__bad buy now - list\n" * 60)
    options = {"epoch": 200, "dim": 4, "bucket": 100, "verbose": 0, "thread": 1}
    with _zeroed_memory():  # else fastText may stop at a NaN
        fasttext.train_supervised(str(folder / "train.txt"), **options).save_model(str(folder / "quality.bin"))
    tokenizer = Tokenizer(BPE(unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator([text for _, text in PAGES], BpeTrainer(vocab_size=80, special_tokens=["?"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"{model}": str(folder / "quality.bin"), "{tokenizer}": str(folder / "tokenizer.json")}


@pytest.mark.filterwarnings("ignore:The 'registered_domain' property:DeprecationWarning")
@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_that_needs_no_network(name: str, tmp_path: Path, local_files: dict[str, str]) -> None:
    arguments = {
        key: local_files.get(value, value) if isinstance(value, str) else value for key, value in BLOCKS[name].items()
    }
    lines = [{"id": str(i), "text": text, "metadata": {"url": url}} for i, (url, text) in enumerate(PAGES)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"block": f"datatrove.pipeline.{name}", "arguments": arguments}
    path = tmp_path / "one.yaml"
    path.write_text(ONE.format(crawl=tmp_path, block=json.dumps(recipe)))
    with Display() as display:
        run(recipes.load(path), str(tmp_path / "run"), Options(debug=True), display)
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []

    expected = directly(name, arguments)
    kept = {row["doc_id"]: row for row in opened.kept().to_table().to_pylist()}
    assert {i: row["text"] for i, row in kept.items()} == {i: doc.text for i, doc in expected.items()}
    if name.startswith("stats."):
        for i, doc in expected.items():
            assert json.loads(kept[i]["metadata"]) == json.loads(json.dumps(doc.metadata, default=float))
    else:
        changed = len(expected) < len(PAGES) or [doc.text for doc in expected.values()] != [text for _, text in PAGES]
        assert changed == (name != "filters.SamplerFilter")


def directly(name: str, arguments: dict[str, Any]) -> dict[str, Document]:
    """id -> what datatrove keeps of each page when its block is called by hand."""
    folder, kind = name.split(".")
    more = {"output_folder": "memory://unused"} if folder == "stats" else {}
    block = getattr(importlib.import_module(f"datatrove.pipeline.{folder}"), kind)(**arguments, **more)
    out = {}
    for i, (url, text) in enumerate(PAGES):
        doc = Document(text, str(i), metadata={"url": url})
        if folder == "filters":
            answer = block.filter(doc)
            if not (answer[0] if isinstance(answer, tuple) else answer):
                continue
        elif folder == "formatters":
            doc.text = block.format(doc.text)
        else:
            doc.metadata = dict(block.extract_stats(doc))
        out[str(i)] = doc
    return out


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("filters.LambdaFilter", {"filter_function": "len"}, "takes a function, which a recipe cannot hold"),
        (
            "filters.UnigramLogProbFilter",
            {},
            "cannot be built here .URLError: .*fetch what it asks for on every worker",
        ),
        ("stats.CCNetPerplexityStats", {"model_dataset": "wikipedia"}, None),
        ("stats.StatsMerger", {"input_folder": "a", "output_folder": "b"}, "is no filter, formatter or stats block"),
    ],
)
def test_blocks_that_cannot_run_are_refused_when_the_recipe_is_read(
    name: str, arguments: dict[str, Any], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    path = tmp_path / "one.yaml"
    recipe = {"block": f"datatrove.pipeline.{name}", "arguments": arguments}
    path.write_text(ONE.format(crawl=tmp_path, block=json.dumps(recipe)))
    if message is None:
        recipes.load(path)  # the model is asked for when the first document comes
    else:
        with pytest.raises(SettingsError, match=message):
            recipes.load(path)


def test_a_wrong_block_is_refused_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "blocks.yaml"
    path.write_text(RECIPE.format(crawl=tmp_path, arguments="max_words: 7"))
    with pytest.raises(SettingsError, match=r":6: .*no argument `max_words`. Did you mean `max_doc_words`"):
        recipes.load(path)
