"""How far a run is: `gristmill status RUN`, also while it runs, from any machine that sees the folder.

Everything comes from the run folder: what is done from the ledgers, what was given up from `failed/`, who works on it
from `driver.lock` and `driver.json`. Nothing is asked of the driver or its cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.done import ledger_done, opened_ledger
from gristmill.pipelines.faults import Failed, FailedShard
from gristmill.pipelines.lock import holder_of, is_stale, read_driver
from gristmill.pipelines.open_run import TOKENS, Run, open_run
from gristmill.pipelines.plan import Plan, plan_of
from gristmill.pipelines.tables import plain_table, status_table
from gristmill.stages.ledger import ShardLedger, merge
from gristmill.stages.shards import Shard, join, read_bytes
from gristmill.stages.stores import local_copy

SLOWEST = 5


@dataclass(frozen=True)
class StageStatus:
    """What one stage did in the shards that are done."""

    stage: str
    read: int  # documents
    kept: int
    dropped: int
    failed: int
    kept_share: float | None
    seconds: float  # of workers
    docs_per_s: float | None  # of one worker
    mb_per_s: float | None  # of one worker; of text, or HTML before `extract`


@dataclass(frozen=True)
class SegmentStatus:
    """One row: how many shards of a segment are done."""

    segment: str
    stages: str
    done: int
    left: int  # to do, the running ones included
    set_aside: int  # given up, in this segment or in one before
    shards: int
    read: int  # documents
    kept: int
    failed: int  # documents that could not be read
    kept_share: float | None
    seconds: float  # of workers
    docs_per_s: float | None  # of one worker
    mb_per_s: float | None
    eta_s: float | None  # None where nothing is done yet, or nobody works
    by_stage: list[StageStatus] = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """A run as it stands."""

    run: str
    driver: dict[str, Any] | None  # what it last said, with `alive`
    segments: list[SegmentStatus]
    slowest: list[dict[str, Any]]  # shards that are done and took longest: segment, path, seconds, host, mb_per_s
    failed: list[dict[str, Any]]

    @property
    def is_done(self) -> bool:
        return all(row.done == row.shards for row in self.segments)


class Looking:
    """Looks at a run again and again; a ledger that was read is not read again."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ledgers: dict[tuple[str, int, str], ShardLedger] = {}

    def status(self) -> Status:
        """Raises SettingsError when the folder has no readable recipe."""
        run = self._run
        plan = _plan(run)
        driver = _driver(run.path)
        workers = int(driver.get("workers", 1)) if driver and driver["alive"] else 0
        failed = Failed(run.path)
        todo = [
            (s.segment.folder, ", ".join(u.heading for u in s.segment.uses), s.shards, s.ordered) for s in plan.segments
        ]
        if plan.tokenizer is not None:
            todo.append((TOKENS, "tokenize", plan.tokens, plan.tokens_ordered))
        rows: list[SegmentStatus] = []
        books: list[ShardLedger] = []
        lost: set[int] = set()
        given_up: list[FailedShard] = []
        for folder, stages, keys, ordered in todo:
            pairs = list(zip(plan.shards, keys, strict=True))
            done = {shard.index: found for shard, key in pairs if (found := self._ledger(folder, shard, key))}
            signing = next((s.sign_ordered for s in plan.segments if s.segment.folder == folder), {})
            if folder == TOKENS and plan.scattered:
                signing = dict(enumerate(plan.tokens_ordered))
            records = [
                record
                for shard, key in zip(plan.shards, ordered, strict=True)
                if shard.index not in done
                and (record := failed.of(folder, shard.part, [key, signing.get(shard.index, key)]))
            ]
            given_up += records
            lost |= {shard.index for shard in plan.shards for record in records if record.part == shard.part}
            rows.append(_row(folder, stages, plan.shards, done, lost - done.keys(), workers))
            books += done.values()
        slowest = sorted(books, key=lambda book: -book.seconds)[:SLOWEST]
        return Status(
            run=run.path,
            driver=driver,
            segments=rows,
            slowest=[_slow(book) for book in slowest],
            failed=[record.model_dump() for record in given_up],
        )

    def _ledger(self, folder: str, shard: Shard, key: str) -> ShardLedger | None:
        known = self._ledgers.get((folder, shard.index, key))
        if known is None and ledger_done(self._run.path, folder, shard, key):
            known = opened_ledger(self._run.path, folder, shard)
            if known is not None:
                self._ledgers[folder, shard.index, key] = known
        return known


def status(run: Run) -> list[SegmentStatus]:
    """A row a segment, in order; tokens last. Raises SettingsError when the folder has no readable recipe."""
    return Looking(run).status().segments


def as_json(found: Status) -> str:
    return orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2).decode()


def _plan(run: Run) -> Plan:
    recipe = recipes.load(local_copy(join(run.path, "recipe.yaml")))
    shards = [Shard.model_validate(entry) for entry in orjson.loads(read_bytes(join(run.path, "inputs.json")))]
    return plan_of(recipe, shards, run.path)


def _driver(folder: str) -> dict[str, Any] | None:
    said, holder = read_driver(folder), holder_of(folder)
    if said is None and holder is None:
        return None
    alive = holder is not None and not is_stale(holder, time.time())
    who = {} if holder is None else {"host": holder.host, "pid": holder.pid, "started": holder.started}
    out = {**(said or {}), **(who if alive else {}), "alive": alive}
    if not alive:
        out.pop("running", None)
    return out


