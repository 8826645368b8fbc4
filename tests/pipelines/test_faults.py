"""What a run does when something breaks: it sets shards aside, goes on as far as it can, and says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import main
from gristmill.pipelines.lock import LockError, RunLock
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, Outcome, RunError, run
from gristmill.pipelines.status import status
from gristmill.pipelines.verify import verify

sys.path.append(str(Path(__file__).parent))
from poison_stage import Fragile


def write_input(folder: Path, name: str, marks: dict[int, str], documents: int = 40) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{marks.get(i, 'good')} document number {i} of {name}" for i in range(documents)]
    lines = [json.dumps({"id": f"{name}-{i}", "text": text}) for i, text in enumerate(texts)]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_recipe(folder: Path, stages: str, sources: tuple[str, ...] = ("a",)) -> Path:
    listed = "".join(f'  {name}: {{files: "{folder}/{name}/*.jsonl"}}\n' for name in sources)
    path = folder / "r.yaml"
    path.write_text(f"name: r\nsources:\n{listed}stages:\n{stages}")
    return path


@pytest.fixture(autouse=True)
def fragile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.STAGES, "fragile", Fragile)


def do(recipe: Path, out: Path, **options: bool) -> Outcome:
    with Display() as display:
        return run(recipes.load(recipe), str(out), Options(debug=True, **options), display)


def test_a_shard_of_poison_is_set_aside_and_taken_up_again_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "a", "good", {3: "RAISE"})
    write_input(tmp_path / "a", "bad", dict.fromkeys(range(40), "RAISE"))
    recipe = write_recipe(tmp_path, "  - fragile\n")
    listed = r"1 of 2 pieces of 01-fragile were given up; the others are done:\n  .*bad\.jsonl: stage fragile: cannot"
    with pytest.raises(RunError, match=listed):
        do(recipe, tmp_path / "run")
    record = json.loads((tmp_path / "run/failed/01-fragile-part-00000.json").read_text())
    assert record["path"].endswith("bad.jsonl")
    assert (record["stage"], record["kind"], record["attempts"]) == ("fragile", "fault", 1)
    (done,) = (tmp_path / "run/01-fragile/ledger").glob("*.json")
    assert done.name == "part-00001.json"
    row = status(open_run(tmp_path / "run"))[0]
    assert (row.done, row.left, row.set_aside) == (1, 0, 1)

    with pytest.raises(RunError, match=r"`--retry-failed` takes up again"):  # a plain start leaves it out
        do(recipe, tmp_path / "run")
    assert "left out, set aside before" in capsys.readouterr().err
    recipe.write_text(recipe.read_text().replace("- fragile", "- fragile: {healed: true}"))  # changes no key
    with pytest.raises(RunError, match="given up"):
        do(recipe, tmp_path / "run")
    outcome = do(recipe, tmp_path / "run", retry_failed=True)
    assert outcome.done == 1
    assert not list((tmp_path / "run/failed").iterdir())
    assert verify(open_run(tmp_path / "run")) == []
    book = open_run(tmp_path / "run").stages()["fragile"]
    assert book.dropped["poison"].documents == 1
    assert book.read.documents == 80


@pytest.mark.end_to_end
def test_a_run_on_workers_loses_one_document_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_input(tmp_path / "a", "a0", {17: "KILL"})
    write_input(tmp_path / "a", "a1", {})
    recipe = write_recipe(tmp_path, "  - fragile\n  - exact\n")
    with Display() as display:
        run(recipes.load(recipe), str(tmp_path / "run"), Options(workers=1), display)
    shown = capsys.readouterr().err
    assert "a0.jsonl: document a0-17 dropped as poison by stage fragile: was killed by SIGKILL" in shown
    assert verify(open_run(tmp_path / "run")) == []
    book = open_run(tmp_path / "run").stages()["fragile"]
    assert (book.read.documents, book.kept.documents) == (80, 79)
    folder = tmp_path / "run/01-fragile"
    first = {p: p.read_bytes() for kind in ("kept", "dropped") for p in (folder / kind).iterdir()}
    for ledger in (folder / "ledger").iterdir():
        ledger.unlink()
    do(recipe, tmp_path / "run")  # in this process, which the document would kill
    assert {p: p.read_bytes() for p in first} == first


def test_what_needs_all_shards_waits_and_the_rest_goes_on(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    write_input(tmp_path / "a", "a1", {})
    write_input(tmp_path / "b", "b0", dict.fromkeys(range(40), "RAISE"))
    recipe = write_recipe(tmp_path, "  - fragile\n  - exact:\n    only: [a]\n  - minhash\n", ("a", "b"))
    with pytest.raises(RunError, match=r"03-minhash \(minhash\) needs all of them, and waits"):
        do(recipe, tmp_path / "run")
    # `exact` compares source a alone, which is complete: it is done for its shards.
    assert len(list((tmp_path / "run/02-exact/ledger").glob("*.json"))) == 2
    assert not (tmp_path / "run/03-minhash").exists()
    recipe.write_text(recipe.read_text().replace("- fragile", "- fragile: {healed: true}"))
    do(recipe, tmp_path / "run", retry_failed=True)
    assert verify(open_run(tmp_path / "run")) == []
    assert open_run(tmp_path / "run").stages()["minhash"].read.documents > 40


def test_poison_found_while_signing_is_dropped_by_the_global_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "a", "a0", {5: "RAISE"})
    write_input(tmp_path / "a", "a1", {})
    exact = recipes.STAGES["exact"]

    class Picky(exact):  # type: ignore[misc,valid-type]
        def sign(self, batch):  # type: ignore[no-untyped-def]
            if any("RAISE" in text for text in batch["text"].to_pylist()):
                raise KeyError("unsigned")
            return super().sign(batch)

    monkeypatch.setitem(recipes.STAGES, "exact", Picky)
    recipe = write_recipe(tmp_path, "  - exact\n")
    do(recipe, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []
    book = opened.stages()["exact"]
    assert book.dropped["poison"].documents == 1
    assert book.kept.documents == 79
    first = {p.name: p.read_bytes() for p in (tmp_path / "run/01-exact/kept").iterdir()}
    for part in (tmp_path / "run/01-exact/ledger").iterdir():
        part.unlink()
    do(recipe, tmp_path / "run")
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/01-exact/kept").iterdir()} == first


def test_a_second_driver_does_nothing(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    recipe = write_recipe(tmp_path, "  - fragile\n")
    with RunLock(str(tmp_path / "run")):
        with pytest.raises(LockError, match=f"process {os.getpid()} on "):
            do(recipe, tmp_path / "run")
        with pytest.raises(SystemExit) as ended:
            main(["run", str(recipe), "--out", str(tmp_path / "run"), "--debug"])
        assert ended.value.code == 1
        assert [p.name for p in (tmp_path / "run").iterdir()] == ["driver.lock"]
    do(recipe, tmp_path / "run")
    assert not (tmp_path / "run/driver.lock").exists()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from gristmill.pipelines.cli import main
main(sys.argv[2:])
"""


