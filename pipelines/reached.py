"""The documents that reached a stage of a finished run, with what it measured: from kept and dropped Parquet.

A document reached a stage when the stage's segment kept it, or when this stage or a later one of the segment dropped
it. Batches come from the row groups one after another; only the columns asked for are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.open_run import Run, RunError
from gristmill.stages.documents import column

BATCH_DOCUMENTS = 65_536


@dataclass(frozen=True)
class Documents:
    """Some documents that reached the stage; n rows."""

    measures: dict[str, np.ndarray]  # column -> (n,) float64, NaN where the stage did not measure
    language: np.ndarray  # (n,) object, None where unknown
    source: np.ndarray  # (n,) object
    reasons: dict[str, np.ndarray]  # why this stage dropped it: reason -> (n,) bool, for reasons that occur
    dropped: np.ndarray  # (n,) bool, by this stage


@dataclass(frozen=True)
class Reached:
    """The documents that reached a stage, to read as often as needed."""

    run: Run
    segment: str
    stage: str  # as the dropped documents name it
    later: tuple[str, ...]  # stages after it in the segment
    only: tuple[str, ...]  # sources that pass it; empty for all
    columns: tuple[str, ...]  # of measures

    def read(self) -> Iterator[Documents]:
        """Raises RunError when a measure is not a column of the files."""
        for kind in ("kept", "dropped"):
            for part in self.run.parts(kind, self.segment):
                with self.run.open_parquet(part) as file:
                    names = file.schema_arrow.names
                    self._check(part, names)
                    wanted = ["source", "language", *self.columns, *(("stage", "reasons") if kind == "dropped" else ())]
                    batches = file.iter_batches(BATCH_DOCUMENTS, columns=[n for n in names if n in wanted])
                    for batch in batches:
                        yield self._documents(batch)

    def _check(self, part: str, names: Sequence[str]) -> None:
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise RunError(
                f"{self.run.path}/{part} has no column {missing[0]}, which stage {self.stage} measures: it was written "
                "by another version. Run the recipe again, then calibrate."
            )

    def _documents(self, batch: pa.RecordBatch) -> Documents:
        if self.only:
            batch = batch.filter(pc.is_in(batch["source"], value_set=pa.array(self.only)))
        if "stage" in batch.schema.names:
            batch = batch.filter(pc.is_in(batch["stage"], value_set=pa.array((self.stage, *self.later))))
        rows = batch.num_rows
        dropped, reasons = np.zeros(rows, bool), {}
        if "stage" in batch.schema.names:
            dropped = _bool(pc.equal(batch["stage"], self.stage))
            reasons = _reasons(batch["reasons"], dropped)
        language = _objects(batch["language"]) if "language" in batch.schema.names else np.full(rows, None, object)
        return Documents(
            {name: column(batch, name) for name in self.columns}, language, _objects(batch["source"]), reasons, dropped
        )


def _reasons(lists: pa.Array, of_stage: np.ndarray) -> dict[str, np.ndarray]:
    """list<string> (n,) -> reason -> (n,) bool, of the rows that are true in `of_stage`."""
    rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    words = pc.list_flatten(lists)
    out = {}
    for reason in pc.unique(words).to_pylist():
        has = np.zeros(len(lists), bool)
        has[rows[_bool(pc.equal(words, reason))]] = True
        if (has & of_stage).any():
            out[reason] = has & of_stage
    return out


def _objects(values: pa.Array) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), object)


def _bool(values: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(values, False).to_numpy(zero_copy_only=False), bool)
