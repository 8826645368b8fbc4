"""gopher_quality and gopher_repetition: by hand, against datatrove, and where nothing is to be counted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.filters.gopher_repetition_filter import (
    find_all_duplicate,
    find_duplicates,
    find_top_duplicate,
    get_n_grams,
)
from datatrove.utils.text import split_into_words
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.documents import column
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import lines, measures, ngrams
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.unicode import TABLES

REASONS = {
    "gopher_short_doc": "too_few_words",
    "gopher_long_doc": "too_many_words",
    "gopher_below_avg_threshold": "words_too_short",
    "gopher_above_avg_threshold": "words_too_long",
    "gopher_too_many_hashes": "too_many_hashes",
    "gopher_too_many_ellipsis": "too_many_ellipses",
    "gopher_too_many_bullets": "too_many_bullet_lines",
    "gopher_too_many_end_ellipsis": "too_many_ellipsis_lines",
    "gopher_below_alpha_threshold": "too_few_alphabetic_words",
    "gopher_enough_stop_words": "too_few_stop_words",
    "empty": "empty",
    "dup_para_frac": "too_many_duplicate_paragraphs",
    "dup_para_char_frac": "too_many_duplicate_paragraph_chars",
    "dup_line_frac": "too_many_duplicate_lines",
    "dup_line_char_frac": "too_many_duplicate_line_chars",
    **{f"top_{n}_gram": f"too_many_top_{n}_gram_chars" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"too_many_duplicate_{n}_gram_chars" for n in range(5, 11)},
}


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    measures.forget()


def measured(stage, texts: list[str]) -> list[dict[str, float]]:  # type: ignore[no-untyped-def]
    """The measures of each text, by the name behind the dot."""
    batch = pa.RecordBatch.from_pydict({"text": pa.array(texts, pa.string())})
    found = {name.split(".")[1]: values for name, values in stage.measure(batch).items()}
    return [{name: float(values[i]) for name, values in found.items()} for i in range(len(texts))]


def datatrove_reason(rule, text: str) -> str | None:  # type: ignore[no-untyped-def]
    verdict = rule.filter(Document(text=text, id="0"))
    return None if verdict is True else REASONS[verdict[1]]


# By hand. Words: - The cat and the dog ... # 7 ; the last line has 2 words.
QUALITY = "- The cat and the dog...\n#7 of\n"


def test_quality_measures_of_a_small_text_by_hand() -> None:
    """10 words: - The cat and the dog ... # 7 of; 7 are not symbols, with 1 + 3 * 4 + 3 + 2 letters: 18 / 7."""
    (found,) = measured(GopherQuality(), [QUALITY])
    assert found == {
        "words": 7,
        "mean_word_chars": 18 / 7,
        "hashes": 1 / 10,
        "ellipses": 1 / 10,
        "bullet_lines": 1 / 2,
        "ellipsis_lines": 1 / 2,
        "alphabetic_words": 6 / 10,
        "stop_words": 3,  # and, the, of; "The" is another word
    }


def test_repetition_measures_of_a_small_text_by_hand() -> None:
    """17 characters in 3 paragraphs, the last a copy of the first; words a b a b c a b."""
    text = "a b a b\n\nc\n\na b a b"
    (found,) = measured(GopherRepetition(), [text])
    assert found["chars"] == 19
    assert found["duplicate_paragraphs"] == 1 / 3
    assert found["duplicate_paragraph_chars"] == 7 / 19
    assert found["duplicate_lines"] == 1 / 3
    assert found["duplicate_line_chars"] == 7 / 19
    assert found["top_2_gram_chars"] == 4 * 3 / 19  # "a b" four times
    assert found["top_3_gram_chars"] == 2 * 5 / 19  # "a b a" twice
    assert found["top_4_gram_chars"] == 2 * 7 / 19  # "a b a b" twice
    assert found["duplicate_5_gram_chars"] == 0


