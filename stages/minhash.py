"""Near-duplicates: documents that share most of their runs of words.

    minhash:
      ngram: 5           # words
      bands: 14
      rows: 8
      keep: longest
      verify: jaccard
      min_similarity: 0.8

sign: normalised words, shingles, signature, one 64-bit key a band. cluster: one band at a time, equal keys are joined,
in the order and on the condition that the settings ask for. keep: by doc_id (documents.apply_decisions).

A shingle is `ngram` words. Chinese, Japanese, Thai, Lao, Khmer and Burmese have no spaces between words: there two
characters of Han or kana, or four letters of the others, count as one word (kernels/shingles.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, cast

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from gristmill.stages import duplicates, key_ranges, signatures
from gristmill.stages.documents import Batch, Measure, Rule, Settings, log_edges
from gristmill.stages.kernels import cluster, minhash
from gristmill.stages.kernels.buffers import string_views

REASON = "near_duplicate"
FLOOR = 1_000  # documents; max_cluster_share says nothing about smaller clusters


class MinHash(Settings):
    """Keeps one document of each cluster of near-duplicates.

    The defaults are FineWeb's (Penedo et al. 2024, section 3.4; datatrove's MinhashConfig): 5 words, 14 bands of 8:
    pairs of Jaccard similarity 0.72 are found with probability 0.65, of 0.8 with 0.92, of 0.9 with 1.0.
    Documents of fewer than `ngram` words are compared as a whole. Documents without any word are never merged.

    against: what earlier runs have is dropped; with `against_action: mark` it stays, `minhash.older` says the doc_id
    of the older document, and what is removed is what would be removed without the earlier runs. Older signatures are
    mapped and sorted along; nothing of an earlier run is signed again.
    """

    name: ClassVar[str] = "minhash"
    version: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = cast(Any, signatures.Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = cast(
        Any,
        signatures.Adds({"minhash.cluster": pa.string(), "minhash.cluster_size": pa.float64()}, older="minhash.older"),
    )
    without_effect: ClassVar[tuple[str, ...]] = signatures.WITHOUT_EFFECT
    after_signing: ClassVar[tuple[str, ...]] = (
        *signatures.AFTER_SIGNING,
        *("min_similarity", "max_cluster", "max_cluster_share"),
    )
    measures: ClassVar[tuple[Measure, ...]] = (Measure("minhash.cluster_size", "documents", log_edges(1, 1e6)),)

    ngram: int = Field(default=5, ge=1, le=100)  # words
    bands: int = Field(default=14, ge=1, le=1_000)
    rows: int = Field(default=8, ge=1, le=1_000)  # places of the signature in a band
    threshold: float | None = Field(default=None, gt=0, lt=1)  # Jaccard; chooses bands and rows
    permutations: int = Field(default=112, ge=2, le=10_000)  # at most, when `threshold` chooses
    seed: int = 1
    normalize: signatures.Normalize = signatures.Normalize()
    scope: duplicates.Scope | tuple[duplicates.Scope, ...] = "global"  # a list: one after the other, with who is left
    keep: str = "longest"
    against: tuple[str, ...] = ()  # `sign` folders of earlier runs
    against_action: Literal["drop", "mark"] = "drop"  # what happens to documents that they have
    verify: Literal["none", "signature", "jaccard"] = "none"
    min_similarity: float = Field(default=0.75, ge=0, le=1)  # of two documents, for `verify` to join them
    max_cluster: int = Field(default=1_000_000, ge=1)  # documents
    max_cluster_share: float = Field(default=0.5, gt=0, le=1)  # of a source, for clusters of 1,000 and more
    max_shingles: int = Field(default=200_000, ge=1)  # a longer document is compared by a sample of so many
    memory_mb: float = Field(default=4_096, gt=0)  # of the worker that clusters; less of it takes more passes
    keep_signatures: bool = True  # for later runs; else they are removed when the segment is done

    _check_keep = field_validator("keep")(signatures.check_keep)

    @model_validator(mode="after")
    def _either_bands_or_threshold(self) -> MinHash:
        # By value, not by what was written: a resolved recipe names every default.
        changed = {k for k, f in type(self).model_fields.items() if getattr(self, k) != f.default}
        given = changed & {"bands", "rows"}
        if self.threshold is not None and given:
            raise ValueError(
                f"threshold chooses bands and rows, but {' and '.join(sorted(given))} is set too. Drop one."
            )
        if self.threshold is None and "permutations" in changed:
            raise ValueError("permutations bounds what `threshold` chooses; without it, set bands and rows.")
        return self

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(bands, rows) in force."""
        return (self.bands, self.rows) if self.threshold is None else choose_bands(self.threshold, self.permutations)

    @property
    def scopes(self) -> tuple[duplicates.Scope, ...]:
        """The scopes in order."""
        return (self.scope,) if isinstance(self.scope, str) else self.scope

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        bands, rows = self.shape
        return (
            f"minhash {self.version} ngram {self.ngram} bands {bands} rows {rows} seed {self.seed} "
            f"max_shingles {self.max_shingles} {self.normalize.described()}"
        )

    def rules(self) -> Sequence[Rule]:
        return ()

    def sign(self, batch: Batch) -> Batch:
        """-> identity, shingles uint32 (0: no word), capped uint8, band_00 ... uint64, and what `verify` needs."""
        offsets, data = string_views(batch["text"])
        n, (bands, rows) = batch.num_rows, self.shape
        keys = np.empty((bands, n), np.uint64)
        counts = np.empty(n, np.uint32)
        places = np.empty((n if self.verify == "signature" else 0, bands * rows), np.uint32)
        wanted = self.verify == "jaccard"
        sets = np.empty(int(offsets[-1] - offsets[0]) // 2 + n if wanted else 0, np.uint32)
        set_ends = np.empty(n if wanted else 0, np.int64)
        capped = np.zeros(n, np.uint8)
        minhash.sign(
            offsets, data, *self.normalize.fold, self.ngram, *_permutations(bands * rows, self.seed), bands, rows,
            self.max_shingles, keys, places, counts, capped, sets, set_ends,
        )  # fmt: skip
        columns = signatures.identity(batch, self.keep)
        columns["shingles"] = pa.array(counts)
        columns["capped"] = pa.array(capped)
        columns |= {band_name(band): pa.array(keys[band]) for band in range(bands)}
        if self.verify == "signature":
            columns["signature"] = pa.FixedSizeListArray.from_arrays(pa.array(places.reshape(-1)), bands * rows)
        if wanted:
            ends = np.concatenate([[0], set_ends]).astype(np.int32)
            columns["shingle_set"] = pa.ListArray.from_arrays(pa.array(ends), pa.array(sets[: ends[-1]]))
        return signatures.with_settings(columns, self.described())

    def cluster(self, signed: Sequence[pa.Table]) -> tuple[Sequence[pa.Table], Mapping[str, Any]]:
        """-> decisions for each shard, made when they are asked for; figures.

        Figures: documents, removed, removed_for_older, clusters, sizes, biggest; marked_for_older where they are
        marked; without_words, capped; bands, rows, recall (Jaccard -> probability that a pair is found); joined,
        not_similar (comparisons that came out under min_similarity), not_compared.
        Raises ClusterError for signatures of other settings, a doc_id twice in a shard, a cluster beyond the limits,
        memory_mb too little for so many documents.
        """
        bands, rows = self.shape
        tables = [*signed, *signatures.older(self.against)]
        verified_by = {"none": [], "signature": ["signature"], "jaccard": ["shingle_set"]}[self.verify]
        names = ["shingles", "capped", *map(band_name, range(bands)), *verified_by]
        signatures.check_settings(tables, self.described(), names)
        starts = duplicates.row_starts(tables)
        new = int(starts[len(signed)])
        comparable = np.empty(int(starts[-1]), bool)
        for first, values in duplicates.chunks(tables, "shingles"):
            comparable[first : first + len(values)] = values > 0
        keepers, counted = self._keepers(tables, starts, comparable, new)
        linked = None
        if self.against and self.against_action == "mark":
            linked = keepers  # what `drop` would do; what stays is decided without the older documents
            comparable[new:] = False
            keepers, counted = self._keepers(tables, starts, comparable, new)
        limits = {"documents": self.max_cluster, "share": self.max_cluster_share, "floor": FLOOR}
        duplicates.check_size(tables, starts, keepers, limits)
        figures = duplicates.figures(tables, starts, keepers, new) | counted
        figures["without_words"] = int(new - comparable[:new].sum())
        figures["capped"] = sum(int(values.sum()) for _, values in duplicates.chunks(signed, "capped"))
        if linked is not None:
            figures["marked_for_older"] = len(duplicates.marks(keepers, linked, new))
        figures |= {"bands": bands, "rows": rows}
        figures["recall"] = {f"{s / 100:.2f}": recall(s / 100, bands, rows) for s in range(50, 100, 5)}
        columns = ("minhash.cluster", "minhash.cluster_size", "minhash.older")
        return duplicates.Decisions(tables, starts, keepers, len(signed), REASON, columns, linked), figures

    def _keepers(
        self, tables: Sequence[pa.Table], starts: np.ndarray, comparable: np.ndarray, new: int
    ) -> tuple[np.ndarray, Counter[str]]:
        """Scope after scope, with who is left -> keepers (n,) uint32, and what was counted."""
        everyone = np.arange(len(comparable), dtype=np.uint32)
        keepers, counted = everyone, Counter[str]()
        for scope in self.scopes:
            room = key_ranges.room(
                tables, self.memory_mb, verified=self.verify != "none", scoped=self.scopes != ("global",)
            )
            alive = comparable & (keepers == everyone)
            roots, counts = self._roots(tables, starts, alive, scope, room.ranges)
            keepers = duplicates.elect(tables, starts, roots, new, room.members)[keepers]
            counted.update(counts)
        return keepers, counted

    def _roots(
        self, tables: Sequence[pa.Table], starts: np.ndarray, alive: np.ndarray, scope: duplicates.Scope, ranges: int
    ) -> tuple[np.ndarray, dict[str, int]]:
        """Joins, band after band, rows that share a key -> roots (n,) uint32, and what was counted."""
        n = int(starts[-1])
        parent = np.arange(n, dtype=np.uint32)
        salts = duplicates.salts(tables, scope)
        at, counts = np.zeros(0, np.int64), np.zeros(0, np.uint32)
        if self.verify != "none" and n:
            name = "signature" if self.verify == "signature" else "shingle_set"
            at, counts = cluster.addresses(pa.chunked_array([c for t in tables for c in t[name].chunks]))
        joined = failed = skipped = 0
        names = [band_name(band) for band in range(self.shape[0])]
        for keys, rows in key_ranges.sorted_ranges(tables, names, alive, salts, ranges):
            if self.verify == "none":
                joined += cluster.union_runs(keys, rows, parent)
                continue
            cap = 0 if self.verify == "signature" else self.max_shingles
            result = cluster.union_verified(keys, rows, parent, at, counts, cap, self.min_similarity)
            joined, failed, skipped = joined + result[0], failed + result[1], skipped + result[2]
        cluster.flatten(parent)
        return parent, {"joined": joined, "not_similar": failed, "not_compared": skipped}


def band_name(band: int) -> str:
    """The column of a band's keys."""
    return f"band_{band:02d}"


@lru_cache(maxsize=8)
def _permutations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    return minhash.permutations(count, seed)


def recall(similarity: float, bands: int, rows: int) -> float:
    """The probability that two documents of this Jaccard similarity share the key of a band."""
    return float(1 - (1 - similarity**rows) ** bands)


def choose_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """-> the (bands, rows) with the smallest sum of two areas: of `recall` below the threshold, of its miss above.

    The rule of datasketch.MinHashLSH with equal weights. Gauss-Legendre integration is exact here: the integrands
    are polynomials of degree bands * rows <= permutations.
    """
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    below, above = threshold * (nodes + 1) / 2, threshold + (1 - threshold) * (nodes + 1) / 2
    best = (np.inf, 0, 0)
    for bands in range(1, permutations + 1):
        for rows in range(1, permutations // bands + 1):
            false_positive = threshold / 2 * weights @ (1 - (1 - below**rows) ** bands)
            false_negative = (1 - threshold) / 2 * weights @ (1 - above**rows) ** bands
            best = min(best, (float(false_positive + false_negative), bands, rows))
    return best[1], best[2]
