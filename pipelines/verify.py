"""Proves that a run folder is what its ledgers say: `gristmill verify RUN`.

Every ledger is unchanged since it was written and balances; what a segment kept is what the next one read; every file
has the size and the checksum in the ledger; the documents in the Parquet files, counted again, are the ones booked;
the token shards are sound and hold the documents that the last segment kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.pipelines.open_run import TOKENS, Run
from gristmill.pipelines.shuffled_tokens import balance
from gristmill.stages.ledger import Amount, LedgerError, ShardLedger
from gristmill.stages.shards import checksum, exists, filesystem, join
from gristmill.tokenize.shards import ShardInfo
from gristmill.tokenize.verify import verify_tokens


def verify(run: Run) -> list[str]:
    """Everything that is wrong with a run, a line each; empty when it is sound. Reads every byte."""
    problems: list[str] = []
    kept_before: dict[int, Amount] | None = None
    infos = [ShardInfo.model_validate(info) for info in run.token_shards.get("shards", ())]
    listed = {info.bin: info.bin_xxh3 for info in infos} | {info.idx: info.idx_xxh3 for info in infos}
    if not run.segments:
        problems.append(f"{run.path}: no segment was finished; there is nothing to verify.")
    for segment in (*run.segments, TOKENS):
        if segment == TOKENS and not run.files(f"{TOKENS}/ledger", ".json"):
            continue
        ledgers = []
        for path, opened in _ledgers(run, segment):
            if isinstance(opened, LedgerError):
                problems.append(str(opened))
                continue
            ledgers.append(opened)
            problems.extend(_check(run, segment, path, opened, listed if segment == TOKENS else {}))
        kept_before = _chain(segment, ledgers, kept_before, problems)
    if run.token_shards:
        problems.extend(f"{join(run.path, TOKENS)}: {line}" for line in balance(infos, ledgers))
        problems.extend(verify_tokens(join(run.path, TOKENS)))
    return problems


def _ledgers(run: Run, segment: str) -> Iterator[tuple[str, ShardLedger | LedgerError]]:
    for name in run.files(f"{segment}/ledger", ".json"):
        path = join(run.path, segment, "ledger", name)
        try:
            yield path, ShardLedger.opened((run.text(f"{segment}/ledger/{name}") or "").encode(), path)
        except LedgerError as error:
            yield path, error


def _check(run: Run, segment: str, path: str, ledger: ShardLedger, listed: Mapping[str, str]) -> Iterator[str]:
    """listed: checksums of files whose bytes are read elsewhere, so that the ledger has to say the same only."""
    try:
        ledger.check(path)
    except LedgerError as error:
        yield str(error)
    for record in ledger.files:
        if listed.get(record.path) == record.xxh3:
            continue
        file = join(run.path, segment, record.path)
        if not exists(file):
            yield f"{file} is missing, though {path} says that it was written."
            continue
        fs, inner = filesystem(file)
        if fs.size(inner) != record.bytes or checksum(file) != record.xxh3:
            yield f"{file} is not the file that {path} speaks of: its size or checksum differs."
        elif file.endswith(".parquet"):
            yield from _recount(file, record.rows, ledger)


def _recount(file: str, rows: int, ledger: ShardLedger) -> Iterator[str]:
    """Counts documents, characters and bytes again, and compares them with the books."""
    fs, inner = filesystem(file)
    with fs.open(inner, "rb") as opened:
        kept = "/kept/" in file
        counted = _amounts(pq.ParquetFile(opened), kept=kept)
    if counted.documents != rows:
        yield f"{file} has {counted.documents:,} documents; its ledger says {rows:,}."
    stages = [stage for stage in ledger.stages if stage.stage != "read"]
    if kept:
        booked = ledger.stages[-1].kept if ledger.stages else counted
    else:
        booked = sum((a for stage in stages for a in stage.dropped.values()), Amount())
    if counted != booked:
        yield f"{file} holds {counted}; its ledger books {booked}."


def _amounts(file: pq.ParquetFile, *, kept: bool) -> Amount:
    total = Amount()
    columns = ["text"] if kept else ["chars", "bytes"]
    for batch in file.iter_batches(columns=columns):
        if kept:
            chars, size = pc.utf8_length(batch["text"]), pc.binary_length(batch["text"])
        else:
            chars, size = batch["chars"], batch["bytes"]
        total = total + Amount(
            documents=batch.num_rows, chars=int(pc.sum(chars).as_py() or 0), bytes=int(pc.sum(size).as_py() or 0)
        )
    return total


def _chain(
    segment: str, ledgers: list[ShardLedger], before: dict[int, Amount] | None, problems: list[str]
) -> dict[int, Amount]:
    """What the segment before kept must be what this one read, shard by shard -> what this one kept."""
    read = {}
    for ledger in ledgers:
        if ledger.stages:
            first = ledger.stages[0].read
            read[ledger.shard] = Amount(documents=first.documents, chars=first.chars, bytes=first.bytes)
    if before is not None:
        for shard in sorted({*before, *(ledger.shard for ledger in ledgers)}):
            got = read.get(shard, before.get(shard) if any(x.shard == shard for x in ledgers) else None)
            if got != before.get(shard):
                problems.append(
                    f"{segment}: part {shard:05d} read {got or 'nothing'}, but the segment before kept "
                    f"{before.get(shard) or 'nothing'}. The run is not finished, or was changed: run the recipe again."
                )
    return {
        ledger.shard: ledger.stages[-1].kept if ledger.stages else (before or {}).get(ledger.shard, Amount())
        for ledger in ledgers
    }
