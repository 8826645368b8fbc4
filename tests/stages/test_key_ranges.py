"""Memory of clustering: the bound holds, and what it is has no effect on the result."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.stages import key_ranges
from gristmill.stages.exact import Exact
from gristmill.stages.minhash import MinHash, band_name
from gristmill.stages.signatures import ClusterError, with_settings

MB = 10**6
POOLS: list[pa.MemoryPool] = []  # a pool must outlive what was allocated from it


def signed(stage: MinHash, count: int, shards: int = 4) -> list[pa.Table]:
    """Signatures of documents of which each two share the keys of one band: all are members of clusters."""
    rng = np.random.default_rng(0)
    out = []
    for shard in range(shards):
        rows = np.arange(shard, count, shards, dtype=np.uint64)
        n = len(rows)
        hashes = pa.py_buffer(rng.bytes(16 * n))
        columns: dict[str, pa.Array] = {
            "doc_id": pa.array([f"<urn:uuid:{i:032x}>" for i in rows.tolist()]),
            "source": pa.array(["crawl"] * n),
            "dump": pa.nulls(n, pa.string()),
            "date": pa.nulls(n, pa.string()),
            "rank": pa.array(-rng.integers(200, 20_000, n).astype(np.float64)),
            "text_hash": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), n, [None, hashes]),
            "shingles": pa.array(np.full(n, 3, np.uint32)),
            "capped": pa.array(np.zeros(n, np.uint8)),
        }
        for band in range(stage.bands):
            key = (rows // np.uint64(2 if band == 0 else 1) + np.uint64(band * 2**40)) * np.uint64(0x9E3779B97F4A7C15)
            columns[band_name(band)] = pa.array((key ^ (key >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93))
        sets = np.repeat(rows // np.uint64(2), 3).astype(np.uint32) * np.uint32(3) + np.tile(
            np.arange(3, dtype="u4"), n
        )
        columns["shingle_set"] = pa.ListArray.from_arrays(pa.array(np.arange(0, 3 * n + 1, 3, dtype=np.int32)), sets)
        out.append(pa.Table.from_batches([with_settings(columns, stage.described())]))
    return out


def peak_mb(stage: Any, tables: list[pa.Table]) -> tuple[float, set[str]]:
    """The most memory that NumPy and Arrow held together while the stage clustered -> (10^6 bytes, doc_ids removed)."""
    pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        decisions, _ = stage.cluster(tables)
        peak = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    removed = {i for d in decisions for i in d.filter(d["reason"].is_valid())["doc_id"].to_pylist()}
    return peak / MB, removed


@pytest.mark.parametrize("verify", ["none", "jaccard"])
def test_the_bound_holds_and_changes_nothing(verify: str) -> None:
    """Half of the documents go, so that all that grows with clusters is at its largest."""
    count = 100_000
    stage = MinHash(bands=2, verify=verify, max_cluster_share=1.0)
    tables = signed(stage, count)
    stage.cluster([table.slice(0, 100) for table in tables])  # compile
    ids_mb = count / 2 * 3 * (len("<urn:uuid:>") + 32 + 8) / MB  # one doc_id a cluster, and copies on its way
    removed = []
    for memory_mb in (count * 62 / MB, count * 80 / MB, 4_096):
        peak, gone = peak_mb(stage.model_copy(update={"memory_mb": memory_mb}), tables)
        assert peak < memory_mb + ids_mb
        removed.append(gone)
    assert len(removed[0]) == count / 2
    assert removed[0] == removed[1] == removed[2]


def test_ranges_follow_from_the_data() -> None:
    stage = MinHash(bands=1)
    few, many = signed(stage, 1_000), signed(stage, 8_000)
    room = key_ranges.room(few, 0.06, verified=False, scoped=False)
    assert room.ranges == int(np.ceil(1_000 * 30 / (60_000 - 48_000)))
    assert room.members < 1_000
    assert key_ranges.room(many, 0.6, verified=False, scoped=False).ranges == 2
    assert key_ranges.room(many, 4_096, verified=True, scoped=True).ranges == 1
    assert key_ranges.room([], 1, verified=False, scoped=False) == key_ranges.Room(1, 1)


def test_too_little_memory_says_how_much_it_takes() -> None:
    tables = signed(MinHash(bands=1), 1_000)
    message = r"memory_mb: 0\.04 is too little to cluster 1,000 documents, which take at least 0\.048"
    with pytest.raises(ClusterError, match=message):
        MinHash(bands=1, memory_mb=0.04).cluster(tables)
    exact = Exact(memory_mb=0.04)
    rows = pa.array([str(i) for i in range(1_000)])
    columns = {"doc_id": rows, "source": rows, "dump": rows, "date": rows, "text": rows}
    table = pa.Table.from_batches([exact.sign(pa.RecordBatch.from_pydict(columns))])
    with pytest.raises(ClusterError, match=r"memory_mb: 0\.04 is too little"):
        exact.cluster([table])


def test_keys_that_fall_into_one_range_all_the_same() -> None:
    """Equal keys cannot be spread over ranges: the buffers grow, and nothing is lost."""
    column = pa.table({"key": pa.array(np.full(50_000, 5, np.uint64))})
    alive, none = np.ones(50_000, bool), np.zeros(0, np.uint64)
    found = [(keys.copy(), rows.copy()) for keys, rows in key_ranges.sorted_ranges([column], ["key"], alive, none, 7)]
    assert [len(keys) for keys, _ in found] == [50_000, 0, 0, 0, 0, 0, 0]
    assert found[0][1].tolist() == list(range(50_000))
