"""Text to ids, exactly as `tokenizers` would, at the speed of the fastest encoder that agrees with it.

    encoder = Encoder(Path("tokens/tokenizer.json").read_bytes())
    encoder.begin(batch["text"])                    # self-check; call it at the start of each shard
    encoded = encoder.encode(batch["text"])
    encoded.ids, encoded.lengths                    # (tokens,) uint16 or uint32, (documents,) int64

`tokenizers` defines the ids. `gigatoken` reads the Arrow buffers without making Python strings and is some thirty times
faster; it is used when its ids equal the reference on documents of the shard at hand (`begin`), and one document of
every batch is compared as well. Where it cannot load the tokenizer or differs, the reference does the work and
`message` says why. Whoever encodes, the ids of a byte-level tokenizer are proven to stand for the text (`lossless.py`).

Text is text: a document that spells a special token out ("<|endoftext|>") gets the ids of its characters, never the
id of the special token.
"""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import awkward as ak
import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.kernels.buffers import string_views
from gristmill.tokenize.lossless import Pieces
from gristmill.tokenize.shards import TokenError, dtype_for
from gristmill.tokenize.tokenizer_json import (
    bytes_of_tokens,
    parse,
    specials,
    token_byte_lengths,
    unknown_id,
    vocabulary,
    without_specials,
)

__all__ = ["END_OF_TEXT", "Backend", "Encoded", "Encoder", "thread_encoder", "token_byte_lengths"]

Backend = Literal["auto", "gigatoken", "tokenizers"]
log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # what GPT-2 called it; the first special token of tokenizers trained here

# gigatoken remembers every word that it has met: 13 bytes of memory a byte of text on random words, measured. So the
# object is made anew when the process has grown by MAX_GROWTH_BYTES since it was made, at most every MIN_RECYCLE_BYTES
# of text, since something else may have grown; where memory cannot be read, every BLIND_RECYCLE_BYTES.
MAX_GROWTH_BYTES = 256 << 20
MIN_RECYCLE_BYTES = 16 << 20
BLIND_RECYCLE_BYTES = 32 << 20
CHECK_DOCUMENTS = 32  # compared at the start of a shard: about 0.03 s of the reference's time
CHECK_CHARS = 1_024  # of each of them, its first ones

# Strings that a splitting rule can get wrong: all of them are compared at the start of each shard.
PROBES = (
    "",
    " ",
    "\n",
    "  a  b   c\t\td \n\n\n  e\r\n\r\nf \u00a0 g\u3000\u2028h\x85i\x0b\x0cj   ",
    "don't DON'T we'LL I'm you\u2019re 'S '\u017f 'tis it's''s'",
    "0 12 123 1234 12345678 3.14 1,000 \u0664\u0665\u0666\u0667 \u00bd\u00b2 x1y22z333",
    "snake_case camelCase if (a[0] != b->c) { return &x; } // ----- ===== \\\\",
    "na\u00efve e\u0301 \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u65e5\u672c\u8a9e\u3002\u4e2d\u6587"
    " \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \U0001d518 \ufffd \ufeff\u200b \x1c\x1d\x1e\x7f",
    "<|endoftext|> <s>text</s><unk>[PAD]<|im_start|>",
)


@dataclass(frozen=True)
class Encoded:
    """The ids of some documents, one after the other, without end-of-text ids."""

    ids: np.ndarray  # (tokens,) uint16 or uint32
    lengths: np.ndarray  # (documents,) int64


