"""What runs have used of each source: the books that a checkpoint carries, so that a later mixture repeats nothing.

    used = Consumption.after(plan, position=12_000)          # a run of `plan` stops, or is forked, here
    path.write_bytes(used.encoded())
    ...
    fork = other_mixture.plan(tokens, 256, 300_000, seed=1, continue_from=Consumption.read(path))

The trainer writes them into each checkpoint as consumption.json; `continue_from: out/trunk` in a mixture reads the
last of a run. A source goes on in the same order where it stopped, whatever the weights were: its epochs are counted
from the first window of the first run. Forks of one trunk start from the same books. The order of a source depends on
the seed, on its name and on the number of its windows; so these must be the same, and a plan for which they are not is
refused. So is one that names the same documents otherwise: as a whole source that was a part, or the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gristmill.mixtures.plan import MixtureError, Plan, SourceSize
from gristmill.stages.documents import Settings

CONSUMPTION_FILE = "consumption.json"  # in a checkpoint


class SourceUse(Settings):
    """What was used of one source."""

    windows: int  # of its order, from the first on; more than it has after the first epoch
    of_windows: int  # that the source has
    digest: str = ""  # of its token shards
    source: str = ""  # of the token shards, where it is a part of one
    where: str = ""  # which documents of it


class Consumption(Settings):
    """See the top of this module."""

    seq_len: int
    seed: int
    sources: dict[str, SourceUse]

    @classmethod
    def after(cls, plan: Plan, position: int) -> Consumption:
        """The books when a run of `plan` stops at a position, with those that the plan itself continued from."""
        here = {
            name: SourceUse(
                windows=count,
                of_windows=plan.sizes[name].windows(plan.seq_len),
                digest=plan.sizes[name].digest,
                source=plan.sizes[name].source,
                where=plan.sizes[name].where,
            )
            for name, count in plan.consumed(position).items()
            if count
        }
        before = plan.continued.sources if isinstance(plan.continued, Consumption) else {}
        return cls(seq_len=plan.seq_len, seed=plan.seed, sources={**before, **here})

    @classmethod
    def read(cls, path: str | Path) -> Consumption:
        """The books of a file, of a checkpoint, or of a training run after its last checkpoint.

        Raises MixtureError where there are none.
        """
        path = Path(path)
        found = [path] if path.is_file() else [path / CONSUMPTION_FILE]
        if not found[0].is_file():
            found = sorted(path.glob(f"checkpoints/step-????????/{CONSUMPTION_FILE}"))
        if not found:
            raise MixtureError(
                f"{path}: no {CONSUMPTION_FILE} to continue from. Name the folder of a training run or of one of its "
                "checkpoints, or the file."
            )
        try:
            return cls.model_validate_json(found[-1].read_bytes())
        except ValueError as error:
            raise MixtureError(f"{found[-1]}: not a record of what a run has used: {error}") from error

    def encoded(self) -> bytes:
        """JSON, as `read` takes it."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @property
    def parts(self) -> list[str]:
        """Its sources that are parts of sources of the token shards."""
        return [name for name, use in self.sources.items() if use.source]

    def windows_used(self, sizes: Mapping[str, SourceSize], seq_len: int, seed: int) -> dict[str, int]:
        """Windows used of each source of a plan. Raises MixtureError where its windows would be others."""
        for what, theirs, ours in (("seq_len", self.seq_len, seq_len), ("seed", self.seed, seed)):
            if theirs != ours:
                raise MixtureError(
                    f"The run to continue from has {what} {theirs}, this plan {what} {ours}: their windows are not the "
                    f"same, so what was used cannot be left out. Plan with {what}={theirs}."
                )
        for name, use in self.sources.items():
            size = sizes.get(name)
            if size is None:
                continue
            if use.of_windows != size.windows(seq_len):
                raise MixtureError(
                    f"Source {name!r} had {use.of_windows:,} windows in the run to continue from and has "
                    f"{size.windows(seq_len):,} now: they would come in another order, so what was used cannot be left "
                    "out. Use the same token shards and condition, or give the new ones a source name of their own."
                )
            if use.digest and size.digest and use.digest != size.digest:
                raise MixtureError(
                    f"Source {name!r} has other token shards than in the run to continue from (digest {size.digest}, "
                    f"then {use.digest}). Use the same shards, or give the new ones a source name of their own."
                )
        return {name: use.windows for name, use in self.sources.items()}
