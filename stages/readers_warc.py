"""WARC and WET: crawl archives, plain, gzip (a member a record, or one stream) or zstd.

A `warc` shard gives the pages of `response` and `resource` records as HTML; a `wet` shard gives the text of
`conversion` records. Records of other types are counted as skipped.

fastwarc reads the records, but a stream that is cut ends for it like any other, and after a damaged record it stops.
So the length of each record is checked here, and after damage reading goes on at the next record that can be found:
behind a wrong Content-Length with fastwarc's lenient mode or at the frame of the next record, behind bytes that do not
decompress at the next gzip or zstd frame. One gap is one failure, however many records were in it: nobody can count
those.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import orjson
from fastwarc.stream_io import BrotliReader, ChunkedReader, GzipReader, ZstdReader
from fastwarc.warc import ArchiveIterator, HeaderMap, WarcRecordType

from gristmill.stages.documents import Batch
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_common import Reading, clean_string, is_empty
from gristmill.stages.shards import ShardError

HTML_TYPES = frozenset({"text/html", "application/xhtml+xml", "application/vnd.wap.xhtml+xml"})
MAX_RECORD_BYTES = 64 << 20  # of one record, and of its decoded body; more is dropped as `too_large` unread
_SNIFFED_BYTES = 1024  # bytes at the start of a body that decide where nothing is declared
_PAGES = WarcRecordType.response | WarcRecordType.resource
_BINARY_STARTS = (b"%PDF", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\x03\x04", b"\x1f\x8b", b"RIFF", b"\x7fELF")
_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b\x08": lambda file: GzipReader(file, 1 << 18),
    b"\x28\xb5\x2f\xfd": lambda file: ZstdReader(file, 1 << 18),
}
_MAX_GAPS = 1000  # damaged places in one file, after which it is given up


@dataclass(frozen=True)
class Record:
    """A record as it was read. Its content may be cut."""

    position: str  # byte in the file; where records share a compressed frame, with the record's number in it
    kind: WarcRecordType
    headers: dict[str, str]  # names in lower case; of a name that stands twice the first
    length: int  # that it declares
    read: int  # bytes that there were
    content: bytes | None  # None for types that are not wanted and for records over MAX_RECORD_BYTES

    def header(self, name: str) -> str | None:
        value = self.headers.get(name.lower())
        return clean_string(value)[0] if value else None


@dataclass(frozen=True)
class Gap:
    """A place where no record could be read."""

    position: str
    reason: str  # "wrong_length": the record before did not end where it said; "corrupt"; "truncated"
    why: str


@dataclass(frozen=True)
class Outcome:
    """What becomes of a record."""

    verdict: str  # "keep", "drop", "fail" or "skip"
    reason: str = ""
    why: str = ""
    row: tuple[Any, ...] = ()  # of a document that is kept, without the base columns
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
    yield from _read(reading, file, WarcRecordType.conversion, _conversion)


Make = Callable[[Record, int], Outcome]


def _read(reading: Reading, file: IO[bytes], wanted: WarcRecordType, make: Make) -> Iterator[Batch]:
    """Holds each record back until the next one was found where it should be, then settles it."""
    held: tuple[Record, Outcome] | None = None
    for item in records(reading.shard.path, file, wanted):
        if isinstance(item, Record):
            if held:
                yield from _settle(reading, *held)
            held = (item, _judge(item, wanted, make, reading.max_chars))
        elif item.reason == "wrong_length" and held and held[1].verdict != "skip":
            held = (held[0], Outcome("fail", "wrong_length", f"its Content-Length is {held[0].length}, but {item.why}"))
        else:
            reading.fail(item.reason, item.position, item.why, 0)
    if held:
        record, outcome = held
        if outcome.reason == "bad_record" and "content-length" not in record.headers:
            outcome = Outcome("fail", "truncated", "the file ends inside this record's headers")
        yield from _settle(reading, record, outcome)
    yield from reading.flush()


def _judge(record: Record, wanted: WarcRecordType, make: Make, max_chars: int) -> Outcome:
    """What becomes of a record, looking at nothing but itself."""
    if "content-length" not in record.headers:
        return Outcome("fail", "bad_record", "it has no Content-Length")
    if record.read < record.length:
        return Outcome("fail", "truncated", f"it has {record.read} of {record.length} bytes; all before was read")
    if not record.kind & wanted:
        return Outcome("skip", str(record.kind).rpartition(".")[2])
    if record.content is None:
        return Outcome("drop", "too_large")
    return make(record, max_chars)


def _settle(reading: Reading, record: Record, outcome: Outcome) -> Iterator[Batch]:
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
        own = (record.header("WARC-Record-ID") or "").strip("<> ").removeprefix("urn:uuid:")
        row = (
            reading.identify(own, record.position),
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
        yield from reading.keep(row, outcome.weight)


def records(path: str, file: IO[bytes], wanted: WarcRecordType) -> Iterator[Record | Gap]:
    """Every record that can be found. Raises ShardError when there is none in a file that is not empty.

    In an archive that is one compressed stream, what follows a wrong Content-Length is read leniently to the end of
    the stream: a second wrong length in it is not seen.
    """
    magic, opener = _compression(file)
    start, skip, lenient = 0, 0, False
    found, guessed, gap, gaps = False, False, None, 0  # guessed: `start` may be in the middle of compressed bytes
    while True:
        file.seek(start)
        source: Any = opener(file) if opener else file
        last, inside = -1, 0  # the frame read last, and the records of it that were seen
        try:
            for warc in ArchiveIterator(source, parse_http=False, quirks_mode=lenient):
                position = source.frame_start_position() if opener else warc.stream_pos
                inside = inside + 1 if position == last else 1
                last = position
                if position == start and inside <= skip:
                    continue
                if gap:
                    yield gap
                taken = _take(warc, str(position) if inside == 1 else f"{position}.{inside}", wanted)
                yield taken
                found, gap = True, None
                if opener and inside == 1 and taken.read < taken.length:
                    # Its length went over all that follows. What begins in a frame of its own is a record all the same.
                    behind = _next_record(file, position + 1, magic, opener)
                    if behind is not None:
                        yield Gap(str(position), "wrong_length", "another record begins before that many bytes")
                        start, skip, lenient = behind, 0, False
                        break
                if lenient and position != start:  # in order again, so errors are to be seen again
                    start, skip, lenient = position, inside, False
                    break
            else:
                break
            continue
        except OSError as error:
            why = str(error)
        gaps += last >= 0
        if gaps > _MAX_GAPS:
            yield Gap(str(last), "corrupt", f"given up after {_MAX_GAPS} damaged places; the rest was not read")
            return
        header = "header" in why
        if header and last >= 0 and not lenient:
            yield Gap(str(last), "wrong_length", "no record follows there")
            following = _next_frame(file, last + 1, magic) if opener and inside == 1 else None
            start, skip, lenient = (last, inside, True) if following is None else (following, 0, False)
            guessed = following is not None
            continue
        failed = source.frame_start_position() if opener else None
        failed = max(start, last, 0 if failed is None else failed)
        if gap is None and not (guessed and last < 0):
            gap = Gap(str(failed), "truncated" if "incomplete" in why else "corrupt", why)
        following = _next_frame(file, failed + 1, magic)
        if following is None:
            break
        start, skip, lenient, guessed = following, 0, False, True
    if not found:
        why = gap.why if gap else "it has no record"
        raise ShardError(f"{path}: not a WARC file, or damaged throughout: no record was found ({why}).")
    if gap:
        yield gap


def page_at(file: IO[bytes], position: str, url: str | None) -> tuple[bytes, str | None] | None:
    """The HTML and charset of the page that the reader found at a `position`; None where no page of this address
    stands there any more. Reads nothing but the record and those before it in its frame."""
    byte, _, number = position.partition(".")
    _, opener = _compression(file)
    file.seek(int(byte))
    source: Any = opener(file) if opener else file
    try:
        for inside, warc in enumerate(ArchiveIterator(source, parse_http=False), 1):
            if inside < int(number or 1):
                continue
            record = _take(warc, position, _PAGES)
            if record.content is None or record.read < record.length or record.header("WARC-Target-URI") != url:
                return None
            outcome = _page(record, 0)
            return outcome.row if outcome.verdict == "keep" else None
    except OSError:
        return None
    return None


def _compression(file: IO[bytes]) -> tuple[bytes, Callable[[IO[bytes]], Any] | None]:
    """What a record may begin with, and how to decompress; by the file's first bytes, not its name."""
    head = file.read(4)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            return magic, opener
    return b"WARC/1.", None


