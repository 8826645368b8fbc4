"""The rules that FineWeb added to those of Gopher and C4 (Penedo et al. 2024, section 3.6), as datatrove runs them.

Paper and code disagree on repeated lines: the paper says that a document with at least 0.1 of its characters in
repeated lines goes, the code that made FineWeb says more than 0.01. The default is what was run;
`max_duplicate_line_chars: 0.1` is what was published. The share of line breaks per word (`list_ratio` in datatrove) is
in the code only.
"""

from __future__ import annotations

from typing import ClassVar

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
from gristmill.stages.kernels.measures import SHORT_LINE_CHARS, measure, ratio
from gristmill.stages.kernels.words import Splitter
from gristmill.stages.language_limits import ByLanguage, judge_each

_PAPER = "FineWeb (Penedo et al. 2024), section 3.6; datatrove FineWebQualityFilter"
_CODE = "datatrove FineWebQualityFilter"


class FineWeb(ByLanguage):
    """Drops documents made of short, unfinished or repeated lines. Lines end at "\\n"; blank ones are not counted."""

    name: ClassVar = "fineweb"
    version: ClassVar = 1
    measures: ClassVar = (
        Measure("fineweb.lines", "lines", log_edges(1, 1e5)),
        Measure("fineweb.terminal_lines", "share of lines"),
        Measure("fineweb.short_lines", "share of lines"),
        Measure("fineweb.duplicate_line_chars", "share of characters"),
        Measure("fineweb.newlines", "line breaks per word", linear_edges(0, 2)),
    )
    adds: ClassVar = {m.column: pa.float64() for m in measures}

    min_terminal_lines: float | None = 0.12  # share of lines that end with punctuation that ends a sentence
    max_short_lines: float | None = 0.67  # share of lines of at most `short_line_chars`
    short_line_chars: int = SHORT_LINE_CHARS
    max_duplicate_line_chars: float | None = 0.01  # share of characters in second and later copies of a line
    max_newlines: float | None = 0.3  # line breaks per word
    words: Splitter = "english"  # how words are found; "unicode" for other alphabets: `kernels/words.py`

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("empty", "fineweb.lines", at_least=1, published=_CODE),
            Rule(
                "too_few_terminal_lines", "fineweb.terminal_lines", at_least=self.min_terminal_lines, published=_PAPER
            ),
            Rule("too_many_short_lines", "fineweb.short_lines", at_most=self.max_short_lines, published=_PAPER),
            Rule(
                "too_many_duplicate_line_chars",
                "fineweb.duplicate_line_chars",
                at_most=self.max_duplicate_line_chars,
                published=f"{_CODE}; the paper says 0.1",
            ),
            Rule("too_many_newlines", "fineweb.newlines", at_most=self.max_newlines, published=_CODE),
        )

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """The measures of each document, (documents,) float64 by column."""
        found = measure(batch["text"], with_ngrams=False, splitter=self.words, short_line_chars=self.short_line_chars)
        counts = found.lines.T
        full = counts[lines.FULL_LINES]
        chars = counts[lines.CHARS] - counts[lines.NEWLINES]
        return {
            "fineweb.lines": full.astype(np.float64),
            "fineweb.terminal_lines": ratio(counts[lines.TERMINAL_LINES], full),
            "fineweb.short_lines": ratio(counts[lines.SHORT_LINES], full),
            "fineweb.duplicate_line_chars": ratio(counts[lines.DUPLICATE_FULL_LINE_CHARS], chars),
            "fineweb.newlines": ratio(counts[lines.NEWLINES], found.words[:, ngrams.WORDS]),
        }

    def __call__(self, batch: Batch) -> Result:
        return judge_each(self, batch)
