"""Which documents hold which evaluation items: `gristmill contamination RUN|TOKENS --tasks FILE`.

    found = check("out/demo/run", {"arc": EvaluationSet(files=("eval/arc.jsonl",))})
    found.items["arc/17"].examples          # documents that hold it, with the matching text
    found.rows()                            # by benchmark: items, found, unchecked

Documents are those that a run kept, or the decoded documents of token shards, training and held out. What the stage
`decontaminate` wrote down during a run is read by `recorded`, in the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from gristmill.pipelines.open_run import Run, RunError, open_run
from gristmill.stages.decontaminate import Decontaminate
from gristmill.stages.documents import MAX_BATCH_BYTES, MAX_BATCH_DOCUMENTS, Batch
from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import exists, join, publish_bytes

EXAMPLES = 5  # documents of an item that are named; all are counted
COLUMNS = ("benchmark", "items", "found", "share", "cannot be checked", "ignored n-grams")


@dataclass
class ItemFound:
    """One evaluation item that stands in documents."""

    item: str  # benchmark/name
    documents: int = 0
    hits: int = 0  # the most in one document; so are the next two
    overlap: float = 0.0
    containment: float = 0.0
    examples: list[dict[str, Any]] = field(default_factory=list)  # doc_id, source, url, where, text


@dataclass
class Contamination:
    """What was found."""

    path: str
    documents: int = 0  # looked at
    contaminated: int = 0
    items: dict[str, ItemFound] = field(default_factory=dict)
    facts: dict[str, dict[str, int]] = field(default_factory=dict)  # by benchmark, as `Index.facts` has them
    unchecked: list[dict[str, str]] = field(default_factory=list)  # items that no measure can find, and why
    not_listed: int = 0  # matches in documents that hold more items than are written down
    problem: str = ""  # why facts and unchecked are not known

    def add(self, row: Mapping[str, Any], where: str) -> None:
        """A document with `decontaminate.matches`. where: "kept", "dropped", or the split of tokens."""
        over = [match for match in orjson.loads(row["decontaminate.matches"]) if match["over"]]
        self.contaminated += bool(over)
        for match in over:
            entry = self.items.setdefault(match["item"], ItemFound(match["item"]))
            entry.documents += 1
            entry.hits = max(entry.hits, match["hits"])
            entry.overlap = max(entry.overlap, match["overlap"])
            entry.containment = max(entry.containment, match["containment"])
            if len(entry.examples) < EXAMPLES:
                known = {name: row.get(name) for name in ("doc_id", "source", "url")}
                entry.examples.append({**known, "where": where, "text": match["text"]})

    def worst(self) -> list[ItemFound]:
        """The items, those in most documents first."""
        return sorted(self.items.values(), key=lambda i: (-i.documents, -i.hits, i.item))

    def rows(self) -> list[dict[str, Any]]:
        """By benchmark; None where the evaluation files could not be read."""
        found: dict[str, int] = {}
        for item in self.items:
            name = item.split("/", 1)[0]
            found[name] = found.get(name, 0) + 1
        out = []
        for name in dict.fromkeys([*self.facts, *found]):
            facts = self.facts.get(name)
            count = found.get(name, 0)
            values: tuple[float | None, ...] = (None,) * 4
            if facts is not None:
                values = (facts["items"], count / max(1, facts["items"]), facts["unchecked"], facts["ignored_ngrams"])
            row = (name, values[0], count, *values[1:])
            out.append(dict(zip(COLUMNS, row, strict=True)))
        return out

    def describe(self, stage: Decontaminate) -> None:
        """Fills in what the evaluation files say. A set that cannot be read any more is a problem, not an error."""
        try:
            index = stage.index()
        except SettingsError as error:
            self.problem = str(error)
            return
        self.facts = index.facts()
        self.unchecked = [{"item": index.items[i].label, "why": why} for i, why in sorted(index.unchecked.items())]


def stage_of(run: Run) -> Decontaminate | None:
    """The `decontaminate` of a run's recipe, the first where there are several; None where there is none."""
    uses = run.recipe.get("stages")
    for use in uses if isinstance(uses, list) else []:
        if isinstance(use, dict) and "decontaminate" in use:
            try:
                return Decontaminate(**(use["decontaminate"] or {}))
            except ValidationError as error:
                raise RunError(f"{run.path}: this version refuses the recipe's `decontaminate`: {error}") from error
    return None


