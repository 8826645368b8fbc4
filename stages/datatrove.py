"""`datatrove`: any filter, formatter or stats block of datatrove, on our batches and in our books.

    datatrove:
      block: datatrove.pipeline.filters.GopherQualityFilter
      arguments: {min_doc_words: 20}
      language: column

A filter (`BaseFilter`) keeps or drops; the reason that it gives is the reason in the ledger, as an identifier. What it
edits (datatrove's C4 filter takes lines out) is kept. A formatter (`BaseFormatter`) edits the text. A stats block
(`BaseStats`) adds its figures to the document's metadata; its own files are not written. What any block puts into a
document's metadata goes to our column `metadata`.

A document is decided alone, so that the same document ends the same in every batch, order and worker. Three things
differ from datatrove for that:
    - random draws (SamplerFilter) are seeded by the document's id and the argument `seed`, not by a document's turn
    - replacement values that take turns (PIIFormatter) begin anew with every document
    - a filter that works on batches (`filter_batch`) is given batches of one document
A block of others that keeps a state of its own cannot be seen from here: it must not.
"""

from __future__ import annotations

import importlib
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import orjson
import pyarrow as pa
import xxhash
from pydantic import Field, model_validator

from gristmill.stages.documents import Batch, Result, Rule, Settings, cut, with_columns
from gristmill.stages.readers_common import clean_string, is_empty
from gristmill.stages.settings_file import nearest

COLUMN = "column"  # the value of `language` that names our column
ERROR = "datatrove_error"
EMPTY = "empty"
_META = ("url", "date", "dump", "language", "language_score")  # columns that datatrove has as metadata
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_MAX_REASON = 80  # characters

Document: TypeAlias = Any  # datatrove.data.Document


class BlockError(ValueError):
    """A block cannot be found, built or run."""


class _Needs:
    """Columns of an instance: `language` where it is read from its column."""

    def __get__(self, stage: Any, owner: type) -> tuple[str, ...]:
        return ("text", "language") if stage is not None and stage.language == COLUMN else ("text",)


class Datatrove(Settings):
    """Runs one block. Drops what a filter drops, and what a block raises on (`datatrove_error`) or leaves empty.

    Raises BlockError, before any document is read, for a path, an argument or a kind of block that cannot be used;
    and later where the machine lacks a package or a file that the block asks for: no document is to blame for that.
    """

    name: ClassVar[str] = "datatrove"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = cast(Any, _Needs())
    adds: ClassVar[Mapping[str, pa.DataType]] = {}
    measures: ClassVar = ()
    packages: ClassVar[tuple[str, ...]] = ("datatrove",)  # whose version is part of the result's identity

    block: str  # import path of its class
    arguments: dict[str, Any] = Field(default_factory=dict)  # keyword arguments of its constructor
    language: str | None = None  # "column": each document's; a code: that one; none: the block's own default
    allow_foreign: bool = False  # a path outside datatrove runs code that datatrove's authors did not write

    @model_validator(mode="after")
    def _can_be_built(self) -> Datatrove:
        self._loaded(None if self.language == COLUMN else self.language)
        return self

    def rules(self) -> tuple[Rule, ...]:
        return ()

    def __call__(self, batch: Batch) -> Result:
        out = _Outcome(batch)
        columns = {name: batch[name].to_pylist() for name in (*_META, "metadata") if name in batch.schema.names}
        ids = batch["doc_id"].to_pylist()
        texts = batch["text"].to_pylist()
        for row, (doc_id, text) in enumerate(zip(ids, texts, strict=True)):
            meta = {name: values[row] for name, values in columns.items() if values[row] is not None}
            if self.language is not None and self.language != COLUMN:
                meta["language"] = self.language
            own = meta.pop("metadata", None)
            code = meta.get("language") if self.language == COLUMN else self.language
            out.add(row, self._one(code, doc_id, text, own, meta))
        return out.result()

    def _one(self, code: str | None, doc_id: str, text: str, own: str | None, meta: dict[str, Any]) -> _Verdict:
        """One document through the block. own: its JSON of metadata; meta: the columns that datatrove has there."""
        try:
            loaded = self._loaded(code)
            with loaded.lock:
                return loaded.judge(doc_id, text, own, meta, self.arguments.get("seed"))
        except (BlockError, ImportError, OSError) as error:  # the machine's fault, and every document would be lost
            raise BlockError(
                f"{self.block} cannot run here: {error}. Install or fetch what it asks for on every worker, "
                "and run the recipe again."
            ) from error
        except Exception as error:
            return _Verdict(ERROR, text, own, error=type(error).__name__)

    def _loaded(self, code: str | None) -> _Loaded:
        arguments = orjson.dumps(self.arguments, option=orjson.OPT_SORT_KEYS)
        return _load(self.block, arguments, code, self.allow_foreign)


