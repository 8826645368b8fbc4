"""Records in order are read in blocks, the rest by fastwarc: both must see the same file in the same way."""

from __future__ import annotations

import gzip
import io
import random
import zlib
from pathlib import Path

import pytest
import zstandard
from fastwarc.warc import HeaderMap
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.stages import readers_warc_blocks as blocks
from gristmill.stages import readers_warc_records as searched
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import read_batches
from gristmill.stages.readers_warc import _http_head
from gristmill.stages.readers_warc_blocks import FIELDS, Block, Record, Stop, in_blocks
from gristmill.stages.shards import Shard, ShardError

WANTED = frozenset({"response", "resource"})
MOST = 50_000


def record(
    number: int, content: bytes = b"x", kind: str = "response", more: str = "", length: int | None = None
) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number}>\r\n{more}"
    return (
        f"{head}Content-Length: {len(content) if length is None else length}\r\n\r\n".encode() + content + b"\r\n\r\n"
    )


def member(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def seen(items: object) -> list[object]:
    """Records and gaps, or the error that ended them."""
    out: list[object] = []
    try:
        for item in items:  # type: ignore[attr-defined]
            for one in [item.record(i) for i in range(len(item))] if isinstance(item, Block) else [item]:
                if isinstance(one, Record):
                    content = None if one.content is None else bytes(one.content)
                    headers = {name: value for name, value in one.headers.items() if name in FIELDS.values()}
                    out.append(one._replace(content=content, headers=headers))
                else:
                    out.append(one)
    except ShardError as error:
        out.append(str(error))
    return out


def both(data: bytes) -> list[object]:
    """What `records` gives, after it was compared with fastwarc alone."""
    mine = seen(searched.records("x", io.BytesIO(data), WANTED, MOST))
    place = searched._Place()
    alone = seen(searched._searched("x", io.BytesIO(data), place, searched.NEVER, WANTED, MOST))
    assert mine == alone
    return mine


def in_order(data: bytes, start: int = 0, skip: bool = False) -> tuple[list[Record], Stop]:
    steps, out = in_blocks(io.BytesIO(data), start, skip, WANTED, MOST), []
    while True:
        try:
            block = next(steps)
        except StopIteration as stop:
            return out, stop.value
        out += [block.record(i) for i in range(len(block))]


THREE = [record(1), record(2, random.Random(1).randbytes(30_000)), record(3, kind="request")]


@pytest.mark.parametrize("read", [1 << 20, 37])
@pytest.mark.parametrize("block", [1 << 21, 1])
def test_files_in_order_are_read_in_blocks_to_their_end(monkeypatch, block, read):
    monkeypatch.setattr(blocks, "_BLOCK", block)
    monkeypatch.setattr(blocks, "_READ", read)
    packed = b"".join(map(member, THREE))
    found, stop = in_order(packed)
    assert stop.at_end
    sizes = [len(member(one)) for one in THREE]
    assert [one.position for one in found] == [str(sum(sizes[:i])) for i in range(3)]
    assert [one.kind for one in found] == ["response", "response", "request"]
    assert [None if one.content is None else len(one.content) for one in found] == [1, 30_000, None]
    assert found[0].headers == {"WARC-Type": "response", "WARC-Record-ID": "<urn:uuid:1>", "Content-Length": "1"}
    assert both(packed) == seen(found)
    found, stop = in_order(packed, sizes[0], skip=True)
    assert [one.headers["WARC-Record-ID"] for one in found] == ["<urn:uuid:3>"]
    assert stop == Stop(sum(sizes[:2]), True)


def test_the_magic_of_gzip_inside_a_member_is_not_its_end():
    """Stored blocks of deflate hold the bytes as they are."""
    stored = zlib.compressobj(0, wbits=31)
    inside = record(2, b"\x1f\x8b\x08" + member(record(9)) + b"\x1f\x8b")
    packed = member(record(1)) + stored.compress(inside) + stored.flush() + member(record(3))
    found, stop = in_order(packed)
    assert stop.at_end
    assert [one.headers["WARC-Record-ID"][-2] for one in found] == ["1", "2", "3"]
    both(packed)


ODD = {
    "type in another case": record(1, kind="Response"),
    "type that nobody knows": record(1, kind="own"),
    "name in another case": record(1).replace(b"WARC-Type", b"warc-type"),
    "two lengths": record(1, more="content-length: 7\r\n"),
    "two types": record(1, more="WARC-Type: request\r\n"),
    "line that goes on": record(1, more="A: b\r\n c\r\n"),
    "line without a colon": record(1, more="hello\r\n"),
    "space behind a name": record(1, more="WARC-Date : b\r\n"),
    "name twice": record(1, more="WARC-Date: b\r\nWARC-Date: c\r\n"),
    "name twice, spelled in two ways": record(1, more="WARC-Date: b\r\nWARC-date: c\r\n"),
    "NUL": record(1, more="A: \0\r\n"),
    "not UTF-8": record(1, more="WARC-Date: ü\r\n").replace("ü".encode(), b"\xfc"),
    "bare CR": record(1, more="A: b\rc\r\n"),
    "bare LF": record(1, more="A: b\nC: d\r\n"),
    "sign before the length": record(1, more="Content-Length: +1\r\n").replace(b"Content-Length: 1\r\n", b""),
    "long header": record(1, more="A: " + "b" * 20_000 + "\r\n"),
    "old version": record(1).replace(b"WARC/1.0", b"WARC/0.18"),
    "long content": record(1, b"z" * (MOST + 1)),
    "no blank line behind it": record(1)[:-2],
    "too short": record(1, b"abc", length=2),
    "too long": record(1, b"abc", length=9),
    "no length": record(1).replace(b"Content-Length: 1\r\n", b""),
    "nothing": b"",
    "header that does not end": record(1)[:-12],
}  # fmt: skip


PACKS = [lambda parts: b"".join(map(member, parts)), b"".join, lambda parts: member(b"".join(parts))]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("pack", PACKS)
def test_what_is_odd_is_left_to_fastwarc(name, pack):
    """Behind it blocks are read again, and the records are the same."""
    parts = [record(8), ODD[name], *(record(i) for i in range(20, 40))]
    packed = pack(parts)
    if pack is PACKS[0]:
        found, stop = in_order(packed)
        assert len(found) == 1
        assert stop == Stop(0, False)
    both(packed)


PLAIN = {
    "no space before a value": "WARC-Date:b\r\n",
    "no value": "WARC-Date: \r\n",
    "spaces around a value": "WARC-Date:  b \t \r\n",
    "a name that is not read twice": "X-Own: b\r\nx-own: c\r\n",
    "UTF-8": "WARC-Target-URI: http://ü/a: b\r\n",
}


@pytest.mark.parametrize("name", PLAIN)
def test_headers_that_are_plain_are_taken(name):
    packed = member(record(8)) + member(record(1, more=PLAIN[name])) + member(record(9))
    found, stop = in_order(packed)
    assert stop.at_end
    assert both(packed) == seen(found)


def test_blocks_go_on_behind_damage():
    """Counted by what fastwarc is asked for: a damaged member in a thousand records costs a few of them."""
    calls = 0
    original = searched._take

    def counted(*arguments):
        nonlocal calls
        calls += 1
        return original(*arguments)

    data = [member(record(i, random.Random(i).randbytes(50))) for i in range(1000)]
    data[300] = data[300][:60] + b"\xff" * 20 + data[300][80:]
    searched._take = counted
    try:
        found = seen(searched.records("x", io.BytesIO(b"".join(data)), WANTED, MOST))
    finally:
        searched._take = original
    assert sum(isinstance(item, Record) for item in found) == 999
    assert calls < 20


@pytest.mark.parametrize("at", range(-8, 0))
def test_a_checksum_and_a_length_of_gzip_are_checked(at):
    """The last eight bytes of a member are its CRC-32 and its size (RFC 1952)."""
    good, bad = member(record(1)), bytearray(member(record(2)))
    bad[at] ^= 1
    found, stop = in_order(good + bytes(bad) + good)
    assert len(found) == 1
    assert stop == Stop(0, False)
    both(good + bytes(bad) + good)


@pytest.mark.parametrize("size", [0, MOST + 100_000, 2**32 - 1])
def test_a_size_that_is_not_true_costs_no_memory(size):
    """The size of a member is read before it is inflated; a wrong one must not be believed."""
    bad = member(record(2))[:-4] + size.to_bytes(4, "little")
    found, stop = in_order(member(record(1)) + bad + member(record(3)))
    assert len(found) == 1
    assert stop == Stop(0, False)


KINDS = st.sampled_from(["response", "request", "warcinfo", "resource", "own", "Response"])
CONTENTS = st.one_of(st.binary(max_size=40), st.integers(0, 3000).map(lambda n: random.Random(n).randbytes(n)))
MORE = st.sampled_from(
    [
        "",
        "",
        "",
        "A: b\r\n c\r\n",
        "WARC-Date: ü\r\n",
        "nothing\r\n",
        "WARC-Date : b\r\n",
        "warc-target-uri: \x1f \t\r\n",
    ]
)


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    """Records in frames, with up to three places damaged."""
    records = [
        record(i, draw(CONTENTS), draw(KINDS), draw(MORE), draw(st.sampled_from([None] * 9 + [0, 5, 300, 100_000])))
        for i in range(draw(st.integers(0, 12)))
    ]
    kind = draw(st.sampled_from(["gzip", "gzip", "zstd", "plain", "stream", "mixed"]))
    if kind == "plain":
        data = b"".join(records)
    elif kind == "stream":
        data = member(b"".join(records))
    elif kind == "mixed":
        data, rest = b"", b"".join(records)
        while rest:
            size = draw(st.integers(1, 600))
            data, rest = data + member(rest[:size]), rest[size:]
    else:
        data = b"".join((member if kind == "gzip" else zstandard.compress)(one) for one in records)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data = draw(
            st.sampled_from(
                [
                    data[:at],
                    data[:at] + data[at + 1 :],
                    data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:],
                    data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at + 10 :],
                    data + b"\0" * 20,
                ]
            )
        )
    return data


