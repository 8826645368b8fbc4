"""Proposes limits from the measures of a finished run: `gristmill calibrate RUN --target-removal 0.1`.

For each limit that a setting holds, the value at which that rule alone removes at most the target, counted over the
documents that reached the stage and have a value. Of n values in ascending order v[0] to v[n - 1], k = floor(target n)
may go: a lower limit is v[k], an upper one v[n - 1 - k]. Both are then rounded to 3 significant digits towards
keeping, so that the next value of 3 digits in the other direction removes more than the target.

    found = calibrate(open_run("out/demo/run"), STAGES, Goal(share=0.1))
    found.stages[0].overall.proposals[0].value

With a reference source, the ranks are those of that source's documents: the limits remove at most `share` of it.
What a limit removes, before and after, is counted over all documents that reached the stage.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import ValidationError

from gristmill.pipelines.limits_found import (
    AT_LEAST,
    CalibrateError,
    Calibration,
    Goal,
    Group,
    Limit,
    Proposal,
    StageLimits,
)
from gristmill.pipelines.open_run import Run, RunError
from gristmill.pipelines.quantiles import READINGS, StreamedRank
from gristmill.pipelines.reached import Documents, Reached
from gristmill.pipelines.report.limits import SIDES, StageRules, rules_of
from gristmill.pipelines.run_books import heading_of
from gristmill.pipelines.stop_words import stop_words_of
from gristmill.stages.documents import Rule
from gristmill.stages.language_limits import is_unsegmented
from gristmill.stages.settings_file import nearest

MIN_LANGUAGE_DOCUMENTS = 50  # fewer say nothing of a language
RANKS_AT_ONCE = 256  # half a MiB each while they are read
DIGITS = 3  # significant ones of a proposal
MIN_STOP_WORDS = "min_stop_words"  # the setting whose measure follows from the stop words


def calibrate(run: Run, stages: Mapping[str, Any], goal: Goal, chosen: Sequence[str] = ()) -> Calibration:
    """Proposals for the chosen stages, by default every one whose limits are settings.

    stages: key in the recipe -> stage class. Raises CalibrateError for a question that makes no sense, RunError for a
    run that is not finished.
    """
    if not 0 <= goal.share < 1:
        raise CalibrateError(f"A share of {goal.share:g} cannot be removed: give one from 0 to below 1.")
    if goal.reference is not None and goal.reference not in run.sources:
        raise CalibrateError(f"This run has no source `{goal.reference}`.{nearest(goal.reference, list(run.sources))}")
    known, problems = rules_of(run, stages)
    problems = [*problems, *_unlabelled(run, known)]
    for label in chosen:
        if label not in run.stages():
            raise CalibrateError(f"This run has no stage `{label}`.{nearest(label, list(run.stages()))}")
    found = []
    for label, rules in known.items():
        if (chosen and label not in chosen) or not (limits := limits_of(run, label, rules)):
            continue
        if why := _not_told(run, goal, label, rules):
            problems.append(why)
            continue
        found.append(_stage(run, stages, goal, label, rules, limits, problems))
    for label in chosen:
        if label not in [stage.label for stage in found]:
            problems.append(f"Stage {label} has no limit that could be proposed.")
    if not found:
        raise CalibrateError("\n".join(["No limit can be proposed from this run.", *problems]))
    return Calibration(run.path, str(run.recipe.get("name", "")), goal, found, problems, _files(run))


def _files(run: Run) -> dict[str, str]:
    """Source -> the files that the recipe names for it."""
    sources = run.recipe.get("sources")
    files = {name: source.get("files") for name, source in sources.items()} if isinstance(sources, dict) else {}
    return {n: ", ".join(map(str, f)) if isinstance(f, list) else str(f) for n, f in files.items() if f is not None}


def _unlabelled(run: Run, known: Mapping[str, StageRules]) -> list[str]:
    """A stage used again for other sources shares the ledger's label of the first use."""
    uses = run.recipe.get("stages")
    keys = Counter(key for use in uses or () if isinstance(use, dict) for key in use if key != "only")
    labels = Counter(rules.key for rules in known.values())
    return [
        f"Stage {key} is used {keys[key]} times; limits are proposed for the first {count} only."
        for key, count in labels.items()
        if count < keys[key]
    ]


