"""Filter models outside a run: trained on files, tested on files, and asked about documents.

    card = train("model.yaml", "out/model", display)
    evaluate_language_model("out/model", ["held/*.jsonl.gz"], display)
    evaluate_classifier("out/model", ["good/*.jsonl"], ["bad/*.jsonl"], display)
    for row in score_files("out/model", ["crawl/*.jsonl.gz"], display): ...

A file of settings is one entry of a recipe's `models:`, whose selections name files:

    kenlm: {text: {files: "corpus/*.jsonl.gz", max_bytes: 20_000_000}, order: 5, prune: [0, 0, 1]}

Where a model has one for each language, documents get theirs from the stage `language`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from gristmill.pipelines.learn import publish_model, selected_files
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import MODELS, RecipeError
from gristmill.pipelines.selection import file_batches, selection_files
from gristmill.stages.classifier import POSITIVE, Classifier
from gristmill.stages.documents import Batch, column
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.language import Language
from gristmill.stages.perplexity import (
    ANY_LANGUAGE,
    MODEL_FILE,
    LanguageModel,
    Perplexity,
    load_models,
    perplexity_of,
    score_lines,
)
from gristmill.stages.readers_common import clean_string
from gristmill.stages.settings_file import build, nearest, read
from gristmill.stages.shards import exists, filesystem, join, read_bytes
from gristmill.stages.stores import local_copy
from gristmill.stages.train_fasttext import evaluate

Rows: TypeAlias = list[dict[str, Any]]

_READ_BYTES = 1 << 20  # of standard input a call; what has come is scored without waiting for more


def load(path: str | Path) -> Any:
    """The settings of one model, KenLM or FastText. Raises SettingsError, with file and line for every fault."""
    file = read(path)
    kinds = list(file.values)
    if len(kinds) != 1:
        raise RecipeError(
            f"{file.at()}: one model a file, `kenlm: {{...}}` or `fasttext: {{...}}`, as under `models:` in a recipe; "
            f"this one has {', '.join(f'`{kind}`' for kind in kinds) or 'nothing'}."
        )
    kind = kinds[0]
    if kind not in MODELS:
        raise RecipeError(f"{file.at([kind])}: no kind of model `{kind}`.{nearest(kind, MODELS)}")
    settings = build(MODELS[kind], file.values[kind] or {}, file, [kind])
    for role, selection in settings.roles().items():
        if selection.files is None:
            raise RecipeError(
                f"{file.at([kind, role])}: `{role}` does not say which files to read. Outside a run there are no "
                f'sources: give it `files`, for example `{role}: {{files: "corpus/*.jsonl.gz"}}`.'
            )
    return settings


def train(path: str | Path, out: str, display: Display) -> dict[str, Any]:
    """Trains the model that a file describes into a new folder -> its card.

    Raises SettingsError for the file, ModelError where the folder has content or the text makes no model.
    """
    settings = load(path)
    fs, inner = filesystem(out)
    if fs.exists(inner) and (not fs.isdir(inner) or fs.ls(inner)):
        raise ModelError(f"{out} exists already. Give another --out, or delete it first.")
    roles = settings.roles()
    files = sum(len(selection_files(selection.files)) for selection in roles.values())
    with display.phase(f"train {settings.kind}", files) as phase, tempfile.TemporaryDirectory() as scratch:

        def on_batch(name: str, documents: int, bytes_: int) -> None:
            phase.advance(documents=documents, bytes_=bytes_, pieces=0)

        def on_file(_: str) -> None:
            if phase.done < phase.total:  # a selection with a maximum reads its files twice
                phase.advance()

        texts = {
            role: _counted(role, selected_files(selection, settings, on_file), on_batch)
            for role, selection in roles.items()
        }
        card = settings.train(texts, scratch)
        return publish_model(scratch, out, {"name": Path(out).name, **card})


def _counted(role: str, batches: Iterable[Batch], on_batch: Callable[[str, int, int], None]) -> Iterator[Batch]:
    for batch in batches:
        on_batch(role, batch.num_rows, batch["text"].nbytes)
        yield batch


def kind_of(model: str) -> str:
    """ "kenlm" or "fasttext": what a folder holds; a file is taken for fastText's.

    Raises ModelError where there is no model.
    """
    if Path(model).is_file():
        return "fasttext"
    path = join(model, MODEL_FILE)
    if not exists(path):
        raise ModelError(
            f"{model} holds no {MODEL_FILE}. Name a folder that `gristmill models train` or a recipe's `models:` wrote "
            f"(models/NAME in a run), or a fastText file."
        )
    try:
        kind = orjson.loads(read_bytes(path)).get("kind")
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Delete the folder and train the model again.") from error
    if kind not in MODELS:
        raise ModelError(f"{path} is of a model of kind {kind!r}; known are {', '.join(MODELS)}.")
    return str(kind)


def evaluate_language_model(model: str, files: Sequence[str], display: Display) -> dict[str, Any]:
    """Perplexity of the documents of files, as one text and by document -> figures, by language.

    Documents whose language has no model are counted as `without_model`.
    """
    models = load_models(local_copy(model))
    sums = {language: _Sums() for language in models}
    without = 0
    for batch in _batches(files, display, with_language=ANY_LANGUAGE not in models):
        for language, texts in _by_model(batch, models):
            if language is None:
                without += len(texts)
            else:
                sums[language].add(models[language], texts)
    found = {language: sums[language].figures() for language in models if sums[language].documents}
    return {"kind": "kenlm", "model": model, "languages": found, "without_model": without}


class _Sums:
    """Figures of one language's documents."""

    def __init__(self) -> None:
        self.documents = self.bytes = self.predicted = 0
        self.log10 = 0.0
        self.values: list[np.ndarray] = []

    def add(self, model: LanguageModel, texts: pa.Array) -> None:
        pieces = model.cut(texts)
        log10 = score_lines(model.table, model.order, pieces)
        self.documents += len(texts)
        self.bytes += texts.nbytes
        self.predicted += int((pieces.pieces + pieces.lines).sum())
        self.log10 += float(log10.sum())
        self.values.append(perplexity_of(log10, pieces))

    def figures(self) -> dict[str, Any]:
        values = np.concatenate(self.values)
        values = values[~np.isnan(values)]
        return {
            "documents": self.documents,
            "pieces": self.predicted,  # with one a line for its end
            "perplexity": 10.0 ** (-self.log10 / self.predicted) if self.predicted else None,
            "percentiles": [float(x) for x in np.percentile(values, np.arange(101))] if len(values) else [],
        }


