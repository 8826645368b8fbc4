"""Evaluation items: what must never be in a training set, read from files.

    sets:
      arc: {files: "eval/arc_*.jsonl"}                                 # known field names: question, choices, answer
      mine: {files: [a.jsonl], fields: [problem, hint], answer: solution}
      lines: {files: notes.txt}                                        # a blank line between items, else an item a line
      task: {files: tasks/my_task.yaml}                                # a task file of lm-evaluation-harness
      web: {files: "pages/*.parquet", fields: text}                    # columns are fields

An item is a benchmark, a name within it, and one or two texts: the question with its choices in order, and the question
with the right answer, because documents hold either. Passages that a question is asked about are left out unless
`fields` names them: that a passage is in a training set says nothing about its questions.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import PurePosixPath
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pydantic import field_validator

from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import filesystem, read_bytes

Format = Literal["jsonl", "text", "lm_eval", "parquet"]

QUESTION_FIELDS = (
    "question",
    "query",
    "question_stem",
    "ctx",
    "problem",
    "prompt",
    "goal",
    "sentence",
    "input",
    "text",
)
CHOICE_FIELDS = ("choices", "options", "endings", "answers_options", "choice")
ANSWER_FIELDS = ("answer", "answerKey", "answer_key", "gold", "target", "label", "solution", "output", "correct")
ID_FIELDS = ("id", "item_id", "question_id", "qid", "idx")


@dataclass(frozen=True)
class Item:
    """One evaluation item."""

    benchmark: str
    name: str  # within the benchmark
    texts: tuple[str, ...]  # the first is the whole item; others hold n-grams that it has not

    @property
    def label(self) -> str:
        return f"{self.benchmark}/{self.name}"


class EvaluationSet(Settings):
    """The files of one benchmark."""

    files: tuple[str, ...]  # fsspec paths or globs
    format: Format | None = None  # by the file name where not given
    fields: tuple[str, ...] | None = None  # of a JSONL record, in order; a list in a field is a list of choices
    answer: str | None = None  # the field of the right answer: its text, its position from 0, or its letter

    @field_validator("files", "fields", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    def paths(self) -> list[str]:
        """The files that exist, globs resolved, sorted. Raises SettingsError for an entry that matches none."""
        found: list[str] = []
        for pattern in self.files:
            fs, inner = filesystem(pattern)
            if not any(c in pattern for c in "*?["):
                matches = [pattern] * bool(fs.exists(inner))
            elif "://" in pattern:
                matches = [fs.unstrip_protocol(path) for path in sorted(fs.glob(inner))]
            else:  # as it was given, relative or not: a run folder may be moved with its files
                matches = sorted(glob(pattern))
            if not matches:
                raise SettingsError(f"{pattern}: there is no such file of evaluation items. Mend the path in `sets`.")
            found += matches
        return list(dict.fromkeys(found))


def short_form(value: Any) -> Any:
    """A set may be written as its file or files alone."""
    return {"files": value} if isinstance(value, str | list | tuple) else value


def format_of(path: str) -> Format:
    """By the file's name. Raises SettingsError for one that says nothing."""
    name = PurePosixPath(path).name.removesuffix(".gz").removesuffix(".zst")
    for endings, kind in (
        ((".jsonl", ".ndjson", ".json"), "jsonl"),
        ((".txt", ".text"), "text"),
        ((".yaml", ".yml"), "lm_eval"),
        ((".parquet",), "parquet"),
    ):
        if name.endswith(endings):
            return kind  # type: ignore[return-value]
    raise SettingsError(f"{path}: say the `format` of this evaluation set: jsonl, text, parquet or lm_eval.")


def items_of(benchmark: str, settings: EvaluationSet) -> Iterator[Item]:
    """The items of a benchmark, files in order. Raises SettingsError that names file and record."""
    from gristmill.stages.evaluation_tasks import task_items

    paths = settings.paths()
    for path in paths:
        prefix = f"{_stem(path)}:" if len(paths) > 1 else ""
        kind = settings.format or format_of(path)
        if kind == "lm_eval":
            named: Iterable[tuple[str, tuple[str, ...]]] = task_items(path)
        elif kind == "text":
            named = ((str(i), (text,)) for i, text in enumerate(_paragraphs(_text(path))))
        else:
            named = _records_items(path, settings, kind)
        for name, texts in named:
            yield Item(benchmark, prefix + name, texts)


def files_of(settings: EvaluationSet) -> list[str]:
    """Every file that the items come from: those named, and the data of task files."""
    from gristmill.stages.evaluation_tasks import task_files

    out = []
    for path in settings.paths():
        kind = settings.format or format_of(path)
        out += task_files(path) if kind == "lm_eval" else [path]
    return out


def _stem(path: str) -> str:
    return PurePosixPath(path).name.split(".")[0]


def _text(path: str) -> str:
    """A file's text, decompressed. Raises SettingsError where it cannot be read."""
    try:
        data = read_bytes(path)
        if path.endswith(".gz"):
            data = gzip.decompress(data)
        elif path.endswith(".zst"):
            data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise SettingsError(f"{path}: evaluation items cannot be read ({error}).") from error