class Encoder:
    """Encodes Arrow columns of text with one tokenizer. Not for use by several threads at once."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        eos_token: str = END_OF_TEXT,
        backend: Backend = "auto",
        parallel: bool = False,
    ) -> None:
        """tokenizer_json: the bytes of any tokenizer.json. parallel: let gigatoken use all cores of the machine.

        Raises TokenError when the file is not a tokenizer, lacks eos_token, or `backend="gigatoken"` cannot load it.
        """
        self.tokenizer_json = tokenizer_json
        self.backend: Backend = backend
        self.message = ""  # why the fast path is not used; empty while it is
        self._parallel = parallel
        config = parse(tokenizer_json)
        self._plain, self._reference = without_specials(config)
        self._describe(config, eos_token)
        pieces = bytes_of_tokens(config)
        self._pieces = None if pieces is None else Pieces(pieces)
        self._fast: Any = None
        self._since_recycled = self._memory_then = 0  # bytes of text; bytes of memory of the process
        if backend == "tokenizers":
            self.message = "The encoder is set to `tokenizers`."
        else:
            self._load_fast()

    def _describe(self, config: dict[str, Any], eos_token: str) -> None:
        vocab = vocabulary(config)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.dtype = dtype_for(self.vocab_size)
        unknown = unknown_id(config["model"])  # which text can get, special or not
        self.special_ids = {token: i for token, i in specials(config).items() if i != unknown}
        if eos_token not in vocab:
            known = ", ".join(repr(token) for token in self.special_ids) or "none"
            raise TokenError(
                f"The tokenizer has no token {eos_token!r} to end a document with; its special tokens are: {known}. "
                "Name one of them as eos_token."
            )
        self.eos_token, self.eos_id = eos_token, vocab[eos_token]
        self.special_ids.setdefault(eos_token, self.eos_id)
        self._reserved = np.zeros(self.vocab_size, bool)  # ids that no text may get
        self._reserved[list(self.special_ids.values())] = True

    @property
    def active(self) -> Literal["gigatoken", "tokenizers"]:
        """Which encoder does the work."""
        return "tokenizers" if self._fast is None else "gigatoken"

    def begin(self, texts: pa.Array | pa.ChunkedArray) -> None:
        """Compares both encoders on a sample of the documents given; falls back to the reference when they differ.

        Raises TokenError instead when the fast encoder was asked for by name.
        """
        if self.backend == "tokenizers":
            return
        if self._fast is None and not self._load_fast():
            return
        self._recycle()
        sample = pa.array([*PROBES, *_sample(texts)], pa.string())
        self._compare(sample)

    def encode(self, texts: pa.Array | pa.ChunkedArray) -> Encoded:
        """The ids of each document. Raises TokenError for null texts and for ids that no text may have."""
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks() if texts.num_chunks != 1 else texts.chunk(0)
        if texts.null_count:
            raise TokenError(f"{texts.null_count:,} of {len(texts):,} documents have no text (null). Drop them first.")
        if not len(texts):
            return Encoded(np.zeros(0, self.dtype), np.zeros(0, np.int64))
        ids, lengths = self._encode_fast(texts) if self._fast is not None else self._encode_reference(texts)
        row = 0 if self._pieces is None else self._pieces.first_difference(texts, ids, lengths)
        if row >= 0:
            self._check_ids(ids, lengths)
        if row >= 0 and self._pieces is not None:
            raise TokenError(
                f"Document {row} of the batch, which begins {texts[row].as_py()[:80]!r}, does not decode to its text "
                f"after {self.active} encoded it. Nothing was published. Please report the tokenizer and the text."
            )
        return Encoded(ids.astype(self.dtype, copy=False), lengths)

    def _check_ids(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Raises TokenError for an id outside the vocabulary or that of a special token."""
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise TokenError(
                f"Encoder {self.active} gave the id {int(ids.max())}, but the vocabulary ends at {self.vocab_size - 1}."
            )
        reserved = self._reserved[ids]
        if reserved.any():
            at = int(np.flatnonzero(reserved)[0])
            row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            name = next(token for token, i in self.special_ids.items() if i == int(ids[at]))
            raise TokenError(
                f"Document {row} of the batch was encoded with the special token {name!r} (id {int(ids[at])}). "
                "This tokenizer makes special tokens from ordinary text and cannot be used."
            )

    def _load_fast(self) -> bool:
        try:
            self._fast = gigatoken.Tokenizer.from_json(self._plain)
        except Exception as error:  # the extension raises RuntimeError, and PanicException for what it does not know
            self._refuse(f"gigatoken cannot load this tokenizer: {str(error).splitlines()[0]}")
            return False
        self._since_recycled, self._memory_then = 0, _memory_bytes()
        return True

    def _recycle(self) -> None:
        """Makes the fast encoder anew when its memory of words has grown too large."""
        if self._since_recycled < MIN_RECYCLE_BYTES:
            return
        now = _memory_bytes()
        if now - self._memory_then > MAX_GROWTH_BYTES or (not now and self._since_recycled >= BLIND_RECYCLE_BYTES):
            self._load_fast()

    def _refuse(self, why: str) -> None:
        self._fast = None
        if self.backend == "gigatoken":
            raise TokenError(f"{why} Use `tokenizers` or `auto` as the encoder.")
        if self.message != why:
            log.warning("%s The slower `tokenizers` encodes instead.", why)
        self.message = why

    def _compare(self, sample: pa.Array) -> None:
        fast, fast_lengths = self._encode_fast(sample, guard=False)
        reference, lengths = self._encode_reference(sample)
        if np.array_equal(fast, reference) and np.array_equal(fast_lengths, lengths):
            self.message = ""
            return
        row = _first_difference(fast, fast_lengths, reference, lengths)
        self._refuse(f"gigatoken and tokenizers differ on {sample[row].as_py()[:80]!r}.")

    def _encode_fast(self, texts: pa.Array, *, guard: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """(ids (tokens,) uint32, lengths (documents,) int64). guard: compare one document with the reference."""
        self._recycle()
        offsets, data = string_views(texts)
        self._since_recycled += int(offsets[-1] - offsets[0])
        out = self._fast.encode_batch(_awkward(offsets, data), parallel=self._parallel).layout
        ends = np.asarray(out.offsets.data, dtype=np.int64)
        ids = np.asarray(out.content.data)[ends[0] : ends[-1]]
        if guard:
            self._guard(texts, offsets, ids, ends - ends[0])
        return ids, np.diff(ends)

    def _guard(self, texts: pa.Array, offsets: np.ndarray, ids: np.ndarray, ends: np.ndarray) -> None:
        """Compares the shortest document over 200 bytes, or else the longest one, with the reference."""
        sizes = np.diff(offsets)
        row = int(np.argmin(np.where(sizes > 200, sizes, np.iinfo(np.int64).max)))
        if sizes[row] <= 200:
            row = int(np.argmax(sizes))
        expected, _ = self._encode_reference(texts.slice(row, 1))
        if not np.array_equal(ids[ends[row] : ends[row + 1]], expected):
            raise TokenError(
                f"gigatoken and tokenizers differ on the document that begins {texts[row].as_py()[:80]!r}, after they "
                "agreed at the start of the shard. Nothing was published. Set the encoder to `tokenizers`."
            )

    def _encode_reference(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        encodings = self._reference.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        parts = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        lengths = np.array([len(part) for part in parts], np.int64)
        return (np.concatenate(parts) if parts else np.zeros(0, np.uint32)), lengths


_of_thread = threading.local()


def thread_encoder(tokenizer_json: bytes, *, eos_token: str = END_OF_TEXT, backend: Backend = "auto") -> Encoder:
    """The encoder of this thread for a tokenizer: made once, since loading takes half a second, and kept until another
    one is asked for. `begin` makes it fit for the next shard."""
    key = (tokenizer_json, eos_token, backend)
    if getattr(_of_thread, "key", None) != key:
        _of_thread.encoder, _of_thread.key = Encoder(tokenizer_json, eos_token=eos_token, backend=backend), key
    encoder: Encoder = _of_thread.encoder
    return encoder


def _awkward(offsets: np.ndarray, data: np.ndarray) -> ak.Array:
    """An Arrow string column as gigatoken takes it, not copied."""
    characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), characters, parameters={"__array__": "string"})
    return ak.Array(strings)


def _memory_bytes() -> int:
    """Resident memory of this process; 0 where it cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return 0


def _sample(texts: pa.Array | pa.ChunkedArray) -> list[str]:
    """The first CHECK_CHARS characters of evenly spaced documents."""
    rows = np.unique(np.linspace(0, max(len(texts) - 1, 0), CHECK_DOCUMENTS).astype(np.int64))
    some = texts.take(pa.array(rows if len(texts) else rows[:0]))
    return [text for text in pc.utf8_slice_codeunits(some, 0, CHECK_CHARS).to_pylist() if text is not None]


def _first_difference(a: np.ndarray, a_lengths: np.ndarray, b: np.ndarray, b_lengths: np.ndarray) -> int:
    """The first document whose ids differ."""
    a_ends, b_ends = np.cumsum(a_lengths), np.cumsum(b_lengths)
    for row in range(len(a_ends)):
        left = a[a_ends[row] - a_lengths[row] : a_ends[row]]
        if not np.array_equal(left, b[b_ends[row] - b_lengths[row] : b_ends[row]]):
            return row
    return 0
