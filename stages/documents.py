"""READ FIRST: what a batch of documents is, and what a stage does to it.

A batch is a `pyarrow.RecordBatch`, one row a document. A stage is a frozen model of settings that is called with a
batch and gives back the documents it keeps and the ones it drops:

    class TooShort(Settings):
        '''Drops documents under `min_chars` characters.'''
        name: ClassVar = "too_short"
        version: ClassVar = 1
        needs: ClassVar = ("text",)
        adds: ClassVar = {"too_short.chars": pa.float64()}
        measures: ClassVar = (Measure("too_short.chars", "characters", log_edges(1, 1e6)),)
        min_chars: int = 200

        def rules(self):
            return (Rule("too_few_chars", "too_short.chars", at_least=self.min_chars),)

        def __call__(self, batch):
            chars = pc.utf8_length(batch["text"]).cast(pa.float64())
            return judge(with_columns(batch, {"too_short.chars": chars}), self.rules())

    TooShort(min_chars=5)(batch).kept

Columns
    doc_id          string, unique within its shard; never a row number
    source          string; the recipe's name for where the document came from
    url, dump, date string, null where unknown
    metadata        string, JSON object of what else the input said of the document; null where nothing
    html            binary; only before `extract`
    text            string; valid UTF-8 (see "Text policy")
    language        string, ISO 639 as fastText's lid.176 names it; language_score float64, 0 to 1
    <stage>.<name>  one column a measure, float64

Text policy, applied once, when a shard is read (`shards.py`):
    - text is valid UTF-8; lone surrogates and NUL become U+FFFD and are counted
    - a line ends at "\\n" and nowhere else, unless the published definition of a rule says otherwise
    - a document over `max_chars` characters is dropped as `too_large`, an empty one as `empty`

Score, then cut: a stage measures every rule for every document, then `judge` applies the limits. The reasons are a
list, all failed rules in order; the first is the one that the ledger books the document under.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

Batch: TypeAlias = pa.RecordBatch

MAX_BATCH_DOCUMENTS = 8_192
MAX_BATCH_BYTES = 32 << 20  # of text or HTML; one larger document is a batch of its own

BASE_FIELDS: dict[str, pa.DataType] = {
    "doc_id": pa.string(),
    "source": pa.string(),
    "url": pa.string(),
    "dump": pa.string(),
    "date": pa.string(),
    "metadata": pa.string(),
}


class Settings(BaseModel):
    """What every settings model shares: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def linear_edges(low: float, high: float, bins: int = 50) -> tuple[float, ...]:
    """`bins` equal bins from low to high: bins + 1 edges."""
    return tuple(float(x) for x in np.linspace(low, high, bins + 1))


def log_edges(low: float, high: float, bins: int = 50) -> tuple[float, ...]:
    """`bins` bins of equal ratio from low to high, low > 0: bins + 1 edges."""
    return tuple(float(x) for x in np.geomspace(low, high, bins + 1))


@dataclass(frozen=True)
class Measure:
    """A number that a stage gives every document. Its histogram has fixed edges, so that shards merge exactly."""

    column: str  # "<stage>.<name>", or a base column such as "language_score"
    unit: str
    edges: tuple[float, ...] = linear_edges(0, 1)  # ascending; values outside are counted as under and over


@dataclass(frozen=True)
class Rule:
    """A limit on one measure. Bounds are inclusive on the side that passes; NaN fails."""

    reason: str  # names the direction: "too_few_words", never "words"
    column: str
    at_least: float | None = None
    at_most: float | None = None
    published: str = ""  # where the limit comes from: paper, section, or code

    def fails(self, values: np.ndarray) -> np.ndarray:
        """values (n,) float64 -> (n,) bool, true where the document breaks the limit."""
        passes = np.ones(len(values), dtype=bool)
        if self.at_least is not None:
            passes &= values >= self.at_least
        if self.at_most is not None:
            passes &= values <= self.at_most
        return ~passes


