"""From wishes to whole windows: lengths of phases, weights, exact counts, caps. Pure arithmetic on sizes.

Everything here is exact (`Fraction`); a wish that cannot be met is a MixtureError with both numbers and the nearest
value that can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import xxhash

from gristmill.mixtures.order import apportion
from gristmill.mixtures.packing import best_fit
from gristmill.mixtures.plan import MixtureError, PhaseSpec, Plan, SourceSize
from gristmill.mixtures.selection import SelectedTokens
from gristmill.stages.settings_file import nearest

if TYPE_CHECKING:
    from gristmill.mixtures.mixture import Mixture, Phase, Wish


def sizes_of(tokens: Any) -> dict[str, SourceSize]:
    """What a plan has to know of the sources of a TokenSet, or of a mapping of sizes."""
    if hasattr(tokens, "sources"):
        return {
            name: replace(SourceSize(source.tokens, source.utf8_bytes, _digest(source)), **_part_of(source))
            for name, source in tokens.sources.items()
        }
    return {name: size if isinstance(size, SourceSize) else SourceSize(int(size)) for name, size in tokens.items()}


def _digest(source: Any) -> str:
    """Of the content of a source: the checksums of its shards, in order, and which documents of them are chosen."""
    content = "".join(shard.bin_xxh3 for shard in source.shards)
    return xxhash.xxh3_64_hexdigest(content + (source.digest if isinstance(source, SelectedTokens) else ""))


def _part_of(source: Any) -> dict[str, Any]:
    return {"source": source.whole.name, "where": source.where} if isinstance(source, SelectedTokens) else {}


def packed(mixture: Mixture, tokens: Any, sizes: Mapping[str, SourceSize], seq_len: int) -> dict[str, SourceSize]:
    """The sizes of the mixture's sources with their documents packed by best fit. Reads the index of each shard."""
    if not hasattr(tokens, "sources"):
        raise MixtureError(
            f"Mixture {mixture.name}: packing best_fit needs the lengths of the documents. Plan with a TokenSet, or "
            "with packing: concat."
        )
    out = dict(sizes)
    for name in mixture.sources:
        if name in sizes:
            source = tokens.sources[name]
            packing = best_fit(source.bounds(0, source.tokens), source.tokens, seq_len)
            out[name] = replace(sizes[name], packing=packing)
    return out


def settle(
    mixture: Mixture,
    sizes: Mapping[str, SourceSize],
    seq_len: int,
    budget_tokens: int | None,
    used: Mapping[str, int],
) -> tuple[dict[str, SourceSize], tuple[PhaseSpec, ...], tuple[str, ...]]:
    """-> (sizes of the mixture's sources, its phases with their wishes settled, notes on what was computed)."""
    if seq_len < 1:
        raise MixtureError(f"Mixture {mixture.name}: seq_len is {seq_len}; a window trains at least 1 token.")
    in_use = {name: _size(mixture, name, sizes, seq_len) for name in mixture.sources}
    windows = {name: size.windows(seq_len) for name, size in in_use.items()}
    phases = _phases(mixture)
    lengths = _lengths(mixture, phases, windows, seq_len, budget_tokens)
    padding = {name: size.packing.padding_share for name, size in in_use.items() if size.packing is not None}
    base, notes = _base_wishes(mixture, in_use, windows, sum(lengths))
    specs: list[PhaseSpec] = []
    for phase, length in zip(phases, lengths, strict=True):
        wishes = base if phase.weights is None else phase.weights
        before = specs[-1].weights if specs else ()
        specs.append(_spec(mixture, phase, length, wishes, windows, seq_len, before))
    if padding:
        shown = ", ".join(f"{name} {share:.3%}" for name, share in padding.items())
        notes = (*notes, f"packing best_fit; padding: {shown}")
    return in_use, tuple(specs), notes


def _size(mixture: Mixture, name: str, sizes: Mapping[str, SourceSize], seq_len: int) -> SourceSize:
    if name not in sizes:
        wanted = mixture.sources[name].source or name
        of = f" for {name!r}" if wanted != name else ""
        raise MixtureError(
            f"Mixture {mixture.name}: there are no tokens of source {wanted!r}{of}.{nearest(wanted, sizes)}"
        )
    size = sizes[name]
    if size.windows(seq_len) == 0:
        raise MixtureError(
            f"Mixture {mixture.name}: source {name!r} has {size.tokens:,} tokens, less than one window of "
            f"{seq_len + 1:,}. Leave it out, or choose a seq_len below {max(size.tokens, 1):,}."
        )
    return size


def _phases(mixture: Mixture) -> tuple[Phase, ...]:
    from gristmill.mixtures.mixture import Phase

    return mixture.phases or (Phase(name="all", share=1.0),)


