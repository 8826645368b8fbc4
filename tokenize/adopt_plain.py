"""Files of nanoGPT, llm.c and OLMo for `adopt.py`: their boundaries, and ids that are not in a .bin's order.

    nanoGPT   .bin     ids as they are, the end-of-text id after each document: boundaries are where it stands
    OLMo      .npy     the same, no file of numpy; with a .csv.gz of dolma beside it, boundaries and ids come from it
    llm.c     .bin     a header, and the end-of-text id before each document; documents go on from file to file

The first two are linked. Those of llm.c are copied: the header goes, and the end-of-text ids move by one document.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gristmill.stages.shards import publish
from gristmill.tokenize.export import BLOCK_IDS, LLMC_HEADER_BYTES, LLMC_KINDS
from gristmill.tokenize.shards import TokenError, map_file

_NUMPY_MAGIC = b"\x93NUMPY"
_BOUNDS = 2  # columns of the .csv.gz that are needed; the third is the document's id


def is_llmc(path: Path) -> bool:
    """True for a .bin with the header of llm.c."""
    with path.open("rb") as file:
        head = np.frombuffer(file.read(8).ljust(8, b"\0"), "<i4")
    return path.suffix == ".bin" and tuple(head.tolist()) in LLMC_KINDS.values()


def searched_lengths(path: Path, ids: np.ndarray, eos_id: int) -> np.ndarray:
    """Ids of each document, its end-of-text id included: (documents,) int64. For formats that store no boundaries; a
    document that holds the end-of-text id itself becomes two. Raises TokenError when the last id is another.
    """
    found = [np.flatnonzero(ids[low : low + BLOCK_IDS] == eos_id) + low + 1 for low in range(0, len(ids), BLOCK_IDS)]
    ends = np.concatenate([np.zeros(0, np.int64), *found])
    if len(ids) and (not len(ends) or int(ends[-1]) != len(ids)):
        raise TokenError(
            f"{path}: the last document does not end with the end-of-text id {eos_id}. Was the file truncated, or made "
            "with another tokenizer?"
        )
    return np.diff(ends, prepend=0)


def olmo_documents(path: Path, ids: np.ndarray, eos_id: int) -> tuple[np.ndarray, list[str] | None]:
    """(ids of each document, their doc_id or None) of an .npy of OLMo, by the .csv.gz beside it where there is one."""
    if map_file(path)[: len(_NUMPY_MAGIC)].to_pybytes() == _NUMPY_MAGIC:
        raise TokenError(
            f"{path}: this is a file of numpy with a header; those of OLMo and dolma hold ids only, whatever the name. "
            "Write it with `array.tofile`."
        )
    bounds = path.with_suffix(".csv.gz")
    if not bounds.is_file():
        return searched_lengths(path, ids, eos_id), None
    with gzip.open(bounds, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    try:
        pairs = np.array([[int(field) for field in row[:_BOUNDS]] for row in rows], np.int64).reshape(-1, _BOUNDS)
    except ValueError as error:
        raise TokenError(f"{bounds}: not the bounds of dolma (`start,end,id,src,loc` a line): {error}") from error
    gaps = np.flatnonzero(pairs[:, 0] != np.concatenate([[0], pairs[:-1, 1]])) if len(pairs) else np.zeros(0, np.int64)
    if len(gaps):
        raise TokenError(f"{bounds}: line {int(gaps[0]) + 1} does not begin where the document before it ends.")
    named = all(len(row) > _BOUNDS and row[_BOUNDS] for row in rows)
    return pairs[:, 1] - pairs[:, 0], [row[_BOUNDS] for row in rows] if named else None


def convert_llmc(paths: Sequence[Path], target: Path, dtype: np.dtype, eos_id: int) -> None:
    """Writes the documents of files of llm.c, in their order, as the .bin `target`.

    Raises TokenError for another width of ids, a truncated file, or a first file that begins inside a document.
    """
    parts = [_llmc_ids(path, dtype) for path in paths]
    first = next((part for part in parts if len(part)), None)
    if first is not None and int(first[0]) != eos_id:
        raise TokenError(
            f"{paths[0]}: begins with id {int(first[0])}, inside a document. Give the files of a source from the first "
            "one on, in order, and the end-of-text token that they were made with."
        )
    with publish(str(target)) as file:
        for block in _moved(parts, dtype.type(eos_id)):
            file.write(np.ascontiguousarray(block).data)


def _moved(parts: Sequence[np.ndarray], eos: np.generic) -> Iterator[np.ndarray]:
    """Without the first end-of-text id, and with one at the end."""
    skip = 1
    for part in parts:
        for low in range(min(skip, len(part)), len(part), BLOCK_IDS):
            yield part[low : low + BLOCK_IDS]
        skip = 0 if len(part) else skip
    if not skip:
        yield np.array([eos])


def _llmc_ids(path: Path, dtype: np.dtype) -> np.ndarray:
    data = map_file(path)
    if data.size < LLMC_HEADER_BYTES or not is_llmc(path):
        raise TokenError(f"{path}: not a file of llm.c.")
    magic, version, count = np.frombuffer(data, "<i4", 3).tolist()
    width = next(size for size, kind in LLMC_KINDS.items() if kind == (magic, version))
    if width != dtype.itemsize:
        raise TokenError(
            f"{path}: its ids have {width} bytes, but those of this tokenizer's vocabulary are stored with "
            f"{dtype.itemsize}. Is this the tokenizer of these files?"
        )
    if data.size != LLMC_HEADER_BYTES + count * width:
        raise TokenError(f"{path}: {data.size:,} bytes, but its header says {count:,} ids: it was truncated.")
    return np.frombuffer(data, dtype, count, LLMC_HEADER_BYTES)
