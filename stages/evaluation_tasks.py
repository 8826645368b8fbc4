"""Task files of lm-evaluation-harness (v0.4, docs/new_task_guide.md), as far as they can be read without running them.

    task: my_task
    dataset_path: json
    dataset_kwargs: {data_files: {test: items.jsonl}}     # beside this file, or below the working folder
    test_split: test
    doc_to_text: "Question: {{question}}\\nAnswer:"       # a Jinja template, or the name of a field
    doc_to_choice: "{{[a, b, c]}}"                        # a template of a list, a list of templates, or a field
    doc_to_target: "{{answer}}"                           # a template, a field, or the position of the right choice

Nothing is downloaded: `dataset_path` is `json` and the data are files here. Templates run in Jinja's sandbox, which
gives them the record's fields, the harness's filter `regex_replace`, and no attribute of Python. Functions
(`!function utils.f`) are Python code and are refused by name: export such a task's items as JSON lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.tokens import TagToken

from gristmill.stages.evaluation_sets import item_texts, records
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import exists, filesystem, join, read_bytes

MAX_INCLUDES = 5  # files that include each other, one below the other
MAX_TEXT = 1_000_000  # characters that a template may make by multiplying


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also limits what `*` and `**` can make."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [len(v) if isinstance(v, str | list | tuple) else None for v in (left, right)]
        numbers = [v for v in (left, right) if isinstance(v, int)]
        too_large = any(s is not None and n > 0 and s * n > MAX_TEXT for s in sized for n in numbers)
        if operator == "**" or too_large:
            raise SecurityError(f"`{operator}` makes too much")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    return environment


def _regex_replace(text: str, pattern: str, repl: str = "", count: int = 0) -> str:
    return re.sub(pattern, repl, text, count=count)


def read_task(path: str, depth: int = 0) -> dict[str, Any]:
    """The task's keys, `include` filled in. Raises SettingsError for what is no single task of local data."""
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: the task file cannot be read ({error}).") from error
    try:
        tag = next((token for token in YAML(typ="rt").scan(text) if isinstance(token, TagToken)), None)
        if tag is not None:
            raise SettingsError(
                f"{path}:{tag.start_mark.line + 1}: the task runs Python code (`!function`), which is not done here. "
                "Export its items as JSON lines and name that file instead."
            )
        task = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, RecursionError) as error:
        raise SettingsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(task, dict):
        raise SettingsError(f"{path}: a task file is a mapping with `task`, `dataset_path` and `doc_to_text`.")
    include = task.pop("include", None)
    if include is not None:
        if depth >= MAX_INCLUDES:
            raise SettingsError(f"{path}: more than {MAX_INCLUDES} task files include each other.")
        task = {**read_task(_beside(path, str(include)), depth + 1), **task}
    return task


def task_files(path: str) -> list[str]:
    """The task file and its data files."""
    return [path, *_data_files(path, read_task(path))]


def task_items(path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, texts) of each item. Raises SettingsError that names file and record."""
    task = read_task(path)
    if isinstance(task.get("task"), list):
        raise SettingsError(f"{path}: a group of tasks; name the files of its tasks.")
    if "doc_to_text" not in task:
        raise SettingsError(f"{path}: the task has no `doc_to_text`, so what its items say is not known.")
    files = _data_files(path, task)
    environment = _environment()
    for file in files:
        for number, row in records(file):
            try:
                texts = _item(environment, task, row)
            except (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, LookupError, re.error) as error:
                raise SettingsError(f"{file}:{number}: the templates of {path} fail on this record: {error}") from error
            name = f"{PurePosixPath(file).name.split('.')[0]}:{number - 1}" if len(files) > 1 else str(number - 1)
            yield name, texts


def _item(environment: _Environment, task: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    question = _rendered(environment, task["doc_to_text"], row)
    choices = task.get("doc_to_choice")
    if choices is not None:
        choices = _choices(environment, choices, row)
    if isinstance(question, int) and choices:  # tasks such as winogrande: the choices are the contexts
        return item_texts([choices, _rendered(environment, task.get("doc_to_target", ""), row)])
    target = task.get("doc_to_target")
    answer = None if target is None else _rendered(environment, target, row)
    if choices is not None and isinstance(answer, str):
        answer = answer.strip()
    return item_texts([str(question), *([choices] if choices else [])], answer)


def _rendered(environment: _Environment, template: Any, row: Mapping[str, Any]) -> Any:
    """As the harness: the name of a field is its value, a text is a template, a number is itself."""
    if not isinstance(template, str):
        return template
    if template in row:
        return row[template]
    text = environment.from_string(template).render(**{str(k): v for k, v in row.items()})
    return int(text) if text.strip().isascii() and text.strip().isdigit() else text


def _choices(environment: _Environment, choices: Any, row: Mapping[str, Any]) -> list[Any]:
    if isinstance(choices, list):
        return [_rendered(environment, choice, row) for choice in choices]
    if isinstance(choices, Mapping):
        return [_rendered(environment, choice, row) for choice in choices.values()]
    found = _rendered(environment, choices, row)
    if isinstance(found, str):
        found = ast.literal_eval(found)
    if not isinstance(found, list):
        raise ValueError("`doc_to_choice` gives no list")
    return found


def _data_files(path: str, task: Mapping[str, Any]) -> list[str]:
    kwargs = task.get("dataset_kwargs") or {}
    data = kwargs.get("data_files") if isinstance(kwargs, Mapping) else None
    if task.get("dataset_path") != "json" or data is None:
        raise SettingsError(
            f"{path}: the data of this task are not files here (`dataset_path: {task.get('dataset_path')}`), and "
            "nothing is downloaded. Export its items as JSON lines, or set `dataset_path: json` with "
            "`dataset_kwargs: {data_files: ...}`."
        )
    for key in ("process_docs", "custom_dataset"):
        if task.get(key):
            raise SettingsError(f"{path}: the task changes its data with Python code (`{key}`). Export its items.")
    if isinstance(data, Mapping):
        splits = [task[key] for key in ("test_split", "validation_split") if task.get(key) in data] or list(data)
        data = [name for split in splits for name in ([data[split]] if isinstance(data[split], str) else data[split])]
    names = [data] if isinstance(data, str) else [str(name) for name in data]
    return [_beside(path, name) for name in names]


def _beside(path: str, name: str) -> str:
    """A file beside the task file, else below the working folder. Raises SettingsError."""
    if "://" in name and not name.startswith("file://"):
        raise SettingsError(f"{path}: {name} is not a file here; nothing is downloaded.")
    _, inner = filesystem(path)
    near = join(str(PurePosixPath(path).parent), name) if "://" not in path else join(path.rsplit("/", 1)[0], name)
    for candidate in (near, name) if not name.startswith("/") else (name,):
        if exists(candidate):
            return candidate
    raise SettingsError(f"{path}: there is no file {name}, neither beside {PurePosixPath(inner).name} nor here.")
