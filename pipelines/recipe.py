"""READ FIRST: the recipe, a YAML file that says what a run does.

    name: my_corpus
    sources:
      web: {files: "crawl/*.warc.gz"}
      books: {files: "books/*.parquet"}
      crawl: {download: {crawl: CC-MAIN-2024-10, kind: wet, files: 10}}
    models:
      prose: {kenlm: {text: {sources: [books], max_bytes: 20_000_000}, order: 3}}
    stages:
      - extract: {min_chars: 100}
        only: [web]
      - language: {keep: [en]}
      - gopher_quality
      - perplexity: {model: prose, max_perplexity: 2000}
      - minhash: {ngram: 5}
    tokenizer: {vocab_size: 8192}
    tokens: {holdout_share: 0.02}

`load(path)` gives the recipe with every fault of the file named by line; `base: other.yaml` takes over the keys of
another recipe that are not given here. `segments(recipe)` cuts the list of stages
where a shard has to wait for others; `check(recipe, formats)` proves, before any work, that each stage finds the
columns it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pyarrow as pa
from pydantic import ConfigDict, Field, model_validator

from gristmill.stages.c4 import C4
from gristmill.stages.classifier import Classifier
from gristmill.stages.datatrove import Datatrove
from gristmill.stages.decontaminate import Decontaminate
from gristmill.stages.documents import BASE_FIELDS, Settings
from gristmill.stages.download_listing import Download
from gristmill.stages.evaluation_sets import EvaluationSet, short_form
from gristmill.stages.exact import Exact
from gristmill.stages.extract import Extract
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.hf_folder import HF
from gristmill.stages.language import Language
from gristmill.stages.lines_across import LinesAcross
from gristmill.stages.minhash import MinHash
from gristmill.stages.models import FastText, KenLM
from gristmill.stages.normalize import Normalize
from gristmill.stages.paragraphs import Paragraphs
from gristmill.stages.perplexity import Perplexity
from gristmill.stages.pii import Pii
from gristmill.stages.readers import FORMATS, MAPPED
from gristmill.stages.readers_common import READ_FIELDS
from gristmill.stages.refinedweb_lines import RefinedWebLines
from gristmill.stages.settings_file import SettingsError, SettingsFile, build, nearest, read
from gristmill.stages.shards import join
from gristmill.stages.substrings import Substrings
from gristmill.stages.url import Url
from gristmill.tokenize.encode import Backend
from gristmill.tokenize.shards import Shuffle
from gristmill.tokenize.train import TokenizerSettings

STAGES: dict[str, Any] = {
    "extract": Extract,
    "normalize": Normalize,
    "language": Language,
    "url": Url,
    "gopher_repetition": GopherRepetition,
    "gopher_quality": GopherQuality,
    "c4": C4,
    "fineweb": FineWeb,
    "refinedweb_lines": RefinedWebLines,
    "datatrove": Datatrove,
    "perplexity": Perplexity,
    "classifier": Classifier,
    "exact": Exact,
    "minhash": MinHash,
    "paragraphs": Paragraphs,
    "lines_across": LinesAcross,
    "substrings": Substrings,
    "pii": Pii,
    "decontaminate": Decontaminate,
}
MODELS: dict[str, Any] = {"kenlm": KenLM, "fasttext": FastText}
HTML_COLUMNS = ("html",)  # and those whose name begins so: they end with `extract`

AnyStage: TypeAlias = Any  # a Stage or a GlobalStage; `is_global` tells which, of an instance


class RecipeError(SettingsError):
    """A recipe asks for something that cannot be done."""


class Source(Settings):
    """Where documents come from."""

    files: str | list[str] | None = None  # fsspec paths or globs
    download: Download | None = None  # what to fetch instead; exactly one of the two
    # "warc", "wet", "jsonl", "parquet", "arrow", "csv", "tsv", "text", or "hf" for folders of Hugging Face datasets;
    # by the file name where not given
    format: str | None = None
    dump: str | None = None  # name of the crawl, for dedupe within a dump
    columns: dict[str, str] = Field(default_factory=dict)  # our column -> the input's, as {text: content}
    config: str | None = None  # of a "hf" folder; its default one where not given
    split: str | None = None  # of a "hf" folder; "train" where not given

    @model_validator(mode="after")
    def _known(self) -> Source:
        for name in self.columns:
            if name not in MAPPED:
                raise ValueError(f"`columns` has no `{name}`.{nearest(name, MAPPED)} Known: {', '.join(MAPPED)}.")
        if self.format is not None and self.format not in (*FORMATS, HF):
            raise ValueError(f"no format `{self.format}`.{nearest(self.format, (*FORMATS, HF))}")
        if self.format != HF and (self.config or self.split):
            raise ValueError(f"`config` and `split` are for `format: {HF}`.")
        return self

    @model_validator(mode="after")
    def _one_origin(self) -> Source:
        if (self.files is None) == (self.download is None):
            raise ValueError("a source has `files`, or a `download`; exactly one of them.")
        return self


class StageUse(Settings):
    """A stage as a recipe uses it."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="forbid")

    key: str
    stage: Any
    only: tuple[str, ...] | None = None  # sources that pass through it; all where not given

    @property
    def heading(self) -> str:
        """What ledgers and the report call this use."""
        return str(getattr(self.stage, "heading", self.key))

    def applies(self, source: str) -> bool:
        return self.only is None or source in self.only

    def dump(self) -> dict[str, Any]:
        out: dict[str, Any] = {self.key: self.stage.model_dump(mode="json")}
        return out if self.only is None else out | {"only": list(self.only)}


