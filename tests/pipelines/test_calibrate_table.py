"""Tables of limits by language: from a run to a table, from the table back to what it removes."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gristmill.pipelines import stop_words
from gristmill.pipelines.cli import main
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.plan import make_plan
from gristmill.pipelines.recipe import STAGES, load
from gristmill.pipelines.report.figures import page_data
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.stop_words import count_words, most_frequent
from gristmill.stages.language_limits import load_table
from gristmill.stages.shards import Shard

SENTENCES = {
    "en": "The miller grinds the grain in the old mill. The water of the stream turns the big wheel all day! "
    "People come with their carts and wait in the yard. Nobody knows how old the mill is. "
    "In winter the stream is frozen and the wheel stands still. The flour is white and fine.",
    "de": "Der Müller mahlt das Korn in der alten Mühle. Das Wasser des Baches dreht den ganzen Tag das große Rad! "
    "Die Leute kommen mit ihren Wagen und warten im Hof. Niemand weiß, wie alt die Mühle ist. "
    "Im Winter ist der Bach gefroren und das Rad steht still. Das Mehl ist weiß und fein.",
    "zh": "磨坊主在古老的磨坊里磨粮食。 溪水整天转动着那个大轮子！ 人们赶着马车来，在院子里等候。 "
    "没有人知道这座磨坊有多老。 冬天小溪结冰，轮子停下来。 面粉又白又细。",
}
DOCUMENTS = 70  # of a language
MEASURE = Path(__file__).parents[2] / "pipelines" / "recipes" / "measure.yaml"


def documents(language: str) -> list[str]:
    """Sentences in chance order and number, some in lines, some with marks that rules look for."""
    rng = random.Random(language)
    sentences = SENTENCES[language].split(". " if language != "zh" else " ")
    out = []
    for _ in range(DOCUMENTS):
        lines = [rng.choice(sentences) + rng.choice([".", ".", "...", "", " #1"]) for _ in range(rng.randint(6, 40))]
        out.append("".join(line + rng.choice([" ", "\n", "\n\n", "\n- "]) for line in lines))
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts in three languages, the recipe that measures them, and its run."""
    folder = tmp_path_factory.mktemp("by-language")
    for part, language in enumerate(SENTENCES):
        rows = [{"id": f"{language}-{i}", "text": text} for i, text in enumerate(documents(language))]
        path = folder / "text" / f"part-{part}.jsonl.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    text = MEASURE.read_text("utf-8")
    text = text.replace("corpus/text/*", f"{folder}/text/*").replace("out/measure", f"{folder}/run")
    (folder / "measure.yaml").write_text(text, "utf-8")
    assert call("run", str(folder / "measure.yaml"), "--debug") == 0
    return folder


@pytest.fixture(scope="module")
def table(place: Path) -> Path:
    out = place / "limits.yaml"
    assert call("calibrate", str(place / "measure.yaml"), "--by-language", "--out", str(out)) == 0
    return out


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def kept(place: Path) -> pa.RecordBatch:
    """What the measuring run kept, without its measures."""
    (folder,) = place.glob("run/02-*")
    found = ds.dataset(folder / "kept").to_table(columns=["doc_id", "source", "language", "text"])
    return found.combine_chunks().to_batches()[0]


def reasons_of(result) -> Counter[tuple[str, str]]:
    rows = result.dropped.select(["language", "reasons"]).to_pylist()
    return Counter((row["language"], reason) for row in rows for reason in row["reasons"])


@pytest.mark.parametrize("key", ["language", "gopher_repetition", "gopher_quality", "fineweb"])
def test_each_rule_of_the_table_removes_at_most_the_target_of_each_language(key, place, table):
    batch = kept(place)
    sizes = Counter(batch["language"].to_pylist())
    assert set(sizes) == set(SENTENCES)
    removed = reasons_of(STAGES[key](by_language=str(table))(batch))
    assert removed
    assert all(count <= 0.1 * sizes[language] for (language, _), count in removed.items())
    assert {language for language, _ in removed} == set(SENTENCES)


