"""Settings from YAML 1.2 files, with errors that name the file, the line and the nearest valid name.

    file = read("recipe.yaml")
    file.values                             # plain dicts, lists and scalars
    file.at(["stages", 0])                  # "recipe.yaml:7", for a message
    build(Recipe, file.values, file)        # a pydantic model, or a SettingsError with every fault and its line
    load(TrainConfig, "train.yaml")         # both in one

`base: other.yaml` names a file beside this one. A key that is not given here is taken over from it; a key that is
given here replaces the whole value of the base. One level: a base has no base. Messages name the file in which the key
stands. Relative paths among the values of a base count as if they stood in the file that names it.
"""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarbool import ScalarBoolean
from ruamel.yaml.tokens import TagToken

Model = TypeVar("Model", bound=BaseModel)


class SettingsError(ValueError):
    """A settings file cannot be used; the message says where and why."""


@dataclass(frozen=True)
class SettingsFile:
    """A file as it was read. Made by `read`."""

    path: str
    root: CommentedMap  # with line numbers
    values: dict[str, Any]  # plain; those of the base filled in
    base: SettingsFile | None = None

    def at(self, location: Sequence[Any] = ()) -> str:
        """'FILE:LINE' of the deepest part of `location` that stands in the file, or in its base."""
        first = location[0] if location else None
        if self.base is not None and _key(self.root, first) is None and _key(self.base.root, first) is not None:
            return self.base.at(location)
        return f"{self.path}:{_line_of(self.root, location)}"


def read(path: str | Path) -> SettingsFile:
    """A file's mapping, with that of its base.

    Raises SettingsError when one of them is missing, is not UTF-8, is not YAML, has tags, a key twice or no mapping,
    and when the base has a base.
    """
    path = Path(path)
    if not path.exists():
        raise SettingsError(f"{path}: no such file.{_near_file(path)}")
    file = _read_one(path)
    if "base" not in file.values:
        return file
    at, name = file.at(["base"]), file.values.pop("base")
    if not isinstance(name, str):
        raise SettingsError(f"{at}: `base` is the path of one settings file, for example `base: demo.yaml`.")
    where = path.parent / name
    if not where.exists():
        raise SettingsError(f"{at}: there is no base {where}.{_near_file(where)}")
    base = _read_one(where)
    if "base" in base.values:
        raise SettingsError(f"{at}: the base {where} has a base itself; one level is all there is. Write it out.")
    return SettingsFile(file.path, file.root, {**base.values, **file.values}, base)


def build(model: type[Model], values: Any, file: SettingsFile, location: Sequence[Any] = ()) -> Model:
    """`values`, which stand in `file` at `location`, as a model. Raises SettingsError: a line for every fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [_explain(model, dict(fault), file, location) for fault in error.errors(include_url=False)]
        raise SettingsError("\n".join(faults)) from None


def load(model: type[Model], path: str | Path) -> Model:
    """A whole file as one model. Raises SettingsError."""
    file = read(path)
    return build(model, file.values, file)


def yaml_bytes(values: dict[str, Any]) -> bytes:
    """A settings file for people: keys in their order, a line each."""
    yaml, text = YAML(typ="safe", pure=True), io.BytesIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output, yaml.width = False, False, 110  # type: ignore[assignment]
    yaml.dump(values, text)
    return text.getvalue()


def nearest(name: str, known: Iterable[str]) -> str:
    """' Did you mean `x`?', else ' Known: a, b, c.'; nothing where nothing is known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f" Did you mean `{close[0]}`?"
    return f" Known: {', '.join(sorted(names))}." if names else ""


# --- from a file to plain values ---


def _near_file(path: Path) -> str:
    names = [p.name for ending in ("*.yaml", "*.yml") for p in path.parent.glob(ending)]
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" Did you mean {path.parent / close[0]}?" if close else ""


def _read_one(path: Path) -> SettingsFile:
    root = _parse(_text(path), path)
    if not isinstance(root, CommentedMap):
        found = "nothing" if root is None else "a list" if isinstance(root, list) else "a single value"
        raise SettingsError(
            f"{path}:1: a mapping of settings is expected, for example `name: my_corpus`, but here is {found}."
        )
    return SettingsFile(str(path), root, _plain(root, str(path)))


def _parse(text: str, path: Path) -> Any:
    """The document with line numbers. Tags are refused: the loader, which knows none, would make objects of its own."""
    try:
        tag = next((token for token in YAML(typ="rt").scan(text) if isinstance(token, TagToken)), None)
        root = None if tag is not None else YAML(typ="rt").load(text)
    except DuplicateKeyError as error:
        key = str(error.problem).removeprefix('found duplicate key "').split('" with value')[0]
        raise SettingsError(f"{path}:{_line(error)}: the key `{key}` is given twice. Keep one of them.") from error
    except MarkedYAMLError as error:
        problem = str(error.problem)
        whole = f"{error.context} {problem}" if problem.startswith("but ") else problem
        raise SettingsError(f"{path}:{_line(error)}: not valid YAML: {_sentence(whole)}") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(f"{path}:{line}: not valid YAML: the character U+{error.character:04X}.") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: lists or mappings are nested too deep to be settings.") from error
    except (YAMLError, ValueError) as error:  # ValueError: of a date with month 13
        raise SettingsError(f"{path}: not valid YAML: {_sentence(str(error))}") from error
    if tag is not None:
        name = "".join(part or "" for part in tag.value)
        raise SettingsError(f"{path}:{tag.start_mark.line + 1}: the tag `{name}` is refused. Write a plain value.")
    return root


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}.") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8. Save the file in that encoding."
        ) from error


