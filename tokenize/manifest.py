"""What token shards on disk share: the names, the schema of an index, and the manifest that lists them all.

    manifest = TokenManifest.opened(Path("out/run/tokens/shards.json").read_bytes(), "shards.json")
    manifest.shards[0].tokens

`shards.py` says what the files are.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import xxhash
from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION = 1
MANIFEST_FILE = "shards.json"
TOKENIZER_FILE = "tokenizer.json"
MAX_UINT16_VOCAB = 1 << 16  # the largest vocabulary whose ids fit in uint16

INDEX_SCHEMA = pa.schema(
    [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("start", pa.uint64(), nullable=False),  # position of the first id in the .bin, in ids
        pa.field("length", pa.uint32(), nullable=False),  # ids, with the end-of-text id
        pa.field("bytes", pa.uint32(), nullable=False),  # UTF-8 bytes of the text
    ]
)

Split = Literal["train", "holdout"]
# The order of documents: as they came; by a keyed hash within each shard of documents; by one over all of a source.
Shuffle = Literal["none", "within_shard", "documents"]


class TokenError(ValueError):
    """Token files that cannot be written or read; the message says which, what is wrong, and what to do."""


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype of ids below vocab_size: little-endian uint16 up to 65,536 ids, else uint32."""
    return np.dtype("<u2") if vocab_size <= MAX_UINT16_VOCAB else np.dtype("<u4")


class ShardInfo(BaseModel):
    """One pair of files and what must be true of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # "part-00000"; its files are name.bin and name.idx
    source: str
    split: Split
    documents: int
    tokens: int  # with one end-of-text id a document
    bytes: int  # UTF-8 bytes of the texts
    idx_bytes: int  # size of the .idx file; that of the .bin follows from tokens and dtype
    bin_xxh3: str  # xxh3-128 of the whole file, hex
    idx_xxh3: str
    key: str = ""  # identity of the shard of documents that was tokenized, from its ledger

    @property
    def bin(self) -> str:
        return f"{self.name}.bin"

    @property
    def idx(self) -> str:
        return f"{self.name}.idx"


class TokenManifest(BaseModel):
    """shards.json: everything that the shards of a folder share, and the list of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = FORMAT_VERSION
    dtype: Literal["uint16", "uint32"]
    vocab_size: int  # every id is below it
    eos_id: int  # ends every document
    special_ids: dict[str, int] = Field(default_factory=dict)  # special token -> id, but for the unknown token
    tokenizer_xxh3: str  # xxh3-128 of tokenizer.json, hex
    holdout_share: float = 0.0  # of documents, by hash of their text
    plain_text: bool = True  # no document holds a special id but its last; may be false for files of other programs
    shuffle: Shuffle = "none"
    seed: int | None = None  # of the shuffle
    shards: list[ShardInfo] = Field(default_factory=list)
    digest: str = ""  # xxh3-128 of all the above

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")

    def sealed(self) -> bytes:
        """The bytes to publish, with the digest set."""
        body = {**self._body(), "digest": self._digest()}
        return orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n"

    @classmethod
    def opened(cls, data: bytes, where: str) -> TokenManifest:
        """Reads what `sealed` wrote. Raises TokenError when it was changed since, or is of another format."""
        try:
            raw = orjson.loads(data)
            version = raw.get("version") if isinstance(raw, dict) else None
            if version != FORMAT_VERSION:
                raise TokenError(
                    f"{where}: format version {version!r}; this program reads version {FORMAT_VERSION}. "
                    "Tokenize again, or use the version of gristmill that wrote it."
                )
            manifest = cls.model_validate(raw)
        except TokenError:
            raise
        except ValueError as error:
            raise TokenError(f"{where}: not a manifest of token shards: {error}") from error
        if manifest.digest != manifest._digest():
            raise TokenError(
                f"{where}: the manifest was changed after it was written (its digest does not match). Tokenize again."
            )
        if manifest.numpy_dtype != dtype_for(manifest.vocab_size):
            raise TokenError(
                f"{where}: dtype {manifest.dtype} does not go with a vocabulary of {manifest.vocab_size:,}; "
                f"{dtype_for(manifest.vocab_size).name} does. Tokenize again."
            )
        return manifest

    def _digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(orjson.dumps(self._body(), option=orjson.OPT_SORT_KEYS))

    def _body(self) -> dict[str, Any]:
        return self.model_dump(exclude={"digest"} | ({"shuffle", "seed"} if self.shuffle == "none" else set()))