def test_duplicate_ngrams_are_found_left_to_right_without_overlap() -> None:
    """Ten times the same word: the 5-gram at 1 repeats the one at 0 and takes 1..5, the next one is left no room."""
    (found,) = measured(GopherRepetition(), ["ab " * 10])
    assert found["duplicate_5_gram_chars"] == 10 / 30
    assert found["duplicate_9_gram_chars"] == 18 / 30
    assert found["duplicate_10_gram_chars"] == 0


def test_a_text_of_six_words_fails_the_top_2_gram_rule_as_published(outcomes) -> None:  # type: ignore[no-untyped-def]
    """An n-gram that occurs once counts: "quick brown" of 30 characters is 0.37 > 0.20."""
    ((reasons, _),) = outcomes(GopherRepetition(), ["quick brown foxes jump lazily today"])
    assert reasons[0] == "too_many_top_2_gram_chars"


# Each rule alone: a text, the limit it is on (passes), the next one beyond (fails). The value is counted by hand.
EACH_QUALITY_RULE = [
    ("too_few_words", "min_words", "one two three", 3, 4),
    ("too_many_words", "max_words", "one two, three", 3, 2),  # the comma is a symbol
    ("words_too_short", "min_mean_word_chars", "a bcd ef", 2, 2.001),  # (1 + 3 + 2) / 3
    ("words_too_long", "max_mean_word_chars", "a bcd ef", 2, 1.999),
    ("too_many_hashes", "max_hashes", "# b c # d", 0.4, 0.399),  # 2 of 5 words
    ("too_many_ellipses", "max_ellipses", "ab ... cd …", 0.5, 0.499),  # 2 of 4 words
    ("too_many_bullet_lines", "max_bullet_lines", " - a\n• b\n* c\nd", 0.5, 0.499),  # "*" is none
    ("too_many_ellipsis_lines", "max_ellipsis_lines", "a...  \nb…\nc..\nd", 0.5, 0.499),
    ("too_few_alphabetic_words", "min_alphabetic_words", "a 1 2b 3", 0.5, 0.501),  # a, 2b of 4
    ("too_few_stop_words", "min_stop_words", "the the of The", 2, 3),  # the, of
]
TEN = "ab " * 10  # 30 characters
EACH_REPETITION_RULE = [
    ("empty", None, "", None, None),
    ("too_many_duplicate_paragraphs", "max_duplicate_paragraphs", "a\n\nb\n\na\n\na", 0.5, 0.499),  # 2 of 4
    ("too_many_duplicate_paragraph_chars", "max_duplicate_paragraph_chars", "ab\n\nc\n\nab", 2 / 9, 0.222),
    ("too_many_duplicate_lines", "max_duplicate_lines", "a\nb\n\na\nc", 0.25, 0.249),  # 1 of 4
    ("too_many_duplicate_line_chars", "max_duplicate_line_chars", "abc\nde\nabc", 0.3, 0.299),  # 3 of 10
    ("too_many_top_2_gram_chars", "max_top_2_gram_chars", "a b a b c", 6 / 9, 0.666),  # "a b" twice
    ("too_many_top_3_gram_chars", "max_top_3_gram_chars", "a b c a b c", 10 / 11, 0.909),  # "a b c" twice
    ("too_many_top_4_gram_chars", "max_top_4_gram_chars", "a b c d e", 7 / 9, 0.777),  # "a b c d" once
    # "ab" ten times: the n-gram at 1 repeats the one at 0 and takes n words; behind it there is no room for another.
    *((f"too_many_duplicate_{n}_gram_chars", f"max_duplicate_{n}_gram_chars", TEN, n / 15, n / 15 - 0.001)
      for n in range(5, 10)),
    ("too_many_duplicate_10_gram_chars", "max_duplicate_10_gram_chars", TEN + "ab ", 20 / 33, 0.606),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "reason", "setting", "text", "on", "beyond"),
    [(kind, *case) for kind, cases in ((GopherQuality, EACH_QUALITY_RULE), (GopherRepetition, EACH_REPETITION_RULE))
     for case in cases],
)  # fmt: skip
def test_each_rule_alone_passes_on_its_limit_and_fails_beyond(stage, reason, setting, text, on, beyond, outcomes):  # type: ignore[no-untyped-def]
    off = dict.fromkeys((name for name in stage.model_fields if name.startswith(("min_", "max_"))), None)
    if setting is None:
        assert outcomes(stage(**off), [text, "x"]) == [([reason], text), ([], "x")]
    else:
        assert outcomes(stage(**off | {setting: on}), [text]) == [([], text)]
        assert outcomes(stage(**off | {setting: beyond}), [text]) == [([reason], text)]


