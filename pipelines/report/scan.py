"""Languages, domains and dates: the few facts of documents that no ledger counts, read from their columns.

Only the columns asked for are read, and no more documents than `limit`, from shards spread over the run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.pipelines.inspect import spread
from gristmill.pipelines.open_run import Run
from gristmill.stages.lines_across import registered_domain

LIMIT = 1_000_000  # documents; some seconds
HOST = r"^[A-Za-z][A-Za-z0-9+.\-]*://(?:[^/?#@]*@)?(?P<host>[^/:?#]+)"


@dataclass
class Scan:
    """Counts of kept and dropped documents by value. Null is counted under the empty string."""

    languages: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    domains: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    dumps: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})
    months: dict[bool, Counter[str]] = field(default_factory=lambda: {True: Counter(), False: Counter()})  # "2024-05"
    buckets: dict[str, Counter[str]] = field(default_factory=dict)  # column -> kept documents by perplexity bucket
    seen: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    documents: int = 0  # in the files

    @property
    def looked_at(self) -> int:
        return sum(self.seen.values())


def scan(run: Run, limit: int = LIMIT) -> Scan:
    """Counts over kept and dropped documents."""
    out = Scan()
    for kept in (True, False):
        hosts: Counter[str] = Counter()
        for part in _parts(run, kept, limit // 2, out):
            with run.open_parquet(part) as file:
                asked = ("url", "language", "dump", "date")
                names = [n for n in file.schema_arrow.names if n in asked or (kept and n.endswith(".bucket"))]
                for batch in file.iter_batches(columns=names):
                    _count(batch, kept, hosts, out)
        for host, count in hosts.items():
            out.domains[kept][registered_domain(host)] += count
    return out


def _parts(run: Run, kept: bool, limit: int, out: Scan) -> list[str]:
    """Parts with about `limit` documents at most; one at least."""
    parts = run.parts("kept" if kept else "dropped")
    sizes = [run.open_parquet(part).metadata.num_rows for part in parts]
    out.documents += sum(sizes)
    if sum(sizes) <= limit:
        chosen = list(range(len(parts)))
    else:
        chosen = spread(len(parts), max(1, limit * len(parts) // sum(sizes)))
    out.seen[kept] += sum(sizes[i] for i in chosen)
    return [parts[i] for i in chosen if sizes[i]]


def _count(batch: pa.RecordBatch, kept: bool, hosts: Counter[str], out: Scan) -> None:
    names = batch.schema.names
    if "language" in names:
        _add(out.languages[kept], batch["language"])
    if "url" in names:
        _add(hosts, pc.utf8_lower(pc.struct_field(pc.extract_regex(batch["url"].cast(pa.string()), HOST), "host")))
    if "dump" in names:
        _add(out.dumps[kept], batch["dump"])
    if "date" in names:
        _add(out.months[kept], pc.utf8_slice_codeunits(batch["date"].cast(pa.string()), 0, 7))
    for name in names:
        if name.endswith(".bucket"):
            _add(out.buckets.setdefault(name, Counter()), batch[name])


def _add(counter: Counter[str], values: Any) -> None:
    for entry in pc.value_counts(values):
        value = entry["values"].as_py()
        counter[value or ""] += entry["counts"].as_py()
