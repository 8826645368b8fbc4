"""Measures a recipe on a sample of its input, for `gristmill plan`, and carries the figures on with `forecast.py`.

The sample goes through the same code as a run, in this process, in a folder that is removed afterwards: every order of
the engine is timed, and the peak of memory is taken anew for each. Nothing is written into the recipe's run folder.
"""

from __future__ import annotations

import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from gristmill.pipelines.engine import PLAIN, Care, Done, Failure, InProcess
from gristmill.pipelines.forecast import Forecast, Measured, Phase, Serial, Target, forecast
from gristmill.pipelines.forecast_sample import Piece, SampleError, sample, scaled, targets
from gristmill.pipelines.listing import list_shards
from gristmill.pipelines.plan import Plan, make_plan
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import Recipe, check
from gristmill.pipelines.run import work_through
from gristmill.pipelines.warmup import warm
from gristmill.stages.documents import MAX_BATCH_BYTES
from gristmill.stages.key_ranges import BYTES_PER_KEY, MOST_RANGES, SCOPED, SLACK, STATE, VERIFIED
from gristmill.stages.readers import columns_of

# A crawl of Common Crawl: CC-MAIN-2024-51 has 2.64 billion pages (commoncrawl.org, "December 2024 Crawl Archive Now
# Available") in 90,000 WARC files, which are made to have about 1 GB each. WET files are smaller as they were in
# CC-MAIN-2016-40, the announcement of which gives 28.94 TiB of WARC and 4.54 TiB of WET.
DUMP_FILES = 90_000
DUMP_BYTES = {"warc": 90e12, "wet": 90e12 * 4.54 / 28.94}
# CPU seconds of clustering, a million documents and band (docs/scale.md: 1.1 with 14 bands).
CLUSTER_S = 1.1 / 14
SERIAL = {"run_cluster", "run_train", "run_tokenizer", "run_tokenizer_report", "put_together"}


@dataclass(frozen=True)
class _Took:
    """One order that was done."""

    function: str
    order: Any
    result: Mapping[str, Any]
    cpu_s: float
    wall_s: float
    peak_mb: float


class Measuring(InProcess):
    """An engine that takes the time and the memory of every order; small pieces go first."""

    def __init__(self, first: Sequence[int], pause: Callable[[float], None] = time.sleep) -> None:
        super().__init__(pause)
        self._first = list(first)
        self.took: list[_Took] = []

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Done, care: Care = PLAIN
    ) -> list[Failure]:
        def rank(position: int) -> int:
            shard = getattr(orders[position], "shard", None)
            if shard is None or shard.index not in self._first:
                return len(self._first)
            return self._first.index(shard.index)

        def measured(order: Any) -> Any:
            _forget_peak()
            cpu, wall = time.process_time(), time.perf_counter()
            result = function(order)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self.took.append(_Took(function.__name__, order, result, cpu, wall, peak_mb()))
            return result

        places = sorted(range(len(orders)), key=rank)
        failures = super().run(
            measured, [orders[place] for place in places], lambda at, result: done(places[at], result), care
        )
        return [replace(failure, position=places[failure.position]) for failure in failures]


def peak_mb() -> float:
    """Peak of this process's memory since `_forget_peak`; since its start where the system cannot forget."""
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _forget_peak() -> None:
    with suppress(OSError):  # not Linux, or not allowed: the peak is that of all orders before, too
        Path("/proc/self/clear_refs").write_text("5")


def plan_run(
    recipe: Recipe,
    out: str,
    display: Display,
    *,
    input_bytes: float | None = None,
    dumps: float | None = None,
    workers: int = 1,
    price: float | None = None,
    sample_bytes: int = 64_000_000,
    seed: int = 0,
) -> Forecast:
    """What a run of the recipe will take. out: its run folder, where downloads lie; nothing is written there.

    Raises SettingsError and InputError as a run would, SampleError where no sample can be taken, and RunError where a
    piece of the sample cannot be worked on.
    """
    shards = list_shards(recipe, out)
    formats = {shard.source: tuple(columns_of(shard.format)) for shard in shards}
    check(recipe, formats)
    found = targets(shards)
    wanted, notes = _wanted(found, {shard.source: shard.format for shard in shards}, input_bytes, dumps)
    with tempfile.TemporaryDirectory(prefix="gristmill-plan-") as scratch:
        pieces = sample(shards, sample_bytes, seed, Path(scratch))
        small = [piece.shard.index for role in ("first", "second") for piece in pieces if piece.role == role]
        taken = sum(piece.input_bytes for piece in pieces if piece.role == "piece")
        there = sum(target.bytes for target in found.values())
        display.say(f"Sample: {len(pieces):,} pieces, {taken / 1e6:,.1f} MB of {there / 1e6:,.1f} MB.")
        warming = time.process_time()
        display.say(warm())
        warming = time.process_time() - warming
        engine = Measuring(small)
        run_folder = str(Path(scratch) / "run")
        plan = make_plan(recipe, [piece.shard for piece in pieces])
        work_through(plan, run_folder, engine, display)
        phases = _phases(plan, pieces, engine.took, wanted, run_folder)
        shutil.rmtree(run_folder)
    notes = [
        *notes,
        f"Kernels: {warming:.1f} CPU seconds of each worker before its first shard, when their cache is filled.",
        "Decisions of a global stage grow with documents, all else with bytes of input. A sample shows fewer "
        "duplicates than all of it, so what comes after a dedupe is an upper bound.",
        "Intervals: 90 %, from the spread between the pieces of the sample; another machine is not in them.",
    ]
    return forecast(phases, wanted, workers, price=price, batch_bytes=MAX_BATCH_BYTES, notes=notes)


