"""How much memory clustering may take, and in how many key ranges it sorts: both follow from `memory_mb`.

For each document of all signatures, older ones included, clustering holds
    STATE bytes: what it is joined to, who stays in its place, whether it takes part, and copies of these
    12 more where `verify` looks at signatures or sets, 8 more where a scope is not global
and what is left of `memory_mb` (10^6 bytes each) is for
    keys: BYTES_PER_KEY for each key of a range, sorted range after range; the ranges are as many as it takes
    election: rank, date, doc_id, source and hash of the members of clusters, so many at once as fit
Signatures are mapped, not read: their pages belong to the system, which takes them back when it needs to. Not counted:
the doc_id of one document of each cluster, and the decisions of the shard that is being written. Documents that share
one key are sorted together, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from gristmill.stages import duplicates
from gristmill.stages.kernels import cluster
from gristmill.stages.signatures import ClusterError

STATE = 48  # bytes for each document
VERIFIED = 12  # address and length of what is compared
SCOPED = 8  # number of the scope
BYTES_PER_KEY = 24  # key and row, and their copies while they are sorted
SLACK = 1.25  # the largest of many ranges of evenly spread keys, against their mean
MOST_RANGES = 1_024
COPIES = 5  # of the columns by which a document is elected, on their way to one buffer
PER_MEMBER = 100  # bytes of offsets and numbers for each document that is elected
_PIECE = 8_192  # keys looked at between two looks at the room that is left in the buffers


@dataclass(frozen=True)
class Room:
    """What fits into the memory that is left."""

    ranges: int  # of keys, sorted one after the other
    members: int  # documents elected at once


def room(tables: Sequence[pa.Table], memory_mb: float, *, verified: bool, scoped: bool) -> Room:
    """Divides the memory. Raises ClusterError when it is too little for so many documents."""
    rows = sum(table.num_rows for table in tables)
    if not rows:
        return Room(1, 1)
    state = rows * (STATE + VERIFIED * verified + SCOPED * scoped)
    keys = rows * BYTES_PER_KEY * SLACK
    left = memory_mb * 1e6 - state
    least = keys / MOST_RANGES
    if left < least:
        raise ClusterError(
            f"memory_mb: {memory_mb:,g} is too little to cluster {rows:,} documents, which take at least "
            f"{(state + least) / 1e6:,.3g}. Raise it and run again: nothing is signed a second time."
        )
    names = ("doc_id", "source", "date", "text_hash")
    each = sum(table[name].nbytes for table in tables for name in names) / rows * COPIES + PER_MEMBER
    return Room(ranges=max(1, int(np.ceil(keys / left))), members=max(1, int(left / each)))


def sorted_ranges(
    tables: Sequence[pa.Table], names: Sequence[str], alive: np.ndarray, salts: np.ndarray, ranges: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The keys of one column after the other, range after range -> (keys, rows), sorted, valid until the next.

    alive (n,) bool: the rows that take part; salts (n,) uint64 or (0,): the scope of each.
    """
    n = len(alive)
    edges = [i * 2**64 // ranges for i in range(ranges + 1)]
    size = min(n, int(n / ranges * SLACK) + _PIECE)
    buffers = [np.empty(size, kind) for kind in (np.uint64, np.uint32, np.uint64, np.uint32)]
    for name in names:
        for low, high in pairwise(edges):
            buffers, found = _gather(tables, name, alive, salts, (low, high - 1), buffers)
            k, r, spare_k, spare_r = (buffer[:found] for buffer in buffers)
            yield cluster.radix_sort(k, r, spare_k, spare_r)


def _gather(
    tables: Sequence[pa.Table],
    name: str,
    alive: np.ndarray,
    salts: np.ndarray,
    bounds: tuple[int, int],
    buffers: list[np.ndarray],
) -> tuple[list[np.ndarray], int]:
    """The keys of one column within bounds -> buffers (keys, rows, two spares of their kind), how many were found.

    Makes larger buffers where a range holds more than expected: many equal keys fall into one range.
    """
    found = 0
    limits = np.array(bounds, np.uint64)
    for first, values in duplicates.chunks(tables, name):
        for start in range(0, len(values), _PIECE):
            piece = values[start : start + _PIECE]
            if found + len(piece) > len(buffers[0]):
                # The spares follow when the range is complete; until then they only cost memory.
                grown = max(found + len(piece), len(buffers[0]) * 3 // 2)
                buffers = [np.concatenate([b[:found], np.empty(grown - found, b.dtype)]) for b in buffers]
            here = slice(first + start, first + start + len(piece))
            salt = salts[here] if len(salts) else salts
            found = cluster.select(
                piece, alive[here], salt, limits[0], limits[1], buffers[0], buffers[1], found, first + start
            )
    return buffers, found