def limits_of(run: Run, label: str, rules: StageRules) -> list[Limit]:
    """The limits of a stage that a setting holds, in the order of its rules."""
    units = {name: histogram.unit for name, histogram in run.stages()[label].histograms.items()}
    out = []
    for rule in rules.rules:
        for side in SIDES:
            setting = rules.settings.get((rule.reason, side))
            if setting is not None:
                unit = units.get(rule.column, "")
                now = getattr(rule, side)
                out.append(Limit(rule.reason, side, rule.column, unit, setting.name, setting.integer, now))
    return out


def _stage(
    run: Run,
    stages: Mapping[str, Any],
    goal: Goal,
    label: str,
    rules: StageRules,
    limits: list[Limit],
    problems: list[str],
) -> StageLimits:
    reached = _reached(run, label, rules, limits)
    settings = _settings(run, rules.key, label)
    stage = stages[rules.key](**settings)
    counts = _count(run, reached, goal)
    named = _with_words(stage, label, _languages(run, stages, goal, label, counts, problems), problems)
    groups = [_group(language, limits, settings, stage) for language in (None, *named)]
    _rank(reached, groups, goal)
    for group in groups:
        _share_settings(group)
        for proposal in group.proposals:
            if problem := _refused(stages[rules.key], settings, proposal):
                where = f"Stage {label}" + (f", language {group.language}" if group.language else "")
                problems.append(f"{where}, {proposal.limit.setting}: {problem} The limit stays.")
                proposal.value = None
    by_words = [p for group in groups[1:] for p in group.proposals if p.limit.setting == MIN_STOP_WORDS]
    for proposal in by_words:
        proposal.value = None  # other stop words are to be looked for than the run has measured
    _judge(reached, groups, rules.rules)
    if by_words:
        _propose_stop_words(reached, stage, groups[1:], counts, goal, f"Stage {label}", problems)
    return StageLimits(label, rules.key, rules.only, settings, groups[0], groups[1:], stage)


def _group(language: str | None, limits: list[Limit], settings: Mapping[str, Any], stage: Any) -> Group:
    """A language may have a limit of its own already: by the stage's table, or as `min_score_of` beside `min_score`."""
    tuned = _for_language(stage, language)
    proposals = []
    for limit in limits:
        own = settings.get(f"{limit.setting}_of")
        now = getattr(tuned, limit.setting, limit.now)
        if isinstance(own, dict):
            now = own.get(language, now)
        if now is None:  # switched off for this language
            now = -math.inf if limit.side == AT_LEAST else math.inf
        proposals.append(Proposal(limit, now))
    return Group(language, proposals)


def _with_words(stage: Any, label: str, languages: list[str], problems: list[str]) -> list[str]:
    """The languages whose words the stage could find."""
    lost = [
        name
        for name in languages
        if is_unsegmented(name) and getattr(_for_language(stage, name), "words", None) == "english"
    ]
    if lost:
        problems.append(
            f"Stage {label}: no proposals for {', '.join(lost)}, written without spaces: the run looked for "
            "English words, of which they have none. Run it again with `by_language: words` and `words: unicode`."
        )
    return [name for name in languages if name not in lost]


def _for_language(stage: Any, language: str | None) -> Any:
    return stage.for_language(language) if hasattr(stage, "for_language") else stage


def _propose_stop_words(
    reached: Reached,
    stage: Any,
    groups: Sequence[Group],
    counts: Mapping[str | None, int],
    goal: Goal,
    where: str,
    problems: list[str],
) -> None:
    """Stop words of each language, and how many of them a document is to have."""
    found = stop_words_of(reached, stage, [str(group.language) for group in groups], counts, goal.reference)
    for group in groups:
        own = found[str(group.language)]
        group.stop_words = own
        (proposal,) = (p for p in group.proposals if p.limit.setting == MIN_STOP_WORDS)
        ranked = np.sort(own.found[own.counted])
        if not len(ranked):
            problems.append(f"{where}, language {group.language}: no stop words, for the run holds none of its texts.")
            continue
        value = rounded(ranked[_rank_of(proposal.limit, goal.share)(len(ranked))], AT_LEAST, integer=True)
        proposal.value, proposal.ranked, proposal.looked_at = value, len(ranked), len(own.found)
        proposal.removed = int((own.found < value).sum())


def _reached(run: Run, label: str, rules: StageRules, limits: list[Limit]) -> Reached:
    segment = run.segment_of(label)
    books = {name: book.stage for name, book in run.stages().items() if run.segment_of(name) == segment}
    names = list(books)
    stage = books[label]
    later = tuple(books[name] for name in names[names.index(label) + 1 :])
    columns = tuple(dict.fromkeys(limit.column for limit in limits))
    every = tuple(dict.fromkeys([*columns, *(rule.column for rule in rules.rules if _judged(rule, limits))]))
    return Reached(run, segment, stage, later, rules.only, every)


