"""Where a document came from, what each stage measured and decided, where its tokens are: `gristmill trace ID RUN`.

An id is unique in its shard only, so there may be several documents of one id: each has a trace of its own. Documents
that were lost while they were read (`empty`, `too_large`, failures) are counted in the books and have no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.inspect import visible
from gristmill.pipelines.open_run import TOKENS, Run, RunError
from gristmill.pipelines.recipe import Segment, StageUse
from gristmill.stages.documents import Rule
from gristmill.stages.shards import Shard, exists, join
from gristmill.tokenize.pieces import order_keys
from gristmill.tokenize.shuffle import range_of

_PLACES = {
    "warc": "record at byte {}",
    "wet": "record at byte {}",
    "jsonl": "line {}",
    "csv": "line {}",
    "tsv": "line {}",
    "parquet": "row {}, counted from 0",
    "arrow": "row {}, counted from 0",
}


@dataclass(frozen=True)
class Reading:
    """One measure of one stage, with the limits that the recipe gives; None where there are none."""

    name: str
    value: float | str | None
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Step:
    """A stage of the recipe, and what it did with the document."""

    segment: str
    stage: str
    decision: str  # "kept", "dropped", "not reached", "other sources" (the stage is not for this one), "not run yet"
    reasons: tuple[str, ...] = ()
    readings: tuple[Reading, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """Where a document's tokens are, below the run's folder `tokens`."""

    file: str
    index: str  # the file with its boundaries
    row: int  # of the index
    split: str  # "train" or "holdout"
    start: int  # first token in the file
    length: int  # tokens, with the end-of-text id


@dataclass(frozen=True)
class Trace:
    """One document."""

    doc_id: str
    source: str
    url: str | None
    dump: str | None
    date: str | None
    metadata: str | None
    language: str | None
    shard: int  # position in inputs.json
    file: str
    position: str | None
    place: str | None  # the position in words
    steps: tuple[Step, ...] = ()
    tokens: Tokens | None = None
    chars: int | None = None  # of the text as it was seen last
    kept: bool = False  # by every stage
    text: str | None = field(default=None, repr=False)


def trace(run: Run, doc_id: str) -> list[Trace]:
    """The documents with this id, in the order of their shards. Raises RunError where there is none."""
    recipe = recipes.load(join(run.path, "recipe.yaml"))
    segments = recipes.segments(recipe)
    shards = [Shard.model_validate(entry) for entry in run.inputs]
    found = [_traced(run, segments, shards[index], rows) for index, rows in _rows(run, segments, shards, doc_id)]
    if not found:
        raise RunError(
            f"{run.path} has no document {doc_id!r}. `gristmill inspect` shows ids. Documents that were lost while "
            "they were read (empty, too large, damaged) have counts and no ids."
        )
    return found


Rows = list[tuple[str, dict[str, Any], bool]]  # segment, row, kept


def _rows(run: Run, segments: Sequence[Segment], shards: Sequence[Shard], doc_id: str) -> Iterator[tuple[int, Rows]]:
    """For each shard that has the document: its rows in all segments. Only ids are read of what is not the document."""
    first = segments[0].folder
    for shard in shards:
        rows: Rows = []
        for segment in segments:
            hit = False
            for kind in ("kept", "dropped"):
                row = _row(run, f"{segment.folder}/{kind}/{shard.part}.parquet", doc_id)
                if row is not None:
                    rows.append((segment.folder, row, kind == "kept"))
                    hit = hit or kind == "kept"
            if not hit and (segment.folder == first or rows):
                break
        if rows:
            yield shard.index, rows


def _row(run: Run, name: str, doc_id: str) -> dict[str, Any] | None:
    """The document's row of a Parquet file; None where it has none or is not there."""
    if not exists(join(run.path, name)):
        return None
    with run.open_parquet(name) as parquet:
        for group in range(parquet.num_row_groups):
            ids = parquet.read_row_group(group, columns=["doc_id"])["doc_id"]
            at = pc.index(ids, doc_id).as_py()
            if at >= 0:
                row: dict[str, Any] = parquet.read_row_group(group).slice(at, 1).to_pylist()[0]
                return row
    return None


def _traced(run: Run, segments: Sequence[Segment], shard: Shard, rows: Rows) -> Trace:
    known: dict[str, Any] = {}
    for _, row, _ in rows:
        known |= {name: value for name, value in row.items() if value is not None}
    last_folder, last, kept = rows[-1]
    position = known.get("position")
    text = known.get("text")
    whole = kept and last_folder == segments[-1].folder
    return Trace(
        doc_id=known["doc_id"],
        source=shard.source,
        url=known.get("url"),
        dump=known.get("dump"),
        date=known.get("date"),
        metadata=known.get("metadata"),
        language=known.get("language"),
        shard=shard.index,
        file=join(shard.path, position) if shard.members and position else shard.path,
        position=position,
        place=_place(shard, position),
        steps=tuple(_steps(run, segments, shard, known, rows)),
        tokens=_tokens(run, shard, known["doc_id"], text) if whole else None,
        chars=last.get("chars") or (len(text) if text is not None else None),
        kept=whole,
        text=text,
    )


def _place(shard: Shard, position: str | None) -> str | None:
    """The position in words: "line 3", "line 3 of those that begin behind byte 400"."""
    words = _PLACES.get(shard.format)
    if position is None or words is None:
        return None
    if shard.format in ("warc", "wet"):
        byte, _, number = position.partition(".")
        return words.format(f"{int(byte):,}") + (f", the {int(number)}. of its frame" if number else "")
    start, plus, number = position.partition("+")
    return words.format(number) + f" of those that begin behind byte {int(start):,}" if plus else words.format(position)