def test_what_the_comments_say_is_what_the_table_removes(place, table, capsys):
    """Each limit's share, before and after, against the stages that read the table."""
    assert call("calibrate", str(place / "run"), "--by-language", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    batch = kept(place)
    for stage in shown["stages"]:
        removed = reasons_of(STAGES[stage["stage"]](by_language=str(table))(batch))
        for language, figures in stage["languages"].items():
            for row in figures["limits"]:
                assert removed[language, row["rule"]] == row["would_remove"], (language, row["rule"])
                assert (row["would_remove_of"], row["removes"]) == (figures["documents"], 0)
    text = table.read_text("utf-8")
    assert f"# Source text: {place}/text/*.jsonl.gz" in text
    assert f"# Run: {place}/run (recipe measure)" in text
    assert "each rule alone removes at most 10 %" in text
    assert "text that reached gopher_quality: 0.1 MB; stop words are those of" in text


def test_entries_have_stop_words_and_the_right_splitter(place, table):
    found = load_table(str(table)).languages
    assert [found[name].words for name in ("en", "de", "zh")] == ["english", "unicode", "unicode"]
    assert {"the", "and", "in"} < set(found["en"].stopwords)
    assert {"der", "das", "und"} < set(found["de"].stopwords)
    assert all(len(word) == 1 for word in found["zh"].stopwords)
    batch = kept(place)
    german = " ".join(batch.filter(pc.equal(batch["language"], "de"))["text"].to_pylist())
    assert Counter(german.split()) == Counter(" ".join(documents("de")).split())
    words = Counter(word for word in german.translate(str.maketrans(".!,", "   ")).split() if word.isalpha())
    assert set(found["de"].stopwords) == {word for word, count in words.items() if count > 0.008 * words.total()}


def test_a_recipe_with_the_table_runs_and_says_so_in_its_report(place, table, tmp_path):
    recipe = tmp_path / "tabled.yaml"
    recipe.write_text(
        f"name: tabled\nout: {tmp_path}/run\nsources:\n  text: {{files: '{place}/text/*.jsonl.gz'}}\nstages:\n"
        f"- language: {{by_language: {table}}}\n- gopher_quality: {{by_language: {table}, min_words: 7}}\n",
        "utf-8",
    )
    assert call("run", str(recipe), "--debug") == 0
    run = open_run(str(tmp_path / "run"))
    limits = [limit for panel in page_data(run, STAGES)["measures"] for limit in panel["limits"]]
    (words,) = (limit for limit in limits if limit["reason"] == "too_few_words")
    assert (words["now"], words["languages"], words["table"]) == (7, ["de", "en", "zh"], str(table))
    page = Path(write_report(str(tmp_path / "run"), None)).read_text("utf-8")
    assert "3 languages have a limit of their own from the table" in page
    assert call("verify", str(tmp_path / "run")) == 0
    again = tmp_path / "again.yaml"
    assert call("calibrate", str(recipe), "--by-language", "--out", str(again)) == 0
    now = load_table(str(table)).languages["de"].min_doc_words
    assert f"{now} removes" in again.read_text("utf-8")  # the limit in force is that of the table


def test_the_table_is_part_of_the_key(place, table, tmp_path):
    copy = tmp_path / "limits.yaml"
    text = table.read_text("utf-8")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"name: r\nsources: {{t: {{files: x}}}}\nstages:\n- fineweb: {{by_language: {copy}}}\n", "utf-8")
    shards = [Shard(index=0, source="t", path="x", name="x", format="jsonl", size=1, stamp="1")]
    keys = []
    for written in (text, f"# again\n{text}", text.replace("words: english", "words: unicode")):
        copy.write_text(written, "utf-8")
        keys.append(make_plan(load(recipe), shards).segments[0].shards)
    assert keys[0] == keys[1] != keys[2]


def test_a_fault_of_the_table_is_one_of_the_recipe(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text("de:\n  min_doc_wrods: 3\n", "utf-8")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"name: r\nsources: {{t: {{files: x}}}}\nstages:\n- fineweb: {{by_language: {tmp_path}/t.yaml}}\n", "utf-8"
    )
    assert call("run", str(recipe)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{recipe}:4: `stages.0.fineweb.by_language`: {tmp_path}/t.yaml:2: unknown key")
    assert "Did you mean `min_doc_words`?" in error


def test_english_words_of_chinese_are_refused(place, tmp_path, capsys):
    lines = (place / "measure.yaml").read_text("utf-8").replace("words: unicode", "words: english").splitlines(True)
    text = "".join(line for line in lines if "by_language: words" not in line)
    recipe = tmp_path / "m.yaml"
    recipe.write_text(text.replace(f"{place}/run", f"{tmp_path}/run"), "utf-8")
    assert call("run", str(recipe), "--debug") == 0
    capsys.readouterr()
    assert call("calibrate", str(recipe), "--by-language", "--out", str(tmp_path / "t.yaml")) == 0
    assert "Stage gopher_quality: no proposals for zh" in capsys.readouterr().err
    found = load_table(str(tmp_path / "t.yaml")).languages
    assert found["zh"].model_fields_set == {"language_score", "words"}
    assert found["de"].words == "english"


# Stop words


def test_stop_words_by_hand():
    """Of 1,000 words: nine at 1 %, one at 0.9 %, one at exactly 0.8 %, the rest once each."""
    counts = {f"w{i}": 10 for i in range(9)} | {"near": 9, "edge": 8}
    counts |= {f"x{i}": 1 for i in range(1000 - sum(counts.values()))}
    assert most_frequent(counts) == (*(f"w{i}" for i in range(9)), "near")
    assert most_frequent({"b": 1, "a": 1, "c": 5}) == ("c", "a", "b")
    assert most_frequent({f"v{i}": 1 for i in range(200)}) == tuple(sorted(f"v{i}" for i in range(200))[:8])
    assert most_frequent({}) == ()


@given(
    st.lists(st.lists(st.sampled_from(["the", "über", "42", "磨", "...", "I'm", "a_b", "-"]), max_size=30), max_size=8)
)
def test_words_are_counted_as_python_counts_them(rows):
    column = pa.array([" ".join(row) for row in rows], pa.string())
    expected = Counter(word for row in rows for word in row if any(c.isalpha() for c in word))
    assert count_words(column, "unicode") == expected


def test_many_documents_are_sampled_by_their_id(place, table, monkeypatch, tmp_path):
    monkeypatch.setattr(stop_words, "WORDS_OF_DOCUMENTS", 20)
    monkeypatch.setattr(stop_words, "MEASURED_DOCUMENTS", 40)
    out = tmp_path / "t.yaml"
    assert call("calibrate", str(place / "run"), "--by-language", "--out", str(out)) == 0
    line = next(line for line in out.read_text("utf-8").splitlines() if "too_few_stop_words" in line)
    assert int(line.split(" of ")[1].split()[0]) < DOCUMENTS
    first = out.read_text("utf-8")
    assert call("calibrate", str(place / "run"), "--by-language", "--out", str(out)) == 0
    assert out.read_text("utf-8") == first
    loaded = YAML(typ="safe", pure=True).load(first)
    assert np.array([len(entry["stopwords"]) for entry in loaded.values()]).min() >= 8