@settings(max_examples=200, deadline=None)
@given(archives())
@example(b"")
@example(member(b"") + member(record(1)))
@example(member(record(1)) + b"\0" * 20)
@example(member(record(1)[:30]) + member(record(1)[30:] + record(2)))
@example(zlib.compress(record(1)))
def test_damaged_or_not_both_ways_see_the_same(data):
    both(data)


HEADS = [
    b"HTTP/1.1 200 OK\r\nContent-Type: b\r\nC:d\r\n\r\nbody",
    b"HTTP/1.1 404\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Type : \t b \r\ncontent-type: c\r\n\r\n",
    b"HTTP/2 200 OK\r\nContent-Type: b\r\n\r\nx",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 200OK\r\n\r\n",
    b"HTTP/1.1  200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\nA: b\n\nx",
    b"HTTP/1.1 200 OK\r\nContent-Type: \xfc\r\nB\r\n c\r\n\r\nx",
    b"http/1.1 200 OK\r\n\r\n",
    b"",
    b"HTTP/1.1 099 x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: b\rc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: b\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
    b"HTTP/1.1 \xb2\xb2\xb2 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"x" * 9_000 + b"\r\n\r\ny",
]


def by_fastwarc(content: bytes) -> tuple[int, int | None, str | None, str]:
    http = HeaderMap("latin1")
    length = http.parse(io.BytesIO(content))
    first = {name.lower(): value for name, value in reversed(http.items())}
    encodings = [first.get(name, "") for name in ("content-encoding", "transfer-encoding")]
    return length, http.status_code, first.get("content-type"), ",".join(filter(None, encodings)).lower()


