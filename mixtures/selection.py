"""Parts of a source: the documents for which a condition holds, as a source of its own.

    sources:
      web_low:  {source: web, where: "classifier.score < 0.5", weight: 0.4}
      web_high: {source: web, where: "classifier.score >= 0.5", weight: 0.6}

`SelectedTokens` looks like `SourceTokens`: the chosen documents in their order, as if nothing else were there. Nothing
is copied: where each of them lies takes 16 bytes of memory a document. Windows run over the chosen documents only.
Two sources of one mixture never share a document, so nothing is repeated by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from gristmill.mixtures.plan import MixtureError
from gristmill.mixtures.subsample import document_keys, thinned
from gristmill.mixtures.where import Where
from gristmill.stages.settings_file import nearest
from gristmill.tokenize.measures import document_columns
from gristmill.tokenize.shards import ShardInfo, SourceTokens, TokenError, TokenSet

if TYPE_CHECKING:
    from gristmill.mixtures.consumption import Consumption
    from gristmill.mixtures.mixture import Mixture

ONE = Fraction(1)


class SelectedTokens:
    """Chosen documents of a source. See the top of this module."""

    def __init__(self, name: str, whole: SourceTokens, chosen: np.ndarray, where: str = "") -> None:
        """chosen: (documents,) bool, in the order of the source."""
        self.name, self.whole, self.where, self.dtype = name, whole, where, whole.dtype
        start, length, utf8 = _documents(whole)
        self.begin = start[chosen]  # (n,) int64: first token of each chosen document in the whole source
        self.offset = np.concatenate([[0], np.cumsum(length[chosen])])  # (n + 1,) int64: and among the chosen
        self.utf8_bytes = int(utf8[chosen].sum())
        self.digest = xxhash.xxh3_64_hexdigest(np.packbits(chosen).tobytes())

    @property
    def tokens(self) -> int:
        """Ids in all, end-of-text ids included."""
        return int(self.offset[-1])

    @property
    def documents_count(self) -> int:
        return len(self.begin)

    @property
    def shards(self) -> list[ShardInfo]:
        """Those of the whole source."""
        return self.whole.shards

    def read(self, start: int, length: int) -> np.ndarray:
        """The ids (length,) from position `start` among the chosen. Raises TokenError when the range leaves them."""
        parts = [self.whole.read(at, n) for at, n in self._stretches(start, length)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def bounds(self, start: int, length: int) -> np.ndarray:
        """Where documents start in the range: (k,) int64, ascending, counted from `start`, each in [0, length)."""
        self._check(start, length)
        first, last = np.searchsorted(self.offset[:-1], [start, start + length])
        return self.offset[first:last] - start

    def document_at(self, position: int) -> tuple[str, str, int]:
        """The document that holds a position -> (its id, name of its shard, its row in the index)."""
        return self.whole.document_at(int(self.places(np.array([position]))[0]))

    def places(self, position: np.ndarray) -> np.ndarray:
        """Positions among the chosen (n,) -> in the whole source (n,) int64."""
        document = np.searchsorted(self.offset, position, side="right") - 1
        return self.begin[document] + (position - self.offset[document])

    def _stretches(self, start: int, length: int) -> Iterator[tuple[int, int]]:
        """(first token in the whole source, tokens) of each consecutive part of a range."""
        self._check(start, length)
        at = start
        document = int(np.searchsorted(self.offset, start, side="right")) - 1
        while at < start + length:
            end = min(int(self.offset[document + 1]), start + length)
            yield int(self.begin[document] + at - self.offset[document]), end - at
            at, document = end, document + 1

    def _check(self, start: int, length: int) -> None:
        if start < 0 or length < 0 or start + length > self.tokens:
            raise TokenError(
                f"Source {self.name!r} holds {self.tokens:,} tokens; the range from {start:,} of {length:,} tokens "
                "leaves it."
            )


def _documents(source: SourceTokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first token, tokens, UTF-8 bytes) of every document of a source: (documents,) int64 each."""
    starts, lengths, sizes, at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for _, info, index in source.indexes():
        starts.append(index.start + at)
        lengths.append(index.length.astype(np.int64))
        sizes.append(index.bytes.astype(np.int64))
        at += info.tokens
    return np.concatenate(starts), np.concatenate(lengths), np.concatenate(sizes)