def _lengths(
    mixture: Mixture,
    phases: Sequence[Phase],
    windows: Mapping[str, int],
    seq_len: int,
    budget_tokens: int | None,
) -> list[int]:
    """Windows of each phase."""
    fixed = {i: phase.tokens // seq_len for i, phase in enumerate(phases) if phase.tokens is not None}
    shared = [i for i in range(len(phases)) if i not in fixed]
    if budget_tokens is None:
        total = _total_without_budget(mixture, phases, windows, seq_len, sum(fixed.values()))
    else:
        total = budget_tokens // seq_len
    left = total - sum(fixed.values())
    if left < 0 or (left > 0 and not shared):
        raise MixtureError(
            f"Mixture {mixture.name}: its phases name {sum(fixed.values()) * seq_len:,} tokens, but the budget is "
            f"{total * seq_len:,}. Give a budget of {sum(fixed.values()) * seq_len:,} tokens, or give a phase a share."
        )
    if shared:
        shares = [Fraction(str(phases[i].share)) for i in shared]
        if abs(sum(shares, Fraction(-1))) > Fraction(1, 10**6):
            raise MixtureError(
                f"Mixture {mixture.name}: the shares of its phases sum to {float(sum(shares)):.6g}; they must sum to 1."
            )
        fixed |= dict(zip(shared, apportion(left, shares), strict=True))
    for i, phase in enumerate(phases):
        if fixed[i] < 1:
            raise MixtureError(
                f"Mixture {mixture.name}: phase {phase.name} has less than one window of {seq_len:,} tokens in a "
                f"budget of {total * seq_len:,} tokens. Give a larger budget or leave the phase out."
            )
    return [fixed[i] for i in range(len(phases))]


def _total_without_budget(
    mixture: Mixture, phases: Sequence[Phase], windows: Mapping[str, int], seq_len: int, fixed: int
) -> int:
    """Windows of the run where no budget is given: from the phases' tokens, or from exact wishes alone."""
    if all(phase.tokens is not None for phase in phases):
        return fixed
    wishes = phases[0].weights or mixture.sources
    exact = [_exact(wish, windows[name], seq_len) for name, wish in wishes.items()]
    if len(phases) == 1 and phases[0].share == 1.0 and all(count is not None for count in exact):
        return sum(count for count in exact if count is not None)
    raise MixtureError(
        f"Mixture {mixture.name} does not say how long the run is. Give budget_tokens, or tokens for every phase, or "
        "tokens or epochs for every source."
    )


def _exact(wish: Wish, windows: int, seq_len: int) -> int | None:
    """The windows that an exact wish asks for; None for a weight."""
    if wish.tokens is not None:
        return (wish.tokens + seq_len // 2) // seq_len
    if wish.epochs is not None:
        return round(Fraction(str(wish.epochs)) * windows)
    return None


def _base_wishes(
    mixture: Mixture, sizes: Mapping[str, SourceSize], windows: Mapping[str, int], total: int
) -> tuple[Mapping[str, Wish], tuple[str, ...]]:
    """The mixture's own wishes; with temperature or UniMax the weights that they come to."""
    if mixture.temperature is not None:
        # Rounded to 12 digits, because the last bits of a power differ between machines.
        powers = {name: float(f"{size.tokens**mixture.temperature:.12g}") for name, size in sizes.items()}
        weights = {name: Fraction(power) / sum(map(Fraction, powers.values())) for name, power in powers.items()}
        how = f"temperature {mixture.temperature:g}"
    elif mixture.unimax is not None:
        cap = Fraction(str(mixture.unimax.max_epochs))
        weights = unimax({name: int(cap * count) for name, count in windows.items()}, total, mixture.name)
        how = f"unimax with max_epochs {mixture.unimax.max_epochs:g}"
    else:
        return mixture.sources, ()
    shown = ", ".join(f"{name} {float(weight):.6g}" for name, weight in weights.items())
    return {name: _Weight(weight) for name, weight in weights.items()}, (f"weights by {how}: {shown}",)  # type: ignore[misc]


@dataclass(frozen=True)
class _Weight:
    """A computed wish, exact."""

    weight: Fraction
    tokens: None = None
    epochs: None = None


def unimax(caps: Mapping[str, int], total: int, name: str = "unimax") -> dict[str, Fraction]:
    """Weights as even as the caps (windows) allow, for a run of `total` windows (Chung et al. 2023, algorithm 1).

    The smallest source first: each gets an even part of what is left, or its cap if that is less.
    """
    if sum(caps.values()) < total:
        raise MixtureError(
            f"Mixture {name}: UniMax may use {sum(caps.values()):,} windows of all sources together, but the run has "
            f"{total:,}. Raise max_epochs to {total / max(sum(caps.values()), 1):.4g} times its value, or lower the "
            "budget."
        )
    left, given = Fraction(total), {}
    by_size = sorted(caps, key=lambda source: (caps[source], source))
    for i, source in enumerate(by_size):
        given[source] = min(Fraction(caps[source]), left / (len(by_size) - i))
        left -= given[source]
    return {source: given[source] / total for source in caps}


def _spec(
    mixture: Mixture,
    phase: Phase,
    length: int,
    wishes: Mapping[str, Wish],
    windows: Mapping[str, int],
    seq_len: int,
    before: tuple[Fraction, ...],
) -> PhaseSpec:
    """Exact wishes first; the weights divide what is left."""
    exact = {name: _exact(wish, windows[name], seq_len) for name, wish in wishes.items()}
    fixed = sum(count for count in exact.values() if count is not None)
    raw = {name: _decimal(wish.weight) for name, wish in wishes.items() if wish.weight is not None}
    divisor = sum(raw.values())
    left = length - fixed
    _check_phase(mixture, phase, length, fixed, divisor > 0, seq_len)
    if fixed and phase.ramp != "step":
        raise MixtureError(
            f"Mixture {mixture.name}: phase {phase.name} ramps its weights, so it cannot give exact tokens or epochs. "
            "Give weights, or ramp: step."
        )
    counts = {name: count for name, count in exact.items() if count is not None}
    weights = tuple(
        Fraction(counts[name], length)
        if name in counts
        else raw.get(name, Fraction(0)) / (divisor or 1) * Fraction(left, length)
        for name in windows
    )
    settled = tuple(counts.get(name, None if raw.get(name) else 0) for name in windows) if counts else None
    start = before if phase.ramp != "step" else weights
    return PhaseSpec(phase.name, length, weights, start, phase.ramp, phase.anneal, settled)


def _check_phase(mixture: Mixture, phase: Phase, length: int, fixed: int, weighted: bool, seq_len: int) -> None:
    where = f"Mixture {mixture.name}: phase {phase.name}"
    if fixed > length:
        raise MixtureError(
            f"{where} has {length * seq_len:,} tokens, but the exact wishes of its sources come to "
            f"{fixed * seq_len:,}. Give it at least {fixed * seq_len:,} tokens, or ask for {length / fixed:.4g} times "
            "as much."
        )
    if fixed < length and not weighted:
        raise MixtureError(
            f"{where} has {length * seq_len:,} tokens, but its sources ask for {fixed * seq_len:,} and none has a "
            f"weight to take the rest. Give it {fixed * seq_len:,} tokens, or give a source a weight."
        )


def check_epochs(mixture: Mixture, plan: Plan) -> None:
    """Raises MixtureError when the plan uses a source more often than its max_epochs, with the nearest that works."""
    problems = []
    for s, name in enumerate(plan.sources):
        cap_epochs = mixture.sources[name].max_epochs or mixture.max_epochs
        have, used = plan.source_windows[s], plan.used.get(name, 0)
        cap = max(0, int(Fraction(str(cap_epochs)) * have) - used)
        asked = int(plan.order.counts(plan.windows)[s])
        if asked <= cap:
            continue
        length = plan.seq_len
        already = f", of which {used * length:,} are used already" if used else ""
        problems.append(
            f"Mixture {mixture.name}: source {name!r} gives {asked * length:,} tokens in this run, "
            f"{(used + asked) / have:.4g} epochs of its {have * length:,} tokens{already}; max_epochs {cap_epochs:g} "
            f"allows {cap * length:,}. Nearest that works: {_nearest_that_works(plan, s, asked, cap)}, or max_epochs "
            f"{-(-(used + asked) * 1000 // have) / 1000:g}."
        )
    if problems:
        raise MixtureError("\n".join(problems))


def _nearest_that_works(plan: Plan, s: int, asked: int, cap: int) -> str:
    """In words, what brings source s down from `asked` windows to `cap`."""
    length = plan.seq_len
    exact = sum(spec.exact[s] or 0 for spec in plan.specs if spec.exact is not None)
    if exact:  # its weights in other phases stay as they are
        left = max(0, cap - (asked - exact))
        return (
            f"{left * length:,} tokens or {_floor(left / plan.source_windows[s]):g} epochs of it where it asks for them"
        )
    if len(plan.specs) == 1:
        share = f"a weight of {_floor(cap / plan.windows):.6g} of 1"
    else:
        share = f"{_floor(float(Fraction(cap, asked))):.6g} times its weights"
    return f"{share}, or with these weights a budget of {feasible_windows(plan, s, cap) * length:,} tokens"


def feasible_windows(plan: Plan, s: int, cap: int) -> int:
    """The longest run, with the same weights and shares of phases, in which source s gives at most `cap` windows."""
    asked = int(plan.order.counts(plan.windows)[s])
    spare = 0 if len(plan.specs) == 1 else len(plan.specs)  # phases are rounded to windows, each by less than one
    return max(0, plan.windows * max(0, cap - spare) // asked)


def _floor(value: float) -> float:
    """Rounded down to six decimals, so that what a message proposes is feasible."""
    return int(value * 10**6) / 10**6


def _decimal(value: float | Fraction) -> Fraction:
    """A number as it is written: 0.7 is 7/10."""
    return value if isinstance(value, Fraction) else Fraction(str(value))