class TokenSettings(Settings):
    """How kept documents become token shards."""

    holdout_share: float = Field(default=0.01, ge=0, lt=1)  # of documents, by a hash of their text
    encoder: Backend = "auto"  # "auto" takes the fast one where its ids equal the reference's
    max_tokens: int | None = Field(default=None, ge=2)  # of a token shard; a longer document is an error
    # By a hash of seed, doc_id and text: documents, over all shards of their source; within_shard, in each shard of the
    # input.
    shuffle: Shuffle = "none"
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    near_holdout_similarity: float = Field(default=0.7, gt=0, le=1)  # Jaccard of 5-word shingles; what counts as near
    drop_near_holdout: bool = False  # training documents that are near a held-out one; else they are reported only


class AblationSettings(Settings):
    """Which mixtures a run trains and compares in the end."""

    file: str  # an ablation file; relative to the recipe's folder


class ModelUse(Settings):
    """A model that the recipe trains."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="forbid")

    kind: str
    settings: Any  # KenLM or FastText


class Recipe(Settings):
    """Everything that a run does, every default written out."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    out: str | None = None  # run folder; out/<name> where not given
    sources: dict[str, Source] = Field(min_length=1)
    models: dict[str, Any] = Field(default_factory=dict)
    stages: tuple[Any, ...] = ()
    tokenizer: TokenizerSettings | None = None
    tokens: TokenSettings = TokenSettings()
    ablation: AblationSettings | None = None
    max_chars: int = 10_000_000  # per document; longer ones are dropped as too_large when read
    sample_per_reason: int = 20  # dropped documents per shard and reason whose full text is kept
    # Share of documents that go through every stage, dropped or not, to count what each rule removes by itself.
    removals_share: float = Field(default=1.0, ge=0, le=1)
    # Bigger files are split: Parquet by row groups; JSONL at any line, by zstd frame or by block of bgzip. Text files
    # are bundled up to it.
    shard_bytes: int = Field(default=512_000_000, gt=0)
    # A file that cannot be read at all: the run stops and names it, or it is one failed document of the ledger.
    unreadable: Literal["stop", "count"] = "stop"

    @model_validator(mode="after")
    def _names(self) -> Recipe:
        for use in self.uses:
            for source in use.only or ():
                if source not in self.sources:
                    raise ValueError(f"stage `{use.key}`: no source `{source}`.{nearest(source, self.sources)}")
        return self

    @property
    def uses(self) -> tuple[StageUse, ...]:
        return self.stages

    def dump(self) -> dict[str, Any]:
        """The resolved recipe as plain data, in the form that `load` reads."""
        out = self.model_dump(mode="json", exclude={"models", "stages"})
        out["models"] = {k: {m.kind: m.settings.model_dump(mode="json")} for k, m in self.models.items()}
        out["stages"] = [use.dump() for use in self.uses]
        return out


def load(path: str | Path) -> Recipe:
    """Reads a recipe. Raises SettingsError with file, line and the nearest valid name for every fault."""
    return of_file(read(path))


