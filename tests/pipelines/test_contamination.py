"""A run with `decontaminate`: its books, its report; and the check of runs and token shards afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.pipelines import cli
from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.contamination import check, recorded, sets_of
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify
from gristmill.stages.evaluation_sets import EvaluationSet
from gristmill.stages.settings_file import SettingsError

PROSE = "The mill grinds the grain that farmers have brought to it, and the flour is put in sacks"
ITEMS = [
    {"id": "a", "question": "How many sacks does a windmill fill on a stormy Tuesday before the miller goes to bed?"},
    {"id": "b", "question": "Who told the <b>heron</b> that the reservoir behind the seventh lock had been drained?"},
    {"id": "c", "question": "Which number follows?"},
    {
        "id": "d",
        "question": "Nobody has ever written this question about violet turbines down anywhere else before now.",
    },
]
RECIPE = """name: clean
sources:
  texts: {{files: "{folder}/*.jsonl"}}
stages:
  - decontaminate: {settings}
tokenizer: {{vocab_size: 300}}
tokens: {{holdout_share: 0.3}}
"""


def made(folder: Path, settings: str, more: str = "") -> Path:
    """A run over ten documents; the third and the fifth hold the first item, the fifth the second, too."""
    (folder / "in").mkdir()
    (folder / "items.jsonl").write_text("\n".join(json.dumps(item) for item in ITEMS))
    texts = [f"{PROSE}. {'word ' * i}" for i in range(10)]
    texts[2] = f"{PROSE}\n{ITEMS[0]['question'].upper()}\n{PROSE}"
    texts[4] = f"{ITEMS[0]['question']} {PROSE} {ITEMS[1]['question']}"
    lines = [json.dumps({"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines))
    path = folder / "clean.yaml"
    path.write_text(RECIPE.format(folder=folder / "in", settings=settings.format(folder=folder)) + more)
    with Display() as display:
        run(recipes.load(path), str(folder / "run"), Options(debug=True), display)
    return folder / "run"


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("drop"), "{{sets: {{mill: {folder}/items.jsonl}}}}")


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("mark"), "{{mode: mark, sets: {{mill: {folder}/items.jsonl}}}}")


def test_a_run_without_the_items(dropped: Path) -> None:
    opened = open_run(dropped)
    assert verify(opened) == []
    assert {row["doc_id"] for row in opened.dropped("01-decontaminate").to_table().to_pylist()} == {"d2", "d4"}
    found = recorded(opened)
    assert found is not None
    assert [(i.item, i.documents) for i in found.worst()] == [("mill/a", 2), ("mill/b", 1)]
    assert found.items["mill/b"].examples == [
        {"doc_id": "d4", "source": "texts", "url": None, "where": "dropped", "text": ITEMS[1]["question"][:-1]}
    ]
    assert found.unchecked == [{"item": "mill/c", "why": "3 words, fewer than 8"}]
    (row,) = found.rows()
    assert list(row.values()) == ["mill", 4, 2, 0.5, 1, 0]
    assert check(str(dropped), {}).items == {}


@pytest.mark.parametrize("part", ["", "tokens"])
def test_the_check_afterwards_finds_the_same_in_runs_and_in_tokens(part: str, marked: Path) -> None:
    sets = {"mill": EvaluationSet(files=(str(marked.parent / "items.jsonl"),))}
    found = check(str(marked / part) if part else str(marked), sets)
    assert (found.documents, found.contaminated) == (10, 2)
    recorded_before = recorded(open_run(marked))
    assert recorded_before is not None
    assert {(i.item, i.documents, i.hits) for i in found.worst()} == {
        (i.item, i.documents, i.hits) for i in recorded_before.worst()
    }
    assert {e["doc_id"] for e in found.items["mill/a"].examples} == {"d2", "d4"}
    assert {e["where"] for i in found.worst() for e in i.examples} <= ({"train", "holdout"} if part else {"kept"})


def test_the_verb_writes_the_table(marked: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items, out = marked.parent / "items.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as done:
        cli.main(["contamination", f"{marked}/tokens", "--tasks", f"m={items}", "--out", str(out), "--json"])
    assert done.value.code == 0
    said = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert said["items"] == rows
    assert [row["item"] for row in rows] == ["m/a", "m/b"]
    assert said["benchmarks"][0]["found"] == 2
    with pytest.raises(SystemExit):
        cli.main(["contamination", str(marked)])
    text = capsys.readouterr().out
    assert "2 of 10 documents hold an item." in text
    assert "Cannot be checked: mill/c: 3 words, fewer than 8" in text


def test_nothing_to_look_for_and_no_corpus_are_asked_wrongly(
    marked: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, message in (
        ([f"{marked}/tokens"], "there is nothing to look for"),
        ([str(tmp_path / "gone"), "--tasks", str(marked.parent / "items.jsonl")], "There is no run folder"),
        ([str(marked), "--tasks", "gone.jsonl"], "there is no such file of evaluation items"),
    ):
        with pytest.raises(SystemExit) as done:
            cli.main(["contamination", *arguments])
        assert done.value.code == 2
        assert message in capsys.readouterr().err


def test_the_report_names_items_and_escapes_them(marked: Path, tmp_path: Path) -> None:
    page = Path(write_report(marked, tmp_path / "report.html")).read_text()
    section = page.split('<section id="contamination">')[1].split("</section>")[0]
    assert "2 of 10 documents held evaluation items; they were marked and kept." in section
    assert "mill/a" in section
    assert "&lt;b&gt;heron&lt;/b&gt;" in section
    assert "<b>heron" not in page


def test_a_report_without_the_evaluation_files_says_so(dropped: Path, tmp_path: Path) -> None:
    opened = open_run(dropped)
    items = dropped.parent / "items.jsonl"
    items.rename(tmp_path / "away")
    try:
        found = recorded(opened)
    finally:
        (tmp_path / "away").rename(items)
    assert found is not None
    assert "there is no such file" in found.problem
    assert found.rows()[0]["items"] is None
    assert len(found.items) == 2


def test_sets_by_name_and_file() -> None:
    found = sets_of(["a/arc.jsonl.gz", "arc=b.jsonl", "x.yaml", "a/b=c.txt"])
    assert {name: one.files for name, one in found.items()} == {
        "arc": ("a/arc.jsonl.gz", "b.jsonl"),
        "x": ("x.yaml",),
        "b=c": ("a/b=c.txt",),
    }


def test_the_evaluation_sets_of_the_ablation_are_included(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text(json.dumps(ITEMS[0]))
    (tmp_path / "own.txt").write_text(PROSE)
    (tmp_path / "ab.yaml").write_text(
        "mixtures: [m.yaml]\nseeds: [1]\ntrain: {}\nevaluation_sets: {mill: items.jsonl}\n"
    )
    path = tmp_path / "r.yaml"

    def sets(settings: str, ablation: str = "ablation: {file: ab.yaml}\n") -> dict[str, EvaluationSet]:
        text = RECIPE.format(folder=tmp_path, settings=settings) + ablation
        path.write_text(text)
        found: dict[str, EvaluationSet] = recipes.load(path).uses[0].stage.sets
        return found

    assert sets("{}") == {"mill": EvaluationSet(files=(str(tmp_path / "items.jsonl"),))}
    assert list(sets(f"{{sets: {{own: {tmp_path}/own.txt}}}}")) == ["mill", "own"]
    assert list(sets(f"{{include_ablation: false, sets: {{own: {tmp_path}/own.txt}}}}")) == ["own"]
    for settings, ablation in (("{include_ablation: false}", "ablation: {file: ab.yaml}\n"), ("{}", "")):
        with pytest.raises(SettingsError, match=r"r\.yaml:5: there is no evaluation set"):
            sets(settings, ablation)
    with pytest.raises(SettingsError, match=r"r\.yaml:5: .*gone\.jsonl: there is no such file"):
        sets("{sets: {x: gone.jsonl}}")


def test_another_evaluation_file_redoes_the_shards(tmp_path: Path) -> None:
    out = made(tmp_path, "{{sets: {{mill: {folder}/items.jsonl}}}}")
    assert open_run(out).kept().count_rows() == 8
    ending = " ".join(PROSE.split()[-4:]) + 9 * " word"
    (tmp_path / "items.jsonl").write_text(json.dumps({"question": ending}))
    with Display() as display:
        run(recipes.load(tmp_path / "clean.yaml"), str(out), Options(debug=True), display)
    kept = set(open_run(out).kept().to_table()["doc_id"].to_pylist())
    assert {"d0", "d2", "d4"} <= kept
    assert "d9" not in kept
