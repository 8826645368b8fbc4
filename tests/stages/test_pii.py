"""PII: which addresses are found, and that nothing else of a text changes."""

import ipaddress
import random

import numpy as np
import pyarrow as pa
import pytest
from datatrove.pipeline.formatters.pii import PIIFormatter
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels.addresses import _NOT_GLOBAL, find_addresses, replace_spans
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.pii import Pii


def batch_of(texts):
    return pa.record_batch({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())})


def run(*texts, **options):
    result = Pii(**options)(batch_of(texts))
    return result.kept["text"].to_pylist()


MAIL, V4, V6 = "email@example.com", "192.0.2.1", "2001:db8::1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to bob.smith+x@mail.example.org, please.", f"Write to {MAIL}, please."),
        ("'x@y.co.uk' <a_b@c.de>", f"'{MAIL}' <{MAIL}>"),
        ("请写信给a@b.cn谢谢", f"请写信给{MAIL}谢谢"),
        ("пишите на адрес a@b.ru.", f"пишите на адрес {MAIL}."),
        ("mailto:a@b.c", f"mailto:{MAIL}"),
        ("a@b.c-d- a@b-.c a@-b.c", f"{MAIL}- a@b-.c a@-b.c"),
        ("a..b@c.de .a@b.c", f"a..{MAIL} .{MAIL}"),
        ("no@domain @x.y x@ 1 @ 2", "no@domain @x.y x@ 1 @ 2"),
        ("a@b.c@d.e", f"{MAIL}@d.e"),
        ("server 8.8.8.8:53, 1.1.1.1/24 and 9.9.9.9.", f"server {V4}:53, {V4}/24 and {V4}."),
        ("地址8.8.4.4的 ip:8.8.4.4 2.2.2.2-3.3.3.3", f"地址{V4}的 ip:{V4} {V4}-{V4}"),
        ("2607:f8b0:4004:80a::200e is", f"{V6} is"),
        ("[2606:4700:4700::1111]:80, 2a00:1450:4001::5:", f"[{V6}]:80, {V6}:"),
        ("", ""),
    ],
)  # fmt: skip
def test_worked_examples(text, expected):
    assert run(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1 127.0.0.1 192.168.1.1 172.16.0.1 169.254.1.1",
        "1.2.3 1.2.3.4.5 v1.2.3.4 1.2.3.4a 300.1.1.1 1234.1.1.1",
        "01.2.3.4 1.2.3.04 foo-1.2.3.4.tar",
        "2001:db8::5 fe80::1 ::1 3fff::1",
        "2024:11 20:30:40 std::abc::def a::b 2130:10:11:12",
    ],
)
def test_what_stays(text):
    assert run(text) == [text]


def test_counters_switches_and_books():
    texts = ["a@b.c 8.8.8.8 2606:4700::1", "nothing", "a@b.c a@b.c"]
    before = batch_of(texts)
    result = Pii()(before)
    assert result.counters == {
        "emails_replaced": 3,
        "ipv4_replaced": 1,
        "ipv6_replaced": 1,
        "documents_changed": 2,
    }
    ledger = StageLedger(stage="pii")
    book(ledger, before, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert ledger.edited.chars == sum(map(len, texts)) - sum(map(len, result.kept["text"].to_pylist()))
    assert run(texts[0], emails=False) == [f"a@b.c {V4} {V6}"]
    assert run(texts[0], ipv4=False, ipv6=False, email_value="<mail>") == ["<mail> 8.8.8.8 2606:4700::1"]


def test_public_ipv4_is_what_python_calls_global():
    edges = [int(edge) + step for edge in _NOT_GLOBAL.ravel() for step in (-1, 0, 1)]
    rng = random.Random(1)
    numbers = [n for n in edges if 0 <= n < 1 << 32] + [rng.randrange(1 << 32) for _ in range(3000)]
    addresses = [ipaddress.IPv4Address(n) for n in numbers]
    # Patch versions of Python differ on 192.0.0.0/24 and its exceptions.
    addresses = [a for a in addresses if a not in ipaddress.IPv4Network("192.0.0.0/24")]
    got = run(*map(str, addresses))
    wrong = [str(a) for text, a in zip(got, addresses, strict=True) if (text != str(a)) != a.is_global and str(a) != V4]
    assert wrong == []
    assert run("192.0.0.8", "192.0.0.9", "192.0.0.10", "192.0.0.11") == ["192.0.0.8", V4, V4, "192.0.0.11"]


@settings(max_examples=300, deadline=None)
@given(st.text("ab1.@-_+ ,\n=", max_size=40))
def test_emails_are_those_of_datatrove(text):
    theirs = PIIFormatter(email_replacement=MAIL, remove_ips=False).format(text)
    assert run(text, ipv4=False, ipv6=False) == [theirs]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["8.8.8.8", "10.1.1.1", "1.2.3", "300.1.1.1", "255.255.255.255", "1.1.1.1"]), max_size=6)
)
def test_ipv4_addresses_between_spaces_are_those_of_datatrove(parts):
    text = " ".join(parts)
    assert run(text) == [PIIFormatter(ip_replacement=V4, remove_emails=False).format(text)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from("a1.@-:中é😀 2\n"), max_size=40), max_size=6), st.integers(0, 3))
def test_slices_and_repetition(texts, start):
    """A slice gives the same as its own rows, a second run changes nothing, and untouched text stays."""
    batch = batch_of(texts)
    start = min(start, len(texts))
    assert Pii()(batch.slice(start)).kept["text"].to_pylist() == run(*texts)[start:]
    once = run(*texts)
    assert run(*once) == once
    assert [t for t in texts if "@" not in t and "." not in t and ":" not in t] == [
        o for t, o in zip(texts, once, strict=True) if "@" not in t and "." not in t and ":" not in t
    ]


@pytest.mark.parametrize("filler", [b"@", b"8", b".", b":", b"a", b"2", b"-"])
def test_bytes_outside_the_texts_are_not_read(filler):
    for text in (b"a@b.c", b"8.8.8.8", b"2606:4700::1", b"@", b"1.1.1", b"a@b", b"2606:47", b"x@y.", b""):
        guard = filler * 64
        data = np.frombuffer(guard + text + guard, np.uint8)
        ends = np.array([64, 64 + len(text)])
        alone = np.frombuffer(text + b"\0", np.uint8)
        inside = find_addresses(data, ends, True, True, True)
        inside[:, 1:3] -= 64
        np.testing.assert_array_equal(inside, find_addresses(alone, np.array([0, len(text)]), True, True, True))


@pytest.mark.parametrize("unit", ["a", "a@", "@", "1.", "1", "2222:", "2:", "1:", "a.a@", ".", "a-"])
def test_time_is_linear_on_adversarial_text(unit):
    text = unit * (2_000_000 // len(unit))
    assert len(run(text)[0]) >= 1  # quadratic time would take hours


def test_splice_by_hand():
    ends, data = string_views(pa.array(["abcdef", "", "xyz"]))
    spans = np.array([[0, 1, 3, 0], [0, 4, 6, 1], [2, 6, 9, 0]])
    out, offsets = replace_spans(data, ends, spans, np.frombuffer(b"<1><<2>>", np.uint8), np.array([0, 3, 8]))
    assert (out.tobytes(), offsets.tolist()) == (b"a<1>d<<2>><1>", [0, 10, 10, 13])