def of_file(file: SettingsFile) -> Recipe:
    """The recipe that a file holds. Raises SettingsError."""
    data = dict(file.values)
    stages, models = data.get("stages") or [], data.get("models") or {}
    if not isinstance(stages, list):
        raise RecipeError(f"{file.at(['stages'])}: `stages` is a list of stages, in order.")
    if not isinstance(models, dict):
        raise RecipeError(f"{file.at(['models'])}: `models` is a mapping from a name to a model.")
    data["stages"] = tuple(_stage(entry, i, file) for i, entry in enumerate(stages))
    _check_columns(data["stages"], file)
    data["models"] = {name: _model(name, entry, file) for name, entry in models.items()}
    return _with_ablation_sets(build(Recipe, data, file), file)


def ablation_sets(path: str | Path) -> dict[str, EvaluationSet]:
    """The evaluation sets that an ablation file names, by name. Raises SettingsError.

    Only this key is read: the rest is the trainer's, and needs its packages. Relative files count from the ablation
    file's folder.
    """
    file = read(path)
    sets = file.values.get("evaluation_sets") or {}
    if not isinstance(sets, Mapping):
        raise RecipeError(f"{file.at(['evaluation_sets'])}: `evaluation_sets` is a mapping from a name to its files.")
    out = {}
    for name, entry in sets.items():
        found = build(EvaluationSet, short_form(entry), file, ["evaluation_sets", name])
        files = tuple(f if "://" in f else str(Path(path).parent / f) for f in found.files)
        out[name] = found.model_copy(update={"files": files})
    return out


def _with_ablation_sets(recipe: Recipe, file: SettingsFile) -> Recipe:
    """The evaluation sets that the recipe's ablation file names come to those of each `decontaminate`."""
    uses = []
    for i, use in enumerate(recipe.uses):
        stage = use.stage
        if isinstance(stage, Decontaminate):
            if stage.include_ablation and recipe.ablation is not None:
                more = ablation_sets(Path(file.path).parent / recipe.ablation.file)
                stage = stage.model_copy(update={"sets": {**more, **stage.sets}})
            at = file.at(["stages", i, "decontaminate"])
            if not stage.sets:
                raise RecipeError(f"{at}: there is no evaluation set. Name some: `sets: {{name: file.jsonl}}`.")
            try:
                stage.files()
            except SettingsError as error:
                raise RecipeError(f"{at}: {error}") from None
        uses.append(use.model_copy(update={"stage": stage}))
    return recipe.model_copy(update={"stages": tuple(uses)})


def _stage(entry: Any, position: int, file: SettingsFile) -> StageUse:
    location = ["stages", position]
    at = file.at(location)
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping):
        raise RecipeError(f"{at}: a stage is written `- key: {{settings}}`, for example `- gopher_quality: {{}}`.")
    keys = [key for key in entry if key != "only"]
    unknown = [key for key in keys if key not in STAGES]
    if unknown:
        raise RecipeError(f"{at}: no stage `{unknown[0]}`.{nearest(unknown[0], STAGES)}")
    if len(keys) != 1:
        raise RecipeError(f"{at}: one stage an entry; this one has {len(keys)}: {', '.join(keys) or 'none'}.")
    key, only = keys[0], entry.get("only")
    stage: Any = build(STAGES[key], entry[key] or {}, file, [*location, key])
    use = {"key": key, "stage": stage, "only": [only] if isinstance(only, str) else only}
    return build(StageUse, use, file, location)


def _check_columns(uses: Sequence[StageUse], file: SettingsFile) -> None:
    """Raises RecipeError where a second use of a stage would write the columns of the first, or of another stage."""
    named = [(i, use, column) for i, use in enumerate(uses) if (column := getattr(use.stage, "column", None))]
    for n, (i, use, column) in enumerate(named):
        at = file.at(["stages", i, use.key, "column"])
        if column != use.key and column in STAGES:
            raise RecipeError(f"{at}: `column: {column}` is the name of a stage, whose columns begin so. Take another.")
        for j, other, its in named[:n]:
            shared = use.only is None or other.only is None or set(use.only) & set(other.only)
            if its == column and shared:
                raise RecipeError(
                    f"{at}: `{use.key}` writes the columns `{column}.*`, and so does `{other.key}` of line "
                    f"{file.at(['stages', j]).rpartition(':')[2]}. Give this use a `column` of its own, "
                    f"for example `column: {column}_2`."
                )


def _model(name: str, entry: Any, file: SettingsFile) -> ModelUse:
    location = ["models", name]
    at = file.at(location)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise RecipeError(f"{at}: a model is written `{name}: {{kenlm: {{...}}}}` or `{name}: {{fasttext: {{...}}}}`.")
    kind = next(iter(entry))
    if kind not in MODELS:
        raise RecipeError(f"{at}: no kind of model `{kind}`.{nearest(kind, MODELS)}")
    return ModelUse(kind=kind, settings=build(MODELS[kind], entry[kind] or {}, file, [*location, kind]))


