"""A run that begins with a global stage: the input is read twice, and nothing is copied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import app
from gristmill.pipelines.dedupe_audit import audit
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, RunError, run
from gristmill.pipelines.verify import verify

WORDS = [f"{a}{b}ing" for a in ("bl", "cr", "dr", "fl", "gr", "pl") for b in ("a", "e", "i", "o", "u", "ea", "oo")]


def do(folder: Path, stages: str, extra: str = "") -> Run:
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"name: a\nsources:\n  web: {{files: '{folder}/in/*'}}\n{extra}stages:\n{stages}")
    with Display() as display:
        run(recipes.load(recipe), str(folder / "run"), Options(debug=True), display)
    return open_run(folder / "run")


def texts() -> list[str]:
    """40 documents of random words, three near copies of the first, and one whole copy of the second."""
    rng = np.random.default_rng(0)
    own = ["the word and " + " ".join(rng.choice(WORDS, 200)) for _ in range(40)]
    return [*own, *(f"{own[0]} and more {i}" for i in ("of this", "with that", "to be")), own[1]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    rows = [{"id": f"doc-{i}", "text": text} for i, text in enumerate(texts())]
    for i in range(2):
        (tmp_path / f"in/{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[i::2]) + "no record\n")
    return tmp_path


def test_the_books_have_what_was_read_and_what_was_removed(folder: Path) -> None:
    done = do(folder, "  - exact\n  - minhash\n")
    assert done.segments == ("01-exact", "02-minhash")
    assert verify(done) == []
    read, exact = done.stages()["read"], done.stages()["exact"]
    assert (read.read.documents, read.kept.documents, read.failed["not_json"].documents) == (46, 44, 2)
    assert (exact.read.documents, exact.kept.documents) == (44, 43)
    assert done.stages()["minhash"].kept.documents == 40
    assert {row["doc_id"] for row in done.kept().to_table(columns=["doc_id"]).to_pylist()} >= {"doc-7", "doc-38"}


def test_clusters_and_audit_find_their_texts_in_the_input(folder: Path) -> None:
    done = do(folder, "  - minhash: {keep_signatures: false}\n")
    found = audit(done, documents=20, pairs=50)
    assert found.compared == found.removed == 4
    assert min(found.similarities) > 0.8
    assert all(row.within for row in found.recall)
    names = done.kept().to_table(columns=["doc_id", "minhash.cluster_size"]).to_pylist()
    (biggest,) = [row["doc_id"] for row in names if row["minhash.cluster_size"] == 4]
    shown = CliRunner().invoke(app, ["inspect", str(folder / "run"), "--cluster", biggest, "--json"])
    rows = [json.loads(line) for line in shown.output.splitlines()]
    assert len(rows) == 4
    assert all(row["text"].startswith(texts()[0]) for row in rows)
    for path in (folder / "in").iterdir():
        path.unlink()
    shown = CliRunner().invoke(app, ["inspect", str(folder / "run"), "--cluster", biggest])
    assert shown.exit_code == 0
    assert "no longer has its text" in shown.output


def test_groups_read_the_input(folder: Path) -> None:
    done = do(folder, "  - substrings\n")
    assert done.segments == ("01-substrings",)
    assert verify(done) == []


def test_a_file_that_cannot_be_read_waits_or_is_counted(folder: Path) -> None:
    (folder / "in/bad.parquet").write_bytes(b"PAR1 this is no Parquet file")
    with pytest.raises(RunError, match=r"1 of 3 pieces of 01-exact .*\n.*bad\.parquet"):
        do(folder, "  - exact\n")
    done = do(folder, "  - exact\n", "unreadable: count\n")
    assert verify(done) == []
    assert done.stages()["read"].failed["unreadable"].documents == 1
    assert done.stages()["exact"].kept.documents == 43
