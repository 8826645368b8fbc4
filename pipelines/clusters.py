"""The documents of one cluster of duplicates, with what differs: `gristmill inspect RUN --cluster ID`.

A cluster is named by the doc_id of the document that stayed (`<stage>.cluster`). The texts are those that the stage
compared: what the segment before it kept, or the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.inspect import visible
from gristmill.pipelines.open_run import Run, RunError
from gristmill.pipelines.report.dedupe import pair
from gristmill.pipelines.upstream import upstream_of
from gristmill.stages.shards import Shard, ShardError, join
from gristmill.stages.stores import local_copy

STYLES = {"same": "", "copy": "strike red", "stays": "green", "cut": "dim italic"}


@dataclass(frozen=True)
class Member:
    """One document of a cluster."""

    segment: str
    part: str
    stays: bool
    row: dict[str, Any]  # doc_id, source, url, text


def members(run: Run, name: str, n: int) -> list[Member]:
    """The document that stayed, where it is of this run, then up to n - 1 of those that went for it, by doc_id.

    Raises RunError when no stage of the run has a cluster of that name.
    """
    out = [member for segment in run.segments for member in _of_segment(run, segment, name)]
    if not out:
        raise RunError(
            f"This run has no cluster {name!r}. A cluster has the name of the document that stayed: the column "
            "`minhash.cluster` or `exact.cluster` of a document, see `gristmill inspect`."
        )
    out.sort(key=lambda m: (not m.stays, m.segment, m.row["source"], m.row["doc_id"]))
    chosen = out[:n]
    texts = {key: row for segment, part in {(m.segment, m.part) for m in chosen} for key, row in _texts(
        run, segment, part, [m.row["doc_id"] for m in chosen]
    )}  # fmt: skip
    return [
        Member(m.segment, m.part, m.stays, {**m.row, **texts.get((m.segment, m.part, m.row["doc_id"]), {})})
        for m in chosen
    ]


def _of_segment(run: Run, segment: str, name: str) -> Iterator[Member]:
    for kind in ("kept", "dropped"):
        for part in run.parts(kind, segment):
            with run.open_parquet(part) as file:
                column = next((c for c in file.schema_arrow.names if _is_cluster(c, segment)), None)
                if column is None:
                    continue
                names = ["doc_id", "source", "url", column]
                table = file.read(columns=names)
            for row in table.filter(pc.equal(table[column], name)).select(names[:3]).to_pylist():
                # A later stage of the segment may have dropped the one that stayed.
                yield Member(segment, part.rsplit("/", 1)[-1], row["doc_id"] == name, row)


def _is_cluster(column: str, segment: str) -> bool:
    stage, _, rest = column.partition(".")
    return rest == "cluster" and segment.partition("-")[2] == stage


def _texts(run: Run, segment: str, part: str, ids: list[str]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    recipe = recipes.load(local_copy(join(run.path, "recipe.yaml")))
    upstream = upstream_of(recipe, run.path, segment)
    shard = next(s for s in map(Shard.model_validate, run.inputs) if f"{s.part}.parquet" == part)
    try:
        for rows in upstream.rows(shard, pa.array(ids, pa.string()), ("doc_id", "text")):
            for row in rows.to_pylist():
                yield (segment, part, row["doc_id"]), {"text": row["text"]}
    except ShardError:  # the part, or the input, is no longer there: the cluster is shown without its texts
        return


def render(found: list[Member], console: Console) -> None:
    """The document that stayed, then what each other one has that it has not, and lacks."""
    first = found[0] if found[0].stays else None
    for member in found:
        row = member.row
        facts = Text(visible("  ".join(str(row[k]) for k in ("doc_id", "source", "url") if row.get(k))))
        title = Text("stayed" if member.stays else "went", style="bold green" if member.stays else "bold red")
        if row.get("text") is None:
            body = Text("(The folder no longer has its text.)", style="dim italic")
        elif first is None or member is first or first.row.get("text") is None:
            body = Text(visible(row["text"][:2_000]))
        else:
            compared = pair(row, first.row)
            title.append(f", {compared['same']:.0%} of their beginnings the same")
            body = Text()
            for kind, text in compared["parts"]:
                body.append(f" … {text} … " if kind == "cut" else visible(text), style=STYLES[kind])
        console.print(Panel(Group(facts, Text(), body), title=title, title_align="left", border_style="dim"))
    if first is None:
        console.print("The document that stayed is of an earlier run.")
    console.print("Struck through: only in the document that went. Green: only in the one that stayed.")


def as_json_lines(found: list[Member]) -> str:
    rows = ({"stays": m.stays, "segment": m.segment, **m.row} for m in found)
    return "".join(orjson.dumps(row).decode() + "\n" for row in rows)
