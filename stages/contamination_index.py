"""Evaluation items, indexed; and which of them a document holds.

    index = Index.of(items, IndexSettings())
    index.facts()                                  # items, n-grams, what is ignored, what cannot be checked
    for row, found in index.search(batch["text"]): # documents that hold something
        found[0].item, found[0].hits, found[0].overlap, found[0].containment

Three measures for each item and document:

    hits         places in the document where a run of `ngram` words begins that the item has (Brown et al. 2020,
                 appendix C: 13); an item of fewer words is one run, if it has `min_words`
    overlap      share of the item's runs of `overlap_ngram` words that stand in the document (Chowdhery et al. 2022,
                 section 8: 8-grams, 70 %)
    containment  share of the item's pairs of neighbouring words within a stretch of the document of twice its length

Hits and overlap are exact. The third is a search: where the items' runs of five words stand close together and cover
ten, the passage is asked of datasketch's `MinHashLSHEnsemble` (Zhu et al. 2016), and what that names is counted
exactly. Passages of which hits explain half are not searched. Runs that more than `max_items_per_ngram` items of a
benchmark share are instructions, not items: they are ignored everywhere, as Brown et al. ignored n-grams of more than
10 documents.

In scripts without spaces (Han, kana, Thai, Lao, Khmer, Burmese) each character is a word, so that 13 words say less
than 13 of English: give such sets a stage of their own with a larger `ngram`, `overlap_ngram` and `min_words`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.stages.evaluation_sets import Item
from gristmill.stages.kernels import contamination as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fold import fold

SEED_WORDS = 5
MIN_COVERED = 10  # words that such runs, standing close together, must cover before a passage is looked at
SEED_GAP = 13  # words between the beginnings of two of them
PASSAGE_WORDS = 32
PAIR = 2  # words of a shingle of the containment search
MAX_PASSAGES = 100  # of a document; the rest is counted
PERMUTATIONS = 32
SEARCH_THRESHOLD = 0.4  # of a passage's pairs in an item; what is found is counted exactly afterwards
MIN_SHARED = 0.3  # of a passage's or an item's pairs, whichever are fewer, before the item is counted
HIT, OVERLAP, SEED = "hit", "overlap", "seed"


@dataclass(frozen=True)
class IndexSettings:
    """What is indexed. None switches a measure off."""

    ngram: int = 13
    overlap_ngram: int | None = 8
    min_words: int = 8
    max_items_per_ngram: int = 10
    containment: bool = True


@dataclass
class Found:
    """What a document holds of one item. spans: words [first, last] of the document."""

    item: int
    hits: int = 0
    overlap: float = 0.0
    containment: float = 0.0
    hit_spans: list[tuple[int, int]] = field(default_factory=list)
    overlap_spans: list[tuple[int, int]] = field(default_factory=list)
    passage: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Postings:
    """N-gram -> the items that have it: items[starts[g]:starts[g + 1]]."""

    starts: np.ndarray
    items: np.ndarray

    def of(self, gram: int) -> Sequence[int]:
        found: list[int] = self.items[self.starts[gram] : self.starts[gram + 1]].tolist()
        return found


class Index:
    """Items ready to be looked up. Made by `of`."""

    def __init__(self, items: Sequence[Item], settings: IndexSettings) -> None:
        self.items = list(items)
        self.settings = settings
        self._pairs: dict[int, set[tuple[bytes, ...]]] = {}  # of items that a search has named
        self.unchecked: dict[int, str] = {}  # item -> why
        self.ignored: dict[str, int] = {}  # benchmark -> distinct n-grams that too many of its items share
        self._build()

    @classmethod
    def of(cls, items: Iterable[Item], settings: IndexSettings | None = None) -> Index:
        return cls(list(items), settings or IndexSettings())

    # --- building ---

    def _build(self) -> None:
        s = self.settings
        texts = [
            (number, which, text) for number, item in enumerate(self.items) for which, text in enumerate(item.texts)
        ]
        self._words = kernel.words_of(pa.array([text for *_, text in texts], pa.string()))
        item = np.array([number for number, *_ in texts], np.int64)
        main = np.array([i == 0 for _, i, _ in texts], bool)
        self._text_of = np.flatnonzero(main)  # of each item
        words = np.diff(self._words.first)
        for number in np.flatnonzero(words[main] < s.min_words).tolist():
            self.unchecked[number] = f"{words[self._text_of[number]]} words, fewer than {s.min_words}"
        checked = words[self._text_of][item] >= s.min_words
        chosen = {HIT: checked & (main | (words >= s.ngram))}
        sizes = {HIT: np.minimum(words, s.ngram)}
        if s.overlap_ngram is not None:
            chosen[OVERLAP] = checked & main & (words >= s.overlap_ngram)
            sizes[OVERLAP] = np.full(len(words), s.overlap_ngram)
        if s.containment:
            chosen[SEED] = checked & main & (words >= SEED_WORDS)
            sizes[SEED] = np.full(len(words), SEED_WORDS)
        parts: dict[str, list[np.ndarray]] = {"hash": [], "word": [], "item": [], "role": []}
        for role, which in chosen.items():
            hashes, word, text = kernel.gram_hashes(self._words, np.flatnonzero(which), sizes[role][which])
            parts["hash"].append(hashes)
            parts["word"].append(word)
            parts["item"].append(item[text] if len(text) else text)
            parts["role"].append(np.full(len(hashes), (HIT, OVERLAP, SEED).index(role), np.int64))
        self._index_grams({name: np.concatenate(found) for name, found in parts.items()})
        self._sizes = np.unique(np.concatenate([sizes[role][which] for role, which in chosen.items()])).astype(np.int64)
        exact = {s.ngram, s.overlap_ngram}
        self._inexact = SEED_WORDS if s.containment and SEED_WORDS not in exact and s.min_words > SEED_WORDS else -1

    def _index_grams(self, columns: dict[str, np.ndarray]) -> None:
        """Hashes -> table and postings, without the n-grams that too many items share."""
        hashes, item, role, word = (columns[name] for name in ("hash", "item", "role", "word"))
        distinct, first_at, gram = np.unique(hashes, return_index=True, return_inverse=True)
        names = sorted({i.benchmark for i in self.items})
        benchmark = np.array([names.index(i.benchmark) for i in self.items], np.int64)
        pairs = _distinct_pairs(gram, item)
        # Items of each benchmark that have the n-gram, whatever its role.
        cells, counts = np.unique(pairs[0] * max(1, len(names)) + benchmark[pairs[1]], return_counts=True)
        common = cells[counts > self.settings.max_items_per_ngram]
        for cell in common % max(1, len(names)):
            self.ignored[names[int(cell)]] = self.ignored.get(names[int(cell)], 0) + 1
        ignored = np.zeros(len(distinct), bool)
        ignored[common // max(1, len(names))] = True
        stays = ~ignored[gram]
        self.ngrams = int((~ignored).sum())
        number_of = np.cumsum(~ignored) - 1
        self._table = kernel.table_of(distinct[~ignored], word[first_at[~ignored]])
        gram, item, role = number_of[gram[stays]], item[stays], role[stays]
        self._hits = self._postings(gram[role == 0], item[role == 0])
        self._overlaps = self._postings(gram[role == 1], item[role == 1])
        self._overlap_grams = np.bincount(self._overlaps.items, minlength=len(self.items))
        seeds = np.zeros(max(1, self.ngrams), bool)
        seeds[gram[role == 2]] = True
        self._is_seed = seeds
        checked = set(item.tolist())
        for number in range(len(self.items)):
            if number not in checked and number not in self.unchecked:
                self.unchecked[number] = "all its n-grams are shared by too many items"

    def _postings(self, gram: np.ndarray, item: np.ndarray) -> _Postings:
        if not len(gram):
            return _Postings(np.zeros(self.ngrams + 1, np.int64), np.zeros(0, np.int64))
        pairs = _distinct_pairs(gram, item)
        starts = np.concatenate([[0], np.cumsum(np.bincount(pairs[0], minlength=self.ngrams))])
        return _Postings(starts.astype(np.int64), pairs[1])

    def facts(self) -> dict[str, Any]:
        """Figures of the index by benchmark."""
        out: dict[str, Any] = {}
        for number, item in enumerate(self.items):
            row = out.setdefault(item.benchmark, {"items": 0, "unchecked": 0, "ignored_ngrams": 0})
            row["items"] += 1
            row["unchecked"] += number in self.unchecked
        for name, count in self.ignored.items():
            out[name]["ignored_ngrams"] = count
        return out

    # --- searching ---

    def search(
        self, texts: pa.Array | pa.ChunkedArray, counters: Counter[str] | None = None
    ) -> Iterator[tuple[int, list[Found]]]:
        """(row, items found in it, worst first) for each document that holds something. texts: string (n,).

        Counts `passages_not_searched`, those beyond MAX_PASSAGES of a document.
        """
        counters = Counter() if counters is None else counters
        if not self.ngrams:
            return
        offsets, data = string_views(texts)
        matches = self._matches(offsets, data)
        rows = matches[:, 0]
        seed = self._is_seed[matches[:, 3]] & (matches[:, 1] == SEED_WORDS)
        exact = matches[:, 1] != self._inexact
        passages = self._passages(matches[seed]) if self.settings.containment else {}
        interesting = np.unique(np.concatenate([rows[exact], np.array(sorted(passages), np.int64)]))
        starts, stops = np.searchsorted(rows, interesting), np.searchsorted(rows, interesting, side="right")
        for row, start, stop in zip(interesting.tolist(), starts.tolist(), stops.tolist(), strict=True):
            found: dict[int, Found] = {}
            self._exact(matches[start:stop][exact[start:stop]], found)
            if row in passages:
                text = data[offsets[row] : offsets[row + 1]].tobytes().decode()
                counters["passages_not_searched"] += self._contained(text, passages[row], found)
            if found:
                yield row, sorted(found.values(), key=lambda f: (-f.hits, -f.overlap, -f.containment, f.item))

    def _matches(self, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """(matches, 4) int64, as `kernel.find` gives them."""
        room = 4096
        while True:
            matches = np.empty((room, 4), np.int64)
            count = kernel.find(
                offsets,
                data,
                *fold(),
                self._sizes,
                self._inexact,
                *self._table,
                self._words.text,
                self._words.begins,
                self._words.ends,
                matches,
            )
            if count <= room:
                return matches[:count]
            room = int(count)

    def _exact(self, matches: np.ndarray, found: dict[int, Found]) -> None:
        """Hits and overlap of one document."""
        grams: defaultdict[int, set[int]] = defaultdict(set)
        spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for _, size, word, gram in matches.tolist():
            span = (word, word + size - 1)
            for item in self._hits.of(gram):
                entry = found.setdefault(item, Found(item))
                entry.hits += 1
                entry.hit_spans.append(span)
            for item in self._overlaps.of(gram):
                grams[item].add(gram)
                spans[item].append(span)
        for item, distinct in grams.items():
            entry = found.setdefault(item, Found(item))
            entry.overlap = len(distinct) / int(self._overlap_grams[item])
            entry.overlap_spans = spans[item]

    def _passages(self, seeds: np.ndarray) -> dict[int, list[tuple[int, int]]]:
        """Matches of seeds -> row -> stretches of words (first, last) where many stand close together."""
        out: dict[int, list[tuple[int, int]]] = {}
        if not len(seeds):
            return out
        rows, words = seeds[:, 0], seeds[:, 2]
        breaks = np.flatnonzero((np.diff(rows) != 0) | (np.diff(words) > SEED_GAP)) + 1
        starts = np.concatenate([[0], breaks])
        stops = np.concatenate([breaks, [len(seeds)]])
        gains = np.minimum(np.append(np.diff(words), SEED_WORDS), SEED_WORDS)  # words that the next run does not cover
        gains[stops - 1] = SEED_WORDS
        covered = np.add.reduceat(gains, starts)
        for start, stop, words_covered in zip(starts.tolist(), stops.tolist(), covered.tolist(), strict=True):
            if words_covered >= MIN_COVERED:
                first, last = int(words[start]), int(words[stop - 1]) + SEED_WORDS - 1
                out.setdefault(int(rows[start]), []).append((first, last))
        return out

    def _contained(self, text: str, passages: list[tuple[int, int]], found: dict[int, Found]) -> int:
        """Containment of the items that the search names for the passages of one document -> passages left out."""
        words = kernel.words_of(pa.array([text])).of(0).split(b" ")
        explained = np.zeros(len(words), bool)
        for first, last in {span for entry in found.values() for span in entry.hit_spans}:
            explained[first : last + 1] = True
        pieces = [
            (at, min(last, at + PASSAGE_WORDS - 1))
            for first, last in passages
            for at in range(first, max(first + 1, last - PASSAGE_WORDS // 2 + 2), PASSAGE_WORDS // 2)
            if explained[at : min(last + 1, at + PASSAGE_WORDS)].mean() < 0.5
        ]
        named: set[int] = set()
        for first, last in pieces[:MAX_PASSAGES]:
            passage = _pairs(words[first : last + 1])
            for item in set(self._ensemble.query(_minhash(passage), len(passage))) - named:
                wanted = self._pairs_of(item)
                if len(wanted & passage) >= MIN_SHARED * min(len(passage), len(wanted)):
                    named.add(item)  # the search errs on the side of naming too many
        places: defaultdict[tuple[bytes, ...], list[int]] = defaultdict(list)
        for at in range(len(words) - PAIR + 1 if named else 0):
            places[tuple(words[at : at + PAIR])].append(at)
        for item in named:
            wanted = self._pairs_of(item)
            count, span = kernel.densest([places.get(pair, ()) for pair in wanted], 2 * len(self._words_of(item)), PAIR)
            entry = found.setdefault(item, Found(item))
            entry.containment, entry.passage = count / len(wanted), span
        return max(0, len(pieces) - MAX_PASSAGES)

    def _words_of(self, item: int) -> list[bytes]:
        return self._words.of(int(self._text_of[item])).split(b" ")

    def _pairs_of(self, item: int) -> set[tuple[bytes, ...]]:
        if item not in self._pairs:
            self._pairs[item] = _pairs(self._words_of(item))
        return self._pairs[item]

    @cached_property
    def _ensemble(self) -> Any:
        """The items as datasketch indexes them, made when a passage is first asked for."""
        from datasketch import MinHashLSHEnsemble

        # A missed item is worse than one that is counted for nothing.
        ensemble = MinHashLSHEnsemble(SEARCH_THRESHOLD, PERMUTATIONS, num_part=4, m=2, weights=(0.125, 0.875))
        entries = []
        for number in range(len(self.items)):
            if number not in self.unchecked:
                pairs = _pairs(self._words_of(number))
                entries.append((number, _minhash(pairs), len(pairs)))
        ensemble.index(entries)
        return ensemble


def _pairs(words: Sequence[bytes]) -> set[tuple[bytes, ...]]:
    """The distinct pairs of neighbours."""
    return {tuple(words[i : i + PAIR]) for i in range(len(words) - PAIR + 1)}


def _distinct_pairs(gram: np.ndarray, item: np.ndarray) -> np.ndarray:
    """(2, pairs) int64, by n-gram, then item."""
    order = np.lexsort((item, gram))
    pairs = np.stack([gram[order], item[order]])
    new = np.ones(len(gram), bool)
    new[1:] = (np.diff(pairs, axis=1) != 0).any(axis=0)
    return pairs[:, new]


@cache
def _empty_minhash() -> Any:
    from datasketch import MinHash

    return MinHash(PERMUTATIONS)


def _minhash(pairs: Iterable[tuple[bytes, ...]]) -> Any:
    signature = _empty_minhash().copy()  # a new one would draw its permutations again, most of its time
    signature.update_batch([b" ".join(pair) for pair in pairs])
    return signature
