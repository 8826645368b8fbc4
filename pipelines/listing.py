"""The frozen listing of a run: which files there were when it began, cut into shards.

A resumed run reads what the first attempt saw. A file that changed, vanished or appeared since is an error with the
list, never a silent difference: `gristmill run --refresh-inputs` takes the new state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from gristmill.pipelines.downloads import InputError, downloaded
from gristmill.pipelines.recipe import Recipe, Source
from gristmill.stages.hf_folder import HF, HfError, hf_files
from gristmill.stages.readers import detect_format
from gristmill.stages.readers_ranges import cuts
from gristmill.stages.shards import Member, Shard, exists, filesystem, join, publish_bytes, read_bytes
from gristmill.stages.stores import explained, matching, patiently, stamp_of

MAX_BUNDLE = 10_000  # text files of one shard


def list_shards(recipe: Recipe, out: str = "") -> list[Shard]:
    """Looks at the storage now: the files of every source in the recipe's order, sorted by path, as shards.

    out: the run folder, where downloads lie. Raises InputError for a pattern that matches nothing, for a file named
    twice, and for a download that is not complete.
    """
    shards: list[Shard] = []
    seen: dict[str, str] = {}
    for source, settings in recipe.sources.items():
        texts: list[Shard] = []
        for path, name in _files(source, settings, out):
            if path in seen:
                raise InputError(
                    f"{path} belongs to source `{seen[path]}` and to source `{source}`: its documents would be "
                    "counted twice. Change one of the patterns."
                )
            seen[path] = source
            shard = _whole(source, settings, path, name, len(shards))
            if shard.format == "text":
                texts.append(shard)
            else:
                shards.extend(_cut(recipe, shard))
        shards.extend(_bundles(recipe, texts, len(shards)))
    return shards


def _files(source: str, settings: Source, out: str) -> Iterable[tuple[str, str]]:
    """(path, name below the fixed part of its pattern), sorted by path."""
    if settings.download is not None:
        return downloaded(source, settings.download, out)
    patterns = [settings.files] if isinstance(settings.files, str) else settings.files or []
    found: dict[str, str] = {}
    for pattern in patterns:
        with explained(pattern, "listed"):
            matched = _of_dataset(source, settings, pattern) if settings.format == HF else matching(pattern)
        if not matched:
            raise InputError(f"Source `{source}`: no file matches {pattern}. Check `files` in the recipe.")
        found |= matched
    return sorted(found.items())


def _of_dataset(source: str, settings: Source, folder: str) -> dict[str, str]:
    """path -> name below the folder, of the files of a dataset's split."""
    fs, inner = filesystem(folder)
    try:
        paths = hf_files(fs, inner, settings.config, settings.split or "train")
    except HfError as error:
        raise InputError(f"Source `{source}`: {error}") from error
    base = inner.rstrip("/")
    return {(fs.unstrip_protocol(p) if "://" in folder else p): p[len(base) :].lstrip("/") for p in paths}


def _whole(source: str, settings: Source, path: str, name: str, index: int) -> Shard:
    """The file as one shard."""
    with explained(path, "listed"):
        fs, inner = filesystem(path)
        info = patiently(fs.info, inner)
    if info.get("size") is None:
        raise InputError(f"{path}: its server does not say how long it is. Download it (`stream: false`).")
    return Shard(
        index=index,
        source=source,
        path=path,
        name=name,
        format=detect_format(path) if settings.format in (None, HF) else str(settings.format),
        size=int(info["size"]),
        stamp=stamp_of(info),
        dump=settings.dump,
        columns=settings.columns,
    )


def _cut(recipe: Recipe, shard: Shard) -> list[Shard]:
    """A big file in ranges, where its format allows that."""
    if shard.size <= recipe.shard_bytes or shard.format not in ("parquet", "jsonl"):
        return [shard]
    fs, inner = filesystem(shard.path)
    with fs.open(inner, "rb") as file:
        if shard.format == "parquet":
            ends: list[int | None] = list(_row_groups(file, recipe.shard_bytes))
        else:
            near = isinstance(fs, LocalFileSystem)
            ends = [*cuts(file, shard.size, recipe.shard_bytes, walk=near), None]
    if not ends or ends == [None]:  # a damaged Parquet file, whose reader says what it has; or one that stays whole
        return [shard]
    starts = [0, *(int(end) for end in ends[:-1] if end is not None)]
    return [
        shard.model_copy(update={"index": shard.index + i, "start": start, "stop": stop})
        for i, (start, stop) in enumerate(zip(starts, ends, strict=True))
    ]


def _row_groups(file: Any, shard_bytes: int) -> Iterator[int]:
    """The row groups behind the last one of each range; none for a file that is no whole Parquet file."""
    try:
        metadata = pq.ParquetFile(file).metadata
    except (pa.ArrowInvalid, OSError):
        return
    total = 0
    for group in range(metadata.num_row_groups):
        total += metadata.row_group(group).total_byte_size
        if total >= shard_bytes or group == metadata.num_row_groups - 1:
            yield group + 1
            total = 0


def _bundles(recipe: Recipe, texts: list[Shard], index: int) -> list[Shard]:
    """Text files, each a document, in bundles of bounded size; a bundle lies in one folder of the listing."""
    groups: list[list[Shard]] = []
    folder, total = "", 0
    for shard in texts:
        its = shard.path[: -len(shard.name)].rstrip("/")
        if not groups or its != folder or total + shard.size > recipe.shard_bytes or len(groups[-1]) >= MAX_BUNDLE:
            groups.append([])
            folder, total = its, 0
        groups[-1].append(shard)
        total += shard.size
    return [_bundle(group, index + i) for i, group in enumerate(groups)]


def _bundle(files: list[Shard], index: int) -> Shard:
    members = tuple(Member(name=shard.name, size=shard.size, stamp=shard.stamp) for shard in files)
    first = files[0]
    folder = first.path[: -len(first.name)].rstrip("/") or "/"
    update = {"index": index, "path": folder, "name": "", "stamp": "", "members": members}
    return first.model_copy(update=update | {"size": sum(shard.size for shard in files)})


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
        files = {s.path: (s.size, s.stamp) for s in shards if not s.members}
        return files | {join(s.path, m.name): (m.size, m.stamp) for s in shards for m in s.members}

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
