"""Blocks of datatrove: the same as calling them directly, booked, and refused with a reason where they cannot run."""

import json
import pickle
import random
import re

import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline import filters, formatters
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters.base import BaseFormatter
from datatrove.pipeline.stats import DocStats
from pydantic import ValidationError

from gristmill.stages.datatrove import BlockError, Datatrove, safe_reason
from gristmill.stages.ledger import StageLedger, book

FILTERS = "datatrove.pipeline.filters."
FORMATTERS = "datatrove.pipeline.formatters."


class Moody(BaseFilter):
    """Everything that a filter may do, on command of the text."""

    def __init__(self, limit: int = 3):
        super().__init__()
        if limit < 0:
            raise ValueError("limit is below 0")
        self.limit = limit

    def filter(self, doc):
        word = doc.text.split()[0]
        if word == "raise":
            raise KeyError("no such thing")
        if word == "package":
            raise ImportError("no module named wonder")
        if word == "file":
            raise FileNotFoundError("model.bin")
        if word == "edit":
            doc.text = "x\0y\ud800z"
        if word == "blank":
            doc.text = " \n" * 3
        if word == "number":
            doc.text = 5
        if word == "note":
            doc.metadata["score"] = 0.5
            doc.metadata["list"].append(3)
            doc.metadata["title"] = "new"
            del doc.metadata["old"]
        if word == "see":
            return False, json.dumps(sorted(doc.metadata.items()))
        if word == "reason":
            return False, doc.text[7:]
        return None if word == "none" else len(doc.text) > self.limit


class Batched(BaseFilter):
    def __init__(self):
        super().__init__(batch_size=4)

    def filter(self, doc):
        raise NotImplementedError

    def filter_batch(self, batch):
        return [(len(doc.text) > 3, "short") for doc in batch]


class Runner(BaseFilter):
    def filter(self, doc):
        return True

    def run(self, data, rank=0, world_size=1):
        yield from data


class Shout(BaseFormatter):
    def format(self, text):
        return text.upper()


HERE = __name__


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """The classes of this file under an import path, however pytest named the module."""
    import sys

    monkeypatch.setitem(sys.modules, "blocks_of_tests", sys.modules[HERE])


def batch_of(texts, **columns):
    ids = [f"d{i}" for i in range(len(texts))]
    return pa.record_batch({"doc_id": ids, "text": pa.array(texts, pa.string()), **columns})


def outcomes(stage, batch):
    """doc_id -> the text kept, or the list of reasons."""
    result = stage(batch)
    out = dict(zip(result.kept["doc_id"].to_pylist(), result.kept["text"].to_pylist(), strict=True))
    out |= dict(zip(result.dropped["doc_id"].to_pylist(), result.dropped["reasons"].to_pylist(), strict=True))
    return [out[key] for key in batch["doc_id"].to_pylist()]


