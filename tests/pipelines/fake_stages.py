"""Stages of the small runs that `fake_run.py` builds: two that measure and cut, one that looks at all documents."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import orjson
import pyarrow as pa

from gristmill.stages.documents import (
    Batch,
    Measure,
    Result,
    Rule,
    Settings,
    judge,
    linear_edges,
    log_edges,
    with_columns,
)


class FakeQuality(Settings):
    """Two one-sided limits on words, one two-sided on their mean length, one without a measure."""

    name: ClassVar = "fake_quality"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"fake_quality.words": pa.float64(), "fake_quality.mean_word_length": pa.float64()}
    measures: ClassVar = (
        Measure("fake_quality.words", "words", log_edges(1, 10_000, 40)),
        Measure("fake_quality.mean_word_length", "characters per word", linear_edges(0, 20, 40)),
    )
    min_words: int = 20
    max_words: int = 900
    min_mean_word_length: float = 2.2
    max_mean_word_length: float = 8.0

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("too_few_words", "fake_quality.words", at_least=self.min_words, published="Rae et al. 2021, A1.1"),
            Rule("too_many_words", "fake_quality.words", at_most=self.max_words),
            Rule(
                "mean_word_length",
                "fake_quality.mean_word_length",
                at_least=self.min_mean_word_length,
                at_most=self.max_mean_word_length,
            ),
        )

    def __call__(self, batch: Batch) -> Result:
        texts = batch["text"].to_pylist()
        words = np.array([len(t.split()) for t in texts], dtype=np.float64)
        chars = np.array([sum(map(len, t.split())) for t in texts], dtype=np.float64)
        mean = np.divide(chars, words, out=np.full(len(words), np.nan), where=words > 0)
        named = {"fake_quality.words": words, "fake_quality.mean_word_length": pa.array(mean, from_pandas=True)}
        return judge(with_columns(batch, named), self.rules())


class FakeLanguage(Settings):
    """Keeps documents whose language score is high enough; a measure in a base column."""

    name: ClassVar = "fake_language"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"language": pa.string(), "language_score": pa.float64()}
    measures: ClassVar = (Measure("language_score", "probability"),)
    min_score: float = 0.3

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("unsure_language", "language_score", at_least=self.min_score),)

    def __call__(self, batch: Batch) -> Result:
        dates = batch["metadata"].to_pylist()
        told = [orjson.loads(d) for d in dates]
        named = {
            "language": pa.array([t["language"] for t in told]),
            "language_score": pa.array([t["score"] for t in told], pa.float64()),
        }
        return judge(with_columns(batch, named), self.rules())


class FakeExact(Settings):
    """The part of a global stage that `apply_decisions` looks at."""

    name: ClassVar = "exact"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"exact.cluster": pa.string(), "exact.copies": pa.float64()}
    measures: ClassVar = (Measure("exact.copies", "documents", log_edges(1, 1000, 30)),)

    def rules(self) -> tuple[Rule, ...]:
        return ()
