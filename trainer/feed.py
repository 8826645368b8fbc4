"""What the loop wants from a mixture: the windows of this rank, where phases begin, what was consumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import Plan
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.config import Run, TrainConfig, TrainError, course_key, run_key
from gristmill.trainer.group import Group

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
    """A plan over token shards, for one training configuration."""

    def __init__(self, plan: Plan, config: TrainConfig):
        needed = config.total_steps * config.batch_windows
        if plan.windows != needed:
            raise TrainError(
                f"Mixture {plan.mixture} plans {plan.windows:,} windows of {plan.seq_len} tokens, but the run "
                f"trains on {needed:,}: {config.total_steps:,} steps of {config.batch_windows}. A mixture "
                f"with a budget of its own must ask for {config.total_tokens:,} tokens; else leave it to the run."
            )
        self.plan, self.config = plan, config

    @property
    def _data(self) -> str:
        return f"{self.plan.hash} {self.plan.tokens.manifest.digest}"

    @property
    def course(self) -> str:
        """Identity of the steps: which windows come when, and what is done with them."""
        return course_key(self.config, self._data)

    @property
    def key(self) -> str:
        """Identity of what the run comes to, scores included."""
        return run_key(self.config, self._data)

    @property
    def phases(self) -> dict[str, int]:
        """As `phases_of` the plan."""
        return phases_of(self.plan)

    def batches(self, rank: int, world: int, windows: int) -> Iterator[Windows]:
        """This rank's windows of each step after `windows` windows.

        documents number the document of each input's *target*. So the end-of-text token, as an input, belongs to the
        document that it opens: a document in a window reads what it reads alone, when it is scored. With packing
        best_fit there is no target in padding, nor where a piece of a document that was cut follows another document.
        """
        size = self.config.batch_windows
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
        """Targets in the first `windows` windows."""
        return sum(
            self.plan.predicted_tokens(low, min(low + COUNTED_WINDOWS, windows))
            for low in range(0, windows, COUNTED_WINDOWS)
        )

    def padding_share(self, windows: int) -> float:
        """Of all targets in the first `windows` windows, those that are none."""
        return 1 - self.predicted(windows) / max(windows * self.plan.seq_len, 1)

    def books(self, windows: int) -> Consumption:
        """What the run and those that it continues have used of each source after `windows` windows."""
        return Consumption.after(self.plan, windows)

    def consumed(self, windows: int) -> dict[str, int]:
        """Tokens of each source in the first `windows` windows."""
        return {name: count * self.plan.seq_len for name, count in self.plan.counts(windows).items()}

    def documents(self, first: int, stop: int) -> list[str]:
        """Ids of the documents in windows first .. stop - 1, the first MAX_NAMED_DOCUMENTS of them."""
        names: dict[str, None] = {}
        for position in range(first, stop):
            source, _, window = self.plan.locate(position)
            held = self.plan.tokens.sources[source]
            for begin, length in self.plan.pieces(source, window):
                # The last token of a stretch is a target only, or begins the next window.
                for place in {begin, *(begin + int(start) for start in held.bounds(begin, max(1, length - 1)))}:
                    names[held.document_at(place)[0]] = None
            if len(names) > MAX_NAMED_DOCUMENTS:
                return [*list(names)[:MAX_NAMED_DOCUMENTS], "..."]
        return list(names)


def phases_of(plan: Plan) -> dict[str, int]:
    """First window of each phase; under "anneal" that of the first annealing phase, whatever its name."""
    phases = {phase.name: phase.begin for phase in plan.phases}
    if "anneal" not in phases and plan.anneal_begin is not None:
        phases["anneal"] = plan.anneal_begin
    return phases


def open_feed(run: Run, tokens: TokenSet) -> Feed:
    """Compiles the run's mixture for its budget, window and seed. Raises MixtureError and SettingsError."""
    config = run.config
    mixture = Mixture.load(str(Path(run.mixture)))
    plan = mixture.plan(tokens, seq_len=config.seq_len, budget_tokens=config.total_tokens, seed=config.seed)
    return Feed(plan, config)
