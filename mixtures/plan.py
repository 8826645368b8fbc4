"""A plan: a mixture compiled to integers for given sources, window length, budget and seed, before anything runs.

    plan = Mixture.load("mixtures/blend.yaml").plan({"docs": 4_000_000, "code": 1_500_000}, 256, 500_000, seed=1)
    plan.windows                  # 1953: budget // seq_len
    plan.hash                     # identity: equal hashes mean equal windows at equal positions
    print(plan.table())           # per phase and source: windows, tokens, bytes, epochs, what remains
    plan.locate(17)               # ("docs", 0, 9312)

A window is seq_len + 1 consecutive tokens of one source; it trains seq_len tokens, and its last token is the first of
the next window. A source of t tokens has (t - 1) // seq_len windows. Weights count tokens: all windows are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash

from gristmill.mixtures.kernels import ONE
from gristmill.mixtures.order import Order, Steps, apportion, between, quantise
from gristmill.mixtures.packing import Packing
from gristmill.stages.settings_file import SettingsError

if TYPE_CHECKING:
    from gristmill.mixtures.loader import Loader

PLAN_VERSION = 1  # raise it when the same mixture, sources, budget and seed give another order
MAX_RAMP_STEPS = 64  # of constant weights in a ramp; a step of a linear ramp changes a weight by at most 1/64


class MixtureError(SettingsError):
    """A mixture that cannot be read or cannot be planned; the message says where, what, why and what would do."""


@dataclass(frozen=True)
class SourceSize:
    """What a plan has to know of a source."""

    tokens: int  # of the training split, end-of-text tokens included
    utf8_bytes: int | None = None  # of the texts
    digest: str = ""  # of the token shards
    packing: Packing | None = None  # best_fit: what lies in each window
    source: str = ""  # of the token shards, where this is a part of one
    where: str = ""  # which documents of it

    def windows(self, seq_len: int) -> int:
        return windows_in(self.tokens, seq_len) if self.packing is None else self.packing.windows


@dataclass(frozen=True)
class PhaseSpec:
    """A phase with its wishes settled: whole windows, and weights or exact counts. Made by `mixture.py`."""

    name: str
    windows: int
    weights: tuple[Fraction, ...]  # at its end; sum 1; of every source of the plan
    start_weights: tuple[Fraction, ...]  # at its beginning; the same as `weights` without a ramp
    ramp: str = "step"  # step, linear, cosine
    anneal: bool = False
    exact: tuple[int | None, ...] | None = None  # windows of each source; None: by its weight


@dataclass(frozen=True)
class Row:
    """What one source gives in one phase, in whole windows."""

    phase: str
    source: str
    weight: float  # of the phase's tokens, realised
    start_weight: float  # in force at its beginning
    end_weight: float
    windows: int
    tokens: int
    utf8_bytes: int | None  # by the source's mean bytes per token
    epochs_before: float  # passes over the source when the phase begins
    epochs_after: float
    windows_left: int  # of the source that have not been seen once when the phase ends
    runs_out_tokens: int | None  # tokens of the run at which the source has been seen once, if in this phase


@dataclass(frozen=True)
class PhasePlan:
    """Where a phase lies in the run, in windows."""

    name: str
    begin: int
    windows: int
    ramp: str
    anneal: bool
    rows: tuple[Row, ...]

    @property
    def end(self) -> int:
        return self.begin + self.windows


@dataclass(frozen=True)
class Plan:
    """See the top of this module. Made by `Mixture.plan`."""

    mixture: str
    seq_len: int
    seed: int
    sizes: Mapping[str, SourceSize]  # the sources in use, in the mixture's order
    specs: tuple[PhaseSpec, ...]
    used: Mapping[str, int] = field(default_factory=dict)  # windows that earlier runs have consumed, by source
    continued: Any = None  # Consumption that `used` is from
    notes: tuple[str, ...] = ()  # what was computed on the way: temperature, UniMax
    tokens: Any = field(default=None, repr=False, compare=False)  # TokenSet; needed to load, not to plan

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def source_windows(self) -> tuple[int, ...]:
        return tuple(size.windows(self.seq_len) for size in self.sizes.values())

    @property
    def windows(self) -> int:
        """Of the whole run."""
        return sum(spec.windows for spec in self.specs)

    @property
    def budget_tokens(self) -> int:
        """Tokens that the run trains on: windows * seq_len."""
        return self.windows * self.seq_len

    @cached_property
    def order(self) -> Order:
        used = [self.used.get(name, 0) for name in self.sources]
        return Order(self.sources, self.source_windows, self.seed, [steps_of(s) for s in self.specs], used)

    @cached_property
    def hash(self) -> str:
        """32 hex digits. The order of the windows and the content of the sources follow from what goes in here."""
        return _digest_of(self._identity([steps_of(spec) for spec in self.specs]))

    def prefix_hash(self, position: int) -> str:
        """Identity of the first `position` windows alone: plans with the same give the same windows up to there.

        The other way round it may differ without need. It stays when a phase, or budget in a last phase of constant
        weights, is added: so it is what a checkpoint compares to go on with a longer plan.
        """
        parts: list[Any] = []
        begin = 0
        for spec in self.specs:
            if begin >= position:
                break
            steps = steps_of(spec)
            endless = len(steps.lengths) == 1 and steps.exact is None and begin + spec.windows >= position
            parts.append(Steps((1,), steps.weights) if endless else steps)
            begin += spec.windows
        return _digest_of([*self._identity(parts), position])

    def _identity(self, steps: Sequence[Steps]) -> list[Any]:
        return [
            PLAN_VERSION,
            self.seed,
            self.seq_len,
            self.packing,
            [[name, size.tokens, size.digest, self.used.get(name, 0)] for name, size in self.sizes.items()],
            [[step.lengths, step.weights.tolist(), step.exact] for step in steps],
        ]

    @property
    def packing(self) -> str:
        """concat: windows follow each other through the documents; best_fit: see `packing.py`."""
        return "concat" if all(size.packing is None for size in self.sizes.values()) else "best_fit"

    def pieces(self, source: str, window: int) -> list[tuple[int, int]]:
        """Where the tokens of a window lie in its source: (first token, tokens) of each consecutive stretch."""
        packing = self.sizes[source].packing
        return [(window * self.seq_len, self.seq_len + 1)] if packing is None else packing.pieces(window)

    def predicted_tokens(self, begin: int, end: int) -> int:
        """Targets that positions begin .. end - 1 train on: all but padding and what no document foretells.

        With packing concat seq_len a window; else see `Packing.targets`.
        """
        if self.packing == "concat":
            return (end - begin) * self.seq_len
        source, _, window = self.order.block(begin, end)
        packings = [size.packing for size in self.sizes.values()]
        return sum(
            int(packing.targets[window[source == s]].sum()) for s, packing in enumerate(packings) if packing is not None
        )

    def locate(self, position: int) -> tuple[str, int, int]:
        """The window at a position of the run: (source, epoch, window of that source)."""
        return self.order.locate(position)

    def counts(self, position: int) -> dict[str, int]:
        """Windows that each source gives before a position: what a run has consumed when it stops there."""
        return dict(zip(self.sources, self.order.counts(position).tolist(), strict=True))

    def consumed(self, position: int) -> dict[str, int]:
        """The same with what earlier runs used: the `used` of a plan that goes on from there."""
        return {name: self.used.get(name, 0) + count for name, count in self.counts(position).items()}

    def loader(
        self, rank: int = 0, world_size: int = 1, batch_windows: int = 1, start_window: int = 0, dtype: Any = None
    ) -> Loader:
        """Batches of this rank; see `loader.Loader`. batch_windows counts the windows of all ranks together."""
        from gristmill.mixtures.loader import Loader

        return Loader(self, rank, world_size, batch_windows, start_window, dtype)

    @cached_property
    def phases(self) -> tuple[PhasePlan, ...]:
        return tuple(self._phases())

    def _phases(self) -> Iterator[PhasePlan]:
        begin = 0
        before = self.order.counts(0)
        for spec in self.specs:
            after = self.order.counts(begin + spec.windows)
            rows = tuple(self._row(s, spec, begin, int(before[s]), int(after[s])) for s in range(len(self.sources)))
            yield PhasePlan(spec.name, begin, spec.windows, spec.ramp, spec.anneal, rows)
            begin, before = begin + spec.windows, after

    def _row(self, s: int, spec: PhaseSpec, begin: int, before: int, after: int) -> Row:
        name = self.sources[s]
        size, windows, used = self.sizes[name], self.source_windows[s], self.used.get(name, 0)
        out = None
        if used + before < windows <= used + after:
            out = self._when(s, windows - used, begin, begin + spec.windows) * self.seq_len
        tokens = (after - before) * self.seq_len
        return Row(
            phase=spec.name,
            source=name,
            weight=(after - before) / spec.windows,
            start_weight=float(spec.start_weights[s]),
            end_weight=float(spec.weights[s]),
            windows=after - before,
            tokens=tokens,
            utf8_bytes=None if size.utf8_bytes is None else tokens * size.utf8_bytes // max(size.tokens, 1),
            epochs_before=(used + before) / max(windows, 1),
            epochs_after=(used + after) / max(windows, 1),
            windows_left=max(0, windows - used - after),
            runs_out_tokens=out,
        )

    def _when(self, s: int, count: int, low: int, high: int) -> int:
        """The position in low .. high by which source s has given `count` windows."""
        while low < high:
            middle = (low + high) // 2
            if int(self.order.counts(middle)[s]) >= count:
                high = middle
            else:
                low = middle + 1
        return low

    @property
    def anneal_begin(self) -> int | None:
        """The position at which the first `anneal` phase begins: where a trainer's decay may begin."""
        return next((phase.begin for phase in self.phases if phase.anneal), None)

    def totals(self) -> list[Row]:
        """One row a source for the whole run; its phase is called "run"."""
        out = []
        for s, name in enumerate(self.sources):
            rows = [phase.rows[s] for phase in self.phases]
            windows = sum(row.windows for row in rows)
            out.append(
                Row(
                    phase="run",
                    source=name,
                    weight=windows / self.windows,
                    start_weight=rows[0].start_weight,
                    end_weight=rows[-1].end_weight,
                    windows=windows,
                    tokens=windows * self.seq_len,
                    utf8_bytes=_sum([row.utf8_bytes for row in rows]),
                    epochs_before=rows[0].epochs_before,
                    epochs_after=rows[-1].epochs_after,
                    windows_left=rows[-1].windows_left,
                    runs_out_tokens=next((r.runs_out_tokens for r in rows if r.runs_out_tokens is not None), None),
                )
            )
        return out

    def curve(self, points: int = 200) -> list[tuple[int, dict[str, float]]]:
        """(tokens seen, weight of each source) along the run: both ends of every step, thinned in long ramps."""
        out: list[tuple[int, dict[str, float]]] = []
        for phase in self.phases:
            at = np.unique(np.linspace(phase.begin, phase.end - 1, max(2, points // len(self.phases))).astype(np.int64))
            for position in at.tolist():
                weights = dict(zip(self.sources, self.order.weights(position).tolist(), strict=True))
                out.append((position * self.seq_len, weights))
        return out

    def data(self, learning_rate: Callable[[int], float] | None = None) -> dict[str, Any]:
        """The plan as plain values, for reports and files. learning_rate: as `table` takes it."""
        return {
            "mixture": self.mixture,
            "hash": self.hash,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "windows": self.windows,
            "budget_tokens": self.budget_tokens,
            "notes": list(self.notes),
            "sources": {
                name: {"tokens": size.tokens, "utf8_bytes": size.utf8_bytes, "windows": windows}
                | ({"source": size.source, "where": size.where} if size.source else {})
                | ({"padding_share": size.packing.padding_share} if size.packing is not None else {})
                for (name, size), windows in zip(self.sizes.items(), self.source_windows, strict=True)
            },
            "phases": [
                {
                    "name": p.name,
                    "begin": p.begin,
                    "windows": p.windows,
                    "ramp": p.ramp,
                    "anneal": p.anneal,
                    "learning_rates": None
                    if learning_rate is None
                    else [learning_rate(p.begin), learning_rate(p.end - 1)],
                    "rows": [vars(row) for row in p.rows],
                }
                for p in self.phases
            ],
            "totals": [vars(row) for row in self.totals()],
        }

    def table(self, learning_rate: Callable[[int], float] | None = None) -> str:
        """The plan as text of fixed width: one block a phase, one row a source.

        learning_rate: of the step after so many windows; shown for both ends of each phase.
        """
        head = ("source", "weight", "windows", "tokens", "MB of text", "epochs", "unseen", "runs out at")
        rows: list[tuple[str, ...]] = []
        blocks: list[tuple[str, Sequence[Row]]] = [
            (_title(phase, self.seq_len, learning_rate), phase.rows) for phase in self.phases
        ]
        if len(self.phases) > 1:
            blocks.append((f"run: {self.budget_tokens:,} tokens", self.totals()))
        for title, block in blocks:
            rows.append((title,))
            rows.extend(_cells(row, self.seq_len) for row in block)
        widths = [max(len(row[i]) for row in (head, *(r for r in rows if len(r) > 1))) for i in range(len(head))]
        lines = [
            f"mixture {self.mixture}, plan {self.hash}",
            f"{self.windows:,} windows of {self.seq_len:,} tokens = {self.budget_tokens:,} tokens, seed {self.seed}",
            *self.notes,
            "",
            _line(head, widths),
        ]
        lines += [row[0] if len(row) == 1 else _line(row, widths) for row in rows]
        return "\n".join(lines) + "\n"


def _digest_of(values: list[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(orjson.dumps(values))


def windows_in(tokens: int, seq_len: int) -> int:
    """How many windows of seq_len + 1 tokens, each beginning with the last token of the one before."""
    return max(0, (tokens - 1) // seq_len)


def steps_of(spec: PhaseSpec) -> Steps:
    """The steps of a phase. A ramp has at most MAX_RAMP_STEPS, each with the weights of its middle."""
    if spec.ramp == "step":
        return Steps((spec.windows,), quantise([spec.weights]), spec.exact)
    n = min(MAX_RAMP_STEPS, spec.windows)
    ends = [spec.windows * j // n for j in range(n + 1)]
    first, last = (apportion(ONE, weights) for weights in (spec.start_weights, spec.weights))
    middles = [Fraction(a + b, 2 * spec.windows) for a, b in pairwise(ends)]
    rows = [between(first, last, ramp_at(spec.ramp, middle)) for middle in middles]
    return Steps(tuple(b - a for a, b in pairwise(ends)), np.array(rows, dtype=np.int64))


def ramp_at(ramp: str, x: Fraction) -> Fraction:
    """How far a ramp has gone at x, 0 to 1. The cosine is rounded to 1e-12, so that every machine has the same."""
    if ramp == "linear":
        return x
    return Fraction(round((1 - float(np.cos(np.pi * float(x)))) / 2 * 10**12), 10**12)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _title(phase: PhasePlan, seq_len: int, learning_rate: Callable[[int], float] | None) -> str:
    extra = (f", {phase.ramp} ramp" if phase.ramp != "step" else "") + (", anneal" if phase.anneal else "")
    if learning_rate is not None:
        extra += f", learning rate {learning_rate(phase.begin):.3g} to {learning_rate(phase.end - 1):.3g}"
    return f"phase {phase.name}: tokens {phase.begin * seq_len:,} to {phase.end * seq_len:,}{extra}"


def _cells(row: Row, seq_len: int) -> tuple[str, ...]:
    return (
        f"  {row.source}",
        f"{row.weight:.4%}",
        f"{row.windows:,}",
        f"{row.tokens:,}",
        "" if row.utf8_bytes is None else f"{row.utf8_bytes / 1e6:,.1f}",
        f"{row.epochs_before:.2f} to {row.epochs_after:.2f}",
        f"{row.windows_left * seq_len:,}",
        "" if row.runs_out_tokens is None else f"{row.runs_out_tokens:,}",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()
