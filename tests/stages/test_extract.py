"""Extract: charsets, engines, and pages that hang, crash, or eat memory."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages import extract_guard
from gristmill.stages.extract import Extract
from gristmill.stages.extract_guard import extract_guarded
from gristmill.stages.extract_pages import Engine, decode_page, extract_page
from gristmill.stages.kernels.nesting import tag_depths
from gristmill.stages.ledger import StageLedger, book

SENTENCE = "This is a sentence of the main text, and it is long enough. "
PAGE = (
    "<html><head><title>Title</title></head><body><nav><a href='/a'>Home</a> <a href='/b'>About</a></nav>"
    f"<article><h1>Heading</h1><p>{SENTENCE * 5}</p><table><tr><td>cell</td></tr></table></article>"
    "<footer>Copyright</footer></body></html>"
).encode()
DEEP = b"<div>" * 20_000 + b"x"


def batch_of(pages, charsets=None):
    columns = {"doc_id": [str(i) for i in range(len(pages))], "html": pa.array(pages, pa.binary())}
    if charsets is not None:
        columns["html_charset"] = pa.array(charsets, pa.string())
    return pa.record_batch(columns)


def run(batch, **options):
    """-> (texts of kept documents, reasons by doc_id, counters without those of rules); the books are checked."""
    result = Extract(**options)(batch)
    ledger = StageLedger(stage="extract")
    book(ledger, batch, result.kept, result.dropped, result.counters)
    ledger.check("here")
    assert "html" not in result.kept.schema.names
    assert "html_charset" not in result.kept.schema.names
    reasons = dict(zip(result.dropped["doc_id"].to_pylist(), result.dropped["reasons"].to_pylist(), strict=True))
    counters = {k: v for k, v in result.counters.items() if not k.startswith(("rule.", "only."))}
    return result.kept["text"].to_pylist(), reasons, counters


@pytest.mark.parametrize("timeout_s", [20, None])
def test_worked_example(timeout_s):
    pages = [
        PAGE,
        b"",
        b"<p> </p>",
        DEEP,
        b"x" * 2000,
        b"<p>short</p>",
        "<p>Grüße aus Köln am Rhein</p>".encode("latin1"),
    ]
    texts, reasons, counters = run(batch_of(pages), timeout_s=timeout_s, max_html_bytes=200_000, min_chars=10)
    assert texts[0].startswith(f"Heading\n\n{SENTENCE}")
    assert "Copyright" not in texts[0]
    assert texts[1:] == ["x" * 2000, "Grüße aus Köln am Rhein"]
    assert reasons == {"1": ["no_main_text"], "2": ["no_main_text"], "3": ["too_deep"], "5": ["too_few_chars"]}
    assert counters == {"charset.utf8": 5, "charset.detected": 1}
    assert run(batch_of(pages), timeout_s=timeout_s, max_html_bytes=1000)[1]["4"] == ["too_large_html"]


def test_engines_and_options():
    batch = batch_of([PAGE])
    assert "Home" not in run(batch)[0][0]
    plain = run(batch, engine="plain")[0][0]
    assert "Home" in plain
    assert "Copyright" in plain
    assert run(batch, engine="trafilatura")[0][0].startswith("Heading\nThis is a sentence")
    for engine in ("resiliparse", "trafilatura"):
        assert "cell" in run(batch, engine=engine)[0][0]
        assert "cell" not in run(batch, engine=engine, tables=False)[0][0]
    assert "/a" in run(batch, engine="plain", links=True)[0][0]


LOST = (  # the main content is the article alone; most of the text stands beside it
    f"<html><body><article><p>{SENTENCE}</p></article><nav>{'<p>' + SENTENCE * 3 + '</p>'}"
    f"{'<p>' + SENTENCE * 6 + '</p>'}</nav></body></html>"
).encode()


@pytest.mark.parametrize("timeout_s", [20, None])
def test_a_page_whose_main_content_is_small_is_kept_whole(timeout_s):
    options = {"timeout_s": timeout_s}
    pages = batch_of([LOST, PAGE, DEEP, b""])
    main, whole = run(pages, **options)[0], run(pages, engine="plain")[0]
    share = Extract(**options, min_share=1e-9)(pages).kept.column("extract.main_share").to_pylist()
    assert share == pytest.approx([len(main[0]) / len(whole[0]), len(main[1]) / len(whole[1])], abs=0.01)
    assert share[0] == pytest.approx(0.1, abs=0.02)
    assert share[1] > 0.8
    texts, reasons, counters = run(pages, **options, min_share=0.5)
    assert texts == [whole[0], main[1]]
    assert set(reasons) == {"2", "3"}
    assert counters["whole_page"] == 1
    assert "whole_page" not in run(pages, **options, min_share=0.05)[2]
    assert run(pages, **options, min_share=0.05)[0] == main


def test_trafilatura_is_measured_against_the_whole_page_too():
    texts, _, counters = run(batch_of([LOST]), engine="trafilatura", min_share=1)
    assert texts == run(batch_of([LOST]), engine="plain")[0]
    assert counters["whole_page"] == 1


def test_the_share_is_a_measure_only_where_it_is_asked_for():
    off, on = Extract(), Extract(min_share=0.2)
    assert [measure.column for measure in off.measures] == ["extract.chars"]
    assert [measure.column for measure in on.measures] == ["extract.chars", "extract.main_share"]
    assert set(on.adds) - set(off.adds) == {"extract.main_share"}
    assert "extract.main_share" not in off(batch_of([PAGE])).kept.schema.names
    dropped = on(batch_of([b"", DEEP, PAGE])).dropped
    assert dropped["extract.main_share"].null_count == 1  # the one that no engine saw


@pytest.mark.parametrize("share", [-0.1, 1.1, "much"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match="min_share"):
        Extract(min_share=share)


def test_trafilatura_does_not_remember_pages():
    assert run(batch_of([PAGE] * 6), engine="trafilatura")[0] == run(batch_of([PAGE]), engine="trafilatura")[0] * 6


@pytest.mark.parametrize(
    ("html", "header", "text", "by"),
    [
        ("Köln".encode(), None, "Köln", "utf8"),
        ("Köln".encode(), "iso-8859-1", "Köln", "utf8"),  # a server that lies
        ("Köln".encode("latin1"), "iso-8859-1", "Köln", "header"),
        ("“Köln”".encode("cp1252"), "ISO-8859-1", "“Köln”", "header"),  # HTML reads latin-1 as windows-1252
        (b'<meta charset="windows-1251">' + "Привет".encode("cp1251"), None, "Привет", "meta"),
        (b'<meta charset="windows-1251">' + "Привет".encode("cp1251"), "utf-8", "Привет", "meta"),
        (b'<?xml version="1.0" encoding="euc-jp"?>' + "日本語".encode("euc-jp"), None, "日本語", "meta"),
        (b'<meta http-equiv=x content="text/html; charset=koi8-r">' + "мир".encode("koi8-r"), None, "мир", "meta"),
        ("Это русский текст для проверки".encode("cp1251"), None, "русский", "detected"),
        ("これは日本語のテキストです。".encode("shift_jis"), "no-such-charset", "日本語", "detected"),
        ("これは日本語です".encode("iso-2022-jp"), "iso-2022-jp", "日本語", "header"),
        (b"\xef\xbb\xbf" + "Köln".encode(), "latin1", "Köln", "bom"),
        ("\ufeffKöln".encode("utf-16-le"), None, "Köln", "bom"),
        ("\ufeffKöln".encode("utf-16-be"), None, "Köln", "bom"),
        ("Köln".encode("utf-16-le"), "utf-16", "Köln", "header"),
    ],
)
def test_charsets(html, header, text, by):
    decoded, found_by, replaced = decode_page(html, header)
    assert text in decoded
    assert (found_by, replaced) == (by, 0)


def test_bytes_that_no_charset_explains_are_replaced_and_counted():
    broken = "Grüße aus Köln, größer".encode() * 20 + b"\xff\x81 " + "Grüße".encode() + "é".encode()[:1]
    text, by, replaced = decode_page(broken, "utf-8")
    assert by == "fallback"
    assert replaced == text.count("\ufffd")
    assert 1 <= replaced <= 3
    assert "größer" in text
    _, _, counters = run(batch_of([b"<p>" + broken + b"</p>"], ["utf-8"]))
    assert counters == {"charset.fallback": 1, "replaced.bytes": replaced}


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200), st.sampled_from([None, "utf-8", "shift_jis", "utf-16", "x", "\0", "hz-gb-2312", "utf-7"])
)
def test_any_bytes_give_clean_text_or_a_reason(html, charset):
    page = extract_page(Engine(engine="plain"), html, charset)
    assert "\0" not in page.text
    page.text.encode()


def test_the_text_policy_holds_for_references():
    assert extract_page(Engine(engine="plain"), b"<p>a&#0;b&#xD800;c\0d</p>", None).text == "a\ufffdb\ufffdcd"


def test_a_page_that_hangs_in_c_code_is_stopped_and_costs_no_other(monkeypatch):
    """20,000 nested elements hold resiliparse for 16 s inside one call."""
    texts, reasons, _ = run(batch_of([PAGE, DEEP, PAGE, DEEP, PAGE]), max_depth=10**9, timeout_s=0.3)
    assert len(texts) == 3
    assert reasons == {"1": ["too_slow"], "3": ["too_slow"]}


def test_a_page_that_takes_too_much_memory_costs_no_other():
    giant = b"<p>" + b"x y " * 2_000_000
    texts, reasons, _ = run(batch_of([PAGE, giant, PAGE]), max_memory_bytes=20 << 20)
    assert len(texts) == 2
    assert reasons == {"1": ["too_much_memory"]}


def test_an_engine_that_raises_fails_its_page(monkeypatch):
    def broken(engine, html, charset):
        if b"bad" in html:
            raise ValueError("no")
        return extract_page(engine, html, charset)

    monkeypatch.setattr(extract_guard, "extract_page", broken)
    texts, reasons, _ = run(batch_of([b"<p>good</p>", b"bad"]), timeout_s=None)
    assert (texts, reasons) == (["good"], {"1": ["extract_failed"]})


def test_a_helper_that_was_killed_is_replaced():
    engine, html, charsets = Engine(), pa.array([PAGE], pa.binary()), pa.nulls(1, pa.string())
    first = extract_guarded(engine, html, charsets, 20, 1 << 30).texts
    helper = extract_guard._helper()
    helper.process.kill()
    helper.process.wait()
    assert extract_guarded(engine, html, charsets, 20, 1 << 30).texts == first


def test_a_helper_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(extract_guard.sys, "executable", "/bin/false")
    monkeypatch.setattr(extract_guard, "_of_thread", extract_guard.threading.local())
    with pytest.raises(RuntimeError, match="ended with code 1 before it did a page"):
        extract_guarded(Engine(), pa.array([PAGE], pa.binary()), pa.nulls(1, pa.string()), 20, 1 << 30)


def test_no_pages():
    assert run(batch_of([]))[:2] == ([], {})


@pytest.mark.parametrize(
    ("html", "depth"),
    [
        (b"", 0),
        (b"<div><div></div></div>", 2),
        (b"<div>" * 7, 7),
        (b"<p>" * 100 + b"<li>" * 100 + b"<br>" * 100, 0),
        (b"<DIV><Span>", 2),
        (b"<h1>a</h1><h2>b</h2>", 1),
        (b"</div></div><b>", 1),
        (b"a < b <1 <", 0),
        (b"<custom-element><x>", 2),
    ],
)
def test_depth_of_tags(html, depth):
    assert tag_depths(pa.array([b"<i><i><i>", html, b"<i>"], pa.binary())).tolist() == [3, depth, 1]


def test_depth_reads_nothing_outside():
    whole = pa.array([b"<div>", b"<", b"div><div>"], pa.binary())
    np.testing.assert_array_equal(tag_depths(whole.slice(1, 1)), [0])
