"""Limits by language: by hand, in one batch, whatever the batch, and tables that cannot be used."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.documents import Batch
from gristmill.stages.fineweb import FineWeb
from gristmill.stages.gopher import GopherQuality, GopherRepetition
from gristmill.stages.kernels import measures
from gristmill.stages.kernels.words import word_groups
from gristmill.stages.language import Language
from gristmill.stages.language_limits import (
    BUNDLED,
    KEYS,
    NGRAM_SIZES,
    NGRAMS,
    UNSEGMENTED_LANGUAGES,
    LanguageLimits,
    differing,
    is_unsegmented,
    load_table,
)
from gristmill.stages.settings_file import SettingsError

STAGES = {"language": Language, "gopher_quality": GopherQuality, "gopher_repetition": GopherRepetition}
STAGES |= {"fineweb": FineWeb}

FRENCH = """\
dup_line_frac: 0.264
dup_n_grams:
- - 5
  - 0.15
- - 6
  - 0.141
language_score: 0.824
line_punct_thr: 0.1
max_avg_word_length: 11
max_non_alpha_words_ratio: 0.812
min_avg_word_length: 2
new_line_ratio: 0.185
stopwords:
- de
- "\\xE0"
top_n_grams:
- - 2
  - 0.161
"""  # in the form of FineWeb2's configurations


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    measures.forget()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three languages. English: two words, one of them `the`; German: three words; Chinese: four characters."""
    path = tmp_path_factory.mktemp("table") / "limits.yaml"
    path.write_text(
        "en: {words: english, min_doc_words: 2, min_stop_words: 1, stopwords: [the]}\n"
        "de: {min_doc_words: 3, min_stop_words: 1, stopwords: [der, und]}\n"
        "zh: {min_doc_words: 4, min_stop_words: null, max_avg_word_length: 1}\n",
        "utf-8",
    )
    return str(path)


def stage_of(table: str, **own: object) -> GopherQuality:
    return GopherQuality(by_language=table, words="unicode", min_words=5, min_mean_word_chars=1, **own)


