"""Builds a small run folder that keeps the contracts of docs/architecture.md, without running any real stage.

The books are made by the ledger's own functions from the documents that are written, so a page drawn from it can be
checked against the Parquet files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.stages.documents import (
    Batch,
    Measure,
    Result,
    Rule,
    Settings,
    apply_decisions,
    cut,
    judge,
    linear_edges,
    log_edges,
    with_columns,
)
from gristmill.stages.ledger import Amount, FileRecord, ShardLedger, StageLedger, amount, book, count_measures, sizes
from gristmill.stages.removals import Removals, tally
from gristmill.stages.shards import checksum

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


class FakeQuality(Settings):
    """Two one-sided limits on words, one two-sided on their mean length, one without a measure."""

    name: ClassVar = "fake_quality"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"fake_quality.words": pa.float64(), "fake_quality.mean_word_length": pa.float64()}
    measures: ClassVar = (
        Measure("fake_quality.words", "words", log_edges(1, 10_000, 40)),
        Measure("fake_quality.mean_word_length", "characters per word", linear_edges(0, 20, 40)),
    )
    min_words: int = 20
    max_words: int = 900
    min_mean_word_length: float = 2.2
    max_mean_word_length: float = 8.0

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("too_few_words", "fake_quality.words", at_least=self.min_words, published="Rae et al. 2021, A1.1"),
            Rule("too_many_words", "fake_quality.words", at_most=self.max_words),
            Rule(
                "mean_word_length",
                "fake_quality.mean_word_length",
                at_least=self.min_mean_word_length,
                at_most=self.max_mean_word_length,
            ),
        )

    def __call__(self, batch: Batch) -> Result:
        texts = batch["text"].to_pylist()
        words = np.array([len(t.split()) for t in texts], dtype=np.float64)
        chars = np.array([sum(map(len, t.split())) for t in texts], dtype=np.float64)
        mean = np.divide(chars, words, out=np.full(len(words), np.nan), where=words > 0)
        named = {"fake_quality.words": words, "fake_quality.mean_word_length": pa.array(mean, from_pandas=True)}
        return judge(with_columns(batch, named), self.rules())


class FakeLanguage(Settings):
    """Keeps documents whose language score is high enough; a measure in a base column."""

    name: ClassVar = "fake_language"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"language": pa.string(), "language_score": pa.float64()}
    measures: ClassVar = (Measure("language_score", "probability"),)
    min_score: float = 0.3

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("unsure_language", "language_score", at_least=self.min_score),)

    def __call__(self, batch: Batch) -> Result:
        dates = batch["metadata"].to_pylist()
        told = [orjson.loads(d) for d in dates]
        named = {
            "language": pa.array([t["language"] for t in told]),
            "language_score": pa.array([t["score"] for t in told], pa.float64()),
        }
        return judge(with_columns(batch, named), self.rules())


class FakeExact(Settings):
    """The part of a global stage that `apply_decisions` looks at."""

    name: ClassVar = "exact"
    version: ClassVar = 1
    needs: ClassVar = ("text",)
    adds: ClassVar = {"exact.cluster": pa.string(), "exact.copies": pa.float64()}
    measures: ClassVar = (Measure("exact.copies", "documents", log_edges(1, 1000, 30)),)

    def rules(self) -> tuple[Rule, ...]:
        return ()


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
            _json(folder / "models/quality/card.json", MODEL)
        if "tokens" in self.parts:
            _tokens(folder, final)
        if "ablation" in self.parts:
            _ablation(folder)
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
        _json(folder / "02-exact/cluster/card.json", card)
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


def _json(path: Path, data: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(data))


def _tokens(folder: Path, batches: list[Batch]) -> None:
    (folder / "tokens/ledger").mkdir(parents=True, exist_ok=True)
    shards = []
    for i, batch in enumerate(batches):
        held = pa.array([n % 10 == 0 for n in range(batch.num_rows)], pa.bool_())
        source = batch["source"][0].as_py() if batch.num_rows else ""
        train, holdout = amount(batch.filter(pc.invert(held))), amount(batch.filter(held))
        train.tokens, holdout.tokens = train.bytes // 4, holdout.bytes // 4
        sums = StageLedger(
            stage="tokenize", read=train + holdout, kept=train, dropped={"holdout": holdout}, seconds=0.2
        )
        ledger = ShardLedger(
            key=f"{i:032x}", segment="tokens", shard=i, source=source, input=f"part-{i:05d}", stages=[sums], seconds=0.2
        )
        ledger.check(f"tokens, shard {i}")
        (folder / "tokens/ledger" / f"part-{i:05d}.json").write_bytes(ledger.sealed())
        for split, part, rows in (
            ("train", train, batch.filter(pc.invert(held))),
            ("holdout", holdout, batch.filter(held)),
        ):
            name = f"{'part' if split == 'train' else 'holdout'}-{i:05d}"
            lengths = pc.add(pc.divide(pc.binary_length(rows["text"]), 4), 1).cast(pa.uint32())
            with pa.ipc.new_file(folder / "tokens" / f"{name}.idx", pa.schema([("length", pa.uint32())])) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays([lengths], names=["length"]))
            shards.append(
                {
                    "name": name,
                    "source": source,
                    "split": split,
                    "documents": part.documents,
                    "tokens": part.tokens,
                    "bytes": part.bytes,
                    "bin_xxh3": "0" * 32,
                }
            )
    data = {"version": 1, "dtype": "uint16", "vocab_size": 4096, "tokenizer": "ab" * 16, "shards": shards}
    _json(folder / "tokens/shards.json", data)


def _ablation(folder: Path) -> None:
    """Three mixtures, three seeds; the keys of `trainer/ranking.py`."""
    rng = np.random.default_rng(3)
    weights = {"uniform": (1, 1, 1), "curriculum": (1, 2, 3), "docs_heavy": (8, 1, 1)}
    runs: list[dict[str, Any]] = []
    for mixture, base in (("uniform", 1.62), ("curriculum", 1.55), ("docs_heavy", 1.60)):
        for seed in (1, 2, 3):
            name = f"{mixture}-seed{seed}"
            steps = [_step(rng, step, base, weights[mixture]) for step in range(1, 201)]
            path = folder / "ablation" / name / "metrics.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(orjson.dumps(s).decode() + "\n" for s in steps), encoding="utf-8")
            by_source = {
                s: base + d + float(rng.normal(0, 0.01)) for s, d in (("docs", 0), ("forum", 0.2), ("news", 0.1))
            }
            runs.append(
                {
                    "name": name,
                    "mixture": mixture,
                    "seed": seed,
                    "status": "done",
                    "score": float(np.mean(list(by_source.values()))),
                    "bits_per_byte": by_source,
                    "tokens": steps[-1]["sources"],
                    "seconds": 12.5,
                }
            )
    ranked = [_mixture_row(rank, name, runs) for rank, name in enumerate(("curriculum", "docs_heavy", "uniform"), 1)]
    data = {
        "name": "demo",
        "metric": "bits per byte on held-out documents, mean over sources; lower is better",
        "confidence": 0.95,
        "budget_tokens": 200 * 4096,
        "sources": ["docs", "forum", "news"],
        "mixtures": ranked,
        "pairs": [_pair("curriculum", "docs_heavy", -0.05, 0.003), _pair("docs_heavy", "uniform", -0.01, 0.2)],
        "runs": runs,
        "noise": 0.008,
        "noise_degrees": 4,
        "notes": [],
    }
    _json(folder / "ablation/ranking.json", data)


def _step(rng: np.random.Generator, step: int, base: float, weights: tuple[int, ...]) -> dict[str, Any]:
    eaten = [4096 * step * w // sum(weights) for w in weights]
    if weights == (1, 2, 3):  # news only in the second half
        eaten = [4096 * step - 4096 * max(0, step - 100), 0, 4096 * max(0, step - 100)]
    return {
        "step": step,
        "tokens": step * 4096,
        "loss": None if step == 7 else float(base + 6 * np.exp(-step / 40) + rng.normal(0, 0.03)),
        "lr": 1e-3 * min(1, step / 20),
        "tokens_per_s": 20_000.0,
        "sources": dict(zip(("docs", "forum", "news"), eaten, strict=True)),
        **({"skipped": True} if step == 7 else {}),
    }


def _mixture_row(rank: int, mixture: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    own = [r for r in runs if r["mixture"] == mixture]

    def span(values: list[float]) -> dict[str, float]:
        mean, half = float(np.mean(values)), float(2 * np.std(values))
        return {"mean": mean, "low": mean - half, "high": mean + half}

    return {
        "rank": rank,
        "mixture": mixture,
        "seeds": [1, 2, 3],
        "score": span([r["score"] for r in own]),
        "documents": span([r["score"] for r in own]),
        "sources": {s: span([r["bits_per_byte"][s] for r in own]) for s in ("docs", "forum", "news")},
        "tokens": own[0]["tokens"],
        "tied_with_best": rank == 1,
    }


def _pair(first: str, second: str, difference: float, p: float) -> dict[str, Any]:
    span = {"mean": difference, "low": difference - 0.02, "high": difference + 0.02}
    verdict = f"{first} is better" if p < 0.05 else "not distinguishable"
    return {
        "first": first,
        "second": second,
        "difference": span,
        "documents": span,
        "p_seeds": p,
        "p_documents": p / 2,
        "p": p,
        "verdict": verdict,
    }


MODEL = {
    "name": "quality",
    "kind": "fasttext",
    "trained_on": {"positive": 120, "negative": 240},
    "precision": 0.91,
    "recall": 0.87,
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
