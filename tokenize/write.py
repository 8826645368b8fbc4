"""Documents to token shards: the same documents give the same bytes, whatever the batches that they come in.

    encoder = Encoder(tokenizer_json)
    infos = write_shard(batches, encoder, "out/run/tokens", "part-00007", holdout_share=0.005)
    write_manifest("out/run/tokens", infos, encoder, holdout_share=0.005)

The held-out split is decided by a hash of the document's text alone, so a document stays on its side when the corpus
grows, and every copy of it goes the same way. A larger share holds out a superset.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numba import njit

from gristmill.stages.documents import Batch
from gristmill.stages.shards import join, publish, publish_bytes
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import (
    INDEX_SCHEMA,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    ShardInfo,
    Split,
    TokenError,
    TokenManifest,
)


def write_shard(
    batches: Iterable[Batch],
    encoder: Encoder,
    folder: str,
    part_name: str,
    holdout_share: float = 0.0,
    *,
    source: str | None = None,
    key: str = "",
) -> list[ShardInfo]:
    """Writes the token shard of one shard of documents -> its training part, then its held-out part.

    batches: columns `doc_id`, `source`, `text`; others are ignored. part_name: "part-00000"; the held-out part is
    named "holdout-00000" and is written when holdout_share > 0, even if it is empty. source: needed only where there
    may be no documents to take it from. key: identity of the shard of documents, kept in the manifest.

    Raises TokenError for an empty or null text, two sources in one shard, or ids that no text may have. Files appear
    whole or not at all.
    """
    if not part_name.startswith("part-"):
        raise TokenError(f"A token shard is named part-NNNNN, not {part_name!r}.")
    names: dict[Split, str] = {"train": part_name}
    if holdout_share > 0:
        names["holdout"] = part_name.replace("part-", "holdout-", 1)
    begun = False
    with ExitStack() as files:
        pairs = {split: _Pair(files, folder, name, encoder) for split, name in names.items()}
        for batch in batches:
            if not batch.num_rows:
                continue
            source = _one_source(batch, source, part_name)
            texts = _texts(batch, part_name)
            if not begun:
                encoder.begin(texts)
                begun = True
            held_out = is_held_out(texts, holdout_share)
            needed = batch.select(["doc_id", "text"])
            for split, pair in pairs.items():
                chosen = held_out if split == "holdout" else ~held_out
                if chosen.any():
                    pair.add(needed if chosen.all() else needed.filter(pa.array(chosen)), source)
        if source is None:
            raise TokenError(f"{part_name}: no documents, and no source named; name the source of an empty shard.")
        return [pair.finish(split, source, key) for split, pair in pairs.items()]


def write_manifest(
    folder: str,
    infos: Iterable[ShardInfo],
    encoder: Encoder,
    *,
    holdout_share: float = 0.0,
    plain_text: bool = True,
) -> TokenManifest:
    """Publishes tokenizer.json, then shards.json: after it the folder is complete and can be opened.

    Shards are listed training split first, by name, whatever the order given. plain_text: no document holds a special
    id but its last, which is so for everything that `write_shard` writes. Raises TokenError when two have one name.
    """
    shards = sorted(infos, key=lambda info: (info.split != "train", len(info.name), info.name))
    names = [info.name for info in shards]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise TokenError(f"Two token shards have the name {twice[0]}. Give every shard of documents its own part name.")
    manifest = TokenManifest(
        dtype="uint16" if encoder.dtype.itemsize == 2 else "uint32",
        vocab_size=encoder.vocab_size,
        eos_id=encoder.eos_id,
        special_ids=encoder.special_ids,
        tokenizer_xxh3=xxhash.xxh3_128_hexdigest(encoder.tokenizer_json),
        holdout_share=holdout_share,
        plain_text=plain_text,
        shards=shards,
    )
    publish_bytes(join(folder, TOKENIZER_FILE), encoder.tokenizer_json)
    publish_bytes(join(folder, MANIFEST_FILE), manifest.sealed())
    return manifest


def index_bytes(table: pa.Table) -> bytes:
    """An .idx file. One record batch, so that the bytes do not depend on how the rows were gathered."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, INDEX_SCHEMA) as writer:
        writer.write_table(table.combine_chunks())
    data: bytes = sink.getvalue().to_pybytes()
    return data


