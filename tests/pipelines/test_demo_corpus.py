"""The embedded corpus: three sources from this installation, the same bytes each time, no side effects."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.pipelines import demo_corpus
from gristmill.pipelines.demo_corpus import DemoCorpusSettings, build, module_names, rendered
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import detect_format, read_batches
from gristmill.stages.shards import Shard

SMALL = DemoCorpusSettings(stdlib_modules=12, library_modules=0, code_bytes=100_000, files_per_source=2)


def quiet(_what: str, _done: int, _total: int) -> None:
    pass


def test_three_sources_that_our_readers_read(tmp_path: Path) -> None:
    counts = build(tmp_path, SMALL, quiet)
    for source, pattern in (("docs", "*.warc.gz"), ("readmes", "*.jsonl.zst"), ("code", "*.parquet")):
        files = sorted((tmp_path / source).glob(pattern))
        assert len(files) == 2
        kept = 0
        for path in files:
            state = {"size": path.stat().st_size, "stamp": "", "format": detect_format(str(path))}
            shard = Shard(index=0, source=source, path=str(path), name=path.name, **state)
            books, problems = StageLedger(stage="read"), []
            ids = [i for b in read_batches(shard, books, problems) for i in b["doc_id"].to_pylist()]
            assert len(set(ids)) == len(ids) == books.kept.documents
            assert problems == []
            kept += len(ids)
        assert kept == counts[source] > 2  # how many there are is up to the Python that is installed


def test_the_same_settings_give_the_same_bytes_and_are_not_built_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "a", SMALL, quiet)
    build(tmp_path / "b", SMALL, quiet)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("part-*"))
    assert files
    assert [f for f in files if (tmp_path / "a" / f).read_bytes() != (tmp_path / "b" / f).read_bytes()] == []

    def never(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(demo_corpus, "_write_docs", never)
    assert build(tmp_path / "a", SMALL, quiet)["docs"] > 5


def test_modules_that_open_browsers_or_print_are_left_out() -> None:
    names = module_names(DemoCorpusSettings())
    assert not {"antigravity", "this", "turtle", "idlelib.idle", "__main__"} & set(names)
    assert {"json", "email.message"} <= set(names)


def test_a_module_that_kills_or_fails_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kills_itself.py").write_text("import os; os._exit(3)")
    (tmp_path / "exits.py").write_text("print('noise'); raise SystemExit(1)")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(demo_corpus, "SECONDS_PER_MODULE", 2.0)
    pages = dict(rendered(["textwrap", "kills_itself", "exits", "hangs", "no_such_module", "shlex"]))
    assert {name for name, html in pages.items() if html is None} == {
        "kills_itself",
        "exits",
        "hangs",
        "no_such_module",
    }
    assert "TextWrapper" in str(pages["textwrap"])
    assert "shlex" in str(pages["shlex"])
