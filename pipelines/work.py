"""What a worker does with one shard. Each function takes one plain, picklable order and returns a small summary.

A worker needs the storage and this package, nothing else: documents go from file to file and never over the network.
"""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from gristmill.pipelines.accounting import Accounting
from gristmill.pipelines.poison import Guard, Poisoned
from gristmill.pipelines.upstream import Upstream, parts_of
from gristmill.pipelines.written import DroppedWriter, KeptWriter
from gristmill.stages.documents import (
    Batch,
    Result,
    apply_decisions,
)
from gristmill.stages.ledger import (
    FileRecord,
    ShardLedger,
    StageLedger,
    book,
    count_measures,
    memory_of_process,
)
from gristmill.stages.shards import (
    Shard,
    ShardError,
    checksum,
    exists,
    filesystem,
    join,
    publish,
    publish_bytes,
    read_bytes,
)
from gristmill.stages.stores import local_model

MAX_MAPS = 20_000  # files that one process maps
VERSIONED = ("gristmill", "pyarrow", "numpy", "numba", "resiliparse", "fastwarc", "datatrove")


@dataclass(frozen=True)
class StageStep:
    """A stage as a worker runs it: models resolved to paths."""

    key: str  # what the books call it
    stage: Any
    is_gate: bool = False  # its decisions were made by `cluster`; the worker joins them


@dataclass(frozen=True)
class ShardOrder:
    """Take one shard through one segment."""

    out: str  # run folder
    folder: str  # of the segment, below `out`
    upstream: Upstream
    shard: Shard
    key: str
    steps: tuple[StageStep, ...]
    schema: pa.Schema  # of the documents kept
    sample_per_reason: int
    removals_share: float = 0.0  # of documents that go through all stages for the count of removals
    poison: tuple[Poisoned, ...] = ()  # documents that are known to kill a worker
    is_copy: bool = False  # a second attempt beside one that is slow: it must not take the first one's claim back


@dataclass(frozen=True)
class SignOrder:
    """Make the signatures of one shard for a global stage."""

    out: str
    folder: str
    upstream: Upstream
    shard: Shard
    key: str
    stage: Any
    heading: str = ""  # what the books call the stage
    poison: tuple[Poisoned, ...] = ()
    is_copy: bool = False


@dataclass(frozen=True)
class ClusterOrder:
    """Decide over the signatures of all shards, or of one group of them."""

    out: str
    folder: str
    shards: tuple[Shard, ...]  # those that were signed, in order
    sign_keys: tuple[str, ...]
    key: str
    stage: Any
    upstream: Upstream  # for texts, to compare or to show
    group: int | None = None  # index of the group's first shard, where a stage decides group by group

    @property
    def card(self) -> str:
        """The file that says what was decided; published last."""
        return join(self.out, self.folder, "cluster", card_name(self.group))


def card_name(group: int | None) -> str:
    return "card.json" if group is None else f"group-{group:05d}.json"


def withdraw(path: str) -> None:
    """Takes back the file that says "done" before what it speaks of is replaced: a kill in between leaves no old
    claim over new files."""
    fs, inner = filesystem(path)
    with suppress(FileNotFoundError):
        fs.rm_file(inner)


@cache
def versions() -> dict[str, str]:
    out = {"python": platform.python_version()}
    for name in VERSIONED:
        out[name] = importlib.metadata.version(name)
    return out


