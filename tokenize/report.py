"""How well tokenizers fit documents: the same figures for any number of them, side by side, as data.

    report = tokenizer_report({"ours": ours_json, "gpt2": gpt2_json}, batches)
    report.tokenizers["ours"].groups["web/de"].bytes_per_token        # 4.1
    print(report.table())

Looked at are the documents with the lowest hashes, up to `max_bytes` of each group of source and language, so that the
figures do not depend on order or shards. A word is a run of letters, marks and digits; in scripts that do not put
spaces between words, tokens per word say nothing, and bytes per token are the figure to read.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from gristmill.stages.documents import Batch
from gristmill.tokenize.sample import Sample
from gristmill.tokenize.tokenizer_json import plain_tokenizer, special_tokens

COMMON_WORDS = 1_000
INDENTATIONS = (1, 2, 3, 4, 6, 8, 12, 16)  # spaces at the start of a line of code
NUMBERS = ("7", "42", "365", "2026", "65536", "3.14159", "1,000,000")


@cache
def words_of() -> re.Pattern[str]:
    """A run of letters, marks and digits. `\\w` alone has no marks, and would cut Hindi at every vowel sign."""
    marks = [c for c in (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0)) if unicodedata.category(chr(c))[0] == "M"]
    return re.compile(rf"[\w{''.join(map(chr, marks))}]+")


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sums(_Data):
    """Sums over the documents of a group. Two parts of a group add up."""

    documents: int = 0
    bytes: int = 0  # UTF-8
    chars: int = 0
    words: int = 0
    tokens: int = 0
    lossy: int = 0  # documents that do not decode to their text

    def __add__(self, other: Sums) -> Sums:
        return Sums(**{name: getattr(self, name) + getattr(other, name) for name in Sums.model_fields})

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens if self.tokens else 0.0

    @property
    def tokens_per_word(self) -> float:
        """Fertility."""
        return self.tokens / self.words if self.words else 0.0


class TokenizerFigures(_Data):
    """One tokenizer on the sample."""

    vocab_size: int
    groups: dict[str, Sums]  # "source/language"
    whole_words: dict[str, float]  # group -> share of its commonest words that are one token, after a space
    unused: int  # ids that no document of the sample needed, special ones not counted
    indentation: dict[int, int]  # spaces -> tokens
    numbers: dict[str, int]  # number as text -> tokens

    @property
    def total(self) -> Sums:
        return sum(self.groups.values(), Sums())

    @property
    def unused_share(self) -> float:
        return self.unused / self.vocab_size if self.vocab_size else 0.0


class TokenizerReport(_Data):
    """Several tokenizers on one sample."""

    sample: dict[str, int]  # group -> bytes looked at
    tokenizers: dict[str, TokenizerFigures] = Field(default_factory=dict)

    def table(self) -> str:
        """For people: bytes per token by group, then what is one figure for each tokenizer."""
        names = list(self.tokenizers)
        width = max([12, *map(len, names)]) + 2
        left = max([24, *map(len, self.sample)]) + 2
        rows = [("bytes per token", names)]
        rows += [(g, [f"{self.tokenizers[n].groups[g].bytes_per_token:.2f}" for n in names]) for g in self.sample]
        rows += [("tokens per word", [""] * len(names))]
        rows += [(g, [f"{self.tokenizers[n].groups[g].tokens_per_word:.2f}" for n in names]) for g in self.sample]
        rows += [("common words in one token", [""] * len(names))]
        rows += [(g, [f"{self.tokenizers[n].whole_words[g]:.0%}" for n in names]) for g in self.sample]
        figures = self.tokenizers.values()
        rows += [
            ("vocabulary", [f"{f.vocab_size:,}" for f in figures]),
            ("unused in the sample", [f"{f.unused_share:.1%}" for f in figures]),
            ("documents with losses", [f"{f.total.lossy:,}" for f in figures]),
        ]
        rows += [("tokens of spaces before code", [""] * len(names))]
        rows += [(f"{n}", [str(f.indentation[n]) for f in figures]) for n in INDENTATIONS]
        rows += [("tokens of numbers", [""] * len(names))]
        rows += [(number, [str(f.numbers[number]) for f in figures]) for number in NUMBERS]
        return "\n".join(f"{name:<{left}}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows)


def tokenizer_report(
    tokenizers: Mapping[str, bytes], batches: Iterable[Batch], *, max_bytes: int = 1_000_000, max_chars: int = 50_000
) -> TokenizerReport:
    """tokenizers: name -> tokenizer.json. batches: `source`, `text`, and `language` where it is known.

    max_bytes: of text looked at for each group; max_chars: of each document. Raises TokenError for a file that is not a
    tokenizer.
    """
    samples = _samples(batches, max_bytes, max_chars)
    texts = {group: [text.decode() for text in samples[group].texts()] for group in sorted(samples)}
    words = {group: Counter(word for text in texts[group] for word in words_of().findall(text)) for group in texts}
    sizes = {group: sum(len(text.encode()) for text in texts[group]) for group in texts}
    figures = {name: _figures(data, texts, words) for name, data in tokenizers.items()}
    return TokenizerReport(sample=sizes, tokenizers=figures)


def _samples(batches: Iterable[Batch], max_bytes: int, max_chars: int) -> dict[str, Sample]:
    out: dict[str, Sample] = {}
    for batch in batches:
        language = batch["language"] if "language" in batch.schema.names else pa.nulls(batch.num_rows, pa.string())
        names = pc.binary_join_element_wise(batch["source"], pc.fill_null(language, "unknown"), "/")
        for group in sorted(pc.unique(names).to_pylist()):
            out.setdefault(group, Sample(max_bytes, max_chars)).add(batch["text"].filter(pc.equal(names, group)))
    return out


def _figures(data: bytes, texts: Mapping[str, list[str]], words: Mapping[str, Counter[str]]) -> TokenizerFigures:
    tokenizer = Tokenizer.from_str(plain_tokenizer(data).decode())
    whole = Tokenizer.from_str(data.decode()).get_vocab(with_added_tokens=True)
    vocab_size = max(whole.values(), default=-1) + 1
    used = np.zeros(vocab_size, bool)
    used[list(special_tokens(data).values())] = True
    return TokenizerFigures(
        vocab_size=vocab_size,
        groups={group: _sums(tokenizer, texts[group], used, sum(words[group].values())) for group in texts},
        whole_words={group: _whole_words(tokenizer, words[group]) for group in texts},
        unused=int((~used).sum()),
        indentation={n: len(_ids(tokenizer, "\n" + " " * n + "x")) - len(_ids(tokenizer, "\nx")) for n in INDENTATIONS},
        numbers={number: len(_ids(tokenizer, number)) for number in NUMBERS},
    )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _sums(tokenizer: Tokenizer, texts: list[str], used: np.ndarray, words: int) -> Sums:
    """used: (vocab,) bool, set for the ids that occur."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    all_ids = [encoding.ids for encoding in encodings]
    for ids in all_ids:
        used[ids] = True
    decoded = tokenizer.decode_batch(all_ids, skip_special_tokens=False)
    return Sums(
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        chars=sum(map(len, texts)),
        words=words,
        tokens=sum(map(len, all_ids)),
        lossy=sum(a != b for a, b in zip(decoded, texts, strict=True)),
    )


def _whole_words(tokenizer: Tokenizer, words: Counter[str]) -> float:
    """Share of the commonest words that are one token when they follow a space; of equally common ones, the first in
    the order of code points count."""
    common = [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:COMMON_WORDS]]
    if not common:
        return 0.0
    encodings = tokenizer.encode_batch_fast([" " + word for word in common], add_special_tokens=False)
    return sum(len(encoding.ids) == 1 for encoding in encodings) / len(common)
