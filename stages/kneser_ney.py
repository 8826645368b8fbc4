"""Modified Kneser-Ney language models, estimated here and scored by KenLM.

Chen and Goodman 1998, "An empirical study of smoothing techniques", with the choices of KenLM's `lmplz` (Heafield et
al. 2013), so that the two give the same model: <s> is a context and no word, unigrams are interpolated with the
uniform distribution over the vocabulary with <unk> and </s>, n-grams that begin with <s> keep their raw counts, and
pruning goes by raw counts and hands the pruned mass to the back-off.

    with TokenFile(folder) as tokens:
        tokens.add(Pieces(texts).data)                    # once for each batch
        estimate = tokens.estimate("lm.arpa", order=3, prune=(0, 0, 1))

Memory: the text is a file of token ids. Sorting works on ranges of contexts that fit `max_memory_mb`; columns of
n-grams that do not fit it are scratch files, mapped. The words of the vocabulary are held besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from gristmill.stages.kernels import counting, ngram_table
from gristmill.stages.kernels.counting import BOS, FIRST_WORD, MAX_ORDER

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)  # lmplz --discount_fallback: D1, D2, D3+
MAX_TOKENS = (1 << 31) - 1  # positions and n-gram ids are int32
_ENCODE_BYTES = 1 << 20  # of pieces a call: bounds how much room the word table needs ahead
_BYTES_A_POSITION = 40  # of the buffers that sort one range of contexts
_ARPA_BUFFER = 8 << 20  # bytes


class ModelError(ValueError):
    """A model cannot be trained or read as asked."""


@dataclass(frozen=True)
class Estimate:
    """What was estimated."""

    order: int
    prune: tuple[int, ...]  # one threshold an order
    tokens: int  # with <s> and </s>
    words: int  # distinct, with <unk>, <s> and </s>
    distinct: tuple[int, ...]  # n-grams of each order in the text
    kept: tuple[int, ...]  # n-grams of each order in the model
    discounts: tuple[tuple[float, float, float], ...]  # D1, D2, D3+ of each order
    fallback: tuple[int, ...]  # orders whose discounts could not be estimated; they have FALLBACK_DISCOUNTS


@dataclass
class _Order:
    """The n-grams of one order, sorted; columns of equal length."""

    prefix: np.ndarray  # int32, id of the first k - 1 words
    word: np.ndarray  # int32, the last word
    suffix: np.ndarray  # int32, id of the last k - 1 words
    raw: np.ndarray  # int32, how often it occurs
    with_bos: int  # the first n-grams, which begin with <s>
    adjusted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    prob: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # 0: pruned
    backoff: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # empty at the highest order


class _Scratch:
    """Arrays within a budget of memory; beyond it, scratch files that are mapped."""

    def __init__(self, folder: Path, bytes_left: int) -> None:
        self.folder, self.bytes_left, self.files = folder, bytes_left, 0

    def path(self) -> Path:
        self.files += 1
        return self.folder / f"scratch-{self.files:04d}.bin"

    def filled(self, n: int, value: float, kind: type) -> np.ndarray:
        """n times `value`."""
        size = n * np.dtype(kind).itemsize
        if size <= self.bytes_left or n == 0:
            self.bytes_left -= size
            return np.full(n, value, kind)
        array = np.memmap(self.path(), kind, "w+", shape=(n,))
        if value != 0:
            array[:] = value
        return np.asarray(array)

    def read(self, path: Path, kind: type) -> np.ndarray:
        """What a file holds, in memory or mapped."""
        size = path.stat().st_size
        if size <= self.bytes_left or size == 0:
            self.bytes_left -= size
            return np.fromfile(path, kind)
        return np.asarray(np.memmap(path, kind, "r+"))


class TokenFile:
    """Text as word ids on disk, with the words met so far. Lines are <s> w1 ... wn </s>, int32 ids.

    `folder` receives the file and, while a model is estimated, scratch files; leaving the context deletes them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "tokens.bin"
        self.tokens = 0
        self.words = FIRST_WORD
        reserved = b"<unk><s></s>"
        self.word_bytes = np.zeros(1 << 20, np.uint8)
        self.word_bytes[: len(reserved)] = np.frombuffer(reserved, np.uint8)
        self.word_ends = np.zeros(1 << 16, np.int64)
        self.word_ends[:FIRST_WORD] = (5, 8, 12)
        self._hashes = np.zeros(1 << 17, np.uint64)
        self._ids = np.zeros(1 << 17, np.int32)
        self._file: BinaryIO = open(self.path, "wb")  # noqa: SIM115  closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Deletes what is on disk; nothing can be estimated afterwards."""
        self._file.close()
        for path in (self.path, *self.folder.glob("scratch-*.bin")):
            path.unlink(missing_ok=True)

    def add(self, data: np.ndarray) -> None:
        """Appends lines: data (n,) uint8, pieces separated by one space, each line ended by a newline."""
        start = 0
        while start < len(data):
            end = counting.line_end(data, min(len(data), start + _ENCODE_BYTES))
            self._make_room(end - start)
            out = np.empty(2 * (end - start) + 4, np.int32)
            n, self.words = counting.encode_lines(
                data, start, end, self._hashes, self._ids, self.words, self.word_bytes, self.word_ends, out
            )
            out[:n].tofile(self._file)
            self.tokens += n
            start = end
        if self.tokens > MAX_TOKENS:
            raise ModelError(
                f"The training text has more than {MAX_TOKENS:,} pieces, the most that a model can be trained on. "
                "Lower `max_bytes` of its selection."
            )

    def estimate(
        self,
        path: str | Path,
        *,
        order: int,
        prune: Sequence[int] = (),
        max_memory_mb: float = 1_000,
        table: str | Path | None = None,
    ) -> Estimate:
        """Writes the model as an ARPA file to `path`, and to `table` as `load_table` reads it. The same text gives
        the same bytes.

        prune: n-grams of order k that occur prune[k - 1] times or less are left out; the last value holds for the
        orders after it (as `lmplz --prune`). Raises ModelError when the settings or the text do not allow a model.
        """
        limits = thresholds(order, prune)
        self._file.flush()
        if self.tokens == 0:
            raise ModelError("The training text is empty: no line has a word. Look at what the selection names.")
        scratch = _Scratch(self.folder, int(max_memory_mb * 1e6 / 2))  # the other half is for sorting
        orders = self._count(order, scratch, room=int(max_memory_mb * 1e6 / 2 / _BYTES_A_POSITION))
        _adjust(orders, scratch)
        discounts, fallback = _discounts(orders)
        kept = _interpolate(orders, discounts, limits, scratch)
        self._write_arpa(Path(path), orders, kept)
        if table is not None:
            self._write_table(Path(table), orders, sum(kept))
        return Estimate(
            order=order,
            prune=limits,
            tokens=self.tokens,
            words=self.words,
            distinct=tuple(len(o.word) for o in orders),
            kept=tuple(kept),
            discounts=tuple((float(d[1]), float(d[2]), float(d[3])) for d in discounts),
            fallback=tuple(fallback),
        )

    def _make_room(self, bytes_ahead: int) -> None:
        """Room for the words of the next bytes_ahead bytes: at most one a two bytes, and half of the table empty."""
        words = self.words + bytes_ahead // 2 + 2
        self.word_bytes = _grown(self.word_bytes, int(self.word_ends[self.words - 1]) + bytes_ahead)
        self.word_ends = _grown(self.word_ends, words)
        if 2 * words > len(self._hashes):
            slots = 1 << (4 * words - 1).bit_length()
            hashes, ids = np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
            counting.rehash(self._hashes, self._ids, hashes, ids)
            self._hashes, self._ids = hashes, ids

    def _count(self, order: int, scratch: _Scratch, room: int) -> list[_Order]:
        """The n-grams of orders 1 to `order`, with raw counts."""
        words = scratch.read(self.path, np.int32)
        nothing = np.zeros(0, np.int32)
        raw = np.zeros(self.words, np.int32)
        counting.count_words(words, raw)
        orders = [_Order(nothing, np.arange(self.words, dtype=np.int32), nothing, raw, with_bos=BOS + 1)]
        ids_at = words  # id of the n-gram of the order below that ends at each position
        for k in range(2, order + 1):
            next_ids = scratch.filled(len(words) if k < order else 0, -1, np.int32)
            orders.append(self._extend(orders[-1], words, ids_at, next_ids, scratch, room))
            if len(orders[-1].word) == 0:
                raise ModelError(
                    f"No line of the training text is long enough for an n-gram of order {k}. "
                    "Lower `order`, or train on longer text."
                )
            ids_at = next_ids
        return orders

    def _extend(
        self, below: _Order, words: np.ndarray, ids_at: np.ndarray, next_ids: np.ndarray, scratch: _Scratch, room: int
    ) -> _Order:
        """The order above `below`, sorted range by range of prefixes; next_ids receives ids where it has a length."""
        bounds, largest = counting.ranges(below.raw, room)
        positions, suffix_of, id_of = (np.empty(largest, np.int32) for _ in range(3))
        keys = (np.empty(largest, np.int64), np.empty(largest, np.int64))
        index = (np.empty(largest, np.int32), np.empty(largest, np.int32))
        parts: list[list[np.ndarray]] = []
        paths = [scratch.path() for _ in range(4)] if len(bounds) > 2 else []
        files: list[BinaryIO] = [open(path, "wb") for path in paths]  # noqa: SIM115
        distinct = 0
        for low, high in itertools.pairwise(bounds):
            n = counting.select(ids_at, words, low, high, self.words, positions, keys[0], suffix_of)
            bits = (int(high - low) * self.words).bit_length()
            at = int(counting.sort_keys(keys[0], index[0], keys[1], index[1], n, bits))
            groups = counting.count_groups(keys[at], n)
            part = [np.empty(groups, np.int32) for _ in range(4)]
            prefix, word, suffix, raw = part
            counting.group(
                keys[at], index[at], n, low, self.words, distinct, suffix_of, prefix, word, suffix, raw, id_of
            )
            if len(next_ids):
                counting.scatter(positions, n, id_of, next_ids)
            distinct += groups
            if files:
                for column, file in zip(part, files, strict=True):
                    column.tofile(file)
            else:
                parts.append(part)
        for file in files:
            file.close()
        prefix, word, suffix, raw = (scratch.read(path, np.int32) for path in paths) if files else parts[0]
        return _Order(prefix, word, suffix, raw, with_bos=int(np.searchsorted(prefix, below.with_bos)))

    def _write_arpa(self, path: Path, orders: list[_Order], kept: list[int]) -> None:
        longest = int(np.diff(self.word_ends[: self.words], prepend=0).max())
        out = np.empty(max(_ARPA_BUFFER, 64 + MAX_ORDER * (longest + 2)), np.uint8)
        prefixes, words = _columns(orders)
        with open(path, "wb") as file:
            file.write(b"\\data\\\n" + b"".join(b"ngram %d=%d\n" % (k + 1, n) for k, n in enumerate(kept)) + b"\n")
            for k, grams in enumerate(orders):
                file.write(b"\\%d-grams:\n" % (k + 1))
                at, end = 0, len(grams.word)
                while at < end:
                    n, at = counting.write_ngrams(
                        at, end, k + 1, prefixes, words, grams.prob, grams.backoff, self.word_bytes, self.word_ends, out
                    )
                    file.write(out[:n].data)
                file.write(b"\n")
            file.write(b"\\end\\\n")

    def _write_table(self, path: Path, orders: list[_Order], ngrams: int) -> None:
        prefixes, words = _columns(orders)
        keys = ngram_table.word_keys(self.word_bytes, self.word_ends, self.words)
        shape = (ngram_table.slots(ngrams), 2)
        entries = np.asarray(np.lib.format.open_memmap(path, "w+", np.uint64, shape))  # zeros; a file, not memory
        for k, grams in enumerate(orders):
            ngram_table.enter(
                k + 1, prefixes, words, grams.prob, grams.backoff, keys, entries, entries.view(np.float32)
            )


