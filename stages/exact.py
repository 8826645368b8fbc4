"""Exact duplicates: documents whose text, words or address are the same.

exact:
  by: normalized     # text | normalized | url
  keep: longest
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import field_validator

from gristmill.stages import duplicates
from gristmill.stages.documents import Batch, Measure, Rule, Settings, log_edges
from gristmill.stages.kernels import cluster, hashing
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fold import fold

REASON = "exact_duplicate"


class Exact(Settings):
    """Keeps one of the documents that are the same, by a 128-bit hash.

    text        the bytes of the text
    normalized  the words: case, punctuation, numbers, marks and spaces do not count (kernels/shingles.py).
                Documents without any word are never merged; the figures count them.
    url         the address, without scheme, user, `www.`, default port, fragment and last slash; the host in lower
                case. Documents without an address are never merged; the figures count them.
    """

    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = cast(Any, duplicates.Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = {"exact.cluster": pa.string(), "exact.copies": pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure("exact.copies", "documents", log_edges(1, 1e6)),)

    by: Literal["text", "normalized", "url"] = "text"
    scope: duplicates.Scope = "global"  # documents of different sources or dumps are not compared
    keep: str = "longest"
    against: tuple[str, ...] = ()  # `sign` folders of earlier runs: what they have is dropped here

    _check_keep = field_validator("keep")(duplicates.check_keep)

    def rules(self) -> Sequence[Rule]:
        return ()

    def sign(self, batch: Batch) -> Batch:
        """-> identity, key_low and key_high uint64, comparable bool: false where there is nothing to compare."""
        hashes = np.empty((batch.num_rows, 2), np.uint64)
        comparable = np.ones(batch.num_rows, bool)
        if self.by == "normalized":
            words = np.empty(batch.num_rows, np.int64)
            hashing.hash_normalised(*string_views(batch["text"]), *fold(), hashes, words)
            comparable = words > 0
        else:
            keys = batch["text"] if self.by == "text" else normalise_urls(batch["url"])
            hashing.hash_raw(*string_views(keys), hashes)
            comparable = keys.is_valid().to_numpy(zero_copy_only=False)
        columns = duplicates.identity(batch, self.keep)
        columns["key_low"] = pa.array(hashes[:, 0])
        columns["key_high"] = pa.array(hashes[:, 1])
        columns["comparable"] = pa.array(comparable.astype(np.uint8))
        return duplicates.with_settings(columns, self.described())

    def cluster(self, signatures: Sequence[pa.Table]) -> tuple[list[pa.Table], Mapping[str, Any]]:
        """-> decisions for each shard, figures: documents, removed, clusters, sizes, biggest, not_comparable."""
        tables = [*signatures, *duplicates.older(self.against)]
        duplicates.check_settings(tables, self.described(), ("key_low", "key_high", "comparable"))
        starts = duplicates.row_starts(tables)
        salts = duplicates.salts(tables, self.scope)
        rows, new = int(starts[-1]), int(starts[len(signatures)])
        parent = np.arange(rows, dtype=np.uint32)
        low, high = np.empty(rows, np.uint64), np.empty(rows, np.uint64)
        comparable = np.empty(rows, bool)
        for name, into in (("key_low", low), ("key_high", high), ("comparable", comparable)):
            for first, values in duplicates.chunks(tables, name):
                into[first : first + len(values)] = values
        union_equal(low, high, comparable, salts, parent)
        cluster.flatten(parent)
        keepers = duplicates.elect(tables, starts, parent, new)
        figures = duplicates.figures(tables, starts, keepers, new)
        figures["not_comparable"] = int(new - comparable[:new].sum())
        names = ("exact.cluster", "exact.copies")
        return duplicates.decide(tables, starts, keepers, len(signatures), REASON, names), figures

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        return f"exact {self.version} by {self.by}"


def union_equal(
    low: np.ndarray, high: np.ndarray, comparable: np.ndarray, salts: np.ndarray, parent: np.ndarray
) -> None:
    """Joins rows whose 128 bits are equal. All (n,), but salts, which may be (0,)."""
    rows = np.empty(len(low), np.uint32)
    keys = np.empty(len(low), np.uint64)
    everything = (np.uint64(0), np.uint64(2**64 - 1))
    found = cluster.select(low, comparable, salts, *everything, keys, rows, 0, 0)
    keys, rows = cluster.radix_sort(keys[:found], rows[:found], np.empty(found, np.uint64), np.empty(found, np.uint32))
    if found == 0:
        return
    # Within a run of equal lower halves, equal upper halves: nearly always one value, so the sort is of short runs.
    shared = np.zeros(found, bool)
    shared[1:] = keys[1:] == keys[:-1]
    shared[:-1] |= shared[1:]
    keys, rows = keys[shared], rows[shared]
    order = np.lexsort((high[rows], keys))
    keys, rows = keys[order], rows[order]
    upper = high[rows]
    cluster.union_runs(np.cumsum(_changes(keys) | _changes(upper)).astype(np.uint64), rows, parent)


def _changes(values: np.ndarray) -> np.ndarray:
    """True where a value differs from the one before (n,); true at the first."""
    out = np.ones(len(values), bool)
    out[1:] = values[1:] != values[:-1]
    return out


def normalise_urls(urls: pa.Array) -> pa.Array:
    """What `by: url` compares; null stays null. The path and the query are case-sensitive and stay as they are."""
    parts = pc.extract_regex(
        pc.utf8_trim_whitespace(urls),
        r"^(?:[A-Za-z][A-Za-z0-9+.-]*:)?//(?:[^/?#@]*@)?(?P<host>[^/?#:]*)(?P<port>:[0-9]*)?(?P<rest>[^#]*)",
    )
    host = pc.replace_substring_regex(pc.utf8_lower(parts.field("host")), r"^www\.", "")
    port = pc.replace_substring_regex(parts.field("port"), "^:(80|443)?$", "")
    rest = pc.replace_substring_regex(parts.field("rest"), "/$", "")
    joined = pc.binary_join_element_wise(host, port, rest, "")
    return pc.if_else(parts.is_valid(), joined, urls)
