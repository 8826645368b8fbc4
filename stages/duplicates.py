"""What `exact` and `minhash` share: who stays of a cluster, the decisions for every shard, the figures.

Both sign each document with `identity` and keys, find the clusters, and hand over one array, `keepers`: for each row
the row of the document that stays in its place (itself, where it stays). A row is a document's number over all
signature tables in order. Rows exist within one call only; a document is known by its shard and its place there,
because a doc_id is unique within its shard only.

Who stays
    longest        the text with most characters
    earliest       the smallest `date`, as text: ISO 8601 sorts by time; unknown dates come last
    first          the smallest doc_id
    best(COLUMN)   the largest value of a measure, best(-COLUMN) the smallest; unknown values come last
    Equal ones are ordered by doc_id, source and a hash of the text, so that neither the order of the shards nor the
    size of a batch has a say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.kernels import cluster, hashing
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.signatures import ClusterError

Scope = Literal["global", "source", "dump"]
NONE = 0xFFFFFFFF
BIGGEST = 20  # clusters that the figures describe
EXAMPLES = 5  # doc_ids for each of them


def row_starts(tables: Sequence[pa.Table]) -> np.ndarray:
    """The first row of each table, and the number of all rows: (tables + 1,) int64.

    Raises ClusterError when there are too many rows, or a doc_id occurs twice in a table.
    """
    starts = np.concatenate([[0], np.cumsum([table.num_rows for table in tables], dtype=np.int64)])
    if starts[-1] > cluster.MAX_ROWS:
        raise ClusterError(f"{starts[-1]:,} documents are more than one clustering can hold ({cluster.MAX_ROWS:,}).")
    for number, table in enumerate(tables):
        if _maybe_twice(table["doc_id"]):
            counts = pc.value_counts(table["doc_id"].combine_chunks())
            twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").to_pylist()
            if not twice:
                continue  # two ids with one hash
            raise ClusterError(
                f"Shard {number} has {len(twice):,} doc_ids more than once, for example {sorted(twice)[:EXAMPLES]}. "
                "A decision could not say which of the documents it means. Read the shard with ids that differ."
            )
    return starts


def _maybe_twice(ids: pa.ChunkedArray) -> bool:
    """False where no two ids are equal. By sorted hashes: a tenth of the time of counting strings."""
    hashes = np.empty((len(ids), 2), np.uint64)
    row = 0
    for chunk in ids.chunks:
        offsets, data = string_views(chunk)
        hashing.hash_raw(offsets, data, hashes[row : row + len(chunk)])
        row += len(chunk)
    ordered = np.sort(hashes[:, 0])
    return bool((ordered[1:] == ordered[:-1]).any())


def chunks(tables: Sequence[pa.Table], name: str) -> Iterator[tuple[int, np.ndarray]]:
    """A column without nulls, piece by piece -> (first row, values), not copied."""
    row = 0
    for table in tables:
        for chunk in table[name].chunks:
            yield row, chunk.to_numpy(zero_copy_only=True)
            row += len(chunk)


def salts(tables: Sequence[pa.Table], scope: Scope) -> np.ndarray:
    """A number for the scope of each row (n,) uint64, from its name; (0,) for the global scope.

    Null is a scope of its own: documents of unknown dumps are compared with each other.
    """
    if scope == "global":
        return np.zeros(0, np.uint64)
    parts = [np.zeros(0, np.uint64)]
    for table in tables:
        for chunk in table[scope].chunks:
            coded = chunk.dictionary_encode()
            offsets, data = string_views(coded.dictionary.cast(pa.string()))
            hashes = np.empty((len(offsets), 2), np.uint64)
            hashing.hash_raw(offsets, data, hashes)
            hashes[-1] = 0  # of null, which `dictionary_encode` leaves without a code
            codes = pc.fill_null(coded.indices, len(offsets) - 1).to_numpy()
            parts.append(hashes[codes, 0])
    return np.concatenate(parts)


def _bounds(members: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Where the members of each table begin among all members, ascending uint32: (tables + 1,) int64."""
    return np.searchsorted(members, starts.astype(np.uint32))  # one type on both sides, else members are copied


def _filtered(tables: Sequence[pa.Table], starts: np.ndarray, members: np.ndarray, name: str) -> pa.ChunkedArray:
    """The values of a column at some rows. members (m,) uint32, ascending."""
    parts = []
    bounds = _bounds(members, starts)
    for i, table in enumerate(tables):
        rows = members[bounds[i] : bounds[i + 1]]
        if len(rows):
            parts.append(table[name].take(pa.array(rows.astype(np.int64) - starts[i])).combine_chunks())
    kind = tables[0][name].type if tables else pa.string()
    return pa.chunked_array(parts, kind)


def numbers_at(tables: Sequence[pa.Table], starts: np.ndarray, rows: np.ndarray, name: str) -> np.ndarray:
    """The values of a column of numbers at some rows (m,) uint32, each once, in any order."""
    order = np.argsort(rows)
    found = _filtered(tables, starts, rows[order], name).to_numpy()
    out = np.empty_like(found)
    out[order] = found
    return out


