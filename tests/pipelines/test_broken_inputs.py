"""A run over everything that is broken: what is kept, dropped and failed of each file; the rest is complete."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from pathlib import Path

import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.verify import verify
from gristmill.stages.ledger import ShardLedger

sys.path.append(str(Path(__file__).parent))
from broken_inputs import Expected, build

RECIPE = """
name: broken
unreadable: count
sources:
  web: {{files: "{folder}/web"}}
  wet: {{files: "{folder}/wet"}}
  lines: {{files: "{folder}/lines"}}
  tables: {{files: "{folder}/tables"}}
  texts: {{files: "{folder}/texts"}}
stages:
  - extract: {{}}
    only: [web]
  - exact: {{scope: source}}
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Expected], int]:
    """The run, what is expected of it, and by how many kB the memory of this process grew at its peak."""
    folder = tmp_path_factory.mktemp("broken inputs ü")
    expected = build(folder)
    (folder / "r.yaml").write_text(RECIPE.format(folder=folder))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Display() as display:
        run(recipes.load(folder / "r.yaml"), str(folder / "run"), Options(debug=True), display)
    return open_run(folder / "run"), expected, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def name_of(ledger: ShardLedger, expected: dict[str, Expected]) -> str:
    """The expected entry that a shard is of; a bundle has the label of its first file."""
    first = f"{ledger.input} and ".partition(" and ")[0].partition("[")[0]
    (found,) = [name for name in expected if first.endswith(f"/{name}") or f"/{name} and " in ledger.input]
    return found


def test_each_file_gives_what_it_must(broken: tuple[Run, dict[str, Expected], int]) -> None:
    opened, expected, _ = broken
    kept: dict[int, list[tuple[str, str]]] = {}
    for part in opened.parts("kept", opened.segments[0]):
        with opened.open_parquet(part) as file:
            rows = file.read(["doc_id", "text"]).to_pylist()
        kept[int(part[-13:-8])] = [(row["doc_id"], row["text"]) for row in rows]
    seen = set()
    for ledger in opened.ledgers(opened.segments[0]):
        name = name_of(ledger, expected)
        what = expected[name]
        seen.add(name)
        lost: Counter[str] = Counter()
        counters: Counter[str] = Counter()
        for book in ledger.stages:
            for reason, size in (book.dropped | book.failed).items():
                lost[reason] += size.documents
            counters.update(book.counters)
        assert len(kept[ledger.shard]) == len(what.kept), name
        assert all(named in pair for named, pair in zip(what.kept, kept[ledger.shard], strict=True)), name
        assert dict(lost) == what.lost, name
        assert sum(n for key, n in counters.items() if key.startswith("skipped.")) == what.skipped, name
        assert {key: counters[key] for key in what.counted} == what.counted, name
        if what.problem is not None:
            assert any(what.problem in problem for problem in ledger.problems), (name, ledger.problems)
    assert {name for name in expected if not name.startswith("texts/")} | {"texts/a text ü.txt"} == seen


def test_the_rest_of_the_run_is_complete(broken: tuple[Run, dict[str, Expected], int]) -> None:
    opened, _, _ = broken
    assert verify(opened) == []
    assert len(opened.segments) == 2
    assert len(list(opened.ledgers(opened.segments[1]))) == len(opened.inputs)
    book = opened.stages()["exact"]
    before = opened.kept(opened.segments[0]).count_rows()
    assert opened.kept().count_rows() == book.kept.documents == before - book.dropped["exact_duplicate"].documents
    assert {"lying header", "none declared", "0", "96"} <= set(opened.kept().to_table(["doc_id"])["doc_id"].to_pylist())


def test_texts_of_lying_charsets(broken: tuple[Run, dict[str, Expected], int]) -> None:
    opened, _, _ = broken
    rows = opened.kept(opened.segments[0]).to_table(columns=["doc_id", "text"]).to_pylist()
    text = {row["doc_id"]: row["text"] for row in rows}
    for name, part in (
        ("lying header", "Grüße aus Köln."),
        ("lying meta", "Это русский текст"),
        ("meta against header", "Это русский текст"),
        ("none declared", "これは日本語の文章です。"),
        ("brotli", "This is a sentence of the main text"),
        ("both", "This is a sentence of the main text"),
    ):
        assert part in text[name]


def test_bombs_cost_no_memory(broken: tuple[Run, dict[str, Expected], int]) -> None:
    assert broken[2] < 300_000  # for 2 GB of bombs and a line of 100 MB, beyond what it took to make them
