"""The two files of a token shard, opened on first use and compared with what was written.

    files = ShardFiles(folder, info, dtype, eos_id, check="blocks")
    files.ids_of(0, 2049)             # straight from the file, compared with the checksums of its blocks
    files.index.start                 # where documents start

`shards.py` says what the files are; `blocks.py` has the checksums of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.tokenize.blocks import BLOCK_BYTES, BlockChecker, block_hashes
from gristmill.tokenize.manifest import INDEX_SCHEMA, MANIFEST_FILE, ShardInfo, TokenError


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
        names = table.schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise TokenError(f"{where}: not an index of documents: {error}") from error
    if table.schema != INDEX_SCHEMA:
        raise TokenError(f"{where}: not an index of documents: it has the columns {names}.")
    return table


@dataclass
class DocumentIndex:
    """The columns of an .idx as arrays: start (n,) int64, length (n,) uint32, bytes (n,) uint32."""

    doc_id: pa.ChunkedArray
    start: np.ndarray
    length: np.ndarray
    bytes: np.ndarray
    block_hashes: np.ndarray | None = None  # (blocks,) uint64 of the .bin, see `blocks.py`

    @classmethod
    def of(cls, table: pa.Table) -> DocumentIndex:
        return cls(
            table["doc_id"],
            table["start"].to_numpy().astype(np.int64, copy=False),
            table["length"].to_numpy(),
            table["bytes"].to_numpy(),
            block_hashes(table.schema.metadata),
        )


def block_place(block: int, tokens: int, dtype: np.dtype, index: DocumentIndex) -> str:
    """Which ids and documents lie in a block, to be put into a message."""
    low, high = block * BLOCK_BYTES // dtype.itemsize, min((block + 1) * BLOCK_BYTES // dtype.itemsize, tokens)
    first, last = (int(np.searchsorted(index.start, at, side="right")) - 1 for at in (low, high - 1))
    which = f"document {first} ({index.doc_id[first].as_py()!r})" if last == first else f"documents {first} to {last}"
    return f" in ids {low:,} to {high - 1:,}, of {which}"


def changed_place(data: pa.Buffer, dtype: np.dtype, index: DocumentIndex) -> str:
    """The first block that was changed, as `block_place` has it; nothing where that cannot be told."""
    if index.block_hashes is None or not len(index.start):
        return ""
    checker = BlockChecker(data, index.block_hashes)
    bad = checker.first_bad() if checker.fits else None
    return "" if bad is None else block_place(bad, data.size // dtype.itemsize, dtype, index)


def _changed(path: Path, what: str, where: str = "") -> TokenError:
    return TokenError(
        f"{path}: {what}: the file was changed{where}, or belongs to another run. `gristmill tokens verify` says what "
        "else is wrong; delete the file and run the recipe again."
    )


@dataclass
class ShardFiles:
    """The files of one shard, opened on first use. Pickled as paths only."""

    folder: Path
    info: ShardInfo
    dtype: np.dtype
    eos_id: int
    check: Literal["whole", "blocks", "sizes"] = "blocks"  # what of the .bin is compared, and when: see `TokenSet.open`
    _ids: np.ndarray | None = field(default=None, repr=False)
    _blocks: BlockChecker | None = field(default=None, repr=False)
    _index: DocumentIndex | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None, "_blocks": None, "_index": None}

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
        """All ids of the shard (tokens,), mapped, read-only. Those that are used are to be compared before: `compare`.

        Raises TokenError for a file that is not the one in the manifest, as far as `check` tells on first use.
        """
        if self._ids is None:
            self.check_sizes()
            path = self.folder / self.info.bin
            buffer = map_file(path)
            ids = np.frombuffer(buffer, dtype=self.dtype)
            if len(ids) and int(ids[-1]) != self.eos_id:
                raise TokenError(
                    f"{path}: the last id is {int(ids[-1])}, not the end-of-text id {self.eos_id}: the file is not "
                    f"the one that {MANIFEST_FILE} describes. Delete it and run the recipe again."
                )
            if self.check == "whole" and xxhash.xxh3_128_hexdigest(buffer) != self.info.bin_xxh3:
                raise _changed(path, f"its checksum is not the one in {MANIFEST_FILE}", self._place(buffer))
            hashes = self.index.block_hashes if self.check == "blocks" else None
            if hashes is not None:
                self._blocks = BlockChecker(buffer, hashes)
                if not self._blocks.fits:
                    raise _changed(path, f"its index has the checksums of {len(hashes):,} blocks, not of all")
            self._ids = ids
        return self._ids

    def _place(self, data: pa.Buffer) -> str:
        """Where a file was changed, as far as its index tells, which may have been changed too."""
        try:
            return changed_place(data, self.dtype, self.index)
        except TokenError:
            return ""

    @property
    def compares(self) -> bool:
        """Whether `compare` has anything left to do."""
        return self._ids is None or (self._blocks is not None and not self._blocks.done)

    def compare(self, low: np.ndarray, high: np.ndarray) -> None:
        """Compares ids [low, high), (n,) each, none of them empty, with the checksums of their blocks.

        Each block once; nothing where the whole file was compared, or nothing is to be. Raises TokenError with the
        place of a block that was changed.
        """
        if self._ids is None:
            _ = self.ids
        if self._blocks is None or not len(low):
            return
        bad = self._blocks.bad_block(low * self.dtype.itemsize, high * self.dtype.itemsize)
        if bad is not None:
            where = block_place(bad, len(self.ids), self.dtype, self.index)
            raise _changed(self.folder / self.info.bin, "the checksum of a block is not the one in its index", where)

    def ids_of(self, low: int, high: int) -> np.ndarray:
        """Ids [low, high), compared."""
        if high > low:
            self.compare(np.array([low]), np.array([high]))
        return self.ids[low:high]

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
            self._index = DocumentIndex.of(table)
        return self._index
