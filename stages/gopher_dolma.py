"""What dolma means by Gopher's rules: `variant: dolma` of the stages gopher_quality and gopher_repetition.

Measures are those of dolma 1.2.1, `taggers/gopher.py`, tagger `gopher_v2`:

- A word is a run of characters that are not white space (`str.split()`); punctuation stays with it.
- `median_word_chars`: the median over all words, not the mean over those that are not symbols.
- `symbol_words`: words that hold "#" or "…", over words. "..." is no symbol.
- `stop_word_occurrences`: every occurrence counts, so "the the" has two.
- A line ends at one or more "\\n". `bullet_lines` begin with "*" or "-", with no white space before; "•" is no bullet.
  `ellipsis_lines` end with "…", with no white space behind; "..." is no ellipsis.
- `duplicate_lines`: all copies of a line that occurs twice or more, the first one too.
- Shares of characters are over the characters of all words, without white space. Lines hold their white space, so
  `duplicate_line_chars` can be above 1.
- `top_n_gram_chars`: the words of the most common n-gram without spaces, times its occurrences.
- `duplicate_n_gram_chars`: characters of all n-grams that occur twice or more, over characters of all n-grams.
  N-grams overlap in both.
- Paragraphs are not looked at.

Limits are those of the mixer configuration of Dolma 1.5 (github.com/allenai/dolma,
configs/dolma-v1_5/mixing/cc-head.yaml): as in the paper of Gopher, but 0.3 for the characters of duplicate lines. That
file is for `gopher_v1`, which counts empty lines; the readme of Dolma CCCC has the same limits for `gopher_v2`.
Both ask for "fraction_of_characters_in_most_common_2gram" (and 3gram, 4gram), but the tagger writes "..._2grams", and
an attribute that is not there drops nothing. So with dolma itself these three rules never apply: set the three
`max_top_n_gram_chars` to null for what is run instead of what is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.stages.documents import Batch, Measure, linear_edges, log_edges
from gristmill.stages.kernels import dolma
from gristmill.stages.kernels.measures import ratio

SOURCE = "dolma 1.2.1 gopher_v2; limits of Dolma 1.5, configs/dolma-v1_5/mixing/cc-head.yaml"

# What a recipe's settings are in this variant where they are not given. The rest is as in datatrove's.
QUALITY_DEFAULTS: Mapping[str, Any] = {
    "min_mean_word_chars": None,
    "max_mean_word_chars": None,
    "min_median_word_chars": 3.0,
    "max_median_word_chars": 10.0,
    "max_hashes": None,
    "max_ellipses": None,
    "max_symbol_words": 0.1,
    "min_stop_words": None,
    "min_stop_word_occurrences": 2,
    "words": "whitespace",
}
REPETITION_DEFAULTS: Mapping[str, Any] = {
    "max_duplicate_paragraphs": None,
    "max_duplicate_paragraph_chars": None,
    "max_duplicate_line_chars": 0.30,
    "words": "whitespace",
}

QUALITY_RULES = (  # reason, setting; in the order of the mixer configuration
    ("too_few_words", "min_words"),
    ("too_many_words", "max_words"),
    ("words_too_short", "min_median_word_chars"),
    ("words_too_long", "max_median_word_chars"),
    ("too_many_symbol_words", "max_symbol_words"),
    ("too_few_alphabetic_words", "min_alphabetic_words"),
    ("too_few_stop_words", "min_stop_word_occurrences"),
    ("too_many_bullet_lines", "max_bullet_lines"),
    ("too_many_ellipsis_lines", "max_ellipsis_lines"),
)
REPETITION_RULES = tuple(
    (f"too_many_{name}", f"max_{name}")
    for name in (
        "duplicate_lines",
        "duplicate_line_chars",
        *(f"top_{n}_gram_chars" for n in (2, 3, 4)),
        *(f"duplicate_{n}_gram_chars" for n in range(5, 11)),
    )
)

QUALITY_MEASURES = (
    Measure("gopher_quality.words", "words", log_edges(1, 1e6)),
    Measure("gopher_quality.median_word_chars", "characters", linear_edges(0, 20)),
    Measure("gopher_quality.symbol_words", "share of words", linear_edges(0, 0.5)),
    Measure("gopher_quality.alphabetic_words", "share of words"),
    Measure("gopher_quality.stop_word_occurrences", "stop words", log_edges(1, 1e5)),
    Measure("gopher_quality.bullet_lines", "share of lines"),
    Measure("gopher_quality.ellipsis_lines", "share of lines"),
)
REPETITION_MEASURES = (
    Measure("gopher_repetition.chars", "characters", log_edges(1, 1e7)),
    Measure("gopher_repetition.duplicate_lines", "share of lines"),
    Measure("gopher_repetition.duplicate_line_chars", "share of characters"),
    *(Measure(f"gopher_repetition.top_{n}_gram_chars", "share of characters") for n in (2, 3, 4)),
    *(Measure(f"gopher_repetition.duplicate_{n}_gram_chars", "share of characters") for n in range(5, 11)),
)


def quality(batch: Batch, stop_words: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The measures of gopher_quality, (documents,) float64 by column."""
    counts = dolma.measure(batch["text"], stop_words, repetition=False).T
    words, lines = counts[dolma.WORDS], counts[dolma.LINES]
    at = "gopher_quality."
    return {
        at + "words": words.astype(np.float64),
        at + "median_word_chars": counts[dolma.MEDIAN_TWICE] / 2,
        at + "symbol_words": ratio(counts[dolma.SYMBOL_WORDS], words),
        at + "alphabetic_words": ratio(counts[dolma.ALPHA_WORDS], words),
        at + "stop_word_occurrences": counts[dolma.STOP_WORDS].astype(np.float64),
        at + "bullet_lines": ratio(counts[dolma.BULLET_LINES], lines),
        at + "ellipsis_lines": ratio(counts[dolma.ELLIPSIS_LINES], lines),
    }


def repetition(batch: Batch) -> dict[str, np.ndarray]:
    """The measures of gopher_repetition, (documents,) float64 by column."""
    counts = dolma.measure(batch["text"], (), repetition=True).T
    chars = counts[dolma.WORD_CHARS]
    at = "gopher_repetition."
    return {
        at + "chars": counts[dolma.CHARS].astype(np.float64),
        at + "duplicate_lines": ratio(counts[dolma.DUPLICATE_LINES], counts[dolma.LINES]),
        at + "duplicate_line_chars": counts[dolma.DUPLICATE_LINE_CHARS] / np.maximum(chars, 1),
        **{at + f"top_{n}_gram_chars": ratio(counts[dolma.TOP_2 + n - 2], chars) for n in (2, 3, 4)},
        **{
            at + f"duplicate_{n}_gram_chars": ratio(counts[dolma.DUPLICATE_5 + n - 5], counts[dolma.EVERY_5 + n - 5])
            for n in range(5, 11)
        },
    }