class BySettings:
    """A class variable of a stage that follows the settings of an instance; of the class, what the defaults give.

    adds: ClassVar[Mapping[str, pa.DataType]] = cast(Any, BySettings(lambda stage: {...}))
    """

    def __init__(self, of: Callable[[Any], Any]) -> None:
        self._of = of

    def __get__(self, stage: Any, owner: Any) -> Any:
        return self._of(owner.model_construct() if stage is None else stage)


def heading(key: str, column: str | None) -> str:
    """How ledger and report call a use of a stage: by its key, and by the name of its columns where that is another."""
    return key if column in (None, key) else f"{key}.{column}"


@dataclass(frozen=True)
class Result:
    """What a stage made of a batch. Kept and dropped together hold each document of the input once."""

    kept: Batch
    dropped: Batch  # the input's columns, the measures, and `reasons`: list<string>, first one first
    counters: Mapping[str, int] = field(default_factory=dict)  # sums over batches, for example lines removed


class Stage(Protocol):
    """What the runner asks of a stage. A stage whose decision needs the whole corpus is a `GlobalStage` instead."""

    name: ClassVar[str]  # the key in a recipe, the module, the heading in the report
    version: ClassVar[int]  # raise it when the same settings give another result; it is part of a shard's key
    needs: ClassVar[tuple[str, ...]]
    adds: ClassVar[Mapping[str, pa.DataType]]
    measures: ClassVar[tuple[Measure, ...]]

    def rules(self) -> Sequence[Rule]: ...

    def __call__(self, batch: Batch) -> Result: ...


