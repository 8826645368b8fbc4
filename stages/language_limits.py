"""Limits by language: a table that the stages `language`, `gopher_quality`, `gopher_repetition` and `fineweb` read.

    stages:
      - language: {by_language: limits.yaml}
      - gopher_quality: {by_language: limits.yaml}

The table is a YAML file with an entry for each language, named as the column `language` names it. The keys are those
of FineWeb2's configurations and of datatrove's filters; beside each, the setting of ours that it stands for:

    fr:
      words: unicode                  # words, of the three stages that count words
      language_score: 0.824           # language          min_score
      min_doc_words: 50               # gopher_quality    min_words
      max_doc_words: 100000           #                   max_words
      min_avg_word_length: 2          #                   min_mean_word_chars
      max_avg_word_length: 11         #                   max_mean_word_chars
      max_hashes: 0.1                 #                   max_hashes
      max_ellipses: 0.1               #                   max_ellipses
      max_bullet_lines_ratio: 0.9     #                   max_bullet_lines
      max_ellipsis_lines_ratio: 0.3   #                   max_ellipsis_lines
      max_non_alpha_words_ratio: 0.812  #                 min_alphabetic_words: a lower limit, whatever the name says
      min_stop_words: 2               #                   min_stop_words
      stopwords: [de, la, le]         #                   stop_words
      dup_para_frac: 0.3              # gopher_repetition max_duplicate_paragraphs
      dup_para_char_frac: 0.2         #                   max_duplicate_paragraph_chars
      dup_line_frac: 0.264            #                   max_duplicate_lines
      dup_line_char_frac: 0.2         #                   max_duplicate_line_chars
      top_n_grams: [[2, 0.161]]       #                   max_top_2_gram_chars; 2 to 4
      dup_n_grams: [[5, 0.15]]        #                   max_duplicate_5_gram_chars; 5 to 10
      line_punct_thr: 0.1             # fineweb           min_terminal_lines
      short_line_thr: 0.67            #                   max_short_lines
      char_duplicates_ratio: 0.1      #                   max_duplicate_line_chars
      new_line_ratio: 0.185           #                   max_newlines

A key that is not there leaves the stage's own setting; `null` switches a rule off. Documents in a language without an
entry, or without a language, take the stage's own settings and are counted: `without_table.<language>`. Measures do not
depend on limits: only `words` and `stopwords` change what is measured.

`by_language` is the path of a file, of a folder with a file for each language (FineWeb2's `configs`), or the name of a
table of this package: `gristmill`. `base: other.yaml` in a file takes over the languages that it does not have.
The table is read when the stage is made and travels with it: workers do not look for the file.

A language whose script has no spaces between words (`UNSEGMENTED_LANGUAGES`, `UNSEGMENTED_SCRIPTS`) has
`words: unicode` unless its entry says otherwise; `english` is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, PrivateAttr, field_validator

from gristmill.stages.documents import Batch, Result, Rule, Settings, cut, judge, with_columns
from gristmill.stages.kernels.words import Splitter
from gristmill.stages.settings_file import SettingsError, SettingsFile, build, nearest, read

BUNDLED = Path(__file__).parent / "tables"
UNKNOWN = "unknown"  # the counter of documents without a language
# Written without spaces between words: as lid.176 names the languages; other labels end in the script, as `cmn_Hani`.
UNSEGMENTED_LANGUAGES = frozenset("ja km lo my th wuu yue zh".split())
UNSEGMENTED_SCRIPTS = frozenset("Hani Hans Hant Jpan Hira Kana Thai Laoo Khmr Mymr".split())

Share = Annotated[float, Field(ge=0)]
NGram = tuple[int, float | None]

QUALITY = {
    "min_doc_words": "min_words",
    "max_doc_words": "max_words",
    "min_avg_word_length": "min_mean_word_chars",
    "max_avg_word_length": "max_mean_word_chars",
    "max_hashes": "max_hashes",
    "max_ellipses": "max_ellipses",
    "max_bullet_lines_ratio": "max_bullet_lines",
    "max_ellipsis_lines_ratio": "max_ellipsis_lines",
    "max_non_alpha_words_ratio": "min_alphabetic_words",
    "min_stop_words": "min_stop_words",
    "stopwords": "stop_words",
    "words": "words",
}
REPETITION = {
    "dup_para_frac": "max_duplicate_paragraphs",
    "dup_para_char_frac": "max_duplicate_paragraph_chars",
    "dup_line_frac": "max_duplicate_lines",
    "dup_line_char_frac": "max_duplicate_line_chars",
    "words": "words",
}
FINEWEB = {
    "line_punct_thr": "min_terminal_lines",
    "short_line_thr": "max_short_lines",
    "char_duplicates_ratio": "max_duplicate_line_chars",
    "new_line_ratio": "max_newlines",
    "words": "words",
}
# stage -> key of the table -> setting of the stage
KEYS: dict[str, dict[str, str]] = {
    "language": {"language_score": "min_score"},
    "gopher_quality": QUALITY,
    "gopher_repetition": REPETITION,
    "fineweb": FINEWEB,
}
# key of the table -> name of the setting of gopher_repetition, by n
NGRAMS = {"top_n_grams": "max_top_{}_gram_chars", "dup_n_grams": "max_duplicate_{}_gram_chars"}
NGRAM_SIZES = {"top_n_grams": range(2, 5), "dup_n_grams": range(5, 11)}


class LanguageLimits(Settings):
    """One language's entry: see the module. What is not given is left to the stage."""

    words: Splitter = "unicode"
    language_score: float = Field(0.65, ge=0, le=1)
    min_doc_words: int | None = Field(None, ge=0)
    max_doc_words: int | None = Field(None, ge=0)
    min_avg_word_length: Share | None = None
    max_avg_word_length: Share | None = None
    max_hashes: Share | None = None
    max_ellipses: Share | None = None
    max_bullet_lines_ratio: Share | None = None
    max_ellipsis_lines_ratio: Share | None = None
    max_non_alpha_words_ratio: Share | None = None
    min_stop_words: int | None = Field(None, ge=0)
    stopwords: tuple[str, ...] = Field((), min_length=1)
    dup_para_frac: Share | None = None
    dup_para_char_frac: Share | None = None
    dup_line_frac: Share | None = None
    dup_line_char_frac: Share | None = None
    top_n_grams: tuple[NGram, ...] = ()
    dup_n_grams: tuple[NGram, ...] = ()
    line_punct_thr: Share | None = None
    short_line_thr: Share | None = None
    char_duplicates_ratio: Share | None = None
    new_line_ratio: Share | None = None

    @field_validator("top_n_grams", "dup_n_grams")
    @classmethod
    def _known_sizes(cls, value: tuple[NGram, ...], info: Any) -> tuple[NGram, ...]:
        sizes, given = NGRAM_SIZES[info.field_name], [n for n, _ in value]
        wrong = [n for n in given if n not in sizes]
        if wrong or len(set(given)) < len(given):
            raise ValueError(
                f"pairs of n and limit, each n from {sizes[0]} to {sizes[-1]} at most once; here "
                + (f"is {wrong[0]}" if wrong else f"{next(n for n in given if given.count(n) > 1)} is given twice")
            )
        return value

    def of_stage(self, stage: str) -> dict[str, Any]:
        """The settings of a stage that this entry gives: name -> value."""
        given = self.model_fields_set
        out = {setting: getattr(self, key) for key, setting in KEYS[stage].items() if key in given}
        if stage == "gopher_repetition":
            for key, name in NGRAMS.items():
                out |= {name.format(n): limit for n, limit in getattr(self, key)}
        return out


