"""Every record is accounted for: warcio, another reader, counts the same records and decodes the same bodies."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

from warcio.archiveiterator import ArchiveIterator

from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import read_batches
from gristmill.stages.shards import Shard

XML = b'<?xml version="1.0" encoding="utf-8"?><html xmlns="http://www.w3.org/1999/xhtml"><body>x</body></html>'


def record(name: str, content: bytes, kind: str = "response") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{name}>\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
    head += f"WARC-Target-URI: http://x/{name}\r\nContent-Type: application/http; msgtype={kind}\r\n"
    return gzip.compress(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content + b"\r\n\r\n", mtime=0)


def http(body: bytes, mime: str, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {mime}\r\n{more}\r\n".encode() + body


def mixed() -> bytes:
    """Records of many types, pages of XML, pages that are not UTF-8, encoded bodies."""
    page = "<html><body>Grüße</body></html>"
    packed = gzip.compress(page.encode(), mtime=0)
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    return b"".join(
        [
            record("info", b"software: x\r\n", "warcinfo"),
            record("1", b"GET / HTTP/1.1\r\n\r\n", "request"),
            record("2", http(XML, "application/xhtml+xml")),
            record("3", http(b"<rss/>", "application/rss+xml")),
            record("4", http(page.encode("latin1"), "text/html; charset=iso-8859-1")),
            record("5", http("<html>Привет</html>".encode("cp1251"), "text/html")),
            record("6", http(packed, "text/html", more="Content-Encoding: gzip\r\n")),
            record("7", http(chunks, "text/html", more="Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n")),
            record("8", http(page.encode(), "text/html", status="404 Not Found")),
            record("9", b"fetchTimeMs: 1\r\n", "metadata"),
            record("10", http(b"", "text/html")),
        ]
    )


def compare(path: Path) -> tuple[StageLedger, Counter[str]]:
    """The books of our reader, after its bodies were compared with warcio's, and warcio's records by type."""
    kinds: Counter[str] = Counter()
    bodies = {}
    with path.open("rb") as file:
        for one in ArchiveIterator(file):
            kinds[one.rec_type] += 1
            name = one.rec_headers.get_header("WARC-Record-ID").strip("<>").removeprefix("urn:uuid:")
            bodies[name] = one.content_stream().read()
    state = {"size": 1, "stamp": "", "format": "warc"}
    shard = Shard(index=0, source="s", path=str(path), name=path.name, **state)
    books = StageLedger(stage="read")
    rows = [row for batch in read_batches(shard, books, []) for row in batch.to_pylist()]
    books.check(path.name)
    for row in rows:
        assert row["html"] == bodies[row["doc_id"]], row["doc_id"]
    return books, kinds


def skipped(books: StageLedger) -> dict[str, int]:
    return {key.removeprefix("skipped."): n for key, n in books.counters.items() if key.startswith("skipped.")}


def test_records_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "mixed.warc.gz").write_bytes(mixed())
    books, kinds = compare(tmp_path / "mixed.warc.gz")
    assert kinds == {"warcinfo": 1, "request": 1, "metadata": 1, "response": 8}
    assert books.kept.documents == 5
    assert {reason: size.documents for reason, size in books.dropped.items()} == {
        "not_html": 1,
        "http_status": 1,
        "empty": 1,
    }
    assert skipped(books) == {"warcinfo": 1, "request": 1, "metadata": 1}
    assert books.read.documents + sum(skipped(books).values()) == kinds.total()


def test_a_crawl(crawl: Path) -> None:
    for path in sorted((crawl / "docs").glob("*.warc.gz")):
        books, kinds = compare(path)
        assert books.read.documents == books.kept.documents == kinds["response"] > 10
        assert skipped(books) == {kind: n for kind, n in kinds.items() if kind != "response"}
