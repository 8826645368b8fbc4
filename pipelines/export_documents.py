"""Writes the kept documents of a finished run for other programs: `gristmill export documents RUN --out DIR`.

    parquet     part-00000.parquet      all columns
    jsonl.zst   part-00000.jsonl.zst    a flat record a line, measures included; a zstd frame every MiB, so that the
                                        files can be split again
    datatrove   part-00000.jsonl.gz     {text, id, metadata}, what datatrove's JsonlReader takes
    dolma       part-00000.json.gz      {id, text, source, created, added, version, metadata}, dolma's data format
    hf          data/train-00000.parquet, README.md: a Hugging Face dataset with a card filled from the ledgers

Documents come in the order of the run, whatever the format, and the same run gives the same bytes. `export.json`
comes last: files, documents, bytes and checksums. A folder without it is not a whole export.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import zstandard

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.dataset_card import Contents, card
from gristmill.pipelines.open_run import Run, RunError
from gristmill.pipelines.upstream import kept_batches
from gristmill.stages.documents import Batch
from gristmill.stages.ledger import FileRecord
from gristmill.stages.shards import filesystem, join, publish, publish_bytes

FORMATS = ("parquet", "jsonl.zst", "datatrove", "dolma", "hf")
MIN_FILE_BYTES = 100_000
_PIECE_BYTES = 1 << 20  # of text that is compressed at once
_GROUP_BYTES = 32 << 20  # of a row group in memory
_COLUMN_FOOT_BYTES = 300  # what a column of a row group takes in a Parquet footer, at most
_OWN = ("url", "dump", "date", "language", "language_score")


@dataclass
class Exported:
    """What was written."""

    out: str
    files: list[FileRecord] = field(default_factory=list)
    contents: Contents = field(default_factory=Contents)


def export_documents(
    run: Run, format: str, out: str, max_file_bytes: int, on_part: Callable[[int, int], None] | None = None
) -> Exported:
    """Writes the folder `out`, which must be empty or not there. on_part: called with (parts done, parts).

    A file has at most `max_file_bytes`; a document that alone takes more makes a file of its own. Raises RunError for
    a run that is not finished, a folder that holds something, and documents that are not those of the books.
    """
    if format not in FORMATS:
        raise RunError(f"No format {format!r}. There are: {', '.join(FORMATS)}.")
    if max_file_bytes < MIN_FILE_BYTES:
        raise RunError(f"Files of {max_file_bytes:,} bytes are too small: take {MIN_FILE_BYTES:,} or more.")
    folder = _last_segment(run)
    fs, inner = filesystem(out)
    if fs.exists(inner) and (not fs.isdir(inner) or fs.ls(inner, detail=False)):
        raise RunError(f"{out} is there and not empty. Take another folder, or remove it: nothing is written over.")
    done = Exported(out)
    parts = run.parts("kept", folder)
    with _files(done, format, max_file_bytes) as files:
        for number, part in enumerate(parts, 1):
            for batch in kept_batches(join(run.path, part)):
                done.contents.add(batch)
                files.add(batch)
            if on_part is not None:
                on_part(number, len(parts))
    _check(run, folder, done)
    if format == "hf":
        schema = run.open_parquet(parts[0]).schema_arrow
        text = card(run, done.contents, schema, sum(file.bytes for file in done.files))
        publish_bytes(join(out, "README.md"), text.encode())
    record = {"run": run.recipe.get("name"), "format": format, "documents": done.contents.documents}
    record |= {"text_bytes": done.contents.bytes, "files": [file.model_dump() for file in done.files]}
    publish_bytes(join(out, "export.json"), orjson.dumps(record, option=orjson.OPT_INDENT_2))
    return done


def _last_segment(run: Run) -> str:
    """The folder whose kept documents are those of the run. Raises RunError where shards of it are missing."""
    recipe = recipes.load(join(run.path, "recipe.yaml"))
    folder = recipes.segments(recipe)[-1].folder
    found, wanted = len(run.files(f"{folder}/ledger", ".json")), len(run.inputs)
    if not wanted or found < wanted:
        raise RunError(
            f"{run.path} is not finished: {found:,} of {wanted:,} shards passed {folder}. "
            "Run the recipe to its end first; `gristmill status` shows what is left."
        )
    return folder


def _check(run: Run, folder: str, done: Exported) -> None:
    booked = 0
    for ledger in run.ledgers(folder):
        booked += sum(file.rows for file in ledger.files if file.path.startswith("kept/"))
    if booked != done.contents.documents:
        raise RunError(
            f"{run.path}: {done.contents.documents:,} documents were found, {booked:,} are booked. "
            "`gristmill verify` says which shard; the export has no export.json and is not whole."
        )


class _Files:
    """A row of files of bounded size. A file appears when it is whole."""

    def __init__(self, done: Exported, name: str, max_file_bytes: int) -> None:
        self.done, self._name, self.max_file_bytes = done, name, max_file_bytes
        self._publishing: AbstractContextManager[IO[bytes]] | None = None
        self._number = 0
        self.file: IO[bytes] | None = None
        self.rows = 0  # of the open file

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self.finish()
        elif self._publishing is not None:
            self._publishing.__exit__(kind, value, trace)

    def start(self) -> IO[bytes]:
        self._publishing = publish(join(self.done.out, self._name.format(self._number)))
        self.file = _Counted(self._publishing.__enter__())  # type: ignore[assignment]
        self.rows = 0
        return self.file  # type: ignore[return-value]

    def finish(self) -> None:
        """Publishes the open file, if any."""
        if self._publishing is None:
            return
        counted: Any = self.file
        self._publishing.__exit__(None, None, None)
        name, digest = self._name.format(self._number), counted.digest.hexdigest()
        self.done.files.append(FileRecord(path=name, rows=self.rows, bytes=counted.bytes, xxh3=digest))
        self._number += 1
        self._publishing = self.file = None


class _Counted:
    """A file that knows what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.bytes = 0
        self.digest = xxhash.xxh3_128()
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._file.write(view)
        self.digest.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The file is closed where it was opened."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


