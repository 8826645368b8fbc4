"""Variants of a recipe: the same pipeline with some settings changed, each in a run folder of its own.

    vary:
      no_c4: {stages.c4: false}                        # a stage left out, in every place where it is used
      short_pages: {stages.c4.min_sentences: 2}        # a limit
      exact_only: {stages.minhash: false, stages.exact.by: normalized}
      big_vocabulary: {tokenizer.vocab_size: 16384}

A name with dots is a path into the recipe; `stages.NAME` is every use of that stage. Variants that agree in a piece
have the same key for it, so what one has done the others take over by links (`borrow.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.recipe import STAGES, Recipe, RecipeError
from gristmill.stages.settings_file import SettingsError, SettingsFile, nearest, read

CONTROL = "control"  # the recipe as it is
Changes = Mapping[str, Any]  # path in the recipe -> value; False leaves a stage out


@dataclass(frozen=True)
class Variant:
    """A recipe with some settings changed."""

    name: str
    changes: dict[str, Any]
    recipe: Recipe


def variants_of(path: str | Path, vary: Mapping[str, Changes], out: str) -> list[Variant]:
    """The recipe of a file as it is, then each variant of it. out: folder of all runs; downloads are shared there.

    Raises SettingsError that names the variant for a path that the recipe does not have and for a bad value, and for
    two variants that come to the same recipe.
    """
    file = read(path)
    found = [Variant(CONTROL, {}, _shared(recipes.of_file(file), out))]
    for name, changes in vary.items():
        try:
            recipe = _shared(recipes.of_file(changed(file, changes)), out)
        except SettingsError as error:
            raise RecipeError(f"variant {name}: {error}") from error
        for other in found:
            if other.recipe == recipe:
                raise RecipeError(
                    f"variant {name} comes to the same recipe as {other.name}: there is nothing to compare. To measure "
                    "noise, give more seeds."
                )
        found.append(Variant(name, dict(changes), recipe))
    return found


def changed(file: SettingsFile, changes: Changes) -> SettingsFile:
    """The file with other values. Raises RecipeError for a path that leads nowhere."""
    values = deepcopy(file.values)
    for path, value in changes.items():
        _change(values, path, value)
    return replace(file, values=values)


def _change(values: dict[str, Any], path: str, value: Any) -> None:
    head, *rest = path.split(".")
    if head != "stages":
        _set(values, path.split("."), value, path)
        return
    if not rest:
        raise RecipeError(f"`{path}`: name a stage, for example `stages.c4: false` or `stages.c4.min_sentences: 2`.")
    stages = values.get("stages") or []
    uses = [i for i, entry in enumerate(stages) if _key_of(entry) == rest[0]]
    if not uses:
        there = [_key_of(entry) for entry in stages]
        known = nearest(rest[0], there) if rest[0] not in STAGES else f" It has {', '.join(there)}."
        raise RecipeError(
            f"`{path}`: the recipe has no stage `{rest[0]}`.{known} A stage to be tried stands in the recipe, and a "
            "variant leaves it out."
        )
    if len(rest) == 1 and value in (False, "off"):
        values["stages"] = [entry for i, entry in enumerate(stages) if i not in uses]
        return
    for i in uses:
        entry = {rest[0]: {}} if isinstance(stages[i], str) else stages[i]
        if len(rest) == 1:
            if not isinstance(value, Mapping):
                raise RecipeError(
                    f"`{path}`: false leaves the stage out, a mapping replaces its settings; {value!r} is neither."
                )
            entry[rest[0]] = dict(value)
        else:
            entry[rest[0]] = entry[rest[0]] or {}
            _set(entry[rest[0]], rest[1:], value, path)
        stages[i] = entry


def _key_of(entry: Any) -> str:
    """The stage of an entry of `stages`."""
    return entry if isinstance(entry, str) else next((key for key in entry if key != "only"), "")


def _set(values: dict[str, Any], path: Sequence[str], value: Any, whole: str) -> None:
    """Sets a value below mappings; those on the way are made where they are not written out."""
    for part in path[:-1]:
        inner = values.get(part)
        if inner is None:
            inner = values[part] = {}
        if not isinstance(inner, dict):
            raise RecipeError(f"`{whole}`: `{part}` is {inner!r} in the recipe, nothing that has settings.")
        values = inner
    values[path[-1]] = value


def _shared(recipe: Recipe, out: str) -> Recipe:
    """The recipe with its downloads in one place for all variants, and without an ablation of its own."""
    sources = {}
    for name, source in recipe.sources.items():
        settings = source.download
        if settings is None or settings.to is not None or settings.stream:
            sources[name] = source
        else:
            here = settings.model_copy(update={"to": f"{out.rstrip('/')}/download/{name}"})
            sources[name] = source.model_copy(update={"download": here})
    return recipe.model_copy(update={"sources": sources, "ablation": None})