def _wanted(
    found: Mapping[str, Target], formats: Mapping[str, str], input_bytes: float | None, dumps: float | None
) -> tuple[dict[str, Target], list[str]]:
    whole = sum(target.bytes for target in found.values())
    if input_bytes is not None:
        factor = input_bytes / whole
        return scaled(found, dict.fromkeys(found, factor)), [
            f"Carried on from {whole:,.0f} to {input_bytes:,.0f} bytes."
        ]
    if dumps is None:
        return dict(found), []
    crawls = [source for source, kind in formats.items() if kind in DUMP_BYTES]
    if not crawls:
        raise SampleError(
            "--dumps speaks of crawls, and no source of this recipe is WARC or WET. Say --input-bytes instead."
        )
    out = dict(found)
    of_all = sum(found[source].bytes for source in crawls)
    for source in crawls:
        share = found[source].bytes / of_all
        size, files = DUMP_BYTES[formats[source]] * dumps * share, DUMP_FILES * dumps * share
        out[source] = Target(size, max(1, round(files)), size / max(1.0, files))
    note = (
        f"A dump is taken as {DUMP_FILES:,} files of {DUMP_BYTES['warc'] / 1e12:,.0f} TB of WARC or "
        f"{DUMP_BYTES['wet'] / 1e12:,.1f} TB of WET: CC-MAIN-2024-51, 2.64 billion pages, about 1 GB a WARC file."
    )
    return out, [note]


def _phases(
    plan: Plan, pieces: Sequence[Piece], took: Sequence[_Took], wanted: Mapping[str, Target], folder: str
) -> list[Phase | Serial]:
    """The orders that were done, by phase, in the order in which phases began."""
    by_name: dict[str, list[_Took]] = {}
    for one in took:
        by_name.setdefault(_name(one), []).append(one)
    roles = {piece.shard.index: piece for piece in pieces}
    sampled: dict[str, float] = {}
    for piece in pieces:
        sampled[piece.shard.source] = sampled.get(piece.shard.source, 0.0) + piece.input_bytes
    # The serial parts see all sources together, so they grow as the whole does.
    grow = sum(target.bytes for target in wanted.values()) / sum(sampled.values())
    out: list[Phase | Serial] = []
    for name, group in by_name.items():
        if group[0].function in SERIAL:
            out.append(_serial(plan, name, group, grow))
            continue
        rows = {role: [] for role in ("piece", "first", "second")}  # type: dict[str, list[Measured]]
        for one in group:
            piece = roles[one.order.shard.index]
            rows[piece.role].append(_measured(one, piece, folder))
        out.append(Phase(name, tuple(rows["piece"]), tuple(rows["first"]), tuple(rows["second"])))
    return out


def _name(one: _Took) -> str:
    names: dict[str, Callable[[Any], str]] = {
        "run_shard": lambda order: order.folder,
        "run_sign": lambda order: f"{order.folder} sign",
        "run_cluster": lambda order: f"{order.folder} cluster",
        "run_train": lambda order: f"model {order.name}",
        "run_tokenizer": lambda _: "tokenizer",
        "run_tokenizer_report": lambda _: "tokenizer report",
        "sign_held_out": lambda _: "held-out documents",
        "put_together": lambda _: "held-out documents, together",
        "find_near": lambda _: "near held-out documents",
        "run_tokens": lambda _: "token shards",
    }
    make = names.get(one.function)
    return one.function if make is None else make(one.order)


def _measured(one: _Took, piece: Piece, folder: str) -> Measured:
    order, result = one.order, one.result
    part, ledger = order.shard.part, one.function in ("run_shard", "run_tokens")
    read = result["stages"][0]["read"] if ledger and result["stages"] else {}
    disk: dict[str, int] = {}
    per_shard = 0
    where = getattr(order, "folder", "tokens")
    kinds = {"run_shard": ("kept", "dropped", "ledger"), "run_sign": ("sign",), "sign_held_out": ("near/held",)}
    kinds["find_near"] = ("near/found",)
    for kind in kinds.get(one.function, ()):
        for path in sorted((Path(folder) / where / kind).glob(f"{part}.*")):
            size = path.stat().st_size
            samples = _text_bytes(path) if kind == "dropped" else size if path.suffix == ".json" else 0
            per_shard += samples
            disk[kind] = disk.get(kind, 0) + size - samples
    if one.function == "run_tokens":
        disk["tokens"] = sum(int(file["bytes"]) for file in result["files"])
    return Measured(
        source=piece.shard.source,
        input_bytes=piece.input_bytes,
        cpu_s=one.cpu_s,
        wall_s=one.wall_s,
        peak_mb=one.peak_mb,
        text_bytes=int(read.get("bytes", result.get("bytes", 0) or 0)),
        documents=int(read.get("documents", result.get("rows", result.get("documents", 0)))),
        disk=disk,
        disk_shard=per_shard,
        stages=_seconds(result) if one.function == "run_shard" else {},
    )