def _columns(orders: list[_Order]) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """prefix and word of every order, as the kernels take them: MAX_ORDER arrays each."""
    padding = [np.zeros(0, np.int32)] * (MAX_ORDER - len(orders))
    return tuple([o.prefix for o in orders] + padding), tuple([o.word for o in orders] + padding)


def load_table(path: str | Path) -> np.ndarray:
    """A table that `estimate` wrote -> (slots, 2) uint64, mapped. Raises ModelError where it cannot be read."""
    try:
        table = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Delete the model's folder and train it again.") from error
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype != np.uint64 or table.shape[0] & (table.shape[0] - 1):
        raise ModelError(f"{path} is not the table of a language model. Delete the model's folder and train it again.")
    return np.asarray(table)


def load_arpa(path: str | Path) -> Any:
    """A `kenlm.Model` of an ARPA or KenLM binary file. Raises ModelError where it cannot be read."""
    import kenlm

    config = kenlm.Config()
    config.show_progress = False
    config.arpa_complain = kenlm.ARPALoadComplain.NONE
    try:
        return kenlm.Model(str(path), config)
    except OSError as error:
        raise ModelError(f"{path}: KenLM cannot read this model: {error}") from error


def thresholds(order: int, prune: Sequence[int]) -> tuple[int, ...]:
    """One pruning threshold an order. Raises ModelError for settings that give no model."""
    if not 2 <= order <= MAX_ORDER:
        raise ModelError(f"`order` is {order}; KenLM scores models of order 2 to {MAX_ORDER}.")
    given = list(prune) or [0]
    if len(given) > order:
        raise ModelError(f"`prune` has {len(given)} values for {order} orders: {list(prune)}.")
    if given[0] != 0:
        raise ModelError(f"`prune` must begin with 0, for words are not pruned; it is {list(prune)}.")
    if sorted(given) != given:
        raise ModelError(
            f"`prune` is {list(prune)}. Its values must not fall, else an n-gram would stay whose context is pruned."
        )
    return tuple(given + [given[-1]] * (order - len(given)))