def _line(error: MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return int(mark.line) + 1 if mark is not None else 1


def _plain(node: Any, path: str) -> Any:
    """The node as plain dicts with string keys, lists and scalars."""
    if isinstance(node, CommentedMap):
        out: dict[str, Any] = {}
        for key, value in node.items():
            if str(key) in out:  # 1 and "1": two keys for YAML, one for us
                raise SettingsError(
                    f"{path}:{_line_of(node, [key])}: the key `{key}` is given twice. Keep one of them."
                )
            out[str(key)] = _plain(value, path)
        return out
    if isinstance(node, list):
        return [_plain(value, path) for value in node]
    if isinstance(node, bool | ScalarBoolean):  # the loader's boolean with an anchor is an int
        return bool(node)
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


# --- from a fault to a message ---


def _key(node: CommentedMap, part: Any) -> Any:
    """The key of `node` that is `part`, or else reads as it; None where there is none."""
    return part if part in node else next((key for key in node if str(key) == part), None)


def _line_of(node: Any, location: Sequence[Any]) -> int:
    """Line (from 1) of the deepest part of `location` that stands under `node`."""
    line = getattr(getattr(node, "lc", None), "line", 0) or 0
    for part in location:
        if isinstance(node, CommentedMap) and (key := _key(node, part)) is not None:
            if key in (node.lc.data or ()):  # a key that `<<` takes over has no line here
                line = node.lc.key(key)[0]
            node = node[key]
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line, node = node.lc.item(part)[0], node[part]
        else:
            break
    return int(line) + 1


def _explain(model: type[BaseModel], fault: Mapping[str, Any], file: SettingsFile, location: Sequence[Any]) -> str:
    """'FILE:LINE: message' for one of pydantic's faults."""
    unknown = fault["type"] == "extra_forbidden"
    steps, kinds = _follow(model, fault["loc"][:-1] if unknown else fault["loc"])
    place = [*location, *steps, *(fault["loc"][-1:] if unknown else ())]
    key = ".".join(str(part) for part in place)
    if unknown:
        known = [*_fields(kinds), *(["base"] if len(place) == 1 else [])]
        text = f"unknown key `{key}`.{nearest(str(place[-1]), known)}"
    elif fault["type"] == "missing":
        text = f"`{key}` is missing."
    else:
        message = _sentence(str(fault["msg"]).removeprefix("Value error, "))
        text = f"`{key}`: {message}" if key else message
    return f"{file.at(place)}: {text}"


def _sentence(text: str) -> str:
    """With a full stop, unless it ends already."""
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _follow(model: type[BaseModel], location: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """-> (the steps of pydantic's location that a user can write, the types that may stand at its end).

    After a step to a union the location has the name of the member that was tried; `[key]` says that a key is at
    fault, not its value.
    """
    kinds: list[Any] = [model]
    steps: list[Any] = []
    tried = False  # the next part is the name of a member
    for part in location:
        if tried:
            kinds = [kind for kind in kinds if re.search(rf"\b{re.escape(_name(kind))}\b", str(part))] or kinds
            tried = False
        elif part != "[key]":
            steps.append(part)
            below = [_members(_under(kind, part)) for kind in kinds]
            tried = any(len(members) > 1 for members in below)
            kinds = [kind for members in below for kind in members]
    return steps, kinds


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _members(annotation: Any) -> list[Any]:
    """The types that an annotation allows, without None."""
    annotation = getattr(annotation, "__value__", annotation)  # a `type X = ...`
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _members(member)]
    return [] if annotation in (None, type(None)) else [annotation]


def _under(kind: Any, part: Any) -> Any:
    """The annotation of what stands under `part` in a value of type `kind`; None where that is not said."""
    if _is_model(kind):
        field = kind.model_fields.get(part)
        return field.annotation if field is not None else None
    origin, arguments = get_origin(kind), get_args(kind)
    if not isinstance(origin, type) or not arguments:
        return None
    if issubclass(origin, Mapping):
        return arguments[-1]
    if issubclass(origin, tuple) and Ellipsis not in arguments:
        return arguments[part] if isinstance(part, int) and part < len(arguments) else None
    return arguments[0] if issubclass(origin, Collection) else None


def _fields(kinds: Iterable[Any]) -> list[str]:
    """Names of the fields of those that are models."""
    return list(dict.fromkeys(name for kind in kinds if _is_model(kind) for name in kind.model_fields))


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
