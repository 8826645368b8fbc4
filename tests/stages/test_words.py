"""The word splitter against spaCy, by hand, and at the edges of its buffer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datatrove.utils.text import split_into_words
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import words as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.words import Splitter, word_groups


def split(texts: list[str] | pa.Array, splitter: Splitter = "english") -> list[list[str]]:
    """The words of each text, as strings."""
    column = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    offsets, data = string_views(column)
    out = []
    for group in word_groups(offsets, data, splitter):
        n = 0
        for document in range(group.first, group.last):
            text = data[offsets[document] : offsets[document + 1]].tobytes()
            count = int(group.counts[document])
            bounds = zip(group.starts[n : n + count].tolist(), group.ends[n : n + count].tolist(), strict=True)
            out.append([text[a:b].decode() for a, b in bounds])
            n += count
    return out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, they're (almost) here.", "Do n't stop , they 're ( almost ) here ."),
        ("A well-known e.g. costs $5.50 or 5km.", "A well - known e.g. costs $ 5.50 or 5 km ."),
        ("See http://a.com/x-y, end.Start and/or U.S.", "See http://a.com/x-y , end . Start and/or U.S."),
        ("We... cannot “say” it’s 10am :-)", "We ... can not “ say ” it ’s 10 am :-)"),
        ("f(x): 3*4, a/b, x=y C++ 5€ 3+", "f(x ): 3 * 4 , a / b , x = y C++ 5 € 3 +"),
        ("日本語です。 10%...", "日本語です 。 10 % ..."),
        (" \n\t\xa0", ""),
    ],
)
def test_worked_examples(text: str, words: str) -> None:
    assert split([text]) == [words.split()]


def test_real_english_is_split_as_spacy_does(english_documents: list[str]) -> None:
    expected = [split_into_words(text) for text in english_documents]
    assert sum(map(len, expected)) > 30_000
    assert split(english_documents) == expected


def test_text_made_to_break_things_is_split_as_spacy_does(adversarial_documents: list[str]) -> None:
    """Up to special cases that spaCy hides behind a match across a space: none in these texts."""
    assert split(adversarial_documents) == [split_into_words(text) for text in adversarial_documents]


def test_a_match_across_a_space_hides_a_special_case_in_spacy_only() -> None:
    """ "):" and ":(" are special cases; spaCy finds the first across the space, and drops it only after choosing it."""
    assert split_into_words("x :(^") == split(["x :(^"])[0] == ["x", ":(", "^"]
    assert split_into_words("x) :(^") == ["x", ")", ":", "(", "^"]
    assert split(["x) :(^"]) == [["x", ")", ":(", "^"]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=6), st.integers(0, 3))
def test_words_hold_every_character_that_is_not_space_and_batching_changes_nothing(texts: list[str], cut: int) -> None:
    found = split(texts)
    assert ["".join(words) for words in found] == ["".join(text.split()) for text in texts]
    column = pa.array(texts, pa.string())
    assert split(column.slice(cut)) == found[cut:]
    assert [words for text in texts for words in split([text])] == found


def test_no_byte_outside_a_document_is_read(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:60] for text in adversarial_documents]
    expected = split(texts)
    for guard in (b"\xff" * 64, b"'s.com/" * 9, b"\xe2\x80" * 16, b"9" * 64):
        assert split(guarded(texts, guard)) == expected
    assert [split(guarded([text]))[0] for text in texts] == expected


def test_groups_cover_the_column_and_a_big_document_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "GROUP_BYTES", 10)
    texts = ["one two", "", "three", "x " * 50, "", "four five six"]
    assert split(texts) == [text.split() for text in texts]


@pytest.mark.parametrize("piece", [":", "a", "'", ".", "(", "é", "x-y", "…", "1k", ":)", "😀"])
def test_a_line_of_a_million_characters_without_space_takes_no_time(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    words = split([text])[0]
    assert "".join(words) == text
    assert len(words) <= 1_000_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("L'été, c'est fini... vraiment?", "L'été , c'est fini ... vraiment ?"),
        ("Цена: 1,5 руб. (3.14)", "Цена : 1,5 руб . ( 3.14 )"),
        ("col·laborar e-mail snake_case 'quoted'", "col·laborar e - mail snake_case ' quoted '"),
        ("مرحبا، كيف حالك؟", "مرحبا ، كيف حالك ؟"),
        ("नमस्ते दुनिया।", "नमस्ते दुनिया ।"),  # vowel signs are marks and stay
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("我爱Python3编程。", "我 爱 Python3 编 程 。"),
        ("กำลังดี", "ก ำ ลั ง ดี"),  # U+0E33 is a letter in Unicode; the other vowel signs are marks
        ("ひらがなABC", "ひ ら が な ABC"),
        ("👍🏽 ok", "👍 🏽 ok"),
        (" \n\t\u3000", ""),
    ],
)
def test_words_of_other_alphabets_by_hand(text: str, words: str) -> None:
    assert split([text], "unicode") == [words.split()]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=6), st.integers(0, 3))
def test_words_of_any_alphabet_hold_every_character_that_is_not_space(texts: list[str], cut: int) -> None:
    found = split(texts, "unicode")
    assert ["".join(words) for words in found] == ["".join(text.split()) for text in texts]
    assert split(pa.array(texts, pa.string()).slice(cut), "unicode") == found[cut:]


def test_words_of_other_alphabets_read_no_byte_outside_a_document(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:60] for text in adversarial_documents]
    expected = split(texts, "unicode")
    for guard in (b"\xff" * 64, b"'a" * 32, b"\xcc\x81" * 32, b".9" * 32):
        assert split(guarded(texts, guard), "unicode") == expected


def test_an_empty_column_has_no_groups() -> None:
    assert split([]) == []
    assert list(word_groups(np.zeros(1, np.int64), np.zeros(0, np.uint8))) == []
