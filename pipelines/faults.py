"""What went wrong in a run, as records in its folder: `failed/<segment>-<part>.json`.

A shard is *set aside* when it kept killing its worker, or when a stage cannot take its documents: the next start of
the run leaves it out, `--retry-failed` takes it up again. Any other failure is tried again by the next start.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from gristmill.stages.shards import filesystem, join, publish_bytes, read_bytes

FOLDER = "failed"
SET_ASIDE = ("killed", "fault")
# Faults of the storage that the next piece meets as well: full, over quota, over the size of a file, not writable.
LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}


class FailedShard(BaseModel):
    """One shard that could not be done in one segment."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    segment: str
    part: str
    path: str  # of the input, with its range
    stage: str  # "" where it is not known
    error: str
    kind: str
    attempts: int
    key: str  # of the piece: another key is another piece
    when: str = ""  # UTC
    log: str = ""  # last words of the process that it killed

    @property
    def set_aside(self) -> bool:
        return self.kind in SET_ASIDE

    def line(self) -> str:
        """For a list of failures."""
        return f"{self.path}: {self.error}"


class Failed:
    """The records of a run folder."""

    def __init__(self, out: str) -> None:
        self._folder = join(out, FOLDER)
        self._records: dict[tuple[str, str], FailedShard] = {}
        fs, inner = filesystem(self._folder)
        paths = fs.ls(inner, detail=False) if fs.isdir(inner) else []
        for path in sorted(str(path) for path in paths if str(path).endswith(".json")):
            name = path.rsplit("/", 1)[-1]
            try:
                record = FailedShard.model_validate(orjson.loads(read_bytes(join(self._folder, name))))
            except (FileNotFoundError, orjson.JSONDecodeError, ValidationError):
                continue  # taken away meanwhile, or edited by hand: then the shard is simply tried again
            self._records[record.segment, record.part] = record

    def __iter__(self) -> Iterator[FailedShard]:
        return iter(self._records.values())

    def of(self, segment: str, part: str, keys: Iterable[str]) -> FailedShard | None:
        """The record of a piece, when it is of one of these keys."""
        record = self._records.get((segment, part))
        return record if record is not None and record.key in set(keys) else None

    def add(self, record: FailedShard) -> None:
        stamped = record.model_copy(update={"when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")})
        self._records[record.segment, record.part] = stamped
        publish_bytes(
            self._path(record.segment, record.part), orjson.dumps(stamped.model_dump(), option=orjson.OPT_INDENT_2)
        )

    def clear(self, segment: str, part: str) -> None:
        """Forgets a piece that is done now."""
        if self._records.pop((segment, part), None) is not None:
            fs, inner = filesystem(self._path(segment, part))
            if fs.exists(inner):
                fs.rm(inner)

    def _path(self, segment: str, part: str) -> str:
        return join(self._folder, f"{segment}-{part}.json")


def storage_message(out: str, error: str) -> str:
    """What to tell when a run folder cannot be written any more."""
    return (
        f"The storage of {out} does not take any more: {error}. The run stopped; what is done stays, and half-written "
        "files are cleaned up. Make room there (or in the folder for temporary files), or give back the permission to "
        "write, and run the same command again."
    )
