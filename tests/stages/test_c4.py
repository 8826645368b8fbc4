"""c4: each line rule by hand, the edited text against datatrove's, the counts of what went."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter
from datatrove.utils.text import split_into_sentences
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.c4 import C4, WordListError
from gristmill.stages.documents import column
from gristmill.stages.kernels import edit
from gristmill.stages.ledger import StageLedger, book

GOOD = "This is a sentence."


@pytest.mark.parametrize(
    ("line", "left", "counter"),
    [
        ("This line is fine.", "This line is fine.", "lines_kept"),
        ("  This line is fine!\t", "This line is fine!", "lines_kept"),
        ('He said "this is it"', 'He said "this is it"', "lines_kept"),
        ("No end of this line", None, "lines_removed.no_end_punctuation"),
        ("This goes on...", None, "lines_removed.no_end_punctuation"),
        ("Ends with a bracket.)", None, "lines_removed.no_end_punctuation"),
        ("Two words.", None, "lines_removed.too_few_words"),
        (f"A word of {'x' * 1001} characters.", None, "lines_removed.word_too_long"),
        (f"A word of {'é' * 1000} characters.", f"A word of {'é' * 1000} characters.", "lines_kept"),
        ("Please enable JavaScript to continue.", None, "lines_removed.javascript"),
        ("See our Privacy Policy and more.", None, "lines_removed.policy"),
        ("This site uses cookies for all.", None, "lines_removed.policy"),
        ("This site uses cooKies for all.", None, "lines_removed.policy"),  # Kelvin sign
        ("As was said[12] by some[citation needed] here[edit].", "As was said by some here.", "lines_kept"),
        ("Not a citation [a1] or [12.", "Not a citation [a1] or [12.", "lines_kept"),
        ("", None, "lines_removed.no_end_punctuation"),
    ],
)
def test_each_line_rule_by_hand(line: str, left: str | None, counter: str, batch_of) -> None:  # type: ignore[no-untyped-def]
    result = C4(min_sentences=None)(batch_of([f"{GOOD}\n{line}\n{GOOD}"]))
    assert result.kept["text"].to_pylist() == ["\n".join(x for x in (GOOD, left, GOOD) if x is not None)]
    assert result.counters["lines_read"] == 3
    assert result.counters[counter] == (3 if counter == "lines_kept" else 1)
    assert result.counters["lines_kept"] == (3 if left is not None else 2)


def test_placeholder_and_code_drop_the_document_unless_their_line_went_before(outcomes) -> None:  # type: ignore[no-untyped-def]
    five = "\n".join([GOOD] * 5)
    texts = [five, f"{five}\nLorem Ipsum is here.", f"{five}\nvar x = {{ y }};", f"{five}\nA brace {{ in prose."]
    assert [reasons for reasons, _ in outcomes(C4(), texts)] == [[], ["lorem_ipsum"], [], ["curly_bracket"]]
    assert outcomes(C4(), [texts[2]])[0][1] == five
    off = C4(drop_lorem_ipsum=False, drop_curly_brackets=False, require_end_punctuation=False)
    assert outcomes(off, texts) == [([], text) for text in texts]


def test_a_dropped_document_keeps_its_text(outcomes) -> None:  # type: ignore[no-untyped-def]
    text = f"  {GOOD}  \nmenu\nhome\n"
    assert outcomes(C4(), [text]) == [(["too_few_sentences"], text)]
    assert outcomes(C4(min_sentences=1), [text]) == [([], GOOD)]


def test_the_books_balance(batch_of) -> None:  # type: ignore[no-untyped-def]
    batch = batch_of([f"{GOOD}\nmenu é\n" * 5, "menu", ""])
    result = C4()(batch)
    ledger = StageLedger(stage="c4")
    book(ledger, batch, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert ledger.edited.chars == 5 * 7 + 1
    assert ledger.counters["lines_kept"] == 5
    assert ledger.counters["rule.too_few_sentences"] == 2


def test_bad_words_are_the_users_and_whole_words(tmp_path, outcomes) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "bad.txt").write_text("darn it\nÉclair\n\n", encoding="utf-8")
    stage = C4(bad_words=("bad+",), bad_word_files=(str(tmp_path / "bad.txt"),), min_sentences=None)
    texts = [
        "Bad+ luck.",
        "a bad+.",
        "Darn it!",
        "no éclairs",
        "an ÉCLAIR",
        "badly darned",
        "_bad+",
        "(bad+)",
        "bad+\n",
    ]
    hit = [bool(reasons) for reasons, _ in outcomes(stage, texts)]
    assert hit == [True, True, True, False, True, False, False, True, True]
    assert outcomes(stage.model_copy(update={"bad_words_inside": True}), ["no éclairs"])[0][0] == ["bad_words"]
    assert stage.files() == [str(tmp_path / "bad.txt")]


def test_a_missing_or_empty_list_of_bad_words_is_an_error(tmp_path, batch_of) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(WordListError, match=r"missing\.txt: the list of bad words cannot be read"):
        C4(bad_word_files=(str(tmp_path / "missing.txt"),))(batch_of(["a"]))
    with pytest.raises(WordListError, match=r"lists of bad words are empty: .*empty\.txt"):
        C4(bad_word_files=(str(tmp_path / "empty.txt"),))(batch_of(["a"]))


SENTENCES = [
    ("One. Two? Three!", 3),
    ("No end", 1),
    ("Mr. Smith met Dr. Jones at 3.5 p.m. today.", 1),  # special cases are words, not full stops
    ('He said "stop." and left.', 2),  # the full stop and the quote are two words
    ("Wait... what? Yes.", 2),  # an ellipsis is one word and ends nothing
    ("End.  More.", 2),
    ("End.  ", 2),  # white space of more than one space begins a sentence in spaCy
    ("日本語です。 はい。", 2),
    ("Really?! (Yes.) Good.", 3),
]


@pytest.mark.parametrize(("line", "sentences"), SENTENCES)
def test_sentences_by_hand(line: str, sentences: int) -> None:
    assert len(split_into_sentences(line)) == sentences
    stage = C4(require_end_punctuation=False, min_words_per_line=None, remove_citations=False)
    # A character behind the line keeps its white space from being stripped; "x" would begin a sentence.
    assert stage.edit(pa.array([line]))[2].tolist() == [len(split_into_sentences(line.strip()))]


def reference(rule: C4QualityFilter, text: str) -> tuple[str | None, str | None]:
    document = Document(text=text, id="0")
    verdict = rule.filter(document)
    return (None, document.text) if verdict is True else (verdict[1], None)


def check_against(rule, stage, texts, outcomes) -> None:  # type: ignore[no-untyped-def]
    for text, (reasons, new), (reason, expected) in zip(
        texts, outcomes(stage, texts), [reference(rule, text) for text in texts], strict=True
    ):
        if reason is None:
            assert (reasons, new) == ([], expected), repr(text[:300])
        else:
            assert reason in reasons, repr(text[:300])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"filter_no_terminal_punct": False}, {"require_end_punctuation": False}),
        (
            {
                "filter_no_terminal_punct": False,
                "min_num_sentences": -1,
                "min_words_per_line": -1,
                "max_word_length": 20,
            },
            {"require_end_punctuation": False, "min_sentences": None, "min_words_per_line": None, "max_word_chars": 20},
        ),
        (
            {
                "filter_lorem_ipsum": False,
                "filter_curly_bracket": False,
                "filter_javascript": False,
                "filter_policy": False,
                "remove_citations": False,
                "max_word_length": -1,
                "min_num_sentences": 2,
            },
            {
                "drop_lorem_ipsum": False,
                "drop_curly_brackets": False,
                "drop_javascript_lines": False,
                "drop_policy_lines": False,
                "remove_citations": False,
                "max_word_chars": None,
                "min_sentences": 2,
            },
        ),
    ],
    ids=["defaults", "fineweb", "lines", "few"],
)
def test_decisions_and_texts_equal_datatroves(theirs, ours, english_documents, adversarial_documents, outcomes):  # type: ignore[no-untyped-def]
    texts = english_documents + adversarial_documents
    check_against(C4QualityFilter(**theirs), C4(**ours), texts, outcomes)


def test_texts_of_phrases_cut_anywhere_equal_datatroves(outcomes) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(3)
    parts = [phrase.decode() for phrase in edit._PHRASES] + [
        "[citation needed]",
        "[edit]",
        "[1]",
        " ",
        "a b c",
        ".",
        "\n",
    ]
    texts = []
    for _ in range(600):
        pieces = [part[: rng.choice([len(part), rng.randint(0, len(part))])] for part in rng.choices(parts, k=12)]
        texts.append("".join(piece.upper() if rng.random() < 0.2 else piece for piece in pieces))
    rule = C4QualityFilter(min_num_sentences=-1, filter_no_terminal_punct=False, min_words_per_line=0)
    check_against(rule, C4(min_sentences=None, require_end_punctuation=False, min_words_per_line=0), texts, outcomes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.sampled_from('ab .!?[1]{\n\r\x85é。" '), max_size=50), min_size=1, max_size=6), st.data())
def test_order_slices_and_batches_change_nothing(texts: list[str], data: st.DataObject) -> None:
    stage = C4(
        require_end_punctuation=data.draw(st.booleans()), min_words_per_line=data.draw(st.sampled_from([None, 2]))
    )
    edited, counts, sentences = stage.edit(pa.array(texts, pa.string()))
    cut = data.draw(st.integers(0, len(texts)))
    part = stage.edit(pa.array(texts, pa.string()).slice(cut))
    assert part[0].to_pylist() == edited.to_pylist()[cut:]
    assert np.array_equal(part[1], counts[cut:])
    assert part[2].tolist() == sentences.tolist()[cut:]
    assert [stage.edit(pa.array([text]))[0][0].as_py() for text in texts] == edited.to_pylist()


def test_no_byte_outside_a_document_is_read(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:80] for text in adversarial_documents]
    stage = C4(require_end_punctuation=False, min_words_per_line=None)
    expected = stage.edit(pa.array(texts))
    for guard in (b"\xff" * 64, b"\n" * 64, b"edit]" * 12, b"\xe2\x80" * 16):
        found = stage.edit(guarded(texts, guard))
        assert found[0].equals(expected[0])
        assert np.array_equal(found[1], expected[1])
        assert np.array_equal(found[2], expected[2])


def test_a_line_of_ten_megabytes_is_removed(batch_of) -> None:  # type: ignore[no-untyped-def]
    result = C4()(batch_of(["x" * 10_000_000 + "."]))
    assert result.counters["lines_removed.word_too_long"] == 1
    assert column(result.dropped, "c4.sentences").tolist() == [0]


def test_an_empty_batch_gives_an_empty_batch(batch_of) -> None:  # type: ignore[no-untyped-def]
    result = C4()(batch_of([]))
    assert (result.kept.num_rows, result.dropped.num_rows) == (0, 0)


def test_every_rule_has_a_measure_a_unit_and_a_source() -> None:
    units = {m.column: m.unit for m in C4.measures}
    for rule in C4().rules():
        assert units[rule.column]
        assert rule.published
