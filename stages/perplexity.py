"""Perplexity of a document under an n-gram model: how surprising its text is, a piece on average.

CCNet (Wenzek et al. 2020) scores a document under a model of its language's Wikipedia and sorts it into head, middle
and tail by percentiles. Here the model is trained by the recipe (`models.KenLM`), the percentiles are those of a
sample that the recipe names, stored beside the model, and training and scoring cut text into the same pieces
(`kernels/normalise.py`).

    perplexity = 10 ^ (-sum over lines of log10 p(line) / sum over lines of (pieces of the line + 1))

The 1 is the end of the line, which the model predicts too. CCNet's code glues lines together before it scores, so that
its sums see one line a document; lines are kept apart here.

    - perplexity: {model: prose, unit: paragraph, max_paragraph_perplexity: 3000, remove_paragraphs: true}

With `unit: paragraph` each line has a perplexity of its own, from the same pass (`perplexity_paragraphs.py`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, model_validator

from gristmill.stages.ccnet import CCNetModel, load_pairs
from gristmill.stages.documents import (
    Batch,
    BySettings,
    Measure,
    Result,
    Rule,
    Settings,
    cut,
    linear_edges,
    log_edges,
    with_columns,
    without_columns,
)
from gristmill.stages.kernels import ngram_table
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError, load_table
from gristmill.stages.loading import loaded_once
from gristmill.stages.perplexity_paragraphs import Edited, Paragraphs, lines_of, replaced
from gristmill.stages.sentence_pieces import Cutter, load

MODEL_FILE = "model.json"  # what a model is, and the percentiles of its sample
ARPA_FILE = "lm.arpa"
TABLE_FILE = "lm.npy"
FORMAT = 1  # of model.json and of the pieces; raise it when either changes
ANY_LANGUAGE = ""
BUCKETS = ("head", "middle", "tail")
_EDITED, _REMOVED = "perplexity.edited", "perplexity.removed"  # columns for the time of a call
NO_BUCKET = "all"  # CCNet's name for documents of a language without a model


@dataclass(frozen=True)
class LanguageModel:
    """A model, loaded, with the perplexities at percentiles 0, 1 ... 100 of its sample (empty where it had none)."""

    table: np.ndarray  # (slots, 2) uint64
    order: int
    percentiles: np.ndarray  # (101,) float64, ascending
    cutter: Cutter | None = None  # of SentencePiece; words where there is none
    places: ClassVar[np.ndarray] = np.linspace(0, 100, 101)

    def cut(self, texts: pa.Array) -> Pieces:
        """(n,) strings -> their pieces, as the model was trained on."""
        return Pieces(texts) if self.cutter is None else self.cutter(texts)

    def perplexities(self, texts: pa.Array) -> np.ndarray:
        """(n,) strings -> (n,) float64; NaN for a document without pieces."""
        pieces = self.cut(texts)
        return perplexity_of(score_lines(self.table, self.order, pieces), pieces)

    def paragraphs(self, texts: pa.Array) -> tuple[np.ndarray, Paragraphs]:
        """(n,) strings -> what `perplexities` gives, but for the order of a sum, and the paragraphs. One pass."""
        lines, document = lines_of(texts)
        pieces = self.cut(lines)
        sums = score_lines(self.table, self.order, pieces)
        predicted = np.bincount(document, pieces.pieces + pieces.lines, len(texts)).astype(np.float64)
        predicted[predicted == 0] = np.nan
        documents = 10.0 ** (-np.bincount(document, sums, len(texts)) / predicted)
        return documents, Paragraphs(len(texts), lines, document, perplexity_of(sums, pieces))


def score_lines(table: np.ndarray, order: int, pieces: Pieces) -> np.ndarray:
    """log10 probability of each document's lines, summed -> (n,) float64; 0 for a document without pieces.

    table: as `kneser_ney.load_table` gives it. The sums are those of KenLM on the model's ARPA file.
    """
    totals = np.zeros(len(pieces))
    ngram_table.score(pieces.data, pieces.ends, ngram_table.RESERVED, order, table, table.view(np.float32), totals)
    return totals


def perplexity_of(log10_sums: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Perplexity of each document -> (n,) float64; NaN for a document without pieces."""
    predicted = (pieces.pieces + pieces.lines).astype(np.float64)
    predicted[predicted == 0] = np.nan
    return 10.0 ** (-log10_sums / predicted)


