"""Mixture files: YAML to plain values, one level of `base`, and errors that name file, line and nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from gristmill.mixtures.plan import MixtureError


def read_file(path: str | Path) -> tuple[Any, dict[str, Any]]:
    """A YAML mapping -> (as ruamel read it, with line numbers; plain values, with those of its `base` filled in).

    `base: other.yaml` names a file beside this one; a key of this file replaces the whole value of the base.
    """
    document = _parse(Path(path))
    values = _plain(document)
    base = values.pop("base", None)
    if base is None:
        return document, values
    where = Path(path).parent / str(base)
    inherited = _plain(_parse(where))
    if "base" in inherited:
        raise MixtureError(f"{path}: its base {where} has a base itself; one level is all there is. Write it out.")
    return document, {**inherited, **values}


def _parse(path: Path) -> Any:
    try:
        document = YAML(typ="rt").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MixtureError(f"{path}: cannot be read: {error.strerror}.") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise MixtureError(f"{path}{line}: not YAML: {error.problem}.") from error
    if not isinstance(document, Mapping):
        raise MixtureError(f"{path}: a mixture is a mapping that begins with name:, not {type(document).__name__}.")
    return document


def _plain(value: Any) -> Any:
    """ruamel's containers as plain ones."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value


def explain(
    path: str | Path, document: Any, error: ValidationError, top: type[BaseModel], below: Mapping[str, type[BaseModel]]
) -> str:
    """What pydantic found, one line a problem: file, line, key, what is wrong, the nearest name.

    top: the model of the file; below: the models of what lies under some of its keys.
    """
    return "\n".join(_explain_one(str(path), document, dict(problem), top, below) for problem in error.errors())


def _explain_one(
    where: str, document: Any, problem: dict[str, Any], top: type[BaseModel], below: Mapping[str, type[BaseModel]]
) -> str:
    loc = [str(part) for part in problem["loc"]]
    line = _line_of(document, problem["loc"])
    at = f"{where}{f' line {line}' if line else ''}"
    if problem["type"] == "extra_forbidden":
        owner = next((below[part] for part in reversed(loc[:-1]) if part in below), top)
        place = ".".join(loc[:-1]) or "the mixture"
        return f"{at}: unknown key {loc[-1]!r} in {place}{near(loc[-1], owner.model_fields)}."
    message = str(problem["msg"]).removeprefix("Value error, ")
    key = ".".join(loc)
    return f"{at}: {key + ': ' if key else ''}{message[:1].lower()}{message[1:]}."


def _line_of(document: Any, loc: tuple[Any, ...]) -> int | None:
    """The line of a key in what ruamel read, counted from 1; of the nearest enclosing key where it is missing."""
    line: int | None = None
    node: Any = document
    for part in loc:
        try:
            lines = node.lc
            mark = lines.key(part) if isinstance(node, Mapping) else lines.item(part)
            line, node = mark[0] + 1, node[part]
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return line


def near(name: str, names: Iterable[str]) -> str:
    """A hint that names the nearest of some names, or all of them."""
    known = list(names)
    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; known: {', '.join(known)}"
