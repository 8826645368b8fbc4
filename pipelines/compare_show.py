"""The comparison of two runs in a terminal: `gristmill compare A B`. What differs is found by `report/compare.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from gristmill.pipelines.inspect import visible
from gristmill.pipelines.tables import plain_table

SHOWN_REASONS = 20  # of each side
SHOWN_MEASURES = 20
EXAMPLE_CHARS = 200


def as_json(found: Mapping[str, Any]) -> str:
    """The whole comparison as one object."""
    return orjson.dumps(found, option=orjson.OPT_INDENT_2).decode()


def render(found: Mapping[str, Any], examples: int, console: Console) -> None:
    """Settings, funnel, documents with up to `examples` texts of each side, measures, scores."""
    for side in ("a", "b"):
        console.print(f"{side.upper()}: {visible(found[side]['name'])}, {visible(found[side]['path'])}", markup=False)
    rows = [{"setting": r["setting"], "A": visible(r["a"]), "B": visible(r["b"])} for r in found["settings"]]
    if rows:
        console.print(plain_table("Settings that differ", ["setting", "A", "B"], rows, names=3))
    else:
        console.print("Both ran with the same settings.")
    _funnel(found, console)
    _documents(found["documents"], examples, console)
    _measures(found, console)
    if found["scores"]:
        scores = [
            {
                "mixture": r["mixture"],
                **{f"{side.upper()}{part}": value for side in "ab" for part, value in _span(r[side])},
            }
            for r in found["scores"]
        ]
        columns = ["mixture", "A", "A interval", "B", "B interval"]
        console.print(plain_table("Scores", columns, scores))


def _funnel(found: Mapping[str, Any], console: Console) -> None:
    rows = []
    for r in found["funnel"]:
        a, b = r["documents_a"], r["documents_b"]
        row = {"stage": r["stage"], "documents A": a, "B": b, "B - A": b - a if None not in (a, b) else None}
        for side in "ab":
            share, tokens = r[f"kept_share_{side}"], r[f"tokens_{side}"]
            row[f"left {side.upper()}"] = None if share is None else f"{share:.1%}"
            row[f"tokens {side.upper()}"] = tokens or None
        rows.append(row)
    columns = ["stage", "documents A", "B", "B - A", "left A", "left B", "tokens A", "tokens B"]
    if rows:
        console.print(plain_table("Funnel", columns, rows))
    else:
        console.print("Neither run has ledgers.")


def _documents(found: Mapping[str, Any], examples: int, console: Console) -> None:
    if found["skipped"]:
        console.print(f"{found['skipped']:,} documents are too many to match one by one.")
        return
    console.print(
        f"Kept by both: {found['both']:,}. By A alone: {found['only_a']['documents']:,} of {found['kept_a']:,}. "
        f"By B alone: {found['only_b']['documents']:,} of {found['kept_b']:,}."
    )
    for mine, other, side in (("A", "B", found["only_a"]), ("B", "A", found["only_b"])):
        if not side["documents"]:
            continue
        title = f"Kept by {mine} alone: why {other} did without them"
        console.print(plain_table(title, ["stage", "reason", "documents"], side["reasons"][:SHOWN_REASONS], names=2))
        if (more := len(side["reasons"]) - SHOWN_REASONS) > 0:
            console.print(f"{more:,} more reasons; --json has all.")
        for example in side["examples"][:examples]:
            where = f"{example['source']}  {example['url'] or example['doc_id']}  {example['reason'] or ''}"
            console.print(Text(visible(where), style="dim"))
            console.print(Text("  " + visible(" ".join(example["text"].split())[:EXAMPLE_CHARS])))


def _measures(found: Mapping[str, Any], console: Console) -> None:
    """The measures that moved, those that moved most of their scale first."""
    moved = [r for r in found["measures"] if r["read"] or r["kept"]]
    rows = [
        {
            "measure": r["measure"],
            "unit": r["unit"],
            "of those read": r["read"],
            "of those kept": r["kept"],
            "of the scale": None if r["kept_share"] is None else f"{r['kept_share']:.2%}",
        }
        for r in moved[:SHOWN_MEASURES]
    ]
    if rows:
        columns = ["measure", "unit", "of those read", "of those kept", "of the scale"]
        console.print(plain_table("How far measures moved (Wasserstein distance)", columns, rows, names=2))
    if (more := len(moved) - SHOWN_MEASURES) > 0:
        console.print(f"{more:,} more moved less; --json has all.")


def _span(score: Mapping[str, float | None]) -> list[tuple[str, str | None]]:
    mean, low, high = score["mean"], score["low"], score["high"]
    interval = None if low is None or high is None else f"{low:.4f} to {high:.4f}"
    return [("", None if mean is None else f"{mean:.4f}"), (" interval", interval)]
