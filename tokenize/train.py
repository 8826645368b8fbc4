"""Learns a tokenizer from documents, within a bound on memory, the same one every time.

    settings = TokenizerSettings(vocab_size=32_000, split="llama3", weights={"web": 3, "code": 1})
    tokenizer = train({"web": web_texts, "code": code_texts}, settings)     # values: Arrow arrays of strings
    Path("tokenizer.json").write_bytes(tokenizer_bytes(tokenizer))

The text is a sample of documents (`sample.py`): at most `max_bytes` in all, shared between the sources by weight,
and at most `max_chunk_chars` characters of each document, so that no document dominates. What is learned does not
depend on the order of documents or shards.

Three models, all without losses: `byte_bpe` merges bytes (GPT-2, Llama 3); `bpe` merges characters, and spells those
that are not in its alphabet in bytes (Llama 2, but with spaces as they are instead of U+2581, which would make two
texts one); `unigram` chooses the likeliest pieces of each word (Kudo 2018; `unigram.py`), and spells in bytes as well.

Special tokens come last in the vocabulary: no text can be encoded to one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import orjson
import pyarrow as pa
from pydantic import Field, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from gristmill.stages.documents import Settings
from gristmill.tokenize.encode import END_OF_TEXT
from gristmill.tokenize.sample import sample
from gristmill.tokenize.shards import TokenError
from gristmill.tokenize.unigram import from_sentencepiece, learn_unigram

Split = Literal["gpt2", "cl100k", "llama3"]
Model = Literal["byte_bpe", "bpe", "unigram"]

# The expression of GPT-2, which `ByteLevel` carries in itself.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The expression of tiktoken's cl100k_base as it was published, and of Llama 3's tokenizer.json: they are the same.
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# With single digits it is the one of Qwen 2.
CL100K_SINGLE_DIGITS = CL100K_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

BYTES = 256  # the alphabet of a byte-level model
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(BYTES))  # what sentencepiece calls them
CHARACTER_COVERAGE = (
    0.9995  # of the characters of the sample; rarer ones are spelled in bytes (sentencepiece's default)
)
# `tokenizers` counts pairs in 32 bits (huggingface/tokenizers pull request 2057); no count exceeds the bytes of text.
MAX_SAMPLE_BYTES = 2_000_000_000
# Bytes of text a second, and of memory a byte, with a vocabulary of 32,000 on one core of a shared EPYC. BPE:
# tokenizers 0.23, 40 MB of documents, 2.2 MB/s and 15 bytes. Unigram: sentencepiece 0.2.3, 30 MB, 0.38 MB/s and 20.
TRAIN_BYTES_PER_SECOND: dict[Model, int] = {"byte_bpe": 2_200_000, "bpe": 2_200_000, "unigram": 380_000}
TRAIN_MEMORY_PER_BYTE: dict[Model, int] = {"byte_bpe": 16, "bpe": 16, "unigram": 24}


class TokenizerSettings(Settings):
    """What to train, and on how much text."""

    vocab_size: int = Field(32_000, le=1 << 24)  # ids in all, special tokens included; small corpora give fewer
    model: Model = "byte_bpe"
    split: Split = "llama3"  # how text is cut into words before merging; see `pre_tokenizer`
    single_digits: bool = False  # every digit is a token of its own
    special_tokens: tuple[str, ...] = (END_OF_TEXT,)  # the first one ends documents
    min_frequency: int = Field(2, ge=1)  # occurrences in the sample that a pair needs to be merged; not for unigram
    max_bytes: int = Field(100_000_000, gt=0, le=MAX_SAMPLE_BYTES)  # of UTF-8 text, over all sources
    max_chunk_chars: int = Field(50_000, gt=0)  # characters that count of one document, its first ones
    weights: dict[str, float] = Field(default_factory=dict)  # source -> share of max_bytes; empty: by size

    @model_validator(mode="after")
    def _sensible(self) -> TokenizerSettings:
        more = {"byte_bpe": 0, "bpe": 1, "unigram": 2}  # the space; a character, and the unknown piece
        least = BYTES + len(self.special_tokens) + more[self.model]
        if self.vocab_size < least:
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small: {BYTES} bytes and {len(self.special_tokens)} special "
                f"tokens need {least} with model {self.model}."
            )
        if not self.special_tokens or len(set(self.special_tokens)) != len(self.special_tokens):
            raise ValueError("special_tokens must name at least one token, to end documents with, and none twice.")
        if any(not token for token in self.special_tokens):
            raise ValueError("A special token cannot be empty.")
        if any(not 0 <= weight < float("inf") for weight in self.weights.values()) or (
            self.weights and sum(self.weights.values()) == 0
        ):
            raise ValueError("weights are numbers from 0 up, and one of them must be above 0.")
        return self

    @property
    def eos_token(self) -> str:
        return self.special_tokens[0]


def train(
    texts: Mapping[str, Iterable[pa.Array]], settings: TokenizerSettings, *, holdout_share: float = 0.0
) -> Tokenizer:
    """Trains on a sample of the documents of each source. texts: source -> Arrow arrays of strings, read once.

    holdout_share: that of `write_shard`; held-out documents are left out here too. Raises TokenError when there is
    no text, or when the weights do not name the sources.
    """
    chosen = training_sample(texts, settings, holdout_share=holdout_share)
    if not any(chosen.values()):
        raise TokenError(f"There is no text to train a tokenizer on (sources: {', '.join(texts) or 'none'}).")
    texts_of = list(chosen.values())
    tokenizer = _TRAINERS[settings.model](texts_of, settings)
    for token in settings.special_tokens:
        if tokenizer.token_to_id(token) is not None:
            raise TokenError(f"The special token {token!r} is an ordinary piece of this corpus. Choose a longer name.")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in settings.special_tokens]
    )
    return tokenizer


def _byte_level(texts: list[list[bytes]], settings: TokenizerSettings) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=settings.split == "llama3"))
    tokenizer.pre_tokenizer = pre_tokenizer(settings.split, single_digits=settings.single_digits)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(settings.special_tokens),
        min_frequency=settings.min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_strings(texts), trainer)
    return tokenizer


def _byte_fallback(texts: list[list[bytes]], settings: TokenizerSettings) -> Tokenizer:
    """BPE over characters. The pieces of bytes come first; merges cannot reach them, so no text is taken for one."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = _expression(settings.split, single_digits=settings.single_digits)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    rare = {ord(char): " " for char in _rare_characters(texts, settings)}
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size - len(settings.special_tokens),
        min_frequency=settings.min_frequency,
        special_tokens=list(BYTE_PIECES),
        show_progress=False,
    )
    # rare characters are out of the way, so that the trainer's alphabet does not hold them
    tokenizer.train_from_iterator(([text.translate(rare) for text in part] for part in _strings(texts)), trainer)
    # the trainer lists the byte pieces as special tokens, and then their names in a text would be taken for bytes
    config = orjson.loads(tokenizer.to_str())
    return Tokenizer.from_str(orjson.dumps(config | {"added_tokens": []}).decode())


