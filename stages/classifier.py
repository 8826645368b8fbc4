"""Probability that a document is of the good kind, by a fastText model.

fastText (Joulin et al. 2017) as DCLM used it (Li et al. 2024, section 4.4): a linear model over words and word n-grams
that tells documents like the positive examples from documents like the negative ones. The recipe trains it
(`models.FastText`), or names a model of others by path. Text is prepared by one function for training and scoring.

    - classifier: {model: quality, min_score: 0.5}                        # a limit
    - classifier: {model: quality, keep_top: 0.1, keep_top_by: language}  # the best tenth of each language
    - classifier: {model: quality, pareto: 9}                             # GPT-3's draw
    - classifier: {model: edu, column: edu}                               # a second one: its column is edu.score
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, model_validator

from gristmill.stages import duplicates
from gristmill.stages.documents import (
    Batch,
    BySettings,
    Measure,
    Result,
    Rule,
    Settings,
    cut,
    heading,
    linear_edges,
    with_columns,
)
from gristmill.stages.fasttext_file import Model, read_model
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.loading import loaded_once
from gristmill.stages.perplexity import read_description
from gristmill.stages.signatures import text_hashes
from gristmill.stages.top_share import EVERYTHING, Cuts, find_cuts, in_top

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
    """Probability of `label` for texts that `prepare` gave -> (n,) float64 in [0, 1]; NaN where no word is known.
    model: what `load_classifier` gives, or fastText's object."""
    if isinstance(model, Model):
        return np.clip(model.probabilities(texts, label), 0.0, 1.0)
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

    A `Model`, or fastText's object where only that knows this kind of model. Raises ModelError where it is missing,
    cannot be read or does not know the label.
    """
    path = Path(model)
    if not path.is_file():
        read_description(model, "fasttext")
        path = path / MODEL_BIN
    try:
        if (loaded := read_model(path)) is None:
            from fasttext.FastText import _FastText

            loaded = _FastText(str(path))
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: fastText cannot read this model: {error}") from error
    if label not in loaded.labels:
        raise ModelError(f"{path} has no label {label}; it has {', '.join(loaded.labels)}. Set `label` to one of them.")
    return loaded


class Classifier(Settings):
    """Measures the probability of the positive label; keeps what reaches `min_score`, the best share, or what a draw
    spares.

    `keep_top` is a global cut: all documents that reach the stage are ranked, and exactly ceil(keep_top * documents) of
    them are the top (`top_share.py` says how ties fall), of all documents or of each source or language. Documents
    without a known word have no score and rank last. With `min_score` as well, a document must be in the top and reach
    the limit.

    With `pareto`, as GPT-3 sampled Common Crawl (Brown et al. 2020, appendix A, alpha 9), a document of score s stays
    where a draw from the Lomax distribution exceeds 1 - s: a share of (2 - s) ^ -alpha. The draw is a hash of doc_id.
    With `min_score` as well, a document must reach the limit and be spared. A draw and an exact share contradict each
    other: that is an error.
    """

    name: ClassVar[str] = "classifier"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = cast(Any, BySettings(lambda stage: stage._needs()))
    adds: ClassVar[Mapping[str, pa.DataType]] = cast(Any, BySettings(lambda stage: {stage.score_column: pa.float64()}))
    measures: ClassVar[tuple[Measure, ...]] = cast(
        Any, BySettings(lambda stage: (Measure(stage.score_column, "probability", linear_edges(0, 1)),))
    )
    after_signing: ClassVar[tuple[str, ...]] = ("min_score", "keep_top", "pareto", "seed", "column")

    model: str  # folder that `models.FastText` wrote, the name of a model of the recipe, or a fastText file
    min_score: float | None = Field(None, ge=0, le=1)  # no limit at all: measure only
    keep_top: float | None = Field(None, gt=0, le=1)  # share of the documents that reach the stage; DCLM: 0.1
    keep_top_by: Literal["source", "language"] | None = None  # the share of each; none: of all documents together
    pareto: float | None = Field(None, gt=0)  # alpha; the larger, the fewer documents of low score stay
    seed: int = Field(0, ge=0)  # of the draws
    label: str = POSITIVE  # of a model of others, for example __label__hq of DCLM's
    # What comes before `.score`, and in reasons: each use of the stage needs its own.
    column: str = Field("classifier", pattern=r"^[a-z][a-z0-9_]*$")

    @model_validator(mode="after")
    def _check(self) -> Classifier:
        if self.keep_top is not None and self.pareto is not None:
            raise ValueError(
                "`keep_top` keeps an exact share and `pareto` leaves the share to draws: the two contradict each "
                "other. Give one of them."
            )
        if self.keep_top_by is not None and self.keep_top is None:
            raise ValueError(f"`keep_top_by: {self.keep_top_by}` says of what a share is kept; give `keep_top` too.")
        return self

    @property
    def score_column(self) -> str:
        return f"{self.column}.score"

    @property
    def heading(self) -> str:
        """In ledgers and the report."""
        return heading(self.name, self.column)

    @property
    def is_global(self) -> bool:
        """True where a document's fate depends on all others."""
        return self.keep_top is not None

    @property
    def not_in_top(self) -> str:
        """The reason of documents below the top."""
        return "not_in_top" if self.column == self.name else f"{self.column}_not_in_top"

    def _needs(self) -> tuple[str, ...]:
        grouped = (self.keep_top_by,) if self.keep_top_by == "language" else ()
        return ("text", "source", *grouped) if self.is_global else ("text",)

    def rules(self) -> tuple[Rule, ...]:
        if self.min_score is None:
            return ()
        return (Rule(f"{self.column}_score_too_low", self.score_column, at_least=self.min_score),)

    def __call__(self, batch: Batch) -> Result:
        if self.is_global:
            raise TypeError("`keep_top` ranks the documents of a whole run: use `sign` and `cluster`.")
        scores = self._scores(batch)
        fails = {rule.reason: rule.fails(scores) for rule in self.rules()}
        if self.pareto is not None:
            fails[f"{self.column}_score_below_draw"] = ~(_draws(batch["doc_id"], self.pareto, self.seed) > 1 - scores)
        return cut(with_columns(batch, {self.score_column: pa.array(scores, from_pandas=True)}), fails)

    def sign(self, batch: Batch) -> Batch:
        """-> doc_id, source, `language` where the share is of each, text_hash, score (NaN without a known word)."""
        columns = {"doc_id": batch["doc_id"], "source": batch["source"]}
        if self.keep_top_by == "language":
            columns["language"] = batch["language"]
        columns["text_hash"] = text_hashes(batch["text"])
        columns["score"] = pa.array(self._scores(batch))
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    def cluster(self, signatures: Sequence[pa.Table]) -> tuple[Iterator[pa.Table], Mapping[str, Any]]:
        """-> decisions, a table a shard when it is asked for; figures: documents, in_top, threshold and so on."""
        assert self.keep_top is not None
        duplicates.row_starts(signatures)  # raises where a doc_id is twice in a shard
        cuts = find_cuts(signatures, self.keep_top, self.keep_top_by)
        return self._decisions(signatures, cuts), self._figures(cuts)

    def _decisions(self, signatures: Sequence[pa.Table], cuts: Cuts) -> Iterator[pa.Table]:
        for table in signatures:
            stays = pa.array(in_top(table, cuts))
            scores = table["score"].combine_chunks().to_numpy()
            yield pa.table(
                {
                    "doc_id": table["doc_id"],
                    "reason": pc.if_else(stays, pa.scalar(None, pa.string()), pa.scalar(self.not_in_top)),
                    self.score_column: pa.array(scores, from_pandas=True),
                }
            )

    def _figures(self, cuts: Cuts) -> dict[str, Any]:
        """Sums over the groups, and the groups; the one group's figures where the share is of all documents."""
        groups = {name: cut.figures() for name, cut in cuts.groups.items()}
        sums = {
            name: sum(figures[name] for figures in groups.values()) for name in ("documents", "in_top", "without_score")
        }
        out = {"keep_top": self.keep_top, **sums, "not_in_top": sums["documents"] - sums["in_top"]}
        return out | (groups.get(EVERYTHING, {}) if cuts.by is None else {f"by_{cuts.by}": groups})

    def _scores(self, batch: Batch) -> np.ndarray:
        """(n,) float64 in [0, 1]; NaN where no word is known."""
        return probabilities(load_classifier(self.model, self.label), prepare(batch["text"]), self.label)


def _draws(doc_ids: pa.Array, alpha: float, seed: int) -> np.ndarray:
    """(n,) float64 from the Lomax distribution, P(x > t) = (1 + t) ^ -alpha, each fixed by its doc_id and the seed."""
    hashes = (xxhash.xxh3_64_intdigest(doc_id, seed) for doc_id in doc_ids.to_pylist())
    uniform = (np.fromiter(hashes, np.float64, len(doc_ids)) + 0.5) / 2.0**64
    return uniform ** (-1 / alpha) - 1
