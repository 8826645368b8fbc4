"""Folders of Hugging Face datasets: which files a split has.

Three layouts are understood, in this order:
    `save_to_disk`     dataset_dict.json with a folder a split, or state.json, which names Arrow files
    README.md          `configs:` in its YAML head, with `data_files` as a pattern, a list, or {split, path}
    names of files     a keyword in a file's name or folder ("train", "validation", "test" and their synonyms); files
                       without one are the split "train"
as `datasets` has them (documentation: "Structure your repository", "Manual configuration").
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import orjson
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

HF = "hf"  # the format of a source that is such a folder
_SYNONYMS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DATA = re.compile(r"\.(parquet|arrow|csv|tsv|txt|(json|jsonl|ndjson)(\.gz|\.zst)?)$", re.IGNORECASE)


class HfError(ValueError):
    """A folder is no dataset, or lacks what was asked for."""


def hf_files(fs: Any, folder: str, config: str | None, split: str) -> list[str]:
    """Paths of the split's files, sorted. Raises HfError where there are none, and says what there is."""
    folder = folder.rstrip("/")
    if not fs.isdir(folder):
        raise HfError(f"{folder} is not a folder. `format: hf` needs the folder of a dataset.")
    saved = _saved(fs, folder, split)
    if saved is not None:
        return saved
    listed = sorted(path for path in fs.find(folder) if not _hidden(path[len(folder) :]))
    data = {path[len(folder) + 1 :]: path for path in listed if _DATA.search(path)}
    configs = _configs(fs, folder)
    if configs:
        chosen = _chosen(configs, config, folder)
        names = _matching(chosen, data, split, folder)
    elif config not in (None, "default"):
        raise HfError(f"{folder} names no configurations in its README.md, so there is no {config!r}.")
    else:
        names = _by_name(data, split, folder)
    return sorted(data[name] for name in names)


def _saved(fs: Any, folder: str, split: str) -> list[str] | None:
    """Files of a dataset that was saved with `save_to_disk`; None where it was not."""
    if fs.exists(f"{folder}/dataset_dict.json"):
        splits = _json(fs, f"{folder}/dataset_dict.json").get("splits", [])
        if split not in splits:
            raise HfError(f"{folder} has no split {split!r}. It has: {', '.join(map(str, splits)) or 'none'}.")
        folder = f"{folder}/{split}"
    if not fs.exists(f"{folder}/state.json"):
        return None
    entries = _json(fs, f"{folder}/state.json").get("_data_files") or []
    return [f"{folder}/{entry['filename']}" for entry in entries]


def _json(fs: Any, path: str) -> dict[str, Any]:
    try:
        with fs.open(path, "rb") as file:
            data = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise HfError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise HfError(f"{path} is no JSON object.")
    return data


def _configs(fs: Any, folder: str) -> list[dict[str, Any]]:
    """`configs` of the dataset card; empty where there is none."""
    path = f"{folder}/README.md"
    if not fs.exists(path):
        return []
    with fs.open(path, "rb") as file:
        text = file.read().decode("utf-8", "replace")
    head = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if not head:
        return []
    try:
        found = YAML(typ="safe", pure=True).load(head.group(1))
    except YAMLError as error:
        raise HfError(f"The head of {path} is not YAML: {error}") from error
    configs = found.get("configs") if isinstance(found, dict) else None
    return [c for c in configs or [] if isinstance(c, dict) and (c.get("data_files") or c.get("data_dir"))]


def _chosen(configs: list[dict[str, Any]], config: str | None, folder: str) -> dict[str, Any]:
    named = {str(entry.get("config_name", "default")): entry for entry in configs}
    if config is None:
        marked = [entry for entry in configs if entry.get("default")]
        if marked or "default" in named or len(named) == 1:
            return marked[0] if marked else named.get("default", configs[0])
    elif config in named:
        return named[config]
    asked = f"no configuration {config!r}" if config else "several configurations"
    raise HfError(f"{folder} has {asked}. Say `config:` with one of: {', '.join(named)}.")


def _matching(config: dict[str, Any], data: dict[str, str], split: str, folder: str) -> list[str]:
    """Files that a configuration names for the split."""
    below = str(config.get("data_dir") or "").strip("/")
    within = {name[len(below) :].lstrip("/"): name for name in data if not below or name.startswith(f"{below}/")}
    files = config.get("data_files")
    if files is None:
        return [within[name] for name in _by_name(within, split, folder)]
    entries = files if isinstance(files, list) else [files]
    patterns: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, dict):
            paths = entry.get("path")
            patterns.setdefault(str(entry.get("split", "train")), []).extend(
                [paths] if isinstance(paths, str) else [str(path) for path in paths or []]
            )
        else:
            patterns.setdefault("train", []).append(str(entry))
    if split not in patterns:
        raise HfError(f"{folder} has no split {split!r}. It has: {', '.join(patterns)}.")
    found = [whole for name, whole in within.items() if any(_glob(name, p) for p in patterns[split])]
    if not found:
        raise HfError(f"{folder}: no file matches {', '.join(patterns[split])}, which its README.md names.")
    return found


def _glob(name: str, pattern: str) -> bool:
    """A pattern of `data_files`: `**/` is any number of folders, `*` stays in one."""
    pattern = pattern.removeprefix("./")
    parts, wanted = name.split("/"), pattern.split("/")

    def match(i: int, j: int) -> bool:
        if j == len(wanted):
            return i == len(parts)
        if wanted[j] == "**":
            return any(match(k, j + 1) for k in range(i, len(parts))) or (j + 1 == len(wanted) and i < len(parts))
        return i < len(parts) and fnmatchcase(parts[i], wanted[j]) and match(i + 1, j + 1)

    return match(0, 0)


def _by_name(names: Iterable[str], split: str, folder: str) -> list[str]:
    """Files whose name or folder has the split's keyword; where no file has any keyword, all are `train`."""
    of: dict[str, list[str]] = {}
    for name in names:
        of.setdefault(_split_of(name) or "", []).append(name)
    if set(of) <= {""}:
        of = {"train": of.get("", [])}
    wanted = next((key for key, words in _SYNONYMS.items() if split in words), split)
    if not of.get(wanted):
        there = ", ".join(key for key in of if key and of[key]) or "no data files"
        raise HfError(f"{folder} has no split {split!r}. It has: {there}.")
    return of[wanted]


def _split_of(name: str) -> str | None:
    words = set(re.split(r"[^a-z]+", name.lower()))
    return next((key for key, synonyms in _SYNONYMS.items() if words & set(synonyms)), None)


def _hidden(name: str) -> bool:
    return any(part.startswith((".", "__")) for part in name.split("/"))