@loaded_once(16)
def load_models(folder: str) -> Mapping[str, LanguageModel]:
    """The models of a folder, by language; ANY_LANGUAGE where there is one for all. Once a process and folder.

    Raises ModelError for a folder that is missing, incomplete, or of another format.
    """
    description = read_description(folder, "kenlm")
    models = {}
    for language, entry in description["languages"].items():
        table = load_table(Path(folder) / entry["table"])
        percentiles = np.asarray(entry["percentiles"], np.float64)
        cutter = _cutter(Path(folder), entry["pieces"]) if "pieces" in entry else None
        models[language] = LanguageModel(table, description["order"], percentiles, cutter)
    return models


def _cutter(folder: Path, entry: Mapping[str, Any]) -> Cutter:
    """The SentencePiece model beside a language model. Raises ModelError where it is not the one of the training."""
    path = folder / entry["file"]
    cutter = load(path)
    if xxhash.xxh3_128_hexdigest(path.read_bytes()) != entry["xxh3"]:
        raise ModelError(
            f"{path} is not the file that the model was trained with: text would be cut otherwise. Delete the model's "
            "folder and train it again."
        )
    return cutter


def read_description(folder: str, kind: str) -> dict[str, Any]:
    """model.json of a folder. Raises ModelError where it is missing, of another kind or of another format."""
    path = Path(folder) / MODEL_FILE
    try:
        description = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist. A stage names a model that was not trained: name it under `models:` in the "
            "recipe, or give the folder of one that was."
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} cannot be read: {error}. Delete the folder and train the model again.") from error
    if description.get("kind") != kind:
        raise ModelError(f"{path}: a {kind} model is needed; this is a model of kind {description.get('kind')}.")
    if description.get("format") != FORMAT:
        raise ModelError(
            f"{path} has format {description.get('format')}, this version reads format {FORMAT}: text would not be cut "
            "as the model was trained. Delete the folder and train the model again."
        )
    return dict(description)


@dataclass
class _Measured:
    """What a batch is after scoring: (n,) arrays."""

    batch: Batch  # with its measures
    has_model: np.ndarray  # bool
    edited: list[tuple[np.ndarray, Edited]]  # rows, and what became of them, where paragraphs are removed


def _adds(stage: Any) -> dict[str, pa.DataType]:
    out = {
        "perplexity.perplexity": pa.float64(),
        "perplexity.percentile": pa.float64(),  # place among the sample's documents, 0 (least surprising) to 100
        "perplexity.bucket": pa.string(),
    }
    return out | {measure.column: pa.float64() for measure in stage.measures if measure.column not in out}


def _measures(stage: Any) -> tuple[Measure, ...]:
    out = [
        Measure("perplexity.perplexity", "1", log_edges(1, 1e6, 60)),
        Measure("perplexity.percentile", "percent of the sample", linear_edges(0, 100)),
    ]
    if stage.unit == "paragraph":
        out.append(Measure("perplexity.worst_paragraph", "1", log_edges(1, 1e6, 60)))
    if stage.max_paragraph_perplexity is not None:
        out.append(Measure("perplexity.paragraphs_above", "share of characters", linear_edges(0, 1)))
    return tuple(out)


