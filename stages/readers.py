"""Readers: a shard's records become batches of documents, and every record is accounted for.

    ledger, problems = StageLedger(stage="read"), []
    for batch in read_batches(shard, ledger, problems):
        ...
    ledger.check(shard.label)

A record is exactly one of
    kept      it is a row of a batch
    dropped   a document that is not wanted: `empty`, `too_large`, for WARC `not_html`, `http_status`, and for text
              files `binary`
    failed    something that should have been a document: `not_json`, `not_utf8`, `no_text`, `bad_record`,
              `wrong_length`, `corrupt`, `truncated`
    skipped   no document at all, such as a WARC's `warcinfo` or a blank line: counters `skipped.<kind>`
A document's size is that of its text or HTML. A record that did not become a document counts with the bytes of the
record. What the text policy changes in a document that is kept is booked as `edited`.

Damage costs what it hit and nothing else: a line that is not UTF-8 fails alone, a file that was cut gives everything
before the cut and one failure `truncated`, a gap in a WARC is one failure and reading goes on behind it. A file that
cannot be read at all is a `ShardError`.

Every batch has the columns of `READ_FIELDS`, then those of its format (`columns_of`). Its size obeys
`MAX_BATCH_DOCUMENTS` and `MAX_BATCH_BYTES`. Decompression is streamed: no more than one record is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import IO

from gristmill.stages.documents import Batch
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers_arrow import read_arrow
from gristmill.stages.readers_common import READ_FIELDS, Reading, open_shard
from gristmill.stages.readers_csv import read_csv, read_tsv
from gristmill.stages.readers_jsonl import read_jsonl
from gristmill.stages.readers_parquet import read_parquet
from gristmill.stages.readers_record import MOVED
from gristmill.stages.readers_text import read_bundle, read_texts
from gristmill.stages.readers_warc import read_warc, read_wet
from gristmill.stages.shards import Shard, ShardError

__all__ = ["FORMATS", "MAPPED", "READ_FIELDS", "columns_of", "detect_format", "read_batches"]

FORMATS: dict[str, Callable[[Reading, IO[bytes]], Iterator[Batch]]] = {
    "warc": read_warc,
    "wet": read_wet,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "csv": read_csv,
    "tsv": read_tsv,
    "text": read_texts,
}
MAPPED = ("text", "doc_id", *MOVED)  # the columns that a recipe may map to others of the input
_COMPRESSED = (".gz", ".zst", ".zstd")
_ENDINGS = {
    ".warc": "warc",
    ".wet": "wet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
}
MAX_CHARS = 10_000_000  # of one document's text


def detect_format(path: str) -> str:
    """The format that a file's name promises. Raises ShardError for an ending that is not known."""
    name = path.rsplit("/", 1)[-1].lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    for ending, format in _ENDINGS.items():
        if name.endswith(ending):
            return format
    raise ShardError(
        f"{path}: the name does not say which format the file has. Known endings: {', '.join(_ENDINGS)}, "
        "each also with .gz or .zst. Rename the file, or give the source a `format` "
        f"({', '.join(FORMATS)})."
    )


def columns_of(format: str) -> tuple[str, ...]:
    """The columns that a shard of this format gives beside those of READ_FIELDS."""
    if format not in FORMATS:
        raise ShardError(f"Unknown format {format!r}. Known: {', '.join(FORMATS)}.")
    return ("html", "html_charset") if format == "warc" else ("text",)


def read_batches(
    shard: Shard,
    ledger: StageLedger,
    problems: list[str],
    max_chars: int = MAX_CHARS,
    columns: Mapping[str, str] | None = None,
) -> Iterator[Batch]:
    """Reads a shard, books every record into `ledger`, and notes the first failures in `problems`.

    columns: our name -> the input's name, for records with names (`{"text": "content"}`); the shard's where not given.
    Raises ShardError when the file is missing, is not of its format, or lacks the text column.
    """
    columns_of(shard.format)
    names = dict(shard.columns if columns is None else columns)
    reading = Reading(shard, ledger, problems, max_chars, names, columns_of(shard.format))
    if shard.members:
        yield from read_bundle(reading)
        return
    with open_shard(shard) as file:
        if not file.read(1):
            reading.note("0", "empty_file", "the file has no bytes")
            return
        file.seek(0)
        yield from FORMATS[shard.format](reading, file)
