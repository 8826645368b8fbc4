"""Planted items are found, clean documents stay, and what is said of a document is what stands in it."""

from __future__ import annotations

import itertools
import os
import random
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.contamination_index import Index, IndexSettings
from gristmill.stages.decontaminate import Decontaminate, merged
from gristmill.stages.evaluation_sets import EvaluationSet, Item, item_texts, items_of
from gristmill.stages.kernels import contamination as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.fold import fold
from gristmill.stages.kernels.shingles import normalised
from gristmill.stages.settings_file import SettingsError

THINGS = (
    "lever mirror sponge valley granite tadpole compass orchard glacier candle saddle lantern harbor engine".split()
)
MORE = "freezes dissolves migrates expands reflects evaporates erodes germinates conducts vibrates melts floats".split()
PLACES = "desert pond attic hillside laboratory kitchen meadow cave garage shoreline greenhouse workshop".split()
AGENTS = "student farmer sailor geologist nurse baker hiker teacher plumber gardener astronomer mechanic".split()


def made_items(count: int) -> list[dict[str, Any]]:
    """Multiple-choice items in the manner of school science; the beginnings are shared, as in real sets."""
    rng = random.Random(3)

    def some(words: list[str]) -> str:
        return rng.choice(words)

    items = []
    for i in range(count):
        question = (
            f"Which of the following best explains why a {some(THINGS)} {some(MORE)} in the {some(PLACES)} after the "
            f"{some(AGENTS)} puts a {some(THINGS)} beside the {some(THINGS)} and waits {rng.randint(2, 90)} days "
            f"for the {some(AGENTS)} near the {some(PLACES)}?"
        )
        choices = [f"the {some(THINGS)} {some(MORE)} faster than the {some(THINGS)}" for _ in range(2)]
        choices += [f"{some(AGENTS)} of the {some(PLACES)}", f"heat {some(MORE)}"]
        items.append({"id": f"q{i}", "question": question, "choices": choices, "answer": "ABCD"[rng.randrange(4)]})
    return items


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    return made_items(200)


@pytest.fixture(scope="module")
def stage(items: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Decontaminate:
    path = tmp_path_factory.mktemp("sets") / "school.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, items)))
    return Decontaminate(sets={"school": str(path)})


@pytest.fixture(scope="module")
def clean() -> list[str]:
    """10,000 pieces of the Python installation, 800 characters each."""
    out: list[str] = []
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(folder)).rglob("*.py")):
            if "gristmill" not in path.parts and path.stat().st_size > 800:
                text = path.read_text("utf-8", errors="replace")
                out += [text[i : i + 800] for i in range(0, len(text), 800)]
            if len(out) >= 10_000:
                return out[:10_000]
    raise AssertionError(f"only {len(out)} pieces in {os.fspath(sysconfig.get_path('purelib'))}")


