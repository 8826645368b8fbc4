"""Text in SentencePiece's pieces, learned from the model's own training text: `tokenize: sentencepiece` of a model.

CCNet (Wenzek et al. 2020, section 3.4) gives its language models pieces of a vocabulary that SentencePiece (Kudo and
Richardson 2018) learned for each language; its Makefile asks for 65,536 of them. Words that the model has not seen
then fall into pieces that it has, and scripts without spaces into more than single characters.

Text is normalised as for words (`kernels/normalise.py`), but only white space separates. Training and scoring cut with
the same file, which lies beside the model. The unigram trainer gives the same bytes for the same text as long as it has
one thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from copy import copy
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece

from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError

UNKNOWN = "\u2047"  # stands for characters outside the vocabulary; SentencePiece's own sign for them
_SPACE = "\u2581"  # SentencePiece's sign for a space
_COVERAGE = 0.9995  # of the characters of the text; sentencepiece's default
_MAX_LINE_BYTES = 1 << 20  # a longer one is not learned from
_EXCERPT_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 22


def learn(lines: Iterable[str], vocabulary: int) -> bytes:
    """A unigram model of at most `vocabulary` pieces from normalised lines -> the bytes of its file.

    Raises ModelError where the lines do not make one.
    """
    out = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(_plain(line) for line in lines), model_writer=out, model_type="unigram",
            vocab_size=vocabulary, hard_vocab_limit=False, character_coverage=_COVERAGE,
            normalization_rule_name="identity", max_sentence_length=_MAX_LINE_BYTES, bos_id=-1, eos_id=-1,
            num_threads=1, minloglevel=3,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        raise ModelError(
            f"SentencePiece cannot learn {vocabulary:,} pieces from this text: {error} Give it more text, or another "
            "`vocabulary`."
        ) from error
    return out.getvalue()


class Cutter:
    """A SentencePiece model: cuts text into pieces."""

    def __init__(self, model: bytes) -> None:
        """Raises ModelError for bytes that are no model."""
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ModelError(f"The SentencePiece model cannot be read: {error}") from error
        pieces = [self._model.id_to_piece(i) for i in range(self._model.vocab_size())]
        pieces[self._model.unk_id()] = UNKNOWN
        self._pieces = pa.array(pieces, pa.string())

    @property
    def vocabulary(self) -> int:
        return len(self._pieces)

    def __call__(self, texts: pa.Array) -> Pieces:
        """(n,) strings -> their pieces."""
        return self.cut(Pieces(texts, apart=False))

    def cut(self, text: Pieces) -> Pieces:
        """Normalised text, only white space separating -> the same lines in pieces."""
        data, ends, counts = self.lines(text.data)
        first = np.concatenate([[0], np.cumsum(text.lines)])  # line at which each document begins
        before = np.concatenate([[0], np.cumsum(counts)])  # pieces before each line
        out = copy(text)
        out.data = data
        out.ends = ends[first]
        out.pieces = np.diff(before[first])
        return out

    def lines(self, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """data (m,) uint8, whole lines -> (lines of pieces with spaces between (k,) uint8, ends (n + 1,) int64 of the
        lines in it, pieces (n,) int64 of each)."""
        lines = _plain(data.tobytes().decode()).split("\n")[:-1]
        if not lines:
            return np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.int64)
        ids = self._model.encode(lines, out_type=int, num_threads=1)
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.fromiter((i for line in ids for i in line), np.int64, int(counts.sum()))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        pieces = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), self._pieces.take(pa.array(flat)))
        joined = pc.binary_join_element_wise(pc.binary_join(pieces, " "), "", "\n")
        _, ends, out = joined.buffers()
        ends_of_lines = np.frombuffer(ends, np.int32)[: len(lines) + 1]
        return np.frombuffer(out, np.uint8)[: ends_of_lines[-1]].copy(), ends_of_lines.astype(np.int64), counts


def _plain(text: str) -> str:
    """Text in which SentencePiece's sign for a space is no space."""
    return text.replace(_SPACE, "_")


def load(path: Path) -> Cutter:
    """The model in a file. Raises ModelError where it is missing or is none."""
    try:
        return Cutter(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}. Delete the model's folder and train it again.") from error


def excerpt(path: Path, max_bytes: int) -> Iterator[str]:
    """Lines of a text file, in order: all of them, or about max_bytes in excerpts evenly spread over it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= max_bytes:
            for line in file:
                yield line[:-1].decode()
            return
        count = max(1, max_bytes // _EXCERPT_BYTES)
        for i in range(count):
            yield from _lines_at(file, size * i // count)


def _lines_at(file: BinaryIO, start: int) -> Iterator[str]:
    """Whole lines after `start` that begin within an excerpt's length."""
    file.seek(start)
    if start:
        file.readline()  # the end of a line that began before
    while file.tell() < start + _EXCERPT_BYTES and (line := file.readline()):
        yield line[:-1].decode()


def blocks(path: Path) -> Iterator[np.ndarray]:
    """A text file in blocks of whole lines, (m,) uint8."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield np.frombuffer(block + file.readline(), np.uint8)
