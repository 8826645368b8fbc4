"""What a tokenizer.json says: its special tokens, the bytes of each token, and how to encode text without specials.

The functions take the bytes of a file; those that take `config` take what `parse` makes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer

from gristmill.tokenize.shards import TokenError


def special_tokens(tokenizer_json: bytes) -> dict[str, int]:
    """Text of each special token -> id, in the order of ids."""
    return specials(parse(tokenizer_json))


def plain_tokenizer(tokenizer_json: bytes) -> bytes:
    """The same tokenizer without special tokens: what encodes a document's text, all of it, and nothing more.

    Truncation, padding and templates go as well. Ids of all other tokens stay what they were. Raises TokenError when
    the bytes are not a tokenizer.json.
    """
    return without_specials(parse(tokenizer_json))[0]


def parse(tokenizer_json: bytes) -> dict[str, Any]:
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


def specials(config: dict[str, Any]) -> dict[str, int]:
    added = [token for token in config.get("added_tokens") or [] if token["special"]]
    return {token["content"]: int(token["id"]) for token in sorted(added, key=lambda token: token["id"])}


def vocabulary(config: dict[str, Any]) -> dict[str, int]:
    """Every token -> id, special and added ones included."""
    pieces = config["model"]["vocab"]
    vocab = dict(pieces) if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}
    return vocab | {token["content"]: int(token["id"]) for token in config.get("added_tokens") or []}


def without_specials(config: dict[str, Any]) -> tuple[bytes, Tokenizer]:
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


def unknown_id(model: dict[str, Any]) -> int | None:
    """The id that a model gives to what it does not know, if it has one."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    return int(model["vocab"][token]) if token is not None and token in model["vocab"] else None


def token_byte_lengths(tokenizer_json: bytes) -> np.ndarray | None:
    """How many bytes of text each id stands for: (vocab,) int64, 0 for special tokens; None where ids do not stand
    for fixed bytes (models that are not byte-level, or that normalise)."""
    pieces = token_bytes(tokenizer_json)
    return None if pieces is None else np.array([len(piece) for piece in pieces], np.int64)


def token_bytes(tokenizer_json: bytes) -> list[bytes] | None:
    """The bytes of text that each id stands for, empty for special tokens; None where there are no such bytes."""
    return bytes_of_tokens(parse(tokenizer_json))


def bytes_of_tokens(config: dict[str, Any]) -> list[bytes] | None:
    model = config["model"]
    spell = _spelling(config)
    others = [token for token in config.get("added_tokens") or [] if not token["special"]]
    swallows = any(token["lstrip"] or token["rstrip"] for token in others)  # white space around them
    known = model.get("type") in ("BPE", "Unigram")
    if spell is None or swallows or config.get("normalizer") is not None or not known:
        return None
    special = specials(config)
    added = {token["content"]: token["id"] for token in others}
    pieces = model["vocab"]
    vocab: dict[str, int] = pieces if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}
    out = [b""] * (max([*vocab.values(), *special.values(), *added.values()]) + 1)
    reserved = {*special.values(), *([model["unk_id"]] if model.get("unk_id") is not None else ())}
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
