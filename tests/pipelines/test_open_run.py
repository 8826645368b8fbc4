"""A run folder read back: sums that equal its files, missing and damaged parts."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import orjson
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.stages.ledger import Amount, LedgerError, ShardLedger, StageLedger

sys.path.append(str(Path(__file__).parent))
from fake_run import FakeRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return FakeRun().build(tmp_path_factory.mktemp("run") / "run")


def write_ledger(folder: Path, segment: str, shard: int, source: str, *stages: StageLedger) -> None:
    ledger = ShardLedger(key="k", segment=segment, shard=shard, source=source, input="in", stages=list(stages))
    ledger.check("test")
    path = folder / segment / "ledger" / f"part-{shard:05d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ledger.sealed())


def stage(name: str, read: int, kept: int, reason: str = "bad") -> StageLedger:
    """Documents of 10 characters and 20 bytes each."""
    of = [Amount(documents=n, chars=10 * n, bytes=20 * n) for n in (read, kept, read - kept)]
    return StageLedger(stage=name, read=of[0], kept=of[1], dropped={reason: of[2]} if read > kept else {})


def test_the_funnel_equals_the_documents_in_the_files(folder):
    rows = {row.stage: row for row in funnel(open_run(folder)) if row.source is None}
    kept = ds.dataset(folder / "02-exact/kept").to_table(columns=["text"])["text"]
    assert rows["exact"].documents == len(kept)
    assert rows["exact"].chars == pc.sum(pc.utf8_length(kept)).as_py()
    assert rows["exact"].bytes == pc.sum(pc.binary_length(kept)).as_py()
    dropped = ds.dataset(folder / "01-extract/dropped").to_table(columns=["stage"])["stage"].to_pylist()
    between = ds.dataset(folder / "01-extract/kept").count_rows()
    assert rows["fake_quality"].documents == between
    for name in ("read", "fake_language", "fake_quality"):
        assert rows[name].dropped == dropped.count(name)
    assert rows["fake_language"].documents == between + dropped.count("fake_quality")
    assert rows["input"].documents == 241  # 240 and one record that was no JSON
    assert rows["read"].failed == 1
    assert rows["tokenize"].documents + rows["tokenize"].held_out == rows["exact"].documents
    assert rows["tokenize"].dropped == 0


def test_sources_add_up_to_all(folder):
    run = open_run(folder)
    rows = funnel(run)
    assert run.sources == ("docs", "forum", "news")
    for total in (row for row in rows if row.source is None):
        own = [row for row in rows if row.stage == total.stage and row.source is not None]
        for figure in ("documents", "chars", "bytes", "tokens", "dropped", "failed", "held_out"):
            assert sum(getattr(row, figure) for row in own) == getattr(total, figure)
    assert funnel(run, sources=False) == [row for row in rows if row.source is None]


def test_a_stage_for_some_sources_leaves_the_others_as_they_were(tmp_path):
    write_ledger(tmp_path, "01-extract", 0, "books", stage("read", 50, 50), stage("quality", 50, 40))
    write_ledger(
        tmp_path, "01-extract", 1, "web", stage("read", 100, 100), stage("extract", 100, 80), stage("quality", 80, 20)
    )
    rows = [row for row in funnel(open_run(tmp_path)) if row.source is None]
    assert [(row.stage, row.documents) for row in rows] == [
        ("input", 150),
        ("read", 150),
        ("extract", 130),
        ("quality", 60),
    ]
    assert rows[2].chars == 1300
    assert rows[2].stage_share == 0.8
    assert rows[3].kept_share == 0.4


def test_the_recipe_orders_stages_that_no_ledger_has_both_of(tmp_path):
    (tmp_path / "recipe.yaml").write_text("stages:\n- extract: {}\n- poems: {}\n  only: [books]\n")
    write_ledger(tmp_path, "01-extract", 0, "web", stage("read", 9, 9), stage("extract", 9, 8))
    write_ledger(tmp_path, "01-extract", 1, "books", stage("read", 5, 5), stage("poems", 5, 4))
    assert list(open_run(tmp_path).stages()) == ["read", "extract", "poems"]


def test_one_stage_in_two_segments_has_two_rows(tmp_path):
    write_ledger(tmp_path, "01-read", 0, "web", stage("read", 9, 9), stage("url", 9, 7))
    write_ledger(tmp_path, "02-exact", 0, "web", stage("exact", 7, 6), stage("url", 6, 5))
    run = open_run(tmp_path)
    assert [(row.stage, row.documents) for row in funnel(run, sources=False)] == [
        ("input", 9),
        ("read", 9),
        ("url", 7),
        ("exact", 6),
        ("url (02-exact)", 5),
    ]
    assert run.segment_of("url (02-exact)") == "02-exact"
    with pytest.raises(RunError, match=r"no stage 'extract'. It has: read, url, exact, url \(02-exact\)"):
        run.segment_of("extract")


def test_documents_of_all_segments_in_one_table(folder):
    run = open_run(folder)
    dropped = run.dropped().to_table()
    assert dropped.num_rows == sum(row.dropped for row in funnel(run, sources=False))
    assert dropped["exact.copies"].null_count == dropped.num_rows - 17  # measured in the second segment only
    assert run.kept().count_rows() == run.stages()["exact"].kept.documents
    assert run.kept("01-extract").count_rows() == run.stages()["fake_quality"].kept.documents
    assert run.measures["fake_quality.words"].stage == "fake_quality"
    assert sum(run.measures["fake_quality.words"].histogram.kept) == run.stages()["fake_quality"].kept.documents


def test_an_empty_folder_is_an_empty_run(tmp_path):
    run = open_run(tmp_path)
    assert funnel(run) == []
    assert (run.segments, run.recipe, run.inputs, run.stages(), run.measures) == ((), {}, [], {}, {})
    assert (run.token_shards, run.models, run.clusters, run.ranking, run.training()) == ({}, {}, {}, {}, {})
    assert run.kept().to_table().num_rows == run.dropped().to_table().num_rows == 0
    assert "reasons" in run.dropped().schema.names


def test_what_is_no_run_folder_is_told(tmp_path):
    with pytest.raises(RunError, match="There is no run folder at"):
        open_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        open_run(tmp_path / "file")


def test_damaged_files_are_named(tmp_path):
    write_ledger(tmp_path, "01-read", 0, "web", stage("read", 9, 9))
    path = tmp_path / "01-read/ledger/part-00000.json"
    path.write_bytes(path.read_bytes().replace(b'"documents":9', b'"documents":8'))
    with pytest.raises(LedgerError, match=r"01-read/ledger/part-00000.json: the ledger was changed"):
        funnel(open_run(tmp_path))
    (tmp_path / "inputs.json").write_text("[{")
    with pytest.raises(RunError, match=r"inputs\.json is not JSON"):
        _ = open_run(tmp_path).inputs
    (tmp_path / "recipe.yaml").write_text("a: [")
    with pytest.raises(RunError, match=r"recipe\.yaml is not YAML"):
        _ = open_run(tmp_path).recipe


def test_unfinished_files_are_not_seen(tmp_path):
    write_ledger(tmp_path, "01-read", 0, "web", stage("read", 9, 9))
    (tmp_path / "01-read/ledger/.part-00001.json.0a.tmp").write_text("{")
    (tmp_path / "01-read/ledger/.part-00001.json").write_text("{")
    assert [s.shard for s in open_run(tmp_path).shards] == [0]


def test_training_steps(tmp_path):
    path = tmp_path / "ablation/even-seed1/metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"step":1,"loss":2.5}\n{"step":2,"loss":NaN}\n{"step":3,"lo')
    steps = open_run(tmp_path).training()["even-seed1"]
    assert [s["step"] for s in steps] == [1, 2]
    assert math.isnan(steps[1]["loss"])
    path.write_text('{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2: not JSON"):
        open_run(tmp_path).training()


def test_segments_are_in_the_order_of_their_numbers(tmp_path):
    for name in ("10-minhash", "02-exact", "01-read", "tokens", "models", "1-not"):
        (tmp_path / name).mkdir()
    assert open_run(tmp_path).segments == ("01-read", "02-exact", "10-minhash")


def test_a_run_is_read_through_fsspec(folder):
    run = open_run(f"file://{folder}")
    assert run.inputs == orjson.loads((folder / "inputs.json").read_bytes())
    assert run.kept().count_rows() == open_run(folder).kept().count_rows()
