"""What the loop wants from a mixture: the windows of this rank, where phases begin, what was consumed.

Windows are counted from the beginning of the run, in a fork from that of its trunk. The plan of a fork may begin at
the fork (`fork.py`); `Feed.begin` is the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError, Plan
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import fork
from gristmill.trainer.config import Run, TrainConfig, TrainError, course_key, run_key
from gristmill.trainer.group import Group
from gristmill.trainer.texts import sets_digest

MAX_NAMED_DOCUMENTS = 20  # in a message about a bad batch
COUNTED_WINDOWS = 1 << 20  # at a time
NO_TARGET = -1  # as `loss.token_nll` leaves it out


@dataclass(frozen=True)
class Windows:
    """The windows of one rank in one step, n of them."""

    ids: np.ndarray  # (n, seq_len + 1) int64
    targets: np.ndarray  # (n, seq_len) int64: the ids that follow; NO_TARGET where there is nothing to learn
    documents: np.ndarray | None  # (n, seq_len) int32, for attention that stays inside a document; None: it does not
    predicted: int  # targets of the whole batch, all ranks together; with `boundary_loss: false` still those left out

    def counted(self, group: Group) -> Windows:
        """With `predicted` as the sum over ranks of the targets that are there. Collective."""
        own = int((self.targets != NO_TARGET).sum()) if group.speaks else 0
        total = group.sum(torch.tensor([own], dtype=torch.int64, device=group.device))
        return replace(self, predicted=int(total))


class Feed:
    """A plan over token shards, for one training configuration.

    trunk: what the run was forked from. origin: what the plan begins after; None: the beginning of the run.
    """

    def __init__(
        self, plan: Plan, config: TrainConfig, trunk: fork.Trunk | None = None, origin: fork.Trunk | None = None
    ):
        self.begin = 0 if origin is None else origin.windows
        needed = config.total_steps * config.batch_windows - self.begin
        if plan.windows != needed:
            raise TrainError(
                f"Mixture {plan.mixture} plans {plan.windows:,} windows of {plan.seq_len} tokens, but the run "
                f"trains on {needed:,}{' after the fork' if origin else ''}: {config.total_steps:,} steps of "
                f"{config.batch_windows}. A mixture with a budget of its own must ask for {needed * plan.seq_len:,} "
                "tokens; else leave it to the run."
            )
        self.plan, self.config, self.trunk, self.origin = plan, config, trunk, origin

    @property
    def _data(self) -> str:
        data = f"{self.plan.hash} {self.plan.tokens.manifest.digest}"
        return data if self.trunk is None else f"{data} fork of {self.trunk.digest}"

    @property
    def course(self) -> str:
        """Identity of the steps: which windows come when, and what is done with them."""
        return course_key(self.config, self._data)

    @property
    def key(self) -> str:
        """Identity of what the run comes to, scores included."""
        return run_key(self.config, self._data, sets_digest(self.config.evaluation_sets))

    def prefix(self, windows: int) -> str:
        """Identity of the first `windows` windows."""
        if self.origin is None:
            return self.plan.prefix_hash(windows)
        if windows == self.begin:
            return self.origin.prefix
        return xxhash.xxh3_128_hexdigest(f"{self.origin.prefix} {self.plan.prefix_hash(windows - self.begin)}")

    @property
    def continues(self) -> bool:
        """Whether the windows of a fork are those with which its trunk would have gone on."""
        return self.trunk is not None and self.origin is not self.trunk

    @property
    def phases(self) -> dict[str, int]:
        """As `phases_of` the plan; under "fork" the first window of the fork, where it is one."""
        phases = {name: self.begin + first for name, first in phases_of(self.plan).items()}
        return phases if self.trunk is None else {"fork": self.trunk.windows, **phases}

    def batches(self, rank: int, world: int, windows: int) -> Iterator[Windows]:
        """This rank's windows of each step after `windows` windows.

        documents number the document of each input's *target*. So the end-of-text token, as an input, belongs to the
        document that it opens: a document in a window reads what it reads alone, when it is scored. With packing
        best_fit there is no target in padding, nor where a piece of a document that was cut follows another document.
        """
        size, windows = self.config.batch_windows, windows - self.begin
        for i, batch in enumerate(self.plan.loader(rank, world, size, windows)):
            targets = batch.tokens[:, 1:]
            if not self.config.boundary_loss:
                targets = np.where(batch.documents[:, 1:] == batch.documents[:, :-1], targets, NO_TARGET)
            if batch.predicted is not None:
                targets = np.where(batch.predicted, targets, NO_TARGET)
            begin = windows + i * size
            yield Windows(
                batch.tokens,
                targets,
                batch.documents[:, 1:] if self.config.mask_documents else None,
                self.plan.predicted_tokens(begin, batch.next_window),
            )

    @property
    def packed(self) -> bool:
        """Whether windows may end in padding."""
        return self.plan.packing != "concat"

    def predicted(self, windows: int) -> int:
        """Targets in the first `windows` windows, from where the plan begins."""
        windows -= self.begin
        return sum(
            self.plan.predicted_tokens(low, min(low + COUNTED_WINDOWS, windows))
            for low in range(0, windows, COUNTED_WINDOWS)
        )

    def padding_share(self, windows: int) -> float:
        """Of all targets in the first `windows` windows, from where the plan begins, those that are none."""
        return 1 - self.predicted(windows) / max((windows - self.begin) * self.plan.seq_len, 1)

    def books(self, windows: int) -> Consumption:
        """What the run and those that it continues have used of each source after `windows` windows."""
        return Consumption.after(self.plan, windows - self.begin)

    def counts(self, windows: int) -> dict[str, int]:
        """Windows of each source among the first `windows`."""
        before = {} if self.origin is None else self.origin.counts
        here = self.plan.counts(windows - self.begin)
        return {name: before.get(name, 0) + here.get(name, 0) for name in {**before, **here}}

    def consumed(self, windows: int) -> dict[str, int]:
        """Tokens of each source in the first `windows` windows."""
        return {name: count * self.plan.seq_len for name, count in self.counts(windows).items()}

    def documents(self, first: int, stop: int) -> list[dict[str, str]]:
        """The documents in windows first .. stop - 1, each once, in order: source, shard of tokens, doc_id."""
        found: dict[tuple[str, str, str], None] = {}
        for position in range(first, stop):
            source, _, window = self.plan.locate(position - self.begin)
            held = self.plan.tokens.sources[source]
            for begin, length in self.plan.pieces(source, window):
                # The last token of a stretch is a target only, or begins the next window.
                for place in [begin, *(begin + int(start) for start in held.bounds(begin, max(1, length - 1)))]:
                    doc_id, shard, _ = held.document_at(place)
                    found[source, shard, doc_id] = None
        return [{"source": source, "shard": shard, "doc_id": doc_id} for source, shard, doc_id in found]


def phases_of(plan: Plan) -> dict[str, int]:
    """First window of each phase; under "anneal" that of the first annealing phase, whatever its name."""
    phases = {phase.name: phase.begin for phase in plan.phases}
    if "anneal" not in phases and plan.anneal_begin is not None:
        phases["anneal"] = plan.anneal_begin
    return phases


def open_feed(run: Run, tokens: TokenSet) -> Feed:
    """Compiles the run's mixture for its budget, window and seed. Raises MixtureError and SettingsError.

    For a fork, from the first of these points after which the plan gives the windows that the trunk has consumed: the
    beginning of the run, the points at which the trunk was forked itself, and the fork.
    """
    config = run.config
    mixture = Mixture.load(str(Path(run.mixture)))
    trunk = fork.trunk_of(run)
    if trunk is None:
        return Feed(_from_the_beginning(mixture, tokens, config), config)
    fork.check(trunk, config, tokens.manifest.tokenizer_xxh3)
    for origin in (None, *fork.ancestors(trunk)):
        try:
            feed = _from(origin, mixture, tokens, config, trunk)
        except (MixtureError, TrainError):
            continue  # a mixture made for what follows the fork need not fit a longer run
        if feed.prefix(trunk.windows) == trunk.prefix:
            return feed
    return _from(trunk, mixture, tokens, config, trunk)


def _from(
    origin: fork.Trunk | None, mixture: Mixture, tokens: TokenSet, config: TrainConfig, trunk: fork.Trunk
) -> Feed:
    if origin is None:
        return Feed(_from_the_beginning(mixture, tokens, config), config, trunk)
    plan = mixture.plan(
        tokens,
        seq_len=config.seq_len,
        budget_tokens=config.total_tokens - origin.windows * config.seq_len,
        seed=config.seed,
        continue_from=origin.used,
        target_tokens=config.target_tokens,
    )
    return Feed(plan, config, trunk, origin)


def _from_the_beginning(mixture: Mixture, tokens: TokenSet, config: TrainConfig) -> Plan:
    return mixture.plan(
        tokens,
        seq_len=config.seq_len,
        budget_tokens=config.total_tokens,
        seed=config.seed,
        target_tokens=config.target_tokens,
    )
