"""The ledger: what every stage read, kept, dropped and failed to read, in sums that must balance.

One `ShardLedger` is written for each shard of each segment, last, when everything that it speaks of is on disk.

    read = kept + dropped (by first reason) + failed (by error) + edited      in documents, characters and bytes

`edited` is what editing took away from documents that were kept (its documents are always 0; negative where text
grew). Before `extract` a document is HTML: its bytes count, its characters are 0. All figures are sums, so shards
merge exactly; no mean is stored.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import BaseModel, ConfigDict, Field

from gristmill.stages.documents import Batch, Measure, column
from gristmill.stages.removals import Removals


class LedgerError(ValueError):
    """A ledger does not balance, or is not what was written."""


class _Sums(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Amount(_Sums):
    """A number of documents with their size."""

    documents: int = 0
    chars: int = 0
    bytes: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            documents=self.documents + other.documents,
            chars=self.chars + other.chars,
            bytes=self.bytes + other.bytes,
            tokens=self.tokens + other.tokens,
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            documents=self.documents - other.documents,
            chars=self.chars - other.chars,
            bytes=self.bytes - other.bytes,
            tokens=self.tokens - other.tokens,
        )

    def __str__(self) -> str:
        text = f"{self.documents:,} documents, {self.chars:,} characters, {self.bytes:,} bytes"
        return text + (f", {self.tokens:,} tokens" if self.tokens else "")


class Histogram(_Sums):
    """Counts of a measure between fixed edges; `kept` and `dropped` are (bins + 2): under, bins, over.

    The characters of the same documents are counted beside them: of kept ones as the stage left them, of dropped ones
    as they came in. Ledgers of earlier versions lack these.
    """

    unit: str = ""
    edges: list[float]
    kept: list[int]
    dropped: list[int]
    missing: int = 0  # documents without a value
    kept_chars: list[int] | None = None
    dropped_chars: list[int] | None = None

    @classmethod
    def empty(cls, measure: Measure) -> Histogram:
        zeros = [0] * (len(measure.edges) + 1)
        return cls(unit=measure.unit, edges=list(measure.edges), kept=list(zeros), dropped=list(zeros))

    def add(self, values: np.ndarray, *, kept: bool, chars: np.ndarray | None = None) -> None:
        """Counts values (n,) float64. A value on an edge belongs to the bin above it, the last edge to the last bin.

        chars (n,) int64: of each document.
        """
        is_known = ~np.isnan(values)
        known = values[is_known]
        bins = np.searchsorted(np.asarray(self.edges), known, side="right")
        bins[known == self.edges[-1]] -= 1
        size = len(self.edges) + 1
        _count(self.kept if kept else self.dropped, np.bincount(bins, minlength=size))
        self.missing += int(len(values) - len(known))
        if chars is not None:
            self.kept_chars, self.dropped_chars = self.kept_chars or [0] * size, self.dropped_chars or [0] * size
            sums = np.bincount(bins, weights=chars[is_known], minlength=size)  # float64: exact below 2**53
            _count(self.kept_chars if kept else self.dropped_chars, sums)

    def merge(self, other: Histogram) -> Histogram:
        if self.edges != other.edges:
            raise LedgerError(
                "Two histograms of one measure have different edges: their shards come from different versions."
            )
        return Histogram(
            unit=self.unit,
            edges=self.edges,
            kept=[a + b for a, b in zip(self.kept, other.kept, strict=True)],
            dropped=[a + b for a, b in zip(self.dropped, other.dropped, strict=True)],
            missing=self.missing + other.missing,
            kept_chars=_both(self.kept_chars, other.kept_chars, self.is_empty, other.is_empty),
            dropped_chars=_both(self.dropped_chars, other.dropped_chars, self.is_empty, other.is_empty),
        )

    @property
    def is_empty(self) -> bool:
        """No document was counted."""
        return not any(self.kept) and not any(self.dropped)


def _count(side: list[int], counts: np.ndarray) -> None:
    for i in np.flatnonzero(counts):
        side[i] += int(counts[i])


def _both(a: list[int] | None, b: list[int] | None, a_is_empty: bool, b_is_empty: bool) -> list[int] | None:
    """The sum; None where one of them is not known, unless it is that of no document."""
    if a is None or b is None:
        return b if a is None and a_is_empty else a if b is None and b_is_empty else None
    return [x + y for x, y in zip(a, b, strict=True)]


class StageLedger(_Sums):
    """The books of one stage, for one shard or merged over many."""

    stage: str
    read: Amount = Field(default_factory=Amount)
    kept: Amount = Field(default_factory=Amount)
    dropped: dict[str, Amount] = Field(default_factory=dict)  # by first reason
    failed: dict[str, Amount] = Field(default_factory=dict)  # by error
    edited: Amount = Field(default_factory=Amount)
    counters: dict[str, int] = Field(default_factory=dict)
    histograms: dict[str, Histogram] = Field(default_factory=dict)
    seconds: float = 0.0

    def balance(self) -> Amount:
        """What is unaccounted for; all zeros in a sound ledger."""
        out = self.kept + self.edited
        for amount in (*self.dropped.values(), *self.failed.values()):
            out = out + amount
        return self.read - out

    def check(self, where: str) -> None:
        """Raises LedgerError when the sums do not balance."""
        left = self.balance()
        if left != Amount() or self.edited.documents:
            raise LedgerError(
                f"{where}: stage {self.stage} does not balance: read {self.read}; unaccounted for: {left}. "
                "Nothing was published from it. Delete the segment's folder and run the recipe again."
            )

    def merge(self, other: StageLedger) -> StageLedger:
        """Exact sum of two shards' books."""
        if self.stage != other.stage:
            raise LedgerError(f"The ledgers of stage {self.stage} and stage {other.stage} cannot be added.")
        return StageLedger(
            stage=self.stage,
            read=self.read + other.read,
            kept=self.kept + other.kept,
            dropped=_add(self.dropped, other.dropped),
            failed=_add(self.failed, other.failed),
            edited=self.edited + other.edited,
            counters={
                k: self.counters.get(k, 0) + other.counters.get(k, 0) for k in sorted({*self.counters, *other.counters})
            },
            histograms={
                k: self.histograms[k].merge(other.histograms[k])
                if k in self.histograms and k in other.histograms
                else (self.histograms.get(k) or other.histograms[k])
                for k in sorted({*self.histograms, *other.histograms})
            },
            seconds=self.seconds + other.seconds,
        )