@pytest.mark.parametrize("content", HEADS)
def test_the_head_of_a_response_is_what_fastwarc_reads(content):
    assert _http_head(content) == by_fastwarc(content)
    assert _http_head(memoryview(content)) == by_fastwarc(content)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 ",
                b"200",
                b" ",
                b"\r\n",
                b"\r\n",
                b"Content-Type",
                b"content-type",
                b"Transfer-Encoding:",
                b"Content-Encoding: ",
                b":",
                b"B, c",
                b"\t",
                b"\n",
                b"\xe9",
            ]
        )
    )
)
def test_any_head_is_what_fastwarc_reads(parts):
    content = b"HTTP/1.1 200" + b"".join(parts)
    assert _http_head(content) == by_fastwarc(content)


def test_a_head_without_an_end_is_no_head():
    assert _http_head(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 200_000) == (0, None, None, "")


MIMES = st.sampled_from(["text/html", "TEXT/HTML; charset=Latin1", "application/pdf", "", "text/plain", "text/hÃ¤ml"])
MORE_HTTP = st.sampled_from(
    [
        "",
        "",
        "Content-Encoding: gzip\r\n",
        "content-encoding: \r\n",
        "Transfer-Encoding: identity\r\n",
        "A: b\r\n c\r\n",
        "Content-Type: text/html; charset=utf-16\r\n",
    ]
)
BODIES = st.sampled_from([b"<html>x", b"", b"%PDF-1.4", b"a\0b", b"hello", b"\x1f\x8b", "<p>\u00fc".encode("utf-16")])
MORE_WARC = st.sampled_from(
    [
        "",
        "",
        "WARC-Truncated: length\r\n",
        "WARC-Identified-Payload-Type: text/html\r\n",
        "WARC-Identified-Payload-Type: image/png\r\n",
        "WARC-Identified-Payload-Type: \r\n",
        "WARC-Target-URI: http://x/\u00fc\r\nWARC-Date: 2024\r\n",
        "Content-Type: application/http; msgtype=response\r\n",
        "Content-Type: text/dns\r\n",
    ]
)


