"""The line rules of RefinedWeb (Penedo et al. 2023, appendix G.2) as DCLM runs them (Li et al. 2024).

Lines of capitals, of digits, counters ("3 likes") and single words go, and three phrases of page furniture; a document
that loses more than 5 % of its words goes whole. Source of definitions and limits: DCLM,
`baselines_configs/dclm_baseline_refinedweb.yaml`.

Differences: words removed are counted with our words of any alphabet, punctuation aside, where DCLM asks a tokenizer of
the language. Digits are those of category Nd.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, judge, log_edges, with_columns
from gristmill.stages.kernels import ngrams, refinedweb
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.measures import measure, ratio
from gristmill.stages.kernels.unicode import TABLES

_DCLM = "RefinedWeb (Penedo et al. 2023), appendix G.2; DCLM dclm_baseline_refinedweb.yaml"
_COUNTERS = {
    "lines_read": refinedweb.LINES,
    "lines_kept": refinedweb.KEPT_LINES,
    "lines_removed.upper_case": refinedweb.UPPER_LINES,
    "lines_removed.digits": refinedweb.NUMBER_LINES,
    "lines_removed.counter": refinedweb.COUNTER_LINES,
    "lines_removed.too_few_words": refinedweb.SHORT_LINES,
    "lines_removed.phrase": refinedweb.PHRASE_LINES,
    "phrases_removed": refinedweb.PHRASES,
}


class RefinedWebLines(Settings):
    """Removes lines of page furniture, then drops documents that lost too many words or all of their lines."""

    name: ClassVar = "refinedweb_lines"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    measures: ClassVar = (
        Measure("refinedweb_lines.kept_lines", "lines", log_edges(1, 1e5)),
        Measure("refinedweb_lines.removed_words", "share of words"),
    )
    adds: ClassVar = {m.column: pa.float64() for m in measures}

    max_upper_case: float = 0.5  # share of a line's characters
    max_digits: float = 0.999999  # share of a line's characters
    drop_counters: bool = True
    min_words_per_line: int = 2
    max_words_with_phrase: int = 10  # phrases are taken out of lines of at most so many words
    max_removed_words: float | None = 0.05  # share of the document's words

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("no_line_left", "refinedweb_lines.kept_lines", at_least=1, published=_DCLM),
            Rule(
                "too_many_words_removed",
                "refinedweb_lines.removed_words",
                at_most=self.max_removed_words,
                published=_DCLM,
            ),
        )

    def edit(self, text: pa.Array) -> tuple[pa.Array, np.ndarray]:
        """A string column -> (what the line rules leave, counts (documents, refinedweb.COLUMNS) int64)."""
        offsets, data = string_views(text)
        left = np.empty(int(offsets[-1] - offsets[0]) + 1, np.uint8)
        new_offsets = np.empty(len(text) + 1, np.int32)
        counts = np.empty((len(text), refinedweb.COLUMNS), np.int64)
        refinedweb.refinedweb_lines(
            offsets,
            data,
            TABLES,
            refinedweb.STRINGS,
            self.max_upper_case,
            self.max_digits,
            int(self.drop_counters),
            self.min_words_per_line,
            self.max_words_with_phrase,
            left,
            new_offsets,
            counts,
        )
        packed = pa.py_buffer(left[: new_offsets[-1]].copy())
        return pa.StringArray.from_buffers(len(text), pa.py_buffer(new_offsets), packed), counts

    def __call__(self, batch: Batch) -> Result:
        text, counts = self.edit(batch["text"])
        words = [
            measure(column, with_ngrams=False, splitter="unicode").words[:, ngrams.NON_SYMBOL_WORDS]
            for column in (batch["text"], text)
        ]
        measured = {
            "refinedweb_lines.kept_lines": counts[:, refinedweb.KEPT_LINES].astype(np.float64),
            "refinedweb_lines.removed_words": ratio(words[0] - words[1], words[0]),
        }
        counters = {name: int(counts[:, at].sum()) for name, at in _COUNTERS.items()}
        result = judge(with_columns(batch, {**measured, "edited": text}), self.rules(), counters)
        kept = with_columns(result.kept, {"text": result.kept["edited"]}).drop_columns(["edited"])
        return Result(kept, result.dropped.drop_columns(["edited"]), result.counters)
