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
CHECKED_BYTES of ids, or with `check="bytes"`, it is compared with its checksum too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from gristmill.stages.stores import local_copy

FORMAT_VERSION = 1
MANIFEST_FILE = "shards.json"
TOKENIZER_FILE = "tokenizer.json"
MAX_UINT16_VOCAB = 1 << 16  # the largest vocabulary whose ids fit in uint16

# A set of more ids than this is not read by everyone who opens it: each rank of a training would read all of it. Up to
# it, the checksums take 0.3 s (7 GB/s on one core of a shared EPYC).
CHECKED_BYTES = 2 << 30

INDEX_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("start", pa.uint64(), nullable=False),  # position of the first id in the .bin, in ids
        pa.field("length", pa.uint32(), nullable=False),  # ids, with the end-of-text id
        pa.field("bytes", pa.uint32(), nullable=False),  # UTF-8 bytes of the text
    ]
)

Split = Literal["train", "holdout"]
# The order of documents: as they came; by a keyed hash within each shard of documents; by one over all of a source.
Shuffle = Literal["none", "within_shard", "documents"]


class TokenError(ValueError):
    """Token files that cannot be written or read; the message says which, what is wrong, and what to do."""


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype of ids below vocab_size: little-endian uint16 up to 65,536 ids, else uint32."""
    return np.dtype("<u2") if vocab_size <= MAX_UINT16_VOCAB else np.dtype("<u4")


class ShardInfo(BaseModel):
    """One pair of files and what must be true of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # "part-00000"; its files are name.bin and name.idx
    source: str
    split: Split
    documents: int
    tokens: int  # with one end-of-text id a document
    bytes: int  # UTF-8 bytes of the texts
    idx_bytes: int  # size of the .idx file; that of the .bin follows from tokens and dtype
    bin_xxh3: str  # xxh3-128 of the whole file, hex
    idx_xxh3: str
    key: str = ""  # identity of the shard of documents that was tokenized, from its ledger

    @property
    def bin(self) -> str:
        return f"{self.name}.bin"

    @property
    def idx(self) -> str:
        return f"{self.name}.idx"


