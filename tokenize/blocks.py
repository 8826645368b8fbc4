"""Checksums of a file of ids block by block, so that a changed bit is found where it is read, and named by its place.

    hashes = BlockHashes()
    hashes.update(data)                               # as the file is written
    metadata = hashes.metadata()                      # for the schema of the .idx

    checker = BlockChecker(mapped_file, block_hashes(schema.metadata))
    checker.bad_block(low, high)                      # None, or the first block of these bytes that was changed

A checksum of a whole file asks for all of it to be read first, which no one does who opens a terabyte for training.
With blocks what is read is what is compared, once for each block.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import xxhash

# Half of what Linux reads of a mapped file around a page that is touched, so comparing a block reads nothing more.
# The hashes are 0.012 % of the ids.
BLOCK_BYTES = 1 << 16
_KEY = b"bin_block_xxh3"  # in the metadata of the schema of an .idx: base64 of the hashes, 8 bytes each
_BYTES_KEY = b"bin_block_bytes"


class BlockHashes:
    """xxh3-64 of each block of a stream of bytes; the last block may be short."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open = xxhash.xxh3_64()
        self._room = BLOCK_BYTES  # bytes that the open block still takes

    def update(self, data: memoryview) -> None:
        """data: contiguous, of any item size."""
        view = data.cast("B") if data.nbytes else memoryview(b"")
        at = 0
        while at < len(view):
            if self._room == BLOCK_BYTES and len(view) - at >= BLOCK_BYTES:
                self._done.append(xxhash.xxh3_64_intdigest(view[at : at + BLOCK_BYTES]))
                at += BLOCK_BYTES
                continue
            taken = view[at : at + self._room]
            self._open.update(taken)
            at, self._room = at + len(taken), self._room - len(taken)
            if not self._room:
                self._close()

    def _close(self) -> None:
        self._done.append(self._open.intdigest())
        self._open, self._room = xxhash.xxh3_64(), BLOCK_BYTES

    def metadata(self) -> dict[bytes, bytes]:
        """For the schema of the index; to be called after the last byte."""
        if self._room < BLOCK_BYTES:
            self._close()
        hashes = np.array(self._done, "<u8").tobytes()
        return {_KEY: base64.b64encode(hashes), _BYTES_KEY: str(BLOCK_BYTES).encode()}


def metadata_of(data: memoryview) -> dict[bytes, bytes]:
    """The hashes of a whole file, for the schema of its index."""
    hashes = BlockHashes()
    hashes.update(data)
    return hashes.metadata()


def block_hashes(metadata: Mapping[bytes, bytes] | None) -> np.ndarray | None:
    """(blocks,) uint64; None where there are none, or they are of blocks of another size."""
    metadata = metadata or {}
    if metadata.get(_BYTES_KEY) != str(BLOCK_BYTES).encode():
        return None
    try:
        return np.frombuffer(base64.b64decode(metadata.get(_KEY, b""), validate=True), "<u8")
    except (binascii.Error, ValueError):
        return None


class BlockChecker:
    """Compares the blocks of a file with their hashes when they are asked for, each once."""

    def __init__(self, data: pa.Buffer, hashes: np.ndarray) -> None:
        self._data, self._hashes = memoryview(data), hashes
        self._seen = np.zeros(len(hashes), bool)
        self._left = len(hashes)

    @property
    def fits(self) -> bool:
        """Whether there is one hash for each block of the file."""
        return len(self._hashes) == -(-len(self._data) // BLOCK_BYTES)

    @property
    def done(self) -> bool:
        """Whether all blocks were compared."""
        return not self._left

    def bad_block(self, low: np.ndarray, high: np.ndarray) -> int | None:
        """The first changed block of bytes [low, high), (n,) each, none of them empty; None: there is none.

        Those that were compared before are not read again.
        """
        if self.done:
            return None
        first, last = low // BLOCK_BYTES, (high - 1) // BLOCK_BYTES
        if self._seen[first].all() and self._seen[last].all() and (last - first < 2).all():
            return None
        between = (np.arange(first[i] + 1, last[i]) for i in np.flatnonzero(last - first > 1).tolist())
        blocks = np.unique(np.concatenate([first, last, *between]))
        return next((block for block in blocks[~self._seen[blocks]].tolist() if not self._same(block)), None)

    def first_bad(self) -> int | None:
        """The first changed block of the file, or None."""
        return next((block for block in range(len(self._hashes)) if not self._same(block)), None)

    def _same(self, block: int) -> bool:
        part = self._data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if xxhash.xxh3_64_intdigest(part) != int(self._hashes[block]):
            return False
        self._left -= not self._seen[block]
        self._seen[block] = True
        return True
