"""READ FIRST: token shards, what they are on disk and how they are read.

    from gristmill.tokenize.shards import TokenSet
    tokens = TokenSet.open("out/demo/run/tokens")
    docs = tokens.sources["docs"]                     # the training split of one source, all its shards in a row
    docs.tokens                                       # 1048576
    docs.read(0, 2049)                                # (2049,) uint16, read-only, straight from the file
    docs.bounds(0, 2049)                              # where documents start in that range: [0, 711, 1502]
    for doc_id, ids, utf8_bytes in tokens.holdout["docs"].documents(): ...

A folder of tokens holds

    tokenizer.json       the tokenizer, as `tokenizers` reads it
    shards.json          the manifest, written last: `TokenManifest`
    part-00000.bin       token ids only, little-endian; the end-of-text id after each document
    part-00000.idx       Arrow IPC file, one row a document, in the order of the .bin: `INDEX_SCHEMA`
    holdout-00000.bin    the same for held-out documents
    holdout-00000.idx

Boundaries are stored, never searched for.
A shard holds one source and one split. A shard without tokens is legal: its .bin has no bytes.

`write.py` makes these files, `verify.py` reads every byte of them and says what is wrong where. `TokenSet.open`
checks what costs nothing: digest of the manifest, hash of the tokenizer, size of every file. An .idx is compared with
its checksum on first use. A .bin is mapped on first use; its last id must then end a document, and in a set of at most
CHECKED_BYTES of ids, or with `check="bytes"`, it is compared with its checksum too. In a larger set each block of
64 KiB is compared with the one in the .idx when it is first read: `blocks.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from gristmill.stages.stores import local_copy
from gristmill.tokenize.manifest import (
    INDEX_SCHEMA,
    MANIFEST_FILE,
    MAX_UINT16_VOCAB,
    TOKENIZER_FILE,
    ShardInfo,
    Shuffle,
    Split,
    TokenError,
    TokenManifest,
    dtype_for,
)
from gristmill.tokenize.shard_files import DocumentIndex, ShardFiles, map_file, read_index

__all__ = [
    "INDEX_SCHEMA",
    "MANIFEST_FILE",
    "MAX_UINT16_VOCAB",
    "TOKENIZER_FILE",
    "DocumentIndex",
    "ShardFiles",
    "ShardInfo",
    "Shuffle",
    "SourceTokens",
    "Split",
    "TokenError",
    "TokenManifest",
    "TokenSet",
    "dtype_for",
    "local_folder",
    "map_file",
    "mapped_folder",
    "read_index",
    "read_manifest",
]

# A set of more ids than this is not read by everyone who opens it: each rank of a training would read all of it. Up to
# it, the checksums take 0.3 s (7 GB/s on one core of a shared EPYC).
CHECKED_BYTES = 2 << 30


def local_folder(folder: str | Path) -> Path:
    """The folder as a local path. Raises TokenError for a URL of another file system."""
    text = str(folder)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if "://" in text:
        raise TokenError(
            f"{text}: token shards of other programs are linked, which needs local files. Name a local folder."
        )
    return Path(text)


def mapped_folder(folder: str | Path) -> Path:
    """The folder as a local path, for maps; a folder of a store is copied to a local disk first. Raises StoreError."""
    return Path(local_copy(str(folder))) if "://" in str(folder) else Path(folder)


def read_manifest(folder: str | Path) -> TokenManifest:
    """The manifest of a local folder. Raises TokenError when there is none."""
    path = local_folder(folder) / MANIFEST_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise TokenError(
            f"{path}: no such file. Either the folder holds no token shards, or tokenizing did not finish; "
            "run the recipe again to continue."
        ) from error
    return TokenManifest.opened(data, str(path))


class SourceTokens:
    """The tokens of one source and split: the concatenation of its shards. Can be pickled; files are opened lazily."""

    def __init__(self, name: str, split: Split, files: list[ShardFiles], dtype: np.dtype) -> None:
        self.name, self.split, self.dtype = name, split, dtype
        self._files = [file for file in files if file.info.tokens]
        self._starts = [0]  # position of the first id of each shard, then the total
        for file in self._files:
            self._starts.append(self._starts[-1] + file.info.tokens)

    def __repr__(self) -> str:
        return f"SourceTokens({self.name!r}, {self.split}, {self.documents_count:,} documents, {self.tokens:,} tokens)"

    @property
    def tokens(self) -> int:
        """Ids in all, end-of-text ids included."""
        return self._starts[-1]

    @property
    def documents_count(self) -> int:
        return sum(file.info.documents for file in self._files)

    @property
    def utf8_bytes(self) -> int:
        """Bytes of the texts that the ids stand for."""
        return sum(file.info.bytes for file in self._files)

    @property
    def shards(self) -> list[ShardInfo]:
        """The shards that hold tokens, in the order of concatenation."""
        return [file.info for file in self._files]

    def read(self, start: int, length: int) -> np.ndarray:
        """The ids (length,) from position `start`: read-only and not copied when they lie in one shard.

        Raises TokenError when the range leaves the source.
        """
        parts = [file.ids_of(low, high) for file, low, high, _ in self._pieces(start, length)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def bounds(self, start: int, length: int) -> np.ndarray:
        """Where documents start in the range: (k,) int64, ascending, counted from `start`, each in [0, length).

        Position 0 is in it only when a document starts there. Raises TokenError when the range leaves the source.
        """
        parts = []
        for file, low, high, at in self._pieces(start, length):
            starts = file.index.start
            first, last = np.searchsorted(starts, [low, high])
            parts.append(starts[first:last] - low + at)
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def document_at(self, position: int) -> tuple[str, str, int]:
        """The document that holds a position -> (its id, name of its shard, its row in the index)."""
        file, low, _, _ = next(self._pieces(position, 1))
        row = int(np.searchsorted(file.index.start, low, side="right")) - 1
        return file.index.doc_id[row].as_py(), file.info.name, row

    def documents(self) -> Iterator[tuple[str, np.ndarray, int]]:
        """(doc_id, ids (n,) with the end-of-text id, UTF-8 bytes of the text) of every document, in order."""
        for file in self._files:
            index = file.index
            for row, doc_id in enumerate(index.doc_id):
                start = int(index.start[row])
                yield doc_id.as_py(), file.ids_of(start, start + int(index.length[row])), int(index.bytes[row])

    def parts(self) -> Iterator[tuple[ShardInfo, np.ndarray, DocumentIndex]]:
        """(what it is, its ids, its documents) of each shard that holds tokens, in the order of concatenation."""
        for file in self._files:
            yield file.info, file.ids_of(0, file.info.tokens), file.index

    def indexes(self) -> Iterator[tuple[Path, ShardInfo, DocumentIndex]]:
        """(folder, what it is, its documents) of each shard that holds tokens; the ids are not opened."""
        for file in self._files:
            yield file.folder, file.info, file.index

    def files(self, shard: int) -> ShardFiles:
        """The files of one of `shards`, by its place in that list: its documents, and its ids, which are not compared
        with their checksums before `compare` does it."""
        return self._files[shard]

    def _pieces(self, start: int, length: int) -> Iterator[tuple[ShardFiles, int, int, int]]:
        """The parts of a range by shard: (files, first id in the shard, id after the last, position in the range)."""
        if start < 0 or length < 0 or start + length > self.tokens:
            raise TokenError(
                f"Source {self.name!r} ({self.split}) holds {self.tokens:,} tokens; "
                f"the range from {start:,} of {length:,} tokens leaves it."
            )
        at, shard = 0, bisect_right(self._starts, start) - 1
        while at < length:
            low = start + at - self._starts[shard]
            high = min(low + length - at, self._files[shard].info.tokens)
            yield self._files[shard], low, high, at
            at += high - low
            shard += 1


@dataclass(frozen=True)
class TokenSet:
    """A folder of token shards, by source."""

    folder: Path
    manifest: TokenManifest
    sources: dict[str, SourceTokens]  # the training split
    holdout: dict[str, SourceTokens]  # the held-out split

    @classmethod
    def open(cls, folder: str | Path, *, check: Literal["auto", "bytes", "sizes"] = "auto") -> TokenSet:
        """Opens a folder, one of a store by a local copy. Raises TokenError for a changed manifest, a foreign
        tokenizer, a missing or truncated file. To read every byte, use `verify_tokens`.

        check: "bytes" compares a whole .bin with the manifest on first use, "sizes" its size alone. "auto" is "bytes"
        for a set of at most CHECKED_BYTES; in a larger one each block is compared when it is first read.
        """
        path = mapped_folder(folder)
        manifest = read_manifest(path)
        _check_tokenizer(path, manifest)
        size = sum(info.tokens for info in manifest.shards) * manifest.numpy_dtype.itemsize
        when: Literal["whole", "blocks", "sizes"] = "sizes"
        if check != "sizes":
            when = "whole" if check == "bytes" or size <= CHECKED_BYTES else "blocks"
        files = [ShardFiles(path, info, manifest.numpy_dtype, manifest.eos_id, when) for info in manifest.shards]
        for file in files:
            file.check_sizes()
        return cls(path, manifest, _by_source(files, "train", manifest), _by_source(files, "holdout", manifest))

    @property
    def dtype(self) -> np.dtype:
        return self.manifest.numpy_dtype

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def eos_id(self) -> int:
        return self.manifest.eos_id

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / TOKENIZER_FILE


def _by_source(files: Iterable[ShardFiles], split: Split, manifest: TokenManifest) -> dict[str, SourceTokens]:
    """Sources in alphabetical order; one whose shards are all empty is listed with 0 tokens."""
    grouped: dict[str, list[ShardFiles]] = {}
    for file in files:
        if file.info.split == split:
            grouped.setdefault(file.info.source, []).append(file)
    return {name: SourceTokens(name, split, grouped[name], manifest.numpy_dtype) for name in sorted(grouped)}


def _check_tokenizer(folder: Path, manifest: TokenManifest) -> None:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise TokenError(f"{path}: no such file. The shards cannot be decoded without it; run the recipe again.")
    found = xxhash.xxh3_128_hexdigest(path.read_bytes())
    if found != manifest.tokenizer_xxh3:
        raise TokenError(
            f"{path}: this is not the tokenizer that made the shards (hash {found}, {MANIFEST_FILE} says "
            f"{manifest.tokenizer_xxh3}). Put the right file back, or tokenize again."
        )