def batch_of(texts: list[str]) -> pa.RecordBatch:
    columns = {"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())}
    return pa.RecordBatch.from_pydict(columns)


def written(item: dict[str, Any], choices: list[str]) -> str:
    return item["question"] + "\n" + "\n".join(f"{c}. {x}" for c, x in zip("ABCD", choices, strict=True))


def other_order(item: dict[str, Any], rng: random.Random) -> list[str]:
    choices: list[str] = list(item["choices"])
    while choices == item["choices"]:
        rng.shuffle(choices)
    return choices


@pytest.mark.parametrize(
    ("kind", "at_least"), [("verbatim", 1), ("case and spaces", 1), ("line break", 1), ("order", 0.95)]
)
def test_planted_items_are_found_and_named(
    kind: str, at_least: float, items: list[dict[str, Any]], stage: Decontaminate, clean: list[str]
) -> None:
    rng = random.Random(kind)
    texts = []
    for i, item in enumerate(items):
        text = written(item, other_order(item, rng) if kind == "order" else item["choices"])
        if kind == "case and spaces":
            text = "".join(rng.choice((c.upper(), c.lower())) for c in text).replace(
                " ", rng.choice("\t\u3000\xa0") + " "
            )
        if kind == "line break":
            at = rng.choice([j for j, c in enumerate(text) if c == " "])
            text = f"{text[:at]}\r\n{text[at + 1 :]}"
        texts.append(f"{clean[i]}\n{text}\n{clean[i + 500]}")
    dropped = stage(batch_of(texts)).dropped
    named = dict(zip(dropped["doc_id"].to_pylist(), dropped["decontaminate.matches"].to_pylist(), strict=True))
    found = sum(
        f"school/q{i}" in {m["item"] for m in orjson.loads(named.get(str(i), "[]")) if m["over"]}
        for i in range(len(items))
    )
    assert found >= at_least * len(items)


def test_nothing_is_found_in_clean_documents(stage: Decontaminate, clean: list[str]) -> None:
    result = stage(batch_of(clean))
    assert result.kept.num_rows == len(clean)
    assert result.counters["contaminated_documents"] == 0


def test_paraphrased_items_are_found_by_containment(items: list[dict[str, Any]], stage: Decontaminate) -> None:
    """Every twelfth word replaced and the choices in one sentence: no 13-gram is left of the question."""
    texts = []
    for item in items:
        words = item["question"].split()
        words[::12] = ["indeed"] * len(words[::12])
        texts.append("Quiz time! " + " ".join(words) + " Say whether it is " + ", or ".join(item["choices"]))
    result = stage(batch_of(texts))
    assert result.dropped.num_rows >= 0.95 * len(items)
    reasons = Counter(r for row in result.dropped["reasons"].to_pylist() for r in row)
    assert reasons["too_much_containment"] >= 0.9 * len(items)


def small(text: str, tmp_path: Path, **more: Any) -> Decontaminate:
    (tmp_path / "set.txt").write_text(text)
    return Decontaminate(sets={"t": str(tmp_path / "set.txt")}, **more)


def test_the_three_measures_by_hand(tmp_path: Path) -> None:
    """An item of 15 words has three 13-grams, eight 8-grams and 14 pairs; the document holds its first 14 words."""
    item = "a1 b c d e f g h i j k l m n o".split()
    stage = small(" ".join(item), tmp_path, mode="mark")
    row = stage(batch_of(["Zum Beispiel: " + " ".join(item[:14]) + " und mehr"])).kept.to_pylist()[0]
    assert row["decontaminate.hits"] == 2
    assert row["decontaminate.overlap"] == 7 / 8
    assert row["decontaminate.item"] == "t/0"
    (match,) = orjson.loads(row["decontaminate.matches"])
    assert match == {"item": "t/0", "over": True, "hits": 2, "overlap": 0.875, "containment": 0.0} | {
        "text": " ".join(item[:14])
    }
    # In two halves far apart there is no 13-gram: one 8-gram of eight, in the first.
    apart = " ".join(item[:8]) + " x" * 200 + " " + " ".join(item[8:])
    row = stage(batch_of([apart])).kept.to_pylist()[0]
    assert (row["decontaminate.hits"], row["decontaminate.overlap"]) == (0, 1 / 8)


def test_items_that_are_too_short_are_listed(tmp_path: Path) -> None:
    index = small("one two three\n" + "a b c d e f g h i\n" + " ".join("jklmnopqrstuvw"), tmp_path).index()
    assert index.unchecked == {0: "3 words, fewer than 8"}
    assert index.facts() == {"t": {"items": 3, "unchecked": 1, "ignored_ngrams": 0}}
    found = dict(index.search(pa.array(["x A, b. C d e f g h I x", "a b c d e f g h", "b c d e f g h i j"])))
    assert [(f.item, f.hits) for f in found[0]] == [(1, 1)], "an item of 9 words is one run of 9"
    assert [f.hits for row in (1, 2) for f in found.get(row, [])] in ([0, 0], [0], []), "eight of them are not it"


def test_what_many_items_share_is_no_item(tmp_path: Path) -> None:
    instruction = "choose the one answer that fits the text below best and give its letter alone please"
    lines = [f"{instruction} {'x' * i}" for i in range(1, 21)] + [" ".join("abcdefghijklmnop")]
    stage = small("\n".join(lines), tmp_path)
    result = stage(batch_of([instruction, f"{instruction} xxx", " ".join("abcdefghijklmnop")]))
    assert result.dropped["doc_id"].to_pylist() == ["1", "2"]
    assert stage.index().facts()["t"]["ignored_ngrams"] > 0


def test_cut_leaves_the_rest_with_a_margin(tmp_path: Path) -> None:
    item = " ".join(f"w{i}" for i in range(20))
    stage = small(item, tmp_path, mode="cut", margin_chars=5, min_piece_chars=8, max_pieces=2)
    before, after = "é" * 30 + " 12345", "54321 " + "z" * 30
    texts = [f"{before}{' '}{item} {after}", item, "nothing here", f"{item} {'q' * 20} {item} {'q' * 20} {item}"]
    texts.append(" ".join(["q" * 20, item] * 3) + " " + "q" * 20)
    result = stage(batch_of(texts))
    kept = dict(zip(result.kept["doc_id"].to_pylist(), result.kept["text"].to_pylist(), strict=True))
    q = "q" * 12
    assert kept == {"0": f"{'é' * 30} 1\n1 {'z' * 30}", "2": "nothing here", "3": f"{q}\n{q}"}
    reasons = dict(zip(result.dropped["doc_id"].to_pylist(), result.dropped["reasons"].to_pylist(), strict=True))
    assert reasons == {"1": ["nothing_left"], "4": ["too_many_pieces"]}
    assert result.counters["documents_cut"] == 4


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda s: (s[0], s[0] + s[1]))))
def test_merged_stretches_cover_the_same_and_do_not_touch(spans: list[tuple[int, int]]) -> None:
    out = merged(spans)
    points = {p for a, b in spans for p in range(a, b)}
    assert {p for a, b in out for p in range(a, b)} == points
    assert all(a[1] < b[0] for a, b in itertools.pairwise(out))


