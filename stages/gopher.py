"""The rules of Gopher (Rae et al. 2021, appendix A1): quality and repetition.

"Gopher" means different things in different projects, and a limit holds for the measure it was chosen for. `variant`
says whose definitions and limits are meant:

- `datatrove` (default): on the words of spaCy's English tokenizer, because its limits are the ones that published
  corpora were run with. In some points they differ from the paper: "#" and "…" are counted as characters, not as words
  that hold them; mean word length, words-in-range and stop words skip nothing but symbols; a most common n-gram counts
  even if it occurs once, which fails very short documents.
- `dolma`: as in `gopher_dolma.py`, where each difference is written down.

A limit that is not given is the variant's; the resolved recipe shows it. Every measure is a column, `min_x` and
`max_x` are the limits of column `x`; limits come second. A limit of `null` switches its rule off. `by_language` names a
table of limits for the languages of the documents, on datatrove's measures: `language_limits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
from pydantic import model_validator

from gristmill.stages import gopher_dolma
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

Variant: TypeAlias = Literal["datatrove", "dolma"]
AnySplitter: TypeAlias = Splitter | Literal["whitespace"]

_QUALITY_RULES = (  # reason, setting; in datatrove's order
    ("too_few_words", "min_words"),
    ("too_many_words", "max_words"),
    ("words_too_short", "min_mean_word_chars"),
    ("words_too_long", "max_mean_word_chars"),
    ("too_many_hashes", "max_hashes"),
    ("too_many_ellipses", "max_ellipses"),
    ("too_many_bullet_lines", "max_bullet_lines"),
    ("too_many_ellipsis_lines", "max_ellipsis_lines"),
    ("too_few_alphabetic_words", "min_alphabetic_words"),
    ("too_few_stop_words", "min_stop_words"),
)
_REPETITION_RULES = tuple(
    (f"too_many_{name}", f"max_{name}")
    for name in (
        "duplicate_paragraphs",
        "duplicate_paragraph_chars",
        "duplicate_lines",
        "duplicate_line_chars",
        *(f"top_{n}_gram_chars" for n in (2, 3, 4)),
        *(f"duplicate_{n}_gram_chars" for n in range(5, 11)),
    )
)
_QUALITY_MEASURES = (
    Measure("gopher_quality.words", "words", log_edges(1, 1e6)),
    Measure("gopher_quality.mean_word_chars", "characters", linear_edges(0, 20)),
    Measure("gopher_quality.hashes", "“#” per word", linear_edges(0, 0.5)),
    Measure("gopher_quality.ellipses", "ellipses per word", linear_edges(0, 0.5)),
    Measure("gopher_quality.bullet_lines", "share of lines"),
    Measure("gopher_quality.ellipsis_lines", "share of lines"),
    Measure("gopher_quality.alphabetic_words", "share of words"),
    Measure("gopher_quality.stop_words", "different stop words", linear_edges(0, 50)),
)
_REPETITION_MEASURES = (
    Measure("gopher_repetition.chars", "characters", log_edges(1, 1e7)),
    Measure("gopher_repetition.duplicate_paragraphs", "share of paragraphs"),
    Measure("gopher_repetition.duplicate_paragraph_chars", "share of characters"),
    Measure("gopher_repetition.duplicate_lines", "share of lines"),
    Measure("gopher_repetition.duplicate_line_chars", "share of characters"),
    *(Measure(f"gopher_repetition.top_{n}_gram_chars", "share of characters") for n in (2, 3, 4)),
    *(Measure(f"gopher_repetition.duplicate_{n}_gram_chars", "share of characters") for n in range(5, 11)),
)


class _Measures:
    """The measures of an instance's variant; of the class those of its default."""

    def __init__(self, datatrove: tuple[Measure, ...], dolma: tuple[Measure, ...]) -> None:
        self.of: Mapping[str, tuple[Measure, ...]] = {"datatrove": datatrove, "dolma": dolma}

    def __get__(self, stage: Any, owner: type) -> tuple[Measure, ...]:
        return self.of["datatrove" if stage is None else stage.variant]


class _Adds:
    """The columns of an instance's measures; of the class those of its default."""

    def __get__(self, stage: Any, owner: Any) -> Mapping[str, pa.DataType]:
        return {m.column: pa.float64() for m in (owner if stage is None else stage).measures}


def _with_defaults(given: Any, of_dolma: Mapping[str, Any]) -> Any:
    """Settings as a recipe gives them, with the defaults of the variant dolma where it is that one."""
    if isinstance(given, Mapping) and given.get("variant") == "dolma":
        return {**of_dolma, **given}
    return given


