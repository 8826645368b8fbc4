"""What `gristmill calibrate --by-language` found, as a table that stages read: `stages/language_limits.py`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from gristmill.pipelines.calibrate_write import comment_of, heading, one_line
from gristmill.pipelines.limits_found import CalibrateError, Calibration, Group, Proposal, StageLimits
from gristmill.pipelines.open_run import share
from gristmill.stages.language_limits import KEYS, NGRAM_SIZES, NGRAMS, LanguageLimits


def table_text(found: Calibration) -> str:
    """The table, with a comment at each limit: what it removes, and what the one in force did.

    Adds to the problems of `found` what a table cannot hold. Raises CalibrateError when nothing is left for it.
    """
    body = CommentedMap()
    for language, groups in _by_language(found, list(_tabled(found))).items():
        body[language] = _entry(language, groups)
        body.yaml_set_comment_before_after_key(language, before="\n" + "\n".join(_of_language(groups)))
    if not body:
        raise CalibrateError("\n".join(["No table of limits by language can be made from this run.", *found.problems]))
    body.yaml_set_start_comment("\n".join([*_use(found), *heading(found)]))
    yaml = YAML(typ="rt")
    yaml.width = 10_000  # a comment never breaks a line
    yaml.allow_unicode = True
    text = io.StringIO()
    yaml.dump(body, text)
    return text.getvalue()


def _use(found: Calibration) -> Iterator[str]:
    yield f"Limits by language, for `by_language: THIS FILE` in the stages {', '.join(KEYS)}."
    yield "Languages that are not here take the limits of the stage."
    for name, files in found.sources.items():
        yield one_line(f"Source {name}: {files}")


def _tabled(found: Calibration) -> Iterator[StageLimits]:
    """The stages that read tables, each once."""
    seen = set()
    for stage in found.stages:
        if not stage.languages:
            continue
        if stage.key not in KEYS or getattr(stage.stage, "variant", "datatrove") != "datatrove":
            found.problems.append(f"Stage {stage.label} reads no table: its limits by language are shown only.")
        elif stage.key in seen:
            found.problems.append(
                f"Stage {stage.label}: the table holds the limits of the first {stage.key}. With --stage another table "
                "can be written for it."
            )
        else:
            seen.add(stage.key)
            yield stage


def _by_language(found: Calibration, stages: list[StageLimits]) -> dict[str, list[tuple[StageLimits, Group]]]:
    """Language -> the stages that have limits for it; the language with most documents first."""
    out: dict[str, list[tuple[StageLimits, Group]]] = {}
    for stage in stages:
        for group in stage.languages:
            out.setdefault(str(group.language), []).append((stage, group))
    ordered = sorted(out, key=lambda name: (-max(group.documents for _, group in out[name]), name))
    return {name: out[name] for name in ordered}


def _of_language(groups: list[tuple[StageLimits, Group]]) -> Iterator[str]:
    yield "documents: " + ", ".join(f"{group.documents:,} reached {stage.label}" for stage, group in groups)
    for stage, group in groups:
        words = group.stop_words
        if words is not None:
            yield (
                f"text that reached {stage.label}: {words.all_bytes / 1e6:,.1f} MB; stop words are those of "
                f"{words.documents:,} documents, {words.bytes / 1e6:,.1f} MB"
            )
    for stage, group in groups:
        before, after = (f"{share(part, group.documents):.1%}" for part in (group.dropped_now, group.dropped))
        apart = " (and what the rule on stop words removes)" if group.stop_words is not None else ""
        yield f"all rules of {stage.label} together: removed {before}, with these limits {after}{apart}"


def _entry(language: str, groups: list[tuple[StageLimits, Group]]) -> CommentedMap:
    """One language: keys in the order of LanguageLimits."""
    values: dict[str, Any] = {}
    for stage, group in groups:
        tuned = stage.stage.for_language(language)
        for key, setting in KEYS[stage.key].items():
            if setting == "words":
                if values.setdefault("words", tuned.words) != tuned.words:
                    raise CalibrateError(
                        f"Language {language}: the stages of this run found its words differently (`words`), and a "
                        "table has one way for all of them. Run the recipe with one, then calibrate."
                    )
            elif setting == "stop_words":
                own = group.stop_words.words if group.stop_words is not None else ()
                values[key] = _flow(own or tuned.stop_words)
            elif proposal := _of(group, setting):
                values[key] = proposal
        if stage.key == "gopher_repetition":
            for key, setting in NGRAMS.items():
                values[key] = [(n, p) for n in NGRAM_SIZES[key] if (p := _of(group, setting.format(n)))]
    out = CommentedMap()
    for key in LanguageLimits.model_fields:
        value = values.get(key)
        if isinstance(value, Proposal):
            out[key] = value.bound
            out.yaml_add_eol_comment(one_line(comment_of(value)), key)
        elif key in NGRAMS and value:
            out[key] = _pairs(value)
        elif key not in NGRAMS and value is not None:
            out[key] = value
    return out


def _of(group: Group, setting: str) -> Proposal | None:
    return next((p for p in group.proposals if p.limit.setting == setting), None)


def _pairs(found: list[tuple[int, Proposal]]) -> CommentedSeq:
    out = CommentedSeq()
    for at, (n, proposal) in enumerate(found):
        out.append(_flow([n, proposal.bound]))
        out.yaml_add_eol_comment(one_line(comment_of(proposal)), at)
    return out


def _flow(values: Any) -> CommentedSeq:
    out = CommentedSeq(values)
    out.fa.set_flow_style()
    return out
