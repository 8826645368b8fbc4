"""Checksums of blocks: any cutting of the stream gives the same, and a changed bit is found where it is read."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize import shards
from gristmill.tokenize.blocks import BLOCK_BYTES, BlockChecker, BlockHashes, block_hashes, metadata_of
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.shards import TokenError, TokenSet, read_manifest
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard

DATA = np.random.default_rng(0).integers(0, 65_536, 3 * BLOCK_BYTES // 2 + 5).astype("<u2")  # 3 blocks and 10 bytes


def test_a_worked_example():
    hashes = block_hashes(metadata_of(DATA.data))
    raw = DATA.tobytes()
    assert [int(h) for h in hashes] == [
        xxhash.xxh3_64_intdigest(raw[at : at + BLOCK_BYTES]) for at in range(0, len(raw), BLOCK_BYTES)
    ]
    assert len(hashes) == 4
    assert len(block_hashes(metadata_of(np.zeros(0, "<u2").data))) == 0


@given(st.lists(st.integers(0, len(DATA)), max_size=6))
def test_any_cutting_gives_the_same_hashes(cuts):
    hashes = BlockHashes()
    for part in np.split(DATA, sorted(cuts)):
        hashes.update(part.data)
    assert hashes.metadata() == metadata_of(DATA.data)


@given(st.lists(st.tuples(st.integers(0, 2 * len(DATA) - 1), st.integers(1, 150_000)), min_size=1, max_size=8))
def test_a_changed_block_is_found_by_the_ranges_that_touch_it_and_no_others(ranges):
    at = BLOCK_BYTES + 77  # in block 1
    spoiled = bytearray(DATA.tobytes())
    spoiled[at] ^= 1
    checker = BlockChecker(pa.py_buffer(bytes(spoiled)), block_hashes(metadata_of(DATA.data)))
    assert checker.fits
    for low, length in ranges:
        high = min(low + length, 2 * len(DATA))
        touches = low < 2 * BLOCK_BYTES and high > BLOCK_BYTES
        assert checker.bad_block(np.array([low]), np.array([high])) == (1 if touches else None)
    lows, highs = (np.array(x) for x in zip(*((low, min(low + n, 2 * len(DATA))) for low, n in ranges), strict=True))
    touched = ((lows < 2 * BLOCK_BYTES) & (highs > BLOCK_BYTES)).any()
    assert checker.bad_block(lows, highs) == (1 if touched else None)
    assert checker.first_bad() == 1
    assert not checker.done


def test_a_block_is_compared_once():
    data = bytearray(DATA.tobytes())
    checker = BlockChecker(pa.py_buffer(data), block_hashes(metadata_of(DATA.data)))
    assert checker.bad_block(np.array([0]), np.array([2 * len(DATA)])) is None
    assert checker.done
    data[0] ^= 1
    assert checker.bad_block(np.array([0]), np.array([10])) is None


@pytest.mark.parametrize("metadata", [None, {}, {b"bin_block_bytes": b"65536", b"bin_block_xxh3": b"*"}])
def test_an_index_without_hashes(metadata):
    assert block_hashes(metadata) is None


@pytest.fixture
def two_blocks(tmp_path, tokenizer_json, make_batch):
    """One shard of 40 documents over more than two blocks."""
    texts = [f"document {i} " + "stone mill wheel " * 600 for i in range(40)]
    encoder = Encoder(tokenizer_json)
    write_manifest(str(tmp_path), write_shard([make_batch(texts)], encoder, str(tmp_path), "part-00000"), encoder)
    assert (tmp_path / "part-00000.bin").stat().st_size > 2 * BLOCK_BYTES
    return tmp_path


def test_a_big_set_is_compared_where_it_is_read(two_blocks, monkeypatch):
    monkeypatch.setattr(shards, "CHECKED_BYTES", 1_000)
    path = two_blocks / "part-00000.bin"
    sound = path.read_bytes()
    for at in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(sound) - 3):
        spoiled = bytearray(sound)
        spoiled[at] ^= 1
        path.write_bytes(bytes(spoiled))
        docs = TokenSet.open(two_blocks).sources["docs"]
        tokens, elsewhere = docs.tokens, 0 if at >= BLOCK_BYTES else BLOCK_BYTES // 2
        assert len(docs.read(elsewhere, 1)) == 1
        with pytest.raises(TokenError, match=r"part-00000\.bin: the checksum of a block .* of documents \d+ to \d+,"):
            docs.read(at // 2, 1)
        with pytest.raises(TokenError, match="the checksum of a block"):
            docs.read(0, tokens)
        with pytest.raises(TokenError, match="the checksum of a block"):
            list(docs.documents())
        assert any("ids" in problem and ", of documents " in problem for problem in verify_tokens(two_blocks))
    path.write_bytes(sound)
    docs = TokenSet.open(two_blocks).sources["docs"]
    assert len(list(docs.documents())) == 40
    assert not docs.files(0).compares


def test_checksums_of_another_number_of_blocks_are_refused(two_blocks, monkeypatch, tokenizer_json):
    """An index whose own checksum is right, of ids that are not these."""
    from gristmill.tokenize.pieces import index_bytes
    from gristmill.tokenize.shards import map_file, read_index

    monkeypatch.setattr(shards, "CHECKED_BYTES", 1_000)
    path = two_blocks / "part-00000.idx"
    index = index_bytes(read_index(map_file(path), ""), metadata_of(DATA[:9].data))
    path.write_bytes(index)
    info = read_manifest(two_blocks).shards[0]
    changed = info.model_copy(update={"idx_bytes": len(index), "idx_xxh3": xxhash.xxh3_128_hexdigest(index)})
    write_manifest(str(two_blocks), [changed], Encoder(tokenizer_json))
    with pytest.raises(TokenError, match=r"part-00000\.bin: its index has the checksums of 1 blocks, not of all"):
        TokenSet.open(two_blocks).sources["docs"].read(0, 1)
