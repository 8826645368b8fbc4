"""Records of a WARC file that is in order, at the speed of the decompressor.

Nearly every archive is in order nearly everywhere: each record begins where the one before ended, with a plain header,
a Content-Length that is right, and a frame whose checksum is right. Such records are read here, from gzip inflated by
ISA-L or from a plain file. At the first thing that is different, whatever it is, reading stops before it, and
`readers_warc_records.py` looks at the place anew: nothing here judges damage.

A header is taken where it is written as the standard writes it (WARC 1.1, section 4) and fastwarc can read it in no
other way: UTF-8 without NUL and tabs; lines `Name: value` that end in CR LF, without more spaces than that one before
and behind the value; no name twice; the names that are read spelled as the standard spells them.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import IO, NamedTuple

from isal import igzip_lib

GZIP = b"\x1f\x8b\x08"
PLAIN = b"WARC/1."
KINDS = frozenset({"warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation"})
FIELDS = {  # those that are read of a header, by their names in lower case
    name.lower(): name
    for name in (
        "WARC-Type",
        "Content-Length",
        "WARC-Record-ID",
        "WARC-Target-URI",
        "WARC-Date",
        "Content-Type",
        "WARC-Truncated",
        "WARC-Identified-Payload-Type",
        "WARC-Identified-Content-Language",
    )
}
_USUAL = frozenset(FIELDS.values()) | {
    "WARC-Block-Digest",
    "WARC-Concurrent-To",
    "WARC-Filename",
    "WARC-IP-Address",
    "WARC-Payload-Digest",
    "WARC-Profile",
    "WARC-Protocol",
    "WARC-Refers-To",
    "WARC-Refers-To-Date",
    "WARC-Refers-To-Target-URI",
    "WARC-Warcinfo-ID",
}
_VERSIONS = (b"WARC/1.0\r\n", b"WARC/1.1\r\n")
_ODD = ("\0", "\t", "  ", " \r", "\r\n ")  # in a header
_BLOCK = 1 << 20  # bytes read from the file at a time
_STEP = 1 << 15  # compressed bytes inflated at a time; they become 33 MB at most
_MAX_HEADER = 1 << 14  # bytes of a record's header
_ODD_FLAGS = 0xE2  # of a gzip header: reserved bits, and a checksum of the header (RFC 1952, 2.3.1)
_DIGITS = re.compile("[0-9]{1,12}")
_BLANK = b"\r\n\r\n"  # behind a header, and behind a content
_HEADER_BYTES = 10  # of a gzip header without options


class Record(NamedTuple):
    """A record as it was read. Its content may be cut."""

    position: str  # byte in the file; where records share a compressed frame, with the record's number in it
    kind: str  # one of KINDS, "unknown" or "no_type"
    headers: dict[str, str]  # names as FIELDS spells them; clean; of a name that stands twice the first
    length: int  # that it declares
    read: int  # bytes that there were
    content: bytes | memoryview | None  # None for types that are not wanted and for records that are too long

    def header(self, name: str) -> str | None:
        return self.headers.get(name) or None


class Stop(NamedTuple):
    """Where reading in order ended."""

    position: int  # of the frame of the record that was given last; -1 before the first
    inside: int  # records of that frame that were given
    at_end: bool  # the file ended where it should


class _OutOfOrder(Exception):
    """What follows is not as it nearly always is."""


class _Plain:
    """A file that is not compressed: one frame."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._begun, self._start = file, False, start
        file.seek(start)

    def frame(self) -> int | None:
        """Begins the next frame -> its place in the file; None at the end of the file. Raises _OutOfOrder."""
        if self._begun:
            return None
        self._begun = True
        return self._start

    def more(self) -> bytes:
        """The next bytes of the frame; none at its end. Raises _OutOfOrder."""
        return self._file.read(_BLOCK)


