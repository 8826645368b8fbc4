"""Models that a recipe trains for its stages: which documents they learn from, and what is written.

    models:
      prose:
        kenlm: {text: {sources: [docs, readmes], max_bytes: 20_000_000}, order: 3, prune: [0, 0, 1]}
      quality:
        fasttext: {positive: {sources: [readmes]}, negative: {sources: [docs, code]}, word_ngrams: 2}

`roles()` names the selections. Whoever runs the training evaluates them, and hands `train` the texts of each role as
an iterable of string arrays, or of record batches with `text` and `language`. `train` writes into a local folder:

    model.json                  what the model is, and the percentiles of its scores; stages read it
    lm.arpa, <language>.arpa    KenLM
    model.bin                   fastText

and returns the card: JSON-able, with the data and its hash, settings, sizes, seconds, and how the model does on
documents held out by a hash of their text. The same texts in the same order give the same files, byte for byte.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field

from gristmill.stages.classifier import LABEL_PREFIX, MODEL_BIN, NEGATIVE, POSITIVE, prepare, probabilities
from gristmill.stages.documents import Settings
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError, TokenFile
from gristmill.stages.perplexity import (
    ANY_LANGUAGE,
    ARPA_FILE,
    FORMAT,
    MODEL_FILE,
    load_arpa,
    perplexity_of,
    score_lines,
)

MIN_TOKENS = 1_000  # of a language model's training text; under it a model knows nothing
MIN_DOCUMENTS = 10  # of each label of a classifier, for training
_SPLIT_SEED, _ORDER_SEED = 1, 2  # of the hashes that hold out documents and that order them
_FEATURES = 30  # words listed for each label
_FEATURE_MIN_COUNT = 5

Texts = Iterable[pa.Array | pa.ChunkedArray | pa.RecordBatch]


class Limits(Settings):
    """Bounds on a measure, both inclusive."""

    at_least: float | None = None
    at_most: float | None = None


class Selection(Settings):
    """Documents to learn from: some of the run's own, or files. The runner evaluates it, in a fixed order."""

    sources: tuple[str, ...] | None = None  # names of the recipe's sources; none: all
    files: str | None = None  # glob of files to read instead of the run's documents
    where: Mapping[str, Limits] = Field(default_factory=dict)  # measure column -> bounds that a document must meet
    max_bytes: int | None = Field(None, gt=0)  # of UTF-8 text
    max_documents: int | None = Field(None, gt=0)
    seed: int = 0  # of the sample where a maximum cuts