def test_no_rule_is_without_its_example() -> None:
    assert [case[0] for case in EACH_QUALITY_RULE] == [rule.reason for rule in GopherQuality().rules()]
    assert [case[0] for case in EACH_REPETITION_RULE] == [rule.reason for rule in GopherRepetition().rules()]


def test_stop_words_are_a_setting() -> None:
    (found,) = measured(GopherQuality(stop_words=("cat", "dog", "bird")), [QUALITY])
    assert found["stop_words"] == 2


def test_words_of_other_alphabets_are_a_setting() -> None:
    """Six Han characters and a full stop are one English word and its suffix, but seven words of any alphabet."""
    (english,) = measured(GopherQuality(), ["我爱编程语言。"])
    (unicode,) = measured(GopherQuality(words="unicode", stop_words=("我",)), ["我爱编程语言。"])
    assert (english["words"], english["mean_word_chars"]) == (1, 6)
    assert (unicode["words"], unicode["mean_word_chars"], unicode["stop_words"]) == (6, 1, 1)
    (repeated,) = measured(GopherRepetition(words="unicode"), ["编程语言" * 5])
    assert repeated["top_2_gram_chars"] == 3 * 5 / 20


def reference_lines(text: str) -> dict[int, int]:
    """What datatrove's filters count in a text, with Python's own strings."""
    import re

    paragraphs = re.split(r"\n{2,}", text.strip())
    parts = re.split(r"\n+", text) if text else []
    copies, copied = find_duplicates(paragraphs)
    line_copies, line_copied = find_duplicates(parts)
    split = text.splitlines()
    return {
        lines.CHARS: len(text),
        lines.HASHES: text.count("#"),
        lines.ELLIPSES: text.count("...") + text.count("…"),
        lines.NEWLINES: text.count("\n"),
        lines.SPLIT_LINES: len(split),
        lines.BULLET_LINES: sum(line.lstrip().startswith(("•", "-")) for line in split),
        lines.ELLIPSIS_LINES: sum(line.rstrip().endswith(("...", "…")) for line in split),
        lines.PARAGRAPHS: len(paragraphs),
        lines.DUPLICATE_PARAGRAPHS: copies,
        lines.DUPLICATE_PARAGRAPH_CHARS: copied,
        lines.LINES: len(parts),
        lines.DUPLICATE_LINES: line_copies,
        lines.DUPLICATE_LINE_CHARS: line_copied,
    }


def line_counts(column: pa.Array) -> np.ndarray:
    offsets, data = string_views(column)
    out = np.empty((len(column), lines.LINE_COLUMNS), np.int64)
    lines.line_measures(offsets, data, TABLES, 30, out)
    return out


def test_line_measures_equal_pythons_own(english_documents: list[str], adversarial_documents: list[str]) -> None:
    texts = english_documents + adversarial_documents
    found = line_counts(pa.array(texts))
    for text, row in zip(texts, found, strict=True):
        assert {k: row[k] for k in reference_lines(text)} == reference_lines(text), repr(text[:200])


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab \n\n\n\r.…-•#\x1c\x85\u2028é日"), max_size=60))
def test_line_measures_equal_pythons_own_on_any_text(text: str) -> None:
    row = line_counts(pa.array([text]))[0]
    assert {k: row[k] for k in reference_lines(text)} == reference_lines(text)