def _not_told(run: Run, goal: Goal, label: str, rules: StageRules) -> str | None:
    """Why nothing can be proposed for a stage."""
    if goal.reference is not None and rules.only and goal.reference not in rules.only:
        return f"Stage {label}: documents of source {goal.reference} do not pass it."
    segment, stage = run.segment_of(label), run.stages()[label].stage
    alike = [n for n, book in run.stages().items() if book.stage == stage and run.segment_of(n) == segment]
    if len(alike) > 1:
        return f"Stage {label}: segment {segment} passes it twice, and the second measures replaced the first ones."
    return None


def _judged(rule: Rule, limits: list[Limit]) -> bool:
    return any(limit.reason == rule.reason for limit in limits)


def _settings(run: Run, key: str, label: str) -> dict[str, Any]:
    """The stage's settings as the recipe of the run has them: of the use that `rules_of` calls by the label."""
    heading = label.partition(" ")[0]
    uses = [use for use in run.recipe.get("stages", []) if heading_of(use) == heading]
    labels = [name for name in run.stages() if name.partition(" ")[0] == heading]
    use = uses[labels.index(label)] if labels.index(label) < len(uses) else uses[0]
    return dict(use[key] or {})


def _count(run: Run, reached: Reached, goal: Goal) -> Counter[str | None]:
    """Language -> documents that the proposals are made from. Raises RunError when files and ledger disagree."""
    counts: Counter[str | None] = Counter()
    total = 0
    for documents in reached.read():
        total += len(documents.dropped)
        counts.update(documents.language[_reference(documents, goal)])
    books = [run.stages(source) for source in run.sources if not reached.only or source in reached.only]
    read = 0
    for by_label in books:
        for name, book in by_label.items():
            if book.stage == reached.stage and run.segment_of(name) == reached.segment:
                read += book.read.documents - sum(amount.documents for amount in book.failed.values())
    if total != read:
        raise RunError(
            f"{run.path}/{reached.segment} holds {total:,} documents that reached stage {reached.stage}; its ledgers "
            f"say {read:,}. The run is not finished or was changed: run the recipe again, then calibrate."
        )
    return counts


def _reference(documents: Documents, goal: Goal) -> np.ndarray:
    """(n,) bool: the documents that the proposals are made from."""
    if goal.reference is None:
        return np.ones(len(documents.dropped), bool)
    return np.asarray(documents.source == goal.reference, bool)


def _languages(
    run: Run, stages: Mapping[str, Any], goal: Goal, label: str, counts: Counter[str | None], problems: list[str]
) -> list[str]:
    """Languages to make proposals for, the most frequent first."""
    if not goal.by_language:
        return []
    labels = list(run.stages())
    givers = [name for name in labels if "language" in getattr(stages.get(run.stages()[name].stage), "adds", {})]
    if givers and labels.index(givers[0]) > labels.index(label):
        problems.append(
            f"Stage {label}: no proposals by language, for documents that it drops have none yet. Put {givers[0]} "
            "before it."
        )
        return []
    frequent = [(-count, name) for name, count in counts.items() if name and count >= MIN_LANGUAGE_DOCUMENTS]
    if not frequent:
        problems.append(f"Stage {label}: no language has {MIN_LANGUAGE_DOCUMENTS} documents.")
    return [name for _, name in sorted(frequent)]


def _rank(reached: Reached, groups: list[Group], goal: Goal) -> None:
    """Sets `value` and `ranked` of every proposal."""
    asked = [(group, p, StreamedRank(_rank_of(p.limit, goal.share))) for group in groups for p in group.proposals]
    for start in range(0, len(asked), RANKS_AT_ONCE):
        _read_ranks(reached, asked[start : start + RANKS_AT_ONCE], goal)
    for _, proposal, rank in asked:
        proposal.ranked = rank.count
        if rank.value is not None and math.isfinite(rank.value):
            proposal.value = rounded(rank.value, proposal.limit.side, integer=proposal.limit.integer)


def _read_ranks(reached: Reached, asked: Sequence[tuple[Group, Proposal, StreamedRank]], goal: Goal) -> None:
    for _ in range(READINGS):
        for documents in reached.read():
            counted = _reference(documents, goal)
            rows = {group.language: group.rows(documents) & counted for group, _, _ in asked}
            for group, proposal, rank in asked:
                values = documents.measures[proposal.limit.column][rows[group.language]]
                rank.show(values[~np.isnan(values)])
        for _, _, rank in asked:
            rank.end_reading()


