"""How far a run is: `gristmill status RUN`, also while it runs, from any machine that sees the folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import TOKENS, Run
from gristmill.pipelines.plan import make_plan
from gristmill.pipelines.run import ledger_done
from gristmill.stages.shards import Shard, join, read_bytes
from gristmill.stages.stores import local_copy


@dataclass(frozen=True)
class SegmentStatus:
    """One row: how many shards of a segment are done."""

    segment: str
    stages: str
    done: int
    shards: int
    read: int  # documents
    kept: int
    failed: int
    seconds: float  # of workers


def status(run: Run) -> list[SegmentStatus]:
    """A row a segment, in order; tokens last. Raises SettingsError when the folder has no readable recipe."""
    recipe = recipes.load(local_copy(join(run.path, "recipe.yaml")))
    shards = [Shard.model_validate(entry) for entry in orjson.loads(read_bytes(join(run.path, "inputs.json")))]
    plan = make_plan(recipe, shards)
    rows = []
    todo = [(s.segment.folder, ", ".join(u.heading for u in s.segment.uses), s.shards) for s in plan.segments]
    if plan.tokenizer is not None:
        todo.append((TOKENS, "tokenize", plan.tokens))
    for folder, stages, keys in todo:
        current = {s.index for s, key in zip(shards, keys, strict=True) if ledger_done(run.path, folder, s, key)}
        books = [ledger for ledger in run.ledgers(folder) if ledger.shard in current and ledger.stages]
        rows.append(
            SegmentStatus(
                segment=folder,
                stages=stages,
                done=len(current),
                shards=len(shards),
                read=sum(b.stages[0].read.documents for b in books),
                kept=sum(b.stages[-1].kept.documents for b in books),
                failed=sum(a.documents for b in books for s in b.stages for a in s.failed.values()),
                seconds=round(sum(b.seconds for b in books), 3),
            )
        )
    return rows


def as_json(rows: list[SegmentStatus]) -> str:
    return orjson.dumps([asdict(row) for row in rows], option=orjson.OPT_INDENT_2).decode()
