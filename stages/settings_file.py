"""Settings from YAML 1.2 files, with errors that name the file, the line and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

Model = TypeVar("Model", bound=BaseModel)


class SettingsError(ValueError):
    """A settings file cannot be used; the message says where and why."""


def read_yaml(path: str | Path) -> CommentedMap:
    """The file's mapping, with line numbers. Tags that would construct Python objects are refused by the loader.

    Raises SettingsError when the file is missing, is not YAML, or is not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise SettingsError(f"{path}: no such file.{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    try:
        data = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise SettingsError(f"{path}:{line}: not valid YAML: {error.problem}.") from error
    if not isinstance(data, CommentedMap):
        raise SettingsError(f"{path}: a mapping of settings is expected, for example `name: my_corpus`.")
    return data


def plain(node: Any) -> Any:
    """The node as plain dicts, lists and scalars."""
    if isinstance(node, dict):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [plain(value) for value in node]
    if isinstance(node, bool):
        return bool(node)
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def line_of(node: Any, location: Sequence[Any]) -> int:
    """Line (from 1) of the deepest part of `location` that the file holds."""
    line = getattr(getattr(node, "lc", None), "line", 0)
    for part in location:
        if isinstance(node, CommentedMap) and part in node:
            line = node.lc.key(part)[0]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0]
        else:
            continue  # a step that pydantic adds, such as the name of a union's member
        node = node[part]
    return int(line) + 1


def nearest(name: str, known: Sequence[str]) -> str:
    """' Did you mean x?' or ' Known: a, b, c.'"""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{close[0]}`?" if close else f" Known: {', '.join(sorted(known))}."


def build(model: type[Model], node: Any, where: str, root: Any = None, location: Sequence[Any] = ()) -> Model:
    """`node` as a model. where: the file's name for messages; root, location: where in the file the node stands.

    Raises SettingsError that lists every fault with its line.
    """
    try:
        return model.model_validate(plain(node))
    except ValidationError as error:
        root = node if root is None else root
        lines = []
        for fault in error.errors(include_url=False):
            place = [*location, *fault["loc"]]
            dotted = ".".join(str(part) for part in place)
            if fault["type"] == "extra_forbidden":
                text = f"unknown key `{dotted}`.{nearest(str(fault['loc'][-1]), _fields(model, fault['loc'][:-1]))}"
            elif fault["type"] == "missing":
                text = f"`{dotted}` is missing."
            else:
                text = f"`{dotted}`: {fault['msg']}." if dotted else f"{fault['msg']}."
            lines.append(f"{where}:{line_of(root, place)}: {text}")
        raise SettingsError("\n".join(lines)) from None


def load(model: type[Model], path: str | Path) -> Model:
    """A whole file as one model. Raises SettingsError."""
    return build(model, read_yaml(path), str(path))


def _fields(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """Names of the fields at `location`, following nested models where their type is plain to see."""
    current: Any = model
    for part in location:
        field = current.model_fields.get(part) if isinstance(part, str) and hasattr(current, "model_fields") else None
        if field is None:
            continue
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if models:
            current = models[0]
    return list(current.model_fields)