class GlobalStage(Protocol):
    """A stage that compares documents with each other: sign (per batch), cluster (once), keep (per batch).

    `sign` gives one row a document, `doc_id` first, and a few hundred bytes at most. `cluster` sees the signatures of
    all shards, in shard order, and gives a table for every shard: one row for each document that it has something
    to say about (`doc_id` string, `reason` string or null to keep, then the columns of `adds`).
    `keep` joins by `doc_id`; documents without a row are kept and get null in the columns of `adds`. The runner
    counts that every row met its document. `needs` and `adds` may depend on the settings of an instance. `rules` judge
    the measures that `cluster` gave, besides its own reasons.

    A stage that is global with some settings only says so by a property `is_global`. A stage names the settings that
    change no result (`without_effect`), which are no part of a key, and those that its signatures do not depend on
    (`after_signing`): a change of them clusters again and signs nothing. Tables are taken one after the other, so that
    `cluster` may make each when it is asked for.

    A stage that edits documents by what it decided has `apply(batch, decisions) -> (Result, rows met)` of its own
    instead of the join, and its decisions have the columns that it likes beside `doc_id`.

    A stage that compares the texts themselves has `groups(sizes)`, which cuts the shards, of (documents, bytes) each,
    in rows of neighbours, and `plan(sizes)`, which says in words what that will take. Its `cluster(signed, texts)` is
    called once a group, in a worker of its own, with batches of the texts of the group's documents in order; it gives
    figures that are sums. Settings that its decisions do not depend on are named by `after_clustering`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    needs: ClassVar[tuple[str, ...]]
    adds: ClassVar[Mapping[str, pa.DataType]]
    measures: ClassVar[tuple[Measure, ...]]

    def rules(self) -> Sequence[Rule]: ...

    def sign(self, batch: Batch) -> Batch: ...

    def cluster(self, signed: Sequence[pa.Table]) -> tuple[Iterable[pa.Table], Mapping[str, Any]]: ...


REASONS = pa.list_(pa.string())


def with_columns(batch: Batch, columns: Mapping[str, Any]) -> Batch:
    """The batch with columns set: replaced where the name exists, else appended in the order given."""
    names, arrays = list(batch.schema.names), list(batch.columns)
    for name, values in columns.items():
        array = values if isinstance(values, pa.Array) else pa.array(values)
        if name in names:
            arrays[names.index(name)] = array
        else:
            names.append(name)
            arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def without_columns(batch: Batch, dropped: Sequence[str]) -> Batch:
    """The batch without the columns named; a name that it lacks is ignored."""
    return batch.select([name for name in batch.schema.names if name not in dropped])


def column(batch: Batch, name: str) -> np.ndarray:
    """A measure column as float64 (n,), null as NaN."""
    return np.asarray(batch.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def cut(batch: Batch, fails: Mapping[str, np.ndarray], counters: Mapping[str, int] | None = None) -> Result:
    """Splits a batch by its failed rules. fails: reason -> (n,) bool, in the order in which reasons are listed.

    Counts for each reason the documents that it names (`rule.<reason>`) and those that it alone removes
    (`only.<reason>`).
    """
    rows = batch.num_rows
    names = list(fails)
    table = np.stack([np.asarray(fails[n], dtype=bool) for n in names]) if names else np.zeros((0, rows), dtype=bool)
    votes = table.sum(axis=0)  # (n,)
    drop = votes > 0
    counted = dict(counters or {})
    for i, name in enumerate(names):
        counted[f"rule.{name}"] = int(table[i].sum())
        counted[f"only.{name}"] = int((table[i] & (votes == 1)).sum())
    if not drop.any():
        return Result(batch, with_columns(batch.slice(0, 0), {"reasons": pa.array([], type=REASONS)}), counted)
    of_document = table[:, drop].T  # (dropped, rules); row-major nonzero gives the rules of each document in order
    offsets = np.concatenate([[0], np.cumsum(of_document.sum(axis=1))]).astype(np.int32)
    values = pa.array(names).take(pa.array(np.nonzero(of_document)[1]))
    reasons = pa.ListArray.from_arrays(pa.array(offsets), values.cast(pa.string()))
    dropped = with_columns(batch.filter(pa.array(drop)), {"reasons": reasons})
    return Result(batch.filter(pa.array(~drop)), dropped, counted)


def judge(batch: Batch, rules: Sequence[Rule], counters: Mapping[str, int] | None = None) -> Result:
    """Applies the limits to the measures that the batch already carries."""
    return cut(batch, {rule.reason: rule.fails(column(batch, rule.column)) for rule in rules}, counters)


def apply_decisions(stage: GlobalStage, batch: Batch, decisions: pa.Table) -> tuple[Result, int]:
    """The `keep` step of a global stage -> (result, how many rows of `decisions` met a document of this batch).

    decisions: the table that `cluster` made for the batch's shard.
    """
    at = pc.index_in(batch["doc_id"], value_set=decisions["doc_id"].combine_chunks())
    columns = {
        name: decisions[name].combine_chunks().take(at).cast(kind) for name, kind in stage.adds.items()
    }  # a null index gives null
    reason = decisions["reason"].combine_chunks().take(at).cast(pa.string())
    decided = with_columns(batch, columns)
    fails = {rule.reason: rule.fails(column(decided, rule.column)) for rule in stage.rules()}
    for name in sorted(pc.unique(reason.drop_null()).to_pylist()):
        fails[name] = pc.fill_null(pc.equal(reason, name), False).to_numpy(zero_copy_only=False)
    return cut(decided, fails), batch.num_rows - at.null_count


def slices(batch: Batch, weights: np.ndarray) -> Iterator[Batch]:
    """The batch in pieces of at most MAX_BATCH_DOCUMENTS documents and MAX_BATCH_BYTES of weight (n,) bytes."""
    start, total = 0, 0
    for i, weight in enumerate(weights):
        if i > start and (i - start >= MAX_BATCH_DOCUMENTS or total + int(weight) > MAX_BATCH_BYTES):
            yield batch.slice(start, i - start)
            start, total = i, 0
        total += int(weight)
    if start < batch.num_rows:
        yield batch.slice(start)