class Perplexity(Settings):
    """Measures perplexity; keeps what lies within the limits, or in the buckets named.

    A document whose language has no model keeps null measures and the bucket `all`, and stays, as in CCNet. One
    without a single piece has no perplexity, and fails any limit.

    With `unit: paragraph` a document has two more measures: `perplexity.worst_paragraph`, and, where
    `max_paragraph_perplexity` is given, `perplexity.paragraphs_above`, the share of its characters in paragraphs above
    it. `remove_paragraphs` takes these out of the text of documents that are kept, and drops a document of which no
    paragraph is left. All measures are those of the text that came in.
    """

    name: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = cast(Any, BySettings(_adds))
    measures: ClassVar[tuple[Measure, ...]] = cast(Any, BySettings(_measures))

    model: str  # folder that `models.KenLM` wrote, or the name of a model of the recipe
    min_perplexity: float | None = Field(None, gt=0)
    max_perplexity: float | None = Field(None, gt=0)
    keep: tuple[Literal["head", "middle", "tail"], ...] | None = None
    head_percentile: float = Field(30, gt=0, lt=100)  # cc_net/perplexity.py; the paper speaks of thirds
    middle_percentile: float = Field(60, gt=0, lt=100)
    compat: Literal["ccnet"] | None = None  # `model` is a folder of CCNet's own models, scored as its code does
    unit: Literal["document", "paragraph"] = "document"  # the smallest thing that is scored; a paragraph is a line
    max_paragraph_perplexity: float | None = Field(None, gt=0)
    remove_paragraphs: bool = False  # those above `max_paragraph_perplexity`

    @model_validator(mode="after")
    def _check(self) -> Perplexity:
        if self.head_percentile >= self.middle_percentile:
            raise ValueError(
                f"`head_percentile` ({self.head_percentile}) must be below `middle_percentile` "
                f"({self.middle_percentile})."
            )
        if self.keep is not None and set(self.keep) not in (
            {"head"},
            {"head", "middle"},
            {"middle"},
            {"middle", "tail"},
            {"tail"},
        ):
            raise ValueError(f"`keep` must name one bucket or two neighbours of head, middle, tail; it is {self.keep}.")
        return self

    @model_validator(mode="after")
    def _check_paragraphs(self) -> Perplexity:
        if self.unit == "document" and (self.max_paragraph_perplexity is not None or self.remove_paragraphs):
            raise ValueError("`max_paragraph_perplexity` and `remove_paragraphs` need `unit: paragraph`.")
        if self.remove_paragraphs and self.max_paragraph_perplexity is None:
            raise ValueError("`remove_paragraphs` needs `max_paragraph_perplexity`: above it paragraphs are removed.")
        if self.unit == "paragraph" and self.compat is not None:
            raise ValueError(
                "`compat: ccnet` glues the lines of a document together, as CCNet's code does, and so has no "
                "paragraphs. Leave `unit: paragraph` out, or score with a model of `models:`."
            )
        return self

    def rules(self) -> tuple[Rule, ...]:
        published = "Wenzek et al. 2020 (CCNet), cc_net/perplexity.py"
        rules = []
        if self.min_perplexity is not None:
            rules.append(Rule("perplexity_too_low", "perplexity.perplexity", at_least=self.min_perplexity))
        if self.max_perplexity is not None:
            rules.append(Rule("perplexity_too_high", "perplexity.perplexity", at_most=self.max_perplexity))
        if self.keep is not None and "head" not in self.keep:
            low = self.head_percentile if "middle" in self.keep else self.middle_percentile
            above = float(np.nextafter(low, 100))  # the bucket below keeps its bound
            rules.append(Rule("perplexity_percentile_too_low", "perplexity.percentile", above, None, published))
        if self.keep is not None and "tail" not in self.keep:
            high = self.middle_percentile if "middle" in self.keep else self.head_percentile
            rules.append(Rule("perplexity_percentile_too_high", "perplexity.percentile", None, high, published))
        return tuple(rules)

    def __call__(self, batch: Batch) -> Result:
        found = self._score(batch)
        scored = found.batch
        fails = {r.reason: r.fails(_floats(scored.column(r.column))) & found.has_model for r in self.rules()}
        if not self.remove_paragraphs:
            return cut(scored, fails)
        removed, emptied = np.zeros(batch.num_rows, np.int64), np.zeros(batch.num_rows, bool)
        for rows, edited in found.edited:
            removed[rows], emptied[rows] = edited.removed, edited.emptied
        fails["no_paragraph_left"] = emptied
        texts = replaced(batch["text"], [(rows, edited.texts) for rows, edited in found.edited])
        result = cut(with_columns(scored, {_EDITED: texts, _REMOVED: pa.array(removed)}), fails)
        counters = {
            "edited_documents": pc.sum(pc.greater(result.kept[_REMOVED], 0)).as_py() or 0,
            "removed_paragraphs": pc.sum(result.kept[_REMOVED]).as_py() or 0,
        }
        kept = with_columns(result.kept, {"text": result.kept[_EDITED]})
        kept, dropped = (without_columns(part, (_EDITED, _REMOVED)) for part in (kept, result.dropped))
        return Result(kept, dropped, {**result.counters, **counters})

    def _score(self, batch: Batch) -> _Measured:
        models: Mapping[str, LanguageModel | CCNetModel]
        models = load_pairs(self.model) if self.compat else load_models(self.model)
        rows = batch.num_rows
        values = {measure.column: np.full(rows, np.nan) for measure in self.measures}
        perplexity, percentile = values["perplexity.perplexity"], values["perplexity.percentile"]
        has_model = np.zeros(rows, bool)
        edited = []
        for language, of_language in self._languages(batch, models).items():
            entry = models[language]
            if self.keep is not None and not len(entry.percentiles):
                raise ModelError(
                    f"{self.model}: the model was stored without percentiles, so `keep` cannot tell head from tail. "
                    "Give it a `sample` and train it again."
                )
            at = np.flatnonzero(of_language)
            texts = batch["text"] if len(at) == rows else batch["text"].take(pa.array(at))
            if self.unit == "paragraph" and isinstance(entry, LanguageModel):
                perplexity[at], paragraphs = entry.paragraphs(texts)
                edited += self._paragraphs(paragraphs, at, values)
            else:
                perplexity[at] = entry.perplexities(texts)
            percentile[at] = percentile_of(perplexity[at], entry.percentiles, entry.places)
            has_model[at] = True
        bucket = np.searchsorted([self.head_percentile, self.middle_percentile], percentile, side="left")
        bucket = np.where(np.isnan(percentile), len(BUCKETS), bucket)
        columns = {name: pa.array(column, from_pandas=True) for name, column in values.items()}
        columns["perplexity.bucket"] = pa.array((*BUCKETS, NO_BUCKET), pa.string()).take(pa.array(bucket))
        return _Measured(with_columns(batch, {name: columns[name] for name in self.adds}), has_model, edited)

    def _paragraphs(
        self, paragraphs: Paragraphs, rows: np.ndarray, values: Mapping[str, np.ndarray]
    ) -> list[tuple[np.ndarray, Edited]]:
        """Enters the measures of paragraphs at some rows -> those rows edited, where that is asked for."""
        values["perplexity.worst_paragraph"][rows] = paragraphs.worst()
        if self.max_paragraph_perplexity is None:
            return []
        values["perplexity.paragraphs_above"][rows] = paragraphs.share_above(self.max_paragraph_perplexity)
        return [(rows, paragraphs.without(self.max_paragraph_perplexity))] if self.remove_paragraphs else []

    def _languages(self, batch: Batch, models: Collection[str]) -> dict[str, np.ndarray]:
        """Which documents go to which model: language -> (n,) bool."""
        if ANY_LANGUAGE in models:
            return {ANY_LANGUAGE: np.ones(batch.num_rows, bool)}
        if "language" not in batch.schema.names:
            raise ModelError(
                f"{self.model} holds a model for each of {', '.join(models)}, but the documents have no column "
                "`language`. Put the stage `language` before `perplexity`."
            )
        languages = batch["language"]
        found = {
            language: pc.fill_null(pc.equal(languages, language), False).to_numpy(zero_copy_only=False)
            for language in models
        }
        return {language: rows for language, rows in found.items() if rows.any()}


def percentile_of(values: np.ndarray, percentiles: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Place of values (n,), linear between percentiles (p,) at places (p,); NaN for NaN or without percentiles."""
    if not len(percentiles):
        return np.full(len(values), np.nan)
    found = np.interp(values, percentiles, places)
    return np.asarray(np.where(np.isnan(values), np.nan, found), np.float64)


def _floats(values: pa.Array) -> np.ndarray:
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
