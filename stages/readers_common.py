"""What the readers share: books, ids, the text policy, batches, and streams that say when they are damaged."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from fsspec.implementations.local import LocalFileSystem

from gristmill.stages.documents import BASE_FIELDS, MAX_BATCH_BYTES, MAX_BATCH_DOCUMENTS, Batch
from gristmill.stages.ledger import Amount, StageLedger, amount
from gristmill.stages.shards import Shard, ShardError, filesystem
from gristmill.stages.stores import PatientFile, patiently, stamp_of

# position: where in its file the document stood: byte of a WARC record, line, row, or the file of a bundle
READ_FIELDS: dict[str, pa.DataType] = {
    **BASE_FIELDS,
    "language": pa.string(),
    "language_score": pa.float64(),
    "position": pa.string(),
}
CONTENT_FIELDS: dict[str, pa.DataType] = {"html": pa.binary(), "html_charset": pa.string(), "text": pa.string()}

MAX_PROBLEMS = 20  # failures that are described; all are counted
_SURROGATES = re.compile("[\ud800-\udfff]")
_BLOCK = 1 << 20  # bytes read and decompressed at a time


def clean_string(value: str) -> tuple[str, int, int]:
    """The text policy -> (text without lone surrogates and NUL, NULs replaced, surrogates replaced)."""
    nuls = 0
    if "\0" in value:
        nuls = value.count("\0")
        value = value.replace("\0", "\ufffd")
    if value.isascii():
        return value, nuls, 0
    try:
        value.encode()
    except UnicodeEncodeError:
        value, surrogates = _SURROGATES.subn("\ufffd", value)
        return value, nuls, surrogates
    return value, nuls, 0


def is_empty(text: str) -> bool:
    """True for a text without a visible character."""
    return not text or text.isspace()


class _Packed:
    """Values of a binary column, copied into Arrow's memory as they come, so that what held them goes at once."""

    def __init__(self) -> None:
        self._ends = [0]
        self._reserve(1 << 20)

    def _reserve(self, size: int) -> None:
        self._buffer = pa.allocate_buffer(size)
        self._view = memoryview(self._buffer).cast("B")

    def add(self, values: Iterable[bytes | memoryview], size: int) -> None:
        """size: bytes of the values together."""
        at = self._ends[-1]
        if at + size > len(self._view):
            before = self._view
            self._reserve(max(at + size, 2 * len(before)))
            self._view[:at] = before[:at]
        view, ends = self._view, self._ends
        for value in values:
            end = at + len(value)
            view[at:end] = value
            ends.append(end)
            at = end

    def take(self) -> pa.Array:
        """The values as a column; empty again."""
        offsets = pa.array(self._ends, pa.int32())
        buffers = [None, offsets.buffers()[1], self._buffer.slice(0, self._ends[-1])]
        column = pa.Array.from_buffers(pa.binary(), len(self._ends) - 1, buffers)
        size, self._ends = len(self._view), [0]
        self._reserve(size)
        return column


