"""What the verbs `tokenizer` and `tokens` do: train outside a run, compare tokenizers, look at one document.

train_tokenizer("recipe.yaml", None, "tokenizer.json", display)
compare_tokenizers(["a/tokenizer.json", "out/demo/run"], "out/demo/run")
show("out/demo/run/tokens", "17", source="docs").lines()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from gristmill.pipelines.inspect import spread
from gristmill.pipelines.learn import TokenizerOrder, train_on_kept
from gristmill.pipelines.open_run import TOKENS, Run, RunError, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import TokenSettings
from gristmill.stages.documents import MAX_BATCH_DOCUMENTS, Batch
from gristmill.stages.settings_file import SettingsError, build, read
from gristmill.stages.shards import Shard, exists, join, publish_bytes, read_bytes
from gristmill.tokenize.report import TokenizerReport, tokenizer_report
from gristmill.tokenize.shards import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    DocumentIndex,
    ShardInfo,
    SourceTokens,
    Split,
    TokenError,
    TokenSet,
)
from gristmill.tokenize.tokenizer_json import parse, token_bytes, vocabulary
from gristmill.tokenize.train import TokenizerSettings, forecast, tokenizer_bytes

BORDER = "\u2502"  # between two tokens
READ_COLUMNS = ("source", "language", "text")


# Training


def train_tokenizer(recipe_path: str | None, run_folder: str | None, out: str | None, display: Display) -> str:
    """Trains a tokenizer on what a run kept -> the file written.

    recipe_path: whose `tokenizer` section to use; that of the run's own recipe where None; its other sections are not
    read. run_folder: whose documents to learn from, but for those that it holds out; the recipe's own run where None.
    out: `tokenizer.json` in the run folder where None.

    Raises SettingsError for a recipe without the section, RunError for a run that has kept nothing yet.
    """
    if recipe_path is None and run_folder is None:
        raise SettingsError("Name a recipe, or a run with --on RUN: its documents are what a tokenizer learns from.")
    file = read(recipe_path if recipe_path is not None else join(str(run_folder), "recipe.yaml"))
    if not file.values.get("tokenizer"):
        raise SettingsError(
            f"{file.path}: there is no `tokenizer` section. Add one, for example `tokenizer: {{vocab_size: 32000}}`."
        )
    settings = build(TokenizerSettings, file.values["tokenizer"], file, ["tokenizer"])
    run = open_run(run_folder or file.values.get("out") or f"out/{file.values.get('name')}")
    segment, shards = _kept_shards(run)
    held_out = TokenSettings.model_validate(run.recipe.get("tokens") or {}).holdout_share
    target = out or join(run.path, TOKENIZER_FILE)
    if target == join(run.path, TOKENS, TOKENIZER_FILE):
        raise SettingsError(f"{target} is the tokenizer of the run's token shards. Choose another file for --out.")
    corpus_bytes = _kept_bytes(run)
    display.say(f"{run.path}/{segment}: {forecast(corpus_bytes, settings)}")
    order = TokenizerOrder(
        out=run.path,
        key="",
        settings=settings,
        upstream=segment,
        shards=shards,
        holdout_share=held_out,
    )
    done = 0
    with display.phase("tokenizer", max(1, corpus_bytes)) as phase:

        def on_read(count: int) -> None:
            nonlocal done
            done += count
            last = done >= corpus_bytes
            phase.to(min(done, corpus_bytes), max(1, corpus_bytes), "learning" if last else "reading")

        tokenizer = train_on_kept(order, on_read)
        publish_bytes(target, tokenizer_bytes(tokenizer))
    return target


def _kept_shards(run: Run) -> tuple[str, tuple[Shard, ...]]:
    """The last segment that kept something, and its shards. Raises RunError where some are not done."""
    parts = run.parts("kept")
    if not parts:
        raise RunError(f"{run.path}: no segment has kept documents yet. Run the recipe first: `gristmill run RECIPE`.")
    segment = parts[0].split("/", 1)[0]
    there = {part.rsplit("/", 1)[-1].removesuffix(".parquet") for part in parts}
    shards = tuple(Shard.model_validate(entry) for entry in run.inputs)
    missing = [shard.part for shard in shards if shard.part not in there]
    if missing or segment != run.segments[-1]:
        raise RunError(
            f"{run.path}: the run is not finished: {segment} has {len(there):,} of {len(shards):,} parts. "
            "Run its recipe again; it continues."
        )
    return segment, shards


def _kept_bytes(run: Run) -> int:
    segment = run.segments[-1]
    return sum(ledger.stages[-1].kept.bytes for ledger in run.ledgers(segment) if ledger.stages)


# Comparison


def compare_tokenizers(
    tokenizers: Sequence[str], run_folder: str, *, max_bytes: int, parts_per_source: int | None = None
) -> TokenizerReport:
    """The figures of tokenizers on what a run kept. tokenizers: files, run folders, or folders of token shards.

    max_bytes: of text for each source and language. Raises RunError, or TokenError for what is no tokenizer.
    """
    named = {name: tokenizer_file(name) for name in tokenizers}
    run = open_run(run_folder)
    if not run.parts("kept"):
        raise RunError(f"{run.path}: no segment has kept documents yet, so there is nothing to compare on.")
    for name, data in named.items():
        try:
            parse(data)
        except TokenError as error:
            raise TokenError(f"{name}: {error}") from error
    return tokenizer_report(named, kept_sample(run, parts_per_source), max_bytes=max_bytes)


def tokenizer_file(path: str) -> bytes:
    """The tokenizer.json that a path means: the file, or the one of a run or of token shards."""
    for name in (join(path, TOKENS, TOKENIZER_FILE), join(path, TOKENIZER_FILE)):
        if exists(name):
            return read_bytes(name)
    try:
        return read_bytes(path)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise TokenError(
            f"{path}: there is no tokenizer. Give a tokenizer.json, a run folder, or a folder of token shards."
        ) from error


def kept_sample(run: Run, parts_per_source: int | None = None) -> Iterator[Batch]:
    """Kept documents with source, language and text. parts_per_source: shards looked into, spread over each source;
    None reads all."""
    source_of = {Shard.model_validate(entry).part: str(entry["source"]) for entry in run.inputs}
    by_source: dict[str, list[str]] = {}
    for part in run.parts("kept"):
        name = part.rsplit("/", 1)[-1].removesuffix(".parquet")
        by_source.setdefault(source_of.get(name, ""), []).append(part)
    for parts in by_source.values():
        for at in spread(len(parts), parts_per_source):
            with run.open_parquet(parts[at]) as file:
                names = [name for name in READ_COLUMNS if name in file.schema_arrow.names]
                yield from file.iter_batches(batch_size=MAX_BATCH_DOCUMENTS, columns=names)


# One document


@dataclass(frozen=True)
class ShownDocument:
    """A document of token shards, token by token."""

    doc_id: str
    source: str
    split: Split
    shard: str
    row: int  # in the index of the shard
    bytes: int  # UTF-8 of the text
    ids: list[int]  # with the end-of-text id
    pieces: list[str]  # text of each id; bytes that are no whole character are spelt <0xE2>
    text: str
    others: int = 0  # documents of the same id elsewhere

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {**self.__dict__}


def open_tokens(path: str) -> tuple[TokenSet, str | None]:
    """(token shards, name of the one shard that was meant). path: a run, a folder of token shards, or a file of one."""
    folder = Path(path.rstrip("/"))
    if (folder / TOKENS / MANIFEST_FILE).is_file():
        return TokenSet.open(folder / TOKENS), None
    if (folder / MANIFEST_FILE).is_file() or not (folder.parent / MANIFEST_FILE).is_file():
        return TokenSet.open(path), None
    name = folder.name.removesuffix(".bin").removesuffix(".idx")
    tokens = TokenSet.open(folder.parent)
    if name not in {info.name for info in tokens.manifest.shards}:
        raise TokenError(f"{path}: {folder.parent / MANIFEST_FILE} lists no shard {name!r}.")
    return tokens, name


def show(path: str, document: str, source: str | None = None, split: Split | None = None) -> ShownDocument:
    """One document of token shards. document: its place among those asked for, from 0; or its id, `id:` before it where
    it is a number. Raises TokenError where there is no such document or the place is ambiguous."""
    tokens, shard = open_tokens(path)
    known = sorted({*tokens.sources, *tokens.holdout})
    if source is not None and source not in known:
        raise TokenError(f"{path}: no source {source!r}; there are: {', '.join(known) or 'none'}.")
    parts = [
        (of, info, ids, index)
        for of in (*tokens.sources.values(), *tokens.holdout.values())
        if source in (None, of.name) and split in (None, of.split)
        for info, ids, index in of.parts()
        if shard in (None, info.name)
    ]
    if document.isdigit():
        part, row = _at_place(parts, int(document), path)
        return _shown(tokens, part, row, 0)
    found = [(part, row) for part in parts for row in _rows_of(part[3], document.removeprefix("id:"))]
    if not found:
        raise TokenError(
            f"{path}: no document {document.removeprefix('id:')!r} among {sum(len(p[3].start) for p in parts):,}. "
            "It may have been dropped before: see `gristmill inspect RUN`."
        )
    return _shown(tokens, *found[0], len(found) - 1)


_Part = tuple[SourceTokens, ShardInfo, np.ndarray, DocumentIndex]


def _at_place(parts: list[_Part], place: int, path: str) -> tuple[_Part, int]:
    if not parts:
        raise TokenError(f"{path}: no documents of that source and split.")
    chosen = [part for part in parts if part[0].split == parts[0][0].split]  # the training part where both are there
    names = {part[0].name for part in chosen}
    if len(names) > 1:
        raise TokenError(
            f"{path}: {len(names)} sources ({', '.join(sorted(names))}), and each counts its documents from 0. "
            "Add --source, or name the document by its id."
        )
    for part in chosen:
        count = len(part[3].start)
        if place < count:
            return part, place
        place -= count
    total = sum(len(part[3].start) for part in chosen)
    raise TokenError(f"{path}: there are {total:,} documents, 0 to {total - 1:,}.")


def _rows_of(index: DocumentIndex, doc_id: str) -> list[int]:
    return np.flatnonzero(pc.equal(index.doc_id, doc_id).to_numpy()).tolist()


def _shown(tokens: TokenSet, part: _Part, row: int, others: int) -> ShownDocument:
    of, info, ids, index = part
    start = int(index.start[row])
    own = ids[start : start + int(index.length[row])].tolist()
    data = tokens.tokenizer_path.read_bytes()
    pieces, text = _pieces(data, own)
    doc_id, size = index.doc_id[row].as_py(), int(index.bytes[row])
    return ShownDocument(doc_id, of.name, of.split, info.name, row, size, own, pieces, text, others)


def _pieces(tokenizer_json: bytes, ids: list[int]) -> tuple[list[str], str]:
    """The text of each id, and of all but the last."""
    names = {i: token for token, i in vocabulary(parse(tokenizer_json)).items()}
    of_bytes = token_bytes(tokenizer_json)
    if of_bytes is None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        return [names.get(i, f"<{i}>") for i in ids], tokenizer.decode(ids[:-1], skip_special_tokens=False)
    pieces = [_spelt(of_bytes[i]) if of_bytes[i] else names.get(i, f"<{i}>") for i in ids]
    return pieces, b"".join(of_bytes[i] for i in ids[:-1]).decode(errors="replace")


def _spelt(data: bytes) -> str:
    """UTF-8 as text; bytes that are no whole character as <0xE2>."""
    text = data.decode(errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)
