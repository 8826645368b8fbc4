"""Normalize: each part by hand, against Python's unicodedata and ftfy, and twice is once."""

import re
import unicodedata

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.normalize import Normalize

OFF = {"form": "none", "whitespace": False, "control": False}
ANY = st.text(st.characters(blacklist_categories=("Cs", "Cn"), blacklist_characters="\0"), max_size=30)
SOUP = st.lists(
    st.sampled_from(
        list(" \t\n\r\v\f\x01\x7f\x85\x9faéﬁ½\u00a0\u2002\u3000\u0301\u0f73\ufdfa")
        + "\r\n|  |e\u0301|&amp;|&lt;|lt;|Ã¼|â€œ|schÃƒÂ¶n|\u1112\u1161\u11ab".split("|")
    ),
    max_size=14,
).map("".join)


def batch_of(texts):
    return pa.record_batch({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())})


def run(*texts, **options):
    """Texts after the stage; one that it drops is None."""
    result = Normalize(**options)(batch_of(texts))
    kept = dict(zip(result.kept["doc_id"].to_pylist(), result.kept["text"].to_pylist(), strict=True))
    return [kept.get(str(i)) for i in range(len(texts))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cafe\u0301", "café"),
        ("a  b\t c\td", "a b c d"),
        ("a \t\nb  ", "a\nb"),
        ("a\n\n\n\nb\n \n\t\n\nc", "a\n\nb\n\nc"),
        ("\n\n\na\n\n\n", "\na\n\n"),
        ("  indented", " indented"),
        ("a\r\nb\rc\fd\x85e\vf", "a\nb\nc\nd\ne\nf"),
        ("bell\x07 esc\x1b[0m del\x7f c1\x9b.", "bell esc[0m del c1."),
        ("e\x02\u0301", "é"),
        ("ﬁne ½ｘ\u00a0y", "ﬁne ½ｘ\u00a0y"),
        ("quiet", "quiet"),
        ("\x07 \t\r\n", None),
    ],
)
def test_worked_examples(text, expected):
    assert run(text) == [expected]


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"form": "NFKC"}, "ﬁne ½ｘ\u00a0 y", "fine 1⁄2x y"),
        ({"form": "none"}, "cafe\u0301  x", "cafe\u0301 x"),
        ({"max_blank_lines": 0}, "\n\na\n\n\nb\nc", "a\nb\nc"),
        ({"max_blank_lines": 2}, "\n\n\n\na\n\n\n\n\nb", "\n\na\n\n\nb"),
        ({"max_blank_lines": None}, "\n\n\n\na\n \n\n\n\nb", "\n\n\n\na\n\n\n\n\nb"),
        ({"whitespace": False}, "a  b \n\n\n\nc", "a  b \n\n\n\nc"),
        ({"control": False}, "a\x07\r\nb", "a\x07\r\nb"),
        ({"ftfy": True}, "schÃ¶n â€œquotedâ€\x9d &lt;b", "schön “quoted” <b"),
        ({"ftfy": True}, "ﬁ “curly” ｗｉｄｅ", "ﬁ “curly” ｗｉｄｅ"),
        (OFF, " a \t\r\n\n\n\n\x07e\u0301", " a \t\r\n\n\n\n\x07e\u0301"),
    ],
)
def test_settings(options, text, expected):
    assert run(text, **options) == [expected]


def test_counters_and_books():
    texts = ["cafe\u0301", "a  b", "a\x07  e\u0301", "quiet", " \x07 ", "Ã¼ber"]
    before = batch_of(texts)
    result = Normalize(ftfy=True)(before)
    assert {k: n for k, n in result.counters.items() if k.startswith("changed.")} == {
        "changed.ftfy": 1,
        "changed.control": 2,
        "changed.unicode_form": 2,
        "changed.whitespace": 3,
    }
    assert result.dropped["reasons"].to_pylist() == [["empty"]]
    ledger = StageLedger(stage="normalize")
    book(ledger, before, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert ledger.edited.chars == 1 + 1 + 3 + 1
    assert Normalize()(batch_of([])).kept.num_rows == 0


@pytest.mark.parametrize("options", [{}, {"form": "NFKC"}, {"ftfy": True}, {"max_blank_lines": 0, "ftfy": True}])
@settings(max_examples=120, deadline=None)
@given(texts=st.lists(SOUP | ANY, max_size=6), start=st.integers(0, 3))
@example(texts=["\n\u0301", "&amp;amp;lt;", "\u00a0\n\u00a0\n\u00a0x", "a\n \u0301"], start=1)
def test_twice_is_once_and_a_slice_is_its_rows(options, texts, start):
    once = run(*texts, **options)
    kept = [text for text in once if text is not None]
    assert run(*kept, **options) == kept
    stage = Normalize(**options)
    sliced = stage(batch_of(texts).slice(start)).kept["text"].to_pylist()
    assert sliced == [text for text in once[start:] if text is not None]
    for text in kept:
        assert not re.search(r"[\x01-\x08\x0b-\x1f\x7f-\x9f]|[ \t]{2}|\t| \n| \Z", text)
        assert "\n\n\n" not in text


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
@settings(max_examples=200, deadline=None)
@given(text=ANY | SOUP)
def test_unicode_forms_are_those_of_python(form, text):
    got = Normalize(**OFF | {"form": form}).normalized(pa.array([text]))[0].to_pylist()
    assert got == [unicodedata.normalize(form, text)]


def test_real_documents_lose_only_what_is_named(english_documents):
    out = run(*english_documents)
    for old, new in zip(english_documents, out, strict=True):
        assert new.split() == unicodedata.normalize("NFC", old).split()


def test_ftfy_is_datatroves(english_documents):
    from datatrove.pipeline.formatters import FTFYFormatter

    texts = [*english_documents[:100], "schÃ¶n", "â€œaâ€\x9d", "&lt;&amp;", "\x1b[36;44mx\x1b[m"]
    theirs = [FTFYFormatter(remove_control_chars=False).format(text) for text in texts]
    assert Normalize(**OFF, ftfy=True).normalized(pa.array(texts))[0].to_pylist() == theirs


@pytest.mark.parametrize(
    "options", [{"form": "NFD"}, {"max_blank_lines": -1}, {"max_blank_lines": 101}, {"fytf": True}]
)
def test_wrong_settings(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        Normalize(**options)
