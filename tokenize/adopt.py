"""Files of Megatron-LM, datatrove, nanoGPT and OLMo as token shards, read where they lie; those of llm.c, copied.

    adopt_tokens(["web_text_document.idx"], "out/adopted", tokenizer_json, source="web", eos_token="</s>")
    TokenSet.open("out/adopted").sources["web"]

    adopt_tokens(["web=web.idx", "books=books.ds", "out/demo/run/tokens"], "out/all", ...)      # one set for mixtures

Their files of ids are what a .bin here is, so nothing is copied: the folder gets an index for each of them, a link,
and a manifest with checksums. Only llm.c has its end-of-text ids elsewhere (`adopt_plain.py`). Every document must end
with the end-of-text id, and every id must be in the vocabulary; the number of bytes that a document stands for comes
from the tokenizer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from tokenizers import Tokenizer

from gristmill.stages.shards import publish_bytes
from gristmill.tokenize.adopt_plain import convert_llmc, is_llmc, olmo_documents, searched_lengths
from gristmill.tokenize.blocks import metadata_of
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.export import MEGATRON_CODES, MEGATRON_MAGIC
from gristmill.tokenize.pieces import index_bytes
from gristmill.tokenize.shards import (
    INDEX_SCHEMA,
    MANIFEST_FILE,
    ShardInfo,
    Shuffle,
    Split,
    TokenError,
    TokenManifest,
    TokenSet,
    local_folder,
    map_file,
)
from gristmill.tokenize.tokenizer_json import token_byte_lengths
from gristmill.tokenize.write import write_manifest

_MEGATRON_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document list


def adopt_tokens(
    paths: Iterable[str | Path],
    folder: str | Path,
    tokenizer_json: bytes,
    *,
    source: str | None = None,
    eos_token: str,
) -> TokenManifest:
    """Makes a folder of token shards from `.idx` of Megatron-LM, `.ds` of datatrove, `.bin` of nanoGPT or llm.c, `.npy`
    of OLMo, and folders of token shards. Files of llm.c that follow each other, of one source, are one shard.

    paths: `FILE` is of the source given, `NAME=FILE` of the source named; a folder keeps its own sources and its
    held-out documents, and must be of the same tokenizer. Raises TokenError naming file and document for whatever
    token shards cannot be: another width of ids than the vocabulary asks for, ids outside it, documents without an
    end-of-text id or without text.
    """
    target, encoder = local_folder(folder), Encoder(tokenizer_json, eos_token=eos_token, backend="tokenizers")
    target.mkdir(parents=True, exist_ok=True)
    infos: list[ShardInfo] = []
    shares: set[float] = set()
    orders: set[tuple[Shuffle, int | None]] = set()
    plain = True
    reserved = np.zeros(encoder.vocab_size, bool)
    reserved[list(encoder.special_ids.values())] = True
    waiting = [str(path) for path in paths]
    while waiting:
        given = waiting.pop(0)
        if (local_folder(given) / MANIFEST_FILE).is_file():
            tokens = TokenSet.open(given)
            infos += _linked(tokens, target, infos, encoder)
            shares.add(tokens.manifest.holdout_share)
            orders.add((tokens.manifest.shuffle, tokens.manifest.seed))
            plain = plain and tokens.manifest.plain_text
            continue
        path, name = _named(given, source)
        shard, doc_ids = _next_name(infos, "train"), None
        if is_llmc(path):
            files = [path]
            while waiting and (following := _llmc_of(waiting[0], source, name)) is not None:
                files.append(following)
                waiting.pop(0)
            ids_path, dtype = target / f"{shard}.bin", encoder.dtype
            ids_path.unlink(missing_ok=True)  # a link of an earlier import must not be written through
            convert_llmc(files, ids_path, dtype, encoder.eos_id)
            lengths = searched_lengths(path, np.frombuffer(map_file(ids_path), dtype), encoder.eos_id)
        else:
            ids_path, lengths, dtype, doc_ids = _foreign(path, encoder)
        if dtype.itemsize != encoder.dtype.itemsize:
            raise TokenError(
                f"{ids_path}: its ids have {dtype.itemsize} bytes, but a vocabulary of {encoder.vocab_size:,} is "
                f"stored with {encoder.dtype.itemsize}. Is this the tokenizer of these files?"
            )
        ids = np.frombuffer(map_file(ids_path), encoder.dtype)
        infos.append(_adopt(ids_path, ids, lengths, target, shard, name, encoder, doc_ids or _numbered(path, lengths)))
        plain = plain and int(reserved[ids].sum()) == len(lengths)
    share = shares.pop() if len(shares) == 1 else 0.0
    shuffle: Shuffle = "documents" if any(order == "documents" for order, _ in orders) else "none"
    seeds = {seed for _, seed in orders}
    seed = seeds.pop() if len(seeds) == 1 else None
    return write_manifest(
        str(target), infos, encoder, holdout_share=share, plain_text=plain, shuffle=shuffle, seed=seed
    )


def _named(given: str, source: str | None) -> tuple[Path, str]:
    """`NAME=FILE` or `FILE` -> the file and its source."""
    name, equals, rest = given.partition("=")
    if Path(given).exists() or not equals:
        name, rest = source or "", given
    path = Path(rest)
    if not name:
        raise TokenError(f"{given}: which source is it? Write NAME={given}, or name the source of all files.")
    if not path.is_file():
        raise TokenError(
            f"{path}: no such file. Give the .idx of Megatron-LM, the .ds of datatrove, the .bin of nanoGPT or llm.c, "
            "or the .npy of OLMo."
        )
    return path, name


def _llmc_of(given: str, source: str | None, name: str) -> Path | None:
    """The file, when it is one of llm.c and of the source."""
    if (local_folder(given) / MANIFEST_FILE).is_file():
        return None
    path, other = _named(given, source)
    return path if other == name and is_llmc(path) else None


def _foreign(path: Path, encoder: Encoder) -> tuple[Path, np.ndarray, np.dtype, list[str] | None]:
    """(file of ids, ids of each document, dtype, doc_id where there are any) of a file that can be linked."""
    if path.suffix == ".idx":
        return *_megatron(path), None
    if path.suffix == ".ds":
        return *_datatrove(path), None
    if path.suffix not in (".bin", ".npy"):
        raise TokenError(
            f"{path}: not a name of Megatron-LM (.idx), datatrove (.ds), nanoGPT, llm.c (.bin) or OLMo (.npy)."
        )
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        raise TokenError(f"{path}: its index lies beside it. Give {path.with_suffix('.idx')} instead.")
    size = path.stat().st_size
    if size % encoder.dtype.itemsize:
        raise TokenError(f"{path}: {size:,} bytes are no whole number of ids of {encoder.dtype.itemsize} bytes.")
    ids = np.frombuffer(map_file(path), encoder.dtype)
    if path.suffix == ".npy":
        lengths, doc_ids = olmo_documents(path, ids, encoder.eos_id)
        return path, lengths, encoder.dtype, doc_ids
    return path, searched_lengths(path, ids, encoder.eos_id), encoder.dtype, None


def _numbered(path: Path, lengths: np.ndarray) -> list[str]:
    return [f"{path.stem}:{row}" for row in range(len(lengths))]


def _next_name(infos: Iterable[ShardInfo], split: Split) -> str:
    count = sum(info.split == split for info in infos)
    return f"{'part' if split == 'train' else split}-{count:05d}"


def _linked(tokens: TokenSet, target: Path, before: list[ShardInfo], encoder: Encoder) -> list[ShardInfo]:
    """Links the shards of another folder. Raises TokenError when it is of another tokenizer, or the same folder."""
    if tokens.manifest.tokenizer_xxh3 != xxhash.xxh3_128_hexdigest(encoder.tokenizer_json):
        raise TokenError(f"{tokens.folder}: its shards were made with another tokenizer; ids would not mean the same.")
    if tokens.manifest.eos_id != encoder.eos_id:
        raise TokenError(
            f"{tokens.folder}: its documents end with id {tokens.manifest.eos_id}, not with {encoder.eos_token!r} "
            f"({encoder.eos_id})."
        )
    if tokens.folder.resolve() == target.resolve():
        raise TokenError(f"{target}: a folder cannot be put together from itself. Choose another one to write to.")
    infos: list[ShardInfo] = []
    for info in tokens.manifest.shards:
        linked = info.model_copy(update={"name": _next_name([*before, *infos], info.split)})
        for old, new in ((info.bin, linked.bin), (info.idx, linked.idx)):
            _link(tokens.folder / old, target / new)
        infos.append(linked)
    return infos


def _link(path: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    os.symlink(path.resolve(), link)


def _adopt(
    path: Path,
    ids: np.ndarray,
    lengths: np.ndarray,
    folder: Path,
    name: str,
    source: str,
    encoder: Encoder,
    doc_ids: list[str],
) -> ShardInfo:
    if int(lengths.sum()) != len(ids):
        raise TokenError(f"{path}: {len(ids):,} ids, but its index says {int(lengths.sum()):,}: one was truncated.")
    ends = np.cumsum(lengths)
    if len(ids) and int(ids.max()) >= encoder.vocab_size:
        raise TokenError(f"{path}: id {int(ids.max())} is outside the vocabulary of {encoder.vocab_size:,}.")
    if (lengths < 2).any():
        raise TokenError(f"{path}: document {int(np.argmax(lengths < 2))} holds no text.")
    ended = ids[ends - 1] == encoder.eos_id
    if not ended.all():
        row = int(np.argmin(ended))
        raise TokenError(
            f"{path}: document {row} ends with id {int(ids[ends[row] - 1])}, not with {encoder.eos_token!r} "
            f"({encoder.eos_id}). Write the files with one (Megatron-LM: --append-eod), or name the token used."
        )
    utf8 = _bytes_of(ids, lengths, encoder)
    columns = [
        pa.array(doc_ids, pa.string()),
        pa.array([source] * len(lengths), pa.string()),
        pa.array(ends - lengths, pa.uint64()),
        pa.array(lengths, pa.uint32()),
        pa.array(utf8, pa.uint32()),
    ]
    index = index_bytes(pa.Table.from_arrays(columns, schema=INDEX_SCHEMA), metadata_of(ids.data))
    publish_bytes(str(folder / f"{name}.idx"), index)
    if path != folder / f"{name}.bin":
        _link(path, folder / f"{name}.bin")
    return ShardInfo(
        name=name,
        source=source,
        split="train",
        documents=len(lengths),
        tokens=len(ids),
        bytes=int(utf8.sum()),
        idx_bytes=len(index),
        bin_xxh3=xxhash.xxh3_128_hexdigest(ids.data),
        idx_xxh3=xxhash.xxh3_128_hexdigest(index),
    )


def _bytes_of(ids: np.ndarray, lengths: np.ndarray, encoder: Encoder) -> np.ndarray:
    """UTF-8 bytes that each document stands for: (documents,) int64."""
    byte_lengths = token_byte_lengths(encoder.tokenizer_json)
    ends = np.cumsum(lengths)
    if byte_lengths is not None:
        return np.add.reduceat(byte_lengths[ids], ends - lengths) if len(ends) else np.zeros(0, np.int64)
    tokenizer = Tokenizer.from_str(encoder.tokenizer_json.decode())
    texts = (tokenizer.decode(ids[end - n : end - 1].tolist()) for end, n in zip(ends, lengths, strict=True))
    return np.array([len(text.encode()) for text in texts], np.int64)


def _megatron(path: Path) -> tuple[Path, np.ndarray, np.dtype]:
    """(.bin, ids of each document, dtype) of a Megatron-LM .idx. A document may be several sequences there."""
    data = map_file(path)
    if data.size < _MEGATRON_HEAD.size or data[:9].to_pybytes() != MEGATRON_MAGIC:
        raise TokenError(f"{path}: not an index of Megatron-LM.")
    _, version, code, sequences, entries = _MEGATRON_HEAD.unpack(data[: _MEGATRON_HEAD.size].to_pybytes())
    if version != 1 or code not in MEGATRON_CODES:
        raise TokenError(f"{path}: version {version}, dtype code {code}; only version 1 with uint16 or int32 is known.")
    at = _MEGATRON_HEAD.size
    if data.size < at + 12 * sequences + 8 * entries:
        raise TokenError(f"{path}: {data.size:,} bytes are too few for {sequences:,} sequences: it was truncated.")
    lengths = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(data, "<i8", entries, at + 12 * sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    dtype = MEGATRON_CODES[code]
    if not np.array_equal(pointers, starts[:-1] * dtype.itemsize) or not np.array_equal(
        documents, np.unique(documents)
    ):
        raise TokenError(f"{path}: its sequences are not stored one after the other.")
    return path.with_suffix(".bin"), np.diff(starts[documents]), dtype


def _datatrove(path: Path) -> tuple[Path, np.ndarray, np.dtype]:
    """(.ds, ids of each document, dtype) of a datatrove .ds with its .index and .metadata."""
    index, metadata = path.with_name(path.name + ".index"), path.with_name(path.name + ".metadata")
    for file in (path, index, metadata):
        if not file.is_file():
            raise TokenError(
                f"{file}: no such file; datatrove writes it beside the ids (save_index, save_final_metadata)."
            )
    width = metadata.read_text().split("\n")[0].rpartition("|")[2]
    if width not in ("2", "4"):
        raise TokenError(f"{metadata}: the first line does not end with the bytes of an id, 2 or 4.")
    ends = np.frombuffer(map_file(index), "<u8").astype(np.int64)
    return path, np.diff(ends, prepend=0), np.dtype(f"<u{width}")
