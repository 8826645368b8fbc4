"""How far a run is, from its folder alone: counts, rates, time left, who works on it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from gristmill.pipelines.lock import RunLock
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.status import Looking, shown, watch
from gristmill.pipelines.tables import duration

LOST = ("part-00000.json", "part-00003.json")


@pytest.fixture
def half(finished_run: Path, tmp_path: Path) -> Path:
    """A run of seven shards whose fourth segment has two left to do; its driver spoke last of two workers."""
    shutil.copytree(finished_run, tmp_path / "run")
    for name in LOST:
        (tmp_path / "run/04-minhash/ledger" / name).unlink()
    phase = {"name": "04-minhash", "done": 5, "total": 7, "documents": 50, "kept": 40, "bytes": 9, "seconds": 2.0}
    said = {"workers": 2, "dashboard": "http://d:8787/status", "phase": phase}
    said["running"] = [{"piece": "docs/part-0.warc.gz", "seconds": 7.5}]
    (tmp_path / "run/driver.json").write_bytes(orjson.dumps(said))
    return tmp_path / "run"


def test_time_left_is_what_the_input_left_takes_at_the_rate_so_far(half: Path) -> None:
    with RunLock(str(half)):
        found = Looking(open_run(half)).status()
    row = next(row for row in found.segments if row.segment == "04-minhash")
    assert (row.done, row.left, row.set_aside, row.shards) == (5, 2, 0, 7)
    sizes = {f"part-{s['index']:05d}.json": s["size"] for s in json.loads((half / "inputs.json").read_text())}
    books = [json.loads(p.read_text()) for p in (half / "04-minhash/ledger").iterdir()]
    seconds = sum(book["seconds"] for book in books)
    left = sum(sizes[name] for name in LOST)
    assert row.eta_s == pytest.approx(left / (sum(sizes.values()) - left) * seconds / 2, abs=0.06)
    assert row.read == sum(book["stages"][0]["read"]["documents"] for book in books)
    assert row.kept_share == pytest.approx(row.kept / row.read, abs=1e-4)
    assert row.docs_per_s == pytest.approx(row.read / seconds, abs=1e-3)
    assert [stage.stage for stage in row.by_stage] == ["minhash", "pii"]
    assert sum(stage.dropped for stage in row.by_stage) == row.read - row.kept
    every = [json.loads(p.read_text()) for p in half.glob("*/ledger/*.json")]
    assert found.slowest[0]["seconds"] == round(max(book["seconds"] for book in every), 3)
    assert found.driver is not None
    assert found.driver["alive"]


def test_people_see_the_driver_its_dashboard_and_what_runs(half: Path) -> None:
    screen = Console(file=io.StringIO(), width=200)
    with RunLock(str(half)):
        screen.print(shown(Looking(open_run(half)).status()))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "works on it, 2 workers",
        "http://d:8787/status",
        "Now 04-minhash: 5 of 7, 25 docs/s",
        "7.500",
        "5/7",
    ):
        assert words in text


def test_a_run_that_nobody_works_on_says_so_and_has_no_time_left(half: Path) -> None:
    found = Looking(open_run(half)).status()
    assert found.driver is not None
    assert not found.driver["alive"]
    assert next(row for row in found.segments if row.left).eta_s is None
    screen = Console(file=io.StringIO(), width=200)
    screen.print(shown(found))
    assert "nobody works on it. Run the recipe again" in screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_given_up_shard_is_not_left_but_given_up_and_so_it_is_in_what_follows(half: Path) -> None:
    ledger = half / "02-perplexity/ledger/part-00001.json"
    key = json.loads(ledger.read_text())["key"]
    ledger.unlink()
    for later in ("03-exact", "04-minhash", "tokens"):
        (half / later / "ledger/part-00001.json").unlink()
    (half / "failed").mkdir()
    record = {"segment": "02-perplexity", "part": "part-00001", "path": "p", "stage": "perplexity", "error": "e"}
    record |= {"kind": "killed", "attempts": 3, "key": key}
    (half / "failed/02-perplexity-part-00001.json").write_text(json.dumps(record))
    found = Looking(open_run(half)).status()
    assert [(row.done, row.left, row.set_aside) for row in found.segments] == [
        (7, 0, 0),
        (6, 0, 1),
        (6, 0, 1),
        (4, 2, 1),
        (6, 0, 1),
    ]
    assert [one["error"] for one in found.failed] == ["e"]


def test_watching_ends_when_nobody_works_any_more(half: Path) -> None:
    lock = RunLock(str(half)).__enter__()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            lock.__exit__()

    screen = Console(file=io.StringIO())
    watch(str(half), 0.5, screen, as_lines=True, pause=pause)
    lines = [json.loads(line) for line in screen.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [line["driver"]["alive"] for line in lines] == [True, True, False]
    assert pauses == [0.5, 0.5]
    watch(str(half), 0.5, Console(file=io.StringIO(), width=120, force_terminal=True))


def test_a_duration_is_short() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3723, 360_000)] == ["0:00", "1:00", "1:02:03", "100:00:00"]
