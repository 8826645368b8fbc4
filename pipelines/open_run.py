"""A run folder, opened for reading: its recipe, its books, its documents.

    from gristmill.pipelines.funnel import funnel
    from gristmill.pipelines.open_run import open_run

    run = open_run("out/demo/run")
    run.segments                          # ("01-extract", "02-minhash")
    run.stages()["gopher_quality"].dropped
    run.kept().to_table(columns=["url", "language"]).to_pandas()
    run.dropped().to_table()              # documents with reasons and measures of all segments
    run.measures["gopher_quality.words"].histogram
    for row in funnel(run): ...

Every part of a run may be missing: a run that was stopped, a recipe without tokens, no ablation. What is missing reads
as empty; what is there and damaged raises `LedgerError` or `RunError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet as pq
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from gristmill.pipelines.run_books import Books, ShardSummary, heading_of
from gristmill.stages import shards
from gristmill.stages.documents import BASE_FIELDS, REASONS
from gristmill.stages.ledger import Histogram, ShardLedger, StageLedger
from gristmill.stages.removals import Removals

SEGMENT = re.compile(r"\d\d+-.+")
TOKENS = "tokens"  # the folder of token shards; its ledgers read like those of a segment

KEPT_SCHEMA = pa.schema([*BASE_FIELDS.items(), ("text", pa.string())])
_TEXTS = [(name, pa.string()) for name in ("doc_id", "source", "url", "dump", "date", "stage")]
_SIZES = [("chars", pa.int64()), ("bytes", pa.int64())]
DROPPED_SCHEMA = pa.schema([*_TEXTS, ("reasons", REASONS), *_SIZES, ("text", pa.string())])


class RunError(ValueError):
    """A folder is not a run, or a file of it cannot be read; the message says which and what to do."""


@dataclass(frozen=True)
class StageMeasure:
    """The histogram of a measure over the whole run, and the stage that took it."""

    stage: str
    histogram: Histogram


class Run:
    """A run folder. Reads on demand; the sums of the ledgers are computed once."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path).rstrip("/") or "/"
        self._fs, self._root = shards.filesystem(self.path)
        if not self._fs.exists(self._root):
            raise RunError(f"There is no run folder at {self.path}. Give the folder that `gristmill run` wrote to.")
        if not self._fs.isdir(self._root):
            raise RunError(f"{self.path} is a file. Give the run folder that holds it.")

    # Files

    def files(self, folder: str, suffix: str) -> list[str]:
        """Names of the finished files in a folder of the run, sorted."""
        inner = shards.join(self._root, folder)
        if not self._fs.isdir(inner):
            return []
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in self._fs.ls(inner, detail=False))
        return sorted(name for name in names if name.endswith(suffix) and not name.startswith("."))

    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders in a folder of the run, sorted."""
        inner = shards.join(self._root, folder) if folder else self._root
        if not self._fs.isdir(inner):
            return []
        entries = self._fs.ls(inner, detail=True)
        return sorted(str(e["name"]).rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")

    def text(self, name: str) -> str | None:
        """A text file of the run; None where it is missing."""
        inner = shards.join(self._root, name)
        if not self._fs.exists(inner):
            return None
        with self._fs.open(inner, "rb") as file:
            return str(file.read().decode("utf-8", errors="replace"))

    def json(self, name: str) -> Any:
        """A JSON file of the run; None where it is missing. Raises RunError where it is not JSON."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RunError(
                f"{shards.join(self.path, name)} is not JSON ({error}). It was damaged after it was written: "
                "delete it and run the recipe again."
            ) from error

    def modified(self, name: str) -> float | None:
        """When a file was written, seconds since 1970; None where it is missing or the store does not say."""
        inner = shards.join(self._root, name)
        if not self._fs.exists(inner):
            return None
        try:
            return float(self._fs.modified(inner).timestamp())
        except IsADirectoryError:  # a store has no folders: when its newest file was written
            times = [self._fs.modified(file).timestamp() for file in self._fs.find(inner)]
            return float(max(times)) if times else None
        except (NotImplementedError, KeyError):
            return None

    def open_parquet(self, name: str) -> pq.ParquetFile:
        """A Parquet file of the run."""
        return pq.ParquetFile(shards.join(self._root, name), filesystem=self._arrow_fs)

    def rows_by_id(self, name: str, ids: pa.Array, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Rows of a Parquet file whose doc_id is among ids (string); only row groups that hold one are read whole.
        Columns that the file lacks are left out."""
        with self.open_parquet(name) as file:
            wanted = [c for c in columns if c in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                found = pc.is_in(file.read_row_group(group, columns=["doc_id"])["doc_id"], value_set=ids)
                if pc.any(found).as_py():
                    yield file.read_row_group(group, columns=wanted).filter(found)

    def arrow_table(self, name: str) -> pa.Table:
        """An Arrow IPC file of the run; mapped, not read, where it lies on a local disk."""
        inner = shards.join(self._root, name)
        if "file" in getattr(self._fs, "protocol", ()):
            return pa.ipc.open_file(pa.memory_map(inner)).read_all()
        with self._fs.open(inner, "rb") as file:
            return pa.ipc.open_file(pa.PythonFile(file, "r")).read_all()

    def arrow_column(self, name: str, column: str) -> pa.ChunkedArray:
        """One column of an Arrow IPC file of the run."""
        with self._fs.open(shards.join(self._root, name), "rb") as file:
            return pa.ipc.open_file(pa.PythonFile(file, "r")).read_all()[column]

    @cached_property
    def _arrow_fs(self) -> Any:
        local = "file" in getattr(self._fs, "protocol", ())
        return pa.fs.LocalFileSystem() if local else pa.fs.PyFileSystem(pa.fs.FSSpecHandler(self._fs))

    # Recipe and inputs

    @cached_property
    def recipe_text(self) -> str:
        """recipe.yaml as it is; empty where it is missing."""
        return self.text("recipe.yaml") or ""

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe; empty where it is missing. Raises RunError where it is not YAML."""
        try:
            data = YAML(typ="safe", pure=True).load(self.recipe_text)
        except YAMLError as error:
            raise RunError(f"{shards.join(self.path, 'recipe.yaml')} is not YAML: {error}") from error
        return data if isinstance(data, dict) else {}

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        """The frozen listing, one entry a shard."""
        data = self.json("inputs.json")
        if isinstance(data, dict):
            data = data.get("shards", data.get("inputs", data.get("files")))
        return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []

    # Ledgers

    @cached_property
    def segments(self) -> tuple[str, ...]:
        """Folders of the segments, in order; without the tokens."""
        return tuple(sorted((n for n in self.folders() if SEGMENT.fullmatch(n)), key=lambda n: int(n.split("-")[0])))

    def ledgers(self, segment: str | None = None) -> Iterator[ShardLedger]:
        """The ledgers of one segment (or "tokens"), or of all in order. Raises LedgerError for a damaged one."""
        for name in (segment,) if segment else (*self.segments, TOKENS):
            folder = f"{name}/ledger"
            for file in self.files(folder, ".json"):
                path = shards.join(folder, file)
                yield ShardLedger.opened((self.text(path) or "").encode(), shards.join(self.path, path))

    @cached_property
    def _books(self) -> Books:
        uses = self.recipe.get("stages")
        books = Books([heading_of(use) for use in uses] if isinstance(uses, list) else [])
        for segment in (*self.segments, TOKENS):
            books.add(segment, self.ledgers(segment))
        return books

    def stages(self, source: str | None = None) -> dict[str, StageLedger]:
        """The books of each stage in the order of the run, over all shards or those of one source."""
        if source is None:
            return self._books.overall
        return {name: book for name in self._books.overall if (book := self._books.by_source.get(source, {}).get(name))}

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that have ledgers, in the order of their first shard."""
        return tuple(self._books.by_source)

    @property
    def removals(self) -> dict[str, dict[str, Removals]]:
        """Segment -> source -> what each rule removes, whatever the order of the stages."""
        return self._books.removals

    @property
    def shards(self) -> list[ShardSummary]:
        return self._books.shards

    @property
    def versions(self) -> dict[str, str]:
        """Package -> version; several where shards were made with different ones."""
        return {name: ", ".join(sorted(found)) for name, found in sorted(self._books.versions.items())}

    def segment_of(self, stage: str) -> str:
        """The folder of a stage's decisions. Raises RunError for a stage that the run does not have."""
        if stage not in self._books.segment_of:
            raise RunError(f"This run has no stage {stage!r}. It has: {', '.join(self._books.segment_of) or 'none'}.")
        return self._books.segment_of[stage]

    @property
    def measures(self) -> dict[str, StageMeasure]:
        """Column -> histogram over all shards, and its stage."""
        return {
            column: StageMeasure(label, histogram)
            for label, book in self.stages().items()
            for column, histogram in book.histograms.items()
        }

    # Documents

    def parts(self, kind: str, segment: str | None = None) -> list[str]:
        """Names of Parquet files. kind: "kept" (of the last segment that has any) or "dropped" (of all)."""
        if segment is not None:
            chosen: tuple[str, ...] = (segment,)
        elif kind == "kept":
            chosen = tuple(s for s in self.segments if self.files(f"{s}/kept", ".parquet"))[-1:]
        else:
            chosen = self.segments
        return [f"{s}/{kind}/{name}" for s in chosen for name in self.files(f"{s}/{kind}", ".parquet")]

    def kept(self, segment: str | None = None) -> ds.Dataset:
        """Documents that passed a segment, by default the last one that has any."""
        return self._dataset(self.parts("kept", segment), KEPT_SCHEMA)

    def dropped(self, segment: str | None = None) -> ds.Dataset:
        """Documents dropped in one segment, or in all, with reasons and measures (null where not measured)."""
        return self._dataset(self.parts("dropped", segment), DROPPED_SCHEMA)

    def _dataset(self, parts: list[str], base: pa.Schema) -> ds.Dataset:
        if not parts:
            return ds.dataset(base.empty_table())
        schemas = [self.open_parquet(name).schema_arrow.remove_metadata() for name in parts]  # segments differ
        schema = pa.unify_schemas(schemas, promote_options="permissive")
        paths = [shards.join(self._root, name) for name in parts]
        return ds.dataset(paths, schema=schema, format="parquet", filesystem=self._arrow_fs)

    # What came after

    @cached_property
    def token_shards(self) -> dict[str, Any]:
        """tokens/shards.json; empty where there are no tokens."""
        data = self.json(f"{TOKENS}/shards.json")
        return data if isinstance(data, dict) else {}

    @cached_property
    def models(self) -> dict[str, dict[str, Any]]:
        """Name -> card of every model that the recipe trained."""
        cards = {name: self.json(f"models/{name}/card.json") for name in self.folders("models")}
        return {name: card for name, card in cards.items() if isinstance(card, dict)}

    @cached_property
    def clusters(self) -> dict[str, dict[str, Any]]:
        """Segment -> figures of its global stage."""
        cards = {name: self.json(f"{name}/cluster/card.json") for name in self.segments}
        return {name: card for name, card in cards.items() if isinstance(card, dict)}

    @cached_property
    def ranking(self) -> dict[str, Any]:
        """ablation/ranking.json; empty where there was no ablation."""
        data = self.json("ablation/ranking.json")
        return data if isinstance(data, dict) else {}

    def training(self) -> dict[str, list[dict[str, Any]]]:
        """Name of an ablation's run -> its steps, as metrics.jsonl has them. A half-written last line is left out."""
        out = {}
        for name in self.folders("ablation"):
            text = self.text(f"ablation/{name}/metrics.jsonl")
            if steps := _steps(text or "", f"{self.path}/ablation/{name}/metrics.jsonl"):
                out[name] = steps
        return out


def open_run(path: str | Path) -> Run:
    """Opens a run folder. Raises RunError when there is no such folder."""
    return Run(path)


def global_seconds(card: Mapping[str, Any]) -> float:
    """What the global step of a segment took, from its card; 0 where it does not say."""
    value = card.get("seconds")
    return float(value) if isinstance(value, int | float) else 0.0


def share(part: float, whole: float) -> float:
    """part / whole; 0 of 0 is 0."""
    return part / whole if whole else 0.0


def _steps(text: str, where: str) -> list[dict[str, Any]]:
    """Lines of JSON -> dicts. NaN is a value here: a run that diverged has it."""
    lines = [line for line in text.splitlines() if line.strip()]
    out = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n"):  # the trainer was stopped while it wrote
                break
            raise RunError(
                f"{where}, line {number}: not JSON ({error}). Delete the line, or train this run again."
            ) from error
        if isinstance(data, dict):
            out.append(data)
    return out