def _row(
    folder: str,
    stages: str,
    shards: Iterable[Shard],
    done: dict[int, ShardLedger],
    set_aside: set[int],
    workers: int,
) -> SegmentStatus:
    every = list(shards)
    books = [book for book in done.values() if book.stages]
    read = sum(b.stages[0].read.documents for b in books)
    kept = sum(b.stages[-1].kept.documents for b in books)
    seconds = sum(b.seconds for b in done.values())
    size = sum(b.stages[0].read.bytes for b in books)
    left = [shard for shard in every if shard.index not in done and shard.index not in set_aside]
    # Shards differ in size, so the time left goes by the bytes of their input.
    worked = sum(shard.size for shard in every if shard.index in done)
    eta = None
    if not left:
        eta = 0.0
    elif worked and workers:
        eta = round(sum(shard.size for shard in left) / worked * seconds / workers, 1)
    return SegmentStatus(
        segment=folder,
        stages=stages,
        done=len(done),
        left=len(left),
        set_aside=len(set_aside),
        shards=len(every),
        read=read,
        kept=kept,
        failed=sum(a.documents for b in books for s in b.stages for a in s.failed.values()),
        kept_share=_ratio(kept, read),
        seconds=round(seconds, 3),
        docs_per_s=_ratio(read, seconds),
        mb_per_s=_ratio(size / 1e6, seconds),
        eta_s=eta,
        by_stage=_stages(books),
    )


def _stages(books: Iterable[ShardLedger]) -> list[StageStatus]:
    return [
        StageStatus(
            stage=name,
            read=book.read.documents,
            kept=book.kept.documents,
            dropped=sum(a.documents for a in book.dropped.values()),
            failed=sum(a.documents for a in book.failed.values()),
            kept_share=_ratio(book.kept.documents, book.read.documents),
            seconds=round(book.seconds, 3),
            docs_per_s=_ratio(book.read.documents, book.seconds),
            mb_per_s=_ratio(book.read.bytes / 1e6, book.seconds),
        )
        for name, book in merge(stage for book in books for stage in book.stages).items()
    ]


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _slow(book: ShardLedger) -> dict[str, Any]:
    size = book.stages[0].read.bytes if book.stages else 0
    return {
        "segment": book.segment,
        "path": book.input,
        "seconds": round(book.seconds, 3),
        "host": book.host,
        "mb_per_s": _ratio(size / 1e6, book.seconds),
    }


def shown(found: Status) -> Group:
    """A status for people."""
    parts: list[Any] = [Text(line) for line in _who(found)]
    parts.append(status_table(found.segments))
    columns = ["stage", "segment", "read", "kept", "dropped", "failed", "kept share", "docs/s", "MB/s"]
    rows = [
        dict(
            zip(
                columns,
                [
                    *(s.stage, row.segment, s.read, s.kept, s.dropped, s.failed),
                    *(s.kept_share, s.docs_per_s, s.mb_per_s),
                ],
                strict=True,
            )
        )
        for row in found.segments
        for s in row.by_stage
    ]
    if rows:
        parts.append(plain_table("Stages (rates of one worker)", columns, rows, names=2))
    running = (found.driver or {}).get("running") or []
    if running:
        parts.append(plain_table("Running, longest first", ["piece", "seconds"], running[:SLOWEST]))
    if found.slowest:
        names = ["path", "segment", "host", "seconds", "mb_per_s"]
        parts.append(plain_table("Slowest shards", names, found.slowest, names=3))
    if found.failed:
        parts.append(plain_table("Given up", ["path", "segment", "stage", "error"], found.failed[:20], names=4))
        parts.append(Text(f"Details and logs: {found.run}/failed"))
    return Group(*parts)


def _who(found: Status) -> list[str]:
    driver = found.driver
    if driver is None or not driver["alive"]:
        return [f"{found.run}: nobody works on it." + ("" if found.is_done else " Run the recipe again to go on.")]
    lines = [
        f"{found.run}: process {driver['pid']} on {driver['host']} works on it, {driver.get('workers', '?')} workers."
    ]
    if driver.get("dashboard"):
        lines.append(f"Dask dashboard: {driver['dashboard']}")
    if phase := driver.get("phase"):
        rate = phase["documents"] / max(phase["seconds"], 1e-9)
        lines.append(f"Now {phase['name']}: {phase['done']:,} of {phase['total']:,}, {rate:,.0f} docs/s")
    return lines


def watch(
    folder: str,
    every_s: float,
    console: Console,
    *,
    as_lines: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Shows a run again and again until all of it is done or nobody works on it any more."""
    looking = Looking(open_run(folder))
    with Live(console=console, auto_refresh=False, transient=False) if not as_lines else _Lines() as live:
        while True:
            found = looking.status()
            if as_lines:
                console.file.write(orjson.dumps(asdict(found)).decode() + "\n")
                console.file.flush()
            else:
                live.update(shown(found), refresh=True)
            if found.is_done or found.driver is None or not found.driver["alive"]:
                return
            pause(every_s)


class _Lines:
    """In the place of a live display, for programs."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return
