"""The report's panels beside funnel and rules: origins, models, duplicates, mixtures, operations."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from gristmill.pipelines.faults import Failed, FailedShard
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.report import charts
from gristmill.pipelines.report.dedupe import duplicates
from gristmill.pipelines.report.limits import StageRules
from gristmill.pipelines.report.operations import operations, timeline, times
from gristmill.pipelines.report.samples import sample
from gristmill.pipelines.report.scored import at_limit, scored
from gristmill.pipelines.report.write import write_report
from gristmill.stages.documents import Rule

sys.path.append(str(Path(__file__).parent))
from fake_run import HOSTILE
from report_page import Page, build, report

# Origins


@pytest.mark.parametrize(("panel", "column", "name"), [("dumps", "dump", str), ("months", "date", lambda d: d[:7])])
def test_dumps_and_months_before_and_after(folder, page, panel, column, name):
    run = open_run(folder)
    for kept, dataset in ((True, run.kept()), (False, run.dropped())):
        expected = Counter(name(value) for value in dataset.to_table(columns=[column])[column].to_pylist())
        found = {row["name"]: row["kept" if kept else "dropped"] for row in page.data["scan"][panel]}
        assert {k: v for k, v in found.items() if v} == expected
    assert page.data["scan"]["kept"] == run.kept().count_rows()
    assert page.data["scan"]["dropped"] == run.dropped().count_rows()


def test_runs_whose_dropped_documents_have_no_dump(tmp_path):
    folder = build(tmp_path / "run")
    for path in (folder / "01-extract/dropped").iterdir():
        pq.write_table(pq.read_table(path).drop_columns(["dump", "date"]), path)
    data = report(folder)[0].data
    assert sum(row["kept"] for row in data["scan"]["dumps"]) == open_run(folder).kept().count_rows()


def test_inputs_by_source(folder, page):
    listing = json.loads((folder / "inputs.json").read_text())
    assert [row["source"] for row in page.data["inputs"]] == ["docs", "forum", "news"]
    for row in page.data["inputs"]:
        own = [entry for entry in listing if entry["source"] == row["source"]]
        assert (row["files"], row["shards"], row["bytes"]) == (2, 2, sum(entry["size"] for entry in own))
        assert row["first"] == own[0]["path"]


# Models


def test_documents_at_a_limit_are_the_nearest_ones(folder):
    run = open_run(folder)
    found = list(at_limit(run, "fake_quality", "fake_quality.words", 20))
    kept = run.kept().to_table(columns=["fake_quality.words"])["fake_quality.words"].to_numpy()
    gone = ds.dataset(folder / "01-extract/dropped").to_table(columns=["fake_quality.words"])["fake_quality.words"]
    values = np.concatenate([kept, gone.drop_null().to_numpy()])
    below, above = np.sort(values[values < 20])[-3:], np.sort(values[values >= 20])[:3]
    assert [d["value"] for d in found] == [*below, *above]
    assert [d["kept"] for d in found][:3] == [False] * 3
    assert all(len(d["text"].split()) == d["value"] for d in found)
    assert {"too_few_words"} <= {reason for d in found[:3] for reason in d["reasons"]}


def test_head_middle_and_tail(folder):
    run = open_run(folder)
    rule = Rule("unsure_language", "language_score", at_least=0.3)
    rules = {"fake_language": StageRules("perplexity", (), (rule,), {}), "fake_quality": StageRules("c4", (), (), {})}
    counts = {"fake_language.bucket": {"tail": 3, "head": 5, "": 1, "middle": 4}}
    (found,) = scored(run, rules, counts)
    assert found["buckets"] == [("head", 5), ("middle", 4), ("tail", 3), ("not scored", 1)]
    assert (found["limit"], found["side"], found["measure"]) == (0.3, "at_least", "language_score")
    assert [d["value"] < 0.3 for d in found["examples"]] == [True] * 3 + [False] * 3


def test_a_real_run_shows_what_its_models_said(finished_run, tmp_path):
    found = Page(Path(write_report(finished_run, tmp_path / "page.html")).read_text("utf-8"))
    stages = {entry["stage"]: entry for entry in found.data["scored"]}
    kept = open_run(finished_run).kept().to_table(columns=["perplexity.bucket", "classifier.score"])
    assert dict(stages["perplexity"]["buckets"]) == {
        name or "not scored": count for name, count in Counter(kept["perplexity.bucket"].to_pylist()).items()
    }
    lowest = np.sort(kept["classifier.score"].to_numpy())[:3]
    assert [d["value"] for d in stages["classifier"]["examples"]] == pytest.approx(list(lowest))
    originals = [s for s in found.data["samples"] if "html" in s]
    assert originals
    assert all(s["source"] == "docs" and "<" in s["html"] for s in originals)
    assert found.data["operations"]["timeline"]["rows"][0]["segment"] == "01-extract"
    assert found.data["operations"]["segments"][0]["memory_bytes"] > 50_000_000


def test_samples_without_their_input(finished_run, tmp_path):
    copy = Path(shutil.copytree(finished_run, tmp_path / "run"))
    listing = (copy / "inputs.json").read_text().replace(".warc.gz", ".gone.gz")
    (copy / "inputs.json").write_text(listing)
    assert not any("html" in s for s in sample(open_run(copy)).documents)


# Duplicates


def test_copies_by_dump_and_of_the_biggest_clusters(folder):
    found = duplicates(open_run(folder), "02-exact", "exact")
    gone = ds.dataset(folder / "02-exact/dropped").to_table(columns=["dump", "exact.cluster"]).to_pylist()
    dump_of = {d["doc_id"]: d["dump"] for d in ds.dataset(folder / "02-exact/kept").to_table().to_pylist()}
    expected = Counter((row["dump"], dump_of[row["exact.cluster"]]) for row in gone)
    assert {(a, b): n for a, b, n in found.dumps} == expected
    (size,) = Counter(row["exact.cluster"] for row in gone).values()
    assert [pair["size"] for pair in found.pairs] == [size + 1] * 2  # two copies of the only cluster


def test_texts_that_were_not_sampled_come_from_the_segment_before(tmp_path):
    folder = build(tmp_path / "run")
    for path in (folder / "02-exact/dropped").iterdir():
        table = pq.read_table(path)
        texts = pa.nulls(table.num_rows, pa.string())
        pq.write_table(table.set_column(table.schema.names.index("text"), "text", texts), path)
    found = duplicates(open_run(folder), "02-exact", "exact")
    assert [pair["same"] for pair in found.pairs] == [1, 1]


# Mixtures


def test_epochs_are_tokens_trained_on_of_those_there(folder, page):
    manifest = json.loads((folder / "tokens/shards.json").read_text())
    there: Counter[str] = Counter()
    for shard in manifest["shards"]:
        there[shard["source"]] += shard["tokens"] * (shard["split"] == "train")
    for row in page.data["ablation"]["mixtures"]:
        assert row["epochs"] == pytest.approx({k: n / there[k] for k, n in row["tokens"].items()})


def test_a_suggested_mixture_is_shown(tmp_path):
    folder = build(tmp_path / "run")
    assert report(folder)[0].data["ablation"]["suggested"] is None
    weights = "  docs: {weight: 3}\n  news: {weight: 1}\n"
    text = f"name: suggested\ndescription: Predicted 1.5 {HOSTILE}\nsources:\n{weights}"
    (folder / "ablation/suggested.yaml").write_text(text.replace("\u2028", ""))
    found, html = report(folder)
    assert found.data["ablation"]["suggested"]["weights"] == {"docs": 3, "news": 1}
    assert "docs 75.0 %" in " ".join(found.text.split())
    assert "<img" not in html
    (folder / "ablation/suggested.yaml").write_text(": : no\n -")
    assert "is no mixture file" in report(folder)[0].text


# Operations


def test_times_memory_and_the_timeline(folder):
    run = open_run(folder)
    found = operations(run)
    assert [row["memory_bytes"] for row in found["segments"][:2]] == [305_000_000, 305_000_000]
    assert found["hosts"] == [
        {"host": "mill-1", "shards": 12, "seconds": pytest.approx(14.25), "memory_bytes": 305_000_000}
    ]
    first, last = times(run)
    assert last == 1_800_000_150.0
    assert first == pytest.approx(1_800_000_000.0 - 1.0)
    line = timeline(run)
    assert [row["segment"] for row in line["rows"]] == ["01-extract", "02-exact"]
    assert line["rows"][1]["ends"] == pytest.approx([101 + 10 * i for i in range(6)])
    assert line["seconds"] == pytest.approx(151)
    svg = str(charts.timeline("when", line["rows"], line["seconds"]))
    assert svg.count('class="span"') == 2
    assert "0 s" in svg


def test_ledgers_of_earlier_versions_have_no_timeline(tmp_path):
    run = open_run(build(tmp_path / "run"))
    for shard in run.shards:
        object.__setattr__(shard, "ended", None)
    assert timeline(run) is None
    first, last = times(run)
    assert first is not None
    assert last is not None


def test_shards_that_were_given_up_are_listed(tmp_path):
    folder = build(tmp_path / "run")
    Failed(str(folder)).add(
        FailedShard(
            segment="01-extract", part="part-00004", path=f"in/{HOSTILE}", stage="extract", error="killed its worker",
            kind="killed", attempts=3, key="k", log="last words",
        )
    )  # fmt: skip
    (folder / "driver.json").write_text('{"tried_again": 4}')
    found, html = report(folder)
    (row,) = found.data["operations"]["failed"]
    assert (row["part"], row["attempts"], row["kind"]) == ("part-00004", 3, "killed")
    assert "1 shard given up" in " ".join(found.data["warnings"])
    assert "4 attempts were made again" in found.text
    assert "<img" not in html