def is_global(stage: AnyStage) -> bool:
    """True for a stage that compares documents with each other; some stages do with some settings only."""
    return bool(getattr(stage, "is_global", hasattr(stage, "cluster")))


def stage_in(recipe: Recipe, use: StageUse, out: str) -> AnyStage:
    """The stage, its model as a path in a run folder."""
    name = model_of(recipe, use)
    return use.stage if name is None else use.stage.model_copy(update={"model": join(out, "models", name)})


def model_of(recipe: Recipe, use: StageUse) -> str | None:
    """The recipe's model that a stage uses, by name; None where it uses none or names a path."""
    name = getattr(use.stage, "model", None)
    return name if isinstance(name, str) and name in recipe.models else None


@dataclass(frozen=True)
class Segment:
    """Stages that a shard passes in one go."""

    index: int  # from 1
    uses: tuple[StageUse, ...]
    models: tuple[str, ...]  # trained before it, on what the segment before kept

    @property
    def folder(self) -> str:
        return f"{self.index:02d}-{self.uses[0].key if self.uses else 'read'}"

    @property
    def gate(self) -> StageUse | None:
        """The global stage that it begins with, if any."""
        return self.uses[0] if self.uses and is_global(self.uses[0].stage) else None


def _waits(recipe: Recipe, use: StageUse) -> bool:
    """True for a stage whose model trains on documents of the run."""
    name = model_of(recipe, use)
    return name is not None and any(s.files is None for s in recipe.models[name].settings.roles().values())


def segments(recipe: Recipe) -> tuple[Segment, ...]:
    """Cuts the stages where shards wait for each other: before a global stage, and before a row of stages whose models
    train on documents of the run. The first segment reads the input; it has no stage when the first one waits for such
    a model. A model behind a global stage trains on what that one kept."""
    groups: list[list[StageUse]] = [[]]
    for use in recipe.uses:
        current = groups[-1]
        joins = bool(current) and all(_waits(recipe, earlier) and not is_global(earlier.stage) for earlier in current)
        if is_global(use.stage) or (_waits(recipe, use) and not joins):
            groups.append([])
        groups[-1].append(use)
    if not groups[0] and len(groups) > 1 and not any(_waits(recipe, use) for use in groups[1]):
        del groups[0]  # a global stage reads the input itself
    out = []
    for index, group in enumerate(groups, 1):
        names = dict.fromkeys(name for use in group if (name := model_of(recipe, use)) is not None)
        out.append(Segment(index, tuple(group), tuple(names)))
    return tuple(out)


def check(recipe: Recipe, formats: Mapping[str, Sequence[str]]) -> None:
    """Raises RecipeError when a stage would not find a column it needs, or a model is never trained.

    formats: source -> the columns that its files provide ("html" or "text").
    """
    for source, provided in formats.items():
        columns = {*BASE_FIELDS, *provided}
        for use in recipe.uses:
            if not use.applies(source):
                continue
            missing = [name for name in use.stage.needs if name not in columns]
            if missing:
                givers = sorted(k for k, s in STAGES.items() if missing[0] in s.adds)
                hint = f" `{givers[0]}` gives it: put it before." if givers else ""
                if missing[0] in HTML_COLUMNS:
                    hint = f" Files of this source give {', '.join(provided)}; restrict the stage with `only: [...]`."
                raise RecipeError(
                    f"Stage `{use.key}` needs the column `{missing[0]}`, which documents of source `{source}` do not "
                    f"have at that point.{hint}"
                )
            columns |= set(use.stage.adds)
            if use.key == "extract":
                columns -= {name for name in columns if name.startswith("html")}
        if "text" not in columns:
            raise RecipeError(f"Documents of source `{source}` have no text at the end: add the stage `extract`.")


def kept_schema(recipe: Recipe, segment: Segment) -> pa.Schema:
    """Columns of the documents that a segment keeps: the same for every source, null where a stage did not apply."""
    fields = dict(READ_FIELDS)
    fields["text"] = pa.string()
    for earlier in segments(recipe)[: segment.index]:
        for use in earlier.uses:
            fields |= use.stage.adds
    return pa.schema([(name, kind) for name, kind in fields.items()])
