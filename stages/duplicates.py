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

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import Batch, column
from gristmill.stages.kernels import cluster, hashing
from gristmill.stages.kernels.buffers import string_views

Scope = Literal["global", "source", "dump"]
SETTINGS = b"gristmill.signature"  # in the schema of a signature table: what it was made with
NONE = np.uint32(0xFFFFFFFF)
BIGGEST = 20  # clusters that the figures describe
EXAMPLES = 5  # doc_ids for each of them

_KEEP = re.compile(r"longest|earliest|first|best\((-?)([^()]+)\)")


class ClusterError(ValueError):
    """The signatures do not fit together, or what they say cannot be right."""


def check_keep(keep: str) -> str:
    """Returns a keep policy as it is. Raises ValueError when there is no such policy."""
    if not _KEEP.fullmatch(keep):
        raise ValueError(f"keep is longest, earliest, first, best(COLUMN) or best(-COLUMN), not {keep!r}.")
    return keep


class Needs:
    """The columns that `identity` reads, and `url` where that is compared: of a class those of its defaults."""

    def __get__(self, stage: Any, owner: type) -> tuple[str, ...]:
        columns = ["text", "source", "dump"]
        if stage is not None:
            measure = _KEEP.fullmatch(stage.keep)
            columns += ["date"] if stage.keep == "earliest" else [measure[2]] if measure and measure[2] else []
            columns += ["url"] if getattr(stage, "by", "text") == "url" else []
        return tuple(columns)


def identity(batch: Batch, keep: str) -> dict[str, pa.Array]:
    """The columns by which clusters are decided: doc_id, source, dump, date, rank (smaller stays), text_hash.

    Raises ValueError when the keep policy names a column that the batch does not have.
    """
    rows = batch.num_rows
    have = batch.schema.names
    rank = np.zeros(rows)
    measure = _KEEP.fullmatch(keep)
    if keep == "longest":
        rank = -pc.utf8_length(batch["text"]).to_numpy(zero_copy_only=False).astype(np.float64)
    elif measure and measure[2]:
        if measure[2] not in have:
            raise ValueError(
                f"keep: {keep} asks for the column {measure[2]}, which these documents do not have. "
                f"They have {', '.join(have)}. Put the stage that measures it before this one."
            )
        values = column(batch, measure[2])
        rank = values if measure[1] else -values
        rank = np.where(np.isnan(rank), np.inf, rank)
    date = batch["date"] if keep == "earliest" else pa.nulls(rows, pa.string())
    if keep == "earliest":
        rank = date.is_null().to_numpy(zero_copy_only=False).astype(np.float64)
    return {
        "doc_id": batch["doc_id"],
        "source": batch["source"],
        "dump": batch["dump"],
        "date": date,
        "rank": pa.array(rank),
        "text_hash": text_hashes(batch["text"]),
    }


def text_hashes(text: pa.Array) -> pa.Array:
    """128 bits for each text, fixed_size_binary(16)."""
    offsets, data = string_views(text)
    hashes = np.empty((len(text), 2), np.uint64)
    hashing.hash_raw(offsets, data, hashes)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(text), [None, pa.py_buffer(hashes)])


def with_settings(columns: Mapping[str, pa.Array], settings: str) -> Batch:
    """The signatures as a batch that says what they were made with."""
    names = list(columns)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)
    return batch.replace_schema_metadata({SETTINGS: settings.encode()})


def check_settings(tables: Sequence[pa.Table], settings: str, names: Sequence[str]) -> None:
    """Raises ClusterError when a table was signed with other settings, does not say so, or lacks a column."""
    for number, table in enumerate(tables):
        said = (table.schema.metadata or {}).get(SETTINGS, b"unknown settings").decode()
        missing = [name for name in names if name not in table.schema.names]
        if said != settings or missing:
            wrong = f"lack the column {missing[0]}" if said == settings else f"were made with {said}, not {settings}"
            raise ClusterError(
                f"The signatures of shard {number} {wrong}. Delete them and run the recipe again; of an earlier run, "
                "make them again with these settings."
            )


def older(folders: Sequence[str]) -> list[pa.Table]:
    """The signatures of earlier runs, one table a file, through memory maps. folders: `<run>/<segment>/sign`.

    Raises ClusterError when a folder has none: then nothing would be compared, and nobody would notice.
    """
    tables = []
    for folder in folders:
        files = sorted(Path(folder).glob("*.arrow"))
        if not files:
            raise ClusterError(f"against: {folder} holds no signatures (*.arrow). Name the `sign` folder of a run.")
        tables += [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in files]
    return tables


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


def elect(tables: Sequence[pa.Table], starts: np.ndarray, roots: np.ndarray, new: int) -> np.ndarray:
    """roots (n,) uint32, any one row of each cluster -> keepers (n,) uint32, the row that stays.

    Rows from `new` on are of earlier runs: they stay before all others.
    """
    members, _ = members_of(roots)
    keepers = np.arange(len(roots), dtype=np.uint32)
    if not len(members):
        return keepers
    ranks = np.where(members < new, _filtered(tables, starts, members, "rank").to_numpy(), -np.inf)
    offsets, ties = string_views(_tie_keys(tables, starts, members))
    best = np.full(len(roots), NONE)
    cluster.elect(members, roots, ranks, offsets, ties, best)
    keepers[members] = members[best[roots[members]]]
    return keepers


def decide(
    tables: Sequence[pa.Table],
    starts: np.ndarray,
    keepers: np.ndarray,
    shards: int,
    reason: str,
    names: tuple[str, str],
) -> list[pa.Table]:
    """A decision table for each of the first `shards` tables: a row for each document of a cluster of two and more.

    names: the columns of the cluster, which is the doc_id of the document that stays, and of its size.
    """
    members, sizes = members_of(keepers)
    heads = members[keepers[members] == members]
    head_ids = _filtered(tables, starts, heads, "doc_id").cast(pa.large_string()).combine_chunks()
    bounds = _bounds(members, starts)
    out = []
    for i, table in enumerate(tables[:shards]):
        rows = members[bounds[i] : bounds[i + 1]]
        kept = pa.array(keepers[rows] == rows)
        out.append(
            pa.table(
                {
                    "doc_id": table["doc_id"].take(pa.array(rows.astype(np.int64) - starts[i])).cast(pa.string()),
                    "reason": pc.if_else(kept, pa.scalar(None, pa.string()), pa.scalar(reason)),
                    names[0]: head_ids.take(pa.array(np.searchsorted(heads, keepers[rows]))).cast(pa.string()),
                    names[1]: pa.array(sizes[keepers[rows]].astype(np.float64)),
                }
            )
        )
    return out


def figures(tables: Sequence[pa.Table], starts: np.ndarray, keepers: np.ndarray, new: int) -> dict[str, Any]:
    """For the report: documents, removed, clusters, how many clusters of which size, and the biggest ones.

    Clusters of which all documents are of earlier runs (rows from `new` on) are not mentioned.
    """
    members, sizes = members_of(keepers)
    heads = np.unique(keepers[members[: np.searchsorted(members, np.uint32(new))]])
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
