"""Token shards in the formats of other trainers.

    export_tokens(TokenSet.open("out/run/tokens"), "megatron", "out/megatron")      # -> the files written

Formats, one set of files for each source and split:

    megatron   <source>_<split>.bin, .idx       Megatron-LM, NeMo, Megatron-DeepSpeed: pass the path without suffix
    datatrove  <source>_<split>.ds, .ds.index, .ds.metadata      datatrove and nanotron
    nanogpt    <source>/train.bin, val.bin      nanoGPT: uint16 only, so vocabularies up to 65,536
    llmc       <source>_train_000001.bin, <source>_val_000000.bin      llm.c: a header, and the end-of-text id before
               each document instead of after it
    olmo       <source>_<split>.npy, .csv.gz    OLMo-core and dolma: raw ids under the name .npy; bounds in the .csv.gz

Ids are copied as they are. Files that Megatron-LM and datatrove wrote are read where they lie: `adopt.py`.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Literal, get_args
from urllib.parse import quote

import numpy as np

from gristmill.stages.shards import join, publish, publish_bytes
from gristmill.tokenize.shards import TOKENIZER_FILE, SourceTokens, TokenError, TokenSet

Format = Literal["megatron", "datatrove", "nanogpt", "llmc", "olmo"]

BLOCK_IDS = 4 << 20  # ids copied in one go

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"  # megatron/core/datasets/indexed_dataset.py
MEGATRON_CODES: dict[int, np.dtype] = {
    4: np.dtype("<i4"),
    8: np.dtype("<u2"),
}  # the two of its dtype codes that hold token ids

LLMC_HEADER_BYTES = 1024  # 256 int32: magic, version, number of ids, zeros; dev/data/data_common.py
LLMC_KINDS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes of an id -> magic, version ("gpt-2", "llama-3")
LLMC_MAX_BYTES = (1 << 31) - 1  # its C loader seeks with an int
LLMC_SHARD_IDS = 100_000_000  # of dev/data/fineweb.py


def export_tokens(tokens: TokenSet, kind: Format, folder: str, *, shard_ids: int = LLMC_SHARD_IDS) -> list[str]:
    """Writes every source and split that holds tokens -> the paths written, each whole or not at all.

    shard_ids: ids in a file of llm.c. Raises TokenError for what a format cannot hold.
    """
    if kind not in get_args(Format):
        raise TokenError(f"There is no export format {kind!r}; choose one of {', '.join(get_args(Format))}.")
    if kind == "nanogpt":
        return _nanogpt(tokens, folder)
    written = []
    for split, sources in (("train", tokens.sources), ("holdout", tokens.holdout)):
        for name, source in sources.items():
            if source.tokens:
                stem = join(folder, f"{quote(name, safe='')}_{split}")
                written += (
                    _llmc(source, stem, tokens.eos_id, shard_ids) if kind == "llmc" else _KINDS[kind](source, stem)
                )
    return written


def _ids(source: SourceTokens) -> Iterator[np.ndarray]:
    """All ids of a source, in blocks."""
    for _, ids, _ in source.parts():
        for low in range(0, len(ids), BLOCK_IDS):
            yield ids[low : low + BLOCK_IDS]


def _lengths(source: SourceTokens) -> np.ndarray:
    """Ids of each document, end-of-text id included: (documents,) int64."""
    return np.concatenate([index.length for _, _, index in source.parts()]).astype(np.int64)


def _copy_ids(source: SourceTokens, path: str) -> str:
    with publish(path) as file:
        for block in _ids(source):
            file.write(block.data)
    return path


def _megatron(source: SourceTokens, stem: str) -> list[str]:
    """Ids above 16 bits are int32 there, which are the same bytes: no id reaches 2^31."""
    lengths = _lengths(source)
    code = 8 if source.dtype.itemsize == 2 else 4
    head = MEGATRON_MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    starts = (np.cumsum(lengths) - lengths) * source.dtype.itemsize
    written = _copy_ids(source, f"{stem}.bin")
    with publish(f"{stem}.idx") as file:
        file.write(head)
        file.write(lengths.astype("<i4").tobytes())
        file.write(starts.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())  # each sequence is a document
    return [written, f"{stem}.idx"]


def _datatrove(source: SourceTokens, stem: str) -> list[str]:
    path = f"{stem}.ds"
    _copy_ids(source, path)
    publish_bytes(f"{path}.index", np.cumsum(_lengths(source)).astype("<u8").tobytes())
    # nanotron compares the first line: name of the tokenizer, then bytes of an id
    text = f"{TOKENIZER_FILE}|{source.dtype.itemsize}\n{source.tokens}\n{source.tokens / 1e9:.3g} GT"
    publish_bytes(f"{path}.metadata", text.encode())
    return [path, f"{path}.index", f"{path}.metadata"]


def _olmo(source: SourceTokens, stem: str) -> list[str]:
    """Rows of the .csv.gz: first id, id after the last, doc_id, source, row (`start,end,id,src,loc` of dolma)."""
    path = _copy_ids(source, f"{stem}.npy")
    with ExitStack() as stack:
        raw = stack.enter_context(publish(f"{stem}.csv.gz"))
        # without a time, so that the same tokens give the same bytes
        file = stack.enter_context(gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=6, mtime=0))
        before = row = 0
        for _, ids, index in source.parts():
            for doc_id, start, length in zip(index.doc_id, index.start.tolist(), index.length.tolist(), strict=True):
                fields = (before + start, before + start + length, _csv(doc_id.as_py()), _csv(source.name), row)
                file.write((",".join(map(str, fields)) + "\n").encode())
                row += 1
            before += len(ids)
    return [path, f"{stem}.csv.gz"]


def _csv(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(char in text for char in ',"\r\n') else text


def _nanogpt(tokens: TokenSet, folder: str) -> list[str]:
    if tokens.dtype.itemsize != 2:
        raise TokenError(
            f"nanoGPT reads 16-bit ids; a vocabulary of {tokens.vocab_size:,} does not fit. Use another format, or a "
            "tokenizer of at most 65,536."
        )
    written = []
    for name, source in tokens.sources.items():
        held_out = tokens.holdout.get(name)
        if not source.tokens or held_out is None or not held_out.tokens:
            raise TokenError(
                f"nanoGPT needs train.bin and val.bin, but source {name!r} has {source.tokens:,} tokens to train on "
                f"and {held_out.tokens if held_out else 0:,} held out. Raise `holdout` in the recipe."
            )
        for file, part in (("train.bin", source), ("val.bin", held_out)):
            written.append(_copy_ids(part, join(folder, quote(name, safe=""), file)))
    return written


def _llmc(source: SourceTokens, stem: str, eos_id: int, shard_ids: int) -> list[str]:
    size = source.dtype.itemsize
    if not 0 < shard_ids <= (LLMC_MAX_BYTES - LLMC_HEADER_BYTES) // size:
        raise TokenError(f"shard_ids {shard_ids:,}: a file of llm.c must stay below 2 GiB.")
    stem = stem.removesuffix("_holdout") + "_val" if source.split == "holdout" else stem
    first = 0 if source.split == "holdout" else 1
    written = []
    for low in range(0, source.tokens, shard_ids):
        count = min(shard_ids, source.tokens - low)
        path = f"{stem}_{first + low // shard_ids:06d}.bin"
        head = np.zeros(256, "<i4")
        head[:3] = (*LLMC_KINDS[size], count)
        with publish(path) as file:
            file.write(head.tobytes())
            # The stream is that of the source, one place later, with an end-of-text id in front.
            if low == 0:
                file.write(np.array([eos_id], source.dtype).tobytes())
            start, stop = max(low - 1, 0), low + count - 1
            for at in range(start, stop, BLOCK_IDS):
                file.write(np.ascontiguousarray(source.read(at, min(BLOCK_IDS, stop - at))).data)
        written.append(path)
    return written


_KINDS: dict[str, Callable[[SourceTokens, str], list[str]]] = {
    "megatron": _megatron,
    "datatrove": _datatrove,
    "olmo": _olmo,
}
