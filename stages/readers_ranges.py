"""Ranges of big line files: where a file may be cut, and which lines a range holds.

A file of lines is cut at any byte where it is plain, between frames where it is zstd, and between blocks where it is
BGZF (gzip in blocks of 64 KiB, as bgzip writes it). One long gzip or zstd stream cannot be cut.

A range holds the lines that begin in it. Whether a line begins at its first byte, only the range before knows; so the
first line of a range belongs to the one before, which reads on behind its end: a range holds the lines that begin
behind its first byte, up to the byte that follows its last.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from typing import IO

from gristmill.stages.readers_common import blocks, compression_of

_ZSTD_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50  # and the 15 numbers behind it (RFC 8878, 3.1.2)
_SEEKABLE = 0x8F92EAB1  # last bytes of a seek table (zstd's contrib/seekable_format)
_BGZF_HEAD = 18  # bytes of a gzip header with the extra field of BGZF alone (SAM specification, 4.1)


def cuts(file: IO[bytes], size: int, range_bytes: int, *, walk: bool) -> list[int]:
    """Offsets at which the file may be cut into ranges of about `range_bytes`, ascending, without 0 and size.

    walk: read the head of every frame; without it (storage that is far away) only zstd files with a seek table and
    plain files are cut. Empty where the file cannot be cut, or is damaged: its reader says how.
    """
    if size <= range_bytes:
        return []
    kind = compression_of(file)
    if not kind:
        return list(range(range_bytes, size, range_bytes))
    if kind == "zstd":
        frames = _seek_table(file, size) or (_walk(file, size, _zstd_frame_bytes) if walk else [])
    else:
        frames = _walk(file, size, _bgzf_block_bytes) if walk else []
    chosen, last = [], 0
    for at in frames:
        if at - last >= range_bytes and at < size:
            chosen.append(at)
            last = at
    return chosen


def _walk(file: IO[bytes], size: int, frame_bytes: Callable[[IO[bytes], int], int]) -> list[int]:
    """Offsets of the frames behind the first one; empty where one of them cannot be understood."""
    out, at = [], 0
    while at < size:
        length = frame_bytes(file, at)
        if not length or at + length > size:
            return []
        at += length
        out.append(at)
    return out[:-1]


def _zstd_frame_bytes(file: IO[bytes], at: int) -> int:
    """Bytes of the zstd frame at an offset, by its headers (RFC 8878, 3.1.1); 0 where there is none."""
    file.seek(at)
    head = file.read(18)
    if len(head) < 8:
        return 0
    magic, second = struct.unpack("<II", head[:8])
    if magic & ~15 == _SKIPPABLE:
        return 8 + int(second)
    if magic != _ZSTD_MAGIC:
        return 0
    flags = head[4]
    single, checksum = flags >> 5 & 1, flags >> 2 & 1
    content_size = (single, 2, 4, 8)[flags >> 6]
    length = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + content_size
    while True:
        file.seek(at + length)
        block = file.read(3)
        if len(block) < 3:
            return 0
        bits = int.from_bytes(block, "little")
        length += 3 + (1 if bits >> 1 & 3 == 1 else bits >> 3)  # a run-length block holds one byte
        if bits & 1:
            return length + 4 * checksum


def _bgzf_block_bytes(file: IO[bytes], at: int) -> int:
    """Bytes of the BGZF block at an offset; 0 where there is none."""
    file.seek(at)
    head = file.read(_BGZF_HEAD)
    if len(head) < _BGZF_HEAD or head[:4] != b"\x1f\x8b\x08\x04" or head[12:16] != b"BC\x02\x00":
        return 0
    return int.from_bytes(head[16:18], "little") + 1


def _seek_table(file: IO[bytes], size: int) -> list[int]:
    """Offsets of the frames behind the first one from the seek table at the end; empty where there is none."""
    if size < 17:
        return []
    file.seek(size - 9)
    count, flags, magic = struct.unpack("<IBI", file.read(9))
    entry = 12 if flags & 0x80 else 8
    if magic != _SEEKABLE or count * entry + 17 > size:
        return []
    file.seek(size - 9 - count * entry)
    table = file.read(count * entry)
    out, at = [], 0
    for i in range(count):
        at += int.from_bytes(table[i * entry : i * entry + 4], "little")
        out.append(at)
    return out[:-1] if at == size - 17 - count * entry else []


class _Part(io.RawIOBase):
    """Bytes start:stop of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, stop: int | None) -> None:
        super().__init__()
        self._file, self._start, self._stop, self._at = file, start, stop, start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        want = len(buffer) if self._stop is None else min(len(buffer), self._stop - self._at)
        self._file.seek(self._at)
        data = self._file.read(max(0, want))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class Range:
    """The decompressed blocks of a range, and behind them those of the rest of the file.

    `bytes` is None until the range was read to its end, then its decompressed bytes.
    """

    def __init__(self, file: IO[bytes], start: int, stop: int | None) -> None:
        self._file, self._start, self._stop = file, start, stop
        self.bytes: int | None = None

    def blocks(self) -> Iterator[bytes]:
        kind, total = compression_of(self._file), 0
        for block in blocks(_Part(self._file, self._start, self._stop), kind):  # type: ignore[arg-type]
            total += len(block)
            yield block
        self.bytes = total
        if self._stop is not None:
            yield from blocks(_Part(self._file, self._stop, None), kind)  # type: ignore[arg-type]
