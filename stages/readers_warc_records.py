"""The records of a WARC file, in order or damaged.

What is in order, a gzip member a record, is read by `readers_warc_blocks.py`. From the first thing that is not, and
all of other files, fastwarc reads, until records are in order again. A stream that is cut ends for it like any other,
and after a damaged record it stops. So the length of each record is checked here, and after damage reading goes on at
the next record that can be found: behind a wrong Content-Length with fastwarc's lenient mode or at the frame of the
next record, behind bytes that do not decompress at the next gzip or zstd frame. One gap is one failure, however many
records were in it: nobody can count those.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import IO, Any

from fastwarc.stream_io import GzipReader, ZstdReader
from fastwarc.warc import ArchiveIterator, HeaderMap

from gristmill.stages.readers_common import clean_string
from gristmill.stages.readers_warc_blocks import FIELDS, GZIP, Block, Record, in_blocks
from gristmill.stages.shards import ShardError

_OPENERS: dict[bytes, Callable[[Any], Any]] = {
    GZIP: lambda file: GzipReader(file, 1 << 18),
    b"\x28\xb5\x2f\xfd": lambda file: ZstdReader(file, 1 << 18),
}
_MAX_GAPS = 1000  # damaged places in one file, after which it is given up
_PATIENCE = 4  # records in a row without damage, after which blocks are tried again; twice as many each time in vain
NEVER = -1


@dataclass(frozen=True)
class Gap:
    """A place where no record could be read."""

    position: str
    reason: str  # "wrong_length": the record before did not end where it said; "corrupt"; "truncated"
    why: str


@dataclass
class _Place:
    """How far a file was read."""

    position: int = -1  # of the frame of the record that was given last; -1 before the first
    inside: int = 0  # records of that frame that were given
    gaps: int = 0


def records(path: str, file: IO[bytes], wanted: frozenset[str], most: int) -> Iterator[Record | Block | Gap]:
    """Every record that can be found, alone or in blocks. Raises ShardError for a file that is not empty and has none.

    wanted: types of records whose content is read. most: bytes of a content; a longer one is passed over.

    In an archive that is one compressed stream, what follows a wrong Content-Length is read leniently to the end of
    the stream: a second wrong length in it is not seen.
    """
    magic, _ = _compression(file)
    place, patience = _Place(), _PATIENCE if magic == GZIP else NEVER
    while True:
        if patience != NEVER:
            stop = yield from in_blocks(file, max(0, place.position), place.position >= 0, wanted, most)
            if stop.at_end and stop.position >= 0:
                return
            if stop.position == place.position:
                patience *= 2
            else:
                patience = _PATIENCE
                place.position, place.inside = stop.position, 1
        if (yield from _searched(path, file, place, patience, wanted, most)):
            return


def _searched(
    path: str, file: IO[bytes], place: _Place, patience: int, wanted: frozenset[str], most: int
) -> Generator[Record | Gap, None, bool]:
    """Records behind `place`, whatever is between them -> True at the end of the file.

    False after `patience` records in a row that are in order, each with a place of its own; `place` is the last one.
    patience: NEVER to read all.
    """
    magic, opener = _compression(file)
    start, skip, lenient, calm = max(0, place.position), place.inside, False, 0
    found, guessed, gap = place.position >= 0, False, None  # guessed: `start` may be in the middle of compressed bytes
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
                taken = _take(warc, str(position) if inside == 1 else f"{position}.{inside}", wanted, most)
                yield taken
                found, gap = True, None
                calm = calm + 1 if inside == 1 and taken.read == taken.length and not lenient else 0
                if calm == patience:
                    place.position, place.inside = position, inside
                    return False
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
            why, calm = str(error), 0
        place.gaps += last >= 0
        if place.gaps > _MAX_GAPS:
            yield Gap(str(last), "corrupt", f"given up after {_MAX_GAPS} damaged places; the rest was not read")
            return True
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
    return True


def record_at(file: IO[bytes], position: str, wanted: frozenset[str], most: int) -> Record | None:
    """The record that `records` found at a position; None where none can be read there. Reads nothing but the record
    and those before it in its frame."""
    byte, _, number = position.partition(".")
    _, opener = _compression(file)
    file.seek(int(byte))
    source: Any = opener(file) if opener else file
    try:
        for inside, warc in enumerate(ArchiveIterator(source, parse_http=False), 1):
            if inside == int(number or 1):
                return _take(warc, position, wanted, most)
    except OSError:
        return None
    return None


def _compression(file: IO[bytes]) -> tuple[bytes, Callable[[IO[bytes]], Any] | None]:
    """What a record may begin with, and how to decompress; by the file's first bytes, not its name."""
    file.seek(0)
    head = file.read(4)
    for magic, opener in _OPENERS.items():
        if head.startswith(magic):
            return magic, opener
    return b"WARC/1.", None


def _take(warc: Any, position: str, wanted: frozenset[str], most: int) -> Record:
    """Reads a record's content where it is wanted and not too long, else passes over it. Raises OSError."""
    kind, length = str(warc.record_type), warc.content_length
    headers = _fields(warc.headers)
    if kind in wanted and length <= most:
        content = warc.reader.read()
        return Record(position, kind, headers, length, len(content), content)
    return Record(position, kind, headers, length, warc.reader.consume(), None)


def _fields(headers: HeaderMap) -> dict[str, str]:
    """Clean, names as FIELDS spells them; of a name that stands twice the first."""
    found: dict[str, str] = {}
    for name, value in headers.items():
        found.setdefault(FIELDS.get(name.lower(), name), clean_string(value)[0])
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