def _by_model(batch: Batch, models: Any) -> Iterator[tuple[str | None, pa.Array]]:
    """The texts of a batch with the language of the model that they go to; None where there is none."""
    if ANY_LANGUAGE in models:
        yield ANY_LANGUAGE, batch["text"]
        return
    names = np.array([name if name in models else None for name in batch["language"].to_pylist()], dtype=object)
    for name in dict.fromkeys(names):
        yield name, batch["text"].filter(pa.array(names == name))


def evaluate_classifier(
    model: str,
    positive: Sequence[str],
    negative: Sequence[str],
    display: Display,
    *,
    min_score: float = 0.5,
    label: str = POSITIVE,
) -> dict[str, Any]:
    """Precision and recall at `min_score`, AUC and calibration on the documents of files."""
    stage = Classifier.model_validate({"model": local_copy(model), "label": label})
    scores = [
        np.concatenate([np.zeros(0), *(column(stage(b).kept, "classifier.score") for b in _batches(files, display))])
        for files in (positive, negative)
    ]
    return {"kind": "fasttext", "model": model, **evaluate(scores[0], scores[1], min_score)}


def scorer(model: str, label: str = POSITIVE) -> Callable[[Batch], Batch]:
    """A function that gives batches the columns that the model's stage adds. Raises ModelError."""
    model = local_copy(model)
    if kind_of(model) == "fasttext":
        classifier = Classifier.model_validate({"model": model, "label": label})
        return lambda batch: classifier(batch).kept
    stage, language = Perplexity.model_validate({"model": model}), Language.model_validate({"min_score": 0})
    if ANY_LANGUAGE in load_models(model):
        return lambda batch: stage(batch).kept
    return lambda batch: stage(language(batch).kept).kept


