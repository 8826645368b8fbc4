"""Texts that every Python installation has, small tokenizers trained on them, and a folder of token shards."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer

from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train
from gristmill.tokenize.write import write_manifest, write_shard

NASTY = (
    "日本語のテキスト。これは改行\nと　全角スペース。" * 20,
    "Привет, мир! Ελληνικά; हिन्दी ไทย 한국어 العربية עברית " * 20,
    "\u00a0 x\u3000\t\r\n\r\n  y   \n\n\n",
    "ends with an end <|endoftext|> of text<|endoftext|>",
    "a" * 20_000,
    " " * 5_000 + "x",
    "1234567 12 ٣٤٥٦ ½ 3.14",
    "don't DON'T 'ſ you’re",
    "\x01\x1c\x1d\x7f\ufffd\ufeff",
    "👨‍👩‍👧 🇫🇷 𝔘𝔫𝔦",
)


@pytest.fixture(scope="session")
def real_texts() -> list[str]:
    """Modules of the standard library and descriptions of installed packages, then texts that are easy to get wrong."""
    folder = Path(os.__file__).parent
    sources = [path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py"))[:40]]
    descriptions = sorted(
        str(distribution.metadata["Name"]) + "\n" + str(distribution.metadata.get_payload() or "")
        for distribution in importlib.metadata.distributions()
    )[:25]
    texts = [text.replace("\0", "\ufffd")[:12_000] for text in (*sources, *descriptions)]
    return [text.encode("utf-8", "replace").decode() for text in texts] + list(NASTY)


@pytest.fixture(scope="session")
def tokenizers_by_split(real_texts: list[str]) -> dict[tuple[str, bool], bytes]:
    """(split, single_digits) -> tokenizer.json, vocabulary 1,200."""
    out = {}
    for split in ("gpt2", "cl100k", "llama3"):
        for single_digits in (False, True):
            settings = TokenizerSettings(
                vocab_size=1_200, split=split, single_digits=single_digits, max_bytes=150_000, max_chunk_chars=2_000
            )
            out[split, single_digits] = tokenizer_bytes(train({"docs": [pa.array(real_texts)]}, settings))
    return out


@pytest.fixture(scope="session")
def tokenizer_json(tokenizers_by_split: dict[tuple[str, bool], bytes]) -> bytes:
    return tokenizers_by_split["llama3", False]


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., pa.RecordBatch]:
    def make(texts: Sequence[str | None], source: str = "docs", prefix: str = "d") -> pa.RecordBatch:
        ids = [f"{prefix}{i}" for i in range(len(texts))]
        columns = [
            pa.array(ids, pa.string()),
            pa.array([source] * len(texts), pa.string()),
            pa.array(texts, pa.string()),
        ]
        return pa.RecordBatch.from_arrays(columns, names=["doc_id", "source", "text"])

    return make


@pytest.fixture
def token_folder(
    tmp_path: Path, tokenizer_json: bytes, real_texts: list[str], make_batch: Callable[..., pa.RecordBatch]
) -> Path:
    """Three shards of two sources, 20 % held out."""
    folder, encoder = tmp_path / "tokens", Encoder(tokenizer_json)
    shards = [
        write_shard([make_batch(real_texts[:20], prefix="a")], encoder, str(folder), "part-00000", 0.2),
        write_shard([make_batch(real_texts[20:40], prefix="b")], encoder, str(folder), "part-00001", 0.2),
        write_shard([make_batch(real_texts[40:], "web", "c")], encoder, str(folder), "part-00002", 0.2),
    ]
    write_manifest(str(folder), [info for infos in shards for info in infos], encoder, holdout_share=0.2)
    return folder


@pytest.fixture(scope="session")
def wide_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer_json: bytes,
    real_texts: list[str],
    make_batch: Callable[..., pa.RecordBatch],
) -> Path:
    """One shard of a tokenizer of 67,200 ids, whose first document is "a<w65999>b<w7>"; not to be changed."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.add_tokens([AddedToken(f"<w{i}>", normalized=False) for i in range(66_000)])
    encoder, folder = Encoder(tokenizer.to_str().encode()), tmp_path_factory.mktemp("wide")
    batch = make_batch(["a<w65999>b<w7>", *real_texts[:8]])
    write_manifest(str(folder), write_shard([batch], encoder, str(folder), "part-00000"), encoder)
    return folder
