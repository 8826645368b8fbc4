"""Probability that a document is of the good kind, by a fastText model.

fastText (Joulin et al. 2017) as DCLM used it (Li et al. 2024, section 4.4): a linear model over words and word n-grams
that tells documents like the positive examples from documents like the negative ones. The recipe trains it
(`models.FastText`), or names a model of others by path. Text is prepared by one function for training and scoring.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field

from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, cut, linear_edges, with_columns
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.loading import loaded_once
from gristmill.stages.perplexity import read_description

LABEL_PREFIX = "__label__"
POSITIVE, NEGATIVE = f"{LABEL_PREFIX}positive", f"{LABEL_PREFIX}negative"
MODEL_BIN = "model.bin"


def prepare(texts: pa.Array) -> pa.Array:
    """Documents as fastText lines: newlines are spaces, and no word of a document is taken for a label or a line end.

    (n,) strings -> (n,) strings. fastText reads a word that begins with `__label__` as a label, and stops at `</s>`.
    """
    texts = pc.replace_substring(texts, "\n", " ")
    texts = pc.replace_substring(texts, LABEL_PREFIX, "__label_ _")
    return pc.replace_substring(texts, "</s>", "< /s>")


def probabilities(model: Any, texts: pa.Array, label: str = POSITIVE) -> np.ndarray:
    """Probability of `label` for texts that `prepare` gave -> (n,) float64 in [0, 1]; NaN where no word is known."""
    lines = [text + "\n" for text in texts.to_pylist()]
    labels, values = model.f.multilinePredict(lines, -1, 0.0, "strict")
    out = np.full(len(lines), np.nan)
    for i, (names, scores) in enumerate(zip(labels, values, strict=True)):
        if len(names):
            out[i] = scores[names.index(label)] if label in names else 0.0
    return np.clip(out, 0.0, 1.0)  # fastText returns up to 1.00001


@loaded_once(16)
def load_classifier(model: str, label: str) -> Any:
    """The fastText model of a folder that `models.FastText` wrote, or of a .bin or .ftz file. Once a process.

    Raises ModelError where it is missing, cannot be read or does not know the label.
    """
    from fasttext.FastText import _FastText

    path = Path(model)
    if not path.is_file():
        read_description(model, "fasttext")
        path = path / MODEL_BIN
    try:
        loaded = _FastText(str(path))
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: fastText cannot read this model: {error}") from error
    if label not in loaded.labels:
        raise ModelError(f"{path} has no label {label}; it has {', '.join(loaded.labels)}. Set `label` to one of them.")
    return loaded


class Classifier(Settings):
    """Measures the probability of the positive label; keeps what reaches `min_score`, and what a draw spares.

    With `pareto`, as GPT-3 sampled Common Crawl (Brown et al. 2020, appendix A, alpha 9), a document of score s stays
    where a draw from the Lomax distribution exceeds 1 - s: a share of (2 - s) ^ -alpha. The draw is a hash of doc_id.
    """

    name: ClassVar[str] = "classifier"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {"classifier.score": pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure("classifier.score", "probability", linear_edges(0, 1)),)

    model: str  # folder that `models.FastText` wrote, the name of a model of the recipe, or a fastText file
    min_score: float | None = Field(None, ge=0, le=1)  # none: measure only
    pareto: float | None = Field(None, gt=0)  # alpha; the larger, the fewer documents of low score stay
    seed: int = Field(0, ge=0)  # of the draws
    label: str = POSITIVE  # of a model of others, for example __label__hq of DCLM's

    def rules(self) -> tuple[Rule, ...]:
        if self.min_score is None:
            return ()
        return (Rule("classifier_score_too_low", "classifier.score", at_least=self.min_score),)

    def __call__(self, batch: Batch) -> Result:
        model = load_classifier(self.model, self.label)
        scores = probabilities(model, prepare(batch["text"]), self.label)
        fails = {rule.reason: rule.fails(scores) for rule in self.rules()}
        if self.pareto is not None:
            fails["classifier_score_below_draw"] = ~(_draws(batch["doc_id"], self.pareto, self.seed) > 1 - scores)
        return cut(with_columns(batch, {"classifier.score": pa.array(scores, from_pandas=True)}), fails)


def _draws(doc_ids: pa.Array, alpha: float, seed: int) -> np.ndarray:
    """(n,) float64 from the Lomax distribution, P(x > t) = (1 + t) ^ -alpha, each fixed by its doc_id and the seed."""
    hashes = (xxhash.xxh3_64_intdigest(doc_id, seed) for doc_id in doc_ids.to_pylist())
    uniform = (np.fromiter(hashes, np.float64, len(doc_ids)) + 0.5) / 2.0**64
    return uniform ** (-1 / alpha) - 1
