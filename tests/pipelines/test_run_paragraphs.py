"""Runs with stages that edit documents by what they decided over all of them."""

from __future__ import annotations

import json
from pathlib import Path

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify

FOOTER = "Copyright 2024. All rights reserved."


def done(folder: Path, stages: str, *, debug: bool = True) -> Run:
    """A run over 40 pages of two sites with one footer, some paragraphs of which are on several pages."""
    folder.mkdir()
    rows = []
    for i in range(40):
        own = [
            f"This is what page {chr(97 + i % 26)}{i // 26 * 'x'} says, and nobody else.",
            f"Shared by the eight pages of group {chr(97 + i // 8)}.",
        ]
        text = "\n".join(["Home | About", *own, FOOTER])
        rows.append({"id": f"p{i}", "text": text, "metadata": {"url": f"https://www.{'ab'[i % 2]}.com/{i}"}})
    for i in range(3):
        (folder / f"part-{i}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[i::3]))
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"name: small\nsources:\n  web: {{files: '{folder}/*.jsonl'}}\nstages:\n  - normalize\n{stages}")
    with Display() as display:
        run(recipes.load(recipe), str(folder / "run"), Options(debug=debug, workers=2), display)
    return open_run(folder / "run")


STAGES = "  - lines_across: {max_documents: 5}\n  - paragraphs\n  - pii\n"


def test_menus_and_copies_go_and_the_books_balance(tmp_path: Path) -> None:
    after = done(tmp_path / "after", STAGES)
    assert verify(after) == []
    left = [line for text in after.kept().to_table()["text"].to_pylist() for line in text.split("\n")]
    assert len(left) == len(set(left)) == 40 + 5
    books = after.stages()
    assert books["lines_across"].counters["lines_removed"] == 2 * 40
    assert books["paragraphs"].counters["paragraphs_removed"] == 5 * 7
    assert books["paragraphs"].counters["paragraphs_removed"] == after.clusters["03-paragraphs"]["figures"]["removed"]
    shown = after.clusters["02-lines_across"]["figures"]["commonest"]
    assert {(row["domain"], row["text"]) for row in shown} >= {("a.com", FOOTER), ("b.com", FOOTER)}
    assert FOOTER in Path(write_report(after.path, str(tmp_path / "page.html"))).read_text()


def test_the_same_bytes_on_a_cluster(tmp_path: Path) -> None:
    one, other = (done(tmp_path / name, STAGES, debug=name == "one") for name in ("one", "other"))
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
