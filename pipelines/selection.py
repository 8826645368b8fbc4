"""Which documents a model learns from: evaluates a `Selection` over kept parts or files, the same way every time.

Where a maximum cuts, the sample is the documents with the lowest hashes of (seed, source, doc_id): it does not depend
on shards or batches, and a larger maximum holds the smaller sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gristmill.stages.documents import Batch, column
from gristmill.stages.ledger import StageLedger
from gristmill.stages.models import Selection
from gristmill.stages.readers import detect_format, read_batches
from gristmill.stages.shards import Shard, ShardError, filesystem
from gristmill.stages.stores import stamp_of


def select(selection: Selection, batches: Callable[[], Iterable[Batch]]) -> Iterator[Batch]:
    """Batches of `text` and `language` (where known) in the order of the input. `batches` may be called twice.

    Raises ShardError when the selection names a measure that the documents do not have.
    """
    limit = None
    if selection.max_bytes is not None or selection.max_documents is not None:
        limit = _threshold(selection, batches())
    for batch in batches():
        rows = _matches(selection, batch)
        if limit is not None and rows.any():
            rows &= _ranks(selection, batch, rows) <= limit
        if rows.any():
            names = [name for name in ("text", "language") if name in batch.schema.names]
            yield batch.select(names).filter(pa.array(rows))


def _matches(selection: Selection, batch: Batch) -> np.ndarray:
    rows = np.ones(batch.num_rows, bool)
    if selection.sources is not None:
        rows &= pc.is_in(batch["source"], value_set=pa.array(selection.sources)).to_numpy(zero_copy_only=False)
    for name, limits in selection.where.items():
        if name not in batch.schema.names:
            known = ", ".join(n for n in batch.schema.names if "." in n) or "none"
            raise ShardError(f"A model's selection asks for the measure `{name}`; documents have: {known}.")
        values = column(batch, name)
        rows &= ~np.isnan(values)
        if limits.at_least is not None:
            rows &= values >= limits.at_least
        if limits.at_most is not None:
            rows &= values <= limits.at_most
    return rows


def _ranks(selection: Selection, batch: Batch, rows: np.ndarray) -> np.ndarray:
    """(n,) uint64 place in the sample's order; computed where `rows`, else the last place."""
    out = np.full(batch.num_rows, np.iinfo(np.uint64).max, np.uint64)
    ids, sources = batch["doc_id"].to_pylist(), batch["source"].to_pylist()
    for i in np.flatnonzero(rows):
        out[i] = xxhash.xxh3_64_intdigest(f"{sources[i]}\0{ids[i]}", seed=selection.seed)
    return out


def _threshold(selection: Selection, batches: Iterable[Batch]) -> np.uint64 | None:
    """The highest rank that the maxima admit; None when they admit everything."""
    ranks, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for batch in batches:
        rows = _matches(selection, batch)
        if rows.any():
            ranks.append(_ranks(selection, batch, rows)[rows])
            sizes.append(pc.binary_length(batch["text"]).to_numpy(zero_copy_only=False)[rows].astype(np.int64))
    rank, size = np.concatenate(ranks), np.concatenate(sizes)
    order = np.argsort(rank, kind="stable")
    fits = np.ones(len(order), bool)
    if selection.max_documents is not None:
        fits[selection.max_documents :] = False
    if selection.max_bytes is not None:
        fits &= np.cumsum(size[order]) <= selection.max_bytes
    count = int(np.argmin(fits)) if not fits.all() else len(fits)
    if count == len(fits):
        return None
    # A selection that admits nothing gives the model's own error, which says how much text it needs.
    return rank[order][count - 1] if count else np.uint64(0)


def file_batches(pattern: str, on_file: Callable[[str], None] | None = None) -> Iterator[Batch]:
    """Documents of the files that match; `on_file` is called with the path of each that was read.

    Raises ShardError when none matches, or when a record cannot be read.
    """
    for index, shard in enumerate(selection_files(pattern)):
        account = StageLedger(stage="read")
        problems: list[str] = []
        yield from read_batches(shard.model_copy(update={"index": index}), account, problems)
        if account.failed:
            raise ShardError(f"{shard.path}: {problems[0] if problems else account.failed}")
        if on_file is not None:
            on_file(shard.path)


def selection_files(pattern: str) -> list[Shard]:
    """The files of a selection, sorted, with their identity."""
    fs, inner = filesystem(pattern)
    paths = sorted(fs.glob(inner)) if any(c in inner for c in "*?[") else [inner] * int(fs.exists(inner))
    if not paths:
        raise ShardError(
            f"No file matches {pattern}, which a model asks for. Look at its path and at the working folder."
        )
    shards = []
    for path in paths:
        info = fs.info(path)
        url = fs.unstrip_protocol(path) if "://" in pattern else path
        name = path.rsplit("/", 1)[-1]
        shards.append(
            Shard(
                index=0,
                source="files",
                path=url,
                name=name,
                format=detect_format(path),
                size=int(info["size"]),
                stamp=stamp_of(info),
            )
        )
    return shards
