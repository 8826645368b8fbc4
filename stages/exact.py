"""Exact duplicates: documents whose text, words, address or other column are the same.

exact:
  by: normalized     # text | normalized | url | column
  keep: longest
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator, model_validator

from gristmill.stages import duplicates, key_ranges, signatures
from gristmill.stages.documents import Batch, Measure, Rule, Settings, log_edges
from gristmill.stages.kernels import cluster, hashing
from gristmill.stages.kernels.buffers import string_views

REASON = "exact_duplicate"


class Exact(Settings):
    """Keeps one of the documents that are the same, by a 128-bit hash.

    text        the bytes of the text
    normalized  the words: case, punctuation, numbers, marks and spaces do not count, but for what `normalize` says
                (kernels/shingles.py)
    url         the address, without scheme, user, `www.`, default port, fragment and last slash; the host in lower
                case
    column      a string or a number: `column: NAME` is any column, `column: metadata.KEY` a key of the JSON object
                that the input gave

    Documents without any word, without an address, or whose value is missing, empty or no number, are never merged;
    the figures count them as not_comparable. `against` as in `minhash`.
    """

    name: ClassVar[str] = "exact"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = cast(Any, signatures.Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = cast(
        Any, signatures.Adds({"exact.cluster": pa.string(), "exact.copies": pa.float64()}, older="exact.older")
    )
    without_effect: ClassVar[tuple[str, ...]] = signatures.WITHOUT_EFFECT
    after_signing: ClassVar[tuple[str, ...]] = signatures.AFTER_SIGNING
    measures: ClassVar[tuple[Measure, ...]] = (Measure("exact.copies", "documents", log_edges(1, 1e6)),)

    by: Literal["text", "normalized", "url", "column"] = "text"
    column: str | None = Field(default=None, min_length=1)
    normalize: signatures.Normalize = signatures.Normalize()
    scope: duplicates.Scope = "global"  # documents of different sources or dumps are not compared
    keep: str = "longest"
    against: tuple[str, ...] = ()  # `sign` folders of earlier runs
    against_action: Literal["drop", "mark"] = "drop"  # what happens to documents that they have
    memory_mb: float = Field(default=4_096, gt=0)  # of the worker that clusters; less of it takes more passes
    keep_signatures: bool = True  # for later runs; else they are removed when the segment is done

    _check_keep = field_validator("keep")(signatures.check_keep)

    @model_validator(mode="after")
    def _settings_of_by(self) -> Exact:
        if (self.by == "column") != (self.column is not None):
            raise ValueError("by: column and column: NAME go together; NAME is a column or metadata.KEY.")
        if self.by != "normalized" and self.normalize != signatures.Normalize():
            raise ValueError(f"normalize says what by: normalized does not look at; by is {self.by}.")
        return self

    def rules(self) -> Sequence[Rule]:
        return ()

    def sign(self, batch: Batch) -> Batch:
        """-> identity, key_low and key_high uint64, comparable bool: false where there is nothing to compare."""
        hashes = np.empty((batch.num_rows, 2), np.uint64)
        comparable = np.ones(batch.num_rows, bool)
        if self.by == "normalized":
            words = np.empty(batch.num_rows, np.int64)
            hashing.hash_normalised(*string_views(batch["text"]), *self.normalize.fold, hashes, words)
            comparable = words > 0
        else:
            keys = self._compared(batch)
            hashing.hash_raw(*string_views(keys), hashes)
            comparable = keys.is_valid().to_numpy(zero_copy_only=False)
        columns = signatures.identity(batch, self.keep, hashes if self.by == "text" else None)
        columns["key_low"] = pa.array(hashes[:, 0])
        columns["key_high"] = pa.array(hashes[:, 1])
        columns["comparable"] = pa.array(comparable.astype(np.uint8))
        return signatures.with_settings(columns, self.described())

    def _compared(self, batch: Batch) -> pa.Array:
        """What is compared as strings, null where nothing."""
        if self.by == "text":
            return batch["text"]
        values = normalise_urls(batch["url"]) if self.by == "url" else column_values(batch, str(self.column))
        return pc.if_else(pc.equal(values, ""), pa.scalar(None, values.type), values)

    def cluster(self, signed: Sequence[pa.Table]) -> tuple[Sequence[pa.Table], Mapping[str, Any]]:
        """-> decisions for each shard, made when they are asked for; figures.

        Figures: documents, removed, removed_for_older, clusters, sizes, biggest, not_comparable; marked_for_older
        where they are marked. Raises ClusterError as `minhash` does.
        """
        tables = [*signed, *signatures.older(self.against)]
        signatures.check_settings(tables, self.described(), ("key_low", "key_high", "comparable"))
        starts = duplicates.row_starts(tables)
        new = int(starts[len(signed)])
        comparable = np.empty(int(starts[-1]), bool)
        for first, values in duplicates.chunks(tables, "comparable"):
            comparable[first : first + len(values)] = values
        keepers = self._keepers(tables, starts, comparable, new)
        linked = None
        if self.against and self.against_action == "mark":
            linked = keepers  # what `drop` would do; what stays is decided without the older documents
            comparable[new:] = False
            keepers = self._keepers(tables, starts, comparable, new)
        figures = duplicates.figures(tables, starts, keepers, new)
        figures["not_comparable"] = int(new - comparable[:new].sum())
        if linked is not None:
            figures["marked_for_older"] = len(duplicates.marks(keepers, linked, new))
        names = ("exact.cluster", "exact.copies", "exact.older")
        return duplicates.Decisions(tables, starts, keepers, len(signed), REASON, names, linked), figures

    def _keepers(self, tables: Sequence[pa.Table], starts: np.ndarray, comparable: np.ndarray, new: int) -> np.ndarray:
        room = key_ranges.room(tables, self.memory_mb, verified=False, scoped=self.scope != "global")
        parent = np.arange(len(comparable), dtype=np.uint32)
        salts = duplicates.salts(tables, self.scope)
        for keys, rows in key_ranges.sorted_ranges(tables, ["key_low"], comparable, salts, room.ranges):
            union_equal(keys, rows, lambda some: duplicates.numbers_at(tables, starts, some, "key_high"), parent)
        cluster.flatten(parent)
        return duplicates.elect(tables, starts, parent, new, room.members)

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        detail = {"normalized": f" {self.normalize.described()}", "column": f" {self.column}"}.get(self.by, "")
        return f"exact {self.version} by {self.by}{detail}"


def union_equal(
    keys: np.ndarray, rows: np.ndarray, upper_half: Callable[[np.ndarray], np.ndarray], parent: np.ndarray
) -> None:
    """Joins rows whose 128 bits are equal. keys: the lower halves, sorted; upper_half: rows -> their upper halves."""
    # Within a run of equal lower halves, equal upper halves: nearly always one value, so the sort is of short runs.
    shared = np.zeros(len(keys), bool)
    shared[1:] = keys[1:] == keys[:-1]
    shared[:-1] |= shared[1:]
    if not shared.any():
        return
    keys, rows = keys[shared], rows[shared]
    upper = upper_half(rows)
    order = np.lexsort((upper, keys))
    keys, rows, upper = keys[order], rows[order], upper[order]
    cluster.union_runs(np.cumsum(_changes(keys) | _changes(upper)).astype(np.uint64), rows, parent)


def _changes(values: np.ndarray) -> np.ndarray:
    """True where a value differs from the one before (n,); true at the first."""
    out = np.ones(len(values), bool)
    out[1:] = values[1:] != values[:-1]
    return out


def column_values(batch: Batch, name: str) -> pa.Array:
    """The values of a column, or of a key of `metadata`, as strings; null where there is none.

    Raises ValueError when there is no such column, or it holds neither strings nor numbers.
    """
    if name.startswith(signatures.METADATA):
        key = name.removeprefix(signatures.METADATA)
        return pa.array([_metadata_value(text, key) for text in batch["metadata"].to_pylist()], pa.string())
    if name not in batch.schema.names:
        raise ValueError(
            f"exact by column: there is no column {name}. These documents have {', '.join(batch.schema.names)}. Put "
            f"the stage that measures it before this one, or write metadata.{name} for a key of the input's own."
        )
    values = batch[name]
    kind = values.type
    if pa.types.is_floating(kind):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, kind), values)
    elif not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(f"exact by column: {name} is of type {kind}; strings and numbers can be compared.")
    return values.cast(pa.string())


def _metadata_value(text: str | None, key: str) -> str | None:
    """A string or number of a JSON object as text; 7, 7.0 and "7" are the same."""
    value = orjson.loads(text).get(key) if text else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None


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
