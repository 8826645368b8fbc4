"""A run folder of any size in seconds, to measure what looking at it costs: `build(folder, shards, documents)`.

    python tests/pipelines/big_run.py FOLDER 1000 10000        # 10 million documents in 1,000 shards

Each source has one shard of documents, made by `fake_run.py`; every other shard is a link to it with books of its own.
The books carry `MEASURES` histograms a shard, as those of a chain of rule stages do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson
import pyarrow.parquet as pq

from gristmill.stages.documents import Measure, linear_edges
from gristmill.stages.ledger import Histogram, ShardLedger

sys.path.append(str(Path(__file__).parent))
from fake_run import FakeRun

SOURCES = ("docs", "forum", "news")
MEASURES = 45  # of the recipe of the demo


def build(folder: Path, shards: int, documents: int) -> Path:
    """A run of `shards` shards of `documents` documents each, over three sources."""
    base = FakeRun(
        documents=documents * len(SOURCES), sources=SOURCES, shards_per_source=1, sampled_text=20, row_group=8192
    )
    base.parts = frozenset({"inputs", "models", "ablation"})
    base.build(folder)
    entries = orjson.loads((folder / "inputs.json").read_bytes())
    listing = [{**entries[i % len(SOURCES)], "index": i, "path": f"in/{i}.jsonl.gz"} for i in range(shards)]
    (folder / "inputs.json").write_bytes(orjson.dumps(listing))
    for segment in ("01-extract", "02-exact"):
        books = [_wide(folder / segment / "ledger" / f"part-{k:05d}.json", segment) for k in range(len(SOURCES))]
        for i in range(shards):
            own = books[i % len(SOURCES)].model_copy(update={"shard": i, "input": f"in/{i}.jsonl.gz"})
            (folder / segment / "ledger" / f"part-{i:05d}.json").write_bytes(own.sealed())
            for kind in ("kept", "dropped"):
                path = folder / segment / kind / f"part-{i:05d}.parquet"
                if not path.exists():
                    os.link(folder / segment / kind / f"part-{i % len(SOURCES):05d}.parquet", path)
    return folder


def _wide(path: Path, segment: str) -> ShardLedger:
    """The books of a shard, with as many histograms as those of a long recipe."""
    ledger = ShardLedger.opened(path.read_bytes(), str(path))
    if segment == "01-extract":
        book = ledger.stages[-1]
        counts = book.histograms["fake_quality.words"]
        for n in range(MEASURES - len(book.histograms)):
            empty = Histogram.empty(Measure(f"fake_quality.m{n}", "words", linear_edges(0, 1)))
            empty.kept[: len(counts.kept)], empty.dropped[: len(counts.kept)] = counts.kept, counts.dropped
            book.histograms[f"fake_quality.m{n}"] = empty
    return ledger


if __name__ == "__main__":
    target = build(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    rows = sum(pq.ParquetFile(p).metadata.num_rows for p in (target / "01-extract/kept").iterdir())
    print(f"{target}: {rows:,} documents behind the first segment")
