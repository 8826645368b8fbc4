"""Rows of records with a gzip member each, as crawls write them, at the speed of the decompressor.

Nearly every archive is in order nearly everywhere: each record in a member of its own, with a plain header and a
Content-Length that is right. Such members are inflated together and looked through by a kernel; a block takes the place
of its records: what most of them need is there as columns, and `record` makes any of them. At the first thing that is
different, whatever it is, blocks end before it, and `readers_warc_records.py` looks at the place anew: nothing here
judges damage.

libdeflate inflates faster than zlib because it does not stream: it takes whole members. A member ends where the next
one begins, and its checksum and size say whether that was its end. Bytes behind a member are noticed unless they end
with the same checksum and size.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import IO, NamedTuple

import deflate
import numpy as np

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
_ENDS = 3  # places that look like the beginning of the next member and are tried as the end of one


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


class _OutOfOrder(Exception):
    """What follows is not a member that can be taken."""


class _Members:
    """Members of gzip, one after the other without anything between them."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        self._file, self._start = file, start  # of `_data`, in the file
        self._data, self._at, self._whole = b"", 0, False
        self._marks: list[int] = []  # places in `_data` behind `_at` that look like a member, the last one first
        file.seek(start)

    def next(self, most: int) -> tuple[int, bytearray] | None:
        """The next member -> (its place in the file, inflated); None at the end of the file. Raises _OutOfOrder.

        most: bytes of it when it is inflated.
        """
        if self._at == len(self._data) and not self._read():
            return None
        for _ in range(_ENDS):
            end = self._end()
            inflated = self._inflated(end, most)
            if inflated is not None:
                place = self._start + self._at
                self._at = end
                return place, inflated
        raise _OutOfOrder

    def _end(self) -> int:
        """Where the member may end: at the next one or at the end of the file; another place each time."""
        while True:
            while self._marks:
                mark = self._marks.pop()
                if mark >= self._at + _SHORTEST:
                    return mark
            if len(self._data) - self._at > _MAX_PACKED:
                raise _OutOfOrder
            if not self._read():
                return len(self._data)

    def _inflated(self, end: int, most: int) -> bytearray | None:
        """The bytes up to `end` as one member; None where they are none."""
        data, at = self._data, self._at
        if end - at < _SHORTEST or not data.startswith(GZIP, at) or data[at + 3] & _ODD_FLAGS:
            raise _OutOfOrder
        size = int.from_bytes(data[end - 4 : end], "little")
        if not 0 < size <= most:
            return None
        try:
            inflated = deflate.gzip_decompress(memoryview(data)[at:end], size)
        except deflate.DeflateError:
            return None
        checked = deflate.crc32(inflated) == int.from_bytes(data[end - 8 : end - 4], "little")
        return inflated if checked and len(inflated) == size else None

    def _read(self) -> bool:
        """Reads on, twice as far each time for a member that does not end; what was used goes."""
        fresh = b"" if self._whole else self._file.read(max(_READ, len(self._data) - self._at))
        if not fresh:
            self._whole = True
            return False
        kept = len(self._data) - self._at
        self._data = self._data[self._at :] + fresh
        self._start += self._at
        self._at = 0
        self._marks = _marks(self._data, kept - len(GZIP) + 1)[::-1]
        return True


@dataclass(frozen=True)
class Block:
    """Records in order, each alone in its frame."""

    data: bytes  # inflated
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
        return [data[start : start + length].decode() if length >= 0 else None for start, length in spans]

    def record(self, i: int) -> Record:
        """Raises UnicodeDecodeError for fields that are not UTF-8."""
        row = self.table[i].tolist()
        headers = {}
        for name, first in _PLACES.items():
            start, length = row[first : first + 2]
            if length >= 0:
                headers[name] = self.data[start : start + length].decode()
        kind, at, length = KINDS[row[places.KIND]], row[places.CONTENT], row[places.LENGTH]
        content = memoryview(self.data)[at : at + length] if kind in self.wanted else None
        return Record(str(self.starts[i]), kind, headers, length, length, content)


def _marks(data: bytes, begin: int) -> list[int]:
    """Where members may begin, from `begin` on, ascending."""
    pairs = (np.frombuffer(data, "<u2", (len(data) - odd) // 2, odd) == 0x8B1F for odd in (0, 1))
    found = np.sort(np.concatenate([2 * np.flatnonzero(pair) + odd for odd, pair in enumerate(pairs)]))
    return [at for at in found[found >= begin].tolist() if data.startswith(GZIP, at)]


def in_blocks(
    file: IO[bytes], start: int, skip: bool, wanted: frozenset[str], most: int
) -> Generator[Block, None, Stop]:
    """Blocks of the records from the member at `start` on, up to what is out of order.

    skip: the first is not given. most: bytes of a record; a longer one is taken for out of order.
    """
    members, last = _Members(file, start), start if skip else -1
    while True:
        parts, starts, ends, size = [], [], [], 0
        member: tuple[int, bytearray] | None = None
        going = True
        try:
            while size < _BLOCK and (member := members.next(most + _MAX_HEADER)):
                starts.append(member[0])
                parts.append(member[1])
                size += len(member[1])
                ends.append(size)
        except (_OutOfOrder, OSError):
            going = False
        data = b"".join(parts)
        table = places.scan(data, np.array(ends, np.int64), _KINDS, _NAMES, _MIME_AT, most)
        block = _readable(Block(data, np.array(starts, np.int64), table, wanted))
        if len(block):
            seen = int(last == starts[0])  # the record that is skipped
            last = starts[len(block) - 1]
            if len(block) > seen:
                yield Block(data, block.starts[seen:], block.table[seen:], wanted)
        if not going or len(block) < len(starts):
            return Stop(last, False)
        if member is None:
            return Stop(last, True)


def _readable(block: Block) -> Block:
    """The block up to the first record whose fields are not UTF-8."""
    for i in np.flatnonzero(block.places(places.FLAGS) & places.NOT_ASCII).tolist():
        try:
            block.record(i)
        except UnicodeDecodeError:
            return Block(block.data, block.starts, block.table[:i], block.wanted)
    return block