def _unigram(texts: list[list[bytes]], settings: TokenizerSettings) -> Tokenizer:
    cuts = _expression(settings.split, single_digits=settings.single_digits)
    room = settings.vocab_size - len(settings.special_tokens)
    return from_sentencepiece(learn_unigram(_strings(texts), room, _rare_characters(texts, settings), cuts), cuts)


_TRAINERS: dict[Model, Callable[[list[list[bytes]], TokenizerSettings], Tokenizer]] = {
    "byte_bpe": _byte_level,
    "bpe": _byte_fallback,
    "unigram": _unigram,
}


def _rare_characters(texts: list[list[bytes]], settings: TokenizerSettings) -> list[str]:
    """Characters beyond CHARACTER_COVERAGE of the text, or beyond a half of the vocabulary; of equally common ones,
    the later in the order of code points are rarer."""
    counts: Counter[str] = Counter()
    for part in _strings(texts):
        for text in part:
            counts.update(text)
    room = min(settings.vocab_size // 2, settings.vocab_size - len(settings.special_tokens) - BYTES - 2)
    left, kept = CHARACTER_COVERAGE * counts.total(), 0
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for _, count in ordered:
        if left <= 0 or kept >= room:
            break
        left -= count
        kept += 1
    return [char for char, _ in ordered[kept:] if char != " "]  # they become spaces in the trainer's text


def training_sample(
    texts: Mapping[str, Iterable[pa.Array]], settings: TokenizerSettings, *, holdout_share: float = 0.0
) -> dict[str, list[bytes]]:
    """What `train` learns from: source -> UTF-8 texts. Without weights, the sources are sampled as one corpus.

    A source that has less text than its share gives all of it; the others do not get more.
    """
    if not settings.weights:
        together = (array for name in texts for array in texts[name])
        return {"": sample(together, settings.max_bytes, settings.max_chunk_chars, holdout_share)}
    if set(settings.weights) != set(texts):
        raise TokenError(
            f"The weights of the tokenizer name {', '.join(sorted(settings.weights))}, but the sources are "
            f"{', '.join(sorted(texts)) or 'none'}. Give every source a weight; 0 leaves it out."
        )
    total = sum(settings.weights.values())
    shares = {name: int(settings.max_bytes * settings.weights[name] / total) for name in sorted(texts)}
    return {
        name: sample(texts[name], share, settings.max_chunk_chars, holdout_share)
        for name, share in shares.items()
        if share > 0
    }


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.json to publish; the same tokenizer gives the same bytes."""
    return str(tokenizer.to_str(pretty=True)).encode()


def estimate(corpus_bytes: int, settings: TokenizerSettings) -> tuple[int, float]:
    """(bytes of memory, seconds on one core) that training takes at most on a corpus of that size. A rough figure."""
    sampled = min(corpus_bytes, settings.max_bytes)
    return sampled * TRAIN_MEMORY_PER_BYTE[settings.model], sampled / TRAIN_BYTES_PER_SECOND[settings.model]


def forecast(corpus_bytes: int, settings: TokenizerSettings) -> str:
    """What training will take, in a sentence for people."""
    memory, seconds = estimate(corpus_bytes, settings)
    sampled = min(corpus_bytes, settings.max_bytes)
    return (
        f"learns {settings.vocab_size:,} tokens from {sampled / 1e6:,.1f} MB of {corpus_bytes / 1e6:,.1f} MB of text: "
        f"about {memory / 1e6:,.0f} MB of memory and {seconds:,.0f} s after reading"
    )


def pre_tokenizer(split: Split, *, single_digits: bool) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging, as published: `gpt2` by OpenAI in 2019 (with single digits as StarCoder does),
    `cl100k` by OpenAI in 2022, `llama3` by Meta in 2024 (the expression of cl100k; whole words of the vocabulary are
    looked up before merging)."""
    if split == "gpt2":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not single_digits:
            return byte_level
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = CL100K_SINGLE_DIGITS if single_digits else CL100K_PATTERN
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _expression(split: Split, *, single_digits: bool) -> pre_tokenizers.PreTokenizer:
    """The same cuts without names for bytes."""
    pattern = GPT2_PATTERN if split == "gpt2" else CL100K_SINGLE_DIGITS if single_digits else CL100K_PATTERN
    cuts = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    if split == "gpt2" and single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cuts])
    return cuts


def _strings(sources: Iterable[list[bytes]]) -> Iterator[list[str]]:
    """Texts in groups, as `tokenizers` likes to be fed."""
    for texts in sources:
        for start in range(0, len(texts), 256):
            yield [text.decode() for text in texts[start : start + 256]]