def _tie_keys(tables: Sequence[pa.Table], starts: np.ndarray, members: np.ndarray) -> pa.Array:
    """What orders documents of equal rank: date, doc_id, source and text hash, large_binary (m,)."""
    names = ("date", "doc_id", "source", "text_hash")
    parts = [_filtered(tables, starts, members, name).cast(pa.binary()).cast(pa.large_binary()) for name in names]
    joined = pc.binary_join_element_wise(
        *parts, pa.scalar(b"\0", pa.large_binary()), null_handling="replace", null_replacement=b""
    )
    return joined.combine_chunks() if joined.num_chunks != 1 else joined.chunk(0)


def members_of(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """labels (n,) uint32, the row that stands for each row's cluster -> rows of clusters of two and more, all sizes.

    -> (members (m,) uint32 ascending, size of the cluster that each label names (n,) uint32)
    """
    sizes = np.zeros(len(labels), np.uint32)
    cluster.sizes_of(labels, sizes)
    return np.flatnonzero(sizes[labels] > 1).astype(np.uint32), sizes


def elect(
    tables: Sequence[pa.Table], starts: np.ndarray, roots: np.ndarray, new: int, at_once: int = NONE
) -> np.ndarray:
    """roots (n,) uint32, any one row of each cluster -> keepers (n,) uint32, the row that stays.

    Rows from `new` on are of earlier runs: they stay before all others. at_once: documents whose ids are in memory at
    one time; more where one cluster has more.
    """
    members, sizes = members_of(roots)
    keepers = np.arange(len(roots), dtype=np.uint32)
    best = np.full(len(roots), NONE, np.uint32)
    for part in _pieces(members, roots, sizes, at_once) if len(members) else ():
        ranks = np.where(part < new, _filtered(tables, starts, part, "rank").to_numpy(), -np.inf)
        offsets, ties = string_views(_tie_keys(tables, starts, part))
        cluster.elect(part, roots, ranks, offsets, ties, best)
        keepers[part] = part[best[roots[part]]]
    return keepers


def _pieces(members: np.ndarray, roots: np.ndarray, sizes: np.ndarray, at_once: int) -> Iterator[np.ndarray]:
    """The members of clusters, whole clusters together, about `at_once` in a piece: uint32, ascending."""
    if len(members) <= at_once:
        yield members
        return
    sums = np.cumsum(np.where(sizes > 1, sizes, np.uint32(0)), dtype=np.uint32)
    limits = np.arange(at_once, len(members), at_once, dtype=np.int64).astype(np.uint32)
    edges = np.unique([0, *np.searchsorted(sums, limits, side="right").tolist(), len(roots)])
    del sums
    for low, high in pairwise(edges.tolist()):
        of = roots[members]
        yield members[(of >= low) & (of < high)]


class Decisions(Sequence[pa.Table]):
    """A decision table for each shard, made when it is asked for.

    A row for each document of a cluster of two and more, and for each document that is marked. names: the columns of
    the cluster, which is the doc_id of the document that stays, of its size, and of the older document that marks it.
    """

    def __init__(
        self,
        tables: Sequence[pa.Table],
        starts: np.ndarray,
        keepers: np.ndarray,
        shards: int,
        reason: str,
        names: Sequence[str],
        linked: np.ndarray | None = None,
    ) -> None:
        """keepers (n,) uint32. linked (n,) uint32: the row of an older document that a document is marked with, or of
        any that is not older; nothing is marked where it is not given."""
        self._tables, self._starts, self._keepers, self._shards = tables, starts, keepers, shards
        self._reason, self._names, self._linked = reason, names, linked
        members, self._sizes = members_of(keepers)
        heads = members[keepers[members] == members]
        if linked is not None:
            marked = marks(keepers, linked, int(starts[shards]))
            heads = np.union1d(heads, linked[marked])
            members = np.union1d(members, marked)
        self._members, self._heads = members, heads
        self._head_ids = _filtered(tables, starts, heads, "doc_id").cast(pa.large_string()).combine_chunks()
        self._bounds = _bounds(members, starts)

    def __len__(self) -> int:
        return self._shards

    @overload
    def __getitem__(self, i: int) -> pa.Table: ...

    @overload
    def __getitem__(self, i: slice) -> Sequence[pa.Table]: ...

    def __getitem__(self, i: int | slice) -> pa.Table | Sequence[pa.Table]:
        numbers = range(self._shards)[i]
        return self._table(numbers) if isinstance(numbers, int) else [self._table(number) for number in numbers]

    def _table(self, i: int) -> pa.Table:
        rows = self._members[self._bounds[i] : self._bounds[i + 1]]
        keepers = self._keepers[rows]
        sizes = self._sizes[keepers]
        kept = pa.array(keepers == rows)
        alone = sizes < 2  # of a document that is only marked
        columns = {
            "doc_id": self._tables[i]["doc_id"].take(pa.array(rows.astype(np.int64) - self._starts[i])).cast("string"),
            "reason": pc.if_else(kept, pa.scalar(None, pa.string()), pa.scalar(self._reason)),
            self._names[0]: self._ids(keepers, alone),
            self._names[1]: pa.array(sizes.astype(np.float64), mask=alone),
        }
        if self._linked is not None:
            older = self._linked[rows]
            columns[self._names[2]] = self._ids(older, (keepers != rows) | (older < self._starts[self._shards]))
        return pa.table(columns)

    def _ids(self, rows: np.ndarray, hidden: np.ndarray) -> pa.ChunkedArray:
        """The doc_ids of heads, null where hidden."""
        return self._head_ids.take(pa.array(np.searchsorted(self._heads, rows), mask=hidden)).cast(pa.string())


def marks(keepers: np.ndarray, linked: np.ndarray, new: int) -> np.ndarray:
    """The rows that stay though an earlier run has them: uint32, ascending. Rows from `new` on are of earlier runs."""
    return np.flatnonzero((linked[:new] >= new) & (keepers[:new] == np.arange(new, dtype=np.uint32))).astype(np.uint32)


def figures(tables: Sequence[pa.Table], starts: np.ndarray, keepers: np.ndarray, new: int) -> dict[str, Any]:
    """For the report: documents, removed, clusters, how many clusters of which size, and the biggest ones.

    Clusters of which all documents are of earlier runs (rows from `new` on) are not mentioned.
    """
    members, sizes = members_of(keepers)
    leads = np.zeros(len(keepers), bool)  # np.unique takes as long as a fifth of the whole clustering
    leads[keepers[members[: np.searchsorted(members, np.uint32(new))]]] = True
    heads = np.flatnonzero(leads).astype(np.uint32)
    removed = keepers[:new] != np.arange(new, dtype=np.uint32)
    size, count = np.unique(sizes[heads], return_counts=True)
    return {
        "documents": new,
        "clusters": len(heads),
        "removed": int(removed.sum()),
        "removed_for_older": int((removed & (keepers[:new] >= new)).sum()),
        "sizes": {str(s): int(c) for s, c in zip(size.tolist(), count.tolist(), strict=True)},
        "biggest": biggest(tables, starts, keepers, heads, sizes),
    }


def biggest(
    tables: Sequence[pa.Table], starts: np.ndarray, keepers: np.ndarray, heads: np.ndarray, sizes: np.ndarray
) -> list[dict[str, Any]]:
    """The biggest clusters: the document that stays, the size, and a few doc_ids, the one that stays first."""
    names = _filtered(tables, starts, heads, "doc_id").cast(pa.large_string()).combine_chunks()
    table = pa.table({"size": pa.array(sizes[heads]), "name": names, "head": pa.array(heads)})
    chosen = pc.select_k_unstable(table, k=BIGGEST, sort_keys=[("size", "descending"), ("name", "ascending")])
    out = []
    for row in table.take(chosen).to_pylist():
        others = np.flatnonzero(keepers == row["head"]).astype(np.uint32)
        ids = _filtered(tables, starts, others[others != row["head"]], "doc_id").to_pylist()
        out.append(
            {"cluster": row["name"], "size": row["size"], "doc_ids": [row["name"], *sorted(ids)[: EXAMPLES - 1]]}
        )
    return out


def check_size(
    tables: Sequence[pa.Table], starts: np.ndarray, keepers: np.ndarray, limits: Mapping[str, float]
) -> None:
    """Raises ClusterError when a cluster is too big to be true. limits: documents, share (of a source), floor.

    A cluster of at least `floor` documents may not hold more than `share` of one source's documents: template pages
    with other content, merged over thousands of steps, have emptied sources (marin-community/marin#6851).
    """
    members, sizes = members_of(keepers)
    suspects = members[sizes[keepers[members]] >= min(limits["floor"], limits["documents"] + 1)]
    if not len(suspects):
        return
    suspects = suspects[np.argsort(keepers[suspects], kind="stable")]  # cluster after cluster
    borders = np.flatnonzero(np.diff(keepers[suspects])) + 1
    sources = pa.chunked_array([c for t in tables for c in t["source"].chunks], pa.string())
    totals = {row["values"]: row["counts"] for row in pc.value_counts(sources).to_pylist()}
    for rows in np.split(suspects, borders):
        wrong = f"more than max_cluster ({limits['documents']:,})" if len(rows) > limits["documents"] else ""
        if len(rows) >= limits["floor"]:
            for row in pc.value_counts(_filtered(tables, starts, rows, "source")).to_pylist():
                share = row["counts"] / totals[row["values"]]
                if share > limits["share"]:
                    of_source = f"{share:.0%} of the source {row['values']}"
                    wrong = wrong or f"{of_source}, more than max_cluster_share ({limits['share']:.0%})"
        if wrong:
            examples = _filtered(tables, starts, rows[:: max(1, len(rows) // EXAMPLES)][:EXAMPLES], "doc_id")
            raise ClusterError(
                f"One cluster has {len(rows):,} documents: {wrong}. "
                f"For example {', '.join(examples.to_pylist())}. Look at them: pages of one template are not copies "
                "of each other. Use `verify: jaccard` or a higher threshold; if they are copies, raise the limit."
            )