def _grown(array: np.ndarray, n: int) -> np.ndarray:
    """The array with room for n entries: itself, or a copy of at least twice its size."""
    if n <= len(array):
        return array
    larger = np.zeros(max(n, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


def _adjust(orders: list[_Order], scratch: _Scratch) -> None:
    """Adjusted counts: below the highest order, how many different words stand before the n-gram."""
    for grams, above in itertools.pairwise(orders):
        grams.adjusted = scratch.filled(len(grams.word), 0, np.int32)
        counting.count_left(above.suffix, grams.adjusted)
        grams.adjusted[: grams.with_bos] = grams.raw[: grams.with_bos]
    orders[0].adjusted[: BOS + 1] = 0  # <unk> and <s> are never predicted by the text
    orders[-1].adjusted = orders[-1].raw


def _discounts(orders: list[_Order]) -> tuple[list[np.ndarray], list[int]]:
    """Discounts of each order, (4,) float64 with D0 = 0, and the orders that fell back (Chen and Goodman, eq. 26).

    Small text may lack n-grams of adjusted count 1 to 4, or give a discount outside (0, count]: then the whole order
    falls back, as in lmplz.
    """
    discounts, fallback = [], []
    for k, grams in enumerate(orders):
        n = counting.counts_of_counts(grams.adjusted).astype(np.float64)
        found = np.zeros(4)
        if n[1] and n[2] and n[3]:
            y = n[1] / (n[1] + 2 * n[2])
            found[1:] = [j - (j + 1) * y * n[j + 1] / n[j] for j in (1, 2, 3)]
        if not all(0 < found[j] <= j for j in (1, 2, 3)):
            found[1:] = FALLBACK_DISCOUNTS
            fallback.append(k + 1)
        discounts.append(found)
    return discounts, fallback


def _interpolate(
    orders: list[_Order], discounts: list[np.ndarray], thresholds: tuple[int, ...], scratch: _Scratch
) -> list[int]:
    """Fills prob and backoff of every order -> n-grams kept of each."""
    unigrams = orders[0]
    count = unigrams.adjusted.astype(np.float64)
    discount = discounts[0][np.minimum(unigrams.adjusted, 3)]
    vocabulary = len(count) - 1  # all that can follow: the words, <unk> and </s>, not <s>
    unigrams.prob = ((count - discount + discount.sum() / vocabulary) / count.sum()).astype(np.float32)
    unigrams.prob[BOS] = 0
    kept = [len(count)]
    for k in range(1, len(orders)):
        grams, below = orders[k], orders[k - 1]
        below.backoff = scratch.filled(len(below.word), 1, np.float32)
        grams.prob = scratch.filled(len(grams.word), 0, np.float32)
        kept.append(
            counting.interpolate(
                grams.prefix,
                grams.suffix,
                grams.adjusted,
                grams.raw,
                thresholds[k],
                discounts[k],
                below.prob,
                below.backoff,
                grams.prob,
            )
        )
    return kept
