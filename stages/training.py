"""What the training of every model shares: which documents it learns from, how they are held out, and its card."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.perplexity import MODEL_FILE

_SPLIT_SEED = 1  # of the hash that holds out documents

Texts = Iterable[pa.Array | pa.ChunkedArray | pa.RecordBatch]


class Limits(Settings):
    """Bounds on a measure, both inclusive."""

    at_least: float | None = None
    at_most: float | None = None


class Selection(Settings):
    """Documents to learn from: some of the run's own, or files. The runner evaluates it, in a fixed order."""

    sources: tuple[str, ...] | None = None  # names of the recipe's sources; none: all
    files: str | None = None  # glob of files to read instead of the run's documents
    where: Mapping[str, Limits] = Field(default_factory=dict)  # measure column -> bounds that a document must meet
    max_bytes: int | None = Field(None, gt=0)  # of UTF-8 text
    max_documents: int | None = Field(None, gt=0)
    seed: int = 0  # of the sample where a maximum cuts


def arrays(texts: Texts) -> Iterator[pa.Array]:
    """The text of each item, one array an item."""
    for item in texts:
        array = item["text"] if isinstance(item, pa.RecordBatch) else item
        yield array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def documents(texts: pa.Array) -> Iterator[memoryview]:
    offsets, data = string_views(texts)
    view = data.data
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield view[start:end]


def held_out(texts: pa.Array, share: float) -> np.ndarray:
    """Which documents are held out, by a hash of their text: the same in every run, copies together. (n,) bool."""
    limit = int(share * 2.0**64)
    hashes = (xxhash.xxh3_64_intdigest(document, _SPLIT_SEED) for document in documents(texts))
    return np.fromiter((h < limit for h in hashes), bool, len(texts))


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    (folder / MODEL_FILE).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def card(settings: Any, folder: Path, started: float, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What the report says of a model."""
    files = {
        path.name: {"bytes": path.stat().st_size, "xxh3": xxh3_of(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    return {
        "kind": settings.kind,
        "version": settings.version,
        "settings": settings.model_dump(mode="json"),
        **figures,
        "files": files,
        "seconds": round(time.perf_counter() - started, 3),
    }


def xxh3_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
