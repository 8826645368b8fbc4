"""What a run has already: which pieces carry the key that the plan computes, and what of the others must go first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from gristmill.pipelines.near_holdout import (
    HOLDOUT_REPORT,
    found_card,
    held_card,
)
from gristmill.pipelines.plan import Plan, SegmentPlan, hash_of
from gristmill.pipelines.tokenizer_card import (
    REPORT_VERSION,
    TOKENIZER_REPORT,
)
from gristmill.pipelines.upstream import parts_of
from gristmill.stages.ledger import LedgerError, ShardLedger
from gristmill.stages.shards import (
    Shard,
    filesystem,
    join,
    read_bytes,
)


@dataclass(frozen=True)
class Left:
    """What a plan still has to do."""

    todo: int
    found: int


def pieces_left(plan: Plan, out: str) -> Left:
    """Counts pieces that carry their key and those that do not, tokens included."""
    done = todo = 0
    for segment in plan.segments:
        folder = segment.segment.folder
        for shard, key in zip(plan.shards, segment.shards, strict=True):
            if ledger_done(out, folder, shard, key):
                done += 1
            else:
                todo += 1
    if plan.tokenizer is not None:
        for shard, key in zip(plan.shards, plan.tokens, strict=True):
            if ledger_done(out, "tokens", shard, key):
                done += 1
            else:
                todo += 1
        cards = [(join(out, "tokens", "card.json"), manifest_key(plan)), *extra_cards(plan, out)]
        current = sum(card_key(path) == key for path, key in cards)
        todo += len(cards) - current
    return Left(todo, done)


def extra_cards(plan: Plan, out: str) -> list[tuple[str, str]]:
    """(path, key) of what is said about the tokens besides their shards: near-duplicates of held-out documents, and how
    well the tokenizer fits."""
    cards = [(join(out, TOKENIZER_REPORT), tokenizer_report_key(plan))]
    if plan.near:
        cards += [(held_card(out, s), key) for s, key in zip(plan.shards, plan.held_out, strict=True)]
        cards += [(found_card(out, s), key) for s, key in zip(plan.shards, plan.near, strict=True)]
        cards.append((join(out, HOLDOUT_REPORT), holdout_report_key(plan)))
    return cards


def tokenizer_report_key(plan: Plan) -> str:
    return hash_of("tokenizer report", REPORT_VERSION, plan.tokenizer)


def holdout_report_key(plan: Plan) -> str:
    return hash_of("holdout report", list(plan.near), plan.recipe.tokens.drop_near_holdout)


def ledger_done(out: str, folder: str, shard: Shard, key: str) -> bool:
    """True when the shard's ledger carries the key and the files that it names are there in their size."""
    ledger = opened_ledger(out, folder, shard)
    if ledger is None or ledger.key != key:
        return False
    fs, inner = filesystem(join(out, folder))
    for record in ledger.files:
        try:
            if fs.size(f"{inner}/{record.path}") != record.bytes:
                return False
        except FileNotFoundError:
            return False
    return True


def opened_ledger(out: str, folder: str, shard: Shard) -> ShardLedger | None:
    """The ledger of a shard; None when it is missing or damaged."""
    path = parts_of(out, folder, "ledger", shard, "json")
    try:
        return ShardLedger.opened(read_bytes(path), path)
    except (FileNotFoundError, LedgerError):
        return None


def card_key(path: str) -> str | None:
    """The key that a card carries; None when there is no readable card."""
    try:
        card = orjson.loads(read_bytes(path))
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return str(card.get("key"))


def withdraw_cards(folder: str, wanted: Mapping[str, str]) -> None:
    """Removes the cards of a folder but those that are wanted and carry their key. wanted: path -> key."""
    fs, inner = filesystem(folder)
    keep = {path.rsplit("/", 1)[-1] for path, key in wanted.items() if card_key(path) == key}
    for path in fs.glob(f"{inner}/*.json"):
        if path.rsplit("/", 1)[-1] not in keep:
            fs.rm(path)


def drop_signatures(segment: SegmentPlan, out: str) -> None:
    """Removes the signatures of a segment that is done, where nobody wants them: its decisions are what counts."""
    gate = segment.segment.gate
    if gate is None or getattr(gate.stage, "keep_signatures", True):
        return
    fs, inner = filesystem(join(out, segment.segment.folder, "sign"))
    if fs.exists(inner):
        fs.rm(inner, recursive=True)


def manifest_key(plan: Plan) -> str:
    return hash_of("manifest", plan.tokenizer, list(plan.tokens))
