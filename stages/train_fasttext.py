"""Training of the models of the stage `classifier`."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field, model_validator

from gristmill.stages.classifier import LABEL_PREFIX, MODEL_BIN, NEGATIVE, POSITIVE, prepare, probabilities
from gristmill.stages.documents import Settings
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.perplexity import FORMAT
from gristmill.stages.training import Selection, Texts, arrays, card, documents, held_out, write_description

MIN_DOCUMENTS = 10  # of each label, to train on
_ORDER_SEED = 2  # of the hash that orders documents
_M_PERTURB = -6  # glibc's malloc.h
_FEATURES = 30  # words listed for each label
_FEATURE_MIN_COUNT = 5


_OF_FASTTEXT: Mapping[str, float] = MappingProxyType(
    {"dim": 100, "epoch": 5, "lr": 0.1, "word_ngrams": 1, "min_count": 1, "buckets": 2_000_000}
)
PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # Ours: the hundreds of megabytes of fastText's own dimensions do not help on a few thousand documents.
        "small": {**_OF_FASTTEXT, "dim": 32, "buckets": 200_000},
        # fastText's defaults for `supervised` (its documentation, "List of options"); the defaults of the flags of
        # DCLM's script are the same (baselines/train_fasttext_classifier.py: lr 0.1, dim 100, epoch 5, minCount 1).
        "fasttext": _OF_FASTTEXT,
        # Li et al. 2024 (DCLM). Word bigrams, as the file name of the model that they released says
        # (openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train.bin); the rest of its training settings is not published
        # and taken from the script's defaults. Its 200,000 examples of each kind were OpenHermes-2.5 and r/ELI5
        # answers against documents of RefinedWeb, and its filter kept the best 10 % (a score of 0.018112).
        "dclm": {**_OF_FASTTEXT, "word_ngrams": 2},
    }
)


class FastText(Settings):
    """A supervised fastText model of two labels, for the stage `classifier`.

    `preset` gives the settings that are not given: see `PRESETS`.
    """

    kind: ClassVar[str] = "fasttext"
    version: ClassVar[int] = 1

    positive: Selection
    negative: Selection
    preset: Literal["small", "fasttext", "dclm"] = "small"
    dim: int = Field(32, gt=0)
    epoch: int = Field(5, gt=0)
    lr: float = Field(0.1, gt=0)
    word_ngrams: int = Field(1, ge=1)
    min_count: int = Field(1, ge=1)  # of a word in the training text
    buckets: int = Field(200_000, ge=1)  # for hashed word n-grams
    validation: float = Field(0.1, ge=0, lt=1)  # share of the documents, held out
    threads: int = Field(1, ge=1)  # more than one is faster, and not reproducible
    seed: int = 0

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        """What is not given, from the preset; what is given stays."""
        preset = data.get("preset") if isinstance(data, Mapping) else None
        return {**PRESETS[preset], **data} if isinstance(preset, str) and preset in PRESETS else data

    def roles(self) -> dict[str, Selection]:
        """What the training reads."""
        return {"positive": self.positive, "negative": self.negative}

    def train(self, texts: Mapping[str, Texts], folder: str | Path) -> dict[str, Any]:
        """Writes the model into `folder` -> its card. Raises ModelError where the texts do not make a model."""
        import fasttext

        started = time.perf_counter()
        folder = Path(folder)
        with tempfile.TemporaryDirectory(dir=folder) as scratch, _Examples(Path(scratch) / "spool.txt") as examples:
            for role, label in (("positive", POSITIVE), ("negative", NEGATIVE)):
                for array in arrays(texts[role]):
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
                with _zeroed_memory() as zeroed:
                    model = fasttext.train_supervised(
                        str(training), lr=self.lr, dim=self.dim, epoch=self.epoch, wordNgrams=self.word_ngrams,
                        minCount=self.min_count, bucket=self.buckets, thread=self.threads, seed=self.seed, verbose=0,
                    )  # fmt: skip
            except RuntimeError as error:
                raise ModelError(
                    f"fastText gave up: {error} A learning rate of {self.lr} may be too high; lower `lr`."
                ) from error
            model.save_model(str(folder / MODEL_BIN))
            validation = examples.validate(model)
        data = {
            label.removeprefix(LABEL_PREFIX): {"documents": counts[label], "bytes": examples.bytes[label]}
            for label in (POSITIVE, NEGATIVE)
        }
        write_description(folder, {"kind": self.kind, "format": FORMAT, "validation": validation})
        figures = {
            "data": data | {"xxh3": digest},
            "reproducible": self.threads == 1 and zeroed,
            "validation": validation,
            "features": _features(model),
        }
        return card(self, folder, started, figures)


@contextmanager
def _zeroed_memory() -> Iterator[bool]:
    """Within, malloc gives zeroed memory; yields False where the C library cannot (it is not glibc).

    fastText 0.9.2 with fewer than ten threads draws random values for the first tenth of its input matrix a thread
    and trains the rest from whatever the memory held: models differ from run to run, or it stops at a NaN. The rows
    left at zero learn all the same, for the first tenth are the most frequent words.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        yield False
        return
    mallopt(_M_PERTURB, 0xFF)  # fresh memory is filled with the complement of this byte
    try:
        yield True
    finally:
        mallopt(_M_PERTURB, 0)


class _Examples:
    """Prepared documents in one file, with their label, their place in the training and whether they are held out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by __exit__
        self._at = 0
        self._rows: list[tuple[int, int, int, str]] = []  # order, start, end, label
        self._validation: dict[str, list[pa.Array]] = {POSITIVE: [], NEGATIVE: []}
        self.bytes = {POSITIVE: 0, NEGATIVE: 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, texts: pa.Array, label: str, validation: float, seed: int) -> None:
        texts = prepare(texts)
        held = held_out(texts, validation)
        self._validation[label].append(texts.filter(pa.array(held)))
        for document in documents(texts.filter(pa.array(~held))):
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
        self._file.flush()
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


def evaluate(positive: np.ndarray, negative: np.ndarray, min_score: float = 0.5) -> dict[str, Any]:
    """Figures of a classifier from its scores on documents of each kind, (p,) and (n,) float64 in [0, 1].

    Precision and recall of what reaches `min_score`; AUC: how often a positive document scores above a negative one,
    ties half; the calibration curve: for ten ranges of score, documents, mean score, share positive; percentiles 0 to
    100 of all scores. None where a kind has no documents.
    """
    scores = np.nan_to_num(np.concatenate([positive, negative]), nan=0.0)
    truth = np.arange(len(scores)) < len(positive)
    chosen = scores >= min_score
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
        "min_score": min_score,
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