def score_files(model: str, files: Sequence[str], display: Display, label: str = POSITIVE) -> Iterator[Rows]:
    """Rows in batches, one a document, in the order of the files: its id and its scores."""
    score = scorer(model, label)
    for batch in _batches(files, display):
        scored = score(batch)
        yield list(_rows({"id": scored["doc_id"].to_pylist()}, scored))


def score_lines_of(model: str, stream: BinaryIO, label: str = POSITIVE) -> Iterator[Rows]:
    """Rows in batches, one a line of the stream, as soon as it has come: number, the record's id if any, scores.

    The first line that is not blank says what all are: JSON objects with a string `text`, or plain text. Raises
    ModelError for a line that is not as the first.
    """
    score = scorer(model, label)
    as_json: bool | None = None
    before = 0  # lines
    for lines in _whole_lines(stream):
        texts: list[str] = []
        ids: list[Any] = []
        wrong: bytes | None = None
        for line in lines:
            blank = not line.strip()
            record = None if blank or as_json is False else _record(line)
            if as_json is None and not blank:
                as_json = record is not None
            if as_json and record is None and not blank:
                wrong = line
                break
            texts.append(clean_string(record["text"] if record else line.decode("utf-8", "replace"))[0])
            ids.append(record.get("id") if record else None)
        numbers = [str(before + i) for i in range(1, len(texts) + 1)]
        before += len(texts)
        scored = score(pa.RecordBatch.from_pydict({"doc_id": numbers, "text": pa.array(texts, pa.string())}))
        named = ({} if identity is None else {"id": identity} for identity in ids)
        yield [
            {"line": int(number)} | name | row
            for number, name, row in zip(numbers, named, _rows({}, scored), strict=True)
        ]
        if wrong is not None:
            raise ModelError(
                f"Line {before + 1:,} of standard input is no JSON object with a string `text`, as the first line was: "
                f"{wrong[:60].decode(errors='replace')!r}. The lines before it are scored."
            )


def _whole_lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """What has come of a stream, cut at newlines; a last line needs none."""
    parts: list[bytes] = []  # of a line that has not ended
    read_some = getattr(stream, "read1", stream.read)
    while block := read_some(_READ_BYTES):
        first, *others = block.split(b"\n")
        parts.append(first)
        if others:
            yield [b"".join(parts), *others[:-1]]
            parts = [others[-1]]
    if last := b"".join(parts):
        yield [last]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            found = json.loads(line)  # orjson refuses lone surrogates, which the text policy mends
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) and isinstance(found.get("text"), str) else None


def _rows(first: dict[str, list[Any]], scored: Batch) -> Iterator[dict[str, Any]]:
    """The columns that scoring added, without the stage's name, one mapping a document."""
    columns = dict(first)
    for name in scored.schema.names:
        if name.startswith((f"{Perplexity.name}.", f"{Classifier.name}.")):
            columns[name.split(".", 1)[1]] = scored[name].to_pylist()
        elif name == "language" and scored[name].null_count < scored.num_rows:
            columns[name] = scored[name].to_pylist()
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _batches(files: Sequence[str], display: Display, *, with_language: bool = False) -> Iterator[Batch]:
    """The documents of files and globs, with a row of the display."""
    language = Language.model_validate({"min_score": 0})
    total = sum(len(selection_files(pattern)) for pattern in files)
    with display.phase("documents", total) as phase:
        for pattern in files:
            for batch in file_batches(pattern, lambda _: phase.advance()):
                phase.advance(documents=batch.num_rows, bytes_=batch["text"].nbytes, pieces=0)
                yield language(batch).kept if with_language else batch


def write_rows(batches: Iterable[Rows], out: BinaryIO) -> None:
    """JSON lines, each batch as soon as it is there."""
    for rows in batches:
        out.write(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        out.flush()
