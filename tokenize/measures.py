"""What is known of each document of token shards: the columns that the stages measured, in the order of the index.

    table = document_columns(tokens.sources["web"], ["classifier.score", "language"])   # a row a document
    write_measures("out/demo/run/tokens")             # so that the folder can travel without its run

The columns come from the folder's own `measures/part-N.parquet`, a row for each of the index; else from the kept
documents of the run in which the folder lies, joined by doc_id. A document that is not found there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.stages.settings_file import nearest
from gristmill.stages.shards import publish
from gristmill.tokenize.shards import DocumentIndex, ShardInfo, SourceTokens, TokenError, TokenSet

MEASURES = "measures"  # folder below that of the token shards
_INDEX_KEY = b"idx_xxh3"  # in the metadata of a file: the index whose rows it follows
_SEGMENT = re.compile(r"\d\d+-.+")
_NOT_MEASURES = {"doc_id", "source", "text", "html", "metadata"}


def document_columns(source: SourceTokens, columns: Sequence[str]) -> pa.Table:
    """The columns of every document of a source, in the order of its tokens.

    Raises TokenError where a column or a document is not known; the message says what there is and how to get it.
    """
    tables = [_of_shard(folder, info, index, columns) for folder, info, index in source.indexes()]
    return pa.concat_tables(tables, promote_options="permissive")


def known_columns(source: SourceTokens) -> list[str]:
    """The columns that there are of the first shard of a source; none where there is neither file nor run."""
    for folder, info, _ in source.indexes():
        path = _file_of(folder, info)
        return [name for name in pq.read_schema(path).names if name not in _NOT_MEASURES] if path else []
    return []


def rows_of(tokens: TokenSet, shard: str, rows: Sequence[int]) -> list[dict[str, Any]]:
    """All that is known of documents of one shard, by their rows in its index; columns without a value are left out.

    Raises TokenError where nothing is known.
    """
    every = (entry for source in tokens.sources.values() for entry in _whole(source).indexes())
    folder, info, index = next(entry for entry in every if entry[1].name == shard)
    path = _file_of(folder, info)
    columns = [] if path is None else [name for name in pq.read_schema(path).names if name not in _NOT_MEASURES]
    chosen = DocumentIndex(index.doc_id.take(pa.array(rows)), index.start[rows], index.length[rows], index.bytes[rows])
    if path is not None and path.parent.name == MEASURES:
        table = _of_shard(folder, info, index, columns).take(pa.array(rows))
    elif path is not None:
        table = _joined(path, info, chosen, columns)
    else:
        table = _of_shard(folder, info, index, columns)  # which says what is missing
    return [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]


def _whole(source: Any) -> SourceTokens:
    """A part of a source has the documents of the whole one."""
    whole: SourceTokens = getattr(source, "whole", source)
    return whole


def write_measures(
    folder: str | Path, columns: Sequence[str] = (), on_shard: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Writes measures/part-N.parquet for every shard of the training split, from the run -> the columns.

    columns: which; all but the texts where none are named. Raises TokenError where the run has not got them.
    """
    tokens = TokenSet.open(folder)
    shards = [entry for source in tokens.sources.values() for entry in source.indexes()]
    names: dict[str, None] = {}
    for done, (path, info, index) in enumerate(shards, start=1):
        kept = _kept_file(path, info)
        if kept is None:
            raise TokenError(
                f"{path}: not in a run whose kept documents are there, so their measures are not known. Write them "
                "where the run is, and copy the folder with them."
            )
        wanted = list(columns) or [name for name in pq.read_schema(kept).names if name not in _NOT_MEASURES]
        table = _joined(kept, info, index, wanted)
        names |= dict.fromkeys(table.column_names)
        table = table.replace_schema_metadata({_INDEX_KEY: info.idx_xxh3.encode()})
        with publish(str(path / MEASURES / f"{info.name}.parquet")) as file:
            pq.write_table(table, file, compression="zstd")
        on_shard(done, len(shards))
    return list(names)


def _of_shard(folder: Path, info: ShardInfo, index: DocumentIndex, columns: Sequence[str]) -> pa.Table:
    path = _file_of(folder, info)
    if path is None:
        raise TokenError(
            f"{folder}: what was measured of the documents of source {info.source!r} is not known: there is no folder "
            f"`{MEASURES}`, and the folder lies in no run whose kept documents are there. Write it where the run is "
            "with `gristmill tokens measures RUN`, and copy it beside the shards."
        )
    there = pq.read_schema(path)
    for name in columns:
        if name not in there.names:
            known = [column for column in there.names if column not in _NOT_MEASURES]
            raise TokenError(
                f"Documents of source {info.source!r} have no column {name!r} ({path}).{nearest(name, known)}"
            )
    if path.parent.name != MEASURES:
        return _joined(path, info, index, columns)
    if (there.metadata or {}).get(_INDEX_KEY) != info.idx_xxh3.encode():
        raise TokenError(
            f"{path}: does not belong to the index {folder / info.idx}: one of them was made anew since. Write the "
            "measures again with `gristmill tokens measures RUN`."
        )
    return pq.read_table(path, columns=list(columns)).select(list(columns)).replace_schema_metadata(None)


def _joined(kept: Path, info: ShardInfo, index: DocumentIndex, columns: Sequence[str]) -> pa.Table:
    """The columns of the index's documents, found by their ids among the kept ones."""
    table = pq.read_table(kept, columns=["doc_id", *columns])
    at = pc.index_in(index.doc_id, value_set=table["doc_id"])
    if at.null_count:
        missing = index.doc_id.filter(pc.is_null(at))[0].as_py()
        raise TokenError(
            f"{kept}: document {missing!r} is not there, but {info.idx} has it: documents and tokens are of different "
            "runs. Run the recipe again."
        )
    return table.select(list(columns)).take(at).replace_schema_metadata(None)


def _file_of(folder: Path, info: ShardInfo) -> Path | None:
    own = folder / MEASURES / f"{info.name}.parquet"
    return own if own.is_file() else _kept_file(folder, info)


def _kept_file(folder: Path, info: ShardInfo) -> Path | None:
    """The kept documents behind a token shard: the last segment's of the run in which the folder lies."""
    segments = sorted(
        (path for path in folder.absolute().parent.glob("*-*") if _SEGMENT.fullmatch(path.name)),
        key=lambda path: int(path.name.split("-")[0]),
    )
    if not segments:
        return None
    part = "-".join(info.name.split("-")[:2])  # part-00007-001 holds documents of part-00007
    path = segments[-1] / "kept" / f"{part}.parquet"
    return path if path.is_file() else None
