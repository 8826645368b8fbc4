"""Documents to token shards: the same documents give the same bytes, whatever the batches that they come in.

    encoder = Encoder(tokenizer_json)
    infos = write_shard(batches, encoder, "out/run/tokens", "part-00007", holdout_share=0.005)
    write_manifest("out/run/tokens", infos, encoder, holdout_share=0.005)

The held-out split is decided by a hash of the document's text alone, so a document stays on its side when the corpus
grows, and every copy of it goes the same way. A larger share holds out a superset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numba import njit

from gristmill.stages.documents import Batch
from gristmill.stages.shards import join, publish_bytes
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.pieces import Pieces, Rows, Spool, order_keys
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    ShardInfo,
    Shuffle,
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
    max_tokens: int | None = None,
    shuffle_seed: int | None = None,
) -> list[ShardInfo]:
    """Writes the token shards of one shard of documents -> those of its training part, then of its held-out part.

    batches: columns `doc_id`, `source`, `text`; others are ignored. part_name: "part-00000"; the held-out part is
    named "holdout-00000" and is written when holdout_share > 0, even if it is empty. source: needed only where there
    may be no documents to take it from. key: identity of the shard of documents, kept in the manifest.

    max_tokens: of a token shard, end-of-text ids included. What is more goes on in "part-00000-001" and so on; a
    document is never cut. shuffle_seed: documents in the order of `order_keys`, within this shard of documents; the ids
    wait in a temporary file, so memory holds some 60 bytes a document and no text. `shuffle.py` shuffles across shards.

    Raises TokenError for an empty or null text, two sources in one shard, ids that no text may have, or a document
    longer than max_tokens. Each file appears whole or not at all; without max_tokens, all of them or none.
    """
    if not part_name.startswith("part-"):
        raise TokenError(f"A token shard is named part-NNNNN, not {part_name!r}.")
    names: dict[Split, str] = {"train": part_name}
    if holdout_share > 0:
        names["holdout"] = part_name.replace("part-", "holdout-", 1)
    with ExitStack() as files:
        cut = {split: Pieces(folder, name, encoder.dtype, max_tokens) for split, name in names.items()}
        for pieces in cut.values():
            files.push(pieces.close)
        spooled = {split: files.enter_context(Spool(encoder.dtype)) for split in cut if shuffle_seed is not None}
        source = fill(spooled or cut, batches, encoder, part_name, holdout_share, source=source, seed=shuffle_seed)
        for split, spool in spooled.items():
            for rows in spool.sorted():
                cut[split].add(rows)
        return [info for split, pieces in cut.items() for info in pieces.finish(split, source, key)]


class Sink(Protocol):
    """What takes encoded documents."""

    def add(self, rows: Rows) -> None: ...


def fill(
    sinks: Mapping[Split, Sink],
    batches: Iterable[Batch],
    encoder: Encoder,
    part_name: str,
    holdout_share: float,
    *,
    source: str | None,
    seed: int | None,
) -> str:
    """Encodes a shard of documents into the sink of each split -> its source. seed: of the keys; None: they are 0.

    Raises TokenError as `write_shard` does.
    """
    begun = False
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
        for split, sink in sinks.items():
            chosen = held_out if split == "holdout" else ~held_out
            if chosen.any():
                sink.add(_encoded(needed if chosen.all() else needed.filter(pa.array(chosen)), encoder, seed))
    if source is None:
        raise TokenError(f"{part_name}: no documents, and no source named; name the source of an empty shard.")
    return source


def _encoded(rows: Batch, encoder: Encoder, seed: int | None) -> Rows:
    encoded = encoder.encode(rows["text"])
    doc_id = rows["doc_id"].cast(pa.string())
    keys = np.zeros(len(doc_id), np.uint64) if seed is None else order_keys(doc_id, rows["text"], seed)
    utf8 = pc.binary_length(rows["text"]).cast(pa.uint32())
    ids = with_eos(encoded.ids, encoded.lengths, encoder.eos_id)
    return Rows(doc_id, ids, encoded.lengths + 1, utf8, keys)


def write_manifest(
    folder: str,
    infos: Iterable[ShardInfo],
    encoder: Encoder,
    *,
    holdout_share: float = 0.0,
    plain_text: bool = True,
    shuffle: Shuffle = "none",
    seed: int | None = None,
) -> TokenManifest:
    """Publishes tokenizer.json, then shards.json: after it the folder is complete and can be opened.

    Shards are listed training split first, by name, whatever the order given. plain_text: no document holds a special
    id but its last, which is so for everything that `write_shard` writes. Raises TokenError when two have one name.
    """
    shards = sorted(infos, key=_order)
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
        shuffle=shuffle,
        seed=None if shuffle == "none" else seed,
        shards=shards,
    )
    publish_bytes(join(folder, TOKENIZER_FILE), encoder.tokenizer_json)
    publish_bytes(join(folder, MANIFEST_FILE), manifest.sealed())
    return manifest


def _order(info: ShardInfo) -> tuple[bool, list[tuple[int, str]]]:
    """part-00002 before part-00002-001 before part-00003 before part-100000."""
    return info.split != "train", [(len(number), number) for number in info.name.split("-")]


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