class TokenManifest(BaseModel):
    """shards.json: everything that the shards of a folder share, and the list of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = FORMAT_VERSION
    dtype: Literal["uint16", "uint32"]
    vocab_size: int  # every id is below it
    eos_id: int  # ends every document
    special_ids: dict[str, int] = Field(default_factory=dict)  # special token -> id, but for the unknown token
    tokenizer_xxh3: str  # xxh3-128 of tokenizer.json, hex
    holdout_share: float = 0.0  # of documents, by hash of their text
    plain_text: bool = True  # no document holds a special id but its last; may be false for files of other programs
    shuffle: Shuffle = "none"
    seed: int | None = None  # of the shuffle
    shards: list[ShardInfo] = Field(default_factory=list)
    digest: str = ""  # xxh3-128 of all the above

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def sealed(self) -> bytes:
        """The bytes to publish, with the digest set."""
        body = {**self._body(), "digest": self._digest()}
        return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def opened(cls, data: bytes, where: str) -> TokenManifest:
        """Reads what `sealed` wrote. Raises TokenError when it was changed since, or is of another format."""
        try:
            raw = orjson.loads(data)
            version = raw.get("version") if isinstance(raw, dict) else None
            if version != FORMAT_VERSION:
                raise TokenError(
                    f"{where}: format version {version!r}; this program reads version {FORMAT_VERSION}. "
                    "Tokenize again, or use the version of gristmill that wrote it."
                )
            manifest = cls.model_validate(raw)
        except TokenError:
            raise
        except ValueError as error:
            raise TokenError(f"{where}: not a manifest of token shards: {error}") from error
        if manifest.digest != manifest._digest():
            raise TokenError(
                f"{where}: the manifest was changed after it was written (its digest does not match). Tokenize again."
            )
        if manifest.numpy_dtype != dtype_for(manifest.vocab_size):
            raise TokenError(
                f"{where}: dtype {manifest.dtype} does not go with a vocabulary of {manifest.vocab_size:,}; "
                f"{dtype_for(manifest.vocab_size).name} does. Tokenize again."
            )
        return manifest

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(orjson.dumps(self._body(), option=orjson.OPT_SORT_KEYS))

    def _body(self) -> dict[str, Any]:
        return self.model_dump(exclude={"digest"} | ({"shuffle", "seed"} if self.shuffle == "none" else set()))


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


def map_file(path: Path) -> pa.Buffer:
    """The bytes of a file, mapped read-only. No file descriptor stays open, so thousands of shards can be mapped."""
    if path.stat().st_size == 0:
        return pa.py_buffer(b"")
    with pa.memory_map(str(path), "r") as file:
        buffer: pa.Buffer = file.read_buffer()
    return buffer


def read_index(buffer: pa.Buffer, where: str) -> pa.Table:
    """The rows of an .idx file, not copied. Raises TokenError when it is not one."""
    try:
        table = pa.ipc.open_file(buffer).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise TokenError(f"{where}: not an index of documents: {error}") from error
    if table.schema != INDEX_SCHEMA:
        raise TokenError(f"{where}: not an index of documents: it has the columns {table.schema.names}.")
    return table


@dataclass
class DocumentIndex:
    """The columns of an .idx as arrays: start (n,) int64, length (n,) uint32, bytes (n,) uint32."""

    doc_id: pa.ChunkedArray
    start: np.ndarray
    length: np.ndarray
    bytes: np.ndarray


@dataclass
class _ShardFiles:
    """The files of one shard, opened on first use. Pickled as paths only."""

    folder: Path
    info: ShardInfo
    dtype: np.dtype
    eos_id: int
    checked: bool = False  # compare the .bin with its checksum on first use
    _ids: np.ndarray | None = field(default=None, repr=False)
    _index: DocumentIndex | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None, "_index": None}

    def check_sizes(self) -> None:
        """Raises TokenError when a file is missing or has another size than the manifest says."""
        for name, expected in (
            (self.info.bin, self.info.tokens * self.dtype.itemsize),
            (self.info.idx, self.info.idx_bytes),
        ):
            path = self.folder / name
            if not path.is_file():
                raise TokenError(f"{path}: no such file, but {MANIFEST_FILE} lists it. Run the recipe again.")
            size = path.stat().st_size
            if size != expected:
                what = "was truncated" if size < expected else "has grown"
                raise TokenError(
                    f"{path}: {size:,} bytes, but {MANIFEST_FILE} says {expected:,}: the file {what} after it was "
                    "written, or belongs to another run. Delete it and run the recipe again."
                )

    @property
    def ids(self) -> np.ndarray:
        """All ids of the shard (tokens,), mapped, read-only."""
        if self._ids is None:
            self.check_sizes()
            path = self.folder / self.info.bin
            ids = np.frombuffer(map_file(path), dtype=self.dtype)
            if len(ids) and int(ids[-1]) != self.eos_id:
                raise TokenError(
                    f"{path}: the last id is {int(ids[-1])}, not the end-of-text id {self.eos_id}: the file is not "
                    f"the one that {MANIFEST_FILE} describes. Delete it and run the recipe again."
                )
            if self.checked and xxhash.xxh3_128_hexdigest(ids.data) != self.info.bin_xxh3:
                raise TokenError(
                    f"{path}: its checksum is not the one in {MANIFEST_FILE}: the file was changed, or belongs to "
                    "another run. `gristmill tokens verify` may tell which document; delete the file and run the "
                    "recipe again."
                )
            self._ids = ids
        return self._ids

    @property
    def index(self) -> DocumentIndex:
        if self._index is None:
            self.check_sizes()
            path = self.folder / self.info.idx
            buffer = map_file(path)
            if xxhash.xxh3_128_hexdigest(buffer) != self.info.idx_xxh3:
                raise TokenError(
                    f"{path}: its checksum is not the one in {MANIFEST_FILE}: the file was changed, or belongs to "
                    "another run. Delete it and run the recipe again."
                )
            table = read_index(buffer, str(path))
            self._index = DocumentIndex(
                table["doc_id"],
                table["start"].to_numpy().astype(np.int64, copy=False),
                table["length"].to_numpy(),
                table["bytes"].to_numpy(),
            )
        return self._index


class SourceTokens:
    """The tokens of one source and split: the concatenation of its shards. Can be pickled; files are opened lazily."""

    def __init__(self, name: str, split: Split, files: list[_ShardFiles], dtype: np.dtype) -> None:
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
        parts = [file.ids[low:high] for file, low, high, _ in self._pieces(start, length)]
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
            ids, index = file.ids, file.index
            for row, doc_id in enumerate(index.doc_id):
                start = int(index.start[row])
                yield doc_id.as_py(), ids[start : start + int(index.length[row])], int(index.bytes[row])

    def parts(self) -> Iterator[tuple[ShardInfo, np.ndarray, DocumentIndex]]:
        """(what it is, its ids, its documents) of each shard that holds tokens, in the order of concatenation."""
        for file in self._files:
            yield file.info, file.ids, file.index

    def indexes(self) -> Iterator[tuple[Path, ShardInfo, DocumentIndex]]:
        """(folder, what it is, its documents) of each shard that holds tokens; the ids are not opened."""
        for file in self._files:
            yield file.folder, file.info, file.index

    def index(self, shard: int) -> DocumentIndex:
        """The documents of one of `shards`, by its place in that list."""
        return self._files[shard].index

    def _pieces(self, start: int, length: int) -> Iterator[tuple[_ShardFiles, int, int, int]]:
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

        check: what of a .bin is compared with the manifest on first use; "auto" is "bytes" up to CHECKED_BYTES.
        """
        path = mapped_folder(folder)
        manifest = read_manifest(path)
        _check_tokenizer(path, manifest)
        size = sum(info.tokens for info in manifest.shards) * manifest.numpy_dtype.itemsize
        checked = check == "bytes" or (check == "auto" and size <= CHECKED_BYTES)
        files = [_ShardFiles(path, info, manifest.numpy_dtype, manifest.eos_id, checked) for info in manifest.shards]
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


def _by_source(files: Iterable[_ShardFiles], split: Split, manifest: TokenManifest) -> dict[str, SourceTokens]:
    """Sources in alphabetical order; one whose shards are all empty is listed with 0 tokens."""
    grouped: dict[str, list[_ShardFiles]] = {}
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
