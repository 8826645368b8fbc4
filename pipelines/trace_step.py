"""Which documents a training step saw: `gristmill trace --train RUN --step N`.

The order is a function, so nothing was logged for this: the plan is made again from run.json, and its windows of that
step lead to documents. Source, URL and measures are those of the run in which the token shards lie, or of their folder
`measures`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.mixtures.plan import Plan
from gristmill.pipelines.inspect import visible
from gristmill.stages.settings_file import SettingsError
from gristmill.tokenize.measures import rows_of
from gristmill.tokenize.shards import TokenError, TokenSet

SHOWN = ("url", "language")  # on the terminal, beside the ids; --json has all


@dataclass(frozen=True)
class Seen:
    """A document, or a part of one, in a window of a step."""

    position: int  # of the window, in the run
    source: str  # of the mixture
    epoch: int
    window: int  # of the source
    doc_id: str
    shard: str  # of tokens
    row: int  # of the shard's index
    first: int  # place in the window of its first token here
    tokens: int  # here
    known: dict[str, Any] = field(default_factory=dict)  # url, language and measures, where they are known


def documents_of_step(train_folder: str, step: int) -> tuple[Plan, list[Seen]]:
    """-> (plan of the training run, what its step saw, in order). Steps count from 1, as in metrics.jsonl.

    Raises SettingsError for a step that the run does not have.
    """
    from gristmill.trainer.config import RUN_FILE, Run
    from gristmill.trainer.feed import open_feed

    run = Run.load(Path(train_folder) / RUN_FILE)
    config = run.config
    if not 1 <= step <= config.total_steps:
        raise SettingsError(f"--step {step:,}: {train_folder} has the steps 1 to {config.total_steps:,}.")
    feed = open_feed(run, TokenSet.open(run.tokens))
    plan, begin = feed.plan, (step - 1) * config.batch_windows
    if feed.trunk is not None and begin < feed.trunk.windows:
        raise SettingsError(
            f"--step {step:,}: {train_folder} was forked after step {feed.trunk.step:,}; the steps before are those of "
            f"{Path(feed.trunk.checkpoint).parents[1]}."
        )
    return plan, with_measures(plan, list(_seen(plan, begin, begin + config.batch_windows, feed.begin)))


def _seen(plan: Plan, begin: int, end: int, shift: int) -> Iterator[Seen]:
    """shift: positions of the run before the plan begins."""
    source, epoch, window = plan.order.block(begin - shift, end - shift)
    for i in range(end - begin):
        name = plan.sources[source[i]]
        held, at = plan.tokens.sources[name], 0
        for start, length in plan.pieces(name, int(window[i])):
            bounds = held.bounds(start, length).tolist()
            marks = [0, *(mark for mark in bounds if mark > 0), length]
            for low, high in pairwise(marks):
                doc_id, shard, row = held.document_at(start + low)
                where = (begin + i, name, int(epoch[i]), int(window[i]))
                yield Seen(*where, doc_id, shard, row, at + low, high - low)
            at += length


def with_measures(plan: Plan, seen: Sequence[Seen]) -> list[Seen]:
    """The same with what is known of each document; as they are where nothing is."""
    by_shard: dict[str, list[int]] = {}
    for i, one in enumerate(seen):
        by_shard.setdefault(one.shard, []).append(i)
    out = list(seen)
    for shard, indices in by_shard.items():
        try:
            rows = rows_of(plan.tokens, shard, [seen[i].row for i in indices])
        except TokenError:
            continue  # shards of another program, or a folder that was copied without its measures
        for i, row in zip(indices, rows, strict=True):
            out[i] = Seen(**{**asdict(seen[i]), "known": row})
    return out


def as_json(seen: Sequence[Seen]) -> str:
    """A list of objects."""
    return orjson.dumps([asdict(one) for one in seen], option=orjson.OPT_INDENT_2, default=str).decode()


def render(seen: Sequence[Seen], console: Console, limit: int) -> None:
    """Prints a row a document."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("position", "source", "epoch", "window", "tokens"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name in ("document", *SHOWN):
        table.add_column(name, overflow="fold")
    for one in seen[:limit]:
        numbers = (f"{one.position:,}", one.source, f"{one.epoch}", f"{one.window:,}", f"{one.tokens:,}")
        texts = (one.doc_id, *(str(one.known.get(name) or "") for name in SHOWN))
        table.add_row(*numbers, *(Text(visible(text)) for text in texts))
    console.print(table)
    if len(seen) > limit:
        console.print(f"... {len(seen) - limit:,} more; -n 0 prints all.")
    if not any(one.known for one in seen):
        console.print("URLs and measures are not known: the token shards lie in no run, and have no folder `measures`.")
    else:
        console.print("--json has every measure of each document.")