def run_shard(order: ShardOrder) -> dict[str, Any]:
    """Reads, passes the stages, writes kept and dropped documents, then the ledger -> what it tells of itself.

    Raises LedgerError when the sums do not balance: then nothing is published.
    """
    begun = time.perf_counter()
    ledger = ShardLedger(
        key=order.key,
        segment=order.folder,
        shard=order.shard.index,
        source=order.shard.source,
        input=order.shard.label,
        versions=versions(),
        host=socket.gethostname(),
    )
    if not order.is_copy:
        withdraw(parts_of(order.out, order.folder, "ledger", order.shard, "json"))
    decisions = _decisions(order)
    guard = Guard(order)
    books = [StageLedger(stage=step.key) for step in order.steps]
    order = replace(order, steps=tuple(replace(step, stage=local_model(step.stage)) for step in order.steps))
    dropped = DroppedWriter(order.schema, order.sample_per_reason)
    accounting = Accounting(order.steps, order.removals_share)
    met = 0
    target = parts_of(order.out, order.folder, "kept", order.shard, "parquet")
    with publish(target) as file, KeptWriter(file, order.schema) as writer:
        for batch in guard.batches(_input(order, ledger)):
            current = batch
            read: list[Batch] = []
            gone: list[Batch] = []
            for step, account in zip(order.steps, books, strict=True):
                read.append(current)
                started = time.perf_counter()
                if step.is_gate:
                    found: list[int] = []
                    result = guard.call(step.key, current, partial(_decided, step.stage, decisions, found))
                    met += sum(found)
                else:
                    result = guard.call(step.key, current, step.stage)
                book(account, current, result.kept, result.dropped, result.counters)
                count_measures(account, getattr(step.stage, "measures", ()), result.kept, result.dropped, current)
                dropped.add(step.key, current, result.dropped)
                account.seconds += time.perf_counter() - started
                gone.append(result.dropped)
                current = result.kept
            if guard.counts():
                accounting.add(read, gone, current, guard.unsafe())
            else:
                accounting.found.left_out += batch.num_rows
            writer.add(_aligned(current, order.schema))
        met += sum(guard.lost(step.key, decisions["doc_id"]) for step in order.steps if step.is_gate)
        if met != decisions.num_rows:
            raise ShardError(
                f"{order.out}/{order.folder}: {decisions.num_rows - met:,} of {decisions.num_rows:,} decisions for "
                f"{order.shard.part} name documents that are not there. Delete {order.folder}/cluster and run again."
            )
        ledger.stages.extend(books)
        ledger.check(f"{order.folder}/{order.shard.part} ({order.shard.label})")
        reached = ledger.stages[-1].kept.documents if ledger.stages else writer.rows
        assert writer.rows == reached, f"{writer.rows} documents written, {reached} booked"
    ledger.problems.extend(guard.publish())
    ledger.key = guard.key
    ledger.removals = accounting.found
    if accounting.problem:
        ledger.problems.append(f"Left out of the count of removals: {accounting.problem}")
    dropped_path = parts_of(order.out, order.folder, "dropped", order.shard, "parquet")
    rows = dropped.write(dropped_path)
    folder = join(order.out, order.folder)
    ledger.files = [
        file_record(folder, target[len(folder) + 1 :], writer.rows),
        file_record(folder, dropped_path[len(folder) + 1 :], rows),
    ]
    ledger.seconds = time.perf_counter() - begun
    ledger.ended, ledger.memory_bytes = time.time(), memory_of_process()
    publish_bytes(parts_of(order.out, order.folder, "ledger", order.shard, "json"), ledger.sealed())
    return ledger.told()


def _decided(stage: Any, decisions: pa.Table, met: list[int], batch: Batch) -> Result:
    result, found = decided(stage, batch, decisions)
    met.append(found)
    return result


def decided(stage: Any, batch: Batch, decisions: pa.Table) -> tuple[Result, int]:
    """What a global stage's decisions make of a batch, and how many of them met a document of it."""
    apply = getattr(stage, "apply", None)
    result, met = apply(batch, decisions) if apply is not None else apply_decisions(stage, batch, decisions)
    return result, int(met)


def _input(order: ShardOrder, ledger: ShardLedger) -> Iterator[Batch]:
    if order.upstream.folder is not None:
        return order.upstream.batches(order.shard)
    ledger.stages.append(account := StageLedger(stage="read"))
    return order.upstream.read(order.shard, account, ledger.problems)


