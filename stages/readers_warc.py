"""WARC and WET: crawl archives, plain, gzip (a member a record, or one stream) or zstd.

A `warc` shard gives the pages of `response` and `resource` records as HTML; a `wet` shard gives the text of
`conversion` records. Records of other types are counted as skipped.

`readers_warc_records.py` finds the records, behind damage too; here each is judged and booked.
"""

from __future__ import annotations

import functools
import io
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import orjson
from fastwarc.stream_io import BrotliReader, ChunkedReader, GzipReader, ZstdReader
from fastwarc.warc import HeaderMap

from gristmill.stages.documents import Batch
from gristmill.stages.kernels import warc_headers as places
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_common import Reading, clean_string, is_empty
from gristmill.stages.readers_warc_blocks import KINDS, MIME, Block, Record
from gristmill.stages.readers_warc_records import record_at, records

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml", "application/vnd.wap.xhtml+xml"})
MAX_RECORD_BYTES = 64 << 20  # of one record, and of its decoded body; more is dropped as `too_large` unread
_SNIFFED_BYTES = 1024  # bytes at the start of a body that decide where nothing is declared
_PAGES = frozenset({"response", "resource"})
_CONVERSIONS = frozenset({"conversion"})
_PLAIN_HEAD = 8_192  # bytes in which the head of an HTTP response is looked for before fastwarc is asked
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9._:-]+)", re.IGNORECASE)
_HTTP_MIME = "application/http"
_HTTP = re.compile(rb"HTTP/1\.[01] ([0-9]{3})(?: [^\r\n\0]*)?\r\n(?:[!-9;-~]+:[^\r\n\0]*\r\n)*\r\n")
_BINARY_STARTS = (b"%PDF", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\x03\x04", b"\x1f\x8b", b"RIFF", b"\x7fELF")
_LONGEST_START = max(map(len, _BINARY_STARTS))


class Outcome(NamedTuple):
    """What becomes of a record."""

    verdict: str  # "keep", "drop", "fail" or "skip"
    reason: str = ""
    why: str = ""
    row: tuple[Any, ...] = ()  # of a document that is kept, without the base columns; None for its HTML
    html: bytes | memoryview | None = None
    weight: int = 0  # bytes of its content
    metadata: str | None = None
    chars: int = 0
    replaced: tuple[int, int] = (0, 0)  # NULs and lone surrogates
    counted: tuple[str, ...] = ()


def read_warc(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """Pages as HTML."""
    yield from _read(reading, file, _PAGES, _page)


def read_wet(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """Texts of `conversion` records."""
    yield from _read(reading, file, _CONVERSIONS, _conversion)


Make = Callable[[Record, int], Outcome]


def _read(reading: Reading, file: IO[bytes], wanted: frozenset[str], make: Make) -> Iterator[Batch]:
    """Holds each record back until the next one was found where it should be, then settles it."""
    held: tuple[Record, Outcome] | None = None
    for item in records(reading.shard.path, file, wanted, MAX_RECORD_BYTES):
        if isinstance(item, Block):
            if held:
                yield from _settle(reading, *held)
            yield from _settle_block(reading, item, make)
            last = item.record(len(item) - 1)
            held = (last, _judge(last, wanted, make, reading.max_chars))
        elif isinstance(item, Record):
            if held:
                yield from _settle(reading, *held)
            held = (item, _judge(item, wanted, make, reading.max_chars))
        elif item.reason == "wrong_length" and held and held[1].verdict != "skip":
            held = (held[0], Outcome("fail", "wrong_length", f"its Content-Length is {held[0].length}, but {item.why}"))
        else:
            reading.fail(item.reason, item.position, item.why, 0)
    if held:
        record, outcome = held
        if outcome.reason == "bad_record" and "Content-Length" not in record.headers:
            outcome = Outcome("fail", "truncated", "the file ends inside this record's headers")
        yield from _settle(reading, record, outcome)
    yield from reading.flush()


def _settle_block(reading: Reading, block: Block, make: Make) -> Iterator[Batch]:
    """All records of a block but the last: the usual pages by columns, what else is wanted one by one."""
    kinds = block.places(places.KIND)[:-1]
    wanted = np.isin(kinds, [code for code, kind in enumerate(KINDS) if kind in block.wanted])
    for code, count in enumerate(np.bincount(kinds[~wanted], minlength=len(KINDS)).tolist()):
        reading.count(f"skipped.{KINDS[code]}", count)
    usual = _usual_pages(block) if make is _page else []
    others = wanted.copy()
    others[[page.row for page in usual]] = False
    unusual = {}
    for i in np.flatnonzero(others).tolist():
        record = block.record(i)
        outcome = _judge(record, block.wanted, make, reading.max_chars)
        if outcome.verdict == "keep":
            unusual[i] = record, outcome
        else:
            yield from _settle(reading, record, outcome)
    begin = 0
    for i, pair in unusual.items():
        before = bisect_left(usual, i, key=lambda page: page.row)
        yield from _keep_usual(reading, block, usual[begin:before])
        yield from _settle(reading, *pair)
        begin = before
    yield from _keep_usual(reading, block, usual[begin:])


class _Usual(NamedTuple):
    """A page that is kept by what is declared of it."""

    row: int  # of the block
    charset: str | None
    counted: tuple[str, ...]


def _usual_pages(block: Block) -> list[_Usual]:
    """Responses of a block, but for its last record, that are HTML by what is declared, with a body not encoded."""
    usual = (block.places(places.STATUS) == 200) & (block.places(places.FLAGS) == 0)
    usual &= block.ends > block.places(places.BODY)
    rows = np.flatnonzero(usual[:-1]).tolist()
    fields = (
        block.column(name, rows) for name in ("Content-Type", MIME, "WARC-Identified-Payload-Type", "WARC-Truncated")
    )
    bodies = block.places(places.BODY)[rows].tolist()
    pages = []
    for row, body, kind, declared, identified, truncated in zip(rows, bodies, *fields, strict=True):
        if not (_is_http(kind) and _names_html(identified or declared)) or _is_binary(block.data, body):
            continue
        by = "mime.identified" if identified else "mime.declared"
        pages.append(_Usual(row, _charset(declared), ("truncated_by_crawler", by) if truncated else (by,)))
    return pages


def _is_binary(data: memoryview, body: int) -> bool:
    return bytes(data[body : body + _LONGEST_START]).startswith(_BINARY_STARTS)


def _keep_usual(reading: Reading, block: Block, pages: Sequence[_Usual]) -> Iterator[Batch]:
    rows, shard = [page.row for page in pages], reading.shard
    for name, count in Counter(name for page in pages for name in page.counted).items():
        reading.count(name, count)
    starts, ends = block.places(places.BODY)[rows], block.ends[rows]
    bodies = [block.data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    own, urls, dates = (block.column(name, rows) for name in ("WARC-Record-ID", "WARC-Target-URI", "WARC-Date"))
    ids, positions = [_own_id(one) for one in own], [str(at) for at in block.starts[rows].tolist()]
    if not all(ids) or not reading.are_new(ids):
        ids = [reading.identify(*pair) for pair in zip(ids, positions, strict=True)]
    kept = [
        (doc_id, shard.source, url or None, shard.dump, date or None, None, None, None, position, None, page.charset)
        for doc_id, url, date, position, page in zip(ids, urls, dates, positions, pages, strict=True)
    ]
    yield from reading.keep_pages(kept, bodies, (ends - starts).tolist())


def _own_id(record_id: str | None) -> str:
    """A WARC-Record-ID without what is the same in all."""
    return (record_id or "").strip("<> ").removeprefix("urn:uuid:")


def _judge(record: Record, wanted: frozenset[str], make: Make, max_chars: int) -> Outcome:
    """What becomes of a record, looking at nothing but itself."""
    if "Content-Length" not in record.headers:
        return Outcome("fail", "bad_record", "it has no Content-Length")
    if record.read < record.length:
        return Outcome("fail", "truncated", f"it has {record.read} of {record.length} bytes; all before was read")
    if record.kind not in wanted:
        return Outcome("skip", record.kind)
    if record.content is None:
        return Outcome("drop", "too_large")
    return make(record, max_chars)


def _settle(reading: Reading, record: Record, outcome: Outcome) -> Sequence[Batch]:
    """Books a record, and hands on the document that it became."""
    for name in outcome.counted:
        reading.count(name)
    if outcome.verdict == "skip":
        reading.skip(outcome.reason)
    elif outcome.verdict == "fail":
        reading.fail(outcome.reason, record.position, outcome.why, record.read)
    elif outcome.verdict == "drop":
        size = Amount(documents=1, chars=outcome.chars, bytes=outcome.weight or record.read)
        reading.drop(outcome.reason, size)
    else:
        reading.edited(*outcome.replaced)
        row = (
            reading.identify(_own_id(record.header("WARC-Record-ID")), record.position),
            reading.shard.source,
            record.header("WARC-Target-URI"),
            reading.shard.dump,
            record.header("WARC-Date"),
            outcome.metadata,
            None,
            None,
            record.position,
            *outcome.row,
        )
        return reading.keep(row, outcome.weight, outcome.html)
    return ()


def page_at(file: IO[bytes], position: str, url: str | None) -> tuple[bytes, str | None] | None:
    """The HTML and charset of the page that the reader found at a `position`; None where no page of this address
    stands there any more."""
    record = record_at(file, position, _PAGES, MAX_RECORD_BYTES)
    if record is None or record.content is None or record.read < record.length:
        return None
    outcome = _page(record, 0) if record.header("WARC-Target-URI") == url else None
    if outcome is None or outcome.verdict != "keep" or outcome.html is None:
        return None
    return bytes(outcome.html), outcome.row[1]


def _page(record: Record, max_chars: int) -> Outcome:
    """A `response` or `resource` record -> its HTML."""
    body: bytes | memoryview = record.content or b""
    declared, encodings = record.header("Content-Type"), ""
    counted: tuple[str, ...] = ("truncated_by_crawler",) if record.header("WARC-Truncated") else ()
    if record.kind == "response":
        if not _is_http(declared):
            return Outcome("drop", "not_html", counted=(*counted, "mime.declared"))
        head = _http_head(body)
        if head.status is None:
            return Outcome("fail", "bad_record", "its content does not begin with an HTTP status line")
        if head.status != 200:
            return Outcome("drop", "http_status", counted=counted)
        body, declared, encodings = body[head.body :], head.mime, head.encodings
    if not len(body):
        return Outcome("drop", "empty", counted=counted)
    charset = _charset(declared)
    if encodings:
        body, undecoded = _decoded(body, [name.strip() for name in encodings.split(",")])
        counted += tuple(f"undecoded.{name}" for name in undecoded)
    if len(body) > MAX_RECORD_BYTES:
        return Outcome("drop", "too_large", counted=counted)
    html, by = _is_html(record.header("WARC-Identified-Payload-Type"), declared, bytes(body[:_SNIFFED_BYTES]), charset)
    counted += (by,)
    if not html:
        return Outcome("drop", "not_html", counted=counted)
    return Outcome("keep", row=(None, charset), html=body, weight=len(body), counted=counted)


class _Head(NamedTuple):
    """What is read of the head of an HTTP response."""

    body: int  # where the body begins
    status: int | None = None  # None where there is no status line
    mime: str | None = None  # Content-Type
    encodings: str = ""  # of the content, then of the transfer, lower case, with commas between


def _http_head(content: bytes | memoryview) -> _Head:
    """What leaves no choice is read here; the rest, fastwarc reads."""
    plain = _HTTP.match(content, 0, _PLAIN_HEAD)
    if plain:
        head = plain.group()
        low = head.lower()
        encodings = "" if low.find(b"-encoding:") < 0 else _encodings(head, low)
        return _Head(plain.end(), int(plain.group(1)), _field(head, low, b"\r\ncontent-type:"), encodings)
    http = HeaderMap("latin1")
    try:
        body = http.parse(io.BytesIO(content))
    except OSError:  # a head without an end
        return _Head(0)
    fields: dict[str, str] = {}
    for name, value in http.items():
        fields.setdefault(name.lower(), value)
    given = filter(None, (fields.get("content-encoding"), fields.get("transfer-encoding")))
    return _Head(body, http.status_code, fields.get("content-type"), ",".join(given).lower())


def _field(head: bytes, low: bytes, mark: bytes) -> str | None:
    """What follows the first `mark` to the end of its line, without white space around it. low: in lower case."""
    at = low.find(mark)
    if at < 0:
        return None
    at += len(mark)
    return head[at : head.index(b"\r\n", at)].strip(b" \t").decode("latin1")


def _encodings(head: bytes, low: bytes) -> str:
    found = (_field(head, low, mark) for mark in (b"\r\ncontent-encoding:", b"\r\ntransfer-encoding:"))
    return ",".join(filter(None, found)).lower()


def _conversion(record: Record, max_chars: int) -> Outcome:
    """A `conversion` record -> its text, which the WET format promises to be UTF-8."""
    try:
        raw = str(record.content or b"", "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        return Outcome("fail", "not_utf8", str(error))
    text, nuls, surrogates = clean_string(raw)
    if len(text) > max_chars or is_empty(text):
        return Outcome("drop", "too_large" if len(text) > max_chars else "empty", chars=len(text))
    languages = record.header("WARC-Identified-Content-Language")
    metadata = orjson.dumps({"languages": languages}).decode() if languages else None
    return Outcome(
        "keep",
        row=(text,),
        weight=len(text.encode()),
        metadata=metadata,
        replaced=(nuls, surrogates),
    )


@functools.lru_cache(1024)
def _charset(declared: str | None) -> str | None:
    """The charset of a Content-Type, lower case."""
    match = _CHARSET.search(declared or "")
    return match.group(1).lower() if match else None


_DECODERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": GzipReader,
    "x-gzip": GzipReader,
    "deflate": lambda source: GzipReader(source, zlib=True),
    "br": BrotliReader,
    "zstd": ZstdReader,
    "chunked": ChunkedReader,
}


def _decoded(body: bytes | memoryview, encodings: list[str]) -> tuple[bytes | memoryview, list[str]]:
    """Undoes HTTP's encodings, the last one first -> (body, the ones that could not be undone).

    Crawlers often store the decoded body under the server's headers, so an encoding that does not fit is no error:
    the body is taken as it is. At most MAX_RECORD_BYTES + 1 bytes are decoded, whatever a bomb promises.
    """
    undecoded = []
    for name in reversed(encodings):
        if name in ("", "identity"):
            continue
        try:
            reader = _DECODERS[name](io.BytesIO(body))
            parts, size = [], 0
            while size <= MAX_RECORD_BYTES and (part := reader.read(MAX_RECORD_BYTES + 1 - size)):
                parts.append(part)
                size += len(part)
            body = b"".join(parts)
        except KeyError:
            undecoded.append("other")
        except OSError:
            undecoded.append(name)
    return body, undecoded


def _is_html(identified: str | None, declared: str | None, start: bytes, charset: str | None) -> tuple[bool, str]:
    """Whether a body is HTML, and what decided: the crawler's payload type, the server's, or its first bytes."""
    if start.startswith(_BINARY_STARTS) or (b"\0" in start and not _wide(start, charset)):
        return False, "mime.binary"
    if identified:
        return _names_html(identified), "mime.identified"
    if declared:
        return _names_html(declared), "mime.declared"
    low = start.lower()
    return b"<html" in low or b"<!doctype html" in low or b"<body" in low, "mime.sniffed"


def _wide(start: bytes, charset: str | None) -> bool:
    return start.startswith((b"\xff\xfe", b"\xfe\xff")) or (charset or "").startswith(("utf-16", "utf-32"))


@functools.lru_cache(1024)
def _is_http(mime: str | None) -> bool:
    """Whether a record's Content-Type says that its content is an HTTP message; without one, it is."""
    return (mime or _HTTP_MIME).lower().startswith(_HTTP_MIME)


@functools.lru_cache(1024)
def _names_html(mime: str | None) -> bool:
    return (mime or "").partition(";")[0].strip().lower() in HTML_TYPES