class FileRecord(_Sums):
    """A file that a shard published."""

    path: str  # relative to the segment's folder
    rows: int
    bytes: int
    xxh3: str  # 128 bits, hex


class ShardLedger(_Sums):
    """Everything known about one shard of one segment."""

    key: str  # identity of settings, code version, input and upstream: the same key means the same bytes
    segment: str
    shard: int
    source: str
    input: str  # path, and range where the file was split
    stages: list[StageLedger] = Field(default_factory=list)
    removals: Removals | None = None  # what each rule removes, whatever the order of the stages
    files: list[FileRecord] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)  # the first few records that failed: where and why
    seconds: float = 0.0
    ended: float | None = None  # seconds since 1970, by the clock of the host
    memory_bytes: int | None = None  # the most that the worker's process has had resident so far
    versions: dict[str, str] = Field(default_factory=dict)
    host: str = ""
    digest: str = ""  # of all the above

    def check(self, where: str) -> None:
        """Raises LedgerError when a stage does not balance or does not read what the stage before it kept."""
        for stage in self.stages:
            stage.check(where)
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.kept != after.read:
                raise LedgerError(
                    f"{where}: stage {before.stage} kept {before.kept}, but stage {after.stage} read {after.read}."
                )

    def told(self) -> dict[str, Any]:
        """What a worker says to the driver: all but what is long, which stands in the file."""
        return self.model_dump(exclude={"stages": {"__all__": {"histograms", "counters"}}, "removals": True})

    def sealed(self) -> bytes:
        """The bytes to publish, with the digest set."""
        body = self.model_dump(exclude={"digest"}, exclude_none=True)
        return orjson.dumps({**body, "digest": _digest(body)})

    @classmethod
    def opened(cls, data: bytes, where: str) -> ShardLedger:
        """Reads what `sealed` wrote. Raises LedgerError when it was changed since or cannot be read."""
        try:
            ledger = cls.model_validate(orjson.loads(data))
        except ValueError as error:
            raise LedgerError(f"{where}: not a ledger: {error}") from error
        if ledger.digest != _digest(ledger.model_dump(exclude={"digest"}, exclude_none=True)):
            raise LedgerError(
                f"{where}: the ledger was changed after it was written (its digest does not match). "
                "Delete the file and run the recipe again; only this shard is redone."
            )
        return ledger