class _Gzip:
    """Members of gzip, one after the other without anything between them."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._data, self._at, self._start = file, b"", 0, start  # _data[0] is byte `_start` of the file
        self._member = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
        file.seek(start)
        self._view = memoryview(b"")

    def frame(self) -> int | None:
        at = self._at
        if len(self._data) < at + _STEP:  # so that most members are inflated in one call
            at = self._fill()
        data = self._data
        if len(data) < at + _HEADER_BYTES:
            if len(data) == at:
                return None
            raise _OutOfOrder
        if data[at : at + 3] != GZIP or data[at + 3] & _ODD_FLAGS:
            raise _OutOfOrder
        self._member = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
        return self._start + at

    def more(self) -> bytes:
        member = self._member
        while not member.eof:
            if self._at == len(self._data) and self._fill() == len(self._data):
                raise _OutOfOrder  # the file ends inside a member
            given = self._view[self._at : self._at + _STEP]
            try:
                out: bytes = member.decompress(given)
            except igzip_lib.IsalError as error:  # type: ignore[misc]  # its stub says an instance
                raise _OutOfOrder from error
            self._at += len(given)
            if member.eof:
                self._at -= len(member.unused_data)
            if out:
                return out
        return b""

    def _fill(self) -> int:
        """Reads on; what was used goes. -> place of the next byte in `_data`."""
        fresh = self._file.read(_BLOCK)
        if fresh:
            self._data = self._data[self._at :] + fresh
            self._view = memoryview(self._data)
            self._start += self._at
            self._at = 0
        return self._at


class _Buffer:
    """What was inflated of a frame and not used yet: `data` from `at` on."""

    def __init__(self, source: _Gzip | _Plain) -> None:
        self._source, self.data, self.at = source, b"", 0
        self.begin = 0  # of `data`, in the frame

    def need(self, count: int) -> bool:
        """Reads on until `count` bytes are there; False when the frame ends before that. Raises _OutOfOrder."""
        there = len(self.data) - self.at
        if there >= count:
            return True
        self.begin += self.at
        if not there:
            self.data = self._source.more()
            there, self.at = len(self.data), 0
            if there >= count or not there:
                return there >= count
        parts = [self.data[self.at :]]
        while there < count and (more := self._source.more()):
            parts.append(more)
            there += len(more)
        self.data, self.at = b"".join(parts), 0
        return there >= count

    def header(self) -> bytes:
        """The lines of the header that begins here, without the first; what follows the header is next."""
        data, at = self.data, self.at
        while (end := data.find(_BLANK, at, at + _MAX_HEADER)) < 0:
            if len(data) - at >= _MAX_HEADER or not self.need(len(data) - at + 1):
                raise _OutOfOrder
            data, at = self.data, self.at
        if not data.startswith(_VERSIONS, at):
            raise _OutOfOrder
        self.at = end + len(_BLANK)
        return data[at + len(_VERSIONS[0]) : end]

    def content(self, length: int, wanted: bool) -> bytes | memoryview | None:
        """Passes over a record's content and the blank line behind it."""
        if not self.need(length + len(_BLANK)):
            raise _OutOfOrder
        data, at, end = self.data, self.at, self.at + length
        if not data.startswith(_BLANK, end):
            raise _OutOfOrder
        self.at = end + len(_BLANK)
        if not wanted:
            return None
        if 2 * length < len(data):  # a view would keep all of `data` in memory
            return data[at:end]
        return memoryview(data)[at:end]


def in_order(
    file: IO[bytes], magic: bytes, start: int, skip: int, wanted: frozenset[str], most: int
) -> Generator[Record, None, Stop]:
    """Records from the frame at `start` on, without the first `skip` of it, up to what is out of order.

    magic: GZIP or PLAIN. most: bytes of a record; a longer one is taken for out of order.
    """
    source: _Gzip | _Plain = _Gzip(file, start) if magic == GZIP else _Plain(file, start)
    last, given, left = (start, skip, skip) if skip else (-1, 0, 0)
    try:
        while (frame := source.frame()) is not None:
            buffer, inside = _Buffer(source), 0
            if not buffer.need(1):
                raise _OutOfOrder  # a frame without a byte
            while buffer.need(1):
                position, inside = (frame, inside + 1) if magic == GZIP else (start + buffer.begin + buffer.at, 1)
                kind, headers, length = _parsed(buffer.header())
                if length > most:
                    raise _OutOfOrder
                content = buffer.content(length, kind in wanted)
                if left:
                    left -= 1
                    continue
                if buffer.at == len(buffer.data):
                    buffer.need(1)  # the end of the frame, where its checksum stands
                last, given = position, inside
                name = str(position) if inside == 1 else f"{position}.{inside}"
                yield Record(name, kind, headers, length, length, content)
    except (_OutOfOrder, OSError):
        return Stop(last, given, False)
    return Stop(last, given, True)


def _parsed(header: bytes) -> tuple[str, dict[str, str], int]:
    """The lines of a header -> (type, fields, Content-Length). Raises _OutOfOrder."""
    try:
        text = header.decode()
        lines = text.split("\r\n")
        headers: dict[str, str] = dict([line.split(": ", 1) for line in lines])
        kind, length = headers["WARC-Type"], headers["Content-Length"]
    except (ValueError, KeyError) as error:  # not UTF-8, a line without a colon, no type, no length
        raise _OutOfOrder from error
    ends = len(lines) - 1
    if len(headers) <= ends or text.count("\n") != ends or text.count("\r") != ends or any(odd in text for odd in _ODD):
        raise _OutOfOrder
    if not headers.keys() <= _USUAL and any(name.strip().lower() in FIELDS for name in headers.keys() - _USUAL):
        raise _OutOfOrder
    if kind not in KINDS or not _DIGITS.fullmatch(length):
        raise _OutOfOrder
    return kind, headers, int(length)
