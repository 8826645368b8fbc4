"""JSON lines, plain or compressed: one document a line; a range of a big file a shard.

What a record may hold beside its text: `readers_record.py`. What a range holds: `readers_ranges.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import orjson

from gristmill.stages.documents import Batch
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_common import DamagedStream, Reading, blocks, clean_string, is_empty
from gristmill.stages.readers_ranges import Range
from gristmill.stages.readers_record import base_row
from gristmill.stages.shards import Shard

# A character takes at most 6 bytes in JSON (\uXXXX) unless it is outside the basic plane and escaped (12); the rest
# is room for metadata.
_LINE_BYTES_PER_CHAR = 6
_LINE_BYTES_MORE = 16 << 20


def read_jsonl(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """Lines end at "\\n". A line of more than 6 x max_chars + 16 MiB bytes is dropped as `too_large` unread."""
    longest = longest_line(reading.max_chars)
    start = reading.shard.start
    number = 0
    try:
        for number, (line, size) in enumerate(_lines_of(reading.shard, file, longest), 1):
            if line is None:
                reading.drop("too_large", Amount(documents=1, bytes=size))
            elif not line.strip():
                reading.skip("blank")
            else:
                whole = line.removeprefix(b"\xef\xbb\xbf") if number == 1 and not start else line
                yield from _read_line(reading, whole, f"{start}+{number}" if start else str(number))
    except Cut as cut:
        where = f"{start}+{number + 1}" if start else str(number + 1)
        reading.fail(cut.reason, where, f"{cut}; everything before was read", cut.bytes_left)
    yield from reading.flush()


def longest_line(max_chars: int) -> int:
    """Bytes of the longest line that is read for a document of so many characters."""
    return _LINE_BYTES_PER_CHAR * max_chars + _LINE_BYTES_MORE


def _lines_of(shard: Shard, file: IO[bytes], longest: int) -> Iterator[tuple[bytes | None, int]]:
    """The lines that begin in the shard's range, as `lines` gives them."""
    if not shard.start and shard.stop is None:
        yield from lines(blocks(file), longest)
        return
    part = Range(file, shard.start, shard.stop)
    at = 0  # of the line, from the range's first byte
    for line, size in lines(part.blocks(), longest):
        if part.bytes is not None and at > part.bytes and shard.stop is not None:
            return
        if at or not shard.start:
            yield line, size
        at += size + 1


class Cut(DamagedStream):
    """The stream broke after some bytes of an unfinished line."""

    def __init__(self, damage: DamagedStream, bytes_left: int) -> None:
        super().__init__(damage.reason, str(damage))
        self.bytes_left = bytes_left


def lines(stream: Iterator[bytes], longest: int) -> Iterator[tuple[bytes | None, int]]:
    """Blocks of bytes -> (line without its end, its bytes); the line is None where it has more than `longest` bytes.

    Raises Cut when the stream is damaged, after all whole lines before.
    """
    parts: list[bytes] = []  # of a line that has not ended
    size = 0
    try:
        for block in stream:
            first, *others = block.split(b"\n")
            size += len(first)
            if size <= longest:
                parts.append(first)
            else:
                parts.clear()
            for part in others:
                yield (b"".join(parts), size) if size <= longest else (None, size)
                parts, size = [part], len(part)
    except DamagedStream as damage:
        raise Cut(damage, size) from damage
    if size:
        yield (b"".join(parts), size) if size <= longest else (None, size)


def _read_line(reading: Reading, line: bytes, where: str) -> Iterator[Batch]:
    record, reason, why = _parse(line)
    if reason:
        return reading.fail(reason, where, why, len(line))
    if not isinstance(record, dict):
        return reading.fail("bad_record", where, f"an object is needed, not {type(record).__name__}", len(line))
    key = reading.names.get("text", "text")
    text = record.pop(key, None)
    if not isinstance(text, str):
        found = f"{key!r} is {type(text).__name__}" if text is not None else f"there is no {key!r}"
        return reading.fail("no_text", where, f"{found}; a string is needed", len(line))
    text, nuls, surrogates = clean_string(text)
    if is_empty(text) or len(text) > reading.max_chars:
        size = Amount(documents=1, chars=len(text), bytes=len(text.encode()) - 2 * nuls)
        return reading.drop("too_large" if len(text) > reading.max_chars else "empty", size)
    try:
        base = base_row(reading, record, where)
    except RecursionError:
        return reading.fail("bad_record", where, "the metadata are nested too deep", len(line))
    reading.edited(nuls, surrogates)
    yield from reading.keep((*base, text), len(line))
    return None


def _parse(line: bytes) -> tuple[Any, str, str]:
    """A line -> (value, "", "") or (None, reason, why)."""
    try:
        return orjson.loads(line), "", ""
    except orjson.JSONDecodeError:
        pass
    # orjson refuses what the text policy can mend: lone surrogates. And it does not tell bad UTF-8 from bad JSON.
    try:
        return json.loads(line.decode("utf-8")), "", ""
    except UnicodeDecodeError as error:
        return None, "not_utf8", str(error)
    except (ValueError, RecursionError) as error:
        return None, "not_json", str(error)
