"""Rows of records with a gzip member each, as crawls write them, at the speed of the decompressor.

Nearly every archive is in order nearly everywhere: each record in a member of its own, with a plain header and a
Content-Length that is right. Such members are inflated together and looked through by a kernel; a block takes the place
of its records: what most of them need is there as columns, and `record` makes any of them. At the first thing that is
different, whatever it is, blocks end before it, and `readers_warc_records.py` looks at the place anew: nothing here
judges damage.

libdeflate inflates faster than zlib because it does not stream: it takes whole members (`inflate.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import IO, NamedTuple

import numpy as np

from gristmill.stages.inflate import NO_ROOM, Inflater
from gristmill.stages.kernels import warc_headers as places

GZIP = b"\x1f\x8b\x08"
KINDS = ("response", "resource", "request", "metadata", "warcinfo", "revisit", "conversion", "continuation")
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
MIME = "mime"  # the column of a response's own Content-Type
_MIME_AT = len(FIELDS)
_PLACES = {name: places.FIELDS + 2 * i for i, name in enumerate(FIELDS.values())}  # columns of the table
_KINDS, _NAMES = places.Names(KINDS), places.Names((*FIELDS.values(), ""))  # a name without letters is never met
_BLOCK = 2 << 20  # bytes inflated, about
_READ = 1 << 20  # bytes read from the file at a time, at least
_MAX_HEADER = 1 << 14  # bytes of a record's header
_SHORTEST = 18  # bytes of a member: ten before its content, eight behind it
_ODD_FLAGS = 0xE2  # of a gzip header: reserved bits, and a checksum of the header (RFC 1952, 2.3.1)
_MAX_PACKED = 16 << 20  # bytes of a member; in an archive of one stream the end is not looked for further than that


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
    """Where blocks ended."""

    position: int  # byte of the record that was given last; -1 before the first
    at_end: bool  # the file ended where it should


class _Members:
    """Members of gzip, one after the other without anything between them."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._start = file, start  # of `_data`, in the file
        self._data, self._at, self._whole = b"", 0, False
        self._inflater = Inflater()
        file.seek(start)

    def block(self, most: int) -> tuple[np.ndarray, list[int], list[int], str]:
        """About _BLOCK bytes of members -> (bytes, places of the members in the file, their ends in the bytes, why it
        ends: "full", "end" of the file, or "odd": what follows cannot be taken).

        most: bytes of a member when it is inflated.
        """
        out, filled = np.empty(2 * _BLOCK, np.uint8), 0
        address = out.ctypes.data
        places_: list[int] = []
        ends: list[int] = []
        while filled < _BLOCK:
            if self._at == len(self._data) and not self._read():
                return out, places_, ends, "end"
            if not self._looks_plain():
                return out, places_, ends, "odd"
            member = self._inflater.member(
                self._address + self._at, len(self._data) - self._at, address + filled, len(out) - filled
            )
            if member.problem == NO_ROOM:
                if filled:
                    break
                if len(out) >= most:
                    return out, places_, ends, "odd"
                out = np.empty(min(most, 4 * len(out)), np.uint8)
                address = out.ctypes.data
            elif member.problem:
                # Where another one seems to follow it is damaged, else the rest of it may not have been read.
                follows = self._data.find(GZIP, self._at + _SHORTEST) >= 0
                if follows or len(self._data) - self._at > _MAX_PACKED or not self._read():
                    return out, places_, ends, "odd"
            elif not 0 < member.size <= most:
                return out, places_, ends, "odd"
            else:
                filled += member.size
                places_.append(self._start + self._at)
                ends.append(filled)
                self._at += member.packed
        return out, places_, ends, "full"

    def _looks_plain(self) -> bool:
        """Whether a member of the usual kind may begin here. Raises OSError where the file cannot be read."""
        while len(self._data) - self._at < _SHORTEST:
            if not self._read():
                return False
        return self._data.startswith(GZIP, self._at) and not self._data[self._at + 3] & _ODD_FLAGS

    def _read(self) -> bool:
        """Reads on, twice as far each time for a member that does not end; what was used goes."""
        fresh = b"" if self._whole else self._file.read(max(_READ, len(self._data) - self._at))
        if not fresh:
            self._whole = True
            return False
        self._data = self._data[self._at :] + fresh
        self._address = np.frombuffer(self._data, np.uint8).ctypes.data
        self._start += self._at
        self._at = 0
        return True


@dataclass(frozen=True)
class Block:
    """Records in order, each alone in its frame."""

    data: memoryview  # inflated; more follows behind the last record
    starts: np.ndarray  # int64 (n,): bytes of the file at which the frames begin
    table: np.ndarray  # int64 (n, columns): see kernels/warc_headers.py
    wanted: frozenset[str]

    def __len__(self) -> int:
        return len(self.table)

    def places(self, column: int) -> np.ndarray:
        """int64 (n,)"""
        return self.table[:, column]

    @property
    def ends(self) -> np.ndarray:
        """int64 (n,): the ends of the contents."""
        return self.table[:, places.CONTENT] + self.table[:, places.LENGTH]

    def column(self, name: str, rows: list[int]) -> list[str | None]:
        """A field of some records by its name, or MIME. Raises UnicodeDecodeError where it is not UTF-8."""
        first = _PLACES.get(name, places.FIELDS + 2 * _MIME_AT)
        found = self.table[rows, first : first + 2]
        if (found[:, 1] < 0).all():
            return [None] * len(rows)
        spans, data = found.tolist(), self.data
        return [str(data[at : at + length], "utf-8") if length >= 0 else None for at, length in spans]

    def record(self, i: int) -> Record:
        """Raises UnicodeDecodeError for fields that are not UTF-8."""
        row = self.table[i].tolist()
        headers = {}
        for name, first in _PLACES.items():
            start, length = row[first : first + 2]
            if length >= 0:
                headers[name] = str(self.data[start : start + length], "utf-8")
        kind, at, length = KINDS[row[places.KIND]], row[places.CONTENT], row[places.LENGTH]
        content = self.data[at : at + length] if kind in self.wanted else None
        return Record(str(self.starts[i]), kind, headers, length, length, content)


def in_blocks(
    file: IO[bytes], start: int, skip: bool, wanted: frozenset[str], most: int
) -> Generator[Block, None, Stop]:
    """Blocks of the records from the member at `start` on, up to what is out of order.

    skip: the first is not given. most: bytes of a record; a longer one is taken for out of order.
    """
    last = start if skip else -1
    if not Inflater.is_there():
        return Stop(last, False)
    members = _Members(file, start)
    while True:
        try:
            data, starts, ends, why = members.block(most + _MAX_HEADER)
        except OSError:
            return Stop(last, False)
        table = places.scan(data, np.array(ends, np.int64), _KINDS, _NAMES, _MIME_AT, most)
        block = _readable(Block(data.data, np.array(starts, np.int64), table, wanted))
        if len(block):
            seen = int(last == starts[0])  # the record that is skipped
            last = starts[len(block) - 1]
            if len(block) > seen:
                yield Block(block.data, block.starts[seen:], block.table[seen:], wanted)
        if why == "odd" or len(block) < len(starts):
            return Stop(last, False)
        if why == "end":
            return Stop(last, True)


def _readable(block: Block) -> Block:
    """The block up to the first record whose fields are not UTF-8."""
    for i in np.flatnonzero(block.places(places.FLAGS) & places.NOT_ASCII).tolist():
        try:
            block.record(i)
        except UnicodeDecodeError:
            return Block(block.data, block.starts, block.table[:i], block.wanted)
    return block