class _Lines(_Files):
    """JSON lines; each piece is compressed for itself."""

    def __init__(self, done: Exported, format: str, max_file_bytes: int) -> None:
        ending = {"jsonl.zst": "jsonl.zst", "datatrove": "jsonl.gz", "dolma": "json.gz"}[format]
        super().__init__(done, f"part-{{:05d}}.{ending}", max_file_bytes)
        self._record = {"jsonl.zst": _flat, "datatrove": _datatrove, "dolma": _dolma}[format]
        self._pack = _zstd if ending.endswith("zst") else _gzip
        self._waiting: list[bytes] = []
        self._size = 0

    def add(self, batch: Batch) -> None:
        for row in batch.to_pylist():
            line = _dumps(self._record(row)) + b"\n"
            if self._waiting and self._size + len(line) > min(_PIECE_BYTES, self.max_file_bytes // 2):
                self._write()
            self._waiting.append(line)
            self._size += len(line)

    def finish(self) -> None:
        self._write()
        super().finish()

    def _write(self) -> None:
        if not self._waiting:
            return
        piece, rows = self._pack(b"".join(self._waiting)), len(self._waiting)
        self._waiting, self._size = [], 0
        counted: Any = self.file
        if counted is not None and counted.bytes + len(piece) > self.max_file_bytes:
            super().finish()
        file = self.file or self.start()
        file.write(piece)
        self.rows += rows


class _Parquet(_Files):
    """Parquet, a row group a piece."""

    def __init__(self, done: Exported, format: str, max_file_bytes: int) -> None:
        super().__init__(done, "data/train-{:05d}.parquet" if format == "hf" else "part-{:05d}.parquet", max_file_bytes)
        self._writer: pq.ParquetWriter | None = None
        self._groups = 0
        self._group_bytes = min(_GROUP_BYTES, max_file_bytes // 4)
        self._waiting: list[Batch] = []
        self._size = 0

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None and self._writer is not None:
            self._writer.close()
        super().__exit__(kind, value, trace)

    def add(self, batch: Batch) -> None:
        mean = batch.nbytes / max(1, batch.num_rows)
        rows = max(1, int(self._group_bytes / 8 / max(1.0, mean)))
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if self._waiting and self._size + part.nbytes > self._group_bytes:
                self._write()
            self._waiting.append(part)
            self._size += part.nbytes

    def finish(self) -> None:
        self._write()
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            super().finish()

    def _write(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        foot = _COLUMN_FOOT_BYTES * table.num_columns * (self._groups + 2)
        counted: Any = self.file
        # Compressed, a row group takes less than in memory: the bound holds, and a file stays a little below it.
        if self._writer is not None and counted.bytes + self._size + foot > self.max_file_bytes:
            self._close()
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.start(), table.schema, compression="zstd", compression_level=3)
            self._groups = 0
        self._writer.write_table(table, row_group_size=table.num_rows)
        self.rows += table.num_rows
        self._groups += 1
        self._waiting, self._size = [], 0


def _files(done: Exported, format: str, max_file_bytes: int) -> Any:
    return (_Parquet if format in ("parquet", "hf") else _Lines)(done, format, max_file_bytes)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(data)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A flat record, without what is null."""
    text = row.pop("text")
    metadata = _metadata(row.pop("metadata"))
    record = {"id": row.pop("doc_id"), "text": text} | _present(row)
    return record | ({"metadata": metadata} if metadata else {})


def _datatrove(row: dict[str, Any]) -> dict[str, Any]:
    """What datatrove's own writer makes of a document."""
    text, doc_id = row.pop("text"), row.pop("doc_id")
    metadata = _metadata(row.pop("metadata"))
    return {"text": text, "id": doc_id, "metadata": metadata | _present(row)}


def _dolma(row: dict[str, Any]) -> dict[str, Any]:
    """dolma's data format (docs/data-format.md): `created` is the document's own date."""
    text, doc_id, source, date = row.pop("text"), row.pop("doc_id"), row.pop("source"), row.pop("date")
    metadata = _metadata(row.pop("metadata"))
    record = {"id": doc_id, "text": text, "source": source}
    if date is not None:
        record["created"] = date
    for name in ("added", "version"):
        if isinstance(metadata.get(name), str):
            record[name] = metadata.pop(name)
    return record | {"metadata": metadata | _present(row)}


def _present(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def _metadata(value: str | None) -> dict[str, Any]:
    if not value:
        return {}
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:  # escaped lone surrogates, integers over 64 bits
        found = json.loads(value)
    return found if isinstance(found, dict) else {"metadata": found}


def _dumps(record: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(record)
    except TypeError:
        return json.dumps(record).encode()
