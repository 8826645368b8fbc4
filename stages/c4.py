"""C4's rules (Raffel et al. 2020, section 2.2): lines are removed, and documents that have too little left.

Definitions are datatrove's C4QualityFilter. The paper keeps only lines with terminal punctuation; FineWeb ran all the
other rules without this one (`require_end_punctuation: false`), as it alone removes 30 % of the tokens (Penedo et al.
2024, section 3.6).

For each line of `str.splitlines`, stripped, in this order: removed if a word is longer than `max_word_chars`;
citations such as [12] and [edit] are taken out; removed without terminal punctuation, or with an ellipsis at the end;
removed with fewer than `min_words_per_line` words (between white space); removed if it says "javascript"; removed if it
speaks of cookies and policies. "lorem ipsum" or "{" in a line that comes that far drops the document. What is left must
have `min_sentences` sentences, each line at least one.

Bad words are the user's: a document whose original text holds one goes. A word counts between characters that are not
letters, digits or "_", in any case; `bad_words_inside` looks inside words too, as C4 does for Japanese, Thai, Chinese.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, judge, log_edges, with_columns
from gristmill.stages.kernels import edit
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.english import ENGLISH
from gristmill.stages.kernels.measures import ratio
from gristmill.stages.kernels.unicode import TABLES
from gristmill.stages.shards import filesystem

_PAPER = "C4 (Raffel et al. 2020), section 2.2; datatrove C4QualityFilter"
_COUNTERS = {
    "lines_read": edit.LINES,
    "lines_kept": edit.KEPT_LINES,
    "lines_removed.word_too_long": edit.LONG_WORD_LINES,
    "lines_removed.no_end_punctuation": edit.UNFINISHED_LINES,
    "lines_removed.too_few_words": edit.FEW_WORD_LINES,
    "lines_removed.javascript": edit.JAVASCRIPT_LINES,
    "lines_removed.policy": edit.POLICY_LINES,
    "citations_removed": edit.CITATIONS,
}


class WordListError(ValueError):
    """A list of bad words is missing, empty or not UTF-8."""


class C4(Settings):
    """Removes lines that are not prose, then drops documents with placeholder text, code, or too few sentences.

    The text of kept documents is what is left of it; dropped ones keep their text. Counters count lines of both.
    """

    name: ClassVar = "c4"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    measures: ClassVar = (
        Measure("c4.lorem_ipsum_lines", "lines", log_edges(1, 1e3, 30)),
        Measure("c4.curly_bracket_lines", "lines", log_edges(1, 1e3, 30)),
        Measure("c4.sentences", "sentences", log_edges(1, 1e5)),
        Measure("c4.kept_lines", "share of lines"),
        Measure("c4.bad_words", "1 if there is one"),
    )
    adds: ClassVar = {m.column: pa.float64() for m in measures}

    max_word_chars: int | None = 1000  # lines with a longer word are removed
    remove_citations: bool = True
    require_end_punctuation: bool = True  # one of . ? ! " ' and not an ellipsis
    min_words_per_line: int | None = 3
    drop_javascript_lines: bool = True
    drop_policy_lines: bool = True
    drop_lorem_ipsum: bool = True
    drop_curly_brackets: bool = True
    min_sentences: int | None = 5
    bad_words: tuple[str, ...] = ()  # none by default
    bad_word_files: tuple[str, ...] = ()  # one word or phrase a line
    bad_words_inside: bool = False

    def files(self) -> list[str]:
        """The files that the stage reads."""
        return list(self.bad_word_files)

    def rules(self) -> tuple[Rule, ...]:
        none = 0.0
        return (
            Rule(
                "lorem_ipsum", "c4.lorem_ipsum_lines", at_most=none if self.drop_lorem_ipsum else None, published=_PAPER
            ),
            Rule(
                "curly_bracket",
                "c4.curly_bracket_lines",
                at_most=none if self.drop_curly_brackets else None,
                published=_PAPER,
            ),
            Rule("too_few_sentences", "c4.sentences", at_least=self.min_sentences, published=_PAPER),
            Rule("bad_words", "c4.bad_words", at_most=none, published="C4, section 2.2; datatrove C4BadWordsFilter"),
        )

    def edit(self, text: pa.Array) -> tuple[pa.Array, np.ndarray, np.ndarray]:
        """A string column -> (what the line rules leave of it, line counts (documents, edit.C4_COLUMNS) int64,
        sentences (documents,) int64)."""
        offsets, data = string_views(text)
        size = int(offsets[-1] - offsets[0])
        counts = np.empty((len(text), edit.C4_COLUMNS), np.int64)
        left = np.empty(size, np.uint8)
        # A line has a byte at least, and so has its break: pages that are never written cost nothing.
        line_starts, line_ends = np.empty(size + 2, np.int64), np.empty(size + 1, np.int64)
        first_lines = np.empty(len(text) + 1, np.int64)
        kept = edit.c4_lines(
            offsets,
            data,
            TABLES,
            edit.PHRASES,
            -1 if self.max_word_chars is None else self.max_word_chars,
            -1 if self.min_words_per_line is None else self.min_words_per_line,
            int(self.remove_citations),
            int(self.require_end_punctuation),
            int(self.drop_javascript_lines),
            int(self.drop_policy_lines),
            left,
            line_starts,
            line_ends,
            first_lines,
            counts,
        )
        starts, ends = line_starts[: kept + 1], line_ends[:kept]
        of_line = np.empty(kept, np.int64)
        edit.count_sentences(left, starts, ends, ENGLISH, of_line)
        summed = np.concatenate([[0], np.cumsum(of_line)])
        sentences = summed[first_lines[1:]] - summed[first_lines[:-1]]
        new_offsets = np.empty(len(text) + 1, np.int32)
        packed = np.empty(size, np.uint8)
        edit.pack(left, starts, ends, first_lines, TABLES, packed, new_offsets)
        packed = packed[: new_offsets[-1]].copy()
        buffers = [None, pa.py_buffer(new_offsets), pa.py_buffer(packed)]
        return pa.StringArray.from_buffers(len(text), buffers[1], buffers[2]), counts, sentences

    def has_bad_word(self, text: pa.Array) -> np.ndarray:
        """(documents,) float64: 1 where the text holds a bad word."""
        if not self.bad_words and not self.bad_word_files:
            return np.zeros(len(text), np.float64)
        pattern = _bad_word_pattern(self.bad_words, self.bad_word_files, self.bad_words_inside)
        found = pc.match_substring_regex(pc.utf8_lower(text), pattern)
        return np.asarray(found.to_numpy(zero_copy_only=False), np.float64)

    def __call__(self, batch: Batch) -> Result:
        text, counts, sentences = self.edit(batch["text"])
        measured = {
            "c4.lorem_ipsum_lines": counts[:, edit.LOREM_IPSUM_LINES].astype(np.float64),
            "c4.curly_bracket_lines": counts[:, edit.CURLY_BRACKET_LINES].astype(np.float64),
            "c4.sentences": sentences.astype(np.float64),
            "c4.kept_lines": ratio(counts[:, edit.KEPT_LINES], counts[:, edit.LINES]),
            "c4.bad_words": self.has_bad_word(batch["text"]),
        }
        counters = {name: int(counts[:, at].sum()) for name, at in _COUNTERS.items()}
        result = judge(with_columns(batch, {**measured, "c4.edited": text}), self.rules(), counters)
        kept = with_columns(result.kept, {"text": result.kept["c4.edited"]}).drop_columns(["c4.edited"])
        return Result(kept, result.dropped.drop_columns(["c4.edited"]), result.counters)


@lru_cache(8)
def _bad_word_pattern(words: tuple[str, ...], files: tuple[str, ...], inside: bool) -> str:
    """One RE2 expression for all words, in lower case. Raises WordListError."""
    every = dict.fromkeys(word.strip().lower() for word in [*words, *(w for path in files for w in _lines(path))])
    either = "|".join(re.escape(word) for word in every if word)
    if not either:
        raise WordListError(
            f"c4: the lists of bad words are empty: {', '.join(files)}. Take them out or give them words."
        )
    return f"(?:{either})" if inside else rf"(?:^|[^\pL\pN_])(?:{either})(?:[^\pL\pN_]|$)"


def _lines(path: str) -> list[str]:
    fs, inner = filesystem(path)
    try:
        return fs.cat_file(inner).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WordListError(f"{path}: the list of bad words cannot be read ({error}).") from error
