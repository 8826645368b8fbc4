"""What a worker learns from documents: the models of a recipe, its tokenizer, and the token shards."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from gristmill.pipelines.near_holdout import NEAR_REASON, near_documents
from gristmill.pipelines.poison import REASON, Guard, Poisoned
from gristmill.pipelines.selection import file_batches, select
from gristmill.pipelines.upstream import kept_batches, parts_of
from gristmill.pipelines.work import file_record, versions, withdraw
from gristmill.stages.documents import Batch
from gristmill.stages.language import Language
from gristmill.stages.ledger import Amount, ShardLedger, StageLedger, amount, memory_of_process
from gristmill.stages.models import Selection
from gristmill.stages.shards import Shard, ShardError, filesystem, join, publish, publish_bytes, read_bytes
from gristmill.tokenize.encode import Backend, Encoder, thread_encoder
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import ShardInfo, Split
from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train
from gristmill.tokenize.write import write_shard

TOKENIZE = "tokenize"  # what the books call it


@dataclass(frozen=True)
class TrainOrder:
    """Train one model of the recipe on what a segment kept, or on files."""

    out: str
    name: str
    key: str
    settings: Any  # KenLM or FastText
    upstream: str | None
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class TokenizerOrder:
    """Train the tokenizer on what the last segment kept."""

    out: str
    key: str
    settings: TokenizerSettings
    upstream: str
    shards: tuple[Shard, ...]
    holdout_share: float  # held-out documents are not learned from


@dataclass(frozen=True)
class TokensOrder:
    """Turn one kept part into token shards."""

    out: str
    key: str
    upstream: str
    shard: Shard
    holdout_share: float
    encoder: Backend
    eos_token: str
    max_tokens: int | None = None
    shuffle_seed: int | None = None
    drop_near: bool = False  # what `near_holdout.py` found in this shard is left out
    folder: str = "tokens"
    poison: tuple[Poisoned, ...] = ()  # documents that are known to kill a worker


def run_train(order: TrainOrder) -> dict[str, Any]:
    """Trains in a local folder, then publishes the files, the card last -> the card."""
    folder = join(order.out, "models", order.name)
    withdraw(join(folder, "card.json"))
    texts = {role: _selected(order, selection) for role, selection in order.settings.roles().items()}
    with tempfile.TemporaryDirectory(prefix="gristmill-train-") as scratch:
        card = order.settings.train(texts, scratch)
        return publish_model(scratch, folder, {"key": order.key, "name": order.name, **card})


def publish_model(scratch: str, folder: str, card: dict[str, Any]) -> dict[str, Any]:
    """Publishes what a training left in a local folder, the card last -> the card."""
    for path in sorted(Path(scratch).rglob("*")):
        if path.is_file() and path.name != "card.json":
            with publish(join(folder, path.relative_to(scratch).as_posix())) as file, path.open("rb") as data:
                shutil.copyfileobj(data, file, 1 << 20)
    publish_bytes(join(folder, "card.json"), orjson.dumps(card, option=orjson.OPT_INDENT_2))
    return card


def _selected(order: TrainOrder, selection: Selection) -> Iterator[Batch]:
    if selection.files is not None:
        return selected_files(selection, order.settings)
    if order.upstream is None:
        raise ShardError(f"Model {order.name} trains on documents of the run, but no segment comes before it.")
    upstream, wanted = order.upstream, selection.sources
    shards = [shard for shard in order.shards if wanted is None or shard.source in wanted]

    def batches() -> Iterator[Batch]:
        for shard in shards:
            yield from kept_batches(parts_of(order.out, upstream, "kept", shard, "parquet"))

    return select(selection, batches)


def selected_files(
    selection: Selection, settings: Any, on_file: Callable[[str], None] | None = None
) -> Iterator[Batch]:
    """The documents that a selection of files names; with their language where the model is one for each."""
    pattern = selection.files
    assert pattern is not None
    if not getattr(settings, "per_language", False):
        return select(selection, lambda: file_batches(pattern, on_file))
    language = Language.model_validate({})
    return select(selection, lambda: (language(batch).kept for batch in file_batches(pattern, on_file)))


def run_tokenizer(order: TokenizerOrder) -> dict[str, Any]:
    """Trains the tokenizer on the kept texts of every source, in the order of the listing."""
    withdraw(join(order.out, "tokens", "tokenizer_card.json"))
    begun = time.perf_counter()
    tokenizer = train_on_kept(order)
    publish_bytes(join(order.out, "tokens", "tokenizer.json"), tokenizer_bytes(tokenizer))
    card = {"key": order.key, "vocab_size": tokenizer.get_vocab_size(), "seconds": time.perf_counter() - begun}
    publish_bytes(join(order.out, "tokens", "tokenizer_card.json"), orjson.dumps(card))
    return card


def train_on_kept(order: TokenizerOrder, on_read: Callable[[int], None] | None = None) -> Tokenizer:
    """A tokenizer of the texts that a segment kept. on_read: told the bytes of text of each batch that was read."""
    by_source: dict[str, list[Shard]] = {}
    for shard in order.shards:
        by_source.setdefault(shard.source, []).append(shard)

    def texts(shards: list[Shard]) -> Iterator[pa.Array]:
        for shard in shards:
            for batch in kept_batches(parts_of(order.out, order.upstream, "kept", shard, "parquet"), ["text"]):
                yield batch["text"]
                if on_read is not None:
                    on_read(int(pc.sum(pc.binary_length(batch["text"])).as_py() or 0))

    return train(
        {source: texts(shards) for source, shards in by_source.items()},
        order.settings,
        holdout_share=order.holdout_share,
    )


def run_tokens(order: TokensOrder) -> dict[str, Any]:
    """Encodes one kept part -> its ledger: documents in; tokens of the training part kept, the held-out part apart.

    A document that cannot be encoded is found by cutting its batch in pieces: the part is begun anew for each cut.
    """
    return Guard(order).until_done(partial(_tokens, order))


def _tokens(order: TokensOrder, guard: Guard) -> dict[str, Any]:
    folder = join(order.out, "tokens")
    ledger_path = parts_of(order.out, "tokens", "ledger", order.shard, "json")
    withdraw(ledger_path)
    remove_pieces(folder, order.shard.part)
    remove_pieces(folder, holdout_name(order.shard))
    begun = time.perf_counter()
    account, encoder = StageLedger(stage=TOKENIZE), order_encoder(order)
    infos = write_shard(
        counted(order, account, guard),
        encoder,
        folder,
        order.shard.part,
        order.holdout_share,
        source=order.shard.source,
        key=order.key,
        max_tokens=order.max_tokens,
        shuffle_seed=order.shuffle_seed,
    )
    problems, key = guard.publish(), guard.key
    infos = [info.model_copy(update={"key": key}) for info in infos]
    for info in infos:
        enter(account, info.split, Amount(documents=info.documents, bytes=info.bytes, tokens=info.tokens))
    close(account, begun)
    said = {"encoder": encoder.active, "message": encoder.message}
    return publish_ledger(order, account, infos, said, key=key, problems=problems)


def counted(order: TokensOrder, account: StageLedger, guard: Guard) -> Iterator[Batch]:
    """The documents of a kept part that become tokens; what is read, what cannot be encoded, and what is near to
    held-out documents is booked."""
    near = pa.array(near_documents(order.out, order.shard) if order.drop_near else [], pa.string())
    path = parts_of(order.out, order.upstream, "kept", order.shard, "parquet")

    def poisoned(rows: Batch) -> None:
        account.dropped[REASON] = account.dropped.get(REASON, Amount()) + amount(rows)

    for batch in guard.batches(kept_batches(path, ["doc_id", "source", "text"])):
        account.read = account.read + amount(batch)
        for piece in guard.pieces(TOKENIZE, batch, poisoned):
            yield _without_near(piece, near, order.holdout_share, account) if len(near) else piece


def order_encoder(order: TokensOrder) -> Encoder:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker, one core
    data = read_bytes(join(order.out, "tokens", "tokenizer.json"))
    return thread_encoder(data, eos_token=order.eos_token, backend=order.encoder)


def enter(account: StageLedger, split: Split, size: Amount) -> None:
    """Books documents that became tokens."""
    if split == "train":
        account.kept = account.kept + size
    else:
        account.dropped["holdout"] = account.dropped.get("holdout", Amount()) + size
    account.read = account.read + Amount(tokens=size.tokens)


def publish_ledger(
    order: TokensOrder,
    account: StageLedger,
    infos: Sequence[ShardInfo],
    said: Mapping[str, Any],
    *,
    key: str,
    problems: Sequence[str],
) -> dict[str, Any]:
    """Publishes the card of token shards, then their ledger, after it was checked -> the ledger."""
    folder = join(order.out, "tokens")
    ledger = ShardLedger(
        key=key,
        segment="tokens",
        shard=order.shard.index,
        source=order.shard.source,
        input=f"{order.upstream}/{order.shard.part}",
        stages=[account],
        files=[file_record(folder, name) for info in infos for name in (info.bin, info.idx)],
        versions=versions(),
        host=socket.gethostname(),
        seconds=account.seconds,
        ended=time.time(),
        memory_bytes=memory_of_process(),
        problems=list(problems),
    )
    ledger.check(f"tokens/{order.shard.part}")
    card = {"infos": [info.model_dump() for info in infos], **said, "key": key}
    publish_bytes(parts_of(order.out, "tokens", "cards", order.shard, "json"), orjson.dumps(card))
    publish_bytes(parts_of(order.out, "tokens", "ledger", order.shard, "json"), ledger.sealed())
    return ledger.told()


def _without_near(batch: Batch, near: pa.Array, holdout_share: float, account: StageLedger) -> Batch:
    """Leaves out training documents that are near to a held-out one, and books them."""
    goes = pc.is_in(batch["doc_id"], near).to_numpy(zero_copy_only=False) & ~is_held_out(batch["text"], holdout_share)
    gone = batch.filter(pa.array(goes))
    if not gone.num_rows:
        return batch
    account.dropped[NEAR_REASON] = account.dropped.get(NEAR_REASON, Amount()) + amount(gone)
    return batch.filter(pa.array(~goes))


def remove_pieces(folder: str, name: str) -> None:
    """Removes the token shards of an earlier attempt, which may have been more of them.

    They are asked for by name: to list a folder of a hundred thousand parts for each of them takes hours. The last one
    goes first, so that a kill in between leaves no gap that would hide those behind it.
    """
    fs, inner = filesystem(folder)
    pieces = [name]
    while any(fs.exists(f"{inner}/{name}-{len(pieces):03d}.{ending}") for ending in ("bin", "idx")):
        pieces.append(f"{name}-{len(pieces):03d}")
    for piece in reversed(pieces):
        for ending in ("bin", "idx"):
            with suppress(FileNotFoundError):
                fs.rm_file(f"{inner}/{piece}.{ending}")


def holdout_name(shard: Shard) -> str:
    return shard.part.replace("part-", "holdout-", 1)


def close(account: StageLedger, begun: float) -> None:
    """Token shards know bytes, not characters: these are booked as edited, so that the sums are of one kind."""
    account.seconds = time.perf_counter() - begun
    booked = sum(size.chars for size in account.dropped.values())
    account.edited = Amount(chars=account.read.chars - booked)
