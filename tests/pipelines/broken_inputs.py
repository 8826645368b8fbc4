"""Makes the set of broken inputs: small files, and large ones that are made when the test runs.

`build(folder)` writes them and gives, for each file, what a run must make of it: `Expected`. `kept` names documents by
their id or, where the input has none, by their text.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import zstandard

GIB = 1 << 30
SENTENCE = "This is a sentence of the main text, and it is long enough to be taken. "


@dataclass(frozen=True)
class Expected:
    """What a run makes of a file."""

    kept: tuple[str, ...] = ()  # doc_ids, or texts, of the documents that reach the end
    lost: dict[str, int] = field(default_factory=dict)  # reason, dropped or failed, in any stage -> documents
    skipped: int = 0  # records that are no documents
    counted: dict[str, int] = field(default_factory=dict)  # counters that must be so
    problem: str | None = None  # part of a line that the books must have


def page(text: str, charset: str = "utf-8", head: str = "") -> bytes:
    html = f"<html><head>{head}<title>t</title></head><body><article><p>{text}</p></article></body></html>"
    return html.encode(charset)


def http(body: bytes, mime: str = "text/html; charset=utf-8", more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\n{more}\r\n".encode() + body


def record(
    name: str | None, content: bytes, kind: str = "response", length: int | None = None, bare: bool = False
) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: application/http; msgtype=response\r\n"
    if name is not None:
        head += f"WARC-Record-ID: <urn:uuid:{name}>\r\n"
    if not bare:
        head += f"WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Target-URI: https://x.example/{name}\r\n"
    head += f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def members(*records: bytes) -> bytes:
    return b"".join(gzip.compress(one, mtime=0) for one in records)


def good(name: str) -> bytes:
    return record(name, http(page(SENTENCE * 3)))


def chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:50], body[50:])) + b"0\r\n\r\n"


def gzip_bomb(size: int) -> bytes:
    """One gzip member of `size` bytes "x", a multiple of a MiB: the deflate blocks of one MiB, many times."""
    block = b"x" * (1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    check, times = 0, size >> 20
    for _ in range(times):
        check = zlib.crc32(block, check)
    end = zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + piece * times + end + struct.pack("<II", check, size & 0xFFFFFFFF)


def _warcs() -> dict[str, tuple[bytes, Expected]]:
    noisy = random.Random(1).randbytes(40_000).hex()
    big = record("big", http(page(noisy)))
    cut = members(good("a"), big, good("c"))
    inside = len(members(good("a"))) + len(members(big)) // 2
    png = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
    german, russian, japanese = (
        "Grüße aus Köln. " * 20,
        "Это русский текст для проверки. " * 10,
        "これは日本語の文章です。" * 20,
    )
    body = page(SENTENCE * 3)
    both = "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
    bare = "Without an id. "
    short, long = record("short", http(body), length=30), record("long", http(body), length=9999)
    brotli = base64.b64decode(_BROTLI)
    return {
        "cut in the middle.warc.gz": (cut[:inside], Expected(("a",), {"truncated": 1}, problem="truncated")),
        "wrong length.warc.gz": (
            members(good("a"), short, good("c"), long, good("e")),
            Expected(("a", "c", "e"), {"wrong_length": 2}, problem="Content-Length"),
        ),
        "encoded bodies.warc.gz": (
            members(
                record("chunked", http(chunked(body), more="Transfer-Encoding: chunked\r\n")),
                record("gzip", http(gzip.compress(body, mtime=0), more="Content-Encoding: gzip\r\n")),
                record("brotli", http(brotli, more="Content-Encoding: br\r\n")),
                record("both", http(chunked(gzip.compress(body, mtime=0)), more=both)),
                record("not gzip", http(body, more="Content-Encoding: gzip\r\n")),
            ),
            Expected(("chunked", "gzip", "brotli", "both", "not gzip"), counted={"undecoded.gzip": 1}),
        ),
        "charsets.warc.gz": (
            members(
                record("lying header", http(page(german, "latin1"))),
                record("lying meta", http(page(russian, "utf-8", "<meta charset=koi8-r>"), "text/html")),
                record("meta against header", http(page(russian, "cp1251", "<meta charset=windows-1251>"))),
                record("none declared", http(page(japanese, "shift_jis"), "text/html")),
                record("mixed", http(page(german) + "Grüße".encode("latin1"))),
            ),
            Expected(
                ("lying header", "lying meta", "meta against header", "none declared", "mixed"),
                counted={"charset.meta": 1, "charset.utf8": 1, "charset.detected": 2, "charset.fallback": 1},
            ),
        ),
        "deep.warc.gz": (
            members(good("a"), record("deep", http(b"<html>" + b"<div>" * 100_000 + b"x")), good("c")),
            Expected(("a", "c"), {"too_deep": 1}),
        ),
        "bomb.warc.gz": (
            members(good("a"), record("bomb", http(gzip_bomb(GIB), more="Content-Encoding: gzip\r\n")), good("c")),
            Expected(("a", "c"), {"too_large": 1}),
        ),
        "binary.warc.gz": (
            members(record("png", http(png)), record("nul", http(b"<html>\0" + body)), good("c")),
            Expected(("c",), {"not_html": 2}, counted={"mime.binary": 2, "mime.declared": 1}),
        ),
        "bare, double ü.warc.gz": (
            members(
                record(None, http(page(bare + SENTENCE * 3)), bare=True),
                good("twice"),
                good("twice"),
                record("request", b"GET / HTTP/1.1\r\n\r\n", kind="request"),
            ),
            Expected(
                (bare + (SENTENCE * 3).strip(), "twice", "twice#2"), skipped=1, counted={"duplicate_id": 1}
            ),
        ),
        "not a warc.warc.gz": (b"hello" * 100, Expected(lost={"unreadable": 1}, problem="not a WARC file")),
        "empty.warc.gz": (b"", Expected(problem="empty_file")),
    }  # fmt: skip


# brotli 1.2.1 of page(SENTENCE * 3): the package is not needed to run the tests
_BROTLI = (
    "GygBoBynw5qfOC7UPmFicIuHrkDK9GQh989ZN0JTulGUmunFKBXDEYT5uIWGKSEyZ7tAxwkAiqPJZCgWy/AB6LD+OphghZjvU0OvwLQDTtXPIVg="
)


def _line(text: str, name: str) -> bytes:
    return json.dumps({"text": text, "id": name}).encode() + b"\n"


def _lines() -> dict[str, tuple[bytes, Expected]]:
    long = b'{"id": "long", "text": "' + b"x" * 100_000_000 + b'"}\n'

    def noise(seed: int) -> str:
        return random.Random(seed).randbytes(4000).hex()

    bad = b'{"id": "bad", "text": "\xff\xfe"}\n'
    return {
        "100 MB in a line.jsonl": (
            _line("before", "a") + long + _line("after", "c"),
            Expected(("a", "c"), {"too_large": 1}),
        ),
        "bad UTF-8 in the middle.jsonl.gz": (
            gzip.compress(_line("before", "a") + bad + _line("after", "c"), mtime=0),
            Expected(("a", "c"), {"not_utf8": 1}, problem=":2: not_utf8"),
        ),
        "bomb.jsonl.gz": (gzip_bomb(GIB), Expected(lost={"too_large": 1})),
        "not JSON.jsonl": (
            b'{"text": \n' + _line("good", "b") + b"[1]\n" + b'{"id": 1}\n\n',
            Expected(("b",), {"not_json": 1, "bad_record": 1, "no_text": 1}, skipped=1),
        ),
        "cut.jsonl.zst": (
            b"".join(zstandard.compress(_line(noise(i), f"{i}")) for i in range(100))[:-20],
            Expected(tuple(str(i) for i in range(97)), {"truncated": 1}, problem="truncated"),
        ),
        "empty.jsonl": (b"", Expected(problem="empty_file")),
        "empty.jsonl.gz": (gzip.compress(b"", mtime=0), Expected()),
    }  # fmt: skip


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _arrow(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 2)
    return sink.getvalue()


def _tables() -> dict[str, tuple[bytes, Expected]]:
    table = pa.table({"text": ["one", None, "three"], "id": ["a", "b", "c"]})
    whole = _parquet(table)
    return {
        "ä b.parquet": (whole, Expected(("a", "c"), {"no_text": 1})),
        "missing column.parquet": (
            _parquet(table.rename_columns(["txt", "id"])),
            Expected(lost={"unreadable": 1}, problem="no column 'text'; there are txt, id"),
        ),
        "other type.parquet": (
            _parquet(table.set_column(0, "text", pa.array([1, 2, 3]))),
            Expected(lost={"unreadable": 1}, problem="'text' is int64, not a string"),
        ),
        "other type of another column.parquet": (
            _parquet(table.set_column(1, "id", pa.array([7, 8, 9]))),
            Expected(("7", "9"), {"no_text": 1}),
        ),
        "cut.parquet": (whole[:-30], Expected(lost={"unreadable": 1}, problem="not a whole Parquet file")),
        "empty.parquet": (b"", Expected(problem="empty_file")),
        "no rows.parquet": (_parquet(table.slice(0, 0)), Expected()),
        "cut.arrow": (
            _arrow(pa.concat_tables([table] * 2))[:-400],
            Expected(("a", "c", "a#2"), {"no_text": 2, "corrupt": 1}),
        ),
        "empty.arrow": (b"", Expected(problem="empty_file")),
        "bad rows.csv": (
            b'text,id\none,a\ntwo\n\xff,c\n"open,d\nfive,e\n',
            Expected(("a",), {"bad_record": 2, "not_utf8": 1}),
        ),
        "empty.csv": (b"", Expected(problem="empty_file")),
        "empty.tsv": (b"", Expected(problem="empty_file")),
    }  # fmt: skip


def _texts() -> dict[str, tuple[bytes, Expected]]:
    """All of one folder are one shard: what it makes of them is said together, of the first."""
    expected = Expected(("a text\n",), {"empty": 1, "binary": 1, "not_utf8": 1})
    return {
        "a text ü.txt": (b"a text\n", expected),
        "binary.txt": (bytes(200), expected),
        "empty.txt": (b"", expected),
        "latin1.txt": ("ü".encode("latin1"), expected),
    }


def _wets() -> dict[str, tuple[bytes, Expected]]:
    def conversion(name: str, content: bytes, length: int | None = None) -> bytes:
        return record(name, content, kind="conversion", length=length)

    data = members(
        conversion("a", b"text"), conversion("b", b"\xff"), conversion("c", b" "), conversion("d", b"text 2")
    )
    return {
        "x.warc.wet.gz": (data, Expected(("a", "d"), {"not_utf8": 1, "empty": 1})),
        "empty.warc.wet.gz": (b"", Expected(problem="empty_file")),
    }


FOLDERS: dict[str, Callable[[], dict[str, tuple[bytes, Expected]]]] = {
    "web": _warcs,
    "wet": _wets,
    "lines": _lines,
    "tables": _tables,
    "texts": _texts,
}


def build(folder: Path) -> dict[str, Expected]:
    """Writes `folder/<source>/<file>` -> what a run must make of each, by "source/file"."""
    expected = {}
    for source, make in FOLDERS.items():
        (folder / source).mkdir(parents=True)
        for name, (data, what) in make().items():
            (folder / source / name).write_bytes(data)
            expected[f"{source}/{name}"] = what
    return expected