# --- the kernels ---

ALPHABET = st.sampled_from(["a", "b", "Ab", "1,5", "é", "日", "한", "\u0301", " ", " ", " ", "\n", "."])


@settings(max_examples=150, deadline=None)
@given(st.lists(ALPHABET, max_size=40).map("".join), st.lists(ALPHABET, min_size=1, max_size=60).map("".join))
def test_matches_are_those_of_a_search_in_words(item: str, document: str) -> None:
    words = normalised(item).split(" ")
    index = Index.of([Item("b", "0", (item,))], IndexSettings(4, 3, 2, 10, containment=False))
    found = [f for _, several in index.search(pa.array([document])) for f in several]
    there = normalised(document).split(" ")
    size = min(4, len(words))
    runs = {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
    hits = sum(tuple(there[i : i + size]) in runs for i in range(len(there) - size + 1))
    assert sum(f.hits for f in found) == (hits if len(words) >= 2 else 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(ALPHABET, st.characters(exclude_categories=["Cs"])), max_size=30).map("".join))
def test_spans_are_those_of_the_words(text: str) -> None:
    words = normalised(text).split(" ") if normalised(text) else []
    data = text.encode()
    spans = kernel.spans_of(data).tolist()
    assert len(spans) == len(words)
    for i, (start, stop) in enumerate(spans):
        same = [words[j] for j, span in enumerate(spans) if span == [start, stop]]
        assert " ".join(same) == normalised(data[start:stop].decode()), (i, text)


def test_no_byte_around_the_documents_is_read(guarded: Any) -> None:
    item = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
    index = Index.of([Item("b", "0", (item,))])
    texts = [item, "alpha beta", "", item + " ë日", "theta iota kappa"]
    for guard in (b"\xff" * 64, b" alpha beta gamma delta " * 4):
        found = {row: [f.hits for f in several] for row, several in index.search(guarded(texts, guard))}
        assert found == {0: [1], 3: [1]}


def test_a_hash_collision_is_no_hit() -> None:
    """The table is made to say that other words have the hash of the item's."""
    words = kernel.words_of(pa.array(["the words of the item", "quite other words than those"]))
    five = np.full(2, 5, np.int64)
    hashes, first, _ = kernel.gram_hashes(words, np.arange(2), five)
    table = kernel.table_of(hashes[1:], first[:1])
    offsets, data = string_views(pa.array(["quite other words than those"]))
    matches = np.empty((8, 4), np.int64)
    for inexact, expected in ((-1, 0), (5, 1)):
        arrays = (words.text, words.begins, words.ends, matches)
        assert kernel.find(offsets, data, *fold(), five[:1], inexact, *table, *arrays) == expected


def test_more_matches_than_room_are_counted_and_then_listed() -> None:
    item = "a b c d e f g h i j"
    index = Index.of([Item("b", "0", (item,))])
    (entry,) = [f for _, several in index.search(pa.array([f"{item} . " * 5000])) for f in several]
    assert entry.hits == 5000


# --- what an item is ---


@pytest.mark.parametrize(
    ("parts", "answer", "expected"),
    [
        (["Q?", ["x", "y"]], 1, ("Q?\nx\ny", "Q?\ny")),
        (["Q?", ["x", "y"]], "B", ("Q?\nx\ny", "Q?\ny")),
        (["Q?", ["x", "y"]], "A", ("Q?\nx\ny",)),
        (["Q?", {"text": ["x", "y"], "label": ["1", "2"]}], "2", ("Q?\nx\ny", "Q?\ny")),
        (["Q?", [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]], "B", ("Q?\nx\ny", "Q?\ny")),
        (["Q?", {"A": "x", "B": "y"}], "B", ("Q?\nx\ny", "Q?\ny")),
        (["Q?"], "forty-two", ("Q?\nforty-two",)),
        (["Q?", ["x", "y"]], 7, ("Q?\nx\ny",)),
        (["Q?", ["x", "y"]], None, ("Q?\nx\ny",)),
    ],
)
def test_question_choices_and_answer(parts: list[Any], answer: Any, expected: tuple[str, ...]) -> None:
    assert item_texts(parts, answer) == expected


