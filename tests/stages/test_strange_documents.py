"""Documents that rules are not made for, through every stage that decides row by row.

No stage divides by zero, reads outside the buffer, loses a document, or gives one another value because of what stands
beside it. What each rule makes of such a document is in the tests of its stage.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.stages.c4 import C4
from gristmill.stages.classifier import Classifier
from gristmill.stages.decontaminate import Decontaminate
from gristmill.stages.documents import Result
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import measures
from gristmill.stages.language import Language
from gristmill.stages.ledger import StageLedger, book, count_measures
from gristmill.stages.models import FastText, KenLM, Selection
from gristmill.stages.normalize import Normalize
from gristmill.stages.perplexity import Perplexity
from gristmill.stages.pii import Pii
from gristmill.stages.readers_common import clean_string
from gristmill.stages.refinedweb_lines import RefinedWebLines
from gristmill.stages.url import Url

STAGES: dict[str, Any] = {
    "gopher_quality": GopherQuality(),
    "gopher_quality unicode": GopherQuality(words="unicode"),
    "gopher_quality dolma": GopherQuality(variant="dolma"),
    "gopher_repetition": GopherRepetition(),
    "gopher_repetition unicode": GopherRepetition(words="unicode"),
    "gopher_repetition dolma": GopherRepetition(variant="dolma"),
    "c4": C4(bad_words=("bad",)),
    "c4 lenient": C4(require_end_punctuation=False, min_words_per_line=None, min_sentences=None, max_word_chars=None),
    "fineweb": FineWeb(),
    "refinedweb_lines": RefinedWebLines(),
    "language": Language(keep=("en",)),
    "url": Url(hosts=("a.b",), domains=("b.c",), urls=("a.b/c",), words=("x",), soft_words=("y",)),
    "normalize": Normalize(ftfy=True),
    "normalize NFKC": Normalize(form="NFKC", max_blank_lines=0),
    "pii": Pii(),
    "decontaminate": Decontaminate(sets={"this": {"files": __file__, "format": "text"}}, mode="cut"),
    "classifier": None,  # of a model that a fixture trains
    "perplexity": None,
    "perplexity paragraphs": None,
}
KERNELS_ONLY = [name for name in STAGES if name.split()[0] in ("gopher_quality", "gopher_repetition", "fineweb", "pii")]
KERNELS_ONLY += ["c4 lenient", "refinedweb_lines"]

SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000"
STRANGE = {
    "empty": "",
    "one space": " ",
    "line breaks": "\n\n\r\n\n",
    "every white space": SPACES,
    "ideographic spaces": "\u3000\n\u3000",
    "one letter": "x",
    "one digit": "7",
    "one mark of punctuation": ".",
    "one ellipsis": "…",
    "one hash": "#",
    "one at": "@",
    "one bracket": "[",
    "one brace": "{",
    "one Han character": "字",
    "one emoji": "😀",
    "one combining mark": "\u0301",
    "one zero width space": "\u200b",
    "the last code point": "\U0010ffff",
    "NUL": "\0",
    "NULs and words": "a\0b \0 \0\0\n\0",
    "byte order mark": "\ufeff",
    "Han": "这是一个没有空格的句子。" * 40,
    "Japanese": "吾輩は猫である。名前はまだ無い。\n" * 20,
    "Thai": "ภาษาไทยไม่มีช่องว่างระหว่างคำ" * 20,
    "emoji": "😀🎉" * 200,
    "emoji in families": "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 " * 50,
    "Arabic": "مرحبا بالعالم، هذا نص عربي. " * 30,
    "Hebrew with marks of direction": "\u202bשלום עולם\u202c \u200f" * 30,
    "a stack of marks": "a" + "\u0301" * 300,
    "a lone surrogate, as read": clean_string("before \ud800 after \udfff")[0],
    "replacement characters": "\ufffd" * 100,
    "punctuation": "?!" * 300,
    "full stops": "." * 1000,
    "one long word": "a" * 3000,
    "one word again": "ab " * 700,
    "short lines": "a\n" * 400,
    "carriage returns": "a\rb\r" * 100,
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "unclosed things": '[12 {{ <a href="x a@b 1.2.3. 2001: http:// &amp',
    "ordinary": "The cat sat on the mat, and that was it. Mail a@b.org or 8.8.8.8 to be heard with care.\n" * 8,
}
TEXTS = list(STRANGE.values())


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    measures.forget()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Stages with tiny models."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("classifier", "perplexity")}
    words = "the cat sat on a mat and saw that it was good".split()
    good = [" ".join(words[(i * k) % len(words)] for k in range(30)) for i in range(1, 120)]
    junk = [f"buy {i} now " * 10 for i in range(120)]
    sides = {"positive": Selection(sources=("a",)), "negative": Selection(sources=("b",))}
    FastText(**sides, buckets=1000, dim=4, min_count=1).train(
        {"positive": [pa.array(good)], "negative": [pa.array(junk)]}, folders["classifier"]
    )
    KenLM(text=Selection(sources=("a",)), order=2).train({"text": [pa.array(good)]}, folders["perplexity"])
    return {
        "classifier": Classifier(model=str(folders["classifier"]), min_score=0.5),
        "perplexity": Perplexity(model=str(folders["perplexity"]), max_perplexity=50),
        "perplexity paragraphs": Perplexity(
            model=str(folders["perplexity"]),
            unit="paragraph",
            max_paragraph_perplexity=50,
            remove_paragraphs=True,
        ),
    }


@pytest.fixture
def stage(name: str, request: pytest.FixtureRequest) -> Any:
    return STAGES[name] or request.getfixturevalue("trained")[name]


def batch_of(texts: pa.Array) -> pa.RecordBatch:
    ids = pa.array([str(i) for i in range(len(texts))])
    return pa.RecordBatch.from_arrays([ids, texts, texts], names=["doc_id", "url", "text"])


def rows(result: Result) -> dict[int, dict]:
    """What became of each document: all columns, and its reasons or None."""
    kept = {int(row["doc_id"]): {**row, "reasons": None} for row in result.kept.to_pylist()}
    dropped = {int(row["doc_id"]): row for row in result.dropped.to_pylist()}
    assert not set(kept) & set(dropped)
    return {i: (kept | dropped)[i] for i in sorted(kept | dropped)}


@pytest.mark.parametrize("name", STAGES)
def test_every_document_has_finite_values_and_the_books_balance(name: str, stage: Any) -> None:
    batch = batch_of(pa.array(TEXTS))
    result = stage(batch)
    ledger = StageLedger(stage=name)
    book(ledger, batch, result.kept, result.dropped, result.counters)
    ledger.check("here")
    count_measures(ledger, stage.measures, result.kept, result.dropped)
    if not name.startswith("perplexity"):  # a text without a piece has none
        assert all(histogram.missing == 0 for histogram in ledger.histograms.values())
    for part in (result.kept, result.dropped):
        part.validate(full=True)  # offsets and UTF-8
        for column, kind in stage.adds.items():
            assert part.schema.field(column).type == kind
        for measure in stage.measures:
            assert np.isfinite(part[measure.column].drop_null()).all(), measure.column
    assert list(rows(result)) == list(range(len(TEXTS)))
    assert all(row["reasons"] is None or row["reasons"] for row in rows(result).values())


@pytest.mark.parametrize("name", STAGES)
def test_a_document_alone_has_the_values_it_has_among_others(stage: Any) -> None:
    """Alone, with another one before it, and in a slice."""
    column = pa.array(TEXTS)
    whole = rows(stage(batch_of(column)))
    for i, title in enumerate(STRANGE):
        measures.forget()
        (alone,) = rows(stage(batch_of(column[i : i + 1].take(pa.array([0]))))).values()
        (sliced,) = rows(stage(batch_of(column).slice(i, 1))).values()
        behind = rows(stage(batch_of(pa.array(["zz", TEXTS[i]]))))[1]
        for other in (alone, sliced, behind):
            assert {**other, "doc_id": str(i)} == whole[i], title


@pytest.mark.parametrize("guard", [b"\xff" * 64, b"\n" * 64, b"a" * 64, b"." * 64, b"\xe2\x80" * 32, b"a@b.c1" * 11])
@pytest.mark.parametrize("name", STAGES)
def test_nothing_outside_the_buffer_is_read(stage: Any, guard: bytes, guarded) -> None:  # type: ignore[no-untyped-def]
    expected = rows(stage(batch_of(pa.array(TEXTS))))
    measures.forget()
    assert rows(stage(batch_of(guarded(TEXTS, guard)))) == expected


@pytest.mark.parametrize("name", KERNELS_ONLY)
def test_a_sequence_cut_short_reads_nothing_behind_the_document(stage: Any) -> None:
    """Text is valid UTF-8 by contract. If it is not, kernels still stay inside: no value depends on the guards."""
    broken = [
        b"\xf0",
        b"\xe2\x80",
        b"a \xf0\x9f\x98",
        b"\xed\xa0\x80",
        b"\x80\x80",
        b"ab. \xc3",
        b"a\xe2",
        b"[1\xe2\x80",
    ]
    found = []
    for guard in (b"\xff" * 64, b"\x80" * 64, b"\n" * 64, b"\xa6. " * 22):
        measures.forget()
        offsets = np.cumsum([len(guard), *map(len, broken)]).astype(np.int32)
        buffers = [pa.py_buffer(offsets), pa.py_buffer(guard + b"".join(broken) + guard)]
        result = stage(batch_of(pa.StringArray.from_buffers(len(broken), *buffers)))
        parts = [part.drop_columns(["text", "url"]) for part in (result.kept, result.dropped)]
        found.append(([part.to_pylist() for part in parts], dict(result.counters)))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("name", STAGES)
def test_a_line_of_ten_megabytes(stage: Any) -> None:
    """Half of it one word, half of it short ones."""
    line = "x" * 5_000_000 + " " + "ab cd " * 833_333
    (row,) = rows(stage(batch_of(pa.array([line])))).values()
    values = [row[measure.column] for measure in stage.measures]
    assert all(value is None or np.isfinite(value) for value in values)
    assert row["text"].startswith("xxxx") or row["text"] == ""


@pytest.mark.parametrize("name", STAGES)
def test_no_documents_at_all(stage: Any) -> None:
    result = stage(batch_of(pa.array([], pa.string())))
    assert (result.kept.num_rows, result.dropped.num_rows) == (0, 0)
    for part in (result.kept, result.dropped):
        assert set(stage.adds) <= set(part.schema.names)
    assert result.dropped.schema.field("reasons").type == pa.list_(pa.string())
