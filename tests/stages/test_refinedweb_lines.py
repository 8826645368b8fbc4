"""refinedweb_lines: each rule by hand, and the whole against Python's own strings and expressions."""

from __future__ import annotations

import random
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import measures
from gristmill.stages.kernels import refinedweb as kernel
from gristmill.stages.refinedweb_lines import RefinedWebLines

GOOD = "This is a good line of text."


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    measures.forget()


@pytest.mark.parametrize(
    ("line", "left", "counter"),
    [
        ("This line is FINE", "This line is FINE", "lines_kept"),
        ("BUY NOW and", None, "lines_removed.upper_case"),  # 6 of 11 characters
        ("BUY NOW or so", "BUY NOW or so", "lines_kept"),  # 6 of 13
        ("ÉTÉ ÀÉ", None, "lines_removed.upper_case"),
        ("20261130", None, "lines_removed.digits"),
        ("2026 11", "2026 11", "lines_kept"),
        ("3 likes", None, "lines_removed.counter"),
        ("• 1.2K Views!", None, "lines_removed.counter"),
        ("3 likes and more", "3 likes and more", "lines_kept"),
        ("Menu", None, "lines_removed.too_few_words"),
        ("You have 3 items in cart now", "You have 3 now", "lines_kept"),
        ("3 Items In Cart", "3", "lines_kept"),
        ("items in cart", None, "lines_removed.phrase"),
        ("All about it Read more...", "All about it", "lines_kept"),
        ("Sign-in to continue", "to continue", "lines_kept"),
        (f"{'word ' * 11}Read more...", f"{'word ' * 11}Read more...", "lines_kept"),
        ("", "", "lines_kept"),
    ],
)
def test_each_line_rule_by_hand(line: str, left: str | None, counter: str, batch_of) -> None:  # type: ignore[no-untyped-def]
    result = RefinedWebLines(max_removed_words=None)(batch_of([f"{GOOD}\n{line}\n{GOOD}"]))
    assert result.kept["text"].to_pylist() == ["\n".join(x for x in (GOOD, left, GOOD) if x is not None)]
    kept = 2 + bool(left)
    assert result.counters["lines_kept"] == kept
    assert result.counters["lines_read"] == 2 + bool(line)
    if counter != "lines_kept":
        assert result.counters[counter] == 1


def test_a_document_that_loses_too_many_words_goes_with_its_text(outcomes) -> None:  # type: ignore[no-untyped-def]
    """One of 20 words is 0.05, on the limit; one of 19 is over it."""
    twenty = f"{'word ' * 18}end\nMenu"
    assert outcomes(RefinedWebLines(), [twenty]) == [([], twenty[:-5])]
    nineteen = twenty.removeprefix("word ")
    assert outcomes(RefinedWebLines(), [nineteen]) == [(["too_many_words_removed"], nineteen)]
    assert outcomes(RefinedWebLines(), ["MENU\nHOME"])[0][0] == ["no_line_left", "too_many_words_removed"]
    assert outcomes(RefinedWebLines(), ["", " \n"]) == [(["no_line_left"], ""), (["no_line_left"], " \n")]


COUNTED = "likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|views|followers"
COUNTER = re.compile(rf"\W*\d[\d,.]*[kmb]?\s+({COUNTED})\W*")


def reference(text: str, *, strip_between: bool) -> str:
    """The rules one after the other on whole texts, with Python's strings. DCLM strips the text after each of them."""

    def joined(lines: list[str]) -> str:
        return "\n".join(lines).strip() if strip_between else "\n".join(lines)

    def without(keep, text: str) -> str:  # type: ignore[no-untyped-def]
        return joined([line for line in text.split("\n") if not line or keep(line)])

    def take_out(pattern: str, text: str) -> str:
        lines = []
        for line in text.split("\n"):
            new = re.sub(pattern, "", line, flags=re.I | re.A) if len(line.split()) <= 10 else line
            if new.strip() or not line:
                lines.append(new)
        return joined(lines)

    text = text.strip()
    text = without(lambda line: sum(c.isupper() for c in line) / len(line) <= 0.5, text)
    text = without(lambda line: sum(c.isdecimal() for c in line) / len(line) <= 0.999999, text)
    text = without(lambda line: not COUNTER.fullmatch(line.lower()), text)
    text = without(lambda line: len(line.split()) >= 2, text)
    for pattern in (r"(?u:\s)?items in cart", r"(?u:\s)?read more...$", r"^sign-in(?u:\s)?"):
        text = take_out(pattern.replace("(?u:\\s)", "[ \\t\\x85\\xa0\\u3000]"), text)
    return text.strip()


def edited(texts: list[str]) -> list[str]:
    return RefinedWebLines().edit(pa.array(texts, pa.string()))[0].to_pylist()


def test_real_and_made_up_texts_equal_the_rules_one_after_the_other(english_documents: list[str]) -> None:
    rng = random.Random(5)
    pieces = ["items in cart", "Read more...", "read morexyz", "Sign-in", "SIGN-IN", "3", "1,2k", "likes", "VIEWS", "•"]
    pieces += ["A", "word", "É", "ǅ", "Ⅷ", "٣", "\n", "\n", "\n\n", " ", " ", "\t", "-", ".", "é", "日本", "\u3000"]
    made_up = ["".join(rng.choices(pieces, k=rng.randint(1, 25))) for _ in range(3000)]
    for text, left in zip(made_up + english_documents, edited(made_up + english_documents), strict=True):
        assert left == reference(text, strip_between=False), repr(text[:300])
    assert edited(english_documents) == [reference(text, strip_between=True) for text in english_documents]
    differ = sum(a != reference(b, strip_between=True) for a, b in zip(edited(made_up), made_up, strict=True))
    assert differ < 60  # of 3,000 made of phrases and spaces


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from("aB1 \n\t.é日Sign-"), max_size=40), min_size=1, max_size=6), st.integers(0, 6))
def test_order_slices_and_batches_change_nothing(texts: list[str], cut: int) -> None:
    whole = edited(texts)
    column = pa.array(texts, pa.string()).slice(min(cut, len(texts)))
    assert RefinedWebLines().edit(column)[0].to_pylist() == whole[cut:]
    assert [edited([text])[0] for text in texts] == whole


def test_no_byte_outside_a_document_is_read(guarded, adversarial_documents: list[str]) -> None:  # type: ignore[no-untyped-def]
    texts = [text[:80] for text in adversarial_documents]
    expected = RefinedWebLines().edit(pa.array(texts))
    for guard in (b"\xff" * 64, b"\n" * 64, b"likes" * 12, b" " * 64):
        found = RefinedWebLines().edit(guarded(texts, guard))
        assert found[0].equals(expected[0])
        assert np.array_equal(found[1], expected[1])


def test_upper_case_is_pythons() -> None:
    """Of every character that the frozen Unicode version calls a capital, and of those it only counts as one."""
    points = [p for p in range(0x20, 0x20000) if not 0xD800 <= p < 0xE000 and p != 10 and not chr(p).isspace()]
    lines = [f"{chr(p)}{chr(p)} {chr(p)}" for p in points if not chr(p).isdecimal()]
    counts = RefinedWebLines().edit(pa.array(lines))[1]
    assert counts[:, kernel.UPPER_LINES].tolist() == [int(line[0].isupper()) for line in lines]
