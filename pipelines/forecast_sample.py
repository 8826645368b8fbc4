"""A seeded sample of a recipe's input for `gristmill plan`: pieces of its files, cut where a record begins.

Pieces lie at even distances, from a random start, in the bytes of all files of a source, so that a big file gives more
of them. A range of Parquet (row groups) and of plain JSONL is read where it lies. From WARC and WET a piece is cut out
at records, from compressed lines and CSV near the file's beginning; it goes into a folder that is removed afterwards.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.pipelines.forecast import Target
from gristmill.stages.readers_common import blocks, compression_of
from gristmill.stages.shards import Shard, filesystem

PIECES = 6  # of each source, besides two small ones
SMALL_BYTES = 64_000  # of a piece that tells what is loaded before the first document
LONGEST_RECORD = 32 << 20  # bytes that are looked through for the beginning of a record
_GZIP = b"\x1f\x8b\x08"
_ZSTD = b"\x28\xb5\x2f\xfd"


class SampleError(ValueError):
    """No sample can be taken of an input."""


@dataclass(frozen=True)
class Piece:
    """A part of the input to be worked on."""

    shard: Shard
    input_bytes: int  # that it stands for, as they lie on disk
    role: str = "piece"  # or "first", "second": the small ones


def shard_bytes(shard: Shard) -> int:
    """Bytes on disk that one shard of a listing reads; about, for row groups of Parquet."""
    if shard.format == "jsonl" and (shard.start or shard.stop is not None):
        return (shard.size if shard.stop is None else shard.stop) - shard.start
    return shard.size


def targets(shards: Sequence[Shard]) -> dict[str, Target]:
    """source -> what there is of it."""
    out: dict[str, Target] = {}
    for source in dict.fromkeys(shard.source for shard in shards):
        own = [shard for shard in shards if shard.source == source]
        files = {(shard.path, shard.members): shard.size for shard in own}
        ranges = {path: sum(1 for shard in own if shard.path == path[0]) for path in files}
        largest = max(
            shard_bytes(shard) / (ranges[shard.path, shard.members] if shard.format == "parquet" else 1)
            for shard in own
        )
        out[source] = Target(sum(files.values()), len(own), largest)
    return out


def scaled(found: Mapping[str, Target], factors: Mapping[str, float]) -> dict[str, Target]:
    """The same input, so many times as much of each source, in shards of the same size."""
    return {
        source: Target(
            target.bytes * factors[source], max(1, round(target.shards * factors[source])), target.largest_bytes
        )
        for source, target in found.items()
    }


def sample(shards: Sequence[Shard], sample_bytes: int, seed: int, folder: Path) -> list[Piece]:
    """Pieces of every source, about sample_bytes together. folder: for those that are cut out.

    Raises SampleError where a source has nothing to take.
    """
    found = targets(shards)
    whole = sum(target.bytes for target in found.values())
    least = sample_bytes / (4 * len(found))  # a small source is sampled too
    pieces: list[Piece] = []
    for source, target in found.items():
        files = list({(s.path, s.members): s for s in shards if s.source == source}.values())
        budget = min(target.bytes, max(least, sample_bytes * target.bytes / max(1, whole)))
        rng = random.Random(f"{seed} {source}")  # noqa: S311  (a sample, no secret)
        own = list(_source(source, files, int(budget), rng, folder)) if target.bytes else []
        if not any(piece.role == "piece" for piece in own):
            raise SampleError(
                f"Source `{source}`: its {len(files):,} files hold nothing that a sample could be taken of "
                f"({target.bytes:,.0f} bytes). Is it the right pattern?"
            )
        pieces += own
    return [
        Piece(piece.shard.model_copy(update={"index": i}), piece.input_bytes, piece.role)
        for i, piece in enumerate(pieces)
    ]


def _source(source: str, files: list[Shard], budget: int, rng: random.Random, folder: Path) -> Iterator[Piece]:
    size = max(1, budget // PIECES)
    for role in ("first", "second"):
        file = rng.choices(files, [file.size or 1 for file in files])[0]
        name = folder / f"{source}-{role}"
        if _anywhere(file):
            yield from _cut(file, rng.randrange(max(1, file.size)), SMALL_BYTES, name, role)
        else:
            yield from _stream(file, SMALL_BYTES, 1, name, role)
    start, total = rng.random(), sum(file.size for file in files)
    chosen: dict[int, list[int]] = {}  # file -> places in it
    for n in range(PIECES):
        at = int((n + start) / PIECES * total)
        for i, file in enumerate(files):
            if at < file.size:
                chosen.setdefault(i, []).append(at)
                break
            at -= file.size
    for i, places in chosen.items():
        file, name = files[i], folder / f"{source}-{i}"
        if not _anywhere(file):
            yield from _stream(file, len(places) * size, len(places), name, "piece")
            continue
        if file.size <= size * len(places):
            yield from _cut(file, 0, file.size, name, "piece")
            continue
        for n, at in enumerate(places):
            yield from _cut(file, at, size, folder / f"{name.name}-{n}", "piece")


def _anywhere(file: Shard) -> bool:
    """True where a piece can be taken from the middle of a file; a compressed stream is read from its beginning."""
    if file.format not in ("jsonl", "csv", "tsv"):
        return True
    fs, inner = filesystem(file.path)
    with fs.open(inner, "rb") as opened:
        return file.format == "jsonl" and not compression_of(opened)


def _cut(file: Shard, at: int, size: int, path: Path, role: str) -> Iterator[Piece]:
    """About `size` bytes of a file around `at`. Nothing where no record begins there."""
    at = max(0, min(at, file.size - size))
    if file.members:
        yield from _members(file, at, size, role)
    elif file.size <= size and role == "piece":
        yield Piece(file.model_copy(update={"start": 0, "stop": None}), file.size, role)
    elif file.format == "parquet":
        yield from _row_groups(file, at, size, role)
    elif file.format in ("warc", "wet"):
        yield from _records(file, at, size, path, role)
    elif file.format == "jsonl":
        yield Piece(file.model_copy(update={"start": at, "stop": min(file.size, at + size)}), size, role)
    elif role == "piece":
        yield Piece(file, file.size, role)


def _members(file: Shard, at: int, size: int, role: str) -> Iterator[Piece]:
    chosen, total, behind = [], 0, 0
    for member in file.members:
        behind += member.size
        if behind > at and total < size:
            chosen.append(member)
            total += member.size
    yield Piece(file.model_copy(update={"members": tuple(chosen), "size": total}), total, role)


def _row_groups(file: Shard, at: int, size: int, role: str) -> Iterator[Piece]:
    fs, inner = filesystem(file.path)
    with fs.open(inner, "rb") as opened:
        try:
            metadata = pq.ParquetFile(opened).metadata
        except pa.ArrowInvalid:
            return
    sizes = [_compressed(metadata.row_group(i)) for i in range(metadata.num_row_groups)]
    first, behind = 0, sizes[0] if sizes else 0
    while behind <= at and first + 1 < len(sizes):
        first += 1
        behind += sizes[first]
    stop, total = first, 0
    while stop < len(sizes) and total < size:
        total += sizes[stop]
        stop += 1
    if total:
        yield Piece(file.model_copy(update={"start": first, "stop": stop}), total, role)


def _compressed(group: Any) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


def _records(file: Shard, at: int, size: int, path: Path, role: str) -> Iterator[Piece]:
    """Whole records of a WARC file, each of which is a member of its gzip or zstd, or none of it is compressed."""
    fs, inner = filesystem(file.path)
    with fs.open(inner, "rb") as opened:
        kind = compression_of(opened)
        begin = _record_start(opened, at, kind, file.size)
        end = file.size if begin + size >= file.size else _record_start(opened, begin + size, kind, file.size)
        opened.seek(begin)
        data = opened.read(end - begin)
    if data:
        yield from _written(file, data, path, {"gzip": ".warc.gz", "zstd": ".warc.zst"}.get(kind, ".warc"), role)


def _record_start(file: IO[bytes], at: int, kind: str, size: int) -> int:
    """The first record that begins at `at` or behind it; the end of the file where none does."""
    if at == 0:
        return 0
    magic = {"gzip": _GZIP, "zstd": _ZSTD}.get(kind, b"\r\n\r\nWARC/1.")
    file.seek(at)
    data = file.read(LONGEST_RECORD)
    found = data.find(magic)
    while found >= 0:
        if kind == "gzip":
            if _begins_record(data[found : found + 4096]):
                return at + found
        else:  # a frame of zstd with a record, or the blank lines before one
            return at + found + (0 if kind else 4)
        found = data.find(magic, found + 1)
    return size


def _begins_record(member: bytes) -> bool:
    try:
        return zlib.decompressobj(wbits=31).decompress(member, 5) == b"WARC/"
    except zlib.error:
        return False


def _stream(file: Shard, size: int, count: int, path: Path, role: str) -> Iterator[Piece]:
    """The first lines of a file, about `size` bytes as they lie on disk, in `count` pieces compressed as they were."""
    fs, inner = filesystem(file.path)
    with fs.open(inner, "rb") as opened:
        kind = compression_of(opened)
        held, used = bytearray(), 0
        for block in blocks(opened, kind):
            held += block
            used = opened.tell() if kind else len(held)
            if used >= size and b"\n" in held:
                break
        else:
            used = file.size
    # What is read ahead of a compressed stream counts as used, so a short piece may hold too much: cut it to its share.
    share = min(1.0, size / max(1, used))
    end = len(held) if used >= file.size and share == 1 else held.rfind(b"\n", 0, max(1, int(len(held) * share))) + 1
    end = end or held.find(b"\n") + 1
    header = bytes(held[: held.find(b"\n") + 1]) if file.format != "jsonl" else b""
    edges = [0]
    for n in range(1, count):
        edges.append(max(edges[-1], held.rfind(b"\n", 0, end * n // count) + 1))
    for n, (begin, stop) in enumerate(pairwise([*edges, end])):
        if stop > begin:
            target = path.with_name(f"{path.name}-{n}.{file.format}")
            _write((header if begin else b"") + bytes(held[begin:stop]), target, kind)
            yield _of_file(file, target, round(used * (stop - begin) / len(held)), role)


def _write(lines: bytes, target: Path, kind: str) -> None:
    if not kind:
        target.write_bytes(lines)
        return
    with pa.CompressedOutputStream(str(target), kind) as packed:
        packed.write(lines)


def _written(file: Shard, data: bytes, path: Path, ending: str, role: str) -> Iterator[Piece]:
    target = path.with_name(path.name + ending)
    target.write_bytes(data)
    yield _of_file(file, target, len(data), role)


def _of_file(file: Shard, target: Path, input_bytes: int, role: str) -> Piece:
    update = {"path": str(target), "name": target.name, "size": target.stat().st_size, "start": 0, "stop": None}
    return Piece(file.model_copy(update=update), input_bytes, role)
