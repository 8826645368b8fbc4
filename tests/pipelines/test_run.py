"""Whole runs in one process: the books balance, work is not done twice, and what was tampered with is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, Outcome, RunError, run
from gristmill.pipelines.status import status
from gristmill.pipelines.verify import verify
from gristmill.stages.ledger import ShardLedger
from gristmill.tokenize.shards import TokenSet

Make = Callable[..., Path]


def do(recipe: Path, out: Path) -> Outcome:
    with Display() as display:
        return run(recipes.load(recipe), str(out), Options(debug=True), display)


def results(out: Path) -> dict[str, bytes]:
    """Every file that must be the same whoever did the work: documents, decisions, models, token shards."""
    kinds = ("kept", "dropped", "cluster", "sign")
    files = [p for kind in kinds for p in out.glob(f"*/{kind}/part-*.parquet")]
    files += [*out.glob("*/sign/*.arrow"), *out.glob("models/*/*.arpa"), *out.glob("models/*/*.bin")]
    files += [
        *out.glob("tokens/*.bin"),
        *out.glob("tokens/*.idx"),
        out / "tokens/shards.json",
        out / "tokens/tokenizer.json",
    ]
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def finished(finished_run: Path) -> Path:
    """A folder with small.yaml and its finished run; tests that change it copy it first."""
    return finished_run.parent


@pytest.fixture
def mine(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    shutil.copytree(finished, tmp_path / "copy")
    return tmp_path / "copy"


def test_the_run_is_sound_and_its_books_balance(finished: Path) -> None:
    opened = open_run(finished / "run")
    assert verify(opened) == []
    for label, book in opened.stages().items():
        book.check(label)
    rows = {row.stage: row for row in funnel(opened) if row.source is None}
    assert rows["input"].documents == rows["read"].documents > 60
    last = list(rows.values())[-1]
    assert last.stage == "tokenize"
    assert last.tokens > 10_000
    assert rows["exact"].dropped >= 3  # a planted copy in each of three files
    kept = opened.kept().to_table(columns=["doc_id", "source", "text"])
    assert kept.num_rows == rows["pii"].documents
    assert len(set(kept["text"].to_pylist())) == kept.num_rows


def test_what_was_dropped_says_why(finished: Path) -> None:
    opened = open_run(finished / "run")
    table = opened.dropped().to_table()
    booked = sum(a.documents for book in opened.stages().values() for a in book.dropped.values())
    held_out = opened.stages()["tokenize"].dropped["holdout"].documents
    assert table.num_rows == booked - held_out
    assert all(reasons for reasons in table["reasons"].to_pylist())
    assert any(text for text in table["text"].to_pylist())


def test_tokens_are_the_kept_documents(finished: Path) -> None:
    tokens = TokenSet.open(str(finished / "run/tokens"))
    kept = open_run(finished / "run").kept().to_table(columns=["doc_id", "source", "text"])
    assert set(tokens.sources) == {"docs", "readmes", "code"}
    held = {doc_id for source in tokens.holdout.values() for doc_id, _, _ in source.documents()}
    assert 0 < len(held) < kept.num_rows / 3
    train = sum(info.documents for info in tokens.manifest.shards if info.split == "train")
    assert train + len(held) == kept.num_rows


def test_the_same_command_again_does_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.stat().st_mtime_ns for p in (finished / "run").rglob("part-*")}
    outcome = do(finished / "small.yaml", finished / "run")
    assert outcome.done == 0
    assert outcome.found > 20
    assert "Nothing to do" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in (finished / "run").rglob("part-*")}
    rows = status(open_run(finished / "run"))
    assert [row.done for row in rows] == [row.shards for row in rows]


def test_another_run_gives_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    do(finished / "small.yaml", tmp_path / "again")
    first, again = results(finished / "run"), results(tmp_path / "again")
    assert first.keys() == again.keys()
    assert [name for name in first if first[name] != again[name]] == []


@pytest.mark.parametrize(
    "lost", ["01-extract/ledger/part-00001.json", "03-exact/kept/part-00002.parquet", "tokens/part-00003.bin"]
)
def test_a_lost_file_is_made_again_and_nothing_else(finished: Path, mine: Path, lost: str) -> None:
    (mine / "run" / lost).unlink()
    outcome = do(mine / "small.yaml", mine / "run")
    assert 1 <= outcome.done <= 2
    assert results(mine / "run") == results(finished / "run")
    assert verify(open_run(mine / "run")) == []


def test_a_changed_limit_redoes_its_stage_and_what_follows(mine: Path) -> None:
    recipe = mine / "small.yaml"
    recipe.write_text(recipe.read_text().replace("max_perplexity: 100000", "max_perplexity: 400"))
    early = {p: p.stat().st_mtime_ns for p in (mine / "run/01-extract").rglob("part-*")}
    models = {p: p.stat().st_mtime_ns for p in (mine / "run/models").rglob("*")}
    before = open_run(mine / "run").stages()["perplexity"]
    do(recipe, mine / "run")
    assert early == {p: p.stat().st_mtime_ns for p in (mine / "run/01-extract").rglob("part-*")}
    assert models == {p: p.stat().st_mtime_ns for p in (mine / "run/models").rglob("*")}
    after = open_run(mine / "run").stages()["perplexity"]
    assert after.read == before.read
    assert after.kept.documents < before.kept.documents
    assert verify(open_run(mine / "run")) == []


def test_going_back_to_the_old_limit_gives_the_old_bytes(finished: Path, mine: Path) -> None:
    recipe = mine / "small.yaml"
    old = recipe.read_text()
    recipe.write_text(old.replace("min_words: 30", "min_words: 200"))
    do(recipe, mine / "run")
    assert results(mine / "run") != results(finished / "run")
    recipe.write_text(old)
    do(recipe, mine / "run")
    assert results(mine / "run") == results(finished / "run")


def test_a_removed_stage_leaves_no_folder_behind(mine: Path) -> None:
    recipe = mine / "small.yaml"
    recipe.write_text(recipe.read_text().replace("  - exact\n", ""))
    do(recipe, mine / "run")
    assert sorted(p.name for p in (mine / "run").iterdir() if p.name[:2].isdigit()) == [
        "01-extract",
        "02-perplexity",
        "03-minhash",
    ]
    assert verify(open_run(mine / "run")) == []


def edit_ledger(path: Path, *, reseal: bool) -> None:
    body = json.loads(path.read_text())
    body["stages"][-1]["kept"]["documents"] += 1
    body["stages"][-1]["read"]["documents"] += 1
    if reseal:
        path.write_bytes(ShardLedger.model_validate(body).sealed())
    else:
        path.write_bytes(orjson.dumps(body))


@pytest.mark.parametrize("reseal", [False, True])
def test_a_tampered_ledger_is_refused(mine: Path, reseal: bool) -> None:
    edit_ledger(mine / "run/03-exact/ledger/part-00000.json", reseal=reseal)
    problems = verify(open_run(mine / "run"))
    assert problems
    assert all("03-exact" in problem or "04-minhash" in problem for problem in problems)


@pytest.mark.parametrize("name", ["02-perplexity/kept/part-00001.parquet", "tokens/part-00001.bin"])
def test_a_flipped_bit_is_found(mine: Path, name: str) -> None:
    path = mine / "run" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert any(
        name.rsplit("/", maxsplit=1)[-1].split(".", maxsplit=1)[0] in problem
        for problem in verify(open_run(mine / "run"))
    )


def test_missing_decisions_are_an_error_not_a_silent_keep(mine: Path) -> None:
    (mine / "run/04-minhash/cluster/part-00000.parquet").unlink()
    (mine / "run/04-minhash/ledger/part-00000.json").unlink()
    with pytest.raises(RunError, match=r"cluster/part-00000\.parquet is missing. Delete 04-minhash/cluster"):
        do(mine / "small.yaml", mine / "run")


def test_foreign_decisions_are_an_error(mine: Path) -> None:
    folder = mine / "run/03-exact/cluster"
    parts = [p for p in sorted(folder.glob("part-*.parquet")) if pq.read_metadata(p).num_rows]
    assert parts, "the planted copies give decisions"
    other = next(p for p in sorted(folder.glob("part-*.parquet")) if p != parts[0])
    shutil.copy(parts[0], other)
    (mine / "run/03-exact/ledger" / f"{other.stem}.json").unlink()
    with pytest.raises(RunError, match=r"decisions for .* name documents that are not there"):
        do(mine / "small.yaml", mine / "run")


def test_broken_inputs_are_counted_and_the_rest_goes_on(tmp_path: Path, crawl: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good = [json.dumps({"id": f"g{i}", "text": f"A good document, number {i}."}).encode() for i in range(5)]
    huge = json.dumps({"id": "huge", "text": "word " * 10_000_000}).encode()  # 50 MB
    lines = [good[0], b"{not json", good[1], b'{"id": "u", "text": "\xff\xfe"}', good[2], huge]
    lines += [json.dumps({"id": "empty", "text": ""}).encode(), good[3], json.dumps({"id": "none"}).encode(), good[4]]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "b.jsonl").write_bytes(b"")
    whole = (crawl / "docs/part-0.warc.gz").read_bytes()
    pages = folder / "pages"
    pages.mkdir()
    (pages / "cut.warc.gz").write_bytes(whole[: len(whole) * 2 // 3])
    (pages / "empty.warc.gz").write_bytes(b"")
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(
        f'name: broken\nsources:\n  lines: {{files: "{folder}/*.jsonl"}}\n  pages: {{files: "{pages}/*.warc.gz"}}\n'
        "stages:\n  - extract: {min_chars: 10}\n    only: [pages]\n"
    )
    do(recipe, tmp_path / "run")
    opened = open_run(tmp_path / "run")
    assert verify(opened) == []
    read = opened.stages("lines")["read"]
    assert read.read.documents == 10
    assert read.kept.documents == 5
    assert read.dropped["too_large"].documents == 1
    assert read.dropped["empty"].documents == 1
    assert sum(a.documents for a in read.failed.values()) == 3
    cut = opened.stages("pages")["read"]
    assert cut.kept.documents >= 5
    assert sum(a.documents for a in cut.failed.values()) == 1
    problems = [problem for ledger in opened.ledgers() for problem in ledger.problems]
    assert any("a.jsonl:2" in problem for problem in problems)
    assert any("cut.warc.gz" in problem for problem in problems)


def test_a_shard_that_cannot_be_read_is_named_and_the_others_finish(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "good.jsonl").write_bytes(b'{"id": "1", "text": "one"}\n')
    (folder / "bad.parquet").write_bytes(b"PAR1 this is no Parquet file")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f'name: r\nsources:\n  mixed: {{files: "{folder}/*"}}\n')
    with pytest.raises(RunError, match=r"1 of 2 pieces .* were given up; the others are done:\n.*bad\.parquet"):
        do(recipe, tmp_path / "run")
    assert len(list((tmp_path / "run/01-read/ledger").glob("*.json"))) == 1
    (folder / "bad.parquet").unlink()
    with Display() as display:
        run(recipes.load(recipe), str(tmp_path / "run"), Options(debug=True, refresh_inputs=True), display)
    assert verify(open_run(tmp_path / "run")) == []
