"""Text files and folders of code: one document a file, its name in the metadata as `path`; many files a shard."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import IO

import orjson

from gristmill.stages.documents import Batch
from gristmill.stages.ledger import Amount
from gristmill.stages.readers_common import DamagedStream, Reading, blocks, clean_string, is_empty, open_shard
from gristmill.stages.shards import Member, Shard, join

_BYTES_PER_CHAR = 4  # of UTF-8, at most
_LOOKED_AT = 8_000  # bytes in which a NUL says binary, as git has it (buffer_is_binary)
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def read_texts(reading: Reading, file: IO[bytes]) -> Iterator[Batch]:
    """A shard that is one file."""
    yield from _read_file(reading, reading.shard.name, file)
    yield from reading.flush()


def read_bundle(reading: Reading) -> Iterator[Batch]:
    """The files of a bundle, in its order. Raises ShardError when one of them is gone."""
    for member in reading.shard.members:
        with open_shard(_alone(reading, member)) as file:
            yield from _read_file(reading, member.name, file)
    yield from reading.flush()


def _alone(reading: Reading, member: Member) -> Shard:
    path = join(reading.shard.path, member.name)
    return reading.shard.model_copy(update={"path": path, "name": member.name, "members": ()})


def _read_file(reading: Reading, name: str, file: IO[bytes]) -> Iterator[Batch]:
    """UTF-8, or what a byte order mark says. A file with NUL at its beginning is `binary`, as git has it."""
    parts, size = [], 0
    most = _BYTES_PER_CHAR * reading.max_chars
    try:
        for block in blocks(file):
            size += len(block)
            if size <= most:
                parts.append(block)
            else:
                parts.clear()
    except DamagedStream as damage:
        return reading.fail(damage.reason, name, str(damage), size)
    if size > most:
        return reading.drop("too_large", Amount(documents=1, bytes=size))
    data = b"".join(parts)
    mark, codec = next(((mark, codec) for mark, codec in _BOMS if data.startswith(mark)), (b"", "utf-8"))
    if codec == "utf-8" and b"\0" in data[:_LOOKED_AT]:
        return reading.drop("binary", Amount(documents=1, bytes=size))
    try:
        text, nuls, surrogates = clean_string(data[len(mark) :].decode(codec, "surrogatepass"))
    except UnicodeDecodeError as error:
        return reading.fail("not_utf8", name, str(error), size)
    if is_empty(text) or len(text) > reading.max_chars:
        amount = Amount(documents=1, chars=len(text), bytes=len(text.encode()) - 2 * nuls)
        return reading.drop("too_large" if len(text) > reading.max_chars else "empty", amount)
    reading.edited(nuls, surrogates)
    shard = reading.shard
    shown = clean_string(name)[0]
    metadata = orjson.dumps({"path": shown}).decode()
    row = (reading.identify(None, name), shard.source, None, shard.dump, None, metadata, None, None, shown, text)
    yield from reading.keep(row, len(data))
    return None
