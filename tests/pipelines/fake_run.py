"""Builds a small run folder that keeps the contracts of docs/architecture.md, without running any real stage.

The books are made by the ledger's own functions from the documents that are written, so a page drawn from it can be
checked against the Parquet files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.stages.documents import (
    Batch,
    apply_decisions,
    cut,
)
from gristmill.stages.ledger import Amount, FileRecord, ShardLedger, StageLedger, book, count_measures, sizes
from gristmill.stages.removals import Removals, tally
from gristmill.stages.shards import checksum

sys.path.append(str(Path(__file__).parent))
from fake_after import MODEL, write_ablation, write_json, write_tokens
from fake_stages import FakeExact, FakeLanguage, FakeQuality

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> <!-- & \u2028"
WORDS = {
    "en": [
        "the",
        "a",
        "grain",
        "mill",
        "stone",
        "turns",
        "water",
        "wheel",
        "flour",
        "bread",
        "and",
        "of",
        "to",
        "river",
    ],
    "de": [
        "der",
        "die",
        "das",
        "Korn",
        "Mühle",
        "Stein",
        "dreht",
        "Wasser",
        "Rad",
        "Mehl",
        "Brot",
        "und",
        "am",
        "Fluss",
    ],
    "zh": ["磨坊", "谷物", "石头", "水", "面粉", "面包", "河流", "和", "轮子", "转动"],
    "ar": ["طاحونة", "حبوب", "حجر", "ماء", "دقيق", "خبز", "نهر", "و", "عجلة"],
}
HOSTS = ["example.org", "mill.example.com", "bread.co.uk", "news.example.net", "korn.de", "例え.jp"]


@dataclass
class FakeRun:
    """What to build."""

    documents: int = 240
    sources: Sequence[str] = ("docs", "forum", "news")
    shards_per_source: int = 2
    seed: int = 0
    extra_texts: Sequence[str] = ()  # put at the front of the first shard
    sampled_text: int = 10_000  # documents per shard and reason that keep their text
    row_group: int = 64  # documents; real parts have 8,192
    parts: frozenset[str] = field(default_factory=lambda: frozenset({"tokens", "models", "ablation", "inputs"}))

    def build(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
        batches = self._inputs()
        if "inputs" in self.parts:
            listing = [
                {
                    "index": i,
                    "source": b["source"][0].as_py() if b.num_rows else "",
                    "path": f"in/{i}.jsonl.gz",
                    "format": "jsonl",
                    "size": 1000 + i,
                    "stamp": "0",
                }
                for i, b in enumerate(batches)
            ]
            (folder / "inputs.json").write_bytes(orjson.dumps(listing))
        kept = [self._first_segment(folder, i, batch) for i, batch in enumerate(batches)]
        final = self._exact_segment(folder, kept)
        if "models" in self.parts:
            write_json(folder / "models/quality/card.json", MODEL)
        if "tokens" in self.parts:
            write_tokens(folder, final)
        if "ablation" in self.parts:
            write_ablation(folder)
        return folder

    def _inputs(self) -> list[Batch]:
        rng = np.random.default_rng(self.seed)
        shards = [s for s in self.sources for _ in range(self.shards_per_source)]
        out = []
        for i, source in enumerate(shards):
            count = self.documents // len(shards) + (i < self.documents % len(shards))
            rows = [_row(rng, source, i, n) for n in range(count)]
            if i == 0:
                for n, text in enumerate(self.extra_texts):
                    rows.append({**_row(rng, source, i, count + n), "doc_id": f"extra-{n}", "text": text})
            out.append(pa.RecordBatch.from_pylist(rows, schema=INPUT_SCHEMA))
        return out

    def _first_segment(self, folder: Path, shard: int, batch: Batch) -> Batch:
        source = batch["source"][0].as_py() if batch.num_rows else self.sources[shard // self.shards_per_source]
        read = StageLedger(stage="read", seconds=0.5)
        empty = pc.equal(pc.utf8_length(batch["text"]), 0).to_numpy(zero_copy_only=False)
        result = cut(batch, {"empty": empty})
        book(read, batch, result.kept, result.dropped, result.counters)
        broken = 1 if shard == 0 and batch.num_rows else 0  # a record that could not be read at all
        if broken:
            read.failed["bad_json"] = Amount(documents=1, bytes=17)
            read.read = read.read + read.failed["bad_json"]
        books, dropped = [read], [("read", result.dropped)]
        current = result.kept
        for stage in (FakeLanguage(), FakeQuality()):
            sums = StageLedger(stage=stage.name, seconds=0.25 * (shard + 1))
            result = stage(current)
            book(sums, current, result.kept, result.dropped, result.counters)
            count_measures(sums, stage.measures, result.kept, result.dropped, current)
            books.append(sums)
            dropped.append((stage.name, result.dropped))
            current = result.kept
        problems = [f"in/{shard}.jsonl.gz, line 7: not JSON {HOSTILE}"] if broken else []
        self._publish(folder, "01-extract", shard, source, books, current, dropped, problems)
        return current

    def _exact_segment(self, folder: Path, batches: list[Batch]) -> list[Batch]:
        """Exact duplicates over all shards: the first one stays."""
        first: dict[str, tuple[int, str]] = {}
        sizes: dict[str, int] = {}
        for i, batch in enumerate(batches):
            for doc_id, text in zip(batch["doc_id"].to_pylist(), batch["text"].to_pylist(), strict=True):
                first.setdefault(text, (i, doc_id))
                sizes[text] = sizes.get(text, 0) + 1
        out = []
        for i, batch in enumerate(batches):
            rows = [
                {
                    "doc_id": d,
                    "reason": None if first[t] == (i, d) else "exact_duplicate",
                    "exact.cluster": first[t][1],
                    "exact.copies": float(sizes[t]),
                }
                for d, t in zip(batch["doc_id"].to_pylist(), batch["text"].to_pylist(), strict=True)
                if sizes[t] > 1
            ]
            schema = pa.schema([("doc_id", pa.string()), ("reason", pa.string()), *FakeExact.adds.items()])
            result, _ = apply_decisions(FakeExact(), batch, pa.Table.from_pylist(rows, schema=schema))
            sums = StageLedger(stage="exact", seconds=0.125)
            book(sums, batch, result.kept, result.dropped, result.counters)
            count_measures(sums, FakeExact.measures, result.kept, result.dropped, batch)
            source = self.sources[i // self.shards_per_source]
            self._publish(folder, "02-exact", i, source, [sums], result.kept, [("exact", result.dropped)], [])
            out.append(result.kept)
        clusters: dict[str, int] = {}
        for size in sizes.values():
            if size > 1:
                clusters[str(size)] = clusters.get(str(size), 0) + 1
        card = {"documents": sum(sizes.values()), "clusters": sum(clusters.values()), "cluster_sizes": clusters}
        write_json(folder / "02-exact/cluster/card.json", card)
        return out

    def _publish(
        self,
        folder: Path,
        segment: str,
        shard: int,
        source: str,
        books: list[StageLedger],
        kept: Batch,
        dropped: Iterable[tuple[str, Batch]],
        problems: list[str],
    ) -> None:
        part = f"part-{shard:05d}.parquet"
        for kind in ("kept", "dropped", "ledger"):
            (folder / segment / kind).mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_batches([kept]), folder / segment / "kept" / part, row_group_size=self.row_group)
        tables = [self._dropped(stage, batch) for stage, batch in dropped]
        pq.write_table(pa.concat_tables(tables, promote_options="default"), folder / segment / "dropped" / part)
        files = []
        for kind in ("kept", "dropped"):
            path = folder / segment / kind / part
            rows = pq.ParquetFile(path).metadata.num_rows
            files.append(
                FileRecord(path=f"{kind}/{part}", rows=rows, bytes=path.stat().st_size, xxh3=checksum(str(path)))
            )
        ledger = ShardLedger(
            key=f"{shard:032x}",
            segment=segment,
            shard=shard,
            source=source,
            input=f"in/{shard}.jsonl.gz",
            stages=books,
            removals=self._removals(kept, dropped),
            files=files,
            problems=problems,
            seconds=sum(b.seconds for b in books),
            ended=1_800_000_000.0 + 10 * shard + (100 if segment.startswith("02") else 0),
            memory_bytes=(300 + shard) * 1_000_000,
            versions={"gristmill": "0.1.0", "pyarrow": pa.__version__},
            host="mill-1",
        )
        ledger.check(f"{segment}, shard {shard}")
        (folder / segment / "ledger" / f"part-{shard:05d}.json").write_bytes(ledger.sealed())

    def _removals(self, kept: Batch, dropped: Sequence[tuple[str, Batch]]) -> Removals:
        """As if no dropped document broke a rule of a later stage."""
        out = Removals()
        for stage, batch in (("", kept), *dropped):
            reasons = batch["reasons"].to_pylist() if stage else []
            names = dict.fromkeys(name for of_document in reasons for name in of_document)
            fails = {(stage, name): np.array([name in r for r in reasons], bool) for name in names}
            language = batch["language"].to_pylist() if "language" in batch.schema.names else [None] * batch.num_rows
            out = out.merge(tally(fails, sizes(batch)[0], language))
        return out

    def _dropped(self, stage: str, batch: Batch) -> pa.Table:
        measures = [n for n in batch.schema.names if "." in n or n == "language_score"]
        numbers = pa.array(range(batch.num_rows), pa.int64())
        text = pc.if_else(pc.less(numbers, self.sampled_text), batch["text"], pa.scalar(None, pa.string()))
        rows = batch.num_rows
        language = batch["language"] if "language" in batch.schema.names else pa.nulls(rows, pa.string())
        columns = {
            "doc_id": batch["doc_id"],
            "source": batch["source"],
            "url": batch["url"],
            "dump": batch["dump"],
            "date": batch["date"],
            "stage": pa.array([stage] * batch.num_rows, pa.string()),
            "reasons": batch["reasons"],
            "chars": pc.utf8_length(batch["text"]).cast(pa.int64()),
            "bytes": pc.binary_length(batch["text"]).cast(pa.int64()),
            "language": language,
            **{name: batch[name] for name in measures},
            "text": text,
        }
        return pa.table(columns)


INPUT_SCHEMA = pa.schema([(n, pa.string()) for n in ("doc_id", "source", "url", "dump", "date", "metadata", "text")])


def _row(rng: np.random.Generator, source: str, shard: int, n: int) -> dict[str, str | None]:
    languages = {"forum": ("en", "de"), "news": ("de", "zh", "ar")}.get(source, ("en",))
    language = languages[n % len(languages)]
    length = int(np.clip(rng.lognormal(4.5, 1.3), 0, 3000))
    words = [WORDS[language][int(k)] for k in rng.integers(0, len(WORDS[language]), length)]
    lines = [" ".join(words[i : i + 12]) for i in range(0, length, 12)]
    text = "\n".join(lines)
    if n % 17 == 5:
        text = "This page has moved. " * 12  # the same in every shard
    if n % 29 == 3:
        text = ""
    if n % 31 == 7:
        text = "Donaudampfschifffahrtsgesellschaft " * 40
    host = HOSTS[int(rng.integers(0, len(HOSTS)))]
    return {
        "doc_id": f"{source}-{shard}-{n}",
        "source": source,
        "url": None if n % 13 == 0 else f"https://www.{host}/{source}/{n}.html",
        "dump": "CC-MAIN-2024-10" if shard % 2 else "CC-MAIN-2023-50",
        "date": f"2024-0{1 + n % 9}-11T10:00:00Z",
        "metadata": orjson.dumps({"language": language, "score": float(np.round(rng.beta(4, 2), 3))}).decode(),
        "text": text,
    }


RECIPE = """\
name: fake
sources:
  docs: {paths: [in/0.jsonl.gz], format: jsonl}
stages:
- fake_language:
    min_score: 0.3
- fake_quality:
    min_words: 20
    max_words: 900
    min_mean_word_length: 2.2
    max_mean_word_length: 8.0
- exact: {}
"""
