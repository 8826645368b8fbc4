"""Training of the models of the stage `perplexity`."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError, TokenFile, load_table
from gristmill.stages.perplexity import ANY_LANGUAGE, ARPA_FILE, FORMAT, TABLE_FILE, perplexity_of, score_lines
from gristmill.stages.training import Selection, Texts, arrays, card, documents, held_out, write_description

UNDETERMINED = "und"  # ISO 639-2; documents without a language are counted under it, and get no model
_LANGUAGE = re.compile(r"[A-Za-z0-9_-]{1,35}")
MIN_TOKENS = 1_000  # of the training text; under it a model knows nothing


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
    max_memory_mb: float = Field(1_000, ge=50)  # less would sort the text in very many passes

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
        loaded = {language: load_table(folder / entry["table"]) for language, entry in models.items()}
        unseen = {language: _score(loaded[language], self.order, corpora[language].held_out) for language in models}
        samples = {language: unseen[language][0] for language in models}
        if self.sample is not None:
            samples = _score_sample(loaded, self.order, texts["sample"], self.per_language)
        for language, entry in models.items():
            values = samples[language]
            entry["percentiles"] = [float(x) for x in np.percentile(values, np.arange(101))] if len(values) else []
            entry["percentiles_of"] = {"documents": len(values), "from": "sample" if self.sample else "held-out text"}
            entry["held_out"] = {"documents": len(unseen[language][0]), "perplexity": unseen[language][1]}
        write_description(folder, {"kind": self.kind, "format": FORMAT, "order": self.order, "languages": models})
        return card(self, folder, started, {"languages": models, "languages_skipped": skipped})

    def _estimate(
        self, corpora: Mapping[str, _Corpus], folder: Path
    ) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
        """Writes the ARPA file of each language -> (entries of model.json, bytes of the languages left out)."""
        models: dict[str, dict[str, Any]] = {}
        skipped: dict[str, int] = {}
        for language in sorted(corpora):
            corpus = corpora[language]
            if self.per_language and (corpus.bytes < self.min_language_bytes or language == UNDETERMINED):
                skipped[language] = corpus.bytes
                continue
            if corpus.tokens.tokens < MIN_TOKENS:
                raise ModelError(
                    f"The training text{f' of language {language}' if language else ''} has "
                    f"{corpus.tokens.tokens:,} pieces in {corpus.documents:,} documents; at least {MIN_TOKENS:,} are "
                    "needed. Look at what the selection names, and at how many documents reach it."
                )
            name = f"{language}.arpa" if language else ARPA_FILE
            table = f"{language}.npy" if language else TABLE_FILE
            estimate = corpus.tokens.estimate(
                folder / name,
                order=self.order,
                prune=self.prune,
                max_memory_mb=self.max_memory_mb,
                table=folder / table,
            )
            models[language] = {
                "arpa": name,
                "table": table,
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
        held = held_out(texts, holdout)
        if held.any():
            self.held_out.append(Pieces(texts.filter(pa.array(held))))
        texts = texts.filter(pa.array(~held))
        for document in documents(texts):
            self.digest.update(len(document).to_bytes(8, "little"))
            self.digest.update(document)
            self.bytes += len(document)
        self.documents += len(texts)
        self.tokens.add(Pieces(texts).data)


def _by_language(texts: Texts, per_language: bool) -> Iterator[tuple[str, pa.Array]]:
    """The texts with their language; ANY_LANGUAGE for all where languages are not told apart."""
    if not per_language:
        for array in arrays(texts):
            yield ANY_LANGUAGE, array
        return
    for item in texts:
        if not isinstance(item, pa.RecordBatch) or "language" not in item.schema.names:
            raise ModelError(
                "`per_language` needs documents with a column `language`. Put the stage `language` before the stage "
                "that names this model."
            )
        languages = item["language"]
        languages = pc.fill_null(languages, UNDETERMINED)
        for language in sorted(languages.unique().to_pylist()):
            if not _LANGUAGE.fullmatch(language):
                raise ModelError(f"A document says that its language is {language!r}, which cannot name a file.")
            yield language, item["text"].filter(pc.equal(languages, language))


def _score(table: np.ndarray, order: int, parts: list[Pieces]) -> tuple[np.ndarray, float | None]:
    """Perplexity of each document with pieces, and of all of them as one text."""
    scored = [(pieces, score_lines(table, order, pieces)) for pieces in parts]
    values = np.concatenate([np.zeros(0), *(perplexity_of(sums, pieces) for pieces, sums in scored)])
    total = sum(float(sums.sum()) for _, sums in scored)
    predicted = sum(int((pieces.pieces + pieces.lines).sum()) for pieces, _ in scored)
    return values[~np.isnan(values)], 10.0 ** (-total / predicted) if predicted else None


def _score_sample(
    loaded: Mapping[str, np.ndarray], order: int, texts: Texts, per_language: bool
) -> dict[str, np.ndarray]:
    """Perplexities of the sample's documents, by language."""
    found: dict[str, list[np.ndarray]] = {language: [np.zeros(0)] for language in loaded}
    for language, array in _by_language(texts, per_language):
        if language in loaded:
            found[language].append(_score(loaded[language], order, [Pieces(array)])[0])
    return {language: np.concatenate(parts) for language, parts in found.items()}
