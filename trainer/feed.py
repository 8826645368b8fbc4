"""What the loop wants from a mixture: the windows of this rank, where phases begin, what was consumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import Plan
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.config import Run, TrainConfig, TrainError, course_key, run_key

MAX_NAMED_DOCUMENTS = 20  # in a message about a bad batch


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
        if plan.packing != "concat":
            raise TrainError(
                f"Mixture {plan.mixture} packs windows as {plan.packing}: their padding would be trained on. The "
                "trainer takes `packing: concat`; its `mask_documents` keeps attention inside a document."
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
        """First window of each phase; under "anneal" that of the first annealing phase, whatever its name."""
        phases = {phase.name: phase.begin for phase in self.plan.phases}
        if "anneal" not in phases and self.plan.anneal_begin is not None:
            phases["anneal"] = self.plan.anneal_begin
        return phases

    def batches(self, rank: int, world: int, windows: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """(ids (n, seq_len + 1) int64, documents (n, seq_len) int32 or None) of each step after `windows` windows.

        documents number the document of each input's *target*. So the end-of-text token, as an input, belongs to the
        document that it opens: a document in a window reads what it reads alone, when it is scored.
        """
        for batch in self.plan.loader(rank, world, self.config.batch_windows, windows):
            yield batch.tokens, batch.documents[:, 1:] if self.config.mask_documents else None

    def consumed(self, windows: int) -> dict[str, int]:
        """Tokens of each source in the first `windows` windows."""
        return {name: count * self.plan.seq_len for name, count in self.plan.counts(windows).items()}

    def documents(self, first: int, stop: int) -> list[str]:
        """Ids of the documents in windows first .. stop - 1, the first MAX_NAMED_DOCUMENTS of them."""
        names: dict[str, None] = {}
        for position in range(first, stop):
            source, _, window = self.plan.locate(position)
            held, begin = self.plan.tokens.sources[source], window * self.plan.seq_len
            places = {begin, *(begin + int(start) for start in held.bounds(begin, self.plan.seq_len))}
            for place in sorted(places):
                names[held.document_at(place)[0]] = None
                if len(names) == MAX_NAMED_DOCUMENTS:
                    return [*names, "..."]
        return list(names)


def open_feed(run: Run, tokens: TokenSet) -> Feed:
    """Compiles the run's mixture for its budget, window and seed. Raises MixtureError and SettingsError."""
    config = run.config
    mixture = Mixture.load(str(Path(run.mixture)))
    plan = mixture.plan(tokens, seq_len=config.seq_len, budget_tokens=config.total_tokens, seed=config.seed)
    return Feed(plan, config)
