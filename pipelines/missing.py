"""Which shards of a run are missing, why, and what that holds up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gristmill.pipelines.engine import Failure
from gristmill.pipelines.faults import Failed, FailedShard
from gristmill.stages.shards import Shard

SHOWN = 20  # of each segment
MEND = (
    "Mend the cause and run the same command again; only what is missing is done. (With `unreadable: count` in the "
    "recipe, a file that cannot be read is a failed document of the books.)"
)


class Missing:
    """The shards that got no further, in one pass over a plan.

    Segments after go on for the other shards as far as they look at each document alone. What needs all shards (a
    global stage, a model, the tokenizer) asks `held_up`: done without one of them, it would be something else.
    """

    def __init__(self, out: str, shards: int, say: Callable[[str], None], *, retry_failed: bool) -> None:
        self._out, self._shards, self._say, self._retry_failed = out, shards, say, retry_failed
        self._failed = Failed(out)
        self._why: dict[int, FailedShard] = {}  # shard index -> what happened

    def __bool__(self) -> bool:
        return bool(self._why)

    def add(self, shard: Shard, folder: str, key: str, failure: Failure) -> None:
        """A shard was given up in a segment."""
        record = FailedShard(
            segment=folder,
            part=shard.part,
            path=shard.label,
            stage=failure.stage,
            error=failure.error,
            kind=failure.kind,
            attempts=failure.attempts,
            key=key,
            log=failure.log,
        )
        self._failed.add(record)
        self._why[shard.index] = record

    def done(self, shard: Shard, folder: str) -> None:
        """What was once given up is done now."""
        self._failed.clear(folder, shard.part)

    def left(self, folder: str, pieces: Iterable[tuple[Shard, str]]) -> list[tuple[Shard, str]]:
        """Of (shard, key), those to do: big ones first, so that there is no long tail; without those that were set
        aside, or got no further in an earlier segment."""
        todo = []
        for shard, key in sorted(pieces, key=lambda piece: (-piece[0].size, piece[0].index)):
            if shard.index in self._why:
                continue
            record = self._failed.of(folder, shard.part, [key])
            if record is not None and record.set_aside and not self._retry_failed:
                self._why[shard.index] = record
                self._say(f"  left out, set aside before (--retry-failed takes it up): {record.line()}")
                continue
            todo.append((shard, key))
        return todo

    def held_up(self, what: str, indexes: Iterable[int]) -> str:
        """A message when one of these shards is missing, else ""."""
        if self._why.keys().isdisjoint(indexes):
            return ""
        return self.message(f"{what} needs all of them, and waits.")

    def message(self, waiting: str = "") -> str:
        """The list of what is missing, and what to do."""
        lines: list[str] = []
        for folder in sorted({record.segment for record in self._why.values()}):
            records: Sequence[FailedShard] = [one for one in self._why.values() if one.segment == folder]
            count = f"{len(records):,} of {self._shards:,} pieces of {folder}"
            lines.append(f"{count} were given up; the others are done:")
            lines += [f"  {record.line()}" for record in records[:SHOWN]]
            if len(records) > SHOWN:
                lines.append(f"  and {len(records) - SHOWN:,} more")
        if waiting:
            lines.append(waiting)
        if any(record.set_aside for record in self._why.values()):
            lines.append(f"Details and logs: {self._out}/failed. `--retry-failed` takes up again what was set aside.")
        return "\n".join([*lines, MEND])