def select(
    mixture: Mixture, tokens: TokenSet, books: Consumption | None, share: Fraction = ONE
) -> tuple[TokenSet, tuple[str, ...]]:
    """-> (the token set with the mixture's parts of sources as sources, notes on what they leave out).

    share: of the tokens of each source, to be kept by whole documents (`subsample.py`).

    Raises MixtureError where two sources of the mixture share documents, where a part holds documents that an earlier
    run used under another name, or where what was measured is not known.
    """
    notes: list[str] = []
    sources: dict[str, Any] = dict(tokens.sources)
    chosen: dict[str, dict[str, np.ndarray]] = {}  # token source -> source of the mixture -> documents
    for name, wish in mixture.sources.items():
        whole_name = wish.source or name
        if whole_name not in tokens.sources:
            continue  # the plan refuses it, with the nearest name
        whole = tokens.sources[whole_name]
        mask = _mask(mixture, name, whole, wish.where)
        chosen.setdefault(whole_name, {})[name] = mask
        if wish.where is not None or wish.source is not None:
            sources[name] = part = SelectedTokens(name, whole, mask, _condition(wish.where))
            which = f" where {part.where}" if part.where else ""
            notes.append(f"{name}: {int(mask.sum()):,} of {len(mask):,} documents of {whole_name}{which}")
    for whole_name, masks in chosen.items():
        _check_apart(mixture, whole_name, masks)
        left = int((~np.logical_or.reduce(list(masks.values()))).sum())
        if left:
            total = tokens.sources[whole_name].documents_count
            notes.append(f"{left:,} of {total:,} documents of {whole_name} are in no source of this mixture")
    if books is not None:
        _check_books(mixture, tokens, chosen, books)
    if share < 1:
        notes += _thin(chosen, tokens, sources, mixture, share)
    return replace(tokens, sources=sources), tuple(notes)


def _thin(
    chosen: Mapping[str, Mapping[str, np.ndarray]],
    tokens: TokenSet,
    sources: dict[str, Any],
    mixture: Mixture,
    share: Fraction,
) -> list[str]:
    """Cuts every source of the mixture down -> what is left of each."""
    notes = []
    for whole_name, masks in chosen.items():
        whole = tokens.sources[whole_name]
        keys, length = document_keys(whole), _documents(whole)[1]
        for name, mask in masks.items():
            kept = thinned(keys, length, mask, share)
            sources[name] = SelectedTokens(name, whole, kept, _condition(mixture.sources[name].where))
            notes.append(
                f"{name}: {int(kept.sum()):,} of {int(mask.sum()):,} documents, {sources[name].tokens:,} of "
                f"{int(length[mask].sum()):,} tokens, so that it is repeated as often as in the run that this one "
                "stands for"
            )
    return notes


def _condition(where: str | None) -> str:
    return "" if where is None else Where.parse(where).text


def _mask(mixture: Mixture, name: str, whole: SourceTokens, where: str | None) -> np.ndarray:
    if where is None:
        return np.ones(whole.documents_count, bool)
    condition = Where.parse(where)
    try:
        mask = condition.holds(document_columns(whole, condition.columns))
    except (TokenError, ValueError) as error:
        raise MixtureError(f"Mixture {mixture.name}: source {name!r}, where {where!r}: {error}") from error
    if not mask.any():
        raise MixtureError(
            f"Mixture {mixture.name}: source {name!r}: {where!r} holds for none of the {len(mask):,} documents of "
            f"{whole.name}. `gristmill inspect RUN` shows how its measures are spread."
        )
    return mask


def _check_apart(mixture: Mixture, whole: str, masks: Mapping[str, np.ndarray]) -> None:
    names = list(masks)
    for i, a in enumerate(names):
        for b in names[:i]:
            shared = int((masks[a] & masks[b]).sum())
            if shared:
                raise MixtureError(
                    f"Mixture {mixture.name}: {shared:,} documents of {whole} are in both {b!r} and {a!r}, and would "
                    "be repeated by accident. Make the conditions exclude each other; for more of the best documents, "
                    "split the source into parts and give one more weight."
                )


def _check_books(
    mixture: Mixture, tokens: TokenSet, chosen: Mapping[str, Mapping[str, np.ndarray]], books: Consumption
) -> None:
    for used, use in books.sources.items():
        whole = use.source or used
        for name, mask in chosen.get(whole, {}).items():
            if name == used:
                continue  # compared by its digest
            theirs = _mask(mixture, used, tokens.sources[whole], use.where or None)
            shared = int((theirs & mask).sum())
            if shared:
                raise MixtureError(
                    f"Mixture {mixture.name}: the run to continue from used {whole} as {used!r}, and {shared:,} of "
                    f"those documents are in {name!r} now: which of them were seen is not known by windows of another "
                    f"source. Name the same parts with the same conditions in both.{nearest(name, books.sources)}"
                )
