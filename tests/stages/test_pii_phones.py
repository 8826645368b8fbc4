"""Telephone numbers: which are found, and the many things of digits that are none."""

import random

import numpy as np
import phonenumbers
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages.kernels.numbers import find_numbers
from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.pii import Pii


def batch_of(texts):
    return pa.record_batch({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())})


def run(*texts, **options):
    return Pii(**{"phone_numbers": True, "phone_value": "<P>"} | options)(batch_of(texts)).kept["text"].to_pylist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("call +49 30 901820 now", "call <P> now"),
        ("+1 (212) 736-5000, or 212-736-5000.", "<P>, or <P>."),
        ("(212) 736-5000 or (212)736-5000", "<P> or <P>"),
        ("1-800-275-2273; 212.736.5000; 212 736 5000", "<P>; <P>; <P>"),
        ("tel:+44-20-7946-0018", "tel:<P>"),
        ("+44 (0)20 7946 0018/020 7946 0018", "<P>/020 7946 0018"),  # behind "/" a number is a part of a path
        ("(+33) 1 42 68 53 00", "<P>"),
        ("01 42 68 53 00, 06.12.34.56.78", "<P>, <P>"),
        ("(020 7946 0018)", "(<P>)"),
        ("030/90182000 (089) 12345678", "<P> <P>"),
        ("+4930901820", "<P>"),
        ("电话+86 10 6552 9988谢谢", "电话<P>谢谢"),
        ("тел: 212\u00a0736\u20115000 é", "тел: <P> é"),
        ("call 212-736-5000 (2 lines)", "call <P> (2 lines)"),
        ("in 2020 212-736-5000x12", "in 2020 <P>x12"),
        ("00 44 1483 862814", "<P>"),
        ("", ""),
    ],
)  # fmt: skip
def test_worked_examples(text, expected):
    assert run(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-02 01.02.2003 12/31/1999 2024-01-02 10:20:30 20240102-123456 02-12-2003-2004",
        "1.2.3 1.22.333.4444 10.20.30.40 192.168.100.200 v2.16.840.1 2.16.840.1.113730",
        "ISBN 0-306-40615-2, 978-3-16-148410-0, 978 3 16 148410 0, 0-201-15790-X, 1-56592-250-2, 3-540-12345-6",
        "$ 1 234 567 890 $212 736 5000 €212 736 5000 212 736 5000 € 212 736 5000% 1 234 567 890 12.345.678,90 £030 90182000",  # noqa: E501
        "3.14159265359 0.2329985562 212,736,5000 030,90182000 1/2147483648 0 4294967295 098   320   3762",
        "123-456-7890 555-1234 123-45-6789 4111 1111 1111 1111 ISSN 2049-3630",
        "01 02 03 04 05 da 03 46 28 08 06 03 46 28 08 06 ff 03 46 28 08 06 11 10 20 30 40 50",
        "0 25 50 75 100 1024 2048 4096",
        "+1.5 +100000 +12345678 +0100 C++11 2014 @@ -1,5 +12,7 @@",
        "https://x.org/212-736-5000/ #212-736-5000 a212-736-5000 212-736-5000b x_212-736-5000 ",
        "212-736-5000@x 2-212-736-5000-7",
        "(202) 555-0100 +1 202 555 0199",
        "10:212-736-5000 212-736-5000:20",
    ],
)  # fmt: skip
def test_what_stays(text):
    assert run(text) == [text]