@dataclass
class Reading:
    """One shard while it is read. Every record ends in exactly one call of `keep`, `drop`, `fail` or `skip`."""

    shard: Shard
    ledger: StageLedger
    problems: list[str]
    max_chars: int
    names: Mapping[str, str]  # our column -> the input's
    content: tuple[str, ...]  # the format's columns; the first is the one that is weighed
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    _html: _Packed = field(default_factory=_Packed)  # of the rows that wait; the rows themselves have None
    weight: int = 0  # bytes of the rows that wait
    _seen: set[int] = field(default_factory=set)  # 64-bit hashes of ids: a collision costs a needless suffix

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*READ_FIELDS.items(), *((name, CONTENT_FIELDS[name]) for name in self.content)])

    def note(self, where: str, reason: str, why: str) -> None:
        """Describes a failure: file, line or byte, and reason."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{self.shard.path}:{where}: {reason}: {why}")

    def count(self, name: str, times: int = 1) -> None:
        if times:
            self.ledger.counters[name] = self.ledger.counters.get(name, 0) + times

    def skip(self, kind: str) -> None:
        """A record that is no document."""
        self.count(f"skipped.{kind}")

    def drop(self, reason: str, size: Amount) -> None:
        self.ledger.read = self.ledger.read + size
        self.ledger.dropped[reason] = self.ledger.dropped.get(reason, Amount()) + size

    def fail(self, reason: str, where: str, why: str, bytes_: int, documents: int = 1) -> None:
        size = Amount(documents=documents, bytes=bytes_)
        self.ledger.read = self.ledger.read + size
        self.ledger.failed[reason] = self.ledger.failed.get(reason, Amount()) + size
        self.note(where, reason, why)

    def edited(self, nuls: int, surrogates: int) -> None:
        """Books what the text policy did to a document that is kept: NUL has 1 byte, a surrogate and U+FFFD have 3."""
        if not nuls and not surrogates:
            return
        change = Amount(bytes=-2 * nuls)
        self.ledger.read = self.ledger.read + change
        self.ledger.edited = self.ledger.edited + change
        self.count("replaced.nul", nuls)
        self.count("replaced.surrogate", surrogates)

    def identify(self, own: str | None, position: int | str) -> str:
        """A document's id, unique in the shard: its own, else a hash of source, shard name and position in the file."""
        if not own:
            key = f"{self.shard.source}\0{self.shard.name}\0{position}"
            own = xxhash.xxh3_128_hexdigest(key.encode("utf-8", "surrogatepass"))
        doc_id, copy = own, 1
        while (digest := xxhash.xxh3_64_intdigest(doc_id.encode())) in self._seen:
            copy += 1
            doc_id = f"{own}#{copy}"
        if copy > 1:
            self.count("duplicate_id")
        self._seen.add(digest)
        return doc_id

    def are_new(self, ids: Sequence[str]) -> bool:
        """True where each id is another one and none was seen; they are remembered then, as by `identify`."""
        digests = {xxhash.xxh3_64_intdigest(doc_id.encode()) for doc_id in ids}
        new = len(digests) == len(ids) and self._seen.isdisjoint(digests)
        if new:
            self._seen |= digests
        return new

    def keep(self, row: tuple[Any, ...], weight: int, html: bytes | memoryview | None = None) -> Sequence[Batch]:
        """Adds a row in the order of `schema`. weight: bytes of its content, or more. Gives a batch when it is full.

        html: the content, where it is HTML; None stands for it in the row.
        """
        full: Sequence[Batch] = ()
        if self.rows and (len(self.rows) >= MAX_BATCH_DOCUMENTS or self.weight + weight > MAX_BATCH_BYTES):
            full = self.flush()
        self.rows.append(row)
        self.weight += weight
        if html is not None:
            self._html.add((html,), len(html))
        return full

    def keep_pages(
        self, rows: Sequence[tuple[Any, ...]], pages: Sequence[memoryview], sizes: Sequence[int]
    ) -> Iterator[Batch]:
        """`keep` for many rows, with their HTML and its bytes."""
        begin = 0
        while begin < len(rows):
            end, weight = begin, self.weight
            most = begin + MAX_BATCH_DOCUMENTS - len(self.rows)
            for size in sizes[begin:most]:
                if weight + size > MAX_BATCH_BYTES and (self.rows or end > begin):
                    break
                weight += size
                end += 1
            self.rows.extend(rows[begin:end])
            self._html.add(pages[begin:end], weight - self.weight)
            self.weight = weight
            if end < len(rows):
                yield from self.flush()
            begin = end

    def flush(self) -> Sequence[Batch]:
        """Gives the rows that wait as a batch, booked."""
        if not self.rows:
            return ()
        schema, columns = self.schema, zip(*self.rows, strict=True)
        arrays = [
            self._html.take() if field.name == "html" else pa.array(values, field.type)
            for values, field in zip(columns, schema, strict=True)
        ]
        self.rows, self.weight = [], 0
        return (self.booked(pa.RecordBatch.from_arrays(arrays, schema=schema)),)

    def booked(self, batch: Batch, chars: int | None = None) -> Batch:
        """Books a batch as read and kept. chars: of its texts, where they were counted."""
        if chars is None:
            size = amount(batch)
        else:
            bytes_ = pc.sum(pc.binary_length(batch["text"])).as_py()
            size = Amount(documents=batch.num_rows, chars=chars, bytes=int(bytes_ or 0))
        self.ledger.read = self.ledger.read + size
        self.ledger.kept = self.ledger.kept + size
        return batch


