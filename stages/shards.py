"""Shards: what a worker reads, and how files appear in a run folder.

Paths are fsspec URLs everywhere; a plain path is a local file. A file that is visible is complete: `publish` writes
under a temporary name beside the target and renames.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec
import xxhash
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from gristmill.stages.documents import Settings

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oci", "oss", "hf"}


class ShardError(ValueError):
    """A shard cannot be read or written at all; the message says which, why, and what to do."""


class Member(Settings):
    """One file of a shard that bundles small files."""

    name: str  # the path below the folder that the listing began at
    size: int  # bytes
    stamp: str  # modification time or etag


class Shard(Settings):
    """One input file, or a range of it, or a bundle of small files, in the frozen listing of a run."""

    index: int  # position in the listing; names the output part, and nothing else depends on it
    source: str
    path: str
    name: str  # the path below the folder that the listing began at: the same wherever the corpus lies
    format: str  # a key of `readers.FORMATS`
    size: int  # bytes of the whole file
    stamp: str  # modification time or etag: with path and size, the identity of the content
    dump: str | None = None
    start: int = 0  # first row group (parquet) or byte (jsonl); 0 for formats that are not split
    stop: int | None = None  # the row group or byte after the last; None reads to the end
    columns: dict[str, str] = Field(default_factory=dict)  # our column -> the input's, where the recipe maps them
    members: tuple[Member, ...] = ()  # of a bundle: `path` is their folder then, and `name` is empty

    @property
    def part(self) -> str:
        return f"part-{self.index:05d}"

    @property
    def label(self) -> str:
        """Path and range, for messages."""
        if self.members:
            more = f" and {len(self.members) - 1:,} more files" if len(self.members) > 1 else ""
            return f"{join(self.path, self.members[0].name)}{more}"
        if not self.start and self.stop is None:
            return self.path
        return f"{self.path}[{self.start}:{'' if self.stop is None else self.stop}]"


@cache
def _local() -> LocalFileSystem:
    """The one of this process: it holds no state."""
    return LocalFileSystem()


def filesystem(path: str) -> tuple[Any, str]:
    """An fsspec URL or a plain path -> (filesystem, path on it).

    Stores are asked anew each time: other workers write what a listing kept in memory does not know. The hub's own
    file system cannot do without its listings. A plain path takes a tenth of the time that fsspec's own look-up takes:
    a small shard asks a dozen times.
    """
    if ":" not in path:
        return _local(), str(LocalFileSystem._strip_protocol(path))
    anew = "://" in path and not path.startswith("hf://")
    fs, inner = fsspec.core.url_to_fs(path, **({"use_listings_cache": False} if anew else {}))
    return fs, inner


def join(folder: str, *names: str) -> str:
    """folder/names, for plain paths and URLs alike."""
    return "/".join([folder.rstrip("/"), *names])


def exists(path: str) -> bool:
    fs, inner = filesystem(path)
    return bool(fs.exists(inner))


def read_bytes(path: str) -> bytes:
    """The whole file. Raises FileNotFoundError."""
    fs, inner = filesystem(path)
    data: bytes = fs.cat_file(inner)
    return data


@contextmanager
def publish(path: str) -> Iterator[IO[bytes]]:
    """Opens a file to write that appears under `path` only when the block ends without an error.

    On a local disk the data are synced before the rename. For a store the file is made in the local folder for
    temporary files and sent when it is whole: an object appears at once or not at all, and no temporary one is left.
    """
    fs, inner = filesystem(path)
    parent = str(PurePosixPath(inner).parent)
    if not OBJECT_STORES.intersection((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        fs.makedirs(parent, exist_ok=True)  # an object store has no folders, and s3fs would make a missing bucket
    if not isinstance(fs, LocalFileSystem):
        with tempfile.NamedTemporaryFile(prefix="gristmill-") as scratch:
            yield scratch
            scratch.flush()
            fs.put_file(scratch.name, inner)
        return
    temporary = f"{parent}/.{PurePosixPath(inner).name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, inner)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def publish_bytes(path: str, data: bytes) -> None:
    """Writes a small file whole or not at all."""
    with publish(path) as file:
        file.write(data)


def checksum(path: str) -> str:
    """xxh3-128 of a file, hex."""
    fs, inner = filesystem(path)
    digest = xxhash.xxh3_128()
    with fs.open(inner, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove_leftovers(folder: str) -> int:
    """Removes temporary files of killed attempts under a folder -> how many."""
    fs, inner = filesystem(folder)
    if not fs.exists(inner):
        return 0
    left = [path for path in fs.find(inner) if Path(path).name.startswith(".") and path.endswith(".tmp")]
    for path in left:
        fs.rm(path)
    return len(left)