def test_off_by_default_and_counted():
    text = "+49 30 901820, a@b.c"
    assert Pii()(batch_of([text])).kept["text"].to_pylist() == ["+49 30 901820, email@example.com"]
    assert "phones_replaced" not in Pii()(batch_of([text])).counters
    before = batch_of([text, "nothing", "+49 30 901820 +49 30 901821"])
    result = Pii(phone_numbers=True)(before)
    assert result.counters == {
        "emails_replaced": 1,
        "ipv4_replaced": 0,
        "ipv6_replaced": 0,
        "phones_replaced": 3,
        "documents_changed": 2,
    }
    ledger = StageLedger(stage="pii")
    book(ledger, before, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert result.kept["text"].to_pylist()[2] == "+1-202-555-0100 +1-202-555-0100"
    assert run(*result.kept["text"].to_pylist()) == result.kept["text"].to_pylist()


def test_regions():
    assert run("91 123 45 67", "912 34 56 78") == ["91 123 45 67", "912 34 56 78"]
    assert run("912 34 56 78", phone_regions=["ES"]) == ["<P>"]
    assert run("212-736-5000 +1 212 736 5000", phone_regions=[]) == ["212-736-5000 <P>"]
    with pytest.raises(ValidationError, match="no region UK with telephone numbers; write ISO 3166"):
        Pii(phone_regions=["US", "UK"])


def test_international_form_of_every_country_is_found():
    """libphonenumber's example of each region, in both international forms, between letters that have no spaces."""
    missed = []
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        number = phonenumbers.example_number_for_type(region, phonenumbers.PhoneNumberType.MOBILE)
        if number is None or len(phonenumbers.national_significant_number(number)) < 7:
            continue
        for form in (phonenumbers.PhoneNumberFormat.INTERNATIONAL, phonenumbers.PhoneNumberFormat.E164):
            text = phonenumbers.format_number(number, form)
            if run(f"電話{text}。") != ["電話<P>。"] and "55501" not in text and "555-01" not in text:
                missed.append(text)
    assert missed == []


def test_national_form_of_the_regions_is_found():
    for region, kinds in {"US": [2], "GB": [0, 1], "DE": [0, 1], "FR": [0, 1]}.items():  # fixed, mobile, either
        for kind in kinds:
            number = phonenumbers.example_number_for_type(region, kind)
            if region == "US":
                number.national_number = 2127365000
            text = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
            assert run(f"[{text}]") == ["[<P>]"], text


WORDS = st.text(
    st.characters(blacklist_categories=("Cs", "Nd", "Sc"), blacklist_characters="@.:+-/()%_x\0"), max_size=8
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(WORDS, st.sampled_from(["+49 30 901820", "+81-3-3201-3331", "(212) 736-5000"])), max_size=5))
def test_text_around_a_number_is_untouched_in_every_script(parts):
    text = "".join(f"{word}, {number} " for word, number in parts)
    assert run(text) == ["".join(f"{word}, <P> " for word, _ in parts)]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(st.sampled_from("0123456789+-. ()é中\u00a0\u2011/€x"), max_size=40), max_size=5), st.integers(0, 4)
)
def test_slices_and_repetition(texts, start):
    once = run(*texts)
    start = min(start, len(texts))
    stage = Pii(phone_numbers=True, phone_value="<P>")
    assert stage(batch_of(texts).slice(start)).kept["text"].to_pylist() == once[start:]
    for before, after in zip(texts, once, strict=True):
        pieces = after.split("<P>")
        assert before.startswith(pieces[0])
        assert before.endswith(pieces[-1])
        at = 0
        for piece in pieces:
            at = before.index(piece, at) + len(piece)  # what stays is there, in order


@pytest.mark.parametrize("filler", [b"1", b"+", b" ", b"-", b"\xc2", b"\xe2\x80", b"x"])
def test_bytes_outside_the_texts_are_not_read(filler):
    for text in (b"+49 30 901820", b"212-736-5000", b"+49 30 901820\xc2\xa0", b"212-736-5000-", b"", b"+", b"1"):
        guard = filler * 32
        ends = np.array([len(guard), len(guard) + len(text)])
        inside = find_numbers(np.frombuffer(guard + text + guard, np.uint8), ends)
        inside[:, 1:] -= len(guard)
        alone = find_numbers(np.frombuffer(text + b"\0", np.uint8), np.array([0, len(text)]))
        np.testing.assert_array_equal(inside, alone)


def test_only_candidates_are_looked_at_in_python(monkeypatch):
    def never(*_):
        raise AssertionError("a document without a candidate was looked at")

    monkeypatch.setattr("gristmill.stages.pii_phones._phones", never)
    rng = random.Random(1)
    texts = [
        " ".join(str(rng.randrange(10_000)) + rng.choice(", ; a b".split()) for _ in range(200)) for _ in range(50)
    ]
    assert run(*texts) == texts


@pytest.mark.parametrize("unit", ["1", "1 ", "+1", "1-", "(", "(1", "1)", "+", "\u00a01", "12 34 "])
def test_time_is_linear_on_adversarial_text(unit):
    text = unit * (2_000_000 // len(unit))
    assert len(run(text)[0]) > 1_000_000