@pytest.mark.end_to_end
def test_a_storage_that_takes_no_more_is_one_message_and_the_run_goes_on_later(tmp_path: Path) -> None:
    for name in ("a0", "a1", "a2"):
        write_input(tmp_path / "a", name, {}, 2_000)
    write_input(tmp_path / "a", "b0", {}, 10)
    recipe = write_recipe(tmp_path, "  - gopher_quality: {min_words: 1}\n")
    command = ["run", str(recipe), "--out", str(tmp_path / "run"), "--debug"]
    limited = [sys.executable, "-c", LIMITED, "12000", *command]
    environment = {**os.environ, "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")}
    environment = {name: value for name, value in environment.items() if value}
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"The storage of {tmp_path}/run does not take any more: " in done.stderr
    assert "File too large" in done.stderr
    assert "run the same command again" in done.stderr
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert not (tmp_path / "run/driver.lock").exists()
    again = subprocess.run(
        [sys.executable, "-m", "gristmill.pipelines.cli", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert verify(open_run(tmp_path / "run")) == []


def test_leftovers_of_killed_attempts_are_cleaned(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    recipe = write_recipe(tmp_path, "  - fragile\n")
    left = tmp_path / "run/01-fragile/kept/.part-00000.parquet.0123456789ab.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    do(recipe, tmp_path / "run")
    assert not left.exists()


def test_a_driver_says_where_it_is(tmp_path: Path) -> None:
    write_input(tmp_path / "a", "a0", {})
    do(write_recipe(tmp_path, "  - fragile\n"), tmp_path / "run")
    said = orjson.loads((tmp_path / "run/driver.json").read_bytes())
    assert (said["state"], said["pid"], said["workers"]) == ("ended", os.getpid(), 1)
