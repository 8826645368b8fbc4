"""Ranges of big line files: whatever the cuts, every line is in exactly one range."""

from __future__ import annotations

import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import read_batches
from gristmill.stages.readers_ranges import cuts
from gristmill.stages.shards import Shard

Pack = Callable[[bytes, int], bytes]


def plain(data: bytes, _block: int) -> bytes:
    return data


def zstd_frames(data: bytes, block: int) -> bytes:
    """A frame a block, as pzstd writes; sizes, checksums and skippable frames vary."""
    out = []
    for i, start in enumerate(range(0, len(data), block)):
        params = {"write_checksum": i % 2 == 0, "write_content_size": i % 3 > 0}
        out.append(zstandard.ZstdCompressor(level=1, **params).compress(data[start : start + block]))
        if i % 4 == 3:
            out.append(struct.pack("<II", 0x184D2A53, 5) + b"hello")
    return b"".join(out)


def bgzf(data: bytes, block: int) -> bytes:
    """As bgzip writes: SAM specification, 4.1, with the empty block at the end."""
    out = []
    for start in [*range(0, len(data), block), len(data)]:
        packer = zlib.compressobj(1, zlib.DEFLATED, -15)
        part = data[start : start + block]
        body = packer.compress(part) + packer.flush()
        head = struct.pack("<BBBBIBBHBBHH", 31, 139, 8, 4, 0, 0, 255, 6, 66, 67, 2, len(body) + 25)
        out.append(head + body + struct.pack("<II", zlib.crc32(part), len(part)))
    return b"".join(out)


def lines_of(path: Path, bounds: list[int]) -> list[list[str]]:
    """Texts of each range."""
    out, edges = [], [0, *bounds]
    for start, stop in zip(edges, [*bounds, None], strict=True):
        shard = Shard(
            index=0, source="s", path=str(path), name="x", format="jsonl", size=1, stamp="", start=start, stop=stop
        )
        ledger = StageLedger(stage="read")
        rows = [row for b in read_batches(shard, ledger, []) for row in b.to_pylist()]
        ledger.check("here")
        assert not ledger.failed
        assert len({row["doc_id"] for row in rows}) == len(rows)
        out.append([row["text"] for row in rows])
    return out


def document_lines(sizes: list[int]) -> tuple[list[str], bytes]:
    texts = [f"{i} {'x' * size}" for i, size in enumerate(sizes)]
    return texts, b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("pack", [plain, zstd_frames, bgzf])
@pytest.mark.parametrize("block", [37, 1000, 60_000])
def test_every_line_is_in_one_range(tmp_path: Path, pack: Pack, block: int) -> None:
    rng = random.Random(block)
    texts, data = document_lines([rng.choice([0, 1, 50, 3000]) for _ in range(300)])
    packed = pack(data, block)
    (tmp_path / "x").write_bytes(packed)
    for range_bytes in (500, 5000, len(packed) // 3):
        bounds = cuts(io.BytesIO(packed), len(packed), range_bytes, walk=True)
        assert bounds == sorted(set(bounds))
        assert all(0 < at < len(packed) for at in bounds)
        parts = lines_of(tmp_path / "x", bounds[:40])
        assert [text for part in parts for text in part] == texts
    if block < 60_000:
        assert len(bounds) in (1, 2, 3)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.lists(st.integers(1, 400), max_size=5), st.booleans())
def test_any_cuts_of_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], at: list[int], ends: bool
) -> None:
    texts, data = document_lines(sizes)
    data = data if ends else data[:-1]
    path = tmp_path_factory.mktemp("cuts") / "x"
    path.write_bytes(data)
    bounds = sorted({a for a in at if a < len(data)})
    assert [text for part in lines_of(path, bounds) for text in part] == texts


def test_a_cut_between_two_lines(tmp_path: Path) -> None:
    """The line that begins where a range ends belongs to that range: the next one cannot know that it begins there."""
    first, second = b'{"text":"a"}\n', b'{"text":"b"}\n'
    packed = zstandard.compress(first) + zstandard.compress(second)
    (tmp_path / "x").write_bytes(packed)
    assert lines_of(tmp_path / "x", [len(zstandard.compress(first))]) == [["a", "b"], []]


@pytest.mark.parametrize("pack", [zstandard.compress, lambda d: __import__("gzip").compress(d, mtime=0)])
def test_one_stream_is_not_cut(pack: Callable[[bytes], bytes]) -> None:
    packed = pack(random.Random(1).randbytes(100_000))
    assert cuts(io.BytesIO(packed), len(packed), 1000, walk=True) == []


def test_a_file_that_is_damaged_is_not_cut() -> None:
    packed = zstd_frames(random.Random(1).randbytes(100_000), 1000)
    bounds = cuts(io.BytesIO(packed), len(packed), 1000, walk=True)
    assert len(bounds) > 50
    assert cuts(io.BytesIO(packed[:-10]), len(packed) - 10, 1000, walk=True) == []
    broken = packed[: bounds[9]] + b"\xff" * 50 + packed[bounds[9] + 50 :]
    assert cuts(io.BytesIO(broken), len(broken), 1000, walk=True) == []


def test_far_files_are_cut_by_their_seek_table_alone() -> None:
    frames = [zstandard.compress(random.Random(i).randbytes(1000)) for i in range(20)]
    table = b"".join(struct.pack("<II", len(frame), 1000) for frame in frames)
    table += struct.pack("<IBI", len(frames), 0, 0x8F92EAB1)
    without = b"".join(frames)
    packed = without + struct.pack("<II", 0x184D2A5E, len(table)) + table
    assert cuts(io.BytesIO(without), len(without), 3000, walk=False) == []
    found = cuts(io.BytesIO(packed), len(packed), 3000, walk=False)
    assert found == cuts(io.BytesIO(packed), len(packed), 3000, walk=True)[: len(found)]
    assert len(found) == 6
