"""What documents are compared by, as `exact` and `minhash` write it: who each is, and with which settings.

A signature table has one row a document, in the order of the shard, and says in its schema what it was made with, so
that signatures of other settings are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import Batch, Settings, column
from gristmill.stages.kernels import hashing
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fold import Fold, fold
from gristmill.stages.stores import local_copy

METADATA = "metadata."  # before the name of a key of the `metadata` column
FILE = b"gristmill.file"  # in the schema of an older signature table: where it is
SETTINGS = b"gristmill.signature"  # in the schema of a signature table: what it was made with

WITHOUT_EFFECT = ("memory_mb", "keep_signatures")  # settings that change no result
AFTER_SIGNING = ("scope", "against", "against_action")  # settings that signatures do not depend on
_KEEP = re.compile(r"longest|earliest|first|best\((-?)([^()]+)\)")


class ClusterError(ValueError):
    """The signatures do not fit together, or what they say cannot be right."""


class Normalize(Settings):
    """What does not count when words are compared: each part of datatrove's `simplify_text`, on where not said.

    White space always ends a word. Where it is not normalised, every white-space character counts, but for those that
    stand before the first word of a document.
    """

    lowercase: bool = True
    numbers: bool = True  # each number is 0
    punctuation: bool = True  # punctuation and control characters are spaces
    diacritics: bool = True  # letters are decomposed, their marks dropped
    whitespace: bool = True  # how many spaces, and which

    @property
    def fold(self) -> Fold:
        """The tables in force."""
        return fold(**self.model_dump())

    def described(self) -> str:
        return "normalize " + ("+".join(name for name, on in self.model_dump().items() if on) or "nothing")


def check_keep(keep: str) -> str:
    """Returns a keep policy as it is. Raises ValueError when there is no such policy."""
    if not _KEEP.fullmatch(keep):
        raise ValueError(f"keep is longest, earliest, first, best(COLUMN) or best(-COLUMN), not {keep!r}.")
    return keep


class Adds:
    """The columns that a stage adds: one more where documents that earlier runs have are marked."""

    def __init__(self, columns: Mapping[str, pa.DataType], older: str) -> None:
        self._columns, self._older = dict(columns), older

    def __get__(self, stage: Any, owner: type) -> Mapping[str, pa.DataType]:
        marks = stage is not None and stage.against and stage.against_action == "mark"
        return self._columns | ({self._older: pa.string()} if marks else {})


class Needs:
    """The columns that `identity` reads, and what `by` compares: of a class those of its defaults."""

    def __get__(self, stage: Any, owner: type) -> tuple[str, ...]:
        columns = ["text", "source", "dump"]
        if stage is not None:
            keep = stage.policy if hasattr(stage, "policy") else stage.keep  # `paragraphs` has both
            measure = _KEEP.fullmatch(keep)
            columns += ["date"] if keep == "earliest" else [measure[2]] if measure and measure[2] else []
            columns += ["url"] if getattr(stage, "by", "text") == "url" else []
            if getattr(stage, "column", None) is not None:
                columns.append("metadata" if stage.column.startswith(METADATA) else stage.column)
        return tuple(dict.fromkeys(columns))


def identity(batch: Batch, keep: str, hashes: np.ndarray | None = None) -> dict[str, pa.Array]:
    """The columns by which clusters are decided: doc_id, source, dump, date, rank (smaller stays), text_hash.

    hashes: (n, 2) uint64 of the texts, where they are known already.
    Raises ValueError when the keep policy names a column that the batch does not have.
    """
    rows = batch.num_rows
    have = batch.schema.names
    rank = np.zeros(rows)
    measure = _KEEP.fullmatch(keep)
    if keep == "longest":
        hashing.count_characters(*string_views(batch["text"]), rank)
        rank = -rank
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
        "text_hash": text_hashes(batch["text"], hashes),
    }


def text_hashes(text: pa.Array, hashes: np.ndarray | None = None) -> pa.Array:
    """128 bits for each text, fixed_size_binary(16); of `hashes` (n, 2) uint64, where they are known already."""
    if hashes is None:
        hashes = np.empty((len(text), 2), np.uint64)
        hashing.hash_raw(*string_views(text), hashes)
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(text), [None, pa.py_buffer(hashes)])


def with_settings(columns: Mapping[str, pa.Array], settings: str) -> Batch:
    """The signatures as a batch that says what they were made with."""
    names = list(columns)
    batch = pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)
    return batch.replace_schema_metadata({SETTINGS: settings.encode()})


def check_settings(tables: Sequence[pa.Table], settings: str, names: Sequence[str]) -> None:
    """Raises ClusterError when a table was signed with other settings, does not say so, or lacks a column."""
    for number, table in enumerate(tables):
        stored = table.schema.metadata or {}
        said = stored.get(SETTINGS, b"unknown settings").decode()
        missing = [name for name in names if name not in table.schema.names]
        if said != settings or missing:
            wrong = f"lack the column {missing[0]}" if said == settings else f"were made with {said}, not {settings}"
            if FILE in stored:
                raise ClusterError(
                    f"The signatures of {stored[FILE].decode()} {wrong}. Only signatures of the same settings can be "
                    "compared: use those here, or run the earlier recipe again with these."
                )
            raise ClusterError(f"The signatures of shard {number} {wrong}. Delete them and run the recipe again.")


def older(folders: Sequence[str]) -> list[pa.Table]:
    """The signatures of earlier runs, one table a file, through memory maps. folders: `<run>/<segment>/sign`;
    those of a store are copied to a local disk first.

    Raises ClusterError when a folder has none: then nothing would be compared, and nobody would notice.
    """
    tables = []
    for folder in folders:
        files = sorted(Path(local_copy(folder)).glob("*.arrow"))
        if not files:
            raise ClusterError(
                f"against: {folder} holds no signatures (*.arrow). Name the `sign` folder of a run; one with "
                "`keep_signatures: false` has removed them."
            )
        for file in files:
            table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
            tables.append(table.replace_schema_metadata({**(table.schema.metadata or {}), FILE: str(file)}))
    return tables
