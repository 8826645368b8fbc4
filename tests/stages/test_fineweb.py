"""fineweb: by hand, against datatrove, and where nothing is to be counted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.fineweb import FineWeb
from gristmill.stages.kernels import measures

REASONS = {
    "empty": "empty",
    "line_punct_ratio": "too_few_terminal_lines",
    "short_line_ratio": "too_many_short_lines",
    "char_dup_ratio": "too_many_duplicate_line_chars",
    "list_ratio": "too_many_newlines",
}


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    measures.forget()


def test_measures_of_a_small_text_by_hand() -> None:
    """Lines: a sentence, a copy of it, a blank one, a long one. 31 characters are not short, 30 are."""
    text = "One two.\nOne two.\n  \n" + "x" * 31
    batch = pa.RecordBatch.from_pydict({"text": [text]})
    found = {name: float(values[0]) for name, values in FineWeb().measure(batch).items()}
    assert found == {
        "fineweb.lines": 3,
        "fineweb.terminal_lines": 2 / 3,
        "fineweb.short_lines": 2 / 3,
        "fineweb.duplicate_line_chars": 8 / 49,
        "fineweb.newlines": 3 / 7,
    }


EACH_RULE = [  # reason, setting, text, the limit it is on (passes), the next one beyond (fails)
    ("empty", None, " \n\n", None, None),
    ("too_few_terminal_lines", "min_terminal_lines", "a b.\nc d!\ne f\n\ng h,", 0.5, 0.501),  # 2 of 4 lines
    ("too_many_short_lines", "max_short_lines", f"{'x' * 30}\n{'y' * 31}", 0.5, 0.499),
    ("too_many_duplicate_line_chars", "max_duplicate_line_chars", "ab\ncdef\nab\nab", 0.4, 0.399),  # 4 of 10
    ("too_many_newlines", "max_newlines", "one two three\nfour\n", 0.5, 0.499),  # 2 for 4 words
]


@pytest.mark.parametrize(("reason", "setting", "text", "on", "beyond"), EACH_RULE)
def test_each_rule_alone_passes_on_its_limit_and_fails_beyond(reason, setting, text, on, beyond, outcomes) -> None:  # type: ignore[no-untyped-def]
    off = dict.fromkeys((name for name in FineWeb.model_fields if name.startswith(("min_", "max_"))), None)
    if setting is None:
        assert outcomes(FineWeb(**off), [text, "x"]) == [([reason], text), ([], "x")]
    else:
        assert outcomes(FineWeb(**off | {setting: on}), [text]) == [([], text)]
        assert outcomes(FineWeb(**off | {setting: beyond}), [text]) == [([reason], text)]


def test_no_rule_is_without_its_example() -> None:
    assert [case[0] for case in EACH_RULE] == [rule.reason for rule in FineWeb().rules()]


def test_what_was_published_and_what_was_run_differ(outcomes) -> None:  # type: ignore[no-untyped-def]
    """4 of 104 characters repeat: over 0.01, under 0.1."""
    text = f"abc.\nabc.\n{'word ' * 19}end."
    assert outcomes(FineWeb(max_short_lines=None), [text])[0][0] == ["too_many_duplicate_line_chars"]
    assert outcomes(FineWeb(max_short_lines=None, max_duplicate_line_chars=0.1), [text])[0][0] == []


def reference(rule: FineWebQualityFilter, text: str) -> str | None:
    verdict = rule.filter(Document(text=text, id="0"))
    return None if verdict is True else REASONS[verdict[1]]


@pytest.mark.parametrize("settings_", [{}, {"short": True}], ids=["defaults", "loose"])
def test_decisions_and_reasons_equal_datatroves(settings_, english_documents, adversarial_documents, outcomes):  # type: ignore[no-untyped-def]
    texts = english_documents + adversarial_documents
    if settings_:
        rule = FineWebQualityFilter(
            line_punct_thr=0.05, short_line_thr=0.9, char_duplicates_ratio=0.1, new_line_ratio=0.2
        )
        stage = FineWeb(min_terminal_lines=0.05, max_short_lines=0.9, max_duplicate_line_chars=0.1, max_newlines=0.2)
    else:
        rule, stage = FineWebQualityFilter(), FineWeb()
    expected = [reference(rule, text) for text in texts]
    assert set(expected) >= {None, "too_few_terminal_lines", "too_many_duplicate_line_chars", "empty"}
    assert [reasons[0] if reasons else None for reasons, _ in outcomes(stage, texts)] == expected


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("ab .。\n\n!…é日\x85\u2028 "), max_size=60))
def test_the_first_reason_equals_datatroves_on_any_text(text: str) -> None:
    batch = pa.RecordBatch.from_pydict({"text": pa.array([text], pa.string())})
    result = FineWeb()(batch)
    found = result.dropped["reasons"][0].as_py()[0] if result.dropped.num_rows else None
    assert found == reference(FineWebQualityFilter(), text)


def test_documents_with_nothing_to_count_are_empty(outcomes) -> None:  # type: ignore[no-untyped-def]
    for reasons, _ in outcomes(FineWeb(), ["", " ", "\n\n", "\t\u3000"]):
        assert reasons[0] == "empty"
    batch = pa.RecordBatch.from_pydict({"text": ["", "\n", " "]})
    for values in FineWeb().measure(batch).values():
        assert np.isfinite(values).all()


def test_the_length_of_a_short_line_is_a_setting() -> None:
    batch = pa.RecordBatch.from_pydict({"text": ["four\nfive5\nsixsix"]})
    assert FineWeb(short_line_chars=5).measure(batch)["fineweb.short_lines"].tolist() == [2 / 3]
    assert FineWeb().measure(batch)["fineweb.short_lines"].tolist() == [1.0]