@dataclass(frozen=True)
class _Verdict:
    """What became of one document."""

    reason: str | None  # none: kept
    text: str
    metadata: str | None
    nuls: int = 0  # replaced by the text policy, as are lone surrogates
    surrogates: int = 0
    error: str = ""  # the exception's name


@dataclass(frozen=True)
class _Loaded:
    """A block as this process holds it. Its lock is for workers of several threads: a block is not made for them."""

    block: Any
    work: Callable[[Any, Document], str | None]  # applies the block to a document -> the reason to drop it, or none
    generators: tuple[np.random.Generator, ...]
    turns: tuple[Any, ...]  # PIIReplacer
    lock: threading.Lock = field(default_factory=threading.Lock)

    def judge(self, doc_id: str, text: str, own: str | None, meta: dict[str, Any], seed: int | None) -> _Verdict:
        from datatrove.data import Document

        self._rewind(doc_id, seed)
        given = orjson.loads(own) if own is not None else {}
        doc = Document(text=text, id=doc_id, metadata={**given, **meta})
        before = _encoded(doc.metadata)
        reason = self.work(self.block, doc)
        if reason is not None:
            return _Verdict(reason, text, own)
        if not isinstance(doc.text, str):
            raise TypeError(f"the block gave a text of type {type(doc.text).__name__}")
        cleaned, nuls, surrogates = (text, 0, 0) if doc.text == text else clean_string(doc.text)
        if is_empty(cleaned):
            return _Verdict(EMPTY, text, own)
        return _Verdict(None, cleaned, _metadata(own, given, before, _encoded(doc.metadata)), nuls, surrogates)

    def _rewind(self, doc_id: str, seed: int | None) -> None:
        for generator in self.generators:
            fresh = np.random.default_rng(xxhash.xxh3_64_intdigest(doc_id, seed or 0))
            generator.bit_generator.state = fresh.bit_generator.state
        for replacer in self.turns:
            replacer._replace_i = 0


def _encoded(metadata: Mapping[Any, Any]) -> dict[str, bytes]:
    """Each value as JSON: for comparison, since a block may change a value in place."""
    return {str(key): orjson.dumps(value, default=str, option=_JSON) for key, value in metadata.items()}


