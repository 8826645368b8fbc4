"""Runs with a stage that decides group by group over the texts themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines import work
from gristmill.pipelines.open_run import Run, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.write import write_report
from gristmill.pipelines.run import Options, Outcome, RunError, run
from gristmill.pipelines.verify import verify

SPAN = "一字不差 The same words stand on every page of this site, word for word. 🙂"
GROUPED = "{min_bytes: 40, group_bytes: 3000}"  # of six shards of about 900 bytes three and three


def write(folder: Path) -> None:
    folder.mkdir()
    for shard in range(6):
        texts = [f"{chr(65 + shard)}{i}{shard * i}: {'own ' * i}{SPAN}{i}{chr(97 + shard)}" for i in range(8)]
        rows = [{"id": f"p{shard}-{i}", "text": text} for i, text in enumerate(texts)]
        (folder / f"part-{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def go(folder: Path, settings: str, *, debug: bool = True, more: str = "") -> tuple[Run, Outcome]:
    if not folder.exists():
        write(folder)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: small\nsources:\n  web: {{files: '{folder}/*.jsonl'}}\nstages:\n  - normalize\n"
        f"  - substrings: {settings}\n{more}"
    )
    with Display() as display:
        outcome = run(recipes.load(recipe), str(folder / "run"), Options(debug=debug, workers=2), display)
    return open_run(folder / "run"), outcome


def files(run_: Run, *kinds: str) -> dict[Path, bytes]:
    paths = [p for kind in kinds for p in Path(run_.path).glob(f"*/{kind}/*")]
    return {p.relative_to(run_.path): p.read_bytes() for p in paths}


def texts(run_: Run) -> list[str]:
    return list(run_.kept().to_table()["text"].to_pylist())


def cards(run_: Run) -> list[str]:
    return sorted(p.name for p in Path(run_.path).glob("02-substrings/cluster/*.json"))


def test_one_copy_a_group_stays_and_the_books_balance(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_, _ = go(tmp_path / "in", GROUPED, more="  - pii\n")
    said = " ".join(capfd.readouterr().err.split())
    assert "02-substrings: 0.0 MB of text in groups of at most 0.0 MB, 2 in all; a worker needs 0.0 MB" in said
    assert verify(run_) == []
    assert sum(SPAN in text for text in texts(run_)) == 2
    assert cards(run_) == ["card.json", "group-00000.json", "group-00003.json"]
    books = run_.stages()["substrings"]
    figures = run_.clusters["02-substrings"]["figures"]
    assert books.counters["spans_removed"] == figures["spans"] == 48 - 2
    assert books.counters["documents_edited"] == figures["documents_edited"] == 46
    assert books.edited.bytes == figures["spans_bytes"] >= 46 * len(SPAN.encode())
    assert (figures["documents"], figures["groups"]) == (48, 2)
    assert "substrings" in Path(write_report(run_.path, str(tmp_path / "page.html"))).read_text()
    whole, _ = go(tmp_path / "whole", "{min_bytes: 40}")
    assert sum(SPAN in text for text in texts(whole)) == 1


def test_the_same_bytes_on_a_cluster(tmp_path: Path) -> None:
    one, _ = go(tmp_path / "one", GROUPED)
    other, _ = go(tmp_path / "other", GROUPED, debug=False)
    found = files(one, "kept", "dropped")
    assert len(found) == 24
    assert found == files(other, "kept", "dropped")
    decisions = [p for p in Path(one.path).glob("*/cluster/*.parquet")]
    assert len(decisions) == 6
    for path in decisions:
        assert pq.read_table(path) == pq.read_table(Path(other.path) / path.relative_to(one.path))


def test_only_the_group_that_is_missing_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second group fails once, as when its worker is killed; what the first one decided stays."""
    write(tmp_path / "in")
    worked: list[int | None] = []
    true = work.run_cluster

    def failing(order: work.ClusterOrder) -> dict[str, object]:
        worked.append(order.group)
        if order.group == 3 and worked.count(3) == 1:
            raise RuntimeError("no memory")
        return true(order)

    monkeypatch.setattr(work, "run_cluster", failing)
    with pytest.raises(RunError, match=r"1 of 2 pieces .*\n.*part-00003 to part-00005: RuntimeError: no memory"):
        go(tmp_path / "in", GROUPED)
    run_, _ = go(tmp_path / "in", GROUPED)
    assert worked == [0, 3, 3]
    assert texts(run_) == texts(go(tmp_path / "again", GROUPED)[0])


def test_what_a_changed_setting_does_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("run_sign", "run_cluster"):
        true = getattr(work, name)
        monkeypatch.setattr(work, name, lambda order, n=name, f=true: (calls.append(n), f(order))[1])

    def called(settings: str) -> list[str]:
        calls.clear()
        go(tmp_path / "in", settings)
        return sorted(calls)

    assert called(GROUPED) == ["run_cluster"] * 2 + ["run_sign"] * 6
    assert called("{min_bytes: 40, group_bytes: 3000, mode: mark}") == []
    assert called("{min_bytes: 40}") == ["run_cluster"]
    assert called(GROUPED) == ["run_cluster"] * 2  # the cards of the first time are gone with their decisions
    assert called("{min_bytes: 40, group_bytes: 3000, policy: first}") == ["run_cluster"] * 2 + ["run_sign"] * 6


def test_marks_are_a_column(tmp_path: Path) -> None:
    run_, _ = go(tmp_path / "in", "{min_bytes: 40, mode: mark}")
    shares = run_.kept().to_table()["substrings.repeated_chars"].to_pylist()
    assert sum(share > 0 for share in shares) == 47
    assert sum(SPAN in text for text in texts(run_)) == 48


def test_no_source_that_it_applies_to(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write(folder)
    (folder / "other.txt.jsonl").write_text(json.dumps({"id": "o", "text": "alone"}) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"name: small\nsources:\n  web: {{files: '{folder}/part-*.jsonl'}}\n  o: {{files: '{folder}/other*'}}\n"
        "stages:\n  - normalize\n  - substrings: {min_bytes: 4}\n    only: [o]\n"
    )
    with Display() as display:
        run(recipes.load(recipe), str(folder / "run"), Options(debug=True), display)
    assert sum(SPAN in text for text in texts(open_run(folder / "run"))) == 48
