"""Documents that a stage cannot take: found, dropped as `poison`, and remembered.

A stage that raises on a batch is called again on halves of it, until one document is left that it cannot take. That
document is dropped by the stage with the reason `poison`, and the shard goes on. What kills the process instead is
found the same way from outside (`isolation.py`), which tells the guard in which pieces to hand out a batch.

What was found stands in `<segment>/poison/<part>.json`, is part of later orders for the same shard, and of its key
(`key_with`): what comes after it is another piece than it would be with the document. A fault of the storage, and what
the package itself raises to tell the user something, blames no document and goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from gristmill.stages.documents import REASONS, Batch, Result, with_columns
from gristmill.stages.shards import exists, filesystem, join, publish_bytes, read_bytes
from gristmill.stages.stores import passing

REASON = "poison"
IS_DROPPED = f"dropped as {REASON}"
MAX_POISON = 20  # documents of a shard; more, and it is the stage that is broken, not the documents
READ, WRITE, REMOVALS = "read", "write", "removals"  # what a worker does besides its stages

T = TypeVar("T")
PIECES = 16  # that a range is cut into: 8,192 documents come down to one in four attempts


@dataclass(frozen=True)
class Poisoned:
    """One document that a stage cannot take; without an id, one batch that is left out of the count of removals."""

    doc_id: str
    stage: str
    error: str
    key: str  # of the order that found it: another key, another finding
    batch: int = -1


class StageFault(RuntimeError):
    """A stage cannot take documents, and no one of them is to blame."""

    def __init__(self, stage: str, error: str) -> None:
        super().__init__(stage, error)
        self.stage, self.error = stage, error

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.error}"


class Watch(Protocol):
    """Who looks on while a shard is worked on."""

    def step(self, batch: int, stage: str, first: int, stop: int, doc_id: str) -> None:
        """Rows first to stop of a batch go into a stage now; doc_id where it is one alone."""

    def edges(self, batch: int, stage: str) -> Sequence[int] | None:
        """Where to cut the batch before the stage; None for a batch in one piece."""


class _Nobody:
    def step(self, batch: int, stage: str, first: int, stop: int, doc_id: str) -> None:
        return

    def edges(self, batch: int, stage: str) -> Sequence[int] | None:
        return None


WATCH: ContextVar[Watch] = ContextVar("watch", default=_Nobody())  # noqa: B039


def path_of(order: Any) -> str:
    """Where the findings of an order's shard stand."""
    return join(order.out, order.folder, "poison", f"{order.shard.part}.json")


def load(path: str, keys: Iterable[str]) -> tuple[Poisoned, ...]:
    """The findings under these keys; none where there is no file."""
    wanted = set(keys)
    try:
        entries = orjson.loads(read_bytes(path))
    except FileNotFoundError:
        return ()
    return tuple(found for entry in entries if (found := Poisoned(**entry)).key in wanted)


def key_with(key: str, found: Iterable[Poisoned]) -> str:
    """Key of a piece without the documents that were found under its key; the key itself where there are none."""
    gone = sorted({(one.stage, one.doc_id) for one in found if one.key == key and one.doc_id})
    return xxhash.xxh3_128_hexdigest(orjson.dumps([REASON, key, gone])) if gone else key


def found_in(out: str, folders: Iterable[str]) -> dict[tuple[str, str], tuple[Poisoned, ...]]:
    """Every finding of a run folder: (segment, part) -> findings, whatever their keys."""
    found: dict[tuple[str, str], tuple[Poisoned, ...]] = {}
    for folder in folders:
        where = join(out, folder, "poison")
        fs, inner = filesystem(where)
        for path in fs.ls(inner, detail=False) if fs.isdir(inner) else ():
            name = str(path).rsplit("/", 1)[-1]
            if name.endswith(".json") and not name.startswith("."):
                entries = orjson.loads(read_bytes(join(where, name)))
                found[folder, name.removesuffix(".json")] = tuple(Poisoned(**entry) for entry in entries)
    return found


