"""A run with global cuts by classifiers, several of them side by side: the same bytes in one process and on Dask."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.pipelines.inspect import inspect, own_measures
from gristmill.pipelines.listing import list_shards
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.plan import make_plan
from gristmill.pipelines.progress import Display
from gristmill.pipelines.recipe import STAGES, RecipeError, load, segments
from gristmill.pipelines.removed import removed
from gristmill.pipelines.report.limits import rules_of
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify

RECIPE = """
name: best
sources:
  prose: {{files: "{folder}/prose-*.jsonl"}}
  code: {{files: "{folder}/code-*.jsonl"}}
models:
  quality:
    fasttext: {{positive: {{sources: [prose]}}, negative: {{sources: [code]}}, dim: 4, epoch: 2, buckets: 1000}}
  other:
    fasttext: {{positive: {{sources: [code]}}, negative: {{sources: [prose]}}, dim: 4, epoch: 2, buckets: 1000}}
stages:
  - classifier: {{model: other, column: codelike}}
  - classifier: {{model: quality, keep_top: 0.3, keep_top_by: source, min_score: 0.2}}
  - classifier: {{model: other, column: plain, min_score: 0.01}}
"""


def write_inputs(folder: Path, shards: int, docs: list[str]) -> None:
    """Prose and code, dealt to files."""
    lines_of_code = ["\n".join(f"x_{i} = {j} + f({i})" for j in range(9)) for i in range(70)]
    code = [json.dumps({"text": text, "id": f"c{i}"}) for i, text in enumerate(lines_of_code)]
    prose = [json.dumps({"text": text, "id": f"p{i}"}) for i, text in enumerate(docs[:90])]
    for name, lines in (("prose", prose), ("code", code)):
        for s in range(shards):
            (folder / f"{name}-{s}.jsonl").write_text("\n".join(lines[s::shards]) + "\n", "utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, english_texts: list[str]) -> Path:
    """best.yaml, its inputs, and a finished run of it in one process."""
    folder = tmp_path_factory.mktemp("best")
    write_inputs(folder, 3, english_texts)
    (folder / "best.yaml").write_text(RECIPE.format(folder=folder), "utf-8")
    do(folder / "best.yaml", folder / "run")
    return folder


@pytest.fixture(scope="module")
def english_texts() -> list[str]:
    """Docstrings of NumPy."""
    found = {getattr(np, name).__doc__ or "" for name in dir(np) if callable(getattr(np, name))}
    return sorted(text for text in found if len(text) > 300)


def do(recipe: Path, out: Path) -> int:
    with Display() as display:
        return run(load(recipe), str(out), Options(debug=True), display).done


def results(out: Path) -> dict[str, bytes]:
    files = [p for kind in ("kept", "dropped", "cluster", "sign") for p in out.glob(f"*/{kind}/part-*.[pa]*")]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


def kept_documents(opened: Run) -> set[tuple[str, str]]:
    table = opened.kept().to_table(columns=["doc_id", "source"])
    return set(zip(table["doc_id"].to_pylist(), table["source"].to_pylist(), strict=True))


def test_the_cut_is_exact_and_its_books_balance(folder: Path) -> None:
    opened = open_run(folder / "run")
    assert verify(opened) == []
    assert opened.segments == ("01-read", "02-classifier", "03-classifier", "04-classifier")
    assert list(opened.stages()) == ["read", "classifier.codelike", "classifier", "classifier.plain"]
    figures = opened.clusters["03-classifier"]["figures"]
    groups = figures["by_source"]
    assert {name: (g["documents"], g["in_top"]) for name, g in groups.items()} == {"code": (70, 21), "prose": (90, 27)}
    assert (figures["documents"], figures["in_top"], figures["keep_top"]) == (160, 48, 0.3)
    book = opened.stages()["classifier"]
    assert book.read.documents == 160
    assert book.counters["rule.not_in_top"] == 112
    assert set(book.dropped) <= {"classifier_score_too_low", "not_in_top"}
    histogram = book.histograms["classifier.score"]
    assert sum(histogram.kept) + sum(histogram.dropped) + histogram.missing == 160
    assert sum(histogram.kept) == book.kept.documents


def test_scores_stay_side_by_side(folder: Path) -> None:
    opened = open_run(folder / "run")
    columns = ["codelike.score", "classifier.score", "plain.score"]
    kept = opened.kept().to_table(columns=columns)
    assert all(kept[name].null_count == 0 for name in columns)
    dropped = opened.dropped("03-classifier").to_table(columns=[*columns[:2], "reasons", "source"])
    assert pa.types.is_floating(dropped["classifier.score"].type)
    assert dropped["classifier.score"].null_count == 0
    assert {column: of.stage for column, of in opened.measures.items()} == {
        "codelike.score": "classifier.codelike",
        "classifier.score": "classifier",
        "plain.score": "classifier.plain",
    }
    found, problems = rules_of(opened, STAGES)
    assert problems == []
    assert {label: [rule.reason for rule in of.rules] for label, of in found.items()} == {
        "classifier.codelike": [],
        "classifier": ["classifier_score_too_low"],
        "classifier.plain": ["plain_score_too_low"],
    }
    assert found["classifier.plain"].settings["plain_score_too_low", "at_least"].name == "min_score"
    (example,) = inspect(opened, n=1, stage="classifier", reason="not_in_top")
    assert list(own_measures(example)) == ["classifier.score"]
    assert {(row.stage, row.reason) for row in removed(opened)} >= {("classifier", "not_in_top")}
    page = Path(write_report(folder / "run", folder / "report.html")).read_text("utf-8")
    assert "Dedupe and shares of all documents" in page
    assert "classifier.plain" in page


@pytest.mark.end_to_end
def test_dask_workers_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gristmill.pipelines.cli", "run", str(folder / "best.yaml")]
    options = ["--out", str(tmp_path / "run"), "--workers", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = results(folder / "run")
    assert len(expected) > 30
    assert results(tmp_path / "run") == expected


def test_other_shards_keep_the_same_documents(folder: Path, tmp_path: Path, english_texts: list[str]) -> None:
    """Scored by one model by path: trained by the recipe, it would see the documents in another order."""
    model = folder / "run/models/quality"
    for name, shards in (("a", 2), ("b", 5)):
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, shards, english_texts)
        text = RECIPE.format(folder=tmp_path / name).partition("models:")[0]
        text += f"stages:\n  - classifier: {{model: {model}, keep_top: 0.27}}\n"
        (tmp_path / name / "r.yaml").write_text(text, "utf-8")
        do(tmp_path / name / "r.yaml", tmp_path / name / "run")
    first, second = (open_run(tmp_path / name / "run") for name in "ab")
    assert len(kept_documents(first)) == 44  # ceil(0.27 * 160)
    assert kept_documents(first) == kept_documents(second)
    figures = [r.clusters["01-classifier"]["figures"] for r in (first, second)]
    assert figures[0] == figures[1]


def test_another_share_signs_nothing_again(folder: Path, tmp_path: Path) -> None:
    shards = list_shards(load(folder / "best.yaml"))
    text = RECIPE.format(folder=folder)
    plans = []
    for old, new in (("0.3", "0.3"), ("keep_top: 0.3", "keep_top: 0.4"), ("quality,", "other,"), ("h: 2", "h: 3")):
        assert old in text
        path = tmp_path / "r.yaml"
        path.write_text(text.replace(old, new), "utf-8")
        plans.append(make_plan(load(path), shards).segments[2])
    base, share, model, training = plans
    assert share.sign == base.sign
    assert share.cluster != base.cluster
    assert share.shards != base.shards
    assert model.sign != base.sign
    assert training.sign != base.sign


def test_a_model_behind_a_global_cut_waits_for_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(folder=folder), "utf-8")
    found = segments(load(path))
    assert [s.models for s in found] == [(), ("other",), ("quality",), ("other",)]
    assert [s.gate is not None for s in found] == [False, False, True, False]
    path.write_text(RECIPE.format(folder=folder).replace("keep_top: 0.3, keep_top_by: source, ", ""), "utf-8")
    assert [[use.heading for use in s.uses] for s in segments(load(path))] == [
        [],
        ["classifier.codelike", "classifier", "classifier.plain"],
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "column: plain",
            "column: codelike",
            r"r\.yaml:14: `classifier` writes the columns `codelike\.\*`, and so does `classifier` of line 12",
        ),
        (", column: plain", "", r"r\.yaml:14: .*`classifier\.\*`.* line 13\. Give this use a `column` of its own"),
        ("column: plain", "column: perplexity", r"r\.yaml:14: `column: perplexity` is the name of a stage"),
        ("min_score: 0.01", "pareto: 9, keep_top: 0.5", r"r\.yaml:14: .*contradict each other"),
    ],
)
def test_two_uses_of_one_name_are_refused(folder: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    text = RECIPE.format(folder=folder)
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    with pytest.raises((RecipeError, ValueError), match=message):
        load(path)


def test_uses_for_other_sources_may_share_a_name(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    text = (
        RECIPE.format(folder=folder)
        .replace("column: plain", "column: codelike")
        .replace("column: codelike}", "column: codelike}\n    only: [prose]")
    )
    path.write_text(text.replace("min_score: 0.01}", "min_score: 0.01}\n    only: code"), "utf-8")
    assert [use.only for use in load(path).uses] == [("prose",), None, ("code",)]