@st.composite
def crawls(draw: st.DrawFn) -> bytes:
    """Responses of all sorts between other records, a member each, now and then with the same id."""
    out = []
    for _ in range(draw(st.integers(1, 10))):
        mime, more, status = draw(MIMES), draw(MORE_HTTP), draw(st.sampled_from([200, 200, 200, 404, "x"]))
        declared = f"Content-Type: {mime}\r\n" if draw(st.booleans()) else ""
        content = f"HTTP/1.1 {status} OK\r\n{declared}{more}\r\n".encode() + draw(BODIES)
        kind = draw(st.sampled_from(["response"] * 6 + ["resource", "request", "conversion"]))
        out.append(member(record(draw(st.integers(0, 5)), content, kind, draw(MORE_WARC))))
    data = b"".join(out)
    if draw(st.booleans()):
        return data
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]


def everything(path: Path, format: str) -> tuple[object, ...]:
    shard = Shard(index=0, source="s", path=str(path), name="x", format=format, size=1, stamp="", dump="d")
    books, problems, rows, error = StageLedger(stage="read"), [], [], ""
    try:
        for batch in read_batches(shard, books, problems):
            batch.validate(full=True)
            rows += batch.to_pylist()
        books.check("x")
    except ShardError as damage:
        error = str(damage)
    return rows, books.model_dump(), problems, error


@pytest.mark.parametrize("format", ["warc", "wet"])
def test_pages_and_books_are_those_without_blocks(tmp_path_factory, format):
    path = tmp_path_factory.mktemp("crawls") / "x"

    @settings(max_examples=120, deadline=None)
    @given(crawls())
    def compare(data: bytes) -> None:
        path.write_bytes(data)
        mine = everything(path, format)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(searched, "GZIP", b"never")  # nothing is worth blocks then
            assert mine == everything(path, format)

    compare()
