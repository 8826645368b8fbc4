"""READ FIRST: mixtures. Which tokens a model is trained on, in what proportions, in what order, until when.

    name: curriculum
    sources:
      docs: {weight: 0.6}               # a share of all tokens, relative to the other weights
      code: {weight: 0.4}
      readmes: {weight: 0, max_epochs: 8}
    max_epochs: 4                       # no source may be seen more often
    phases:
      - {name: broad, share: 0.6}       # the weights above
      - name: shift
        share: 0.2
        ramp: linear                    # from the weights before to these
        weights: {docs: 0.2, code: 0.1, readmes: 0.7}
      - {name: polish, share: 0.2, anneal: true, weights: {docs: 0.2, readmes: 0.8}}

From a file to batches:

    mixture = Mixture.load("mixtures/curriculum.yaml")                  # this file: what the user wrote, checked
    plan = mixture.plan(tokens, seq_len=256, budget_tokens=500_000, seed=1)   # wishes.py: wishes settled to integers
    print(plan.table())                                                 # plan.py: what will happen, before it does
    plan.locate(17)                                                     # order.py, kernels.py: position -> window
    for batch in plan.loader(rank=0, world_size=2, batch_windows=16): ...     # loader.py; torch_loader.py for PyTorch

A source may be a part of one, chosen by what was measured of its documents (`where.py`, `selection.py`):

    web_high: {source: web, where: "classifier.score >= 0.7", weight: 0.5}

A source's wish, in the mixture or in a phase, is one of `weight`, `tokens` (exactly so many) and `epochs` (1.0: use it
all, once). Exact wishes come first; weights divide what is left. Instead of weights a mixture may ask for
`temperature: 0.7` (weights proportional to tokens to that power) or `unimax: {max_epochs: 4}` (as even as the cap
allows); both are computed once, when the plan is made, and shown in it. `base: other.yaml` takes over the keys of
another file that are not given here. With `tokens`, `seq_len` and `budget_tokens` in the file itself,
`Mixture.load(path).plan().loader(rank, world_size)` is all there is to write.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.plan import MixtureError, Plan
from gristmill.mixtures.selection import ONE, select
from gristmill.mixtures.where import Where
from gristmill.mixtures.wishes import check_epochs, packed, settle, sizes_of
from gristmill.stages.documents import Settings
from gristmill.stages.settings_file import SettingsError, nearest
from gristmill.stages.settings_file import load as load_settings
from gristmill.tokenize.shards import TokenSet


class Wish(Settings):
    """What a source is asked for: at most one of weight, tokens and epochs."""

    weight: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # relative to the other weights
    tokens: int | None = Field(default=None, ge=0)  # exactly, to the nearest window
    epochs: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # exactly, to the nearest window
    max_epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # over the whole run; the mixture's else
    source: str | None = None  # of the token shards; its own name unless given
    where: str | None = None  # which documents of it: "classifier.score >= 0.7"; see `where.py`

    @field_validator("where")
    @classmethod
    def _is_condition(cls, where: str | None) -> str | None:
        return where if where is None else Where.parse(where).text

    @model_validator(mode="before")
    @classmethod
    def _number_is_weight(cls, value: Any) -> Any:
        return {"weight": value} if isinstance(value, int | float) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _one_wish(self) -> Wish:
        if sum(x is not None for x in (self.weight, self.tokens, self.epochs)) > 1:
            raise ValueError("give one of weight, tokens and epochs, not several")
        return self

    @property
    def is_part(self) -> bool:
        """Whether it is chosen out of a source of the token shards, or named otherwise than that."""
        return self.source is not None or self.where is not None

    @property
    def says_nothing(self) -> bool:
        return self.weight is None and self.tokens is None and self.epochs is None


class Phase(Settings):
    """A stretch of the run."""

    name: str
    share: float | None = Field(default=None, gt=0, le=1)  # of what the phases with `tokens` leave of the budget
    tokens: int | None = Field(default=None, gt=0)
    weights: dict[str, Wish] | None = None  # sources not named get nothing; without it the mixture's own wishes
    ramp: Literal["step", "linear", "cosine"] = "step"  # how the weights get here from those of the phase before
    anneal: bool = False  # the trainer's learning rate decays over this phase

    @model_validator(mode="after")
    def _one_length(self) -> Phase:
        if (self.share is None) == (self.tokens is None):
            raise ValueError("give either share or tokens")
        capped = [name for name, wish in (self.weights or {}).items() if wish.max_epochs is not None]
        if capped:
            raise ValueError(f"max_epochs of {capped[0]} is for the whole run: give it under sources")
        parts = [name for name, wish in (self.weights or {}).items() if wish.is_part]
        if parts:
            raise ValueError(f"`source` and `where` say what {parts[0]} is, in every phase: give them under sources")
        return self


class UniMax(Settings):
    """As even as possible over the sources, none seen more than max_epochs times (Chung et al. 2023, algorithm 1)."""

    max_epochs: float = Field(gt=0, allow_inf_nan=False)


class Mixture(Settings):
    """What the user wrote. See the top of this module."""

    name: str
    description: str = ""
    sources: dict[str, Wish]
    # Repeating up to four times is nearly as good as new data (Muennighoff et al. 2023, "Scaling data-constrained
    # language models").
    max_epochs: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    temperature: float | None = Field(default=None, ge=0, le=1)
    unimax: UniMax | None = None
    packing: Literal["concat", "best_fit"] = "concat"  # best_fit: documents whole where they fit (`packing.py`)
    phases: tuple[Phase, ...] = ()
    # What `plan` takes where it is called without: a training run gives its own.
    tokens: str | None = None  # folder of token shards
    seq_len: int | None = Field(default=None, ge=1)  # tokens that a window predicts
    budget_tokens: int | None = Field(default=None, ge=1)  # of the whole run
    seed: int | None = None  # of the order of windows
    continue_from: str | None = None  # a training run, a checkpoint or a file of `Consumption`: reuse nothing of it

    @field_validator("sources")
    @classmethod
    def _has_sources(cls, sources: dict[str, Wish]) -> dict[str, Wish]:
        if not sources:
            raise ValueError("a mixture needs at least one source")
        return sources

    @model_validator(mode="after")
    def _consistent(self) -> Mixture:
        computed = self.temperature is not None or self.unimax is not None
        if self.temperature is not None and self.unimax is not None:
            raise ValueError("give either temperature or unimax")
        wishes = {name: wish for name, wish in self.sources.items() if not wish.says_nothing}
        if computed and wishes:
            raise ValueError(
                f"temperature and unimax compute the weights, but {next(iter(wishes))} has a wish of its own"
            )
        needed = not self.phases or any(phase.weights is None for phase in self.phases)
        if not computed and needed and len(wishes) < len(self.sources):
            missing = next(name for name in self.sources if name not in wishes)
            raise ValueError(f"source {missing} has no wish: give weight, tokens or epochs")
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"two phases are called {next(n for n in names if names.count(n) > 1)}")
        for phase in self.phases:
            for name in phase.weights or {}:
                if name not in self.sources:
                    raise ValueError(
                        f"phase {phase.name} names {name}, which is not under sources.{nearest(name, self.sources)}"
                    )
        if self.phases and self.phases[0].ramp != "step":
            raise ValueError(f"phase {self.phases[0].name} is the first: there are no weights to ramp from")
        if len(self.phases) > 1 and any(
            (wish.tokens is not None or wish.epochs is not None) for wish in self.sources.values()
        ):
            raise ValueError("with several phases, give tokens and epochs in the weights of the phase they are for")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Mixture:
        """Reads a YAML file. Raises MixtureError that names the file, the line and the nearest name."""
        try:
            return load_settings(cls, path)
        except SettingsError as error:
            raise MixtureError(str(error)) from error

    def plan(
        self,
        tokens: Any = None,
        seq_len: int | None = None,
        budget_tokens: int | None = None,
        seed: int | None = None,
        continue_from: Consumption | None = None,
        target_tokens: int | None = None,
    ) -> Plan:
        """Compiles the mixture for given sources. Raises MixtureError when a wish cannot be met, saying what could.

        tokens: a TokenSet or its folder; or {source: tokens} or {source: SourceSize} to plan without files, parts of
        sources under their own names.
        budget_tokens: of the whole run; may be left out where every length is given in tokens or epochs.
        continue_from: what an earlier run has used; this one takes up each source where that one stopped.
        target_tokens: of the run that this one stands for; each source keeps budget_tokens / target_tokens of its
        tokens, so that it is repeated as often as there (`subsample.py`).

        What is not given here is taken from the mixture; then seq_len and seed from the run to continue from, and
        the seed is 0 at last.
        """
        if continue_from is None and self.continue_from is not None:
            continue_from = Consumption.read(self.continue_from)
        tokens = self._given("tokens", tokens)
        seq_len = self._given("seq_len", seq_len, None if continue_from is None else continue_from.seq_len)
        seed = self._given("seed", seed, 0 if continue_from is None else continue_from.seed)
        budget_tokens = self.budget_tokens if budget_tokens is None else budget_tokens
        if isinstance(tokens, str | Path):
            tokens = TokenSet.open(tokens)
        left_out: tuple[str, ...] = ()
        share = self._share(tokens, budget_tokens, target_tokens, continue_from)
        if isinstance(tokens, TokenSet) and (
            share < 1
            or any(wish.is_part for wish in self.sources.values())
            or (continue_from is not None and continue_from.parts)
        ):
            tokens, left_out = select(self, tokens, continue_from, share)
        sizes = sizes_of(tokens)
        if self.packing == "best_fit":
            sizes = packed(self, tokens, sizes, seq_len)
        used = continue_from.windows_used(sizes, seq_len, seed) if continue_from is not None else {}
        in_use, specs, notes = settle(self, sizes, seq_len, budget_tokens, used)
        plan = Plan(
            mixture=self.name,
            seq_len=seq_len,
            seed=seed,
            sizes=in_use,
            specs=specs,
            used=used,
            continued=continue_from,
            notes=(*notes, *left_out),
            tokens=tokens if hasattr(tokens, "sources") else None,
        )
        check_epochs(self, plan)
        return plan

    def _share(
        self, tokens: Any, budget_tokens: int | None, target_tokens: int | None, continue_from: Consumption | None
    ) -> Fraction:
        """Of the tokens of each source that the plan is to use."""
        if target_tokens is None:
            return ONE
        if continue_from is not None:
            raise MixtureError(
                f"Mixture {self.name}: target_tokens cannot be given to a run that continues another: that one's "
                "documents are chosen already. Leave it out."
            )
        if budget_tokens is None or target_tokens < budget_tokens:
            raise MixtureError(
                f"Mixture {self.name}: target_tokens {target_tokens:,} is of a larger run than this one, whose "
                f"budget_tokens is {'not given' if budget_tokens is None else f'{budget_tokens:,}'}."
            )
        if not isinstance(tokens, TokenSet):
            raise MixtureError(
                f"Mixture {self.name}: with target_tokens documents are chosen, so the plan needs token shards, not "
                "sizes alone."
            )
        return Fraction(budget_tokens, target_tokens)

    def _given(self, name: str, value: Any, otherwise: Any = None) -> Any:
        """The argument, else the setting of that name, else `otherwise`. Raises MixtureError where there is none."""
        found = next((each for each in (value, getattr(self, name), otherwise) if each is not None), None)
        if found is None:
            raise MixtureError(
                f"Mixture {self.name} does not say `{name}`. Give it to plan({name}=...), or write it into the file."
            )
        return found