@dataclass(frozen=True)
class LanguageTable:
    """A table as it was read."""

    path: str
    languages: Mapping[str, LanguageLimits]
    digest: str  # of what it says; comments and order do not count


def load_table(name: str) -> LanguageTable:
    """The table of a file, a folder or a short name. Raises SettingsError: FILE:LINE for every fault."""
    path = _path_of(name)
    files = sorted(p for p in path.iterdir() if p.suffix in (".yaml", ".yml")) if path.is_dir() else [path]
    stamps = tuple((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in files if p.exists())
    return _load(str(path), path.is_dir(), stamps)


def _path_of(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_dir():
        return path
    names = [file.stem for file in BUNDLED.glob("*.yaml")]
    if name not in names:
        raise SettingsError(
            f"there is no table of limits by language `{name}` in this package, and no folder of that name."
            f"{nearest(name, names)} A file ends in .yaml."
        )
    return BUNDLED / f"{name}.yaml"


@lru_cache(16)
def _load(path: str, is_folder: bool, stamps: tuple[tuple[str, int, int], ...]) -> LanguageTable:
    """stamps: path, modification time and size of each file, so that a changed file is read again."""
    entries: dict[str, LanguageLimits] = {}
    faults: list[str] = []
    for language, values, file, place in _entries(path, is_folder, stamps):
        try:
            entries[language] = _entry(language, values, file, place)
        except SettingsError as error:
            faults.append(str(error))
    if faults:
        raise SettingsError("\n".join(faults))
    if not entries:
        raise SettingsError(f"{path}: a table of limits by language has an entry for each language; here is none.")
    plain = {name: entry.model_dump(mode="json", exclude_unset=True) for name, entry in entries.items()}
    digest = xxhash.xxh3_128_hexdigest(orjson.dumps(plain, option=orjson.OPT_SORT_KEYS))
    return LanguageTable(path, entries, digest)


def _entries(
    path: str, is_folder: bool, stamps: tuple[tuple[str, int, int], ...]
) -> list[tuple[str, Any, SettingsFile, list[str]]]:
    """Language, its values, and where they stand."""
    if is_folder:
        files = [read(name) for name, _, _ in stamps]
        return [(Path(file.path).stem, file.values, file, []) for file in files]
    file = read(path)
    return [(language, values, file, [language]) for language, values in file.values.items()]


def _entry(language: str, values: Any, file: SettingsFile, place: list[str]) -> LanguageLimits:
    if not isinstance(values, dict):
        raise SettingsError(
            f"{file.at(place)}: `{language}` is a language with its limits, for example "
            f"`{language}: {{language_score: 0.65}}`."
        )
    found = build(LanguageLimits, values, file, place)
    if not is_unsegmented(language):
        return found
    if found.words == "english":
        raise SettingsError(
            f"{file.at([*place, 'words'])}: {language} is written without spaces between words, so `words: english` "
            "finds none in it. Write `words: unicode`: each character is a word."
        )
    return found.model_copy(update={"words": "unicode"})


def is_unsegmented(language: str) -> bool:
    """True for a language that is written without spaces between words."""
    code, _, script = language.partition("_")
    return script in UNSEGMENTED_SCRIPTS if script else code in UNSEGMENTED_LANGUAGES


class _Needs:
    """Columns of an instance: `language` where limits are by language."""

    def __get__(self, stage: Any, owner: type) -> tuple[str, ...]:
        return ("text", "language") if stage is not None and stage.by_language is not None else ("text",)


class ByLanguage(Settings):
    """What the stages share whose limits can come from a table."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = cast(Any, _Needs())

    by_language: str | None = None  # a table of limits by language: `stages/language_limits.py`

    _table: LanguageTable | None = PrivateAttr(None)

    @field_validator("by_language")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            load_table(value)
        return value

    def model_post_init(self, context: Any, /) -> None:
        self._table = load_table(self.by_language) if self.by_language is not None else None

    @property
    def languages(self) -> Mapping[str, LanguageLimits]:
        """The entries of the table; none where there is no table."""
        return self._table.languages if self._table is not None else {}

    def digests(self) -> list[str]:
        """Identity of what the stage has read besides its settings."""
        return [self._table.digest] if self._table is not None else []

    def for_language(self, language: str | None) -> Self:
        """The stage with the settings that it has for documents in a language."""
        entry = self.languages.get(language) if language is not None else None
        own = entry.of_stage(self.name) if entry is not None else {}
        return self.model_copy(update=own) if own else self


def judge_each(stage: Any, batch: Batch) -> Result:
    """Measures a batch and applies the limits, those of each document's language where the stage has a table.

    stage: a `ByLanguage` with `measure(batch)` and `rules()`. Each document is measured and judged alone: the order of
    rows stays, and nothing depends on what else is in the batch.
    """
    if not stage.languages or not batch.num_rows:
        return judge(with_columns(batch, stage.measure(batch)), stage.rules())
    languages, of_row = _encoded(batch["language"])
    tuned = [stage.for_language(language) for language in languages]
    measured = _measure(tuned, of_row, batch.select(["text"]))
    fails = {rule.reason: np.zeros(batch.num_rows, bool) for rule in stage.rules()}
    for at, one in enumerate(tuned):
        rows = np.flatnonzero(of_row == at)
        for rule in one.rules():
            fails[rule.reason][rows] = rule.fails(measured[rule.column][rows])
    return cut(with_columns(batch, measured), fails, without_table(stage, languages, of_row))


def _encoded(column: pa.Array) -> tuple[list[str | None], np.ndarray]:
    """string (n,) -> (the values that occur, null among them, and for each row which it is (n,) int64)."""
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    return encoded.dictionary.to_pylist(), np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)


def _measure(tuned: list[Any], of_row: np.ndarray, text: Batch) -> dict[str, np.ndarray]:
    """The measures of each document, (n,) float64 by column; documents that are measured alike go together."""
    kinds = [(one.words, getattr(one, "stop_words", None)) for one in tuned]
    alike = list(dict.fromkeys(kinds))
    kind_of_row = np.array([alike.index(kind) for kind in kinds])[of_row]
    out: dict[str, np.ndarray] = {}
    for at, kind in enumerate(alike):
        one = tuned[kinds.index(kind)]
        rows = np.flatnonzero(kind_of_row == at)
        every = len(rows) == text.num_rows
        for name, values in one.measure(text if every else text.take(pa.array(rows))).items():
            out.setdefault(name, np.full(text.num_rows, np.nan))[rows] = values
    return out


def without_table(stage: ByLanguage, languages: list[str | None], of_row: np.ndarray) -> dict[str, int]:
    """Documents that take the stage's own limits, for they are in a language without an entry: counter -> documents."""
    if not stage.languages:
        return {}
    counts = np.bincount(of_row, minlength=len(languages))
    return {
        f"without_table.{language or UNKNOWN}": int(count)
        for language, count in zip(languages, counts, strict=True)
        if language not in stage.languages
    }


def differing(stage: Any) -> dict[str, list[str]]:
    """Reason -> languages whose limit is not the stage's own, in the order of the table."""
    own: dict[str, Rule] = {rule.reason: rule for rule in stage.rules()}
    out: dict[str, list[str]] = {}
    for language in getattr(stage, "languages", {}):
        for rule in stage.for_language(language).rules():
            if rule != own[rule.reason]:
                out.setdefault(rule.reason, []).append(language)
    return out