def reference_ngrams(words: list[str]) -> list[int]:
    top = [find_top_duplicate(get_n_grams(words, n)) if len(words) >= n else 0 for n in (2, 3, 4)]
    return top + [find_all_duplicate(words, n) for n in range(5, 11)]


def ngrams_of_words(documents: list[list[str]]) -> np.ndarray:
    """Our n-gram measures of given words, here from a text with one space between them."""
    data = np.frombuffer("".join(" ".join(words) for words in documents).encode(), np.uint8)
    sizes = [len(" ".join(words).encode()) for words in documents]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    starts, ends = [], []
    for words in documents:
        at = 0
        for word in words:
            starts.append(at)
            at += len(word.encode())
            ends.append(at)
            at += 1
    counts = np.array([len(words) for words in documents])
    n = len(starts)
    hashes, powers, chars = np.empty(n, np.uint64), np.empty(n, np.uint64), np.empty(n, np.int32)
    places, joined = np.empty(n + 1, np.int32), np.empty(len(data) + ngrams.SPARE, np.uint8)
    word_out = np.empty((len(documents), ngrams.WORD_COLUMNS), np.int64)
    out = np.empty((len(documents), ngrams.NGRAM_COLUMNS), np.int64)
    ngrams.word_measures(
        data,
        offsets,
        0,
        len(documents),
        np.array(starts, np.int32),
        np.array(ends, np.int32),
        counts,
        TABLES,
        ngrams.stop_table(("the",)),
        hashes,
        powers,
        chars,
        places,
        joined,
        word_out,
    )
    ngrams.ngram_measures(0, len(documents), counts, hashes, powers, chars, places, joined, out)
    return out


def test_ngram_measures_equal_datatroves_on_its_own_words(
    english_documents: list[str], adversarial_documents: list[str]
) -> None:
    documents = [split_into_words(text) for text in english_documents[:250] + adversarial_documents]
    repeated = [words * 2 for words in documents[:100]] + [words[:7] * 9 + words for words in documents[100:200]]
    documents += repeated
    assert ngrams_of_words(documents).tolist() == [reference_ngrams(words) for words in documents]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "ab", "ba", "1", "00", "10", "0", "é"]), max_size=60))
def test_ngram_measures_equal_datatroves_on_any_words(words: list[str]) -> None:
    """Words that make the same string in more than one way are the hard part: "1 00" equals "10 0" in datatrove."""
    assert ngrams_of_words([words, words[1:]]).tolist() == [reference_ngrams(words), reference_ngrams(words[1:])]


@pytest.mark.parametrize(
    ("stage", "reference"),
    [(GopherQuality(), GopherQualityFilter()), (GopherRepetition(), GopherRepetitionFilter())],
    ids=["quality", "repetition"],
)
def test_decisions_and_reasons_equal_datatroves(stage, reference, english_documents, adversarial_documents, outcomes):  # type: ignore[no-untyped-def]
    """The first reason too, as the rules are in datatrove's order."""
    short = [text[at : at + 400] for text in english_documents[:60] for at in (0, 400)]
    texts = english_documents[:250] + short + adversarial_documents
    expected = [datatrove_reason(reference, text) for text in texts]
    assert 20 <= sum(reason is None for reason in expected) <= len(texts) - 100
    assert [reasons[0] if reasons else None for reasons, _ in outcomes(stage, texts)] == expected


def test_documents_with_nothing_to_count_have_values(outcomes) -> None:  # type: ignore[no-untyped-def]
    for texts in (["", " ", "\n\n", "\x00"],):
        for stage in (GopherQuality(), GopherRepetition()):
            for row in measured(stage, texts):
                assert np.isfinite(list(row.values())).all()
        assert [reasons[0] for reasons, _ in outcomes(GopherQuality(), texts)] == ["too_few_words"] * 4
        assert outcomes(GopherRepetition(), [""])[0][0] == ["empty"]