@contextmanager
def open_shard(shard: Shard) -> Iterator[IO[bytes]]:
    """The shard's file. Raises ShardError when it cannot be opened."""
    try:
        fs, inner = filesystem(shard.path)
        if isinstance(fs, LocalFileSystem):
            opened = fs.open(inner, "rb")
        else:
            _unchanged(shard, fs, inner)
            opened = PatientFile(shard.path, partial(fs.open, inner, "rb"))
    except ShardError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ShardError(
            f"{shard.path}: the file cannot be opened ({type(error).__name__}: {error}). It was there when the inputs "
            "were listed; put it back, or list the inputs again."
        ) from error
    with opened as file:
        yield file
    if not isinstance(fs, LocalFileSystem):
        _unchanged(shard, fs, inner)


def _unchanged(shard: Shard, fs: Any, inner: str) -> None:
    """Raises ShardError when a file of a store is not the one that was listed: parts of two would be read as one."""
    info = patiently(fs.info, inner)
    if shard.stamp and stamp_of(info) != shard.stamp:
        raise ShardError(
            f"{shard.path} was changed since the inputs were listed: {stamp_of(info)} is not {shard.stamp}. Run with "
            "--refresh-inputs to take it as it is now."
        )


class DamagedStream(ValueError):
    """A compressed stream ended too early or holds what cannot be decompressed. All bytes before were given."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason  # "truncated" or "corrupt"


def compression_of(file: IO[bytes]) -> str:
    """ "gzip", "zstd" or "", by the file's first bytes, and the file is at its beginning again.

    The name does not decide: files called .gz that are not compressed are common.
    """
    head = file.read(4)
    file.seek(0)
    return "gzip" if head.startswith(b"\x1f\x8b") else "zstd" if head == b"\x28\xb5\x2f\xfd" else ""


def blocks(file: IO[bytes], compression: str | None = None) -> Iterator[bytes]:
    """A file's bytes, decompressed, in blocks of bounded size. compression: by the first bytes where not given."""
    kind = compression_of(file) if compression is None else compression
    if kind == "gzip":
        return _gzip_blocks(file)
    if kind == "zstd":
        return _zstd_blocks(file)
    return iter(lambda: file.read(_BLOCK), b"")


def _gzip_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Any number of gzip members, with zero bytes as padding after the last (RFC 1952; gzip(1))."""
    member, data = zlib.decompressobj(31), b""
    fresh = True  # nothing of this member was read yet
    while True:
        if not data:
            data = file.read(_BLOCK)
            if not data:
                break
        if fresh and not (data := data.lstrip(b"\0")):
            continue
        fresh = False
        before = member.copy()
        try:
            block = member.decompress(data, _BLOCK)
        except zlib.error:
            yield from _up_to_damage(before, data)
        if block:
            yield block
        data = member.unconsumed_tail
        if member.eof:
            data, member, fresh = member.unused_data, zlib.decompressobj(31), True
    if not fresh:
        raise DamagedStream("truncated", "the gzip stream ends in the middle")


def _up_to_damage(member: Any, data: bytes) -> Iterator[bytes]:
    """What a gzip member gives before it breaks, in small steps: zlib loses the output of the step that fails."""
    try:
        while True:
            yield member.decompress(data, 64)
            data = member.unconsumed_tail
    except zlib.error as error:
        raise DamagedStream("corrupt", f"gzip: {error}") from error


def _zstd_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Any number of zstd frames. Arrow's reader gives bounded blocks and notices a frame that is cut.

    A damaged frame costs at most one block of 64 KiB before the damage; zstd's own blocks have 128 KiB.
    """
    stream = pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd")
    try:
        while block := stream.read(1 << 16):
            yield block
    except OSError as error:
        raise DamagedStream("truncated" if "Truncated" in str(error) else "corrupt", f"zstd: {error}") from error