def _aligned(batch: Batch, schema: pa.Schema) -> Batch:
    """The batch with exactly the schema's columns; null where it has none. HTML columns end here."""
    names = set(batch.schema.names)
    foreign = sorted(name for name in names - set(schema.names) if not name.startswith("html"))
    assert not foreign, f"a stage added columns that it does not declare: {foreign}"
    columns = [
        batch[field.name].cast(field.type) if field.name in names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def file_record(folder: str, name: str, rows: int = 0) -> FileRecord:
    """What a ledger says of a file that was published: `name` below `folder`."""
    path = join(folder, name)
    fs, inner = filesystem(path)
    return FileRecord(path=name, rows=rows, bytes=int(fs.size(inner)), xxh3=checksum(path))


def _decisions(order: ShardOrder) -> pa.Table:
    """The rows that `cluster` wrote for this shard. A missing file is an error, never a silent keep."""
    if not any(step.is_gate for step in order.steps):
        return pa.table({"doc_id": pa.array([], pa.string())})
    path = parts_of(order.out, order.folder, "cluster", order.shard, "parquet")
    if not exists(path):
        raise ShardError(f"{path} is missing. Delete {order.folder}/cluster and run the recipe again.")
    fs, inner = filesystem(path)
    with fs.open(inner, "rb") as file:
        return pq.read_table(file)


def run_sign(order: SignOrder) -> dict[str, Any]:
    """Signatures of one shard, in the order of its documents -> {"rows": documents}."""
    path = parts_of(order.out, order.folder, "sign", order.shard, "arrow")
    if not order.is_copy:
        withdraw(parts_of(order.out, order.folder, "sign", order.shard, "json"))
    guard = Guard(order)
    begun = time.perf_counter()
    rows = size = 0
    writer = None
    stage = local_model(order.stage)
    needed = ["doc_id", *(name for name in order.stage.needs if name != "doc_id")]
    with publish(path) as file:
        for batch in guard.batches(order.upstream.batches(order.shard, needed)):
            signature = guard.sign(order.heading, batch, stage.sign)
            writer = writer or pa.ipc.new_file(file, signature.schema)
            writer.write_batch(signature)
            rows += signature.num_rows
            size += int(pc.sum(pc.binary_length(batch["text"])).as_py() or 0) if "text" in needed else 0
        if writer is None:
            empty = order.upstream.empty(order.shard, needed)
            writer = pa.ipc.new_file(file, stage.sign(empty).schema)
        writer.close()
    guard.publish()
    card = {"key": guard.key, "rows": rows, "bytes": size, "seconds": time.perf_counter() - begun}
    publish_bytes(parts_of(order.out, order.folder, "sign", order.shard, "json"), orjson.dumps(card))
    return card


def run_cluster(order: ClusterOrder) -> dict[str, Any]:
    """Decides over all signatures -> the figures. The card with the key is published last."""
    withdraw(order.card)
    with tempfile.TemporaryDirectory(prefix="gristmill-") as scratch:
        return _clustered(order, scratch)


def _clustered(order: ClusterOrder, scratch: str) -> dict[str, Any]:
    begun = time.perf_counter()
    tables = _all_signatures(order, scratch)
    if order.group is None:
        decisions, figures = order.stage.cluster(tables)
    else:
        decisions, figures = order.stage.cluster(tables, _compared(order))
    if hasattr(order.stage, "illustrate"):
        figures = order.stage.illustrate(figures, partial(_texts, order))
    for shard, table in zip(order.shards, decisions, strict=True):
        with publish(parts_of(order.out, order.folder, "cluster", shard, "parquet")) as file:
            pq.write_table(table, file, compression="zstd", compression_level=3)
    seconds = time.perf_counter() - begun
    card = {
        "key": order.key,
        "figures": dict(figures),
        "documents": sum(t.num_rows for t in tables),
        "seconds": seconds,
    }
    publish_bytes(order.card, orjson.dumps(card, option=orjson.OPT_INDENT_2))
    return card


def _all_signatures(order: ClusterOrder, scratch: str) -> list[pa.Table]:
    """The signatures of every shard, mapped. Linux maps 65,530 files at once (vm.max_map_count): where there are more
    shards than a share of that, neighbours are put together into files on the local disk."""
    together = -(-len(order.shards) // MAX_MAPS)
    tables: list[pa.Table] = []
    waiting: list[pa.Table] = []
    for n, (shard, key) in enumerate(zip(order.shards, order.sign_keys, strict=True), 1):
        card = orjson.loads(read_bytes(parts_of(order.out, order.folder, "sign", shard, "json")))
        path = parts_of(order.out, order.folder, "sign", shard, "arrow")
        table = _signatures(path, f"{scratch}/{shard.part}.arrow")
        if card["key"] != key or card["rows"] != table.num_rows:
            raise ShardError(
                f"{path} holds signatures of another run or is incomplete. Delete it and run the recipe again."
            )
        if together == 1:
            tables.append(table)
            continue
        waiting.append(table)
        if len(waiting) == together or n == len(order.shards):
            tables += _in_one_file(waiting, f"{scratch}/together-{n}.arrow")
            waiting = []
    return tables


def _in_one_file(tables: Sequence[pa.Table], path: str) -> list[pa.Table]:
    """The same tables, from one mapped file."""
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    whole = pa.ipc.open_file(pa.memory_map(path)).read_all()
    starts = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
    return [whole.slice(start, table.num_rows) for start, table in zip(starts, tables, strict=False)]


def _compared(order: ClusterOrder) -> Iterator[Batch]:
    """The texts of all documents of a group, in the order of its signatures."""
    for shard in order.shards:
        yield from order.upstream.batches(shard, ["text"])


def _texts(order: ClusterOrder, shard: int, ids: Sequence[str]) -> dict[str, str]:
    """Texts of documents of the shard at a place in `order.shards`, by doc_id."""
    out: dict[str, str] = {}
    wanted = pa.array(sorted(set(ids)), pa.string())
    for found in order.upstream.rows(order.shards[shard], wanted, ("doc_id", "text")):
        out |= dict(zip(found["doc_id"].to_pylist(), found["text"].to_pylist(), strict=True))
    return out


def _signatures(path: str, copy: str) -> pa.Table:
    """A signature file, mapped, not read; one that does not lie on a local disk is copied there first."""
    fs, inner = filesystem(path)
    if not isinstance(fs, LocalFileSystem):
        fs.get_file(inner, copy)
        inner = copy
    return pa.ipc.open_file(pa.memory_map(inner)).read_all()


def summary(ledger: Mapping[str, Any]) -> dict[str, int]:
    """What a progress display needs of a shard's ledger: documents and bytes read, documents kept."""
    stages = ledger["stages"]
    if not stages:
        return {"documents": 0, "bytes": 0, "kept": 0}
    first, last = stages[0], stages[-1]
    return {
        "documents": first["read"]["documents"],
        "bytes": first["read"]["bytes"],
        "kept": last["kept"]["documents"],
    }
