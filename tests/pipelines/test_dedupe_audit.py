"""The audit of near-duplicate removal, and the look into a cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import app
from gristmill.pipelines.clusters import members
from gristmill.pipelines.dedupe_audit import LEVELS, Audit, Recall, audit, edited
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, run
from gristmill.stages.minhash import MinHash


def make(folder: Path, minhash: str) -> Path:
    """A run over 40 documents of random words and three near copies of one of them."""
    rng = np.random.default_rng(0)
    words = [f"{a}{b}ing" for a in ("bl", "cr", "dr", "fl", "gr", "pl") for b in ("a", "e", "i", "o", "u", "ea", "oo")]
    texts = ["the word and " + " ".join(rng.choice(words, 200)) for _ in range(40)]
    copies = [f"{texts[0]} and more {i}" for i in ("of this", "with that", "to be")]
    rows = [{"id": f"doc-{i}", "text": text} for i, text in enumerate([*texts, *copies, "too short"])]
    for i in range(2):
        (folder / f"part-{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[i::2]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: a\nsources:\n  web: {{files: '{folder}/*.jsonl'}}\nstages:\n  - gopher_quality: {{min_words: 5}}\n"
        f"  - minhash: {minhash}\n"
    )
    with Display() as display:
        run(recipes.load(recipe), str(folder / "run"), Options(debug=True), display)
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("audit"), "{}")


def test_recall_is_what_the_bands_promise(finished: Path) -> None:
    found = audit(open_run(finished), documents=20, pairs=50)
    assert [row.level for row in found.recall] == list(LEVELS)
    assert all(row.within for row in found.recall)
    assert found.recall[-1].found == 1
    assert found.compared == found.removed == 3
    assert min(found.similarities) > 0.8
    assert audit(open_run(finished), documents=20, pairs=50) == found


def test_a_stage_that_finds_too_little_is_shown_up(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MinHash, "_roots", lambda self, tables, starts, alive, scope, ranges: (
        np.arange(int(starts[-1]), dtype=np.uint32), {}
    ))  # fmt: skip
    found = audit(open_run(finished), documents=20, pairs=0)
    assert not found.recall[-1].within


def test_verified_edges_are_expected_to_miss_what_is_below(tmp_path: Path) -> None:
    found = audit(open_run(make(tmp_path, "{verify: jaccard, min_similarity: 0.75}")), documents=20)
    assert [row.promised for row in found.recall[:4]] == [0, 0, 0, 0]
    assert [row.found for row in found.recall[:4]] == [0, 0, 0, 0]
    assert found.recall[-1].found == 1


def test_signatures_that_are_gone_are_made_again(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    before = audit(open_run(tmp_path / "run"), documents=20)
    for path in (tmp_path / "run/02-minhash/sign").glob("*.arrow"):
        path.unlink()
    assert audit(open_run(tmp_path / "run"), documents=20) == before


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_an_edit_reaches_its_similarity(similarity: float) -> None:
    """Of 300 different words, 296 runs of 5: with a run of m new words m + 4 of them change."""
    stage = MinHash(verify="jaccard")
    text = " ".join(f"word{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(300))
    other = edited(text, similarity, 5, np.random.default_rng(0))
    batch = {name: pa.array([""] * 2) for name in ("source", "dump")} | {"doc_id": ["a", "b"], "text": [text, other]}
    a, b = (set(s.values.to_pylist()) for s in stage.sign(pa.RecordBatch.from_pydict(batch))["shingle_set"])
    assert len(a & b) / len(a | b) == pytest.approx(similarity, abs=0.01)


def test_the_command_writes_what_the_report_shows(finished: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["dedupe-audit", str(finished), "--documents", "20"])
    assert shown.exit_code == 0, shown.output
    assert "promised" in shown.stdout
    body = json.loads(CliRunner().invoke(app, ["dedupe-audit", str(finished), "--documents", "20", "--json"]).stdout)
    assert body["recall"][9]["found"] == 1
    page = Path(write_report(str(finished), str(tmp_path / "page.html"))).read_text()
    assert "<h4>Audit</h4>" in page


def test_a_run_without_minhash_cannot_be_audited(tmp_path: Path, crawl: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: a\nsources:\n  web: {{files: '{crawl}/readmes/*'}}\nstages:\n  - exact\n")
    with Display() as display:
        run(recipes.load(recipe), str(tmp_path / "run"), Options(debug=True), display)
    with pytest.raises(RunError, match="no stage minhash"):
        audit(open_run(tmp_path / "run"))


def test_a_cluster_shows_its_documents_and_differences(finished: Path) -> None:
    opened = open_run(finished)
    rows = opened.dropped("02-minhash").to_table(columns=["doc_id", "stage", "minhash.cluster"]).to_pylist()
    row = next(row for row in rows if row["stage"] == "minhash")
    found = members(opened, row["minhash.cluster"], 10)
    assert [m.stays for m in found] == [True, False, False, False]
    assert all(m.row["text"] for m in found)
    shown = CliRunner().invoke(app, ["inspect", str(finished), "--cluster", row["minhash.cluster"]])
    assert shown.stdout.count("went") >= 3
    lines = CliRunner().invoke(app, ["inspect", str(finished), "--cluster", row["minhash.cluster"], "--json"]).stdout
    assert len(lines.splitlines()) == 4
    with pytest.raises(RunError, match="no cluster 'nothing'"):
        members(opened, "nothing", 3)


@pytest.mark.parametrize(("found", "within"), [(30, True), (28, True), (25, True), (24, False), (0, False)])
def test_few_copies_are_judged_by_their_own_tail(found: int, within: bool) -> None:
    """Of 30 copies, each found with 0.97, 25 or fewer are found once in 541 times, 24 or fewer once in 4,300."""
    promised = 0.97
    assert Recall(0.85, 30, 0.86, found / 30, promised, 0.0).within is within


def test_nothing_to_compare_is_said() -> None:
    none = Audit("minhash", 14, 8, "none", None, [], 0, 0, 0)
    assert np.isnan(none.at_least(0.5))
