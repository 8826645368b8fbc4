"""From what a record says of its document to columns; JSONL and Parquet share it.

Understood are flat records (`{"text", "id", "url", ...}`) and those of datatrove and dolma, where `metadata` is an
object of its own, or a string that holds one. `url`, `date`, `dump`, `language` and `language_score` become columns
wherever they stand, the record itself first, and so does dolma's `created` for a date; everything else stays in
`metadata`, as a JSON object.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from gristmill.stages.readers_common import Reading, clean_string

MOVED = ("url", "dump", "date", "language", "language_score")


def base_row(reading: Reading, record: dict[str, Any], position: int | str) -> tuple[Any, ...]:
    """The values of READ_FIELDS; `record` has no text any more and is emptied.

    position: place in the file, for a document without an id. Raises RecursionError for metadata that are nested
    too deep to be written again.
    """
    own = string_of(record.pop(reading.names.get("doc_id", "id"), None))
    rest = _metadata(record.pop("metadata", None))
    moved = {}
    for name in MOVED:
        key = reading.names.get(name, name)
        outer, inner = record.pop(key, None), rest.pop(key, None)
        moved[name] = inner if outer is None else outer
    if moved["date"] is None and "date" not in reading.names:
        moved["date"] = record.pop("created", None)  # dolma: when the document was made; `added` is when it was taken
    for key, value in record.items():
        if value is not None:
            rest[f"record.{key}" if key in rest else key] = value
    metadata = _json(rest)
    score = moved["language_score"]
    return (
        reading.identify(own, position),
        reading.shard.source,
        string_of(moved["url"]),
        string_of(moved["dump"]) or reading.shard.dump,
        string_of(moved["date"]),
        metadata,
        string_of(moved["language"]),
        _number(score),
        str(position),
    )


def _number(value: Any) -> float | None:
    """A number, also one that a CSV file or a string column holds as text; else null."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def string_of(value: Any) -> str | None:
    """A value as a clean string; null and "" are null."""
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else _plain(value)
    return clean_string(text)[0]


def _plain(value: Any) -> str:
    text = json.dumps(value, default=_other, ensure_ascii=True)
    return text[1:-1] if not isinstance(value, dict | list) and text.startswith('"') else text


def _metadata(value: Any) -> dict[str, Any]:
    """The record's own `metadata` as a dict that may be changed."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.startswith("{"):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            return parsed
    return {} if value is None else {"metadata": value}


def _json(rest: dict[str, Any]) -> str | None:
    """Metadata as a JSON object, null where there is nothing. NaN becomes null where orjson writes it."""
    if not rest:
        return None
    try:
        return orjson.dumps(rest, default=_other).decode()
    except TypeError:  # lone surrogates, integers over 64 bits, deep nesting
        return json.dumps(rest, default=_other, ensure_ascii=True)


def _other(value: Any) -> str:
    """What JSON has no type for: bytes, dates, decimals."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
