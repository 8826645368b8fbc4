"""Training of the models of the stage `perplexity`."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field

from gristmill.stages import lmplz
from gristmill.stages.documents import Settings
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError, TokenFile, load_table
from gristmill.stages.perplexity import ANY_LANGUAGE, ARPA_FILE, FORMAT, LanguageModel, perplexity_of, score_lines
from gristmill.stages.sentence_pieces import Cutter, blocks, excerpt, learn, load
from gristmill.stages.training import Selection, Texts, arrays, card, documents, held_out, write_description, xxh3_of

DEFAULT_STEM = ARPA_FILE.removesuffix(".arpa")  # of the files of a model for all languages
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
    tokenize: Literal["words", "sentencepiece"] = "words"  # pieces that the model predicts; see `sentence_pieces`
    vocabulary: int = Field(32_000, ge=100)  # most pieces that SentencePiece learns, for each language
    vocabulary_bytes: int = Field(4_000_000, gt=0)  # of the text that it learns them from: a minute on one core
    estimator: Literal["kneser_ney", "lmplz"] = "kneser_ney"  # lmplz is KenLM's program, where it is on the PATH
    holdout: float = Field(0.05, ge=0, lt=1)  # share of the documents
    max_memory_mb: float = Field(1_000, ge=50)  # less would sort the text in very many passes

    def roles(self) -> dict[str, Selection]:
        """What the training reads."""
        return {"text": self.text} | ({"sample": self.sample} if self.sample else {})

    def train(self, texts: Mapping[str, Texts], folder: str | Path) -> dict[str, Any]:
        """Writes the model into `folder` -> its card. Raises ModelError where the text does not make a model."""
        started = time.perf_counter()
        folder = Path(folder)
        if self.estimator == "lmplz":
            lmplz.program()  # fails before the text is read
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            corpora: dict[str, _Corpus] = {}
            try:
                for language, array in _by_language(texts["text"], self.per_language):
                    if language not in corpora:
                        inside = Path(scratch) / str(len(corpora))
                        inside.mkdir()
                        corpora[language] = _Corpus(inside, self.tokenize, self.estimator)
                    corpora[language].add(array, self.holdout)
                models, skipped = self._estimate(corpora, folder)
            finally:
                for corpus in corpora.values():
                    corpus.close()
        cutters = {language: corpora[language].cutter for language in models}
        loaded = {
            language: LanguageModel(load_table(folder / entry["table"]), self.order, np.zeros(0), cutters[language])
            for language, entry in models.items()
        }
        unseen = {language: _score(loaded[language], corpora[language].held_out_pieces()) for language in models}
        samples = {language: unseen[language][0] for language in models}
        if self.sample is not None:
            samples = _score_sample(loaded, texts["sample"], self.per_language)
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
        """Writes the files of each language -> (entries of model.json, bytes of the languages left out)."""
        models: dict[str, dict[str, Any]] = {}
        skipped: dict[str, int] = {}
        for language in sorted(corpora):
            corpus = corpora[language]
            if self.per_language and (corpus.bytes < self.min_language_bytes or language == UNDETERMINED):
                skipped[language] = corpus.bytes
                continue
            stem = language or DEFAULT_STEM
            pieces = self._cut(corpus, folder / f"{stem}.sp.model", language)
            _check_size(corpus, corpus.sink.tokens, language)
            models[language] = {
                "arpa": f"{stem}.arpa",
                "table": f"{stem}.npy",
                **pieces,
                "documents": corpus.documents,
                "bytes": corpus.bytes,
                "xxh3": corpus.digest.hexdigest(),
                "estimate": self._estimate_one(corpus, folder / f"{stem}.arpa", folder / f"{stem}.npy"),
            }
        if not models:
            least = f"; no language has {self.min_language_bytes:,} bytes: {skipped}" if skipped else ""
            raise ModelError(f"There is no training text{least}. Look at what the selection names.")
        return models, skipped

    def _cut(self, corpus: _Corpus, path: Path, language: str) -> dict[str, Any]:
        """Learns SentencePiece's pieces and cuts the text into them, where the settings ask for it -> what was done."""
        if self.tokenize == "words":
            return {}
        if not corpus.sink.tokens:
            _check_size(corpus, 0, language)
        path.write_bytes(corpus.learn(self.vocabulary, self.vocabulary_bytes))
        corpus.cut(load(path), self.estimator)
        assert corpus.cutter is not None
        return {"pieces": {"file": path.name, "vocabulary": corpus.cutter.vocabulary, "xxh3": xxh3_of(path)}}

    def _estimate_one(self, corpus: _Corpus, arpa: Path, table: Path) -> dict[str, Any]:
        """Writes the ARPA file and the table of one language -> figures."""
        sink = corpus.sink
        if isinstance(sink, TokenFile):
            done = sink.estimate(
                arpa, order=self.order, prune=self.prune, max_memory_mb=self.max_memory_mb, table=table
            )
            return asdict(done)
        sink.flush()
        return lmplz.estimate(
            sink.path,
            arpa,
            table,
            order=self.order,
            prune=self.prune,
            max_memory_mb=self.max_memory_mb,
            scratch=corpus.folder,
        )


