"""The rules of Gopher (Rae et al. 2021, appendix A1): quality and repetition.

Definitions are datatrove's, on the words of spaCy's English tokenizer, because its limits are the ones that published
corpora were run with. In some points they differ from the paper: "#" and "…" are counted as characters, not as words
that hold them; mean word length, words-in-range and stop words skip nothing but symbols; a most common n-gram counts
even if it occurs once, which fails very short documents.

Every measure is a column; limits come second. A limit of `null` switches its rule off. `by_language` names a table of
limits for the languages of the documents: `language_limits.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import (
    Batch,
    Measure,
    Result,
    Rule,
    linear_edges,
    log_edges,
)
from gristmill.stages.kernels import lines, ngrams
from gristmill.stages.kernels.measures import GOPHER_STOP_WORDS, measure, ratio
from gristmill.stages.kernels.words import Splitter
from gristmill.stages.language_limits import ByLanguage, judge_each

_PAPER = "Gopher (Rae et al. 2021), appendix A1.1; datatrove GopherQualityFilter"
_TABLE = "Gopher (Rae et al. 2021), table A1; datatrove GopherRepetitionFilter"


class GopherQuality(ByLanguage):
    """Drops documents whose words and lines do not look like prose.

    A word counts as one when it has a character that is not punctuation; the shares of symbols and of alphabetic words
    are over all words, punctuation included.
    """

    name: ClassVar = "gopher_quality"
    version: ClassVar = 1
    measures: ClassVar = (
        Measure("gopher_quality.words", "words", log_edges(1, 1e6)),
        Measure("gopher_quality.mean_word_chars", "characters", linear_edges(0, 20)),
        Measure("gopher_quality.hashes", "“#” per word", linear_edges(0, 0.5)),
        Measure("gopher_quality.ellipses", "ellipses per word", linear_edges(0, 0.5)),
        Measure("gopher_quality.bullet_lines", "share of lines"),
        Measure("gopher_quality.ellipsis_lines", "share of lines"),
        Measure("gopher_quality.alphabetic_words", "share of words"),
        Measure("gopher_quality.stop_words", "different stop words", linear_edges(0, 50)),
    )
    adds: ClassVar = {m.column: pa.float64() for m in measures}

    min_words: int | None = 50  # that are not symbols
    max_words: int | None = 100_000
    min_mean_word_chars: float | None = 3.0
    max_mean_word_chars: float | None = 10.0
    max_hashes: float | None = 0.1  # "#" per word
    max_ellipses: float | None = 0.1  # "..." and "…" per word
    max_bullet_lines: float | None = 0.9  # share of lines that begin with "•" or "-"
    max_ellipsis_lines: float | None = 0.3  # share of lines that end with "..." or "…"
    min_alphabetic_words: float | None = 0.8  # share of words with a letter
    min_stop_words: int | None = 2  # different ones, in the case written
    stop_words: tuple[str, ...] = GOPHER_STOP_WORDS
    words: Splitter = "english"  # how words are found; "unicode" for other alphabets: `kernels/words.py`

    def rules(self) -> tuple[Rule, ...]:
        at = "gopher_quality."
        return (
            Rule("too_few_words", at + "words", at_least=self.min_words, published=_PAPER),
            Rule("too_many_words", at + "words", at_most=self.max_words, published=_PAPER),
            Rule("words_too_short", at + "mean_word_chars", at_least=self.min_mean_word_chars, published=_PAPER),
            Rule("words_too_long", at + "mean_word_chars", at_most=self.max_mean_word_chars, published=_PAPER),
            Rule("too_many_hashes", at + "hashes", at_most=self.max_hashes, published=_PAPER),
            Rule("too_many_ellipses", at + "ellipses", at_most=self.max_ellipses, published=_PAPER),
            Rule("too_many_bullet_lines", at + "bullet_lines", at_most=self.max_bullet_lines, published=_PAPER),
            Rule("too_many_ellipsis_lines", at + "ellipsis_lines", at_most=self.max_ellipsis_lines, published=_PAPER),
            Rule(
                "too_few_alphabetic_words",
                at + "alphabetic_words",
                at_least=self.min_alphabetic_words,
                published=_PAPER,
            ),
            Rule("too_few_stop_words", at + "stop_words", at_least=self.min_stop_words, published=_PAPER),
        )

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """The measures of each document, (documents,) float64 by column."""
        found = measure(batch["text"], with_ngrams=False, splitter=self.words, stop_words=self.stop_words)
        words, lines_ = found.words.T, found.lines.T
        every = words[ngrams.WORDS]
        split_lines = lines_[lines.SPLIT_LINES]
        at = "gopher_quality."
        return {
            at + "words": words[ngrams.NON_SYMBOL_WORDS].astype(np.float64),
            at + "mean_word_chars": ratio(words[ngrams.NON_SYMBOL_CHARS], words[ngrams.NON_SYMBOL_WORDS]),
            at + "hashes": ratio(lines_[lines.HASHES], every),
            at + "ellipses": ratio(lines_[lines.ELLIPSES], every),
            at + "bullet_lines": ratio(lines_[lines.BULLET_LINES], split_lines),
            at + "ellipsis_lines": ratio(lines_[lines.ELLIPSIS_LINES], split_lines),
            at + "alphabetic_words": ratio(words[ngrams.ALPHA_WORDS], every),
            at + "stop_words": words[ngrams.STOP_WORDS].astype(np.float64),
        }

    def __call__(self, batch: Batch) -> Result:
        return judge_each(self, batch)


class GopherRepetition(ByLanguage):
    """Drops documents that repeat lines, paragraphs or runs of words.

    Shares of characters are over the whole document. Line breaks are "\\n".
    """

    name: ClassVar = "gopher_repetition"
    version: ClassVar = 1
    measures: ClassVar = (
        Measure("gopher_repetition.chars", "characters", log_edges(1, 1e7)),
        Measure("gopher_repetition.duplicate_paragraphs", "share of paragraphs"),
        Measure("gopher_repetition.duplicate_paragraph_chars", "share of characters"),
        Measure("gopher_repetition.duplicate_lines", "share of lines"),
        Measure("gopher_repetition.duplicate_line_chars", "share of characters"),
        *(Measure(f"gopher_repetition.top_{n}_gram_chars", "share of characters") for n in (2, 3, 4)),
        *(Measure(f"gopher_repetition.duplicate_{n}_gram_chars", "share of characters") for n in range(5, 11)),
    )
    adds: ClassVar = {m.column: pa.float64() for m in measures}

    max_duplicate_paragraphs: float | None = 0.30
    max_duplicate_paragraph_chars: float | None = 0.20
    max_duplicate_lines: float | None = 0.30
    max_duplicate_line_chars: float | None = 0.20
    max_top_2_gram_chars: float | None = 0.20
    max_top_3_gram_chars: float | None = 0.18
    max_top_4_gram_chars: float | None = 0.16
    max_duplicate_5_gram_chars: float | None = 0.15
    max_duplicate_6_gram_chars: float | None = 0.14
    max_duplicate_7_gram_chars: float | None = 0.13
    max_duplicate_8_gram_chars: float | None = 0.12
    max_duplicate_9_gram_chars: float | None = 0.11
    max_duplicate_10_gram_chars: float | None = 0.10
    words: Splitter = "english"  # how words are found; "unicode" for other alphabets: `kernels/words.py`

    def rules(self) -> tuple[Rule, ...]:
        limits: dict[str, Any] = self.model_dump(exclude={"words", "by_language"})
        return (
            Rule("empty", "gopher_repetition.chars", at_least=1, published="datatrove GopherRepetitionFilter"),
            *(
                Rule(
                    f"too_many_{key.removeprefix('max_')}",
                    f"gopher_repetition.{key.removeprefix('max_')}",
                    at_most=limit,
                    published=_TABLE,
                )
                for key, limit in limits.items()
            ),
        )

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """The measures of each document, (documents,) float64 by column."""
        found = measure(batch["text"], with_ngrams=True, splitter=self.words)
        counts, grams = found.lines.T, found.ngrams.T
        chars = counts[lines.CHARS]
        at = "gopher_repetition."
        return {
            at + "chars": chars.astype(np.float64),
            at + "duplicate_paragraphs": ratio(counts[lines.DUPLICATE_PARAGRAPHS], counts[lines.PARAGRAPHS]),
            at + "duplicate_paragraph_chars": ratio(counts[lines.DUPLICATE_PARAGRAPH_CHARS], chars),
            at + "duplicate_lines": ratio(counts[lines.DUPLICATE_LINES], counts[lines.LINES]),
            at + "duplicate_line_chars": ratio(counts[lines.DUPLICATE_LINE_CHARS], chars),
            **{at + f"top_{n}_gram_chars": ratio(grams[ngrams.TOP_2 + n - 2], chars) for n in (2, 3, 4)},
            **{at + f"duplicate_{n}_gram_chars": ratio(grams[ngrams.DUPLICATE_5 + n - 5], chars) for n in range(5, 11)},
        }

    def __call__(self, batch: Batch) -> Result:
        return judge_each(self, batch)
