"""Token shards whose documents are shuffled over all shards of their source: `tokens: {shuffle: documents}`.

Each kept part is encoded and sorted (`run_scatter`); when all parts of a source are there, each of its token shards is
merged from all of them (`run_gather`). `tokenize/shuffle.py` does both; here are orders, cards and books.

    tokens/shuffle/part-00000.ids, .rows, .json      a sorted part, and its card; removed when the manifest is written

The ledger of a part is about the documents of that part, as everywhere. Its files are the token shards of the same
number, which hold documents of all parts; `balance` compares the sums of a source.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from gristmill.pipelines.done import opened_ledger
from gristmill.pipelines.learn import (
    TOKENIZE,
    TokensOrder,
    close,
    counted,
    enter,
    holdout_name,
    order_encoder,
    publish_ledger,
    remove_pieces,
)
from gristmill.pipelines.poison import Guard
from gristmill.pipelines.upstream import parts_of
from gristmill.pipelines.work import withdraw
from gristmill.stages.ledger import Amount, LedgerError, ShardLedger, StageLedger
from gristmill.stages.shards import Shard, filesystem, join, publish_bytes, read_bytes
from gristmill.tokenize.shards import ShardInfo, Split
from gristmill.tokenize.shuffle import SHUFFLE_FOLDER, Scattered, gather_shard, scatter_shard


@dataclass(frozen=True)
class ScatterOrder(TokensOrder):
    """Encode and sort one kept part. `replace` and `poison.path_of` take it as the order for token shards that it is:
    what kills the process is found as there."""

    gathered: str = ""  # key of the token shard of the same number, which its ledger will carry


@dataclass(frozen=True)
class GatherOrder:
    """Merge one token shard of a source from its sorted parts."""

    tokens: TokensOrder
    parts: tuple[Shard, ...]  # of the source
    at: int  # which of them this one is

    @property
    def shard(self) -> Shard:
        return self.tokens.shard

    @property
    def key(self) -> str:
        return self.tokens.key


def scatter_card(out: str, shard: Shard) -> str:
    return join(out, "tokens", SHUFFLE_FOLDER, f"{shard.part}.json")


def run_scatter(order: ScatterOrder) -> dict[str, Any]:
    """Encodes and sorts one kept part -> figures. A document that cannot be encoded is found as by `run_tokens`."""
    return Guard(order).until_done(partial(_scattered, order))


def _scattered(order: ScatterOrder, guard: Guard) -> dict[str, Any]:
    folder, path = join(order.out, "tokens"), scatter_card(order.out, order.shard)
    withdraw(path)
    ledger = opened_ledger(order.out, "tokens", order.shard)
    if ledger is not None and ledger.key != order.gathered:
        withdraw(parts_of(order.out, "tokens", "ledger", order.shard, "json"))
    remove_pieces(folder, holdout_name(order.shard))
    begun = time.perf_counter()
    account, encoder = StageLedger(stage=TOKENIZE), order_encoder(order)
    scattered = scatter_shard(
        counted(order, account, guard),
        encoder,
        folder,
        order.shard.part,
        order.holdout_share,
        seed=order.shuffle_seed or 0,
        source=order.shard.source,
        key=order.key,
        max_tokens=order.max_tokens,
    )
    problems = guard.publish()
    enter(account, "train", Amount(documents=scattered.documents, bytes=scattered.bytes, tokens=scattered.tokens))
    for info in scattered.holdout:
        enter(account, "holdout", Amount(documents=info.documents, bytes=info.bytes, tokens=info.tokens))
    close(account, begun)
    account.check(path)
    card = {
        "key": guard.key,
        "problems": problems,
        "scattered": scattered.model_dump(),
        "account": account.model_dump(),
        "said": {"encoder": encoder.active, "message": encoder.message},
    }
    publish_bytes(path, orjson.dumps(card))
    return {"key": guard.key, "documents": account.read.documents, "problems": problems}


def run_gather(order: GatherOrder) -> dict[str, Any]:
    """Merges a token shard -> the ledger of the part of the same number."""
    out, shard = order.tokens.out, order.shard
    folder = join(out, "tokens")
    withdraw(parts_of(out, "tokens", "ledger", shard, "json"))
    remove_pieces(folder, shard.part)
    begun = time.perf_counter()
    cards = [orjson.loads(read_bytes(scatter_card(out, part))) for part in order.parts]
    parts = [Scattered.model_validate(card["scattered"]) for card in cards]
    own = cards[order.at]
    merged = gather_shard(folder, parts, order.at, shard.part, key=order.key, max_tokens=order.tokens.max_tokens)
    account = StageLedger.model_validate(own["account"])
    account.seconds += time.perf_counter() - begun
    infos = [*merged, *parts[order.at].holdout]
    return publish_ledger(order.tokens, account, infos, own["said"], key=order.key, problems=own["problems"])


def scattered_done(out: str, shard: Shard, key: str) -> bool:
    """True when the part's card carries the key and its files are there in their size."""
    try:
        card = orjson.loads(read_bytes(scatter_card(out, shard)))
    except (FileNotFoundError, orjson.JSONDecodeError):
        return False
    if card.get("key") != key:
        return False
    fs, inner = filesystem(join(out, "tokens"))
    files = Scattered.model_validate(card["scattered"]).files
    return all(fs.exists(f"{inner}/{name}") and fs.size(f"{inner}/{name}") == size for name, size in files.items())


def drop_scattered(out: str) -> None:
    """Removes the sorted parts."""
    fs, inner = filesystem(join(out, "tokens", SHUFFLE_FOLDER))
    if fs.exists(inner):
        fs.rm(inner, recursive=True)


def balance(infos: Iterable[ShardInfo], ledgers: Sequence[ShardLedger]) -> list[str]:
    """What differs between the token shards of each source and what its ledgers book, a line each."""
    there: dict[tuple[str, Split], Amount] = {}
    booked: dict[tuple[str, Split], Amount] = {}
    for info in infos:
        size = Amount(documents=info.documents, bytes=info.bytes, tokens=info.tokens)
        there[info.source, info.split] = there.get((info.source, info.split), Amount()) + size
    for ledger in ledgers:
        for stage in ledger.stages:
            kept: dict[Split, Amount] = {"train": stage.kept, "holdout": stage.dropped.get("holdout", Amount())}
            for split, size in kept.items():
                only = size.model_copy(update={"chars": 0})
                booked[ledger.source, split] = booked.get((ledger.source, split), Amount()) + only
    return [
        f"source {source!r}, {split}: the token shards hold {there.get((source, split), Amount())}, but the ledgers "
        f"book {booked.get((source, split), Amount())}."
        for source, split in sorted({*there, *booked})
        if there.get((source, split), Amount()) != booked.get((source, split), Amount())
    ]


def check_balance(out: str, infos: Sequence[ShardInfo], shards: Iterable[Shard]) -> None:
    """Raises LedgerError when documents were lost or doubled between the parts of a source."""
    ledgers = [ledger for shard in shards if (ledger := opened_ledger(out, "tokens", shard)) is not None]
    if problems := balance(infos, ledgers):
        raise LedgerError(
            f"{out}/tokens: {' '.join(problems)} No manifest was written. Delete the folder and run the recipe again."
        )
