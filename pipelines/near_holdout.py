"""Training documents that are nearly the same as a held-out one: with them, a score on held-out documents is too good.

Exact copies go to the same side by themselves, since a hash of the text decides. Near ones are found by MinHash: each
shard signs its held-out documents, then each shard compares its training documents with all of those. Only pairs whose
true Jaccard similarity, of sets of 5-word shingles, is at least `near_holdout_similarity` count. A held-out document
that stands inside a much longer one is not near to it in this sense.

    tokens/near/held/part-00000.arrow     signatures of a shard's held-out documents, with a card beside it
    tokens/near/held.arrow                those of all shards, with a card beside it
    tokens/near/found/part-00000.json     what a shard has that is near to any of them
    tokens/holdout_report.json            the sum, with examples
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from gristmill.pipelines.upstream import kept_batches, parts_of
from gristmill.pipelines.work import withdraw
from gristmill.stages.documents import Batch
from gristmill.stages.minhash import MinHash, band_name, recall
from gristmill.stages.shards import Shard, filesystem, join, publish, publish_bytes, read_bytes
from gristmill.tokenize.sample import is_held_out

NEAR_REASON = "near_holdout"
NEAR, HELD, FOUND = "tokens/near", "tokens/near/held", "tokens/near/found"
HOLDOUT_REPORT = "tokens/holdout_report.json"
BANDS, ROWS = 30, 4  # a pair of Jaccard similarity 0.7 is found with probability 0.9997, of 0.5 with 0.86
MAX_CANDIDATES = 100  # held-out documents that one document is compared with
EXAMPLES = 20
_COLUMNS = ("doc_id", "source", "dump", "text")


@dataclass(frozen=True)
class NearOrder:
    """Sign the held-out documents of one shard, or find what one shard has that is near to those of all."""

    out: str
    key: str
    upstream: str
    shard: Shard
    holdout_share: float
    similarity: float
    together: str = ""  # key of the signatures of all shards


@dataclass(frozen=True)
class TogetherOrder:
    """Put the signatures of the held-out documents of all shards into one file."""

    out: str
    key: str
    shards: tuple[Shard, ...]


def held_card(out: str, shard: Shard) -> str:
    return join(out, HELD, f"{shard.part}.json")


def found_card(out: str, shard: Shard) -> str:
    return join(out, FOUND, f"{shard.part}.json")


def together_card(out: str) -> str:
    return join(out, f"{HELD}.json")


def _stage() -> MinHash:
    return MinHash(bands=BANDS, rows=ROWS, verify="jaccard")


def sign_held_out(order: NearOrder) -> dict[str, Any]:
    """Signs the held-out documents of a shard -> card: documents."""
    path, card_path = join(order.out, HELD, f"{order.shard.part}.arrow"), held_card(order.out, order.shard)
    withdraw(card_path)
    stage = _stage()
    signed = [_slim(stage.sign(batch)) for batch in _documents(order, held_out=True)]
    schema = _slim(stage.sign(_no_documents())).schema
    with publish(path) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in signed:
            writer.write_batch(batch)
    card = {"key": order.key, "documents": sum(batch.num_rows for batch in signed)}
    publish_bytes(card_path, orjson.dumps(card))
    return card


def put_together(order: TogetherOrder) -> dict[str, Any]:
    """The signatures of all shards in one file, which every shard is compared with -> card: documents.

    One file, because a hundred thousand shards would each open a hundred thousand.
    """
    withdraw(together_card(order.out))
    documents = 0
    with publish(join(order.out, f"{HELD}.arrow")) as file:
        schema = _slim(_stage().sign(_no_documents())).schema
        with pa.ipc.new_file(file, schema) as writer:
            for shard in order.shards:
                table = _read(join(order.out, HELD, f"{shard.part}.arrow"))
                writer.write_table(table)
                documents += table.num_rows
    card = {"key": order.key, "documents": documents}
    publish_bytes(together_card(order.out), orjson.dumps(card))
    return card


@lru_cache(maxsize=1)  # of a worker, for the shards of one run
def _held(path: str, key: str) -> _Held:
    """key: what tells one state of the file from another."""
    return _Held(_read(path))


def find_near(order: NearOrder) -> dict[str, Any]:
    """Compares the training documents of a shard with all held-out ones -> card: documents, near.

    Memory: a batch, and of each held-out document some 700 bytes and 4 for every distinct shingle.
    """
    path = found_card(order.out, order.shard)
    withdraw(path)
    held = _held(join(order.out, f"{HELD}.arrow"), order.together)
    stage, documents = _stage(), 0
    near: list[dict[str, Any]] = []
    for batch in _documents(order, held_out=False):
        documents += batch.num_rows
        near.extend(held.near(_slim(stage.sign(batch)), order.similarity))
    card = {"key": order.key, "documents": documents, "near": near}
    publish_bytes(path, orjson.dumps(card))
    return card


def near_documents(out: str, shard: Shard) -> list[str]:
    """doc_id of the training documents of a shard that are near to a held-out one."""
    card = orjson.loads(read_bytes(found_card(out, shard)))
    return [str(entry["doc_id"]) for entry in card["near"]]


def write_holdout_report(out: str, shards: Sequence[Shard], similarity: float, key: str, *, dropped: bool) -> None:
    """Sums up the cards of all shards in tokens/holdout_report.json."""
    held = [orjson.loads(read_bytes(held_card(out, shard))) for shard in shards]
    found = [orjson.loads(read_bytes(found_card(out, shard))) for shard in shards]
    near = [entry for card in found for entry in card["near"]]
    near.sort(key=lambda entry: (-entry["similarity"], entry["source"], entry["doc_id"]))
    body = {
        "key": key,
        "similarity": similarity,
        "recall": round(recall(similarity, BANDS, ROWS), 4),  # probability to find a pair of just this similarity
        "held_out": sum(card["documents"] for card in held),
        "training": sum(card["documents"] for card in found),
        "near": len(near),
        "near_by_source": dict(sorted(Counter(entry["source"] for entry in near).items())),
        "held_out_with_near": len({(entry["holdout_source"], entry["holdout"]) for entry in near}),
        "dropped": dropped,
        "examples": near[:EXAMPLES],
    }
    publish_bytes(join(out, HOLDOUT_REPORT), orjson.dumps(body, option=orjson.OPT_INDENT_2))


def warning(report: Mapping[str, Any]) -> str | None:
    """What a person should know of tokens/holdout_report.json; None where nothing is near, or it was dropped."""
    if not report.get("near") or report.get("dropped"):
        return None
    return (
        f"{report['near']:,} of {report['training']:,} training documents nearly repeat a held-out document (Jaccard "
        f"similarity {report['similarity']} or more; held-out documents concerned: {report['held_out_with_near']:,}). "
        "Scores on these are too good. Dedupe more, or set `tokens: {drop_near_holdout: true}`. Examples: "
        f"{HOLDOUT_REPORT}."
    )


class _Held:
    """The held-out documents of all shards, looked up by the keys of their bands."""

    def __init__(self, table: pa.Table) -> None:
        table = table.combine_chunks()
        table = table.filter(pa.array(table["shingles"].to_numpy() > 0))
        self.doc_id, self.source = table["doc_id"], table["source"]
        self.sets = table["shingle_set"]
        self.keys: list[np.ndarray] = []
        self.rows: list[np.ndarray] = []
        for band in range(BANDS):
            keys = table[band_name(band)].to_numpy()
            order = np.argsort(keys, kind="stable")
            self.keys.append(keys[order])
            self.rows.append(order)

    def near(self, signed: Batch, similarity: float) -> Iterator[dict[str, Any]]:
        """Each document that has a similar one among these, with the most similar."""
        for row, others in sorted(self._candidates(signed).items()):
            own = signed["shingle_set"][row].values.to_numpy()
            scored = [(_jaccard(own, self.sets[other].values.to_numpy()), -other) for other in sorted(others)]
            best, at = max(scored)
            if best >= similarity:
                yield {
                    "doc_id": signed["doc_id"][row].as_py(),
                    "source": signed["source"][row].as_py(),
                    "holdout": self.doc_id[-at].as_py(),
                    "holdout_source": self.source[-at].as_py(),
                    "similarity": round(best, 4),
                }

    def _candidates(self, signed: Batch) -> dict[int, set[int]]:
        """Row -> held-out rows that share the key of a band."""
        out: dict[int, set[int]] = {}
        comparable = signed["shingles"].to_numpy() > 0
        for band in range(BANDS):
            keys = signed[band_name(band)].to_numpy()
            low = np.searchsorted(self.keys[band], keys, side="left")
            high = np.searchsorted(self.keys[band], keys, side="right")
            for row in np.flatnonzero((high > low) & comparable).tolist():
                others = out.setdefault(row, set())
                room = MAX_CANDIDATES - len(others)
                others.update(self.rows[band][low[row] : min(high[row], low[row] + max(room, 0))].tolist())
        return out


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Of two sorted sets without doubles."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def _documents(order: NearOrder, *, held_out: bool) -> Iterator[Batch]:
    for batch in kept_batches(parts_of(order.out, order.upstream, "kept", order.shard, "parquet"), _COLUMNS):
        chosen = is_held_out(batch["text"], order.holdout_share) == held_out
        if chosen.any():
            yield batch.filter(pa.array(chosen))


def _no_documents() -> Batch:
    return pa.RecordBatch.from_pydict({name: pa.array([], pa.string()) for name in _COLUMNS})


def _slim(signed: Batch) -> Batch:
    """What a comparison needs."""
    names = ["doc_id", "source", "shingles", *map(band_name, range(BANDS)), "shingle_set"]
    return signed.select(names).replace_schema_metadata(None)


def _read(path: str) -> pa.Table:
    fs, inner = filesystem(path)
    with fs.open(inner, "rb") as file:
        return pa.ipc.open_file(pa.PythonFile(file, "r")).read_all()