def batch_of(rows: list[tuple[str, str | None, str]]) -> Batch:
    columns = [pa.array(values, pa.string()) for values in zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(columns or [pa.array([], pa.string())] * 3, names=["doc_id", "language", "text"])


def verdicts(stage: object, batch: Batch) -> dict[str, tuple[object, ...]]:
    """doc_id -> measures, and reasons; None for a document that was kept."""
    result = stage(batch)  # type: ignore[operator]
    out = {}
    for part in (result.kept, result.dropped):
        for row in part.to_pylist():
            values = tuple(value for name, value in row.items() if "." in name)
            out[row["doc_id"]] = (*values, row.get("reasons"))
    return out


ROWS = [
    ("0", "en", "the mill"),  # two words and a stop word
    ("1", "de", "das und"),  # two words where three are asked for
    ("2", "en", "a mill"),  # no stop word of English
    ("3", "zh", "水车磨面"),  # four characters, each a word
    ("4", "de", "der Bach rauscht"),
    ("5", "zh", "水车磨"),
    ("6", "fr", "de la farine"),  # no entry: five words and two stop words of the stage
    ("7", None, "the mill and the stream be"),
    ("8", "de", "the mill and stream"),  # English stop words do not count as German
    ("9", "zh", "水车磨 mill"),  # 7 characters in 4 words
]
REASONS = {
    "0": None,
    "1": ["too_few_words"],
    "2": ["too_few_stop_words"],
    "3": None,
    "4": None,
    "5": ["too_few_words"],
    "6": ["too_few_words", "too_few_stop_words"],
    "7": None,
    "8": ["too_few_stop_words"],
    "9": ["words_too_long"],
}


def test_limits_words_and_stop_words_of_each_language_in_one_batch(table: str) -> None:
    result = stage_of(table)(batch_of(ROWS))
    assert {k: v[-1] for k, v in verdicts(stage_of(table), batch_of(ROWS)).items()} == REASONS
    assert result.kept["doc_id"].to_pylist() == ["0", "3", "4", "7"]
    assert result.dropped["doc_id"].to_pylist() == ["1", "2", "5", "6", "8", "9"]
    counters = {k: v for k, v in result.counters.items() if k.startswith("without_table")}
    assert counters == {"without_table.fr": 1, "without_table.unknown": 1}
    assert result.counters["rule.too_few_words"] == 3


@given(st.lists(st.sampled_from(ROWS), max_size=12), st.randoms(use_true_random=False), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_document_ends_the_same_in_every_batch_and_order(table, rows, random, cut):
    rows = [(f"{i}-{row[0]}", *row[1:]) for i, row in enumerate(rows)]
    whole = verdicts(stage_of(table), batch_of(rows))
    random.shuffle(rows)
    parts = [verdicts(stage_of(table), batch_of(rows[i : i + cut])) for i in range(0, len(rows), cut)]
    assert whole == {name: verdict for part in parts for name, verdict in part.items()}
    assert {name: v[-1] for name, v in whole.items()} == {row[0]: REASONS[row[0].split("-")[1]] for row in rows}


@pytest.mark.parametrize("kind", [GopherQuality, GopherRepetition, FineWeb])
def test_measures_do_not_depend_on_limits(table, kind):
    """With one splitter and the same stop words everywhere, measures are those of the stage without a table."""
    batch = batch_of([(str(i), language, text * 3) for i, (_, language, text) in enumerate(ROWS)])
    plain = kind(words="unicode").measure(batch)
    path = Path(table).with_name("limits_only.yaml")
    path.write_text("en: {min_doc_words: 1, dup_line_frac: 0.1}\nde: {line_punct_thr: 0.5, words: unicode}\n", "utf-8")
    found = kind(words="unicode", by_language=str(path))(batch)
    for name, values in plain.items():
        by_id = dict(zip(batch["doc_id"].to_pylist(), values, strict=True))
        for part in (found.kept, found.dropped):
            assert part[name].to_pylist() == [by_id[i] for i in part["doc_id"].to_pylist()]


def test_nothing_is_measured_of_an_empty_batch(table):
    result = stage_of(table)(batch_of([]))
    assert (result.kept.num_rows, result.dropped.num_rows) == (0, 0)
    assert "gopher_quality.words" in result.kept.schema.names


def test_every_limit_of_the_stages_has_a_key_and_the_key_sets_it():
    """A value that no default has, through the table, into the setting: n-grams too."""
    for name, kind in STAGES.items():
        numbers = {n for n, v in kind() if isinstance(v, int | float) and not isinstance(v, bool) and n[:4] in LIMIT}
        keys = dict(KEYS[name])
        values: dict[str, object] = {key: 0.25 if "word" not in key else 3 for key in keys}
        values |= {"words": "unicode", "stopwords": ("x",)}
        values = {key: values[key] for key in keys}
        if name == "gopher_repetition":
            values |= {key: tuple((n, 0.25) for n in sizes) for key, sizes in NGRAM_SIZES.items()}
        given_ = LanguageLimits(**values).of_stage(name)
        assert numbers <= set(given_)
        assert set(given_) <= set(kind.model_fields)
        for key, setting in keys.items():
            assert given_[setting] == values[key]
    assert GopherRepetition().model_copy(update=given_of("top_n_grams: [[3, 0.5]]")).max_top_3_gram_chars == 0.5
    assert set(NGRAMS) == set(NGRAM_SIZES)


LIMIT = ("min_", "max_")


def given_of(line: str) -> dict[str, object]:
    key, value = line.split(": ")
    return LanguageLimits(**{key: eval(value)}).of_stage("gopher_repetition")


def test_a_folder_of_configurations_as_fineweb2_has_them(tmp_path):
    (tmp_path / "fra_Latn.yml").write_text(FRENCH, "utf-8")
    (tmp_path / "jpn_Jpan.yml").write_text("min_avg_word_length: 1\n", "utf-8")
    quality = GopherQuality(by_language=str(tmp_path))
    french = quality.for_language("fra_Latn")
    assert (french.min_mean_word_chars, french.max_mean_word_chars) == (2, 11)
    assert (french.min_alphabetic_words, french.stop_words, french.words) == (0.812, ("de", "à"), "english")
    assert french.min_words == GopherQuality().min_words
    assert quality.for_language("jpn_Jpan").words == "unicode"
    repetition = GopherRepetition(by_language=str(tmp_path)).for_language("fra_Latn")
    assert (repetition.max_duplicate_lines, repetition.max_duplicate_paragraphs) == (0.264, 0.3)
    assert (repetition.max_top_2_gram_chars, repetition.max_duplicate_6_gram_chars) == (0.161, 0.141)
    fineweb = FineWeb(by_language=str(tmp_path)).for_language("fra_Latn")
    assert (fineweb.min_terminal_lines, fineweb.max_newlines) == (0.1, 0.185)
    language = Language(by_language=str(tmp_path), min_score_of={"x": 0.1})
    assert [language.limit_of(name) for name in ("fra_Latn", "jpn_Jpan", "x")] == [0.824, 0.65, 0.1]


def test_the_language_stage_takes_scores_from_the_table(tmp_path):
    path = tmp_path / "scores.yaml"
    path.write_text("en: {language_score: 0}\nde: {language_score: 1}\n", "utf-8")
    german = "Der Müller mahlt das Korn in der Mühle am Bach, und der Bach treibt das Rad."
    english = "The miller grinds the grain in the mill on the stream."
    french = "Le meunier moud le grain dans le moulin au bord du ruisseau."
    batch = pa.RecordBatch.from_pydict({"doc_id": ["0", "1", "2"], "text": [german, english, french]})
    stage = Language(by_language=str(path), min_score=0.99)
    found = verdicts(stage, batch)
    assert [found[i][-1] for i in "01"] == [["too_low_language_score"], None]
    result = stage(batch)
    assert {k: v for k, v in result.counters.items() if k.startswith("without_table.")} == {"without_table.fr": 1}
    own = Language(by_language=str(path), min_score_of={"de": 0.0, "en": 1.0})
    assert [verdicts(own, batch)[i][-1] for i in "01"] == [None, ["too_low_language_score"]]


@pytest.mark.parametrize("language", ["zh", "ja", "th", "km", "lo", "my", "cmn_Hani", "tha_Thai", "mya_Mymr"])
def test_scripts_without_spaces_are_split_into_characters(language, tmp_path):
    assert is_unsegmented(language)
    assert not is_unsegmented("vi")
    path = tmp_path / "t.yaml"
    path.write_text(f"{language}: {{min_doc_words: 1}}\n", "utf-8")
    assert GopherQuality(by_language=str(path)).for_language(language).words == "unicode"
    path.write_text(f"\n{language}:\n  words: english\n", "utf-8")
    with pytest.raises(SettingsError, match=rf"t\.yaml:3: {language} is written without spaces"):
        load_table(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("汉字abc假名", ["汉", "字", "abc", "假", "名"]),
        ("カタカナと", ["カ", "タ", "カ", "ナ", "と"]),
        ("ที่นี่", ["ที่", "นี่"]),  # a consonant with its vowel and tone marks
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
        ("ភាសា", ["ភា", "សា"]),
        ("ဘာသာ", ["ဘာ", "သာ"]),
    ],
)
def test_the_rule_for_scripts_without_spaces_is_as_documented(text, words):
    """`kernels/words.py`: a character with its marks is one word. Lao's vowel is a letter, Khmer's a mark."""
    data = text.encode()
    (group,) = word_groups(np.array([0, len(data)]), np.frombuffer(data, np.uint8), "unicode")
    assert [data[s:e].decode() for s, e in zip(group.starts, group.ends, strict=True)] == words


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "en: {}\nde:\n  langage_score: 0.5\n",
            r"t\.yaml:3: unknown key `de\.langage_score`\. Did you mean `language_s",
        ),
        ("en:\n  min_doc_words: many\n", r"t\.yaml:2: `en\.min_doc_words`"),
        ("en:\n  min_doc_words: -1\n", r"t\.yaml:2: `en\.min_doc_words`"),
        ("en:\n  top_n_grams: [[5, 0.1]]\n", r"t\.yaml:2: `en\.top_n_grams`: pairs of n and limit.*2 to 4.*here is 5"),
        ("en:\n  dup_n_grams: [[5, 0.1], [5, 0.2]]\n", r"t\.yaml:2: .*5 is given twice"),
        ("en:\n  stopwords: []\n", r"t\.yaml:2: `en\.stopwords`"),
        ("\nen: 3\n", r"t\.yaml:2: `en` is a language with its limits"),
        ("en: {x: 1}\nde: {y: 1}\n", r"(?s)t\.yaml:1: unknown key `en\.x`.*t\.yaml:2: unknown key `de\.y`"),
        ("{}\n", r"t\.yaml: a table of limits by language has an entry"),
    ],
)
def test_a_table_that_cannot_be_used_is_told_by_line(text, says, tmp_path):
    (tmp_path / "t.yaml").write_text(text, "utf-8")
    with pytest.raises(SettingsError, match=says):
        load_table(str(tmp_path / "t.yaml"))


