"""What a run consists of, and the key of every piece: pure functions of the recipe and the frozen listing.

A key is a hash of everything that decides the bytes of a piece: settings, stage versions, the identity of the input,
the keys of what lies before. A piece on disk is done when it carries its key. So a changed setting redoes exactly what
depends on it, and nothing else.

Documents that a stage could not take are part of the key of the piece they were dropped from. They are found while the
piece is worked on, so a piece is *ordered* under a key without those of its own, and *carries* one with them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from gristmill.pipelines.poison import Poisoned, found_in, key_with
from gristmill.pipelines.recipe import Recipe, Segment, StageUse, model_of, segments
from gristmill.pipelines.selection import selection_files
from gristmill.stages.shards import Shard, exists, filesystem
from gristmill.stages.stores import stamp_of

NEAR_VERSION = 1  # raise it when other documents count as near to held-out ones
ELSEWHERE = {"index", "path"}  # of a shard, that say where it lies and not what it is
FORMAT = 2  # raise it when the files of a run change their form


def hash_of(*parts: Any) -> str:
    """32 hex digits of the canonical JSON of the parts."""
    return xxhash.xxh3_128_hexdigest(orjson.dumps([FORMAT, *parts], option=orjson.OPT_SORT_KEYS))


def _canonical(part: Any) -> bytes:
    return orjson.dumps(part, option=orjson.OPT_SORT_KEYS)


def _hash_of_canonical(*parts: bytes) -> str:
    """`hash_of` of parts that are JSON already: what a million shards share is written once."""
    return xxhash.xxh3_128_hexdigest(b"[" + b",".join((b"%d" % FORMAT, *parts)) + b"]")


@dataclass(frozen=True)
class SegmentPlan:
    """One segment with the keys of its pieces."""

    segment: Segment
    models: dict[str, str]  # name -> key, trained before the segment
    sign: dict[int, str]  # shard index -> key; the shards that its global stage compares
    cluster: str | None  # key of the global stage's decisions
    deciding: str | None  # what its decisions depend on besides the documents: part of the key of each group's
    shards: tuple[str, ...]  # key that every shard's output carries
    ordered: tuple[str, ...]  # key that it is ordered under
    sign_ordered: dict[int, str]  # shard index -> key that its signatures are ordered under

    def uses(self, shard: Shard) -> tuple[StageUse, ...]:
        return tuple(use for use in self.segment.uses if use.applies(shard.source))

    def group(self, shards: Sequence[Shard]) -> str:
        """Key of the decisions over a group of shards, where the global stage decides group by group."""
        return hash_of("group", self.deciding, [(shard.index, self.sign[shard.index]) for shard in shards])


@dataclass(frozen=True)
class Plan:
    """A whole run."""

    recipe: Recipe
    shards: tuple[Shard, ...]
    segments: tuple[SegmentPlan, ...]
    tokenizer: str | None
    tokens: tuple[str, ...]
    held_out: tuple[str, ...] = ()  # keys of the signatures of held-out documents; none where nothing is held out
    near: tuple[str, ...] = ()  # keys of what each shard has that is near to them
    scattered: tuple[str, ...] = ()  # keys of the sorted parts, where documents are shuffled across shards
    tokens_ordered: tuple[str, ...] = ()  # keys that what makes token shards of a part is ordered under


Findings = Mapping[tuple[str, str], Sequence[Poisoned]]  # (segment, part) -> documents that it cannot take


def plan_of(recipe: Recipe, shards: Sequence[Shard], out: str) -> Plan:
    """The plan of a run folder, with the poison that was found there."""
    return make_plan(recipe, shards, found_in(out, [*(segment.folder for segment in segments(recipe)), "tokens"]))


def make_plan(recipe: Recipe, shards: Sequence[Shard], found: Findings | None = None) -> Plan:
    """Recipe and listing -> every piece with its key. found: poison that is known."""
    poison = found or {}
    limits = (recipe.max_chars, recipe.sample_per_reason, recipe.removals_share)
    read, shared = _canonical("read"), [_canonical(limit) for limit in limits]
    keys = [_hash_of_canonical(read, _canonical(shard.model_dump(exclude=ELSEWHERE)), *shared) for shard in shards]
    model_keys: dict[str, str] = {}
    plans: list[SegmentPlan] = []
    for segment in segments(recipe):
        trained = {
            name: hash_of("model", name, recipe.dump()["models"][name], *_model_identity(recipe, name), keys)
            for name in segment.models
            if name not in model_keys
        }
        model_keys |= trained
        sign_ordered, how = _gate_keys(recipe, segment, shards, keys, model_keys)
        parts = {shard.index: poison.get((segment.folder, shard.part), ()) for shard in shards}
        sign = {index: key_with(key, parts[index]) for index, key in sign_ordered.items()}
        cluster = hash_of("cluster", *how, sorted(sign.items())) if segment.gate is not None else None
        deciding = hash_of("deciding", *how) if segment.gate is not None else None
        # By source, once: the files that stages read are looked at in the storage, and there may be a million shards.
        identities = {
            source: _canonical([_identity(recipe, use, model_keys) for use in segment.uses if use.applies(source)])
            for source in recipe.sources
        }
        none, decided = _canonical(None), _canonical(cluster)
        ordered = []
        for shard, key in zip(shards, keys, strict=True):
            decisions = decided if shard.index in sign else none
            ordered.append(_hash_of_canonical(_canonical(key), decisions, identities[shard.source]))
        keys = [key_with(key, parts[shard.index]) for shard, key in zip(shards, ordered, strict=True)]
        plans.append(SegmentPlan(segment, trained, sign, cluster, deciding, tuple(keys), tuple(ordered), sign_ordered))
    if recipe.tokenizer is None:
        return Plan(recipe, tuple(shards), tuple(plans), None, ())
    settings = recipe.tokens.model_dump(mode="json")
    similarity, drop = settings.pop("near_holdout_similarity"), settings.pop("drop_near_holdout")
    tokenizer = hash_of("tokenizer", recipe.tokenizer.model_dump(mode="json"), recipe.tokens.holdout_share, keys)
    held_out: list[str] = []
    near: list[str] = []
    if recipe.tokens.holdout_share > 0:
        held_out = [hash_of("held out", NEAR_VERSION, recipe.tokens.holdout_share, key) for key in keys]
        together = held_out_key(held_out)
        near = [hash_of("near", similarity, together, key) for key in keys]
    others = near if drop and near else [""] * len(keys)
    head = (_canonical("tokens"), _canonical(tokenizer), _canonical(settings))
    asked = [
        _hash_of_canonical(*head, _canonical(key), _canonical(other)) for key, other in zip(keys, others, strict=True)
    ]
    tokens = [key_with(key, poison.get(("tokens", s.part), ())) for s, key in zip(shards, asked, strict=True)]
    scattered: list[str] = []
    if recipe.tokens.shuffle == "documents":
        scattered, tokens = tokens, _gathered(shards, tokens)
    return Plan(
        recipe,
        tuple(shards),
        tuple(plans),
        tokenizer,
        tuple(tokens),
        tuple(held_out),
        tuple(near),
        tuple(scattered),
        tuple(asked),
    )


def _gathered(shards: Sequence[Shard], scattered: Sequence[str]) -> list[str]:
    """Keys of token shards that are merged from all parts of their source."""
    parts: dict[str, list[str]] = {}
    for shard, key in zip(shards, scattered, strict=True):
        parts.setdefault(shard.source, []).append(key)
    whole = {source: hash_of("gathered from", keys) for source, keys in parts.items()}
    at = dict.fromkeys(parts, -1)
    keys = []
    for shard in shards:
        at[shard.source] += 1
        keys.append(hash_of("gathered", whole[shard.source], at[shard.source]))
    return keys


def held_out_key(held_out: Sequence[str]) -> str:
    """Of the signatures of the held-out documents of all shards."""
    return hash_of("held out of all", list(held_out))


def _settings(recipe: Recipe, use: StageUse, model_keys: dict[str, str]) -> dict[str, Any]:
    """The settings of a stage, its model by key."""
    name = model_of(recipe, use)
    settings: dict[str, Any] = use.stage.model_dump(mode="json", exclude=set(getattr(use.stage, "without_effect", ())))
    return settings if name is None else settings | {"model": model_keys[name]}


def _identity(recipe: Recipe, use: StageUse, model_keys: dict[str, str]) -> list[Any]:
    settings = _settings(recipe, use, model_keys)
    # Stages whose result is another package's say which: an upgrade of it is another result.
    packages = {name: importlib.metadata.version(name) for name in getattr(use.stage, "packages", ())}
    return [use.key, use.stage.version, settings, _foreign_files(recipe, use.stage), packages]


def _foreign_files(recipe: Recipe, stage: Any) -> list[list[Any]]:
    """Identity of files that a stage reads besides its documents: lists, models by path, tables by their content."""
    paths = [*(stage.files() if hasattr(stage, "files") else ()), *getattr(stage, "against", ())]
    read = stage.digests() if hasattr(stage, "digests") else []
    own = [[path, *stamp] for path in paths for stamp in _stamps(path)]
    return own + _model_files(recipe, stage) + [["content", digest] for digest in read]


def _model_files(recipe: Recipe, stage: Any) -> list[list[Any]]:
    """Identity of the files of a model by path."""
    model = getattr(stage, "model", None)
    if not isinstance(model, str) or model in recipe.models or not exists(model):
        return []
    return [[model, *stamp] for stamp in _stamps(model)]


def _stamps(path: str) -> list[tuple[str, int, str]]:
    """(path below, size, modification time or etag) of a file, or of every file of a folder."""
    fs, inner = filesystem(path)
    found = fs.find(inner, detail=True) if fs.isdir(inner) else {inner: fs.info(inner)}
    return [(name[len(inner) :], int(info["size"]), stamp_of(info)) for name, info in sorted(found.items())]


def _model_identity(recipe: Recipe, name: str) -> tuple[int, list[Any]]:
    """Version of the training, and the files that it reads besides the run's documents."""
    settings = recipe.models[name].settings
    patterns = sorted({s.files for s in settings.roles().values() if s.files is not None})
    files = [shard.model_dump(exclude={"index", "path"}) for pattern in patterns for shard in selection_files(pattern)]
    return settings.version, files


def _gate_keys(
    recipe: Recipe, segment: Segment, shards: Sequence[Shard], keys: Sequence[str], model_keys: dict[str, str]
) -> tuple[dict[int, str], tuple[Any, ...]]:
    """-> keys that the signatures are ordered under, by shard; what the decisions depend on besides the documents."""
    gate = segment.gate
    if gate is None:
        return {}, ()
    settings = _settings(recipe, gate, model_keys)
    later = set(getattr(gate.stage, "after_signing", ()))
    last = set(getattr(gate.stage, "after_clustering", ()))
    name = [gate.key, gate.stage.version]
    signing = [*name, {k: v for k, v in settings.items() if k not in later}, _model_files(recipe, gate.stage)]
    head = (_canonical("sign"), _canonical(signing))
    signed = [s.index for s in shards if gate.applies(s.source)]
    sign = {index: _hash_of_canonical(*head, _canonical(keys[index])) for index in signed}
    return sign, ([*name, {k: v for k, v in settings.items() if k not in last}], _foreign_files(recipe, gate.stage))
