"""Parquet in, Parquet without duplicates out: what `dedupe.end_to_end` measures, and dedupe's figures of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from common import Figure, compared, every_document, in_own_process, megabytes_of, note, rounds

STAGES = {"exact": "exact: {by: text}", "normalised": "exact: {by: normalized}", "minhash": "minhash: {}"}
_PART_BYTES = 64 << 20  # of text in an input file


def write_parquet(corpus: Path, folder: Path, limit_bytes: float) -> float:
    """Writes the corpus as Parquet files of columns id and text, zstd -> MB of text."""
    texts: list[str] = []
    size = written = 0
    total = 0.0

    def flush() -> None:
        nonlocal texts, size, written, total
        table = pa.table({"id": [f"{written}-{i}" for i in range(len(texts))], "text": texts})
        pq.write_table(table, folder / f"part-{written:03d}.parquet", compression="zstd", row_group_size=8_192)
        total += megabytes_of(texts)
        texts, size, written = [], 0, written + 1

    for text in every_document(corpus):
        texts.append(text)
        size += len(text.encode())
        if size >= _PART_BYTES or total * 1e6 + size >= limit_bytes:
            flush()
            if total * 1e6 >= limit_bytes:
                break
    if texts:
        flush()
    return total


def run(folder: Path, stage: str, number: int) -> tuple[float, int, int]:
    """Runs a recipe of one stage in this process -> CPU seconds of all its threads, documents read and kept."""
    from gristmill.pipelines.progress import Display
    from gristmill.pipelines.recipe import load
    from gristmill.pipelines.run import Options
    from gristmill.pipelines.run import run as run_recipe
    from gristmill.pipelines.warmup import warm
    from gristmill.stages.ledger import ShardLedger

    out = folder / f"{stage}-{number}"
    recipe = folder / f"{stage}.yaml"
    recipe.write_text(
        f"name: dedupe\nsources:\n  corpus: {{files: '{folder}/in/*.parquet'}}\nstages:\n  - {STAGES[stage]}\n"
    )
    warm()
    with Display() as display:
        start = time.process_time()
        outcome = run_recipe(load(recipe), str(out), Options(debug=True), display)
        seconds = time.process_time() - start
    if outcome.failures:
        raise SystemExit("\n".join(outcome.failures))
    books = [ShardLedger.model_validate_json(p.read_bytes()) for p in sorted(out.glob("01-*/ledger/*.json"))]
    return (
        seconds,
        sum(b.stages[0].read.documents for b in books),
        sum(b.stages[-1].kept.documents for b in books),
    )


def end_to_end(corpus: Path, folder: Path, limit_bytes: float, count: int) -> Iterator[Figure]:
    """One figure a kind of duplicates, each round in a process of its own."""
    (folder / "in").mkdir()
    megabytes = write_parquet(corpus, folder / "in", limit_bytes)
    numbers = iter(range(1_000))
    said: dict[str, tuple[int, int]] = {}

    def once(stage: str) -> float:
        seconds, *said[stage] = in_own_process(run, folder, stage, next(numbers))  # type: ignore[assignment]
        return megabytes / seconds

    found = rounds({stage: lambda stage=stage: once(stage) for stage in STAGES}, count)  # type: ignore[misc]
    for stage, values in found.items():
        read, kept = said[stage]
        note(f"dedupe.end_to_end_{stage}: {megabytes:,.1f} MB, {read:,} documents, {kept:,} kept.")
        yield from compared(f"dedupe.end_to_end_{stage}", "MB/s", {"gristmill": values})