def test_a_name_that_is_no_table(tmp_path):
    with pytest.raises(SettingsError, match=r"no table of limits by language `word`.*Did you mean `words`"):
        load_table("word")
    with pytest.raises(SettingsError, match="no such file"):
        load_table(str(tmp_path / "none.yaml"))


def test_a_table_is_of_datatroves_measures(table):
    with pytest.raises(ValueError, match="not on those of the variant dolma"):
        GopherRepetition(by_language=table, variant="dolma")


def test_a_base_gives_the_languages_that_a_table_lacks(tmp_path):
    (tmp_path / "base.yaml").write_text("en: {min_doc_words: 7}\nde: {min_doc_words: 8}\n", "utf-8")
    (tmp_path / "t.yaml").write_text("base: base.yaml\nde: {min_doc_words: 9}\n", "utf-8")
    stage = GopherQuality(by_language=str(tmp_path / "t.yaml"))
    assert [stage.for_language(name).min_words for name in ("en", "de", "fr", None)] == [7, 9, 50, 50]


def test_the_table_travels_with_the_stage_and_a_changed_file_is_another_identity(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("en: {min_doc_words: 7}\n", "utf-8")
    stage = GopherQuality(by_language=str(path))
    path.write_text("# the same\nen:\n  min_doc_words: 7\n", "utf-8")
    same = GopherQuality(by_language=str(path))
    path.write_text("en: {min_doc_words: 70}\n", "utf-8")
    other = GopherQuality(by_language=str(path))
    assert stage.digests() == same.digests() != other.digests()
    path.unlink()
    sent = pickle.loads(pickle.dumps(stage))
    assert sent.for_language("en").min_words == 7
    assert GopherQuality().digests() == []


def test_which_rules_differ_by_language(table):
    assert differing(stage_of(table)) == {
        "too_few_words": ["en", "de", "zh"],
        "words_too_long": ["zh"],
        "too_few_stop_words": ["en", "de", "zh"],
    }
    assert differing(GopherQuality()) == {}


@pytest.mark.parametrize("name", [path.stem for path in BUNDLED.glob("*.yaml")])
def test_bundled_tables_are_settings_of_the_stages(name):
    for kind in STAGES.values():
        stage = kind(by_language=name)
        for language in stage.languages:
            own = stage.for_language(language)
            assert kind(**own.model_dump()) == own


def test_the_bundled_table_says_what_it_rests_on():
    found = load_table("gristmill").languages
    assert len(found) >= 12
    assert found["en"].words == "english"
    assert {entry.words for name, entry in found.items() if name != "en"} == {"unicode"}
    assert all(len(entry.stopwords) >= 8 for entry in found.values())
    text = (BUNDLED / "gristmill.yaml").read_text("utf-8")
    assert "documentation, not the web" in text
    assert text.count("# documents: ") == text.count("# text that reached gopher_quality: ") == len(found)


def test_the_table_of_words_names_every_language_without_spaces():
    assert {name for name, entry in load_table("words").languages.items() if entry.words == "unicode"} == (
        UNSEGMENTED_LANGUAGES
    )