def test_a_line_of_ten_megabytes_has_values() -> None:
    texts = ["x" * 10_000_000, "ab " * 3_300_000]
    first, second = measured(GopherRepetition(), texts)
    assert first["top_2_gram_chars"] == 0
    assert second["top_2_gram_chars"] == pytest.approx(5 / 3, abs=1e-5)
    assert measured(GopherQuality(), texts)[1]["words"] == 3_300_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab .\n#-…日"), max_size=40), min_size=1, max_size=8), st.data())
def test_order_slices_and_batches_change_no_value(texts: list[str], data: st.DataObject) -> None:
    whole = {stage: measured(stage, texts) for stage in (GopherQuality(), GopherRepetition())}
    order = data.draw(st.permutations(range(len(texts))))
    cut = data.draw(st.integers(0, len(texts)))
    measures.forget()
    for stage, rows in whole.items():
        assert [measured(stage, [text])[0] for text in texts] == rows
        assert measured(stage, [texts[i] for i in order]) == [rows[i] for i in order]
        part = pa.RecordBatch.from_pydict({"text": pa.array(texts, pa.string())}).slice(cut)
        found = stage.measure(part)
        assert [{k.split(".")[1]: float(v[i]) for k, v in found.items()} for i in range(len(part))] == rows[cut:]


def test_no_byte_outside_a_document_is_read(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:80] for text in adversarial_documents]
    expected = line_counts(pa.array(texts))
    for guard in (b"\xff" * 64, b"\n" * 64, b"..." * 20, b"\xe2\x80" * 16):
        assert np.array_equal(line_counts(guarded(texts, guard)), expected)


def test_what_one_stage_measured_the_next_one_does_not_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"text number {i} of the row" for i in range(20)]
    batch = pa.RecordBatch.from_pydict({"text": texts})
    calls: list[int] = []
    original = measures._measure_all

    def counted(offsets, *rest):  # type: ignore[no-untyped-def]
        calls.append(len(offsets) - 1)
        return original(offsets, *rest)

    monkeypatch.setattr(measures, "_measure_all", counted)
    GopherRepetition().measure(batch)
    kept = batch.filter(pa.array([i % 3 > 0 for i in range(20)]))
    remembered = GopherQuality().measure(kept)
    assert calls == [20]
    changed = pa.RecordBatch.from_pydict({"text": ["new", *kept["text"].to_pylist()]})
    partly = GopherQuality().measure(changed)
    assert calls == [20, 1]
    measures.forget()
    for name, values in GopherQuality().measure(changed).items():
        assert np.array_equal(values, partly[name])
        assert np.array_equal(values[1:], remembered[name])


def test_every_rule_has_a_measure_a_unit_and_a_source() -> None:
    for stage in (GopherQuality(), GopherRepetition()):
        units = {m.column: m.unit for m in stage.measures}
        for rule in stage.rules():
            assert units[rule.column]
            assert rule.published
        assert set(stage.adds) == set(units)


def test_measures_are_columns_of_kept_and_dropped(batch_of, english_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    result = GopherQuality()(batch_of(english_documents))
    for part in (result.kept, result.dropped):
        assert part.num_rows
        assert np.isfinite(column(part, "gopher_quality.words")).all()


def test_measures_of_several_settings_are_remembered_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with limits by language: groups of a batch with splitters of their own, one stage after the other."""
    from gristmill.stages.kernels import measures

    split = []
    every = measures._measure_all
    monkeypatch.setattr(measures, "_measure_all", lambda *args: split.append(len(args[0]) - 1) or every(*args))
    measures.forget()
    text = {"english": pa.array(["one two three"]), "unicode": pa.array(["eins zwei", "drei"])}
    for _ in range(2):
        for splitter, texts in text.items():
            measures.measure(texts, with_ngrams=True, splitter=splitter)
    assert split == [1, 2]
    monkeypatch.setattr(measures, "REMEMBERED", 2)
    for splitter, texts in text.items():
        measures.measure(pa.concat_arrays([texts, pa.array(["new"])]), with_ngrams=True, splitter=splitter)
    measures.measure(text["english"], with_ngrams=True)
    assert split == [1, 2, 1, 3, 1], "one document new; then the others were forgotten, then the first"
