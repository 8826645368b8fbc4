"""What a stage edits, before and after: `gristmill inspect RUN --stage c4 --diff`.

    for edit in edits(open_run("out/demo/run"), "c4", n=3): ...

Nothing of this was written down during the run: the documents are taken from where the stage's segment took them, go
through the stages before it again, and then through the stage. The same settings and models give the same edit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.inspect import Filter, check_names, pick, spread, visible
from gristmill.pipelines.open_run import Run, RunError
from gristmill.pipelines.recipe import Recipe, Segment, StageUse, stage_in
from gristmill.pipelines.upstream import upstream_of
from gristmill.pipelines.work import decided
from gristmill.stages.documents import Batch
from gristmill.stages.shards import Shard, ShardError, join
from gristmill.stages.stores import local_copy, local_model

SHARDS = 8  # that are looked into, spread over the run
LOOKED_AT = 400  # documents of each, at most
CONTEXT_LINES = 2  # around a change
LINE_CHARS = 300  # shown of a line in a terminal
SIGNS = {"same": ("  ", "dim"), "before": ("- ", "red"), "after": ("+ ", "green"), "cut": ("  ", "dim italic")}


@dataclass(frozen=True)
class Edit:
    """A document that a stage changed."""

    doc_id: str
    source: str
    url: str | None
    before: str
    after: str
    dropped: bool  # by the stage, after the edit


def edits(
    run: Run, stage: str, source: str | None = None, text: str | None = None, n: int = 10, seed: int = 0
) -> list[Edit]:
    """Up to n documents whose text the stage changed, of those that its segment kept. text: words in the kept text.

    Looks at LOOKED_AT documents of SHARDS shards at most, chosen by hash. Raises RunError for a stage that the run
    does not have or that has nothing to edit, and where the input is no longer there.
    """
    check_names(run, stage, None, source, kept=True)
    folder = run.segment_of(stage)
    recipe = recipes.load(local_copy(join(run.path, "recipe.yaml")))
    segment, use = _use(recipe, folder, stage)
    by_part = {f"{folder}/kept/{s.part}.parquet": s for s in map(Shard.model_validate, run.inputs)}
    parts = [p for p in run.parts("kept", folder) if p in by_part and use.applies(by_part[p].source)]
    if source is not None:
        parts = [p for p in parts if by_part[p].source == source]
    found: list[Edit] = []
    for at in spread(len(parts), SHARDS):
        rows = pick(run, [parts[at]], Filter(source=source, text=text), LOOKED_AT, seed, row_groups=2)
        ids = [row["doc_id"] for row in rows]
        found += sorted(
            _of_shard(run, recipe, segment, use, by_part[parts[at]], ids), key=lambda e: ids.index(e.doc_id)
        )
        if len(found) >= n:
            break
    return found[:n]


def _use(recipe: Recipe, folder: str, stage: str) -> tuple[Segment, StageUse]:
    """stage: a label of the ledger, which may name the segment, or how often it stands there (` #2`)."""
    name, _, number = stage.partition(" ")
    at = int(number.rpartition("#")[2]) - 1 if "#" in number else 0
    for segment in recipes.segments(recipe):
        uses = [use for use in segment.uses if use.heading == name]
        if segment.folder == folder and at < len(uses):
            return segment, uses[at]
    raise RunError(f"{stage!r} edits nothing: it is no stage of the recipe.")


def _of_shard(
    run: Run, recipe: Recipe, segment: Segment, use: StageUse, shard: Shard, ids: Sequence[str]
) -> Iterator[Edit]:
    wanted = pa.array(ids, pa.string())
    upstream = upstream_of(recipe, run.path, segment.folder)
    uses = [u for u in segment.uses if u.applies(shard.source)]
    uses = uses[: next(i for i, u in enumerate(uses) if u is use) + 1]
    stages = [local_model(stage_in(recipe, u, run.path)) for u in uses]
    try:
        for batch in upstream.batches(shard):
            before = batch.filter(pc.is_in(batch["doc_id"], value_set=wanted))
            for earlier, stage in zip(uses[:-1], stages[:-1], strict=True):
                before = _result(run, segment, earlier, stage, shard, before)[0]
            if before.num_rows:
                yield from _changed(before, _result(run, segment, use, stages[-1], shard, before))
    except ShardError as error:
        raise RunError(f"What stage {use.heading} was given is no longer there: {error}") from error


def _result(run: Run, segment: Segment, use: StageUse, stage: Any, shard: Shard, batch: Batch) -> tuple[Batch, Batch]:
    """Kept and dropped documents."""
    if use is not segment.gate:
        result = stage(batch)
        return result.kept, result.dropped
    with run.open_parquet(f"{segment.folder}/cluster/{shard.part}.parquet") as file:
        decisions = file.read()
    own = decisions.filter(pc.is_in(decisions["doc_id"], value_set=batch["doc_id"]))
    result, _ = decided(stage, batch, own)
    return result.kept, result.dropped


def _changed(before: Batch, after: tuple[Batch, Batch]) -> Iterator[Edit]:
    if "text" not in before.schema.names:  # `extract`: the text is new, and the original is shown by the report
        return
    texts = dict(zip(before["doc_id"].to_pylist(), before["text"].to_pylist(), strict=True))
    for documents, dropped in zip(after, (False, True), strict=True):
        names = ("doc_id", "source", "url", "text")
        for row in documents.select([name for name in names if name in documents.schema.names]).to_pylist():
            old, new = texts[row["doc_id"]], row["text"]
            if old is not None and new is not None and old != new:
                yield Edit(row["doc_id"], row["source"], row.get("url"), old, new, dropped)


# In a terminal


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Lines with what became of them: ("same" | "before" | "after" | "cut", line). Long equal stretches are cut."""
    one, other = before.split("\n"), after.split("\n")
    out: list[tuple[str, str]] = []
    groups = list(difflib.SequenceMatcher(None, one, other, autojunk=False).get_grouped_opcodes(CONTEXT_LINES))
    at = 0
    for group in groups:
        out += _skipped(group[0][1] - at)
        for kind, a, b, c, d in group:
            if kind == "equal":
                out += [("same", line) for line in one[a:b]]
                continue
            out += [("before", line) for line in one[a:b]] + [("after", line) for line in other[c:d]]
        at = group[-1][2]
    return out + _skipped(len(one) - at)