def moody(*texts, **options):
    return outcomes(Datatrove(block="blocks_of_tests.Moody", allow_foreign=True, **options), batch_of(texts))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("GopherQualityFilter", {"min_doc_words": 40, "max_non_alpha_words_ratio": 0.6}),
        ("C4QualityFilter", {"min_num_sentences": 2}),
        ("RegexFilter", {"regex_exp": "(?i)returns?"}),
    ],
)
def test_filters_decide_as_when_called_directly(name, arguments, english_documents):
    texts = english_documents[:45]
    block = getattr(filters, name)(**arguments)
    expected = []
    for i, text in enumerate(texts):
        doc = Document(text, f"d{i}")
        answer = block.filter(doc)
        keep, reason = answer if isinstance(answer, tuple) else (answer, None)
        expected.append(doc.text if keep else [re.sub(r"\W", "_", reason or "regex_filter").strip("_")])
    assert 2 <= sum(isinstance(e, list) for e in expected) <= 43
    stage = Datatrove(block=FILTERS + name, arguments=arguments)
    batch = batch_of(texts)
    assert outcomes(stage, batch) == expected
    assert outcomes(pickle.loads(pickle.dumps(stage)), batch.slice(30)) == expected[30:]
    result, ledger = stage(batch), StageLedger(stage="datatrove")
    book(ledger, batch, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert set(ledger.dropped) == {e[0] for e in expected if isinstance(e, list)}


@pytest.mark.parametrize("name", ["PIIFormatter", "FTFYFormatter", "SymbolLinesFormatter"])
def test_formatters_edit_as_when_called_directly(name, english_documents):
    extra = ["a@b.org 8.8.8.8", "c@d.org 9.9.9.9", "schÃ¶n", "x\n***\n---\ny"]
    texts = [*english_documents[:60], *extra]
    expected = [getattr(formatters, name)().format(text) for text in texts]  # turns begin with each document
    assert expected != texts
    stage = Datatrove(block=FORMATTERS + name)
    assert outcomes(stage, batch_of(texts)) == expected
    result = stage(batch_of(texts))
    assert result.counters["documents_changed"] == sum(a != b for a, b in zip(texts, expected, strict=True))


def test_stats_become_metadata():
    batch = batch_of(["Ab 1.", "x"], metadata=pa.array(['{"a":1}', None]))
    kept = Datatrove(block="datatrove.pipeline.stats.DocStats")(batch).kept
    got = [json.loads(value) for value in kept["metadata"].to_pylist()]
    theirs = [DocStats("memory://x").extract_stats(Document(text, "d")) for text in ("Ab 1.", "x")]
    assert got == [{"a": 1, **theirs[0]}, theirs[1]]
    assert got[0]["length"] == 5


def test_what_a_filter_may_do():
    assert moody("abcd", "abc", "none of it", "raise it", "number", "edit it", "blank it") == [
        "abcd",
        ["moody"],
        ["moody"],
        ["datatrove_error"],
        ["datatrove_error"],
        "x\ufffdy\ufffdz",
        ["empty"],
    ]
    assert moody("reason Too short: 5 < 7!", "reason 5 lines", "reason ...", "reason " + "a" * 99) == [
        ["Too_short_5_7"],
        ["_5_lines"],
        ["moody"],
        ["a" * 80],
    ]
    stage = Datatrove(block="blocks_of_tests.Moody", allow_foreign=True)
    result = stage(batch_of(["raise it", "edit it", "raise 2", "number"]))
    assert {k: n for k, n in result.counters.items() if "." not in k or k.startswith("errors")} == {
        "errors.KeyError": 2,
        "errors.TypeError": 1,
        "nul_replaced": 1,
        "surrogates_replaced": 1,
        "documents_changed": 1,
    }
    assert result.dropped["text"].to_pylist() == ["raise it", "raise 2", "number"]
    assert stage(batch_of([])).kept.num_rows == 0


def test_metadata_is_seen_and_written():
    columns = {
        "url": ["https://x.org/"] * 2 + [None],
        "language": ["en", "de", None],
        "language_score": [0.5, 0.25, None],
        "metadata": ['{"old": 1, "title": "t", "list": [1]}', '{"title": "t"}', '{ "kept":  "as it was"}'],
    }
    stage = Datatrove(block="blocks_of_tests.Moody", allow_foreign=True)
    result = stage(batch_of(["note it", "see it", "long enough"], **columns))
    assert result.kept["metadata"].to_pylist() == [
        '{"title":"new","list":[1,3],"score":0.5}',
        '{ "kept":  "as it was"}',
    ]
    seen = [("language", "de"), ("language_score", 0.25), ("title", "t"), ("url", "https://x.org/")]
    assert result.dropped["reasons"].to_pylist() == [[re.sub(r"\W+", "_", json.dumps(seen)).strip("_")[:80]]]
    assert result.dropped["metadata"].to_pylist() == ['{"title": "t"}']


def test_language_of_the_column_or_fixed():
    lines = "Das ist ein Satz. Der Hund ist da.\n"
    batch = batch_of([lines * 3] * 3, language=["de", "en", None])
    block = FILTERS + "GopherQualityFilter"
    arguments = {"min_doc_words": 1, "min_stop_words": 0}
    assert Datatrove(block=block).needs == Datatrove.needs == ("text",)
    assert Datatrove(block=block, language="column").needs == ("text", "language")
    good = outcomes(Datatrove(block=block, arguments=arguments, language="column"), batch)
    assert good == [lines * 3] * 3
    fixed = Datatrove(block=block, arguments=arguments, language="nowhere")
    assert outcomes(fixed, batch) == [["datatrove_error"]] * 3  # datatrove has no words of that language
    unknown = batch_of([lines] * 2, language=["nowhere", "de"])
    assert outcomes(Datatrove(block=block, arguments=arguments, language="column"), unknown) == [
        ["datatrove_error"],
        lines,
    ]
    with pytest.raises(ValidationError, match="stands both in the stage"):
        Datatrove(block=block, arguments={"language": "en"}, language="de")


def test_draws_follow_the_document_not_its_turn():
    batch = batch_of(["some text"] * 400)
    stage = Datatrove(block=FILTERS + "SamplerFilter", arguments={"rate": 0.25})
    first = set(stage(batch).kept["doc_id"].to_pylist())
    assert 60 < len(first) < 140  # 100 expected, standard deviation 8.7
    order = list(range(400))
    random.Random(3).shuffle(order)
    pieces = [stage(batch.take(order[i : i + 70])).kept["doc_id"].to_pylist() for i in range(0, 400, 70)]
    assert {doc_id for piece in pieces for doc_id in piece} == first
    other = Datatrove(block=FILTERS + "SamplerFilter", arguments={"rate": 0.25, "seed": 2})
    assert set(other(batch).kept["doc_id"].to_pylist()) != first


def test_a_filter_of_batches_gets_one_document_at_a_time():
    stage = Datatrove(block="blocks_of_tests.Batched", allow_foreign=True)
    assert outcomes(stage, batch_of(["abcd", "abc", "abcde"])) == ["abcd", ["short"], "abcde"]
    shout = Datatrove(block="blocks_of_tests.Shout", allow_foreign=True)
    assert outcomes(shout, batch_of(["abcd"])) == ["ABCD"]


@pytest.mark.parametrize(
    ("block", "arguments", "message"),
    [
        ("Gopher", {}, "no import path"),
        (FILTERS + "GopherQuality", {}, r"has no `GopherQuality`. Did you mean `GopherQualityFilter`"),
        ("datatrove.pipeline.filtres.X", {}, r"`datatrove.pipeline.filtres` cannot be imported: No module"),
        ("os.path.join", {}, r"`os.path.join` is not of datatrove.*allow_foreign: true"),
        ("datatrovexx.Filter", {}, "is not of datatrove"),
        (FILTERS + "GopherQualityFilter", {"min_words": 3}, r"no argument `min_words`. Did you mean `min_doc_words`"),
        (FILTERS + "RegexFilter", {}, "missing a required argument: 'regex_exp'"),
        (FILTERS + "RegexFilter", {"regex_exp": "("}, r"refuses its arguments: .*unterminated subpattern"),
        (FILTERS + "RegexFilter", {"regex_exp": "a", "exclusion_writer": "x"}, "run's `dropped`"),
        (FILTERS + "LambdaFilter", {"filter_function": "len"}, "takes a function"),
        (FILTERS + "base_filter.BaseFilter", {}, "is abstract"),
        ("datatrove.pipeline.dedup.MinhashDedupFilter", {"input_folder": "x"}, "is no filter, formatter or stats"),
        ("datatrove.pipeline.readers.JsonlReader", {"data_folder": "x"}, "is no filter, formatter or stats"),
        ("datatrove.utils.text.simplify_text", {}, "is not a class"),
    ],
)
def test_what_cannot_run_is_refused_before_the_run(block, arguments, message):
    with pytest.raises(ValidationError, match=message):
        Datatrove(block=block, arguments=arguments)


def test_foreign_blocks_are_refused_with_a_reason():
    with pytest.raises(ValidationError, match="refuses its arguments: ValueError: limit is below 0"):
        Datatrove(block="blocks_of_tests.Moody", arguments={"limit": -1}, allow_foreign=True)
    with pytest.raises(ValidationError, match="has a `run` of its own"):
        Datatrove(block="blocks_of_tests.Runner", allow_foreign=True)
    with pytest.raises(ValidationError, match="is not of datatrove"):
        Datatrove(block="blocks_of_tests.Moody")


@pytest.mark.parametrize(("text", "cause"), [("package it", "no module named wonder"), ("file it", "model.bin")])
def test_the_machines_fault_is_no_documents_fault(text, cause):
    with pytest.raises(BlockError, match=f"cannot run here: {cause}.*on every worker"):
        moody("abcd", text)


def test_a_reason_is_an_identifier():
    for given in ("a b", "1", "é", "", None, "x-" * 99, 7, "__", "C4: line"):
        reason = safe_reason(given, filters.RegexFilter)
        assert reason.isidentifier()
        assert len(reason) <= 81
    assert safe_reason("C4: line", filters.RegexFilter) == "C4_line"
    assert safe_reason(None, filters.C4QualityFilter) == "c4_quality_filter"
