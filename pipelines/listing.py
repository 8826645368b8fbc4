"""The frozen listing of a run: which files there were when it began, cut into shards.

A resumed run reads what the first attempt saw. A file that changed, vanished or appeared since is an error with the
list, never a silent difference: `gristmill run --refresh-inputs` takes the new state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pyarrow.parquet as pq

from gristmill.pipelines.downloads import InputError, downloaded
from gristmill.pipelines.recipe import Recipe, Source
from gristmill.stages.readers import detect_format
from gristmill.stages.shards import Shard, exists, filesystem, join, publish_bytes, read_bytes
from gristmill.stages.stores import explained, matching, patiently, stamp_of


def list_shards(recipe: Recipe, out: str = "") -> list[Shard]:
    """Looks at the storage now: the files of every source in the recipe's order, sorted by path, as shards.

    out: the run folder, where downloads lie. Raises InputError for a pattern that matches nothing, for a file named
    twice, and for a download that is not complete.
    """
    shards: list[Shard] = []
    seen: dict[str, str] = {}
    for source, settings in recipe.sources.items():
        for path, name in _files(source, settings, out):
            if path in seen:
                raise InputError(
                    f"{path} belongs to source `{seen[path]}` and to source `{source}`: its documents would be "
                    "counted twice. Change one of the patterns."
                )
            seen[path] = source
            shards.extend(_cut(recipe, source, settings, path, name, len(shards)))
    return shards


def _files(source: str, settings: Source, out: str) -> Iterable[tuple[str, str]]:
    """(path, name below the fixed part of its pattern), sorted by path."""
    if settings.download is not None:
        return downloaded(source, settings.download, out)
    patterns = [settings.files] if isinstance(settings.files, str) else settings.files or []
    found: dict[str, str] = {}
    for pattern in patterns:
        with explained(pattern, "listed"):
            matched = matching(pattern)
        if not matched:
            raise InputError(f"Source `{source}`: no file matches {pattern}. Check `files` in the recipe.")
        found |= matched
    return sorted(found.items())


def _cut(recipe: Recipe, source: str, settings: Source, path: str, name: str, index: int) -> list[Shard]:
    with explained(path, "listed"):
        fs, inner = filesystem(path)
        info = patiently(fs.info, inner)
    if info.get("size") is None:
        raise InputError(f"{path}: its server does not say how long it is. Download it (`stream: false`).")
    fields: dict[str, Any] = {
        "source": source,
        "path": path,
        "name": name,
        "format": settings.format or detect_format(path),
        "size": int(info["size"]),
        "stamp": stamp_of(info),
        "dump": settings.dump,
    }
    if fields["format"] != "parquet" or fields["size"] <= recipe.shard_bytes:
        return [Shard(index=index, **fields)]
    with fs.open(inner, "rb") as file:
        metadata = pq.ParquetFile(file).metadata
    shards: list[Shard] = []
    start = total = 0
    for group in range(metadata.num_row_groups):
        total += metadata.row_group(group).total_byte_size
        if total >= recipe.shard_bytes or group == metadata.num_row_groups - 1:
            shards.append(Shard(index=index + len(shards), start=start, stop=group + 1, **fields))
            start, total = group + 1, 0
    return shards


def frozen(recipe: Recipe, out: str, *, refresh: bool = False) -> list[Shard]:
    """The listing of the run in `out`: written at its first start, read and compared with the storage afterwards.

    Raises InputError when the files are not what they were and `refresh` is not set.
    """
    path = join(out, "inputs.json")
    now = list_shards(recipe, out)
    if exists(path) and not refresh:
        before = [Shard.model_validate(entry) for entry in orjson.loads(read_bytes(path))]
        if before == now:
            return before
        if {s.source for s in before} == set(recipe.sources) and _patterns(out) == _sources(recipe):
            raise InputError(_difference(before, now))
    publish_bytes(path, orjson.dumps([shard.model_dump() for shard in now], option=orjson.OPT_INDENT_2))
    publish_bytes(join(out, "inputs.sources.json"), orjson.dumps(_sources(recipe), option=orjson.OPT_SORT_KEYS))
    return now


def _sources(recipe: Recipe) -> dict[str, Any]:
    return {name: source.model_dump() for name, source in recipe.sources.items()}


def _patterns(out: str) -> Any:
    path = join(out, "inputs.sources.json")
    return orjson.loads(read_bytes(path)) if exists(path) else None


def _difference(before: list[Shard], now: list[Shard]) -> str:
    def identity(shards: list[Shard]) -> dict[str, tuple[int, str]]:
        return {s.path: (s.size, s.stamp) for s in shards}

    old, new = identity(before), identity(now)
    groups = {
        "gone": sorted(set(old) - set(new)),
        "new": sorted(set(new) - set(old)),
        "changed": sorted(p for p in old.keys() & new.keys() if old[p] != new[p]),
    }
    lines = [f"  {len(paths):,} {what}: {', '.join(paths[:3])}" for what, paths in groups.items() if paths]
    return (
        "The input files are not what they were when this run began:\n"
        + "\n".join(lines or ["  they would be cut into other shards"])
        + "\nRun with --refresh-inputs to take them as they are now; only shards of other content are redone."
    )