class KenLM(Settings):
    """A modified Kneser-Ney model of text, for the stage `perplexity`."""

    kind: ClassVar[str] = "kenlm"
    version: ClassVar[int] = 1

    text: Selection
    sample: Selection | None = None  # documents whose perplexities give the percentiles; none: the held-out text
    order: int = Field(3, ge=2, le=6)
    prune: tuple[int, ...] = ()  # as `lmplz --prune`: n-grams of an order that occur this often or less are left out
    per_language: bool = False  # one model for each language; the documents must carry `language`
    min_language_bytes: int = Field(2_000_000, ge=0)  # a language with less text gets no model
    holdout: float = Field(0.05, ge=0, lt=1)  # share of the documents
    max_memory_mb: float = Field(1_000, gt=0)

    def roles(self) -> dict[str, Selection]:
        """What the training reads."""
        return {"text": self.text} | ({"sample": self.sample} if self.sample else {})

    def train(self, texts: Mapping[str, Texts], folder: str | Path) -> dict[str, Any]:
        """Writes the model into `folder` -> its card. Raises ModelError where the text does not make a model."""
        started = time.perf_counter()
        folder = Path(folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            corpora: dict[str, _Corpus] = {}
            try:
                for language, array in _by_language(texts["text"], self.per_language):
                    if language not in corpora:
                        inside = Path(scratch) / str(len(corpora))
                        inside.mkdir()
                        corpora[language] = _Corpus(TokenFile(inside))
                    corpora[language].add(array, self.holdout)
                models, skipped = self._estimate(corpora, folder)
            finally:
                for corpus in corpora.values():
                    corpus.tokens.close()
        loaded = {language: load_arpa(folder / entry["file"]) for language, entry in models.items()}
        held_out = {language: _score(loaded[language], corpora[language].held_out) for language in models}
        samples = {language: held_out[language][0] for language in models}
        if self.sample is not None:
            samples = _score_sample(loaded, texts["sample"], self.per_language)
        for language, entry in models.items():
            values = samples[language]
            entry["percentiles"] = [float(x) for x in np.percentile(values, np.arange(101))] if len(values) else []
            entry["percentiles_of"] = {"documents": len(values), "from": "sample" if self.sample else "held-out text"}
            entry["held_out"] = {"documents": len(held_out[language][0]), "perplexity": held_out[language][1]}
        _write_description(folder, {"kind": self.kind, "format": FORMAT, "order": self.order, "languages": models})
        return _card(self, folder, started, {"languages": models, "languages_skipped": skipped})

    def _estimate(
        self, corpora: Mapping[str, _Corpus], folder: Path
    ) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        """Writes the ARPA file of each language -> (entries of model.json, bytes of the languages left out)."""
        models: dict[str, dict[str, Any]] = {}
        skipped: dict[str, int] = {}
        for language in sorted(corpora):
            corpus = corpora[language]
            if self.per_language and corpus.bytes < self.min_language_bytes:
                skipped[language] = corpus.bytes
                continue
            if corpus.tokens.tokens < MIN_TOKENS:
                raise ModelError(
                    f"The training text{f' of language {language}' if language else ''} has "
                    f"{corpus.tokens.tokens:,} pieces in {corpus.documents:,} documents; at least {MIN_TOKENS:,} are "
                    "needed. Look at what the selection names, and at how many documents reach it."
                )
            name = f"{language}.arpa" if language else ARPA_FILE
            estimate = corpus.tokens.estimate(
                folder / name, order=self.order, prune=self.prune, max_memory_mb=self.max_memory_mb
            )
            models[language] = {
                "file": name,
                "documents": corpus.documents,
                "bytes": corpus.bytes,
                "xxh3": corpus.digest.hexdigest(),
                "estimate": asdict(estimate),
            }
        if not models:
            least = f"; no language has {self.min_language_bytes:,} bytes: {skipped}" if skipped else ""
            raise ModelError(f"There is no training text{least}. Look at what the selection names.")
        return models, skipped


@dataclass
class _Corpus:
    """The text of one language: what is trained on, as tokens, and what is held out."""

    tokens: TokenFile
    documents: int = 0
    bytes: int = 0  # of the documents trained on
    digest: Any = field(default_factory=xxhash.xxh3_128)  # of the documents trained on, lengths included
    held_out: list[Pieces] = field(default_factory=list)

    def add(self, texts: pa.Array, holdout: float) -> None:
        held = _held_out(texts, holdout)
        if held.any():
            self.held_out.append(Pieces(texts.filter(pa.array(held))))
        texts = texts.filter(pa.array(~held))
        for document in _documents(texts):
            self.digest.update(len(document).to_bytes(8, "little"))
            self.digest.update(document)
            self.bytes += len(document)
        self.documents += len(texts)
        self.tokens.add(Pieces(texts).data)


class FastText(Settings):
    """A supervised fastText model of two labels, for the stage `classifier`.

    Defaults as DCLM's training script (baselines/train_fasttext_classifier.py: lr 0.1, epoch 5, minCount 1), with
    fewer dimensions and hash buckets than fastText's own (100 and 2,000,000), which make files of hundreds of
    megabytes and do not help on a few thousand documents.
    """

    kind: ClassVar[str] = "fasttext"
    version: ClassVar[int] = 1

    positive: Selection
    negative: Selection
    dim: int = Field(32, gt=0)
    epoch: int = Field(5, gt=0)
    lr: float = Field(0.1, gt=0)
    word_ngrams: int = Field(1, ge=1)
    min_count: int = Field(1, ge=1)  # of a word in the training text
    buckets: int = Field(200_000, ge=1)  # for hashed word n-grams
    validation: float = Field(0.1, ge=0, lt=1)  # share of the documents, held out
    threads: int = Field(1, ge=1)  # more than one is faster, and not reproducible
    seed: int = 0

    def roles(self) -> dict[str, Selection]:
        """What the training reads."""
        return {"positive": self.positive, "negative": self.negative}

    def train(self, texts: Mapping[str, Texts], folder: str | Path) -> dict[str, Any]:
        """Writes the model into `folder` -> its card. Raises ModelError where the texts do not make a model."""
        import fasttext

        started = time.perf_counter()
        folder = Path(folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            examples = _Examples(Path(scratch) / "spool.txt")
            for role, label in (("positive", POSITIVE), ("negative", NEGATIVE)):
                for array in _arrays(texts[role]):
                    examples.add(array, label, self.validation, self.seed)
            counts = examples.counts()
            for label in (POSITIVE, NEGATIVE):
                if counts[label] < MIN_DOCUMENTS:
                    role = label.removeprefix(LABEL_PREFIX)
                    raise ModelError(
                        f"A classifier needs at least {MIN_DOCUMENTS} documents with words of each kind to train on; "
                        f"`{role}` has {counts[label]:,}. Look at what its selection names."
                    )
            training = Path(scratch) / "train.txt"
            digest = examples.write(training)
            try:
                model = fasttext.train_supervised(
                    str(training), lr=self.lr, dim=self.dim, epoch=self.epoch, wordNgrams=self.word_ngrams,
                    minCount=self.min_count, bucket=self.buckets, thread=self.threads, seed=self.seed, verbose=0,
                )  # fmt: skip
            except RuntimeError as error:
                raise ModelError(
                    f"fastText gave up: {error}. A learning rate of {self.lr} may be too high; lower `lr`."
                ) from error
            model.save_model(str(folder / MODEL_BIN))
            validation = examples.validate(model)
        data = {
            label.removeprefix(LABEL_PREFIX): {"documents": counts[label], "bytes": examples.bytes[label]}
            for label in (POSITIVE, NEGATIVE)
        }
        _write_description(folder, {"kind": self.kind, "format": FORMAT, "validation": validation})
        figures = {
            "data": data | {"xxh3": digest},
            "reproducible": self.threads == 1,
            "validation": validation,
            "features": _features(model),
        }
        return _card(self, folder, started, figures)


class _Examples:
    """Prepared documents in one file, with their label, their place in the training and whether they are held out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by `write`
        self._at = 0
        self._rows: list[tuple[int, int, int, str]] = []  # order, start, end, label
        self._validation: dict[str, list[pa.Array]] = {POSITIVE: [], NEGATIVE: []}
        self.bytes = {POSITIVE: 0, NEGATIVE: 0}

    def add(self, texts: pa.Array, label: str, validation: float, seed: int) -> None:
        texts = prepare(texts)
        held = _held_out(texts, validation)
        self._validation[label].append(texts.filter(pa.array(held)))
        for document in _documents(texts.filter(pa.array(~held))):
            if not bytes(document[:256]).strip() and not bytes(document).strip():
                continue
            order = xxhash.xxh3_64_intdigest(document, _ORDER_SEED + seed)
            self._rows.append((order, self._at, self._at + len(document), label))
            self._file.write(document)
            self._at += len(document)
            self.bytes[label] += len(document)

    def counts(self) -> dict[str, int]:
        return {label: sum(row[3] == label for row in self._rows) for label in (POSITIVE, NEGATIVE)}

    def write(self, path: Path) -> str:
        """Writes fastText's training file, in the order of hashes, for it learns line by line -> xxh3-128 of it."""
        self._file.close()
        digest = xxhash.xxh3_128()
        data = np.memmap(self.path, np.uint8, "r")
        with open(path, "wb") as file:
            for _, start, end, label in sorted(self._rows):
                line = label.encode() + b" " + data[start:end].tobytes() + b"\n"
                digest.update(line)
                file.write(line)
        return digest.hexdigest()

    def validate(self, model: Any) -> dict[str, Any]:
        """How the model does on the documents held out."""
        scores = {
            label: np.concatenate([np.zeros(0), *(probabilities(model, texts) for texts in arrays)])
            for label, arrays in self._validation.items()
        }
        return evaluate(scores[POSITIVE], scores[NEGATIVE])


def evaluate(positive: np.ndarray, negative: np.ndarray) -> dict[str, Any]:
    """Figures of a classifier from its scores on documents of each kind, (p,) and (n,) float64 in [0, 1].

    Precision and recall at 0.5; AUC: how often a positive document scores above a negative one, ties half; the
    calibration curve: for ten ranges of score, documents, mean score, share positive; percentiles 0 to 100 of all
    scores. None where a kind has no documents.
    """
    scores = np.nan_to_num(np.concatenate([positive, negative]), nan=0.0)
    truth = np.arange(len(scores)) < len(positive)
    chosen = scores >= 0.5
    hits = int((chosen & truth).sum())
    calibration = []
    for i in range(10):
        inside = (np.minimum((scores * 10).astype(int), 9)) == i
        n = int(inside.sum())
        mean, share = (float(scores[inside].mean()), float(truth[inside].mean())) if n else (None, None)
        calibration.append({"documents": n, "mean_score": mean, "share_positive": share})
    return {
        "positive": len(positive),
        "negative": len(negative),
        "precision": hits / int(chosen.sum()) if chosen.any() else None,
        "recall": hits / len(positive) if len(positive) else None,
        "auc": auc(positive, negative),
        "calibration": calibration,
        "percentiles": [float(x) for x in np.percentile(scores, np.arange(101))] if len(scores) else [],
    }


def auc(positive: np.ndarray, negative: np.ndarray) -> float | None:
    """Area under the ROC curve: P(positive > negative) + P(equal) / 2; None where either is empty."""
    if not len(positive) or not len(negative):
        return None
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.sum() / 2 / len(positive) / len(negative))


def _features(model: Any) -> dict[str, list[str]]:
    """The words of the training text that speak most for each label, among those that occur a few times."""
    words, counts = model.get_words(include_freq=True)
    vectors = model.get_input_matrix()[: len(words)]
    labels = model.labels
    output = model.get_output_matrix()
    weight = vectors @ (output[labels.index(POSITIVE)] - output[labels.index(NEGATIVE)])
    common = [i for i in np.argsort(-weight, kind="stable") if counts[i] >= _FEATURE_MIN_COUNT and words[i] != "</s>"]
    return {
        "positive": [words[i] for i in common[:_FEATURES] if weight[i] > 0],
        "negative": [words[i] for i in reversed(common[-_FEATURES:]) if weight[i] < 0],
    }


def _arrays(texts: Texts) -> Iterator[pa.Array]:
    """The text of each item, one array an item."""
    for item in texts:
        array = item["text"] if isinstance(item, pa.RecordBatch) else item
        yield array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _by_language(texts: Texts, per_language: bool) -> Iterator[tuple[str, pa.Array]]:
    """The texts with their language; ANY_LANGUAGE for all where languages are not told apart."""
    if not per_language:
        for array in _arrays(texts):
            yield ANY_LANGUAGE, array
        return
    for item in texts:
        if not isinstance(item, pa.RecordBatch) or "language" not in item.schema.names:
            raise ModelError(
                "`per_language` needs documents with a column `language`. Put the stage `language` before the stage "
                "that names this model."
            )
        languages = item["language"]
        for language in sorted(languages.unique().drop_null().to_pylist()):
            yield language, item["text"].filter(pa.compute.equal(languages, language))


def _documents(texts: pa.Array) -> Iterator[memoryview]:
    offsets, data = string_views(texts)
    view = data.data
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        yield view[start:end]


def _held_out(texts: pa.Array, share: float) -> np.ndarray:
    """Which documents are held out, by a hash of their text: the same in every run, copies together. (n,) bool."""
    limit = int(share * 2.0**64)
    hashes = (xxhash.xxh3_64_intdigest(document, _SPLIT_SEED) for document in _documents(texts))
    return np.fromiter((h < limit for h in hashes), bool, len(texts))


def _score(model: Any, parts: list[Pieces]) -> tuple[np.ndarray, float | None]:
    """Perplexity of each document with pieces, and of all of them as one text."""
    scored = [(pieces, score_lines(model, pieces)) for pieces in parts]
    values = np.concatenate([np.zeros(0), *(perplexity_of(sums, pieces) for pieces, sums in scored)])
    total = sum(float(sums.sum()) for _, sums in scored)
    predicted = sum(int((pieces.pieces + pieces.lines).sum()) for pieces, _ in scored)
    return values[~np.isnan(values)], 10.0 ** (-total / predicted) if predicted else None


def _score_sample(loaded: Mapping[str, Any], texts: Texts, per_language: bool) -> dict[str, np.ndarray]:
    """Perplexities of the sample's documents, by language."""
    found: dict[str, list[np.ndarray]] = {language: [np.zeros(0)] for language in loaded}
    for language, array in _by_language(texts, per_language):
        if language in loaded:
            found[language].append(_score(loaded[language], [Pieces(array)])[0])
    return {language: np.concatenate(parts) for language, parts in found.items()}


def _write_description(folder: Path, description: Mapping[str, Any]) -> None:
    (folder / MODEL_FILE).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _card(settings: KenLM | FastText, folder: Path, started: float, figures: Mapping[str, Any]) -> dict[str, Any]:
    """What the report says of a model."""
    files = {path.name: {"bytes": path.stat().st_size, "xxh3": _xxh3_of(path)} for path in sorted(folder.iterdir())}
    return {
        "kind": settings.kind,
        "version": settings.version,
        "settings": settings.model_dump(mode="json"),
        **figures,
        "files": files,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _xxh3_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
