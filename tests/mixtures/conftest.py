"""A folder of real token shards, small enough to read by eye: every token says where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from gristmill.tokenize.blocks import metadata_of
from gristmill.tokenize.pieces import index_bytes
from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, TokenManifest, TokenSet

EOS = 0


def write_tokens(folder: Path, sources: dict[str, list[list[int]]], vocab_size: int = 60_000) -> TokenSet:
    """sources: {name: lengths of the documents of each shard}. Token at place p of source number s: 1 + 20,000 s + p;
    the last of a document is EOS."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(b"{}")
    infos, part = [], 0
    for s, (name, shards) in enumerate(sources.items()):
        place = 0
        for lengths in shards:
            ends = np.cumsum(lengths)
            ids = (1 + 20_000 * s + place + np.arange(ends[-1])).astype("<u2" if vocab_size <= 1 << 16 else "<u4")
            ids[ends - 1] = EOS
            place += int(ends[-1])
            rows = {
                "doc_id": [f"{name}-{part}-{i}" for i in range(len(lengths))],
                "source": [name] * len(lengths),
                "start": (ends - lengths).tolist(),
                "length": lengths,
                "bytes": [4 * n for n in lengths],
            }
            index = index_bytes(pa.table(rows, schema=INDEX_SCHEMA), metadata_of(ids.data))
            (folder / f"part-{part:05}.bin").write_bytes(ids.tobytes())
            (folder / f"part-{part:05}.idx").write_bytes(index)
            infos.append(
                ShardInfo(
                    name=f"part-{part:05}",
                    source=name,
                    split="train",
                    documents=len(lengths),
                    tokens=len(ids),
                    bytes=4 * len(ids),
                    idx_bytes=len(index),
                    bin_xxh3=xxhash.xxh3_128_hexdigest(ids.tobytes()),
                    idx_xxh3=xxhash.xxh3_128_hexdigest(index),
                )
            )
            part += 1
    manifest = TokenManifest(
        dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        vocab_size=vocab_size,
        eos_id=EOS,
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(b"{}"),
        shards=infos,
    )
    (folder / "shards.json").write_bytes(manifest.sealed())
    return TokenSet.open(folder)


@pytest.fixture
def make_tokens(tmp_path: Path) -> Callable[..., TokenSet]:
    def make(sources: dict[str, list[list[int]]], vocab_size: int = 60_000) -> TokenSet:
        return write_tokens(tmp_path / "tokens", sources, vocab_size)

    return make


@pytest.fixture
def tokens(make_tokens: Callable[..., TokenSet]) -> TokenSet:
    """docs: 1,000 tokens in two shards; code: 400; readmes: 203."""
    return make_tokens({"docs": [[300, 13, 87, 100], [250, 250]], "code": [[40] * 10], "readmes": [[3, 200]]})
