"""Ablating the pipeline: variants of a recipe are run, trained on, and ranked, so that each filter shows its worth.

    name: filters
    recipe: crawl.yaml                      # paths count from this file
    mixture: blend.yaml                     # one, for all variants
    vary:                                   # `variants.py`; the recipe as it is comes first, as `control`
      no_c4: {stages.c4: false}
      short_pages: {stages.c4.min_sentences: 2}
    seeds: [1, 2, 3]
    budget_tokens: 20_000_000
    train: {model: 10m}

    gristmill ablate filters.yaml --out out/filters

writes `variants/<name>` (a run each, pieces that variants share done once), `held_out/<source>.jsonl`, then what every
ablation writes.

All are scored on the same texts: the control's held-out documents, but for those that some variant trains on in
another form. Their bits per byte compare across tokenizers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, field_validator

from gristmill.mixtures.mixture import Mixture
from gristmill.pipelines.ablation import train_and_rank
from gristmill.pipelines.borrow import borrow
from gristmill.pipelines.listing import frozen
from gristmill.pipelines.plan import plan_of
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import RecipeError
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.upstream import kept_batches, parts_of
from gristmill.pipelines.variants import CONTROL, Variant, variants_of
from gristmill.stages.documents import Settings
from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.settings_file import SettingsFile, build, read
from gristmill.stages.shards import publish
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer.ablate import Ablation, Candidate, Carry, Trials
from gristmill.trainer.ranking import Ranking

OWN = ("recipe", "mixture", "vary")  # keys of such a file that an ablation of mixtures has not
TEXTS = "held_out"  # folder of the texts that all variants are scored on


class Variation(Settings):
    """What is varied. The rest of the file is an `Ablation`."""

    recipe: str
    mixture: str
    vary: dict[str, dict[str, Any]] = Field(min_length=1)

    @field_validator("vary")
    @classmethod
    def _names(cls, vary: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, changes in vary.items():
            if name == CONTROL or not name.replace("-", "_").replace(".", "_").isidentifier():
                raise ValueError(
                    f"`{name}` becomes a folder beside `{CONTROL}`, which is the recipe as it is: use letters, digits, "
                    "_, - and dots"
                )
            if not changes:
                raise ValueError(f"`{name}` changes nothing: name a path in the recipe, such as stages.c4: false")
        return vary


def is_variation(path: str | Path) -> bool:
    """Whether an ablation file varies a recipe. Raises SettingsError for a file that cannot be read."""
    values = read(path).values
    return "recipe" in values or "vary" in values


def load(path: str | Path) -> tuple[Variation, Ablation]:
    """Raises SettingsError with file and line."""
    file, folder = read(path), Path(path).parent
    own = build(Variation, {key: file.values[key] for key in OWN if key in file.values}, file)
    rest = {key: value for key, value in file.values.items() if key not in OWN}
    if "mixtures" in rest:
        raise RecipeError(f"{file.at(['mixtures'])}: with `vary` there is one `mixture`, the same for all variants.")
    ablation = _ablation(rest, own, file).below(folder)
    paths = {"recipe": str(folder / own.recipe), "mixture": str(folder / own.mixture)}
    return own.model_copy(update=paths), ablation


def _ablation(rest: Mapping[str, Any], own: Variation, file: SettingsFile) -> Ablation:
    return build(Ablation, {**rest, "mixtures": [own.mixture]}, file)


@dataclass(frozen=True)
class Made:
    """A variant that was run."""

    variant: Variant
    folder: str  # of its run
    borrowed: int  # pieces
    tokens: int  # to train on
    documents: int

    def line(self, control: Made) -> str:
        """What it costs or brings in tokens."""
        what = ", ".join(f"{path}: {_shown(value)}" for path, value in self.variant.changes.items())
        share = (self.tokens / control.tokens - 1) * 100
        compared = "" if self is control else f", {share:+.1f} % against the control"
        return (
            f"{self.variant.name} ({what or 'the recipe as it is'}): {self.tokens:,} tokens in {self.documents:,} "
            f"documents to train on{compared}."
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def vary(path: str | Path, out: str, options: Options, display: Display, carry: Carry | None = None) -> Ranking:
    """Runs the variants, trains and ranks them -> the ranking, which notes the tokens of each variant.

    Raises SettingsError and InputError for faulty files, RunError, MixtureError, TrainError.
    """
    settings, ablation = load(path)
    Mixture.load(settings.mixture)
    variants = variants_of(settings.recipe, settings.vary, out)
    for variant in variants:
        if variant.recipe.tokenizer is None or not variant.recipe.tokens.holdout_share:
            raise RecipeError(
                f"{settings.recipe}: variant {variant.name} has no token shards with held-out documents to train and "
                "score on: the recipe needs a `tokenizer` section, and `tokens` a `holdout_share` above 0."
            )
    made: list[Made] = []
    for variant in variants:
        made.append(_made(variant, out, made, options, display))
    texts = held_out_texts(made, out, ablation.train.eval_bytes)
    sets = {**texts, **ablation.train.evaluation_sets}
    train = ablation.train.model_copy(update={"evaluation_sets": sets})
    ablation = ablation.model_copy(update={"train": train})
    candidates = tuple(Candidate(m.variant.name, settings.mixture, f"{m.folder}/tokens") for m in made)
    lines = tuple(m.line(made[0]) for m in made)
    trials = Trials(candidates, ablation.configs, by_texts=True, notes=lines)
    _, ranking = train_and_rank(ablation, trials, out, display, carry)
    return ranking


def _made(variant: Variant, out: str, before: Sequence[Made], options: Options, display: Display) -> Made:
    """Runs a variant, with what the others have done already."""
    folder = f"{out.rstrip('/')}/variants/{variant.name}"
    display.say(f"variant {variant.name}")
    borrowed = borrow(variant.recipe, folder, [(made.variant.recipe, made.folder) for made in before]) if before else 0
    if borrowed:
        display.say(f"variant {variant.name}: {borrowed:,} pieces are those of variants before.")
    run(variant.recipe, folder, options, display)
    sources = TokenSet.open(f"{folder}/tokens").sources.values()
    tokens, documents = sum(s.tokens for s in sources), sum(s.documents_count for s in sources)
    return Made(variant, folder, borrowed, tokens, documents)


def held_out_texts(made: Sequence[Made], out: str, max_bytes: int) -> dict[str, EvaluationSet]:
    """Writes the texts that all variants are scored on: a JSONL file for each source of the control's tokens.

    They are held-out documents of the control that no variant trains on, whatever became of their text there.
    max_bytes: of a source, the documents with the lowest hashes of their ids; 0: all. Raises RecipeError for a
    control without any.
    """
    control = made[0]
    share = control.variant.recipe.tokens.holdout_share
    shards = frozen(control.variant.recipe, control.folder)
    last = plan_of(control.variant.recipe, shards, control.folder).segments[-1].segment.folder
    sources = list(TokenSet.open(f"{control.folder}/tokens").holdout)
    found: dict[str, EvaluationSet] = {}
    folder = Path(out) / TEXTS
    shutil.rmtree(folder, ignore_errors=True)
    for source in sources:
        parts = [parts_of(control.folder, last, "kept", shard, "parquet") for shard in shards if shard.source == source]
        rows = sorted(row for part in parts for row in _held_out(part, share))
        trained = _trained_on(made, source, pa.array([row.doc_id for row in rows], pa.string()))
        chosen = _within([row for row in rows if row.doc_id not in trained], max_bytes)
        if not chosen:
            continue
        texts = _texts(chosen)
        path = folder / f"{source}.jsonl"
        with publish(str(path)) as file:
            for row in chosen:
                file.write(orjson.dumps({"id": row.doc_id, "text": texts[row.part, row.doc_id]}) + b"\n")
        name = f"{CONTROL}.{source}"
        found[name] = EvaluationSet(files=(str(path.resolve()),), format="jsonl", fields=("text",))
    if not found:
        raise RecipeError(
            f"{control.folder}: no document is held out that every variant leaves alone, so there is nothing to score "
            "the variants on. Raise `tokens: {holdout_share}` in the recipe."
        )
    return found


class _Held(NamedTuple):
    """A held-out document."""

    rank: int  # hash of its id
    doc_id: str
    part: str  # the file that it is in
    bytes: int  # of its text


def _held_out(part: str, share: float) -> Iterator[_Held]:
    for batch in kept_batches(part, ["doc_id", "text"]):
        held = batch.filter(pa.array(is_held_out(batch["text"], share)))
        sizes = pc.binary_length(held["text"]).to_pylist()
        for doc_id, size in zip(held["doc_id"].to_pylist(), sizes, strict=True):
            yield _Held(xxhash.xxh3_64_intdigest(doc_id), doc_id, part, size)


def _texts(rows: Sequence[_Held]) -> dict[tuple[str, str], str]:
    """By part and id."""
    wanted: dict[str, list[str]] = {}
    for row in rows:
        wanted.setdefault(row.part, []).append(row.doc_id)
    found = {}
    for part, ids in wanted.items():
        for batch in kept_batches(part, ["doc_id", "text"]):
            some = batch.filter(pc.is_in(batch["doc_id"], value_set=pa.array(ids, pa.string())))
            for doc_id, text in zip(some["doc_id"].to_pylist(), some["text"].to_pylist(), strict=True):
                found[part, doc_id] = text
    return found


def _trained_on(made: Sequence[Made], source: str, ids: pa.Array) -> set[str]:
    """Those of the ids (n,) that are training documents of a variant."""
    trained: set[str] = set()
    for each in made:
        tokens = TokenSet.open(f"{each.folder}/tokens").sources.get(source)
        for _, _, index in () if tokens is None else tokens.indexes():
            trained.update(index.doc_id.filter(pc.is_in(index.doc_id, value_set=ids)).to_pylist())
    return trained


def _within(rows: Sequence[_Held], max_bytes: int) -> Sequence[_Held]:
    """The first rows that hold at most max_bytes of text; one at least; 0: all."""
    ends = np.cumsum([row.bytes for row in rows])
    return rows if not max_bytes else rows[: max(1, int(np.searchsorted(ends, max_bytes, side="right")))]
