"""What each rule removes does not depend on the order of the stages, and counting it changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.accounting import Accounting, chosen
from gristmill.pipelines.cli import app
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.removed import removed
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.work import StageStep
from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, judge, with_columns

FORWARD = ("language: {keep: [en], min_score: 0.9}", "gopher_repetition", "gopher_quality", "fineweb")


def recipe(folder: Path, crawl: Path, stages: tuple[str, ...], share: float = 1.0) -> Path:
    lines = "".join(f"  - {stage}\n" for stage in stages)
    text = f"name: small\nsources:\n  readmes: {{files: '{crawl}/readmes/*.jsonl.zst'}}\n"
    text += f"  code: {{files: '{crawl}/code/*.parquet'}}\nremovals_share: {share}\nstages:\n{lines}"
    path = folder / f"recipe-{share}-{len(list(folder.iterdir()))}.yaml"
    path.write_text(text)
    return path


def done(path: Path) -> Run:
    out = path.with_suffix("")
    with Display() as display:
        run(recipes.load(path), str(out), Options(debug=True), display)
    return open_run(out)


def figures(of: Run, **asked: str) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (r.stage, r.reason): (r.documents, r.chars, r.only_documents, r.only_chars, r.of_documents, r.of_chars)
        for r in removed(of, **asked)
    }


def test_the_order_of_stages_changes_no_figure(tmp_path: Path, crawl: Path) -> None:
    first = done(recipe(tmp_path, crawl, FORWARD))
    other = done(recipe(tmp_path, crawl, FORWARD[::-1]))
    assert len(figures(first)) > 5
    assert figures(first) == figures(other)
    for source in ("readmes", "code"):
        assert figures(first, source=source) == figures(other, source=source)
    booked = [{n: sum(a.documents for a in b.dropped.values()) for n, b in r.stages().items()} for r in (first, other)]
    assert booked[0] != booked[1], "the funnel does depend on it"


def test_only_is_what_comes_back_without_the_rule(tmp_path: Path, crawl: Path) -> None:
    whole = done(recipe(tmp_path, crawl, FORWARD))
    without = done(recipe(tmp_path, crawl, (*FORWARD[:3], "fineweb: {max_duplicate_line_chars: null}")))
    back = without.kept().count_rows() - whole.kept().count_rows()
    assert back == figures(whole)["fineweb", "too_many_duplicate_line_chars"][2] > 0


def test_counting_changes_no_document(tmp_path: Path, crawl: Path) -> None:
    stages = (*FORWARD, "c4", "minhash")
    outs = [Path(done(recipe(tmp_path, crawl, stages, share)).path) for share in (0, 0.5, 1)]
    files = [
        {p.relative_to(o): p.read_bytes() for k in ("kept", "dropped") for p in o.glob(f"*/{k}/*.parquet")}
        for o in outs
    ]
    assert len(files[0]) == 16
    assert files[0] == files[1] == files[2]


def test_a_sample_counts_the_same_documents_in_any_order(tmp_path: Path, crawl: Path) -> None:
    first, other = (done(recipe(tmp_path, crawl, stages, 0.5)) for stages in (FORWARD, FORWARD[::-1]))
    assert figures(first) == figures(other)
    whole = first.stages()["read"].kept.documents
    assert 0.2 * whole < next(iter(removed(first))).of_documents < 0.8 * whole


def test_the_command_names_what_it_cannot_answer(tmp_path: Path, crawl: Path) -> None:
    of = done(recipe(tmp_path, crawl, FORWARD))
    shown = CliRunner().invoke(app, ["rules", of.path, "--json"])
    assert {row["stage"] for row in json.loads(shown.stdout)} == {"language", *FORWARD[1:]}
    assert "too_few_words" in CliRunner().invoke(app, ["rules", of.path]).stdout
    wrong = CliRunner().invoke(app, ["rules", of.path, "--source", "cod"])
    assert wrong.exit_code
    assert "code" in str(wrong.exception)
    off = done(recipe(tmp_path, crawl, FORWARD, 0))
    assert "removals_share" in str(CliRunner().invoke(app, ["rules", off.path]).exception)


class Long(Settings):
    """Drops documents over 3 characters; fails on a batch that holds one over 9."""

    key: ClassVar[str] = "long"
    measures: ClassVar[tuple[Measure, ...]] = ()
    most: int

    def __call__(self, batch: Batch) -> Result:
        chars = [len(text) for text in batch["text"].to_pylist()]
        if max(chars, default=0) > 9:
            raise ValueError("too much for me")
        return judge(
            with_columns(batch, {"long.chars": pa.array(chars, pa.float64())}),
            (Rule("long", "long.chars", at_most=self.most),),
        )


def account(stages: list[Any], texts: list[str]) -> Accounting:
    steps = [StageStep(key=f"s{i}", stage=stage) for i, stage in enumerate(stages)]
    batch = pa.RecordBatch.from_pydict({"doc_id": [str(i) for i in range(len(texts))], "text": texts})
    found = Accounting(steps, 1.0)
    before, dropped = [], []
    for step in steps:
        before.append(batch)
        result = step.stage(batch)
        dropped.append(result.dropped)
        batch = result.kept
    found.add(before, dropped, batch)
    return found


def test_a_fault_on_a_dropped_document_stops_nothing_and_is_counted() -> None:
    class Short(Long):
        def __call__(self, batch: Batch) -> Result:
            chars = pa.array([float(len(t)) for t in batch["text"].to_pylist()], pa.float64())
            return judge(with_columns(batch, {"short.chars": chars}), (Rule("big", "short.chars", at_most=8),))

    found = account([Short(most=8), Long(most=3)], ["a", "four", "x" * 20])
    assert found.found.left_out == 1
    assert "too much for me" in found.problem
    assert found.found.came_in[""].documents == 2
    assert found.found.rules["s1"]["long"][""].documents == 1


def test_chosen_is_a_share_by_id() -> None:
    ids = pa.array([f"doc-{i}" for i in range(10_000)])
    half = chosen(ids, 0.5)
    assert half.mean() == pytest.approx(0.5, abs=0.02)
    assert not (chosen(ids, 0.2) & ~half).any()
    assert chosen(ids[5:], 0.5).tolist() == half[5:].tolist()