def _metadata(own: str | None, given: dict[str, Any], before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Any:
    """The document's JSON with what the block added, changed and removed; the same string where it did nothing."""
    changed = {key: orjson.loads(value) for key, value in after.items() if before.get(key) != value}
    gone = before.keys() - after.keys()
    if not changed and not gone:
        return own
    kept = {key: value for key, value in given.items() if key not in gone}
    return orjson.dumps({**kept, **changed}).decode()


class _Outcome:
    """Verdicts of a batch, row by row."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._verdicts: list[_Verdict] = []
        self._counters: Counter[str] = Counter()

    def add(self, row: int, verdict: _Verdict) -> None:
        assert row == len(self._verdicts)
        self._verdicts.append(verdict)
        if verdict.error:
            self._counters[f"errors.{verdict.error}"] += 1
        self._counters["nul_replaced"] += verdict.nuls
        self._counters["surrogates_replaced"] += verdict.surrogates

    def result(self) -> Result:
        batch, verdicts = self._batch, self._verdicts
        text = pa.array([v.text for v in verdicts], pa.string())
        edited = sum(new != old for new, old in zip(text.to_pylist(), batch["text"].to_pylist(), strict=True))
        columns = {"text": text}
        if any(v.metadata is not None for v in verdicts):
            columns["metadata"] = pa.array([v.metadata for v in verdicts], pa.string())
        reasons = np.array([v.reason or "" for v in verdicts], dtype=object)
        fails = {reason: reasons == reason for reason in sorted({*reasons} - {""})}
        self._counters["documents_changed"] = edited
        return cut(with_columns(batch, columns), fails, {k: n for k, n in self._counters.items() if n})


def safe_reason(given: Any, block: type) -> str:
    """A reason as an identifier: "Too short!" -> "Too_short". Without one the block's name: "regex_filter"."""
    reason = re.sub(r"\W+", "_", str(given or ""), flags=re.ASCII).strip("_")[:_MAX_REASON]
    reason = reason or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", block.__name__).lower()
    return f"_{reason}" if reason[0].isdigit() else reason


def _filter(block: Any, doc: Document) -> str | None:
    return _decided(block.filter(doc), block)


def _filter_batch(block: Any, doc: Document) -> str | None:
    (answer,) = block.filter_batch([doc])
    return _decided(answer, block)


def _decided(answer: Any, block: Any) -> str | None:
    keep, reason = answer if isinstance(answer, tuple) else (answer, None)
    return None if keep else safe_reason(reason, type(block))


def _format(block: Any, doc: Document) -> str | None:
    doc.text = block.format(doc.text)
    return None


def _describe(block: Any, doc: Document) -> str | None:
    doc.metadata.update(block.extract_stats(doc))
    return None


@lru_cache(256)  # one for each block and language of a recipe, and some
def _load(path: str, arguments: bytes, language: str | None, allow_foreign: bool) -> _Loaded:
    """The block, built. Raises BlockError that says which of path, kind or arguments is wrong."""
    kind = _class_at(path, allow_foreign)
    work = _work_of(kind, path)
    given = orjson.loads(arguments)
    signature = inspect.signature(cast(Any, kind).__init__)  # of the class: that of `__new__`, *args
    if "exclusion_writer" in given:
        raise BlockError(f"`exclusion_writer` of {path} is not used: dropped documents are in the run's `dropped`")
    if "language" in given and language is not None:
        raise BlockError("`language` stands both in the stage and in its `arguments`; keep one")
    if language is not None and "language" in signature.parameters:
        given["language"] = language
    if "output_folder" in signature.parameters:
        given.setdefault("output_folder", "memory://unused")  # of a stats block, whose `run` alone writes there
    try:
        signature.bind(None, **given)
    except TypeError as error:
        known = [name for name in signature.parameters if name not in ("self", "exclusion_writer")]
        unknown = [name for name in given if name not in signature.parameters]
        hint = f" no argument `{unknown[0]}`.{nearest(unknown[0], known)}" if unknown else f" {error}"
        raise BlockError(f"{path}:{hint}") from error
    try:
        block = kind(**given)
    except (ImportError, OSError) as error:
        raise BlockError(
            f"{path} cannot be built here ({type(error).__name__}: {error}). Where it loads a model or a list, name a "
            "local file in its arguments, or fetch what it asks for on every worker"
        ) from error
    except Exception as error:
        raise BlockError(f"{path} refuses its arguments: {type(error).__name__}: {error}") from error
    values = list(vars(block).values())
    owners = [getattr(value, "__self__", value) for value in values]  # `self.uniform = default_rng(seed).uniform`
    generators = tuple(owner for owner in owners if isinstance(owner, np.random.Generator))
    return _Loaded(block, work, generators, tuple(value for value in values if hasattr(value, "_replace_i")))


def _class_at(path: str, allow_foreign: bool) -> type:
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise BlockError(
            f"`{path}` is no import path; write for example datatrove.pipeline.filters.GopherQualityFilter"
        )
    if not path.startswith("datatrove.") and not allow_foreign:
        raise BlockError(f"`{path}` is not of datatrove. If you trust its code, set `allow_foreign: true`")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BlockError(f"`{module_name}` cannot be imported: {error}") from error
    kind = getattr(module, name, None)
    if kind is None:
        raise BlockError(f"`{module_name}` has no `{name}`.{nearest(name, _classes(module))}")
    if not isinstance(kind, type):
        raise BlockError(f"`{path}` is not a class")
    return kind


def _classes(module: Any) -> list[str]:
    return [name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")]


def _work_of(kind: type, path: str) -> Callable[[Any, Document], str | None]:
    """How a block of this class is applied. Raises BlockError for one that cannot be, document by document."""
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.filters.base_filter import BaseFilter
    from datatrove.pipeline.formatters.base import BaseFormatter
    from datatrove.pipeline.stats.base import BaseStats

    base = next((base for base in (BaseFilter, BaseFormatter, BaseStats) if issubclass(kind, base)), None)
    if base is None:
        raise BlockError(
            f"{path} is no filter, formatter or stats block of datatrove (BaseFilter, BaseFormatter, BaseStats). "
            "Readers, writers and blocks that compare documents have stages of their own here"
        )
    if issubclass(kind, LambdaFilter):
        raise BlockError(f"{path} takes a function, which a recipe cannot hold. Write a BaseFilter and name its path")
    if inspect.isabstract(kind):
        raise BlockError(f"{path} is abstract: name one of its subclasses")
    if kind.run is not base.run:  # type: ignore[attr-defined]
        raise BlockError(
            f"{path} has a `run` of its own, which sees all documents; only blocks that see one can be used"
        )
    if base is BaseFilter:
        return _filter if kind.filter_batch is BaseFilter.filter_batch else _filter_batch  # type: ignore[attr-defined]
    return _format if base is BaseFormatter else _describe
