"""The best share of all documents, exactly: which score is the limit, and who stays of those that have it.

    cuts = find_cuts(signatures, share=0.1, by=None)
    in_top(table, cuts)                     # (n,) bool, for each table in the order of `signatures`

Of n documents ceil(share n) stay, the share taken as the decimal number that is written in the recipe: 0.07 of 100 is
7. Documents rank by score, the highest first; those of equal score by doc_id, then source, then a hash of the text, as
bytes, the smallest first. Documents without a score (NaN) rank after all others. So neither shards nor batches nor
their order have a say: documents that are equal in all of these are the same text under the same name.

Memory does not grow with the number of documents. The score is found by histograms of the bits of its float64, 13 at a
time, in five passes over the mapped signature files: bits of floats that are not negative sort as the floats do. Of the
documents that have this score the last one that stays is found by sorting them, or, where they are more than HELD, by
a quickselect that reads the files again.

Signatures: doc_id string, source string, text_hash fixed_size_binary(16), score float64 (0 and above, or NaN), and
`language` string where the cut is by language.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

By = Literal["source", "language"]

DIGIT = 13  # bits of one histogram; five of them are more than 64
BINS = 1 << DIGIT
READ = 1 << 16  # rows at a time
HELD = 1 << 20  # keys of equal score that are sorted in memory
SAMPLED = 4_096  # keys among which a pass of the quickselect looks for its two pivots
MARGIN = 200  # of them on each side of the place looked for: three standard deviations
UNDETERMINED = "und"  # the group of documents without a language
EVERYTHING = ""  # the name of the one group, where there are no groups


@dataclass
class Cut:
    """Where one group is cut. `spare` counts down while `in_top` reads."""

    documents: int
    in_top: int  # ceil(share * documents)
    without_score: int
    key: int  # of the lowest score that stays, as `order_keys` gives it; 0 where documents without a score stay
    at_key: int  # documents that have it
    at_key_in_top: int
    last: bytes | None = None  # the last tie key that stays; None where all documents of the lowest score do
    spare: int = 0  # documents with exactly that tie key that may still stay: copies of each other under one name

    @property
    def threshold(self) -> float | None:
        """The lowest score that stays."""
        return None if self.key == 0 else float(np.array(self.key - 1, np.uint64).view(np.float64))

    def figures(self) -> dict[str, Any]:
        """For the card of the stage."""
        return {
            "documents": self.documents,
            "in_top": self.in_top,
            "threshold": self.threshold,
            "at_threshold": self.at_key,
            "at_threshold_in_top": self.at_key_in_top,
            "without_score": self.without_score,
        }


@dataclass(frozen=True)
class Cuts:
    """What `find_cuts` found: a cut for each group, by name."""

    by: By | None
    groups: dict[str, Cut]


def documents_in_top(share: float, documents: int) -> int:
    """ceil(share * documents), the share as it is written: 0.07 of 100 is 7, though 0.07 * 100 > 7 in floats."""
    return math.ceil(Fraction(repr(share)) * documents)


def order_keys(scores: np.ndarray) -> np.ndarray:
    """(n,) float64 >= 0 or NaN -> (n,) uint64 that sort as the scores do, with NaN first: 0."""
    bits = (scores + 0.0).view(np.uint64)  # + 0.0: there is one zero
    return np.where(np.isnan(scores), np.uint64(0), bits + np.uint64(1))


def find_cuts(tables: Sequence[pa.Table], share: float, by: By | None) -> Cuts:
    """The cut of each group (of one for all documents where `by` is None). Reads the tables six times and more."""
    rows = _Rows(tables, by)
    names, counts, missing = rows.count()
    wanted = np.array([documents_in_top(share, int(n)) for n in counts], np.int64)
    keys, stay, equal = _lowest_keys(rows, names, wanted)
    cuts = Cuts(by, {})
    for g, name in enumerate(names):
        cuts.groups[name] = Cut(
            documents=int(counts[g]),
            in_top=int(wanted[g]),
            without_score=int(missing[g]),
            key=int(keys[g]),
            at_key=int(equal[g]),
            at_key_in_top=int(stay[g]),
        )
    _settle_ties(rows, cuts)
    return cuts


def in_top(table: pa.Table, cuts: Cuts) -> np.ndarray:
    """(n,) bool: the documents that stay. To be asked once for each table, in order: copies are counted off."""
    parts = [np.zeros(0, bool)]
    for batch in _batches(table):
        names, codes = _groups(batch, cuts.by)
        keys = order_keys(batch["score"].to_numpy())
        lowest = np.array([cuts.groups[name].key for name in names], np.uint64)[codes]
        stays = keys >= lowest
        for name, rows, tied in _tied_of(batch, names, codes, keys == lowest):
            if cuts.groups[name].last is not None:
                stays[rows] = _tied_in_top(tied, cuts.groups[name])
        parts.append(stays)
    return np.concatenate(parts)


def _tied_in_top(keys: pa.Array, cut: Cut) -> np.ndarray:
    """(m,) bool: which of the documents of the lowest score stay."""
    last = pa.scalar(cut.last, keys.type)
    stays = _bool(pc.less(keys, last))
    copies = np.flatnonzero(_bool(pc.equal(keys, last)))[: cut.spare]
    cut.spare -= len(copies)
    stays[copies] = True
    return stays


class _Rows:
    """The signatures, to be read as often as needed."""

    def __init__(self, tables: Sequence[pa.Table], by: By | None) -> None:
        self.tables, self.by = tables, by

    def batches(self, *columns: str) -> Iterator[pa.RecordBatch]:
        """Without column names, all columns."""
        grouped = () if self.by is None else (self.by,)
        for table in self.tables:
            yield from _batches(table.select([*columns, *grouped]) if columns else table)

    def count(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """-> names of the groups in order, documents of each (g,) int64, those of them without a score (g,) int64."""
        found: dict[str, np.ndarray] = {}
        for batch in self.batches("score"):
            names, codes = _groups(batch, self.by)
            missing = np.isnan(batch["score"].to_numpy())
            every, without = (np.bincount(of, minlength=len(names)) for of in (codes, codes[missing]))
            for code, name in enumerate(names):
                sums = found.setdefault(name, np.zeros(2, np.int64))
                sums += (every[code], without[code])
        names = sorted(found)
        table = np.array([found[name] for name in names], np.int64).reshape(len(names), 2)
        return names, table[:, 0], table[:, 1]

    def keys(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """-> (group of each row, as its place in `names`, (n,) int64; order keys (n,) uint64), batch by batch."""
        place = {name: i for i, name in enumerate(names)}
        for batch in self.batches("score"):
            here, codes = _groups(batch, self.by)
            yield np.array([place[name] for name in here], np.int64)[codes], order_keys(batch["score"].to_numpy())


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """A table in batches of READ rows: those of the file are small."""
    for start in range(0, table.num_rows, READ):
        yield from table.slice(start, READ).combine_chunks().to_batches()


def _groups(batch: pa.RecordBatch, by: By | None) -> tuple[list[str], np.ndarray]:
    """The groups of a batch and, for each row, which of them it is in (n,) int64."""
    if by is None:
        return [EVERYTHING] if batch.num_rows else [], np.zeros(batch.num_rows, np.int64)
    coded = pc.fill_null(batch[by], UNDETERMINED).dictionary_encode()
    return coded.dictionary.to_pylist(), coded.indices.to_numpy().astype(np.int64)


def _lowest_keys(rows: _Rows, names: Sequence[str], wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The key of the document in place `wanted` (g,), from 1 for the highest, in each group.

    -> (keys (g,) uint64, how many of the documents with that key are among the wanted (g,), how many have it (g,))
    """
    groups = np.arange(len(names))
    found = np.zeros(len(names), np.uint64)
    left, equal = wanted.copy(), np.zeros(len(names), np.int64)
    for shift in range(DIGIT * (64 // DIGIT), -1, -DIGIT):
        histogram = np.zeros((len(names), BINS), np.int64)
        for group, keys in rows.keys(names):
            upper = keys >> np.uint64(shift)
            same = (upper >> np.uint64(DIGIT)) == found[group]
            digits = (upper & np.uint64(BINS - 1)).astype(np.int64)
            np.add.at(histogram, (group[same], digits[same]), 1)
        from_top = np.cumsum(histogram[:, ::-1], axis=1)
        place = (from_top >= left[:, None]).argmax(axis=1)
        digit = BINS - 1 - place
        equal = histogram[groups, digit]
        left -= from_top[groups, place] - equal
        found = (found << np.uint64(DIGIT)) | digit.astype(np.uint64)
    return found, left, equal


def tie_keys(batch: pa.RecordBatch) -> pa.Array:
    """What orders documents of equal score: doc_id, source and hash of the text, large_binary (n,)."""
    parts = [batch[name].cast(pa.binary()).cast(pa.large_binary()) for name in ("doc_id", "source", "text_hash")]
    joined = pc.binary_join_element_wise(
        *parts, pa.scalar(b"\0", pa.large_binary()), null_handling="replace", null_replacement=b""
    )
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _settle_ties(rows: _Rows, cuts: Cuts) -> None:
    """Finds the last tie key that stays of each group in which only some documents of the lowest score do."""
    tied = [name for name, cut in cuts.groups.items() if cut.at_key > cut.at_key_in_top]
    for names in _packs(tied, cuts):
        if cuts.groups[names[0]].at_key > HELD:  # and then it is alone
            cut = cuts.groups[names[0]]
            read = partial(_keys_of, rows, cuts, names[0])
            cut.last, cut.spare = nth_smallest(read, cut.at_key, cut.at_key_in_top)
            continue
        held: dict[str, list[pa.Array]] = {name: [] for name in names}
        for name, keys in _tied(rows, cuts, names):
            held[name].append(keys)
        for name, parts in held.items():
            cut = cuts.groups[name]
            cut.last, cut.spare = nth_smallest(partial(iter, parts), cut.at_key, cut.at_key_in_top)


def _packs(names: Sequence[str], cuts: Cuts) -> Iterator[list[str]]:
    """Groups whose tie keys are few enough to be held together, so that one reading does for them."""
    pack: list[str] = []
    for name in names:
        if pack and sum(cuts.groups[n].at_key for n in (*pack, name)) > HELD:
            yield pack
            pack = []
        pack.append(name)
    if pack:
        yield pack


def _keys_of(rows: _Rows, cuts: Cuts, name: str) -> Iterator[pa.Array]:
    return (keys for _, keys in _tied(rows, cuts, [name]))


def _tied(rows: _Rows, cuts: Cuts, wanted: Sequence[str]) -> Iterator[tuple[str, pa.Array]]:
    """Reads the tie keys of the documents that have the lowest score of their group, of some groups."""
    for batch in rows.batches():
        names, codes = _groups(batch, rows.by)
        lowest = np.array([cuts.groups[name].key for name in names], np.uint64)[codes]
        tied = order_keys(batch["score"].to_numpy()) == lowest
        tied &= np.isin(codes, [code for code, name in enumerate(names) if name in wanted])
        yield from ((name, keys) for name, _, keys in _tied_of(batch, names, codes, tied))


def _tied_of(
    batch: pa.RecordBatch, names: Sequence[str], codes: np.ndarray, tied: np.ndarray
) -> Iterator[tuple[str, np.ndarray, pa.Array]]:
    """The tied rows (n,) bool of a batch, group by group -> name, rows (m,), tie keys (m,)."""
    rows = np.flatnonzero(tied)
    if not len(rows):
        return
    rows = rows[np.argsort(codes[rows], kind="stable")]
    keys = tie_keys(batch.take(pa.array(rows)))
    borders = np.flatnonzero(np.diff(codes[rows], prepend=-1)).tolist()
    for start, end in itertools.pairwise([*borders, len(rows)]):
        yield names[codes[rows[start]]], rows[start:end], keys.slice(start, end - start)


def nth_smallest(keys: Callable[[], Iterator[pa.Array]], count: int, nth: int) -> tuple[bytes, int]:
    """The key in place `nth`, from 1, of all that `keys()` gives, and how many that equal it are among the first nth.

    keys: reads the same `count` values each time, in pieces, large_binary. Reads twice for every factor of about ten
    by which there are more than HELD; the place of the pivots decides how often, never what is found.
    """
    low: bytes | None = None  # the key lies between these two, both excluded
    high: bytes | None = None
    while count > HELD:
        first, second = _pivots(_between(keys, low, high), count, nth)
        below, at_first, below_second, at_second = _places(_between(keys, low, high), first, second)
        if nth <= below:
            high, count = first, below
        elif nth <= below + at_first:
            return first, nth - below
        elif nth <= below_second:
            low, high, nth, count = first, second, nth - below - at_first, below_second - below - at_first
        elif nth <= below_second + at_second:
            return second, nth - below_second
        else:
            low, nth, count = second, nth - below_second - at_second, count - below_second - at_second
    every = pa.concat_arrays(list(_between(keys, low, high)))
    ordered = every.take(pc.array_sort_indices(every))
    found = ordered[nth - 1]
    return found.as_py(), nth - int(pc.sum(pc.less(ordered, found)).as_py() or 0)


def _between(keys: Callable[[], Iterator[pa.Array]], low: bytes | None, high: bytes | None) -> Iterator[pa.Array]:
    for part in keys():
        inside = part
        if low is not None:
            inside = inside.filter(pc.greater(inside, pa.scalar(low, part.type)))
        if high is not None:
            inside = inside.filter(pc.less(inside, pa.scalar(high, part.type)))
        yield inside


def _pivots(parts: Iterator[pa.Array], count: int, nth: int) -> tuple[bytes, bytes]:
    """Two of the keys, most likely on both sides of the one in place `nth`, from every count / SAMPLED-th of them."""
    stride = max(1, count // SAMPLED)
    sample: list[bytes] = []
    row = 0
    for part in parts:
        sample += part.take(pa.array(np.arange(-row % stride, len(part), stride))).to_pylist()
        row += len(part)
    sample.sort()
    place = nth * len(sample) // count
    return sample[max(0, place - MARGIN)], sample[min(len(sample) - 1, place + MARGIN)]


def _places(parts: Iterator[pa.Array], first: bytes, second: bytes) -> tuple[int, int, int, int]:
    """How many keys are below `first`, equal to it, below `second`, equal to that."""
    sums = np.zeros(4, np.int64)
    for part in parts:
        for i, (holds, pivot) in enumerate(
            ((pc.less, first), (pc.equal, first), (pc.less, second), (pc.equal, second))
        ):
            sums[i] += int(pc.sum(holds(part, pa.scalar(pivot, part.type))).as_py() or 0)
    below, at_first, below_second, at_second = sums.tolist()
    return below, at_first, below_second, at_second


def _bool(values: pa.Array) -> np.ndarray:
    return np.array(values.to_numpy(zero_copy_only=False), bool)