def with_eos(ids: np.ndarray, lengths: np.ndarray, eos_id: int) -> np.ndarray:
    """ids of documents one after the other, lengths (documents,) -> the same with eos_id after each document."""
    out = np.empty(len(ids) + len(lengths), ids.dtype)
    _copy_with_eos(ids, lengths, ids.dtype.type(eos_id), out)
    return out


@njit(nogil=True, cache=True)
def _copy_with_eos(ids, lengths, eos, out):  # type: ignore[no-untyped-def]
    source = target = 0
    for length in lengths:
        for _ in range(length):
            out[target] = ids[source]
            source += 1
            target += 1
        out[target] = eos
        target += 1


class _Pair:
    """A .bin and an .idx being written."""

    def __init__(self, files: ExitStack, folder: str, name: str, encoder: Encoder) -> None:
        self.name, self._encoder = name, encoder
        self._bin: IO[bytes] = files.enter_context(publish(join(folder, f"{name}.bin")))
        self._idx: IO[bytes] = files.enter_context(publish(join(folder, f"{name}.idx")))
        self._digest = xxhash.xxh3_128()
        self._rows: list[pa.RecordBatch] = []
        self._tokens = self._bytes = 0

    def add(self, rows: Batch, source: str) -> None:
        texts = rows["text"]
        encoded = self._encoder.encode(texts)
        lengths = encoded.lengths + 1
        data = with_eos(encoded.ids, encoded.lengths, self._encoder.eos_id).tobytes()
        self._bin.write(data)
        self._digest.update(data)
        starts = self._tokens + np.concatenate([[0], np.cumsum(lengths)])
        utf8 = pc.binary_length(texts).cast(pa.uint32())
        columns = [
            rows["doc_id"].cast(pa.string()),
            pa.array([source], pa.string()).take(pa.array(np.zeros(len(lengths), np.int32))),
            pa.array(starts[:-1], pa.uint64()),
            pa.array(lengths, pa.uint32()),
            utf8,
        ]
        self._rows.append(pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
        self._tokens = int(starts[-1])
        self._bytes += int(pc.sum(utf8).as_py())

    def finish(self, split: Split, source: str, key: str) -> ShardInfo:
        table = pa.Table.from_batches(self._rows, INDEX_SCHEMA)
        index = index_bytes(table)
        self._idx.write(index)
        return ShardInfo(
            name=self.name,
            source=source,
            split=split,
            documents=table.num_rows,
            tokens=self._tokens,
            bytes=self._bytes,
            idx_bytes=len(index),
            bin_xxh3=self._digest.hexdigest(),
            idx_xxh3=xxhash.xxh3_128_hexdigest(index),
            key=key,
        )


def _one_source(batch: Batch, source: str | None, part_name: str) -> str:
    """The source of a batch. Raises TokenError when it is another than the shard's, or null."""
    found = pc.unique(batch["source"]).to_pylist()
    expected = found[0] if source is None else source
    if found != [expected] or expected is None:
        raise TokenError(
            f"{part_name}: a token shard holds one source, but documents of {', '.join(map(repr, found))} came for "
            f"the shard of {expected!r}. Write one shard for each source."
        )
    return str(expected)


def _texts(batch: Batch, part_name: str) -> pa.Array:
    """The texts of a batch. Raises TokenError naming the first document without text, or for one without an id."""
    texts = batch["text"]
    if batch["doc_id"].null_count:
        raise TokenError(f"{part_name}: {batch['doc_id'].null_count:,} documents have no doc_id (null).")
    empty = pc.fill_null(pc.equal(pc.binary_length(texts), 0), True)
    if pc.any(empty).as_py():
        doc_id = batch["doc_id"].filter(empty)[0].as_py()
        raise TokenError(
            f"{part_name}: document {doc_id!r} has no text. Empty documents are dropped before tokenizing."
        )
    return texts