def sets_of(tasks: Sequence[str]) -> dict[str, EvaluationSet]:
    """`FILE` or `NAME=FILE`, several with one name together. Raises SettingsError."""
    files: dict[str, list[str]] = {}
    for task in tasks:
        name, equals, path = task.partition("=")
        if not equals or "/" in name:
            name, path = PurePosixPath(task).name.split(".")[0], task
        files.setdefault(name, []).append(path)
    return {name: EvaluationSet(files=tuple(paths)) for name, paths in files.items()}


def check(path: str, sets: Mapping[str, EvaluationSet]) -> Contamination:
    """Looks through the documents that a run kept, or through token shards.

    sets: what to look for; that of the run's `decontaminate` where empty, with its limits in any case. Raises RunError
    where there is neither run nor tokens, SettingsError where there is nothing to look for.
    """
    tokens = exists(join(path, "shards.json"))
    run = None if tokens else open_run(path)
    own = stage_of(run) if run is not None else None
    stage = (own or Decontaminate()).model_copy(update={"mode": "mark", **({"sets": dict(sets)} if sets else {})})
    if not stage.sets:
        raise SettingsError(
            f"{path}: there is nothing to look for: name evaluation files with --tasks. "
            "A run whose recipe has `decontaminate` is checked with the sets of that."
        )
    stage.index()
    out = Contamination(path)
    for where, batch in _tokens(path) if run is None else _kept(run):
        result = stage(batch)
        out.documents += batch.num_rows
        out.not_listed += result.counters["matches_not_listed"]
        for row in _matching(result.kept):
            out.add(row, where)
    out.describe(stage)
    return out


def recorded(run: Run) -> Contamination | None:
    """What `decontaminate` wrote down during a run, of kept and dropped documents; None without the stage.

    Reads two columns of every document.
    """
    book = run.stages().get("decontaminate")
    if book is None:
        return None
    out = Contamination(run.path, documents=book.read.documents)
    out.not_listed = book.counters.get("matches_not_listed", 0)
    for where in ("kept", "dropped"):
        for part in run.parts(where):
            with run.open_parquet(part) as file:
                wanted = ("doc_id", "source", "url", "stage", "decontaminate.matches")
                names = [name for name in wanted if name in file.schema_arrow.names]
                if "decontaminate.matches" in names:
                    for batch in file.iter_batches(columns=names):
                        for row in _matching(batch):
                            out.add(row, where)
    try:
        stage = stage_of(run)
    except RunError as error:
        stage, out.problem = None, str(error)
    if stage is not None:
        out.describe(stage)
    return out


def _matching(batch: Batch) -> Iterator[dict[str, Any]]:
    """Rows of the documents that hold something, without their text."""
    found = batch.filter(pc.is_valid(batch["decontaminate.matches"]))
    names = [name for name in found.schema.names if name != "text"]
    yield from found.select(names).to_pylist()


def _kept(run: Run) -> Iterator[tuple[str, Batch]]:
    for part in run.parts("kept"):
        with run.open_parquet(part) as file:
            names = [name for name in ("doc_id", "source", "url", "text") if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=names):
                yield "kept", batch


def _tokens(path: str) -> Iterator[tuple[str, Batch]]:
    """The documents of token shards, decoded, in batches."""
    from tokenizers import Tokenizer

    from gristmill.tokenize.shards import TokenSet

    tokens = TokenSet.open(path)
    tokenizer = Tokenizer.from_file(str(tokens.tokenizer_path))
    for split, sources in (("train", tokens.sources), ("holdout", tokens.holdout)):
        for name, source in sources.items():
            ids: list[str] = []
            texts: list[str] = []
            size = 0
            for doc_id, document, count in source.documents():
                ids.append(doc_id)
                texts.append(tokenizer.decode(document.tolist(), skip_special_tokens=True))
                size += count
                if size >= MAX_BATCH_BYTES or len(ids) >= MAX_BATCH_DOCUMENTS:
                    yield split, _batch(ids, name, texts)
                    ids, texts, size = [], [], 0
            if ids:
                yield split, _batch(ids, name, texts)


def _batch(ids: list[str], source: str, texts: list[str]) -> Batch:
    columns = {"doc_id": pa.array(ids, pa.string()), "source": pa.array([source] * len(ids), pa.string())}
    return pa.RecordBatch.from_pydict({**columns, "text": pa.array(texts, pa.string())})


def write_items(found: Contamination, path: str) -> None:
    """The table of contaminated items, to leave out of a score: one JSON object a line."""
    rows = [asdict(item) for item in found.worst()]
    publish_bytes(path, b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))


def as_json(found: Contamination) -> str:
    body = {
        **{name: getattr(found, name) for name in ("path", "documents", "contaminated", "not_listed")},
        "benchmarks": found.rows(),
        "items": [asdict(item) for item in found.worst()],
        "unchecked": found.unchecked,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()