def _rank_of(limit: Limit, removable: float) -> Any:
    part = Fraction(str(removable))  # 0.29 of 100 documents are 29; in binary they would be 28

    def rank(count: int) -> int:
        removed = math.floor(part * count)
        return removed if limit.side == AT_LEAST else count - 1 - removed

    return rank


def rounded(value: float, side: str, *, integer: bool) -> float:
    """To 3 significant digits and, where asked, a whole number: a lower limit down, an upper one up."""
    exact = Decimal(repr(float(value)))
    if not exact:
        return 0 if integer else 0.0
    mode = ROUND_FLOOR if side == AT_LEAST else ROUND_CEILING
    exponent = exact.adjusted() - DIGITS + 1
    step = Decimal(1).scaleb(max(exponent, 0) if integer else exponent)
    steps = (exact / step).to_integral_value(mode)
    return int(steps * step) if integer else float(steps * step)


def _share_settings(group: Group) -> None:
    """One setting may hold the limits of several rules: the loosest proposal is the one for all of them."""
    for proposal in group.proposals:
        alike = [p for p in group.proposals if p.limit.setting == proposal.limit.setting]
        values = [p.value for p in alike if p.value is not None]
        if len({p.limit.side for p in alike}) > 1 or len(values) < len(alike):
            proposal.value = None if len(alike) > 1 else proposal.value
        elif len(alike) > 1:
            proposal.value = min(values) if proposal.limit.side == AT_LEAST else max(values)


def _refused(stage: Any, settings: Mapping[str, Any], proposal: Proposal) -> str | None:
    """Why a proposal cannot be a setting of the stage."""
    if proposal.value is None:
        return "no document has a finite value." if not proposal.ranked else "its limit would be infinite."
    try:
        stage(**{**settings, proposal.limit.setting: proposal.value})
    except ValidationError as error:
        return f"the stage refuses {proposal.value:g} ({error.errors()[0]['msg']})."
    return None


def _judge(reached: Reached, groups: list[Group], rules: Sequence[Rule]) -> None:
    """Counts what limits in force and proposals remove, alone and together."""
    for documents in reached.read():
        for group in groups:
            rows = group.rows(documents)
            after = _dropped_after(documents, group, rules)
            group.documents += int(rows.sum())
            group.dropped_now += int((documents.dropped & rows).sum())
            group.dropped += int((after & rows).sum())
            for proposal in group.proposals:
                values = documents.measures[proposal.limit.column]
                proposal.documents += int((~np.isnan(values) & rows).sum())
                proposal.removed_now += int((_removed_now(documents, proposal.limit, rules) & rows).sum())
                proposal.removed += int((proposal.limit.removes(values, proposal.bound) & rows).sum())


def _removed_now(documents: Documents, limit: Limit, rules: Sequence[Rule]) -> np.ndarray:
    """(n,) bool: what the run itself booked; which of two sides it was, the value tells."""
    values = documents.measures[limit.column]
    booked = documents.reasons.get(limit.reason, np.zeros(len(values), bool)) & ~np.isnan(values)
    two_sided = any(r.reason == limit.reason and None not in (r.at_least, r.at_most) for r in rules)
    return booked & limit.removes(values, limit.now) if two_sided else booked


def _dropped_after(documents: Documents, group: Group, rules: Sequence[Rule]) -> np.ndarray:
    """(n,) bool: dropped by the stage with the group's proposals in force for every document.

    Verdicts that no proposal touches stay as the run booked them: other rules, documents without a value.
    """
    none = np.zeros(len(documents.dropped), bool)
    bounds = {(p.limit.reason, p.limit.side): p.bound for p in group.proposals}
    proposed = {reason for reason, _ in bounds}
    drop = none.copy()
    for reason, verdict in documents.reasons.items():
        drop |= verdict if reason not in proposed else none
    for rule in rules:
        if rule.reason in proposed:
            low, high = (bounds.get((rule.reason, side), getattr(rule, side)) for side in SIDES)
            values = documents.measures[rule.column]
            missing = np.isnan(values)
            drop |= replace(rule, at_least=low, at_most=high).fails(values) & ~missing
            drop |= documents.reasons.get(rule.reason, none) & missing
    return drop
