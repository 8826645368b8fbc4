"""Token shards of texts that a test makes up."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gristmill.tokenize.pieces import index_bytes
from gristmill.tokenize.shards import INDEX_SCHEMA, ShardInfo, TokenManifest, read_manifest

VOCAB, EOS = 61, 60


def chain(rng: np.random.Generator, table: np.ndarray, length: int) -> np.ndarray:
    """A Markov chain over 60 ids: each is followed by one of three."""
    ids = np.empty(length, np.uint16)
    ids[0] = rng.integers(60)
    choices = rng.integers(0, 3, length)
    for i in range(1, length):
        ids[i] = table[ids[i - 1], choices[i]]
    return ids


def write_tokens(folder: Path, sources: dict[str, tuple[int, bool]], seed: int = 0) -> Path:
    """sources: name -> (documents, learnable). Text that is not learnable is uniform noise. A fifth is held out."""
    texts: dict[str, list[np.ndarray]] = {}
    for number, (source, (documents, learnable)) in enumerate(sources.items()):
        rng = np.random.default_rng([seed, number])
        table = np.random.default_rng(5).integers(0, 60, (60, 3)).astype(np.uint16)
        texts[source] = []
        for _ in range(documents):
            length = int(rng.integers(5, 60))
            noise = rng.integers(0, 60, length).astype(np.uint16) if not learnable else None
            texts[source].append(chain(rng, table, length) if noise is None else noise)
    return write_token_texts(folder, texts, EOS, bytes_per_token=2)


def write_token_texts(folder: Path, texts: dict[str, list[np.ndarray]], eos: int, bytes_per_token: int = 1) -> Path:
    """texts: source -> ids of its documents, below eos. A fifth of them is held out."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(b"{}")
    infos = []
    for number, (source, bodies) in enumerate(texts.items()):
        ended = [np.append(body, np.uint16(eos)) for body in bodies]
        held = len(ended) // 5
        for split, part in (("train", ended[held:]), ("holdout", ended[:held])):
            name = f"{'part' if split == 'train' else 'holdout'}-{number:05d}"
            infos.append(_shard(folder, name, source, split, part, bytes_per_token))
    manifest = TokenManifest(
        dtype="uint16",
        vocab_size=eos + 1,
        eos_id=eos,
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(b"{}"),
        holdout_share=0.2,
        shards=infos,
    )
    (folder / "shards.json").write_bytes(manifest.sealed())
    return folder


def spelled(tokens: Path, folder: Path, letters: Sequence[str]) -> Path:
    """Copies a folder of token shards, with a tokenizer that can be read: an id for each letter, and <eos>."""
    shutil.copytree(tokens, folder)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    data = tokenizer.to_str().encode()
    (folder / "tokenizer.json").write_bytes(data)
    manifest = read_manifest(folder).model_copy(update={"tokenizer_xxh3": xxhash.xxh3_128_hexdigest(data)})
    (folder / "shards.json").write_bytes(manifest.sealed())
    return folder


def _shard(
    folder: Path, name: str, source: str, split: str, texts: list[np.ndarray], bytes_per_token: int
) -> ShardInfo:
    lengths = np.array([len(t) for t in texts])
    table = pa.Table.from_pydict(
        {
            "doc_id": [f"{source}-{split}-{i}" for i in range(len(texts))],
            "source": [source] * len(texts),
            "start": np.cumsum(lengths) - lengths,
            "length": lengths,
            "bytes": (lengths - 1) * bytes_per_token,  # as if every token but the last stood for as many
        },
        schema=INDEX_SCHEMA,
    )
    data, index = np.concatenate(texts).astype("<u2").tobytes(), index_bytes(table)
    (folder / f"{name}.bin").write_bytes(data)
    (folder / f"{name}.idx").write_bytes(index)
    return ShardInfo(
        name=name,
        source=source,
        split=split,
        documents=len(texts),
        tokens=int(lengths.sum()),
        bytes=int(((lengths - 1) * bytes_per_token).sum()),
        idx_bytes=len(index),
        bin_xxh3=xxhash.xxh3_128_hexdigest(data),
        idx_xxh3=xxhash.xxh3_128_hexdigest(index),
    )