def _steps(run: Run, segments: Sequence[Segment], shard: Shard, known: Mapping[str, Any], rows: Rows) -> Iterator[Step]:
    at = {folder: (row, kept) for folder, row, kept in rows}
    gone = False
    for segment in segments:
        row, kept = at.get(segment.folder, ({}, False))
        ran = bool(run.files(f"{segment.folder}/ledger", f"{shard.part}.json"))
        for use in segment.uses:
            reasons: tuple[str, ...] = ()
            if not use.applies(shard.source):
                decision = "other sources"
            elif gone:
                decision = "not reached"
            elif not ran:
                decision = "not run yet"
            elif not kept and row.get("stage") == use.heading:
                decision, gone = "dropped", True
                reasons = tuple(row.get("reasons") or ())
            else:
                decision = "kept"
            readings = tuple(_readings(use, known)) if decision in ("kept", "dropped") else ()
            yield Step(segment.folder, use.heading, decision, reasons, readings)


def _readings(use: StageUse, known: Mapping[str, Any]) -> Iterator[Reading]:
    """What the stage added to the document. Limits that follow the language are in the table, not here."""
    fixed = getattr(use.stage, "by_language", None) is None
    limits: dict[str, list[Rule]] = {}  # of one column there may be a rule for each side
    for rule in use.stage.rules() if fixed else ():
        limits.setdefault(rule.column, []).append(rule)
    for name in dict.fromkeys([*use.stage.adds, *(measure.column for measure in use.stage.measures)]):
        value = known.get(name)
        if name == "text" or (value is None and name not in limits):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        low = max((rule.at_least for rule in limits.get(name, ()) if rule.at_least is not None), default=None)
        high = min((rule.at_most for rule in limits.get(name, ()) if rule.at_most is not None), default=None)
        yield Reading(name, value if isinstance(value, float | str | None) else str(value), low, high)


def _tokens(run: Run, shard: Shard, doc_id: str, text: str | None) -> Tokens | None:
    parts = {shard.part, _moved_to(run, shard, doc_id, text)}
    numbers = {part.split("-")[1] for part in parts}
    size = len((text or "").encode())
    for info in run.token_shards.get("shards", []):
        name = str(info.get("name"))
        if name.split("-")[1] not in numbers:
            continue
        table = run.arrow_table(f"{TOKENS}/{name}.idx")
        same = pc.and_(pc.equal(table["doc_id"], doc_id), pc.equal(table["bytes"], size))
        rows = np.flatnonzero(same.to_numpy())
        if rows.size:
            row = int(rows[0])
            entry = table.slice(row, 1).to_pylist()[0]
            return Tokens(
                file=f"{TOKENS}/{name}.bin",
                index=f"{TOKENS}/{name}.idx",
                row=row,
                split=str(info.get("split")),
                start=int(entry["start"]),
                length=int(entry["length"]),
            )
    return None


def _moved_to(run: Run, shard: Shard, doc_id: str, text: str | None) -> str:
    """The part whose token shards hold the document, where documents are shuffled across shards; else its own."""
    manifest = run.token_shards
    if manifest.get("shuffle") != "documents" or text is None:
        return shard.part
    parts = [of.part for entry in run.inputs if (of := Shard.model_validate(entry)).source == shard.source]
    key = order_keys(pa.array([doc_id]), pa.array([text]), int(manifest["seed"]))[0]
    return parts[range_of(int(key), len(parts))]


def as_json(traces: Sequence[Trace]) -> str:
    """A list of objects."""
    return orjson.dumps([asdict(found) for found in traces], option=orjson.OPT_INDENT_2).decode()


def render(traces: Sequence[Trace], console: Console) -> None:
    """Prints each document: facts, then a row a stage."""
    for found in traces:
        console.print(_facts(found))
        console.print(_table(found))


def _facts(found: Trace) -> Table:
    facts: dict[str, Any] = {name: getattr(found, name) for name in ("doc_id", "source", "url", "dump", "date")}
    facts |= {"language": found.language, "file": found.file, "place": found.place, "shard": found.shard}
    facts |= {"metadata": found.metadata, "characters": found.chars}
    if found.tokens is not None:
        t = found.tokens
        facts["tokens"] = f"{t.file}: {t.length:,} from {t.start:,} ({t.split}), row {t.row:,} of {t.index}"
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value is not None:
            grid.add_row(Text(name, style="dim"), Text(visible(f"{value:,}" if isinstance(value, int) else str(value))))
    return grid


def _table(found: Trace) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("segment", "stage", "decision", "measured"):
        table.add_column(name)
    for step in found.steps:
        decision = f"{step.decision}: {', '.join(step.reasons)}" if step.reasons else step.decision
        style = "bold red" if step.decision == "dropped" else "" if step.decision == "kept" else "dim"
        measured = "  ".join(_shown(step.stage, reading) for reading in step.readings)
        table.add_row(step.segment, step.stage, Text(visible(decision), style=style), Text(visible(measured)))
    return table


def _shown(stage: str, reading: Reading) -> str:
    """`words 34 (50 to 100,000)`"""
    value = reading.value
    text = "-" if value is None else format(value, ",.6g") if isinstance(value, float) else value
    low, high = (None if limit is None else format(limit, ",.6g") for limit in (reading.at_least, reading.at_most))
    limits = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}" if high else ""
    prefix = f"{stage.rpartition('.')[2]}."
    return f"{reading.name.removeprefix(prefix)} {text}" + (f" ({limits})" if limits else "")