class _TextFile:
    """Lines of text on disk, for what reads them as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = 0  # with two a line for its ends, as TokenFile counts them
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  closed by close

    def add(self, data: np.ndarray) -> None:
        """Appends lines: data (n,) uint8, pieces separated by one space, each line ended by a newline."""
        self._file.write(data.data)
        lines = int((data == ord("\n")).sum())
        self.tokens += int((data == ord(" ")).sum()) + 3 * lines  # a line has one piece more than spaces

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Deletes the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class _Corpus:
    """The text of one language: what is trained on, on disk, and what is held out."""

    def __init__(self, folder: Path, tokenize: str, estimator: str) -> None:
        self.folder = folder
        self.documents = 0
        self.bytes = 0  # of the documents trained on
        self.digest = xxhash.xxh3_128()  # of the documents trained on, lengths included
        self.cutter: Cutter | None = None  # of SentencePiece; words where there is none
        self._words = tokenize == "words"
        self._held_out: list[Pieces] = []
        to_tokens = self._words and estimator != "lmplz"
        self.sink: TokenFile | _TextFile = TokenFile(folder) if to_tokens else _TextFile(folder / "text.txt")
        self._text = self.sink  # before it is cut

    def add(self, texts: pa.Array, holdout: float) -> None:
        held = held_out(texts, holdout)
        if held.any():
            self._held_out.append(Pieces(texts.filter(pa.array(held)), apart=self._words))
        texts = texts.filter(pa.array(~held))
        for document in documents(texts):
            self.digest.update(len(document).to_bytes(8, "little"))
            self.digest.update(document)
            self.bytes += len(document)
        self.documents += len(texts)
        self.sink.add(Pieces(texts, apart=self._words).data)

    def learn(self, vocabulary: int, max_bytes: int) -> bytes:
        """A SentencePiece model from excerpts of the text."""
        assert isinstance(self.sink, _TextFile)
        self.sink.flush()
        return learn(excerpt(self.sink.path, max_bytes), vocabulary)

    def cut(self, cutter: Cutter, estimator: str) -> None:
        """Puts the pieces of the text in its place."""
        self.cutter = cutter
        text = self._text = self.sink
        self.sink = _TextFile(self.folder / "pieces.txt") if estimator == "lmplz" else TokenFile(self.folder)
        for block in blocks(text.path):
            self.sink.add(cutter.lines(block)[0])
        text.close()

    def close(self) -> None:
        """Deletes what is on disk."""
        self._text.close()
        self.sink.close()

    def held_out_pieces(self) -> list[Pieces]:
        return [self.cutter.cut(text) for text in self._held_out] if self.cutter is not None else self._held_out


def _check_size(corpus: _Corpus, tokens: int, language: str) -> None:
    if tokens < MIN_TOKENS:
        raise ModelError(
            f"The training text{f' of language {language}' if language else ''} has {tokens:,} pieces in "
            f"{corpus.documents:,} documents; at least {MIN_TOKENS:,} are needed. Look at what the selection names, "
            "and at how many documents reach it."
        )


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


def _score(model: LanguageModel, parts: list[Pieces]) -> tuple[np.ndarray, float | None]:
    """Perplexity of each document with pieces, and of all of them as one text."""
    scored = [(pieces, score_lines(model.table, model.order, pieces)) for pieces in parts]
    values = np.concatenate([np.zeros(0), *(perplexity_of(sums, pieces) for pieces, sums in scored)])
    total = sum(float(sums.sum()) for _, sums in scored)
    predicted = sum(int((pieces.pieces + pieces.lines).sum()) for pieces, _ in scored)
    return values[~np.isnan(values)], 10.0 ** (-total / predicted) if predicted else None


def _score_sample(loaded: Mapping[str, LanguageModel], texts: Texts, per_language: bool) -> dict[str, np.ndarray]:
    """Perplexities of the sample's documents, by language."""
    found: dict[str, list[np.ndarray]] = {language: [np.zeros(0)] for language in loaded}
    for language, array in _by_language(texts, per_language):
        if language in loaded:
            values = loaded[language].perplexities(array)
            found[language].append(values[~np.isnan(values)])
    return {language: np.concatenate(parts) for language, parts in found.items()}
