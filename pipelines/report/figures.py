"""Everything that the page says, as plain data: from ledgers, cards and samples, never by recomputing a stage.

`page_data(run, stages)` gives one dict. The template draws it, and it is embedded once in the page as JSON, so that
what a reader sees can be checked against the ledgers by a program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from gristmill.pipelines.faults import Failed
from gristmill.pipelines.funnel import HELD_OUT, FunnelRow, funnel
from gristmill.pipelines.near_holdout import warning
from gristmill.pipelines.open_run import TOKENS, Run, global_seconds, share
from gristmill.pipelines.removed import languages_of, left_out, removed
from gristmill.pipelines.report.ablation import ablation
from gristmill.pipelines.report.charts import bin_positions, value_scale
from gristmill.pipelines.report.contamination import contamination
from gristmill.pipelines.report.dedupe import duplicates
from gristmill.pipelines.report.limits import StageRules, rules_of
from gristmill.pipelines.report.operations import operations, times
from gristmill.pipelines.report.samples import sample
from gristmill.pipelines.report.scan import Scan, scan
from gristmill.pipelines.report.scored import scored
from gristmill.pipelines.report.tokenizer import holdout, tokenizer
from gristmill.pipelines.report.tokens import tokens
from gristmill.pipelines.report.what_if import what_ifs
from gristmill.stages.ledger import Amount, StageLedger

TOP = 25  # domains


def page_data(run: Run, stages: Mapping[str, type]) -> dict[str, Any]:
    """The whole page. stages: key in a recipe -> stage class, to know the limits. Missing parts are empty."""
    rules, problems = rules_of(run, stages)
    samples = sample(run)
    rows = funnel(run)
    seen = scan(run)
    return {
        "name": str(run.recipe.get("name") or run.path.rstrip("/").rsplit("/", 1)[-1]),
        "path": run.path,
        "served": False,  # the page asks a server for documents
        "header": _header(run, rows),
        "recipe": run.recipe_text,
        "versions": run.versions,
        "inputs": _inputs(run),
        "warnings": [*_warnings(run, rows), *problems],
        "funnel": {
            "columns": [f.name for f in fields(FunnelRow)],
            "rows": [list(asdict(row).values()) for row in rows],
        },
        "sources": list(run.sources),
        "reasons": _reasons(run),
        "removals": _removals(run),
        "measures": _measures(run, rules),
        "samples": samples.documents,
        "samples_left_out": samples.left_out,
        "scan": _scan(seen),
        "contamination": contamination(run),
        "models": run.models,
        "scored": scored(run, rules, seen.buckets),
        "clusters": {name: _cluster(run, name, card) for name, card in run.clusters.items()},
        "tokens": tokens(run),
        "tokenizer": tokenizer(run),
        "holdout": holdout(run),
        "ablation": ablation(run),
        "operations": operations(run),
    }


def _header(run: Run, rows: list[FunnelRow]) -> dict[str, Any]:
    """When, from what, how much. Times are those of the files: seconds since 1970."""
    first, last = times(run)
    total = [row for row in rows if row.source is None]
    return {
        "written": time.time(),
        "first": first,
        "last": last,
        "files": len({entry.get("path") for entry in run.inputs}),
        "input_bytes": sum({e.get("path"): int(e.get("size") or 0) for e in run.inputs}.values()),
        "shards": len(run.inputs) or len({s.shard for s in run.shards}),
        "read": total[0].documents if total else 0,
        "kept": next((r.documents for r in reversed(total) if r.segment != TOKENS), 0),
        "kept_chars": next((r.chars for r in reversed(total) if r.segment != TOKENS), 0),
        "kept_bytes": next((r.bytes for r in reversed(total) if r.segment != TOKENS), 0),
        "tokens": total[-1].tokens if total else 0,
        "worker_seconds": sum(s.seconds for s in run.shards) + sum(map(global_seconds, run.clusters.values())),
        "hosts": sorted({s.host for s in run.shards} - {""}),
    }


def _inputs(run: Run) -> list[dict[str, Any]]:
    """One row a source: what it read."""
    out: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for entry in run.inputs:
        path = str(entry.get("path"))
        row = out.setdefault(
            str(entry.get("source")), {"files": 0, "shards": 0, "bytes": 0, "formats": [], "first": path}
        )
        row["shards"] += 1
        if path not in seen:
            row["files"] += 1
            row["bytes"] += int(entry.get("size") or 0)
        if entry.get("format") not in row["formats"]:
            row["formats"].append(entry.get("format"))
        seen.add(path)
    return [{"source": source, **row} for source, row in out.items()]


def _warnings(run: Run, rows: list[FunnelRow]) -> list[str]:
    """What a person should decide about, in sentences."""
    out = []
    if not rows:
        return ["This run has no ledgers: nothing was finished yet, or the folder is not the one that was meant."]
    expected = len(run.inputs)
    for segment in run.segments:
        done = sum(s.segment == segment for s in run.shards)
        if expected and done < expected:
            out.append(
                f"Segment {segment} is unfinished: {done:,} of {expected:,} shards. Later figures are of those only. "
                "Run the recipe again; it continues."
            )
    if given_up := len(list(Failed(run.path))):
        out.append(f"{_count(given_up, 'shard')} given up; what they held is in no figure here. See Operations.")
    for label, book in run.stages().items():
        lost = sum(a.documents for reason, a in book.dropped.items() if reason != HELD_OUT)
        failed = sum(a.documents for a in book.failed.values())
        if book.read.documents and not book.kept.documents:
            out.append(f"Stage {label} kept nothing of {book.read.documents:,} documents.")
        elif lost > 0.7 * book.read.documents:
            part = share(lost, book.read.documents)
            out.append(f"Stage {label} dropped {part:.0%} of the {book.read.documents:,} documents that it read.")
        if failed:
            out.append(f"Stage {label} failed on {_count(failed, 'document')}. See Operations for the first of them.")
    for source in run.sources:
        of_source = [row for row in rows if row.source == source]
        if of_source and of_source[0].documents and not of_source[-1].documents:
            out.append(f"Nothing of source {source} is left.")
    if text := warning(holdout(run) or {}):
        out.append(text)
    return out


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _reasons(run: Run) -> list[dict[str, Any]]:
    """One row a stage and reason. `breaks` and `only` are counted by stages with rules; else None."""
    out = []
    for label, book in run.stages().items():
        counted = [c.removeprefix("rule.") for c in book.counters if c.startswith("rule.")]
        for kind, amounts in (("dropped", book.dropped), ("failed", book.failed)):
            names = sorted(amounts, key=lambda reason: -amounts[reason].documents)
            names += [n for n in counted if n not in amounts and kind == "dropped"]
            for reason in names:
                amount = amounts.get(reason, Amount())
                out.append(
                    {
                        "stage": label,
                        "kind": "held out" if reason == HELD_OUT else kind,
                        "reason": reason,
                        **amount.model_dump(),
                        "share": share(amount.documents, book.read.documents),
                        "breaks": book.counters.get(f"rule.{reason}"),
                        "only": book.counters.get(f"only.{reason}"),
                    }
                )
    return out


def _removals(run: Run) -> dict[str, Any]:
    """Rows [segment, stage, reason, source, language, documents, chars, only_documents, only_chars], and what came in,
    [segment, source, language, documents, chars]; `overall` is the table that the page begins with."""
    parts = [(segment, source, found) for segment, of in run.removals.items() for source, found in of.items()]
    rows = [
        [segment, stage, reason, source, language, *count.model_dump().values()]
        for segment, source, found in parts
        for stage, reasons in found.rules.items()
        for reason, by_language in reasons.items()
        for language, count in by_language.items()
    ]
    came_in = [
        [segment, source, language, count.documents, count.chars]
        for segment, source, found in parts
        for language, count in found.came_in.items()
    ]
    return {
        "rows": rows,
        "came_in": came_in,
        "languages": [name for name in languages_of(run) if name],
        "overall": [asdict(row) for row in removed(run)] if came_in else [],
        "left_out": left_out(run),
        "share": run.recipe.get("removals_share", 1.0),
    }


def _measures(run: Run, rules: Mapping[str, StageRules]) -> list[dict[str, Any]]:
    """One panel a measure, in the order of the stages; `limits` with what other limits would keep."""
    out: list[dict[str, Any]] = []
    for label, book in run.stages().items():
        for column, h in book.histograms.items():
            scale = value_scale(h.edges)
            panel: dict[str, Any] = {
                "stage": label,
                "measure": column,
                "unit": h.unit,
                "edges": h.edges,
                "kept": h.kept,
                "dropped": h.dropped,
                "missing": h.missing,
                "x": bin_positions(h.edges),
                "limits": _limits(rules.get(label), column, book),
            }
            panel["at"] = len(out)
            panel["active"] = any(limit["breaks"] is None or limit["breaks"] > 0 for limit in panel["limits"])
            for limit in panel["limits"]:
                limit["x"] = [scale(min(max(v, h.edges[0]), h.edges[-1])) for v in limit["limits"]]
            out.append(panel)
    return out


def _limits(found: StageRules | None, column: str, book: StageLedger) -> list[dict[str, Any]]:
    out = []
    for rule in found.rules if found else ():
        if rule.column != column:
            continue
        for answer in what_ifs(rule, book.histograms[column], book):
            assert found is not None
            setting = found.settings.get((rule.reason, answer.side))
            out.append(
                {
                    **asdict(answer),
                    "published": rule.published,
                    "key": found.key,
                    "applies_to": list(found.only),
                    "setting": setting.name if setting else None,
                    "table": found.table,
                    "languages": found.languages.get(rule.reason, []),
                    "values": answer.values(book.histograms[column].edges, integer=bool(setting and setting.integer)),
                    "breaks": book.counters.get(f"rule.{rule.reason}"),
                    "only": book.counters.get(f"only.{rule.reason}"),
                    "booked": book.dropped.get(rule.reason, Amount()).documents,
                }
            )
    return out


def _scan(found: Scan) -> dict[str, Any]:
    domains = found.domains[True] + found.domains[False]
    return {
        "looked_at": found.looked_at,
        "documents": found.documents,
        "kept": found.seen[True],
        "dropped": found.seen[False],
        "languages": _both(found.languages),
        "domains": _both(found.domains, [name for name, _ in _top(domains) if name][:TOP]),
        "distinct_domains": len([d for d in domains if d]),
        "dumps": [row for row in sorted(_both(found.dumps), key=lambda row: row["name"]) if row["name"]],
        "months": [row for row in sorted(_both(found.months), key=lambda row: row["name"]) if _is_month(row["name"])],
    }


def _is_month(name: str) -> bool:
    return len(name) == 7 and name[:4].isdigit() and name[4] == "-"


def _both(counts: Mapping[bool, Counter[str]], names: list[str] | None = None) -> list[dict[str, Any]]:
    names = [name for name, _ in _top(counts[True] + counts[False])] if names is None else names
    kept, dropped = counts[True], counts[False]
    return [
        {"name": name, "kept": kept[name], "dropped": dropped[name], "both": kept[name] + dropped[name]}
        for name in names
    ]


def _top(counter: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))


def _cluster(run: Run, segment: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """A global stage's card: its histogram of cluster sizes apart from the other figures; what it removed."""
    stage = next((label for label in run.stages() if run.segment_of(label) == segment), "").partition(" ")[0]
    removed = duplicates(run, segment, stage)
    figures = dict(card.get("figures") or {k: v for k, v in card.items() if k != "key"})
    sizes: list[tuple[str, int]] = []
    for name in [n for n in figures if "size" in n]:
        if not sizes and (found := _size_counts(figures[name])):
            sizes = found
            del figures[name]
    return {
        "stage": stage,
        "sizes": _coarse(sizes),
        "figures": figures,
        "matrix": removed.matrix,
        "dumps": removed.dumps,
        "pairs": removed.pairs,
        "skipped": removed.skipped,
        "audit": run.json(f"{segment}/audit.json"),
    }


def _size_counts(value: Any) -> list[tuple[str, int]]:
    """{"2": 10, "3-4": 5} or [[2, 10], [3, 5]] -> pairs in order of size; empty for anything else."""
    pairs = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else []
    out = [(str(pair[0]), pair[1]) for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]
    if len(out) != len(pairs) or not all(isinstance(count, int) for _, count in out):
        return []
    numbered = all(name.split("-")[0].rstrip("+").isdigit() for name, _ in out)
    return sorted(out, key=lambda p: int(p[0].split("-")[0].rstrip("+"))) if numbered else out


def _coarse(sizes: list[tuple[str, int]], limit: int = 16) -> list[tuple[str, int]]:
    """Many sizes in ranges that double: 2, 3-4, 5-8, ... Few, or named otherwise than by numbers, stay as they are."""
    if len(sizes) <= limit or not all(name.isdigit() for name, _ in sizes):
        return sizes
    out: dict[int, int] = {}
    for name, count in sizes:
        power = max(0, int(name) - 1).bit_length()
        out[power] = out.get(power, 0) + count
    return [(_range((1 << power >> 1) + 1, 1 << power), count) for power, count in sorted(out.items())]


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low >= high else f"{low:,}-{high:,}"
