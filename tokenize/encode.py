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
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import awkward as ak
import gigatoken
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from gristmill.stages.kernels.buffers import string_views
from gristmill.tokenize.lossless import Pieces
from gristmill.tokenize.shards import TokenError, dtype_for

Backend = Literal["auto", "gigatoken", "tokenizers"]
log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # what GPT-2 called it; the first special token of tokenizers trained here

# gigatoken remembers every word that it has met: 7 bytes of memory a byte of text on random words, measured.
RECYCLE_BYTES = 64 << 20  # of text; then the object is made anew
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
        config = _parse(tokenizer_json)
        self._plain, self._reference = _without_specials(config)
        self._describe(config, eos_token)
        pieces = _token_bytes(config)
        self._pieces = None if pieces is None else Pieces(pieces)
        self._fast: Any = None
        self._since_recycled = 0  # bytes
        if backend == "tokenizers":
            self.message = "The encoder is set to `tokenizers`."
        else:
            self._load_fast()

    def _describe(self, config: dict[str, Any], eos_token: str) -> None:
        vocab = _vocabulary(config)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.dtype = dtype_for(self.vocab_size)
        unknown = _unknown_id(config["model"])  # which text can get, special or not
        self.special_ids = {token: i for token, i in _special_tokens(config).items() if i != unknown}
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
        self._since_recycled = 0
        return True

    def _recycle(self) -> None:
        if self._since_recycled >= RECYCLE_BYTES:
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


def special_tokens(tokenizer_json: bytes) -> dict[str, int]:
    """Text of each special token -> id, in the order of ids."""
    return _special_tokens(_parse(tokenizer_json))


def plain_tokenizer(tokenizer_json: bytes) -> bytes:
    """The same tokenizer without special tokens: what encodes a document's text, all of it, and nothing more.

    Truncation, padding and templates go as well. Ids of all other tokens stay what they were. Raises TokenError when
    the bytes are not a tokenizer.json.
    """
    return _without_specials(_parse(tokenizer_json))[0]


def _parse(tokenizer_json: bytes) -> dict[str, Any]:
    try:
        config = orjson.loads(tokenizer_json)
    except ValueError as error:
        raise TokenError(f"Not a tokenizer.json that `tokenizers` can read: {error}") from error
    if not isinstance(config, dict) or "model" not in config:
        raise TokenError("Not a tokenizer.json that `tokenizers` can read: it has no model.")
    return config


def _load(plain: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(plain.decode())
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenError(f"Not a tokenizer.json that `tokenizers` can read: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, int]:
    added = [token for token in config.get("added_tokens") or [] if token["special"]]
    return {token["content"]: int(token["id"]) for token in sorted(added, key=lambda token: token["id"])}


def _vocabulary(config: dict[str, Any]) -> dict[str, int]:
    """Every token -> id, special and added ones included."""
    pieces = config["model"]["vocab"]
    vocab = dict(pieces) if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}
    return vocab | {token["content"]: int(token["id"]) for token in config.get("added_tokens") or []}


def _without_specials(config: dict[str, Any]) -> tuple[bytes, Tokenizer]:
    """See `plain_tokenizer`; the bytes and what `tokenizers` makes of them."""
    model = dict(config["model"])
    special = {token["content"] for token in config.get("added_tokens") or [] if token["special"]}
    # Byte-level BPE reaches a token through merges only, so a special token in its vocabulary is out of reach.
    # Other models look pieces up, so the piece gets a name that no text can have (NUL is not text).
    if model.get("type") != "BPE" or model.get("ignore_merges"):
        _rename_pieces(model, special - {model.get("unk_token")})
    base = config | {"truncation": None, "padding": None, "post_processor": None, "model": model}
    added = config.get("added_tokens") or []
    others = [token for token in added if not token["special"]]
    hidden = [token | {"content": f"\0{token['content']}"} if token["special"] else token for token in added]
    # `tokenizers` numbers added tokens in a row, so without the special ones the others may get wrong ids.
    for tokens in (others, hidden):
        plain = orjson.dumps(base | {"added_tokens": tokens})
        tokenizer = _load(plain)
        if all(tokenizer.token_to_id(token["content"]) == token["id"] for token in others):
            return plain, tokenizer
    raise TokenError("The added tokens of this tokenizer cannot be told apart from its special tokens.")


def _rename_pieces(model: dict[str, Any], names: set[str]) -> None:
    """Puts a NUL before the pieces named, in the model given. The unknown piece of a Unigram model keeps its name."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {(f"\0{piece}" if piece in names else piece): i for piece, i in vocab.items()}
    else:
        unknown = model.get("unk_id")
        model["vocab"] = [
            [f"\0{piece}" if piece in names and i != unknown else piece, score]
            for i, (piece, score) in enumerate(vocab)
        ]


def _unknown_id(model: dict[str, Any]) -> int | None:
    """The id that a model gives to what it does not know, if it has one."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    return int(model["vocab"][token]) if token is not None and token in model["vocab"] else None


def _awkward(offsets: np.ndarray, data: np.ndarray) -> ak.Array:
    """An Arrow string column as gigatoken takes it, not copied."""
    characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
    strings = ak.contents.ListOffsetArray(ak.index.Index64(offsets), characters, parameters={"__array__": "string"})
    return ak.Array(strings)


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


def token_byte_lengths(tokenizer_json: bytes) -> np.ndarray | None:
    """How many bytes of text each id stands for: (vocab,) int64, 0 for special tokens; None where ids do not stand
    for fixed bytes (models that are not byte-level, or that normalise)."""
    pieces = token_bytes(tokenizer_json)
    return None if pieces is None else np.array([len(piece) for piece in pieces], np.int64)


def token_bytes(tokenizer_json: bytes) -> list[bytes] | None:
    """The bytes of text that each id stands for, empty for special tokens; None where there are no such bytes."""
    return _token_bytes(_parse(tokenizer_json))


def _token_bytes(config: dict[str, Any]) -> list[bytes] | None:
    model = config["model"]
    spell = _spelling(config)
    others = [token for token in config.get("added_tokens") or [] if not token["special"]]
    swallows = any(token["lstrip"] or token["rstrip"] for token in others)  # white space around them
    if spell is None or swallows or config.get("normalizer") is not None or model.get("type") != "BPE":
        return None
    special = _special_tokens(config)
    added = {token["content"]: token["id"] for token in others}
    vocab: dict[str, int] = model["vocab"]
    out = [b""] * (max([*vocab.values(), *special.values(), *added.values()]) + 1)
    reserved = set(special.values())
    try:
        for piece, i in vocab.items():
            out[i] = b"" if i in reserved else spell(piece)
    except KeyError:  # a character that is no byte's name
        return None
    for text, i in added.items():
        out[i] = text.encode()
    return out


def _spelling(config: dict[str, Any]) -> Callable[[str], bytes] | None:
    """How a piece is turned into bytes by the decoder: of bytes' names (`ByteLevel`), or as it is, but for pieces like
    <0x0A> (`ByteFallback`, `Fuse`). None for other decoders; the function raises KeyError for an unknown name."""
    decoder = config.get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        alphabet = _byte_alphabet()
        adds_a_space = b'"add_prefix_space":true' in orjson.dumps(config.get("pre_tokenizer"))
        return None if adds_a_space else lambda piece: bytes(alphabet[char] for char in piece)
    steps = [step["type"] for step in decoder.get("decoders") or []]
    if steps != ["ByteFallback", "Fuse"] or not config["model"].get("byte_fallback"):
        return None
    named = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
    return lambda piece: named[piece] if piece in named else piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's names of the 256 bytes: printable ones stand for themselves, the others for code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
