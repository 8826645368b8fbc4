"""Pieces of text: by hand, against datatrove's copy of CCNet's normaliser, and at the edges of buffers."""

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from datatrove.utils.perplexity import KenlmModel
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import normalise
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kernels.unicode import UNICODE_VERSION

TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=60)


def pieces_of(*texts):
    found = Pieces(pa.array(texts, pa.string()))
    return [found.document(i).decode() for i in range(len(found))]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("Café №3,\n\nDÉJÀ-vu\n", "cafe № 0 ,\ndeja - vu"),
        ("It’s  “1,024”…", 'it \' s " 0 , 000 " . . .'),
        ("今日は、Ok。", "今 日 は , ok ."),
        ("a\tb\rc\x0bd\u00a0e\u3000f", "a b c d e f"),
        ("a\x00b\x7fc\u200dd\u00ade", "abcde"),
        ("한국어 ВОДА́ ΣΟΦΌΣ İstanbul", "한국어 вода σοφοσ istanbul"),
        ("<s> </s> <unk>", "< s > < / s > < unk >"),
        ("٣४1", "000"),
        ("\n \n", ""),
        ("", ""),
    ],
)
def test_worked_examples(text, pieces):
    assert pieces_of(text) == [pieces]


def ccnet(line):
    """CCNet's normalisation, as datatrove copied it, without white space and format characters."""
    text = KenlmModel("wikipedia", "en").normalize(line)
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) != "Cf")


def test_every_character_is_normalised_as_ccnet_does():
    """All but Hangul, which is not decomposed here."""
    if unicodedata.unidata_version != UNICODE_VERSION:
        pytest.skip(f"this interpreter has Unicode {unicodedata.unidata_version}, the table {UNICODE_VERSION}")
    assigned = (p for p in range(0x110000) if unicodedata.category(chr(p)) not in ("Cn", "Co", "Cs"))
    points = [p for p in assigned if not 0xAC00 <= p <= 0xD7A3]
    found = pieces_of(*(chr(p) for p in points))
    wrong = [hex(p) for p, text in zip(points, found, strict=True) if text.replace(" ", "") != ccnet(chr(p))]
    assert wrong == []


@given(TEXTS.filter(lambda t: not any(0xAC00 <= ord(c) <= 0xD7A3 or c.isdigit() or c == "Σ" for c in t)))
@settings(max_examples=200, deadline=None)
@example("naïve ÅNGSTRÖM—x … é\n")
def test_whole_lines_are_normalised_as_ccnet_does(text):
    """Order apart, for canonical decomposition reorders marks; without digits, of which datatrove makes numbers."""
    expected = [sorted(ccnet(line)) for line in text.split("\n")]
    found = [sorted(line.replace(" ", "")) for line in pieces_of(text)[0].split("\n")]
    assert found == [line for line in expected if line] or (found == [[]] and not any(expected))


@given(st.lists(TEXTS, max_size=6))
@settings(max_examples=200, deadline=None)
def test_counts_and_layout(texts):
    found = Pieces(pa.array(texts, pa.string()))
    for i, text in enumerate(pieces_of(*texts)):
        lines = text.split("\n") if text else []
        assert found.lines[i] == len(lines)
        assert found.pieces[i] == sum(len(line.split(" ")) for line in lines)
        assert all(line == " ".join(line.split()) != "" for line in lines)
    assert found.data.tobytes() == b"".join((t + "\n").encode() for t in pieces_of(*texts) if t)


@given(TEXTS)
@settings(max_examples=200, deadline=None)
def test_pieces_of_pieces_are_the_same(text):
    once = pieces_of(text)[0]
    assert pieces_of(once)[0] == once


@given(st.lists(TEXTS, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_documents_are_read_and_written_inside_their_bounds(texts):
    """Each document lies between bytes that would change it, and the output between bytes that must not change."""
    before, after = "Åx".encode(), "\u0301é".encode()
    offsets = []
    whole = b"".join(t.encode() for t in texts)
    data = np.frombuffer(before + whole + after, np.uint8)
    at = len(before)
    for text in texts:
        offsets.append(at)
        at += len(text.encode())
    offsets.append(at)
    out = np.full(normalise.MAX_GROWTH * len(whole) + 8, 0xAA, np.uint8)
    n = len(texts)
    ends, pieces, lines = np.zeros(n + 1, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    page, table, kind, text_ends, text_bytes = normalise.TABLES
    normalise._normalise(
        np.array(offsets), data, page, table, kind, text_ends, text_bytes, True, out, ends, pieces, lines
    )
    chunks = [out[ends[i] : ends[i + 1]].tobytes().decode().rstrip("\n") for i in range(n)]
    assert chunks == pieces_of(*texts)
    assert ends[-1] <= len(out) - 8
    assert set(out[ends[-1] :].tolist()) <= {0xAA}


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("Café №3,\n\nDÉJÀ-vu\n", "cafe №0,\ndeja-vu"),
        ("It’s  “1,024”…", 'it\'s "0,000"...'),
        ("今日は、Ok。 x", "今日は,ok. x"),
        ("a—b \u200d c", "a-b c"),
        (" \n\t\n", ""),
    ],
)
def test_only_white_space_separates(text, joined):
    found = Pieces(pa.array([text]), apart=False)
    assert found.document(0).decode() == joined
    assert found.pieces.tolist() == [len(joined.split())]


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_apart_or_not_the_characters_are_the_same(text):
    apart, joined = Pieces(pa.array([text])), Pieces(pa.array([text]), apart=False)
    assert apart.document(0).replace(b" ", b"") == joined.document(0).replace(b" ", b"")
    assert apart.lines.tolist() == joined.lines.tolist()


def test_slices_of_a_column():
    column = pa.array(["zz", "Ab", "", "c\nd", "zz"])
    found = Pieces(column[1:4])
    assert [found.document(i) for i in range(3)] == [b"ab", b"", b"c\nd"]
    assert len(Pieces(column[:0])) == 0


def test_warm_compiles_without_error():
    normalise.warm()
    assert normalise._normalise.signatures
