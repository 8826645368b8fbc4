"""Lines that many pages of one site have: navigation, footers, cookie banners.

    lines_across:
      max_documents: 10     # of a registered domain that may have a line
      max_share: 0.02       # of the domain's documents; the larger of both limits counts

A line is known by 64 bits of its normalised words (`paragraphs.py`), a site by its registered domain (the public
suffix list in the package tldextract). Documents without an address are left alone, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from gristmill.stages import duplicates, parts
from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings
from gristmill.stages.kernels import hashing
from gristmill.stages.kernels import parts as kernels
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.paragraphs import normalised_keys
from gristmill.stages.signatures import check_settings

SHOWN = 400  # lines that the figures describe
SHOWN_CHARS = 200  # of each


@cache
def _extractor() -> Any:
    import tldextract

    return tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)  # the snapshot in the package: no network


@lru_cache(1 << 16)
def registered_domain(host: str) -> str:
    """The part of a host that was registered: `example.co.uk` of `www.example.co.uk`; the host where there is none."""
    found = _extractor()(host)
    return f"{found.domain}.{found.suffix}" if found.domain and found.suffix else host


def domains_of(urls: pa.Array) -> pa.Array:
    """Registered domains of addresses, string (n,); null where there is no host."""
    hosts = pc.utf8_lower(
        pc.struct_field(pc.extract_regex(urls, r"^[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)"), "host")
    )
    coded = hosts.dictionary_encode()
    names = pa.array([registered_domain(host) for host in coded.dictionary.to_pylist()], pa.string())
    return names.take(coded.indices)


class LinesAcross(Settings):
    """Removes lines that many documents of one registered domain have; drops documents that have too little left."""

    name: ClassVar[str] = "lines_across"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("text", "source", "dump", "url")
    adds: ClassVar[Mapping[str, pa.DataType]] = {"lines_across.removed_chars": pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure("lines_across.removed_chars", "share of characters"),)
    without_effect: ClassVar[tuple[str, ...]] = ("sort_bytes",)
    after_signing: ClassVar[tuple[str, ...]] = ("max_documents", "max_share", "min_chars_left")

    max_documents: int = Field(10, ge=1)  # of a domain that may have the same line
    max_share: float = Field(0.0, ge=0, le=1)  # of the domain's documents that may have it, where that is more
    min_words: int = Field(1, ge=1)  # shorter lines are never removed
    min_chars_left: int = Field(1, ge=0)  # of a document that lost something; fewer drop it
    sort_bytes: int = Field(1 << 30, ge=1 << 10)  # memory for sorting; more lines take more passes

    def rules(self) -> Sequence[Rule]:
        return ()

    def described(self) -> str:
        """What signatures must have in common to be compared; stored with them."""
        return f"lines_across {self.version} min_words {self.min_words}"

    def sign(self, batch: Batch) -> Batch:
        """-> identity, domain string, keys large_list<uint64>: one for each line, 0 for those never removed."""
        keys, first = normalised_keys(batch["text"], 1, self.min_words)
        domain = {"domain": domains_of(batch["url"])}
        return parts.signed(batch, "first", parts.keys_column(keys, first), self.described(), domain)

    def cluster(self, signatures: Sequence[pa.Table]) -> tuple[list[pa.Table], Mapping[str, Any]]:
        """-> decisions for each shard (see `parts.py`), figures: documents, lines, removed, documents_edited,
        without_domain, and `commonest`: of the lines removed from most documents the domain, the number of documents,
        and where one is (shard, doc_id, line), for `illustrate`."""
        check_settings(signatures, self.described(), ("keys", "domain"))
        starts = duplicates.row_starts(signatures)
        keys = parts.Keys(signatures, self.sort_bytes)
        domains = pa.chunked_array([c for t in signatures for c in t["domain"].chunks], pa.string())
        coded = domains.combine_chunks().dictionary_encode()
        known = coded.is_valid().to_numpy(zero_copy_only=False)
        codes = pc.fill_null(coded.indices, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        size = np.bincount(codes[known], minlength=max(1, len(coded.dictionary)))
        limits = np.maximum(self.max_documents, np.floor(self.max_share * size)).astype(np.uint32)[codes]
        removed, runs = 0, [np.zeros((0, 2), np.int64)]

        def use(ordered: np.ndarray, places: np.ndarray, owner: np.ndarray, part: np.ndarray) -> None:
            nonlocal removed
            noted = np.empty((len(ordered) // 2, 2), np.int64)
            marked, count = kernels.mark_frequent(ordered, places, owner, part, limits, keys.marks, noted)
            removed += marked
            runs.append(_largest(np.concatenate([runs.pop(), noted[:count]])))

        rows = np.arange(keys.documents, dtype=np.uint32)
        keys.sorted_ranges(known, _salts(coded.dictionary)[codes], rows, use)
        decisions = keys.decisions(len(signatures))
        figures = {
            "documents": keys.documents,
            "lines": keys.parts,
            "removed": removed,
            "documents_edited": sum(table.num_rows for table in decisions),
            "without_domain": int((~known).sum()),
            "commonest": list(_named(signatures, starts, keys, runs[0], domains)),
        }
        return decisions, figures

    def illustrate(self, figures: Mapping[str, Any], text_of: Callable[[int, Sequence[str]], Mapping[str, str]]) -> Any:
        """The figures with the text of the commonest lines in place of where they are.

        text_of(shard, doc_ids) -> texts by doc_id.
        """
        wanted: dict[int, list[str]] = {}
        for row in figures["commonest"]:
            wanted.setdefault(row["shard"], []).append(row["doc_id"])
        texts = {shard: text_of(shard, ids) for shard, ids in wanted.items()}
        shown = []
        for row in figures["commonest"]:
            lines = texts[row["shard"]][row["doc_id"]].split("\n")
            line = lines[row["line"]][:SHOWN_CHARS]
            shown.append({"domain": row["domain"], "documents": row["documents"], "text": line})
        return {**figures, "commonest": shown}

    def apply(self, batch: Batch, decisions: pa.Table) -> tuple[Result, int]:
        """The documents without the lines of their site."""
        return parts.edited(batch, decisions, 1, self.name, "lines", self.min_chars_left)


def _salts(names: pa.Array) -> np.ndarray:
    """(max(1, n),) uint64, a number for each name."""
    hashes = np.zeros((max(1, len(names)), 2), np.uint64)
    if len(names):
        hashing.hash_raw(*string_views(names), hashes)
    return hashes[:, 0]


def _largest(runs: np.ndarray) -> np.ndarray:
    """The SHOWN rows with most documents, ties by the smaller part."""
    return runs[np.lexsort((runs[:, 0], -runs[:, 1]))[:SHOWN]]


def _named(
    tables: Sequence[pa.Table], starts: np.ndarray, keys: parts.Keys, runs: np.ndarray, domains: pa.ChunkedArray
) -> Any:
    """Where the parts of runs (m, 2) are, in the order of the runs."""
    chunks = keys.chunks()
    firsts = np.array([first for _, first, _, _ in chunks], np.int64)
    for part, documents in runs.tolist():
        row, first, of_document, _ = chunks[int(np.searchsorted(firsts, part, side="right")) - 1]
        inside = part - first + int(of_document[0])
        at = int(np.searchsorted(of_document, inside, side="right")) - 1
        shard = int(np.searchsorted(starts, row + at, side="right")) - 1
        yield {
            "domain": domains[row + at].as_py(),
            "documents": documents,
            "shard": shard,
            "doc_id": tables[shard]["doc_id"][row + at - int(starts[shard])].as_py(),
            "line": inside - int(of_document[at]),
        }