def cut_of(edges: Sequence[int], first: int, stop: int) -> list[int]:
    """The edges of a batch's pieces, with the piece from first to stop cut again."""
    inner = [first + (stop - first) * i // PIECES for i in range(PIECES + 1)]
    return sorted({*edges, *inner})


def save(path: str, found: Iterable[Poisoned]) -> None:
    """Adds findings to those that stand there."""
    before = [Poisoned(**entry) for entry in orjson.loads(read_bytes(path))] if exists(path) else []
    every = list(dict.fromkeys([*before, *found]))
    publish_bytes(path, orjson.dumps([asdict(one) for one in every], option=orjson.OPT_INDENT_2))


def blames_no_document(error: Exception) -> bool:
    """True for a fault of the storage or the installation, and for what this package says on purpose."""
    return isinstance(error, OSError | ImportError) or passing(error) or type(error).__module__.startswith("gristmill.")


class Guard:
    """Stands between a worker and the stages of one shard."""

    def __init__(self, order: Any) -> None:
        self._order = order
        self._watch = WATCH.get()
        self._known: list[Poisoned] = list(order.poison)
        self._found: list[Poisoned] = []
        self._batch = -1
        self._edges: dict[int, list[int]] = {}  # of batches that `pieces` cut here
        self._at: tuple[str, int, int, Batch] | None = None  # the piece that is out: stage, rows, documents

    @property
    def key(self) -> str:
        """The key of what comes out, now that the poison is known."""
        return key_with(self._order.key, (*self._known, *self._found))

    def pieces(self, stage: str, batch: Batch, dropped: Callable[[Batch], None]) -> Iterator[Batch]:
        """A batch in pieces for a stage that takes a stream. dropped: told the poison that is left out.

        What the stage raises comes to `blame`, and the stream begins anew.
        """
        own = self._edges.get(self._batch, [])
        edges = sorted({0, batch.num_rows, *own, *(self._watch.edges(self._batch, stage) or ())})
        for first, stop in pairwise(edges):
            piece = batch.slice(first, stop - first)
            bad = pc.is_in(piece["doc_id"], value_set=self._ids(stage))
            if pc.any(bad).as_py():
                dropped(piece.filter(bad))
                piece = piece.filter(pc.invert(bad))
            one = piece["doc_id"][0].as_py() if piece.num_rows == 1 else ""
            self._watch.step(self._batch, stage, first, stop, one)
            self._at = stage, first, stop, piece
            yield piece
        self._at = None

    def until_done(self, stream: Callable[[Guard], T]) -> T:
        """What a stage that takes a stream of `pieces` gives, begun anew until the documents to blame are left out."""
        while True:
            try:
                return stream(self)
            except Exception as error:
                self.blame(error)

    def blame(self, error: Exception) -> None:
        """Takes what a stage raised on the piece that is out: cuts it, or finds the document. Raises the error when no
        piece is to blame, StageFault when too many documents are."""
        if self._at is None or blames_no_document(error):
            raise error
        stage, first, stop, piece = self._at
        text = f"{type(error).__name__}: {error}"[:1000]
        if not piece.num_rows:
            raise StageFault(stage, text) from error
        if piece.num_rows > 1:
            edges = self._edges.get(self._batch, [])
            cut = cut_of(edges, first, stop)
            self._edges[self._batch] = cut if cut != edges else list(range(first, stop + 1))
        else:
            self._blamed(Poisoned(piece["doc_id"][0].as_py(), stage, text, self._order.key))
        self._batch, self._at = -1, None

    def _blamed(self, one: Poisoned) -> None:
        self._found.append(one)
        if len(self._found) + len(self._known) > MAX_POISON:
            raise StageFault(
                one.stage, f"cannot take more than {MAX_POISON} documents of this shard. The last: {one.error}"
            )

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a source, counted."""
        waiting = iter(source)
        while True:
            self._watch.step(self._batch + 1, READ, 0, 0, "")
            batch = next(waiting, None)
            if batch is None:
                self._watch.step(self._batch + 1, WRITE, 0, 0, "")
                return
            self._batch += 1
            yield batch

    def call(self, stage: str, batch: Batch, function: Callable[[Batch], Result]) -> Result:
        """What a stage makes of a batch, the documents that it cannot take dropped as `poison`."""
        results, poison = self._apply(stage, batch, function)
        if len(results) == 1 and not poison:
            return results[0]
        kept = _joined([result.kept for result in results])
        dropped = _joined([result.dropped for result in results])
        counters: dict[str, int] = {}
        for result in results:
            for name, count in result.counters.items():
                counters[name] = counters.get(name, 0) + int(count)
        if poison:
            dropped = _joined([dropped, *(_as_dropped(rows, dropped.schema) for rows in poison)])
            count = sum(rows.num_rows for rows in poison)
            counters |= {f"rule.{REASON}": count, f"only.{REASON}": count}
        return Result(kept, dropped, counters)

    def sign(self, stage: str, batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
        """The signatures of a batch, without the documents that cannot be signed."""
        return _joined(self._apply(stage, batch, function)[0])

    def lost(self, stage: str, ids: pa.Array) -> int:
        """How many of these documents the stage is not going to see."""
        return int(pc.sum(pc.is_in(ids, value_set=self._ids(stage))).as_py() or 0)

    def counts(self) -> bool:
        """False for a batch whose dropped documents must not go on for the count of removals."""
        self._watch.step(self._batch, REMOVALS, 0, 0, "")
        return not any(one.batch == self._batch for one in self._known)

    def unsafe(self) -> pa.Array:
        """Ids that no later stage may see either."""
        return pa.array([one.doc_id for one in (*self._known, *self._found)], pa.string())

    def publish(self) -> list[str]:
        """Writes down what was found now -> a line for each document dropped, found now or known before."""
        if self._found:
            save(path_of(self._order), self._found)
        return [
            f"{self._order.shard.path}: document {one.doc_id} {IS_DROPPED} by stage {one.stage}: {one.error}"
            for one in (*self._known, *self._found)
            if one.doc_id
        ]

    def _ids(self, stage: str) -> pa.Array:
        ids = [one.doc_id for one in (*self._known, *self._found) if one.stage == stage and one.doc_id]
        return pa.array(ids, pa.string())

    def _apply(self, stage: str, batch: Batch, function: Callable[[Batch], T]) -> tuple[list[T], list[Batch]]:
        edges = self._watch.edges(self._batch, stage) or (0, batch.num_rows)
        results: list[T] = []
        poison: list[Batch] = []
        for first, stop in pairwise(edges):
            self._piece(stage, batch.slice(first, stop - first), first, function, results, poison)
        return results, poison

    def _piece(
        self,
        stage: str,
        piece: Batch,
        first: int,
        function: Callable[[Batch], T],
        results: list[T],
        poison: list[Batch],
    ) -> None:
        ids, rows = self._ids(stage), piece.num_rows
        if len(ids):
            bad = pc.is_in(piece["doc_id"], value_set=ids)
            if pc.any(bad).as_py():
                poison.append(piece.filter(bad))
                piece = piece.filter(pc.invert(bad))
        one = piece["doc_id"][0].as_py() if piece.num_rows == 1 else ""
        self._watch.step(self._batch, stage, first, first + rows, one)
        try:
            results.append(function(piece))
        except Exception as error:
            if blames_no_document(error):
                raise
            self._halve(stage, piece, first, function, results, poison, f"{type(error).__name__}: {error}"[:1000])

    def _halve(
        self,
        stage: str,
        piece: Batch,
        first: int,
        function: Callable[[Batch], T],
        results: list[T],
        poison: list[Batch],
        error: str,
    ) -> None:
        if not piece.num_rows:
            raise StageFault(stage, error)
        if piece.num_rows > 1:
            half = piece.num_rows // 2
            self._piece(stage, piece.slice(0, half), first, function, results, poison)
            self._piece(stage, piece.slice(half), first + half, function, results, poison)
            return
        self._blamed(Poisoned(piece["doc_id"][0].as_py(), stage, error, self._order.key))
        self._piece(stage, piece, first, function, results, poison)  # as poison, and the result for no document


def _as_dropped(rows: Batch, schema: pa.Schema) -> Batch:
    """Documents dropped as poison, with the columns that the stage gives what it drops."""
    reasons = pa.array([[REASON]] * rows.num_rows, REASONS)
    given = with_columns(rows, {"reasons": reasons})
    columns = [
        given[field.name].cast(field.type) if field.name in given.schema.names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined(parts: Sequence[Batch]) -> Batch:
    """Batches of one schema as one."""
    if len(parts) == 1:
        return parts[0]
    table = pa.Table.from_batches(parts).combine_chunks()
    return table.to_batches()[0] if table.num_rows else parts[0].slice(0, 0)


def mask_of(ids: pa.Array, among: pa.Array) -> np.ndarray:
    """(n,) bool: which ids are among others."""
    return np.asarray(pc.is_in(ids, value_set=among).to_numpy(zero_copy_only=False), bool)
