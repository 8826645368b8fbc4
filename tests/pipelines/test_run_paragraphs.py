"""Runs with stages that edit documents by what they decided over all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify


def done(folder: Path, crawl: Path, stages: str, *, debug: bool = True) -> Run:
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: small\nsources:\n  docs: {{files: '{crawl}/docs/*.warc.gz'}}\n"
        f"  readmes: {{files: '{crawl}/readmes/*.jsonl.zst'}}\nstages:\n  - extract: {{favour: recall}}\n"
        f"    only: [docs]\n{stages}"
    )
    with Display() as display:
        run(recipes.load(recipe), str(folder / "run"), Options(debug=debug, workers=2), display)
    return open_run(folder / "run")


STAGES = "  - lines_across: {max_documents: 5}\n    only: [docs]\n  - paragraphs\n  - pii\n"


def test_menus_and_copies_go_and_the_books_balance(tmp_path: Path, crawl: Path) -> None:
    before = done(tmp_path / "before", crawl, "")
    after = done(tmp_path / "after", crawl, STAGES)
    assert verify(after) == []
    lines = Counter(line for text in before.kept().to_table()["text"].to_pylist() for line in set(text.split("\n")))
    left = [
        line
        for text in after.kept().to_table()["text"].to_pylist()
        for line in text.split("\n")
        if any(c.isalnum() for c in line)
    ]
    assert len(left) == len(set(left))
    footer = next(line for line in lines if "All rights reserved" in line)
    assert lines[footer] > 20
    assert footer not in left
    books = after.stages()
    assert books["lines_across"].counters["lines_removed"] >= 20
    assert books["paragraphs"].counters["paragraphs_removed"] == after.clusters["03-paragraphs"]["figures"]["removed"]
    shown = after.clusters["02-lines_across"]["figures"]["commonest"]
    assert footer in [row["text"] for row in shown]
    page = Path(write_report(after.path, str(tmp_path / "page.html"))).read_text()
    assert "All rights reserved" in page


def test_the_same_bytes_on_a_cluster(tmp_path: Path, crawl: Path) -> None:
    one, other = (done(tmp_path / name, crawl, STAGES, debug=name == "one") for name in ("one", "other"))
    files = [
        {
            p.relative_to(r.path): p.read_bytes()
            for kind in ("kept", "dropped")
            for p in Path(r.path).glob(f"*/{kind}/*")
        }
        for r in (one, other)
    ]
    assert len(files[0]) > 10
    assert files[0] == files[1]