def _take(warc: Any, position: str, wanted: WarcRecordType) -> Record:
    """Reads a record's content where it is wanted and not too long, else passes over it. Raises OSError."""
    length = warc.content_length
    headers = _by_name(warc.headers)
    if warc.record_type & wanted and length <= MAX_RECORD_BYTES:
        content = warc.reader.read()
        return Record(position, warc.record_type, headers, length, len(content), content)
    return Record(position, warc.record_type, headers, length, warc.reader.consume(), None)


def _by_name(headers: HeaderMap) -> dict[str, str]:
    """HeaderMap looks through all names at every question."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        found.setdefault(name.lower(), value)
    return found


def _next_frame(file: IO[bytes], start: int, magic: bytes) -> int | None:
    """The first place from `start` on where a record may begin."""
    file.seek(start)
    at, tail = start, b""
    while block := file.read(1 << 20):
        found = (tail + block).find(magic)
        if found >= 0:
            return at - len(tail) + found
        at += len(block)
        tail = (tail + block)[1 - len(magic) :]
    return None


def _next_record(file: IO[bytes], start: int, magic: bytes, opener: Callable[[IO[bytes]], Any]) -> int | None:
    """The first frame from `start` on that begins with a record; what only looks like a frame is passed over."""
    at = _next_frame(file, start, magic)
    while at is not None:
        file.seek(at)
        try:
            if opener(file).read(5) == b"WARC/":
                return at
        except OSError:
            pass
        at = _next_frame(file, at + 1, magic)
    return None


def _page(record: Record, max_chars: int) -> Outcome:
    """A `response` or `resource` record -> its HTML."""
    body = record.content or b""
    declared, encodings = record.header("Content-Type"), []
    counted = ["truncated_by_crawler"] if record.header("WARC-Truncated") else []
    if record.kind == WarcRecordType.response:
        if not (declared or "application/http").lower().startswith("application/http"):
            return Outcome("drop", "not_html", counted=(*counted, "mime.declared"))
        http = HeaderMap("latin1")
        body = body[http.parse(io.BytesIO(body)) :]
        if http.status_code is None:
            return Outcome("fail", "bad_record", "its content does not begin with an HTTP status line")
        if http.status_code != 200:
            return Outcome("drop", "http_status", counted=tuple(counted))
        fields = _by_name(http)
        declared = fields.get("content-type")
        encodings = [fields.get("content-encoding", ""), fields.get("transfer-encoding", "")]
    if not body:
        return Outcome("drop", "empty", counted=tuple(counted))
    charset = _charset(declared)
    body, undecoded = _decoded(body, [name.strip() for name in ",".join(encodings).lower().split(",")])
    counted.extend(f"undecoded.{name}" for name in undecoded)
    if len(body) > MAX_RECORD_BYTES:
        return Outcome("drop", "too_large", counted=tuple(counted))
    html, by = _is_html(record.header("WARC-Identified-Payload-Type"), declared, body, charset)
    counted.append(f"mime.{by}")
    if not html:
        return Outcome("drop", "not_html", counted=tuple(counted))
    return Outcome("keep", row=(body, charset), weight=len(body), counted=tuple(counted))


def _conversion(record: Record, max_chars: int) -> Outcome:
    """A `conversion` record -> its text, which the WET format promises to be UTF-8."""
    try:
        raw = (record.content or b"").decode("utf-8", "surrogatepass")
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


def _charset(declared: str | None) -> str | None:
    """The charset of a Content-Type, lower case."""
    match = re.search(r"charset\s*=\s*[\"']?([A-Za-z0-9._:-]+)", declared or "", re.IGNORECASE)
    return match.group(1).lower() if match else None


_DECODERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": GzipReader,
    "x-gzip": GzipReader,
    "deflate": lambda source: GzipReader(source, zlib=True),
    "br": BrotliReader,
    "zstd": ZstdReader,
    "chunked": ChunkedReader,
}


def _decoded(body: bytes, encodings: list[str]) -> tuple[bytes, list[str]]:
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


def _is_html(identified: str | None, declared: str | None, body: bytes, charset: str | None) -> tuple[bool, str]:
    """Whether a body is HTML, and what decided: the crawler's payload type, the server's, or its first bytes."""
    start = body[:_SNIFFED_BYTES]
    wide = start.startswith((b"\xff\xfe", b"\xfe\xff")) or (charset or "").startswith(("utf-16", "utf-32"))
    if start.startswith(_BINARY_STARTS) or (b"\0" in start and not wide):
        return False, "binary"
    for kind, by in ((identified, "identified"), (declared, "declared")):
        if kind:
            return kind.split(";")[0].strip().lower() in HTML_TYPES, by
    low = start.lower()
    return b"<html" in low or b"<!doctype html" in low or b"<body" in low, "sniffed"
