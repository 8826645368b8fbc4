"""What a run will take, from measurements of a sample: the arithmetic of `gristmill plan`, pure functions of figures.

A piece of the sample is measured in every phase (a segment, the signing of a global stage, token shards). For each
source and phase

    cost of all = rate * bytes of input + per_shard * shards + start * workers

`rate` is what the pieces took, together, for a byte of input, less `per_shard`; two small pieces that go first tell
`start` (kernels, models: the first less the second) from `per_shard` (the second less its bytes). Bytes of input are
bytes as they lie on disk, compressed where the files are.

Intervals hold with a probability of about 90 % as far as the pieces are a random sample of the input: ratio estimator,
its standard error from the residuals of the pieces, times the quantile of Student's t for their number less one
(Cochran, Sampling Techniques, 1977, 6.4). Sources are independent: their errors add as squares. What no sample shows
is not in them: another machine, a busy one, more duplicates in more text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Student's t, 95 % one-sided, by degrees of freedom from 1; beyond, that of the normal distribution is near enough.
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)
T_LARGE = 1.70
WRITING = "write and books"  # what a segment does besides its stages


@dataclass(frozen=True)
class Range:
    """A figure with the bounds of its interval; all equal where one piece gives no spread: `known` is False then."""

    value: float
    low: float
    high: float
    known: bool = True

    def __add__(self, other: Range) -> Range:
        """The sum of two independent figures."""
        value = self.value + other.value
        below = math.hypot(self.value - self.low, other.value - other.low)
        above = math.hypot(self.high - self.value, other.high - other.value)
        return Range(value, max(0.0, value - below), value + above, self.known and other.known)

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor, self.known)

    def plus(self, exact: float) -> Range:
        return Range(self.value + exact, self.low + exact, self.high + exact, self.known)


NOTHING = Range(0.0, 0.0, 0.0)


def ratio(costs: Sequence[float], sizes: Sequence[float]) -> Range:
    """The cost of one unit of size, from pieces that were measured.

    Raises ValueError where the pieces have no size.
    """
    total = sum(sizes)
    if total <= 0:
        raise ValueError("No piece of the sample holds anything: a rate cannot be taken from it.")
    rate, n = sum(costs) / total, len(costs)
    if n < 2:
        return Range(rate, rate, rate, known=False)
    squares = sum((cost - rate * size) ** 2 for cost, size in zip(costs, sizes, strict=True))
    error = math.sqrt(n / (n - 1) * squares) / total
    quantile = T_95[n - 2] if n - 2 < len(T_95) else T_LARGE
    return Range(rate, max(0.0, rate - quantile * error), rate + quantile * error)


@dataclass(frozen=True)
class Measured:
    """What one piece of the sample took in one phase."""

    source: str
    input_bytes: int  # of the piece, as it lies on disk
    cpu_s: float
    wall_s: float
    peak_mb: float = 0.0
    text_bytes: int = 0  # that the phase read: of text, or of HTML
    documents: int = 0
    disk: Mapping[str, int] = field(default_factory=dict)  # bytes written that grow with the input, by kind
    disk_shard: int = 0  # bytes written that are about the same for every shard
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds of each stage


@dataclass(frozen=True)
class Phase:
    """A phase of the run that works shard by shard, as the sample showed it."""

    name: str
    pieces: tuple[Measured, ...]
    first: tuple[Measured, ...] = ()  # of each source, the small piece that came first: it loads what is loaded
    second: tuple[Measured, ...] = ()  # and the one after it


@dataclass(frozen=True)
class Serial:
    """Work of one worker while the others wait: decisions of a global stage, a model, the tokenizer."""

    name: str
    cpu_s: float
    wall_s: float
    memory_mb: float
    disk_bytes: float
    how: str  # what it was scaled by


@dataclass(frozen=True)
class Target:
    """A source as the forecast takes it."""

    bytes: float
    shards: int
    largest_bytes: float  # of a shard: no number of workers is faster than one worker with this one


@dataclass(frozen=True)
class StageRow:
    phase: str
    stage: str
    cpu_h: Range


@dataclass(frozen=True)
class PhaseRow:
    """A phase of the forecast."""

    phase: str
    cpu_h: Range
    wall_h: Range  # at the number of workers asked for
    memory_mb: float
    disk_gb: Range
    serial: bool
    how: str
    start_s: float = 0.0  # of each worker, before its first shard
    per_shard_s: float = 0.0
    disk: Mapping[str, float] = field(default_factory=dict)  # GB by kind


@dataclass(frozen=True)
class Forecast:
    """All of it."""

    input_bytes: float
    shards: int
    workers: int
    documents: Range
    stages: tuple[StageRow, ...]
    phases: tuple[PhaseRow, ...]
    cpu_h: Range
    wall_h: Range
    serial_h: float  # of wall_h, what more workers do not make shorter
    memory_mb: float  # of the largest worker
    disk_gb: Range
    price: float | None  # of a core hour
    money: Range | None  # workers * wall * price: cores that wait are paid for as well
    notes: tuple[str, ...] = ()


def forecast(
    phases: Sequence[Phase | Serial],
    targets: Mapping[str, Target],
    workers: int,
    *,
    price: float | None = None,
    batch_bytes: int = 32 << 20,
    notes: Sequence[str] = (),
) -> Forecast:
    """Carries the sample's figures on. phases: in the order of the run; batch_bytes: of the text that a worker holds at
    once.
    """
    rows: list[PhaseRow] = []
    stages: list[StageRow] = []
    documents = NOTHING
    for phase in phases:
        if isinstance(phase, Serial):
            hours = phase.cpu_s / 3600
            cpu = Range(hours, hours, hours, known=False)
            wall = cpu if phase.cpu_s == phase.wall_s else _same(phase.wall_s / 3600)
            disk = _same(phase.disk_bytes / 1e9)
            rows.append(PhaseRow(phase.name, cpu, wall, phase.memory_mb, disk, serial=True, how=phase.how))
            stages.append(StageRow(phase.name, phase.name, cpu))
            continue
        if not documents.value:
            documents = _carried(phase, targets, lambda piece: float(piece.documents))
        rows.append(_row(phase, targets, workers, batch_bytes))
        stages += _stages(phase, rows[-1])
    cpu, wall, disk = NOTHING, NOTHING, NOTHING
    for row in rows:
        # Phases see the same pieces, so their errors go together: they add up as they are.
        cpu, wall, disk = _together(cpu, row.cpu_h), _together(wall, row.wall_h), _together(disk, row.disk_gb)
    return Forecast(
        input_bytes=sum(target.bytes for target in targets.values()),
        shards=sum(target.shards for target in targets.values()),
        workers=workers,
        documents=documents,
        stages=tuple(stages),
        phases=tuple(rows),
        cpu_h=cpu,
        wall_h=wall,
        serial_h=sum(row.wall_h.value for row in rows if row.serial),
        memory_mb=max((row.memory_mb for row in rows), default=0.0),
        disk_gb=disk,
        price=price,
        money=None if price is None else wall.times(workers * price),
        notes=tuple(notes),
    )


def _same(value: float) -> Range:
    return Range(value, value, value, known=False)


def _together(a: Range, b: Range) -> Range:
    return Range(a.value + b.value, a.low + b.low, a.high + b.high, a.known or b.known)


def _by_source(pieces: Sequence[Measured]) -> dict[str, list[Measured]]:
    out: dict[str, list[Measured]] = {}
    for piece in pieces:
        out.setdefault(piece.source, []).append(piece)
    return out


def fixed(phase: Phase, source: str, cost: Callable[[Measured], float]) -> tuple[float, float]:
    """-> (cost before the first shard, cost of each shard whatever its size) of a source; (0, 0) where two small pieces
    were not measured."""
    first = next((piece for piece in phase.first if piece.source == source), None)
    second = next((piece for piece in phase.second if piece.source == source), None)
    pieces = [piece for piece in phase.pieces if piece.source == source]
    if first is None or second is None or not pieces:
        return 0.0, 0.0
    rate = sum(map(cost, pieces)) / max(1, sum(piece.input_bytes for piece in pieces))
    least = min(map(cost, pieces))  # a shard takes no more for being one than the cheapest piece took in all
    per_shard = min(max(0.0, cost(second) - rate * second.input_bytes), least)
    return max(0.0, cost(first) - cost(second)), per_shard


def _carried(phase: Phase, targets: Mapping[str, Target], cost: Callable[[Measured], float]) -> Range:
    """A sum over pieces, carried on by the bytes of the input."""
    total = NOTHING
    for source, pieces in _by_source(phase.pieces).items():
        rate = ratio([cost(piece) for piece in pieces], [piece.input_bytes for piece in pieces])
        total = total + rate.times(targets[source].bytes)
    return total


def _row(phase: Phase, targets: Mapping[str, Target], workers: int, batch_bytes: int) -> PhaseRow:
    cpu, wall, starts, per_shard_s, longest = NOTHING, NOTHING, 0.0, 0.0, 0.0
    shard_disk = 0.0
    for source, pieces in _by_source(phase.pieces).items():
        target, sizes = targets[source], [piece.input_bytes for piece in pieces]
        start, per_shard = fixed(phase, source, _cpu)
        starts += start
        per_shard_s = max(per_shard_s, per_shard)
        of_cpu = ratio([max(0.0, piece.cpu_s - per_shard) for piece in pieces], sizes)
        _, per_shard_wall = fixed(phase, source, _wall)
        of_wall = ratio([max(0.0, piece.wall_s - per_shard_wall) for piece in pieces], sizes)
        cpu = cpu + of_cpu.times(target.bytes).plus(per_shard * target.shards)
        wall = wall + of_wall.times(target.bytes).plus(per_shard_wall * target.shards)
        longest = max(longest, of_wall.value * target.largest_bytes + per_shard_wall)
        shard_disk += max((piece.disk_shard for piece in pieces), default=0) * target.shards
    used = min(workers, sum(targets[source].shards for source in _by_source(phase.pieces)))
    at_workers = wall.times(1 / used)
    if longest > at_workers.value:
        at_workers = Range(longest, max(longest, at_workers.low), max(longest, at_workers.high), at_workers.known)
    kinds = sorted({kind for piece in phase.pieces for kind in piece.disk})
    of_kind = {kind: _carried(phase, targets, _disk(kind)) for kind in kinds}
    disk = _same(shard_disk / 1e9)
    for one in of_kind.values():
        disk = _together(disk, one.times(1e-9))
    return PhaseRow(
        phase=phase.name,
        cpu_h=cpu.plus(starts * used).times(1 / 3600),
        wall_h=at_workers.plus(starts).times(1 / 3600),
        memory_mb=memory_mb(phase, batch_bytes),
        disk_gb=disk,
        serial=False,
        how="bytes of input, all workers",
        start_s=starts,
        per_shard_s=per_shard_s,
        disk={kind: one.value / 1e9 for kind, one in of_kind.items()},
    )


def _cpu(piece: Measured) -> float:
    return piece.cpu_s


def _wall(piece: Measured) -> float:
    return piece.wall_s


def _disk(kind: str) -> Callable[[Measured], float]:
    return lambda piece: float(piece.disk.get(kind, 0))


def memory_mb(phase: Phase, batch_bytes: int) -> float:
    """Peak of a worker with full batches. Where the pieces hold less than a batch, what the largest took more than the
    small ones, a byte of text, goes on up to a batch; not from a piece of less than an eighth, which shows no slope."""
    peak = max(piece.peak_mb for piece in phase.pieces)
    largest = max(phase.pieces, key=lambda piece: piece.text_bytes)
    small = max(phase.second, key=lambda piece: piece.text_bytes, default=None)
    if (
        small is None
        or small.text_bytes >= largest.text_bytes
        or not batch_bytes / 8 <= largest.text_bytes < batch_bytes
    ):
        return peak
    slope = max(0.0, largest.peak_mb - small.peak_mb) / (largest.text_bytes - small.text_bytes)
    return max(peak, largest.peak_mb + slope * (batch_bytes - largest.text_bytes))


def _stages(phase: Phase, row: PhaseRow) -> list[StageRow]:
    """The CPU hours of a phase by stage, by the seconds that each took in the pieces."""
    names = list(dict.fromkeys(name for piece in phase.pieces for name in piece.stages))
    if not names:
        return [StageRow(phase.name, phase.name, row.cpu_h)]
    seconds = {name: sum(piece.stages.get(name, 0.0) for piece in phase.pieces) for name in names}
    whole = max(sum(piece.wall_s for piece in phase.pieces), sum(seconds.values()), 1e-9)
    seconds[WRITING] = whole - sum(seconds.values())
    return [StageRow(phase.name, name, row.cpu_h.times(took / whole)) for name, took in seconds.items()]