def _refuse_foreign(stage: Any, other: Sequence[tuple[str, str]], mine: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError for a limit on what the stage's variant does not measure, and for words it cannot split."""
    settings = {setting for _, setting in mine}
    for _, setting in other:
        if setting not in settings and getattr(stage, setting) is not None:
            raise ValueError(
                f"`{setting}` limits what the variant {stage.variant} does not measure. Leave it out, or set `variant`."
            )
    if stage.by_language is not None and stage.variant == "dolma":
        raise ValueError("`by_language` has limits on datatrove's measures, not on those of the variant dolma.")
    if (stage.words == "whitespace") != (stage.variant == "dolma"):
        splits = "whitespace" if stage.variant == "dolma" else "english or unicode"
        raise ValueError(f"`words` is {splits} in the variant {stage.variant}, not {stage.words}.")


def _rules(stage: Any, table: Sequence[tuple[str, str]], published: str) -> tuple[Rule, ...]:
    """The rules of a table of (reason, setting)."""
    out = []
    for reason, setting in table:
        side, name = setting.split("_", 1)
        bound = {"at_least" if side == "min" else "at_most": getattr(stage, setting)}
        out.append(Rule(reason, f"{stage.name}.{name}", **bound, published=published))
    return tuple(out)


class GopherQuality(ByLanguage):
    """Drops documents whose words and lines do not look like prose.

    A word counts as one when it has a character that is not punctuation; the shares of symbols and of alphabetic words
    are over all words, punctuation included.
    """

    name: ClassVar = "gopher_quality"
    version: ClassVar = 1
    measures: ClassVar = cast(Any, _Measures(_QUALITY_MEASURES, gopher_dolma.QUALITY_MEASURES))
    adds: ClassVar = cast(Any, _Adds())

    variant: Variant = "datatrove"  # whose definitions and limits
    min_words: int | None = 50  # that are not symbols
    max_words: int | None = 100_000
    min_mean_word_chars: float | None = 3.0
    max_mean_word_chars: float | None = 10.0
    min_median_word_chars: float | None = None  # dolma: 3
    max_median_word_chars: float | None = None  # dolma: 10
    max_hashes: float | None = 0.1  # "#" per word
    max_ellipses: float | None = 0.1  # "..." and "…" per word
    max_symbol_words: float | None = None  # dolma: 0.1; share of words that hold "#" or "…"
    max_bullet_lines: float | None = 0.9  # share of lines that begin with "•" or "-"; dolma: with "*" or "-"
    max_ellipsis_lines: float | None = 0.3  # share of lines that end with "..." or "…"; dolma: with "…"
    min_alphabetic_words: float | None = 0.8  # share of words with a letter
    min_stop_words: int | None = 2  # different ones, in the case written
    min_stop_word_occurrences: int | None = None  # dolma: 2
    stop_words: tuple[str, ...] = GOPHER_STOP_WORDS
    words: AnySplitter = "english"  # or "unicode" for other alphabets: `kernels/words.py`; dolma: "whitespace"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_variant(cls, given: Any) -> Any:
        return _with_defaults(given, gopher_dolma.QUALITY_DEFAULTS)

    @model_validator(mode="after")
    def _only_what_is_measured(self) -> GopherQuality:
        tables = _QUALITY_RULES, gopher_dolma.QUALITY_RULES
        _refuse_foreign(self, *(tables if self.variant == "dolma" else tables[::-1]))
        return self

    def rules(self) -> tuple[Rule, ...]:
        if self.variant == "dolma":
            return _rules(self, gopher_dolma.QUALITY_RULES, gopher_dolma.SOURCE)
        return _rules(self, _QUALITY_RULES, _PAPER)

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """The measures of each document, (documents,) float64 by column."""
        if self.words == "whitespace":
            return gopher_dolma.quality(batch, self.stop_words)
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

    Shares of characters are over the whole document (dolma: over its words). Line breaks are "\\n".
    """

    name: ClassVar = "gopher_repetition"
    version: ClassVar = 1
    measures: ClassVar = cast(Any, _Measures(_REPETITION_MEASURES, gopher_dolma.REPETITION_MEASURES))
    adds: ClassVar = cast(Any, _Adds())

    variant: Variant = "datatrove"  # whose definitions and limits
    max_duplicate_paragraphs: float | None = 0.30  # dolma does not look at paragraphs
    max_duplicate_paragraph_chars: float | None = 0.20
    max_duplicate_lines: float | None = 0.30
    max_duplicate_line_chars: float | None = 0.20  # dolma: 0.30
    max_top_2_gram_chars: float | None = 0.20
    max_top_3_gram_chars: float | None = 0.18
    max_top_4_gram_chars: float | None = 0.16
    max_duplicate_5_gram_chars: float | None = 0.15
    max_duplicate_6_gram_chars: float | None = 0.14
    max_duplicate_7_gram_chars: float | None = 0.13
    max_duplicate_8_gram_chars: float | None = 0.12
    max_duplicate_9_gram_chars: float | None = 0.11
    max_duplicate_10_gram_chars: float | None = 0.10
    words: AnySplitter = "english"  # or "unicode" for other alphabets: `kernels/words.py`; dolma: "whitespace"

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_variant(cls, given: Any) -> Any:
        return _with_defaults(given, gopher_dolma.REPETITION_DEFAULTS)

    @model_validator(mode="after")
    def _only_what_is_measured(self) -> GopherRepetition:
        tables = _REPETITION_RULES, gopher_dolma.REPETITION_RULES
        _refuse_foreign(self, *(tables if self.variant == "dolma" else tables[::-1]))
        return self

    def rules(self) -> tuple[Rule, ...]:
        if self.variant == "dolma":
            return _rules(self, gopher_dolma.REPETITION_RULES, gopher_dolma.SOURCE)
        empty = Rule("empty", "gopher_repetition.chars", at_least=1, published="datatrove GopherRepetitionFilter")
        return (empty, *_rules(self, _REPETITION_RULES, _TABLE))

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """The measures of each document, (documents,) float64 by column."""
        if self.words == "whitespace":
            return gopher_dolma.repetition(batch)
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
