"""Bits per byte on held-out documents: how well a model predicts text, whatever its tokenizer.

    bits per byte = sum of -ln p(token | before) over all tokens of the documents / ln 2 / UTF-8 bytes of their text

The end-of-text token counts among a document's tokens and stands before its first one, as in training. A document
longer than the window is cut as lm-evaluation-harness cuts one in `loglikelihood_rolling`: full windows one after the
other, each with one token of context, and a last one that reaches back as far as it may. Values are kept for every
document, so that documents can be resampled (`stats.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import torch
import xxhash
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.tokenize.shards import TokenSet
from gristmill.tokenize.tokenizer_json import token_byte_lengths
from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.group import Group
from gristmill.trainer.model import Llama

BATCH_TOKENS = 4_096  # padding included


@dataclass(frozen=True)
class Texts:
    """Held-out documents of one source under one model: bits (documents,) it needs, bytes (documents,) they are."""

    bits: np.ndarray
    bytes: np.ndarray

    @property
    def bits_per_byte(self) -> float:
        return float(self.bits.sum() / self.bytes.sum())


class SourceScore(Settings):
    """The held-out documents of one source under one model."""

    doc_ids: list[str]
    bits: list[float]
    bytes: list[int]
    tokens: list[int]

    @property
    def texts(self) -> Texts:
        return Texts(np.asarray(self.bits, dtype=np.float64), np.asarray(self.bytes, dtype=np.int64))

    @property
    def bits_per_byte(self) -> float:
        return self.texts.bits_per_byte


class Scores(Settings):
    """scores.json of a run."""

    step: int
    sources: dict[str, SourceScore]
    sets: dict[str, SourceScore] = Field(default_factory=dict)  # texts given: `evaluation_sets`
    key: str = ""  # of the run

    @property
    def bits_per_byte(self) -> dict[str, float]:
        return {name: source.bits_per_byte for name, source in self.sources.items()}

    @property
    def of_sets(self) -> dict[str, float]:
        """Bits per byte of the texts given."""
        return {name: texts.bits_per_byte for name, texts in self.sets.items()}

    def of_texts(self) -> Scores:
        """The same with the texts given in place of the held-out documents."""
        return self.model_copy(update={"sources": self.sets, "sets": {}})

    @property
    def mean(self) -> float:
        """Mean over sources, each as one."""
        return float(np.mean(list(self.bits_per_byte.values())))

    def encoded(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Scores:
        return cls.model_validate(orjson.loads(path.read_bytes()))


@dataclass(frozen=True)
class Held:
    """A held-out document."""

    doc_id: str
    ids: np.ndarray  # (tokens,), end of text included
    bytes: int  # UTF-8, of the text


def choose(documents: Iterable[Held], max_bytes: int) -> list[Held]:
    """A fixed sample of at most max_bytes (0: all), the same for every model.

    Documents are walked in the order of a hash of their id and taken where they still fit; when none fits, the
    smallest is taken. Documents without text are left out: they have no bytes to divide by.
    """
    known = sorted((d for d in documents if d.bytes), key=lambda d: (xxhash.xxh3_64_intdigest(d.doc_id), d.doc_id))
    taken, total = [], 0
    for document in known:
        if not max_bytes or total + document.bytes <= max_bytes:
            taken.append(document)
            total += document.bytes
    if not taken and known:
        taken = [min(known, key=lambda d: d.bytes)]
    return taken


def beginning(document: Held, max_bytes: int, byte_lengths: np.ndarray) -> Held:
    """The document, or its first tokens: as many as stand for at most max_bytes, at least one.

    byte_lengths (vocab,): bytes of text that each id stands for. Many short beginnings say more about a mixture than a
    few long documents: documents differ more from each other than the parts of one do.
    """
    if document.bytes <= max_bytes:
        return document
    sizes = np.cumsum(byte_lengths[document.ids])
    tokens = max(1, int(np.searchsorted(sizes, max_bytes, side="right")))
    return Held(document.doc_id, document.ids[:tokens], int(sizes[tokens - 1]))


def rolling(tokens: int, seq_len: int) -> list[tuple[int, int, int]]:
    """How a document is cut: (begin, first, stop) -> tokens [first, stop) are predicted from [begin, ...).

    Positions count the end-of-text token in front as -1. Each token is predicted once; no input is longer than seq_len.
    """
    out = []
    for first in range(0, tokens, seq_len):
        stop = min(first + seq_len, tokens)
        out.append((max(-1, stop - seq_len - 1), first, stop))
    return out


def _rows(documents: Sequence[Held], eos_id: int, seq_len: int) -> list[tuple[int, np.ndarray, int]]:
    """(document, ids with the token before the first input in front, how many at the end are predicted)."""
    rows = []
    for number, document in enumerate(documents):
        padded = np.concatenate([[eos_id], document.ids]).astype(np.int64)  # position p is at p + 1
        for begin, first, stop in rolling(len(document.ids), seq_len):
            rows.append((number, padded[begin + 1 : stop + 1], stop - first))
    return rows


def _batches(rows: list[tuple[int, np.ndarray, int]]) -> Iterator[list[tuple[int, np.ndarray, int]]]:
    """Rows of about equal length together, BATCH_TOKENS with padding or one row."""
    batch: list[tuple[int, np.ndarray, int]] = []
    for row in sorted(rows, key=lambda r: (len(r[1]), r[0])):
        if batch and (len(batch) + 1) * len(row[1]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def document_bits(model: Llama, documents: Sequence[Held], eos_id: int, seq_len: int, group: Group) -> np.ndarray:
    """Bits that the model needs for each document, (documents,) float64, on every rank.

    Batches are dealt out to the ranks. All ranks make the same number of forward passes, because a sharded model
    gathers its weights in each.
    """
    batches = list(_batches(_rows(documents, eos_id, seq_len)))
    nats = torch.zeros(len(documents), dtype=torch.float64, device=group.device)
    for at in range(0, len(batches), group.data_world):
        mine = at + group.data_rank
        batch = batches[min(mine, len(batches) - 1)]
        length = len(batch[-1][1])
        ids = np.zeros((len(batch), length), dtype=np.int64)
        targets = np.full((len(batch), length - 1), -1, dtype=np.int64)
        for r, (_, row, predicted) in enumerate(batch):
            ids[r, : len(row)] = row
            targets[r, len(row) - 1 - predicted : len(row) - 1] = row[len(row) - predicted :]
        with torch.no_grad():
            nll = model(
                torch.from_numpy(ids[:, :-1]).to(group.device),
                torch.from_numpy(targets).to(group.device),
                each=True,
            )
        if mine < len(batches) and group.speaks:
            owners = torch.tensor([number for number, _, _ in batch], device=group.device)
            nats.index_add_(0, owners, nll.double().sum(dim=1))
    return group.sum(nats).cpu().numpy() / math.log(2)


def document_lengths(tokens: TokenSet, config: TrainConfig) -> np.ndarray | None:
    """Bytes of each id (vocab,), where documents are cut. Raises TrainError where ids have no fixed bytes."""
    if not config.eval_document_bytes:
        return None
    lengths = token_byte_lengths(tokens.tokenizer_path.read_bytes())
    if lengths is None:
        raise TrainError(
            f"{tokens.tokenizer_path}: its tokens do not stand for fixed bytes of text, so documents cannot be "
            "cut to eval_document_bytes. Leave that setting out."
        )
    return lengths


def shortened(documents: Iterable[Held], config: TrainConfig, lengths: np.ndarray | None) -> Iterable[Held]:
    """Documents up to eval_document_bytes; lengths as `document_lengths`."""
    if lengths is None:
        return documents
    return (beginning(document, config.eval_document_bytes, lengths) for document in documents)


def held_out(tokens: TokenSet, config: TrainConfig) -> dict[str, list[Held]]:
    """The documents that every model over these tokens is scored on, by source.

    Raises TrainError where nothing is held out, and where documents should be cut but tokens have no fixed bytes.
    """
    lengths = document_lengths(tokens, config)
    chosen = {}
    for name, source in sorted(tokens.holdout.items()):
        documents = (Held(doc_id, ids, int(size)) for doc_id, ids, size in source.documents())
        if taken := choose(shortened(documents, config, lengths), config.eval_bytes):
            chosen[name] = taken
    if not chosen:
        raise TrainError(
            f"{tokens.folder}: no source has held-out documents, so nothing can be scored. Tokenize with a larger "
            "holdout share, or more documents."
        )
    return chosen


@dataclass(frozen=True)
class Yardstick:
    """What models are scored on: the same documents for all of them."""

    sources: dict[str, list[Held]]  # held-out
    sets: dict[str, list[Held]]  # given
    eos_id: int
    seq_len: int


def yardstick(tokens: TokenSet, config: TrainConfig) -> Yardstick:
    """Held-out documents and evaluation sets, chosen and encoded. Raises as `held_out` and `texts.encoded_sets`."""
    from gristmill.trainer.texts import encoded_sets

    sets = {}
    if config.evaluation_sets:
        lengths = document_lengths(tokens, config)
        for name, documents in encoded_sets(config.evaluation_sets, tokens).items():
            sets[name] = choose(shortened(documents, config, lengths), config.eval_bytes)
    return Yardstick(held_out(tokens, config), sets, tokens.eos_id, config.seq_len)


def score(model: Llama, on: Yardstick, group: Group, step: int, key: str = "") -> Scores:
    """Scores the held-out part of every source that has one, and the texts given. All ranks together."""
    chosen = on.sources | on.sets
    flat = [document for documents in chosen.values() for document in documents]
    bits = document_bits(model, flat, on.eos_id, on.seq_len, group)
    scored, start = {}, 0
    for name, documents in chosen.items():
        part = bits[start : start + len(documents)]
        start += len(documents)
        scored[name] = SourceScore(
            doc_ids=[d.doc_id for d in documents],
            bits=[float(b) for b in part],
            bytes=[d.bytes for d in documents],
            tokens=[len(d.ids) for d in documents],
        )
    return Scores(
        step=step,
        sources={name: scored[name] for name in on.sources},
        sets={name: scored[name] for name in on.sets},
        key=key,
    )