def _seconds(ledger: Mapping[str, Any]) -> dict[str, float]:
    return {str(book["stage"]): float(book["seconds"]) for book in ledger["stages"]}


def _text_bytes(path: Path) -> int:
    """What the texts of a sample of dropped documents take: so many for each reason and shard, whatever its size."""
    metadata = pq.ParquetFile(path).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    return sum(int(column.total_compressed_size) for column in columns if column.path_in_schema == "text")


def _serial(plan: Plan, name: str, group: Sequence[_Took], grow: float) -> Serial:
    one = group[0]
    cpu, wall = sum(o.cpu_s for o in group), sum(o.wall_s for o in group)
    peak = max(o.peak_mb for o in group)
    if one.function == "run_cluster":
        return _clustering(name, group, grow)
    if one.function == "run_tokenizer_report":
        return Serial(name, cpu, wall, peak, 0.0, "a sample of the documents: as measured")
    if one.function == "put_together":
        size = (Path(one.order.out) / "tokens/near/held.arrow").stat().st_size
        return Serial(name, cpu * grow, wall * grow, peak, size * grow, "documents held out")
    settings = one.order.settings
    limit = _limit(settings, one.function)
    read = _kept_bytes(one, plan)
    factor = grow if limit is None else max(1.0, min(grow, limit / max(1, read)))
    how = f"bytes of text, {factor:,.1f} times the sample's" + ("" if limit is None else f", at most {limit:,}")
    return Serial(name, cpu * factor, wall * factor, peak, 0.0, how)


def _limit(settings: Any, function: str) -> int | None:
    """Bytes of text that a model or a tokenizer learns from at most."""
    if function == "run_tokenizer":
        return int(settings.max_bytes)
    limits = [selection.max_bytes for selection in settings.roles().values()]
    known = [int(limit) for limit in limits if limit is not None]
    return sum(known) if len(known) == len(limits) else None


def _kept_bytes(one: _Took, plan: Plan) -> int:
    """Bytes of text of the segment that a model learns from."""
    total = 0
    for shard in plan.shards:
        path = Path(one.order.out) / str(one.order.upstream) / "kept" / f"{shard.part}.parquet"
        if path.exists():
            metadata = pq.ParquetFile(path).metadata
            for i in range(metadata.num_row_groups):
                group = metadata.row_group(i)
                columns = [group.column(n) for n in range(group.num_columns)]
                total += sum(int(c.total_uncompressed_size) for c in columns if c.path_in_schema == "text")
    return total


def _clustering(name: str, group: Sequence[_Took], grow: float) -> Serial:
    stage = group[0].order.stage
    documents = sum(int(one.result["documents"]) for one in group)
    rows = documents * grow
    cpu, wall = sum(o.cpu_s for o in group), sum(o.wall_s for o in group)
    peak = max(o.peak_mb for o in group)
    decided = Path(group[0].order.out) / group[0].order.folder / "cluster"
    disk = sum(path.stat().st_size for path in decided.glob("*.parquet")) * grow
    if not hasattr(stage, "memory_mb"):
        how = f"{rows:,.0f} documents; per document as in the sample, an upper bound for a small one"
        return Serial(name, cpu * grow, wall * grow, peak, disk, how)
    seconds = rows / 1e6 * CLUSTER_S * int(getattr(stage, "bands", 1)) + wall
    least, room = clustering_mb(stage, rows)
    how = f"{rows:,.0f} documents; CPU seconds a million documents and band as in docs/scale.md"
    if rows > 0xFFFFFFFF - 1:
        how = f"{rows:,.0f} documents: MORE THAN ONE CLUSTERING CAN HOLD, 4,294,967,294; see docs/scale.md"
    elif least > stage.memory_mb:
        how += f"; set `memory_mb` to {least:,.0f} or more: it is {stage.memory_mb:,g}"
    return Serial(name, seconds, seconds, max(peak, least, min(room, stage.memory_mb)), disk, how)


def clustering_mb(stage: Any, documents: float) -> tuple[float, float]:
    """(the least memory that `exact` or `minhash` decide in, the memory for one pass), in MB of 10^6 bytes.

    The formulas are those of stages/key_ranges.py.
    """
    verified = getattr(stage, "verify", "none") != "none"
    scopes = getattr(stage, "scopes", (getattr(stage, "scope", "global"),))
    state = STATE + VERIFIED * verified + SCOPED * (tuple(scopes) != ("global",))
    keys = BYTES_PER_KEY * SLACK
    return documents * (state + keys / MOST_RANGES) / 1e6, documents * (state + keys) / 1e6