TASK = """task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl, train: none.jsonl}}
test_split: test
doc_to_text: "Question: {{ q | regex_replace('[?]+', '?') }}\\nAnswer:"
doc_to_choice: "{{ [a, b] }}"
doc_to_target: right
"""


def test_a_task_file_of_the_harness(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(TASK)
    (tmp_path / "tiny.yaml").write_text("include: base.yaml\ntask: tinier\n")
    (tmp_path / "items.jsonl").write_text('{"q": "Why??", "a": "so", "b": "not it\'s", "right": 1}\n')
    one = EvaluationSet(files=(str(tmp_path / "tiny.yaml"),))
    (item,) = items_of("tiny", one)
    assert item == Item("tiny", "0", ("Question: Why?\nAnswer:\nso\nnot it's", "Question: Why?\nAnswer:\nnot it's"))
    assert [Path(p).name for p in Decontaminate(sets={"tiny": one}).files()] == ["tiny.yaml", "items.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dataset_path: json", "dataset_path: cais/mmlu"), "nothing is downloaded"),
        (("doc_to_target: right", "doc_to_target: !function utils.f"), "runs Python code"),
        (("doc_to_target: right", "process_docs: utils.f"), "changes its data with Python code"),
        (("{{ [a, b] }}", "{{ q.__class__.__mro__ }}"), "templates of"),
        (("{{ [a, b] }}", "{{ 'x' * 10000000 }}"), "makes too much"),
        (("{{ [a, b] }}", "{{ nobody }}"), "'nobody' is undefined"),
        (("test: items.jsonl", "test: gone.jsonl"), "there is no file gone.jsonl"),
        (("test: items.jsonl", "test: 'http://a.b/c.jsonl'"), "is not a file here"),
        (("task: tiny", "task: [a, b]"), "a group of tasks"),
        (("doc_to_text", "doc_to_say"), "no `doc_to_text`"),
    ],
)
def test_what_a_task_file_cannot_do_here(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"q": "Why??", "a": "so", "b": "no", "right": 1}\n')
    (tmp_path / "t.yaml").write_text(TASK.replace(*change))
    with pytest.raises(SettingsError, match=message):
        list(items_of("t", EvaluationSet(files=(str(tmp_path / "t.yaml"),))))


@pytest.mark.parametrize(
    ("name", "text", "more", "message"),
    [
        ("a.jsonl", '{"q": "x"}', {}, r"a\.jsonl:1: no field of this record is known"),
        ("a.jsonl", '{"question": "x"}\n{', {}, r"a\.jsonl:2: not JSON"),
        ("a.jsonl", "[1]", {}, r"a\.jsonl:1: an evaluation item is a JSON object, not int"),
        ("a.jsonl", '{"question": "x"}', {"fields": ["question", "choicse"]}, "no record has the field `choicse`"),
        ("a.bin", "x", {}, "say the `format`"),
        ("b.txt", "x", {"files": "gone.txt"}, "gone.txt: there is no such file"),
    ],
)
def test_what_is_wrong_with_a_set(name: str, text: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=message):
        list(items_of("b", EvaluationSet(**{"files": str(tmp_path / name), **more})))


def test_paragraphs_or_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("one\ntwo\n\n\nthree\n")
    found = [i for i in items_of("t", EvaluationSet(files=(str(tmp_path / "*.txt"),)))]
    assert [(i.name, i.texts[0]) for i in found] == [
        ("a:0", "one"),
        ("a:1", "two"),
        ("b:0", "one\ntwo"),
        ("b:1", "three"),
    ]


def test_a_changed_file_is_read_again_and_no_set_is_an_error(tmp_path: Path) -> None:
    stage = small(" ".join("abcdefgh"), tmp_path)
    text = [" ".join("stuvwxyz")]
    assert stage(batch_of(text)).kept.num_rows == 1
    small("\n".join([" ".join("abcdefgh"), text[0]]), tmp_path)
    assert stage(batch_of(text)).dropped.num_rows == 1
    with pytest.raises(SettingsError, match="there is no evaluation set"):
        Decontaminate()(batch_of(text))


def test_a_document_decides_for_itself(items: list[dict[str, Any]], stage: Decontaminate, clean: list[str]) -> None:
    texts = [written(item, item["choices"]) + clean[i] for i, item in enumerate(items[:20])] + clean[:20]
    together = stage(batch_of(texts))
    alone = [stage(batch_of([text])) for text in texts]
    rows = sorted(together.kept.to_pylist() + together.dropped.to_pylist(), key=lambda r: int(r["doc_id"]))
    for row, result in zip(rows, alone, strict=True):
        (one,) = result.kept.to_pylist() + result.dropped.to_pylist()
        assert {**one, "doc_id": row["doc_id"]} == row