def _skipped(count: int) -> list[tuple[str, str]]:
    return [("cut", f"… {count:,} equal {'line' if count == 1 else 'lines'} …")] if count else []


def render(found: Iterable[Edit], stage: str, console: Console) -> None:
    """Prints each edit as a panel of changed lines."""
    shown = 0
    for shown, edit in enumerate(found, 1):  # noqa: B007
        body = Text()
        for kind, line in changes(edit.before, edit.after):
            sign, style = SIGNS[kind]
            rest = f" … {len(line) - LINE_CHARS:,} more characters" if len(line) > LINE_CHARS else ""
            body.append(f"{sign}{visible(line[:LINE_CHARS])}{rest}\n", style=style)
        facts = Text(visible("  ".join(filter(None, (edit.doc_id, edit.source, edit.url)))), style="dim")
        size = Text(f"{len(edit.before):,} characters before, {len(edit.after):,} after", style="dim")
        title = Text(visible(f"{stage}: edited" + (", then dropped" if edit.dropped else "")), style="bold")
        console.print(Panel(Group(facts, size, Text(), body), title=title, title_align="left", border_style="dim"))
    if not shown:
        console.print(
            f"Stage {stage} changed the text of none of the documents that were looked at: up to {LOOKED_AT:,} of each "
            f"of {SHARDS} shards, of those that its segment kept."
        )


def as_json_lines(found: Iterable[Edit]) -> str:
    """One JSON object a line, with the whole texts."""
    return "".join(orjson.dumps(asdict(edit)).decode() + "\n" for edit in found)