def _paragraphs(text: str) -> list[str]:
    """Items of a plain text: paragraphs between blank lines where there are any, else lines."""
    blocks, block = [], []
    lines = text.strip().splitlines()
    if all(line.strip() for line in lines):
        return lines
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            blocks.append("\n".join(block))
            block = []
    return blocks


def records(path: str, kind: Format | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line or position from 1, and the record: JSON lines, a JSON list of objects, or Parquet. Raises SettingsError."""
    if kind == "parquet" or (kind is None and path.endswith(".parquet")):
        yield from enumerate(_rows(path), 1)
        return
    text = _text(path)
    if text.lstrip().startswith("["):
        try:
            rows = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise SettingsError(f"{path}: not JSON ({error}).") from error
        numbered: Iterable[tuple[int, Any]] = enumerate(rows, 1)
    else:
        numbered = _lines(path, text)
    for number, row in numbered:
        if not isinstance(row, dict):
            raise SettingsError(f"{path}:{number}: an evaluation item is a JSON object, not {type(row).__name__}.")
        yield number, row


def _rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        file = pq.ParquetFile(io.BytesIO(read_bytes(path)))
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise SettingsError(f"{path}: evaluation items cannot be read ({error}).") from error


def _lines(path: str, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise SettingsError(f"{path}:{number}: not JSON ({error}).") from error


def _records_items(path: str, settings: EvaluationSet, kind: Format) -> Iterator[tuple[str, tuple[str, ...]]]:
    named = {*(settings.fields or ()), *([settings.answer] if settings.answer else ())}
    for number, row in records(path, kind):
        fields = settings.fields or _known_fields(row)
        named = {name for name in named if _field(row, name) is None}
        if all(_field(row, name) is None for name in fields):
            raise SettingsError(
                f"{path}:{number}: no field of this record is known to hold the item's text. "
                f"Name them: `fields: [...]`, of {', '.join(sorted(map(str, row)))}."
            )
        parts = [_field(row, name) for name in fields]
        names = [settings.answer] if settings.answer else [n for n in ANSWER_FIELDS if n in row]
        answer = _field(row, names[0]) if names and names[0] not in fields else None
        name = next((str(row[key]) for key in ID_FIELDS if isinstance(row.get(key), str | int)), str(number - 1))
        yield name, item_texts(parts, answer)
    if named:
        raise SettingsError(f"{path}: no record has the field `{sorted(named)[0]}`, which the evaluation set names.")


def _known_fields(row: Mapping[str, Any]) -> tuple[str, ...]:
    question = [name for name in QUESTION_FIELDS if _field(row, name)]
    return (*question[:1], *[name for name in CHOICE_FIELDS if _field(row, name)][:1])


def _field(row: Mapping[str, Any], name: str) -> Any:
    """A field, or one of an object within the record: `question.stem`."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def item_texts(parts: Iterable[Any], answer: Any = None) -> tuple[str, ...]:
    """Question and choices, and the answer -> the texts of an item.

    parts: strings, and lists of choices: strings, objects with `text`, or an object of lists (`{"text": [...], "label":
    [...]}`, as in ARC). answer: the text of the right choice, its position from 0, its letter or its label.
    """
    question: list[str] = []
    choices: list[str] = []
    labels: list[str] = []
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("text"), list):
            choices += [_plain(choice) for choice in part["text"]]
            labels = [str(label) for label in part.get("label") or ()]
        elif isinstance(part, Mapping) and not isinstance(part.get("text"), str) and len(part) > 1:
            choices += [_plain(choice) for choice in part.values()]  # {"A": "...", "B": "..."}
            labels = [str(label) for label in part]
        elif isinstance(part, list):
            choices += [_plain(choice) for choice in part]
            labels = [str(c["label"]) for c in part if isinstance(c, Mapping) and "label" in c]
        elif part is not None:
            question.append(_plain(part))
    whole = "\n".join((*question, *choices))
    right = _right(answer, choices, labels)
    other = "\n".join((*question, right)) if right else ""
    if not choices:
        return (other,) if other else (whole,)
    return (whole, other) if other and right != choices[0] else (whole,)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("text", " ".join(str(v) for v in value.values()))
    return " ".join(_plain(v) for v in value) if isinstance(value, list) else str(value)


def _right(answer: Any, choices: list[str], labels: list[str]) -> str:
    """The text of the right choice; "" where it is not known."""
    if answer is None or isinstance(answer, bool):
        return ""
    if not choices:
        return _plain(answer)
    if str(answer) in labels and len(labels) == len(choices):
        return choices[labels.index(str(answer))]
    if isinstance(answer, int) or (isinstance(answer, str) and answer.isascii() and answer.isdigit()):
        return choices[int(answer)] if 0 <= int(answer) < len(choices) else ""
    if isinstance(answer, str) and len(answer) == 1 and answer.isascii() and answer.isalpha():
        at = ord(answer.upper()) - ord("A")
        return choices[at] if at < len(choices) else ""
    return _plain(answer)