def _digest(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def _add(a: Mapping[str, Amount], b: Mapping[str, Amount]) -> dict[str, Amount]:
    return {k: a.get(k, Amount()) + b.get(k, Amount()) for k in sorted({*a, *b})}


def merge(parts: Iterable[StageLedger]) -> dict[str, StageLedger]:
    """The books of each stage over any number of shards, in the order in which stages first appear."""
    out: dict[str, StageLedger] = {}
    for part in parts:
        out[part.stage] = out[part.stage].merge(part) if part.stage in out else part
    return out


_counted: list[tuple[tuple[Any, ...], pa.Array, np.ndarray]] = []  # the texts that `chars_of` saw last


def chars_of(texts: pa.Array) -> np.ndarray:
    """Characters of each text (n,) int64. The last answers are remembered: stage after stage books the same texts."""
    place = (*(b.address if b is not None else 0 for b in texts.buffers()), texts.offset, len(texts), texts.type)
    for known, _, chars in _counted:
        if known == place:
            return chars
    chars = _lengths(pc.utf8_length(texts))
    chars.flags.writeable = False
    _counted[:] = [(place, texts, chars), *_counted[:1]]  # with the texts: else their memory may become another's
    return chars


def sizes(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Characters and bytes of each document, (n,) int64: of `text`, and of `html` where a row has that."""
    chars = np.zeros(batch.num_rows, np.int64)
    bytes_ = np.zeros(batch.num_rows, np.int64)
    if "text" in batch.schema.names:
        chars += chars_of(batch["text"])
        bytes_ += _lengths(pc.binary_length(batch["text"]))
    if "html" in batch.schema.names:
        bytes_ += _lengths(pc.binary_length(batch["html"]))
    return chars, bytes_


def _lengths(array: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False), np.int64)


def amount(batch: Batch) -> Amount:
    """Documents, characters and bytes of a batch."""
    chars, bytes_ = sizes(batch)
    return Amount(documents=batch.num_rows, chars=int(chars.sum()), bytes=int(bytes_.sum()))


def book(ledger: StageLedger, before: Batch, kept: Batch, dropped: Batch, counters: Mapping[str, int]) -> None:
    """Enters one batch. A dropped document counts with the size that it came in with, whatever the stage did to it;
    what became of the size of kept ones is `edited`.

    Raises LedgerError when kept and dropped are not the documents of `before`, each once.
    """
    ids = pa.chunked_array([kept["doc_id"], dropped["doc_id"]])
    at = pc.index_in(ids, value_set=before["doc_id"])
    rows = np.zeros(0, np.int64) if at.null_count else at.to_numpy().astype(np.int64)
    if len(rows) != before.num_rows or (np.bincount(rows, minlength=before.num_rows) != 1).any():
        raise LedgerError(
            f"Stage {ledger.stage} gave back {len(ids):,} documents for {before.num_rows:,}, or others than it got. "
            "This is a fault of the stage; nothing was published."
        )
    chars, bytes_ = sizes(before)

    def came_in(which: np.ndarray) -> Amount:
        return Amount(documents=len(which), chars=int(chars[which].sum()), bytes=int(bytes_[which].sum()))

    of_kept, of_dropped = rows[: kept.num_rows], rows[kept.num_rows :]
    kept_now = amount(kept)
    ledger.read = ledger.read + came_in(rows)
    ledger.kept = ledger.kept + kept_now
    ledger.edited = ledger.edited + (came_in(of_kept) - kept_now)
    if dropped.num_rows:
        first = pc.dictionary_encode(pc.list_element(dropped["reasons"], 0))
        codes = first.indices.to_numpy(zero_copy_only=False)
        for code, reason in sorted(enumerate(first.dictionary.to_pylist()), key=lambda item: item[1]):
            part = came_in(of_dropped[codes == code])
            ledger.dropped[reason] = ledger.dropped.get(reason, Amount()) + part
    for name, count in (*counters.items(), *_chars_by_rule(dropped, chars[of_dropped])):
        ledger.counters[name] = ledger.counters.get(name, 0) + int(count)


def _chars_by_rule(dropped: Batch, chars: np.ndarray) -> Iterator[tuple[str, int]]:
    """Characters of the documents that break a rule (`rule_chars.<reason>`), and of those that break no other of the
    stage (`only_chars.<reason>`): what the counters of `cut` are in documents."""
    if not dropped.num_rows:
        return
    reasons = dropped["reasons"]
    flat = pc.dictionary_encode(pc.list_flatten(reasons))
    parents = pc.list_parent_indices(reasons).to_numpy(zero_copy_only=False)
    codes = flat.indices.to_numpy(zero_copy_only=False)
    alone = pc.list_value_length(reasons).to_numpy(zero_copy_only=False)[parents] == 1
    for code, reason in enumerate(flat.dictionary.to_pylist()):
        names = codes == code
        yield f"rule_chars.{reason}", int(chars[parents[names]].sum())
        yield f"only_chars.{reason}", int(chars[parents[names & alone]].sum())


def count_measures(
    ledger: StageLedger, measures: Iterable[Measure], kept: Batch, dropped: Batch, before: Batch | None = None
) -> None:
    """Adds the batch's measures to the histograms, kept and dropped apart. before: what came in; with it, characters
    are counted too."""
    sides: list[tuple[Batch, bool, np.ndarray | None]] = [(kept, True, None), (dropped, False, None)]
    if before is not None:
        rows = pc.index_in(dropped["doc_id"], value_set=before["doc_id"]).to_numpy().astype(np.int64)
        sides = [(kept, True, sizes(kept)[0]), (dropped, False, sizes(before)[0][rows])]
    for measure in measures:
        histogram = ledger.histograms.setdefault(measure.column, Histogram.empty(measure))
        for batch, is_kept, chars in sides:
            if batch.num_rows and measure.column in batch.schema.names:
                histogram.add(column(batch, measure.column), kept=is_kept, chars=chars)


def memory_of_process() -> int:
    """The most bytes that this process has had resident so far (Linux: `ru_maxrss` is in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
