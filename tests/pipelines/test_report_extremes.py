"""The report of hostile texts, missing parts and runs of odd sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.report.samples import TEXT_CHARS, sample, spread_order
from gristmill.pipelines.report.scan import scan
from gristmill.pipelines.report.write import embedded, write_report
from gristmill.stages.documents import Measure, linear_edges
from gristmill.stages.ledger import Amount, Histogram, ShardLedger, StageLedger

sys.path.append(str(Path(__file__).parent))
import big_run
from fake_run import HOSTILE, FakeRun
from report_page import LONG_LINE, STAGES, funnel_of, report


def test_hostile_documents_stay_text(folder, page):
    data = page.data
    assert any(HOSTILE in s["text"] for s in data["samples"])
    assert HOSTILE in data["operations"]["problems"][0]["problem"]
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert not {"img", "iframe", "object", "embed", "link", "base", "form action"} & set(tags)
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not {"src", "style", "action"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "owned" in page.text  # the problem's text, shown


def test_every_name_from_a_run_is_escaped(tmp_path):
    evil = '"><img src=x onerror=alert(1)>'
    folder = FakeRun(documents=8, sources=(evil,)).build(tmp_path / "run")
    (folder / "recipe.yaml").write_text(f"name: '{evil}'\n# </script>{evil}\n")
    card = json.dumps({evil: evil, "figures": {evil: [{evil: evil}]}, "sizes": {evil: 3}})
    for name in ("models/<b>x/card.json", "02-exact/cluster/card.json", "ablation/ranking.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(card)
    (folder / "ablation/<i>evil-seed1").mkdir()
    (folder / "ablation/<i>evil-seed1/metrics.jsonl").write_text('{"step":1,"loss":2}\n')
    found, html = report(folder)
    assert found.data["name"] == evil
    assert not {"img", "b", "i"} & {tag for tag, a in found.elements if a.get("class") != "now"}
    assert "<img" not in html


def test_the_policy_allows_one_script_by_its_hash(page):
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.text() | st.integers(-(2**53), 2**53), lambda inner: st.dictionaries(st.text(), inner)))
def test_embedded_json_cannot_end_its_element(value):
    text = str(embedded({"value": value}))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"value": value}


def test_an_empty_folder_gives_a_page(tmp_path):
    found, _ = report(tmp_path)
    assert "No stage has run yet" in found.text
    assert "Nothing has run yet" in found.text
    assert found.data["warnings"][0].startswith("This run has no ledgers")


def test_a_run_with_no_documents_gives_a_page(tmp_path):
    found, _ = report(FakeRun(documents=0).build(tmp_path / "run"))
    assert funnel_of(found.data)["exact"]["documents"] == 0
    assert "No document was read." in found.text
    assert found.data["samples"] == []


def test_a_run_with_one_document_gives_a_page(tmp_path):
    found, _ = report(FakeRun(documents=1, sources=("docs",)).build(tmp_path / "run"))
    assert funnel_of(found.data)["input"]["documents"] == 2  # and one that was no JSON


@pytest.mark.parametrize("part", ["tokens", "models", "ablation", "inputs"])
def test_a_part_may_be_missing(tmp_path, part):
    parts = frozenset({"tokens", "models", "ablation", "inputs"} - {part})
    found, _ = report(FakeRun(documents=30, parts=parts).build(tmp_path / "run"))
    ids = {a.get("id") for tag, a in found.elements if tag == "section"}
    assert (part in ids) is False
    assert {"funnel", "rules", "samples", "operations"} <= ids


def test_an_unfinished_run_says_so(tmp_path):
    folder = FakeRun(documents=30).build(tmp_path / "run")
    (folder / "02-exact/ledger/part-00003.json").unlink()
    warnings = report(folder)[0].data["warnings"]
    assert any("Segment 02-exact is unfinished: 5 of 6 shards" in w for w in warnings)


def test_a_source_that_is_lost_and_a_stage_that_keeps_nothing_are_warned_of(tmp_path):
    for shard, (source, kept) in enumerate((("good", 90), ("lost", 0))):
        read, left = Amount(documents=100, chars=100, bytes=100), Amount(documents=kept, chars=kept, bytes=kept)
        book = StageLedger(stage="read", read=read, kept=left, dropped={"bad": read - left} if kept < 100 else {})
        ledger = ShardLedger(key="k", segment="01-read", shard=shard, source=source, input="in", stages=[book])
        path = tmp_path / f"01-read/ledger/part-{shard:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ledger.sealed())
    warnings = report(tmp_path)[0].data["warnings"]
    assert "Nothing of source lost is left." in warnings
    assert not any("good" in w for w in warnings)


def test_no_run_no_report(tmp_path):
    with pytest.raises(RunError, match="There is no run folder"):
        write_report(tmp_path / "nowhere", stages=STAGES)
    assert not (tmp_path / "nowhere").exists()


def test_another_place_for_the_page(tmp_path):
    path = write_report(FakeRun(documents=6).build(tmp_path / "run"), tmp_path / "x" / "page.html", stages=STAGES)
    assert Path(path) == tmp_path / "x" / "page.html"
    assert not (tmp_path / "run/report.html").exists()


def test_many_stages_and_sources_stay_small(tmp_path):
    edges = Measure("m.x", "words", linear_edges(0, 1))
    for shard in range(100):
        books = []
        for i in range(10):
            all_of_them = Amount(documents=1000, chars=9000, bytes=9000)
            book = StageLedger(stage=f"stage_{i}", read=all_of_them, kept=all_of_them)
            book.histograms[f"m{i}.x"] = Histogram.empty(edges)
            books.append(book)
        ledger = ShardLedger(key="k", segment="01-x", shard=shard, source=f"s{shard}", input="in", stages=books)
        path = tmp_path / f"01-x/ledger/part-{shard:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ledger.sealed())
    found, html = report(tmp_path)
    assert len(found.data["funnel"]["rows"]) == 11 * 101
    assert len(html) < 1_000_000


def test_samples_are_bounded_and_fair(folder):
    whole = sample(open_run(folder))
    kinds = {(s["stage"], (s["reasons"] or [None])[0], s["source"]) for s in whole.documents}
    some = sample(open_run(folder), budget=30_000)
    assert {(s["stage"], (s["reasons"] or [None])[0], s["source"]) for s in some.documents} == kinds
    assert sum(len(s["text"].encode()) for s in some.documents) < 30_000
    assert len(some.documents) + some.left_out == len(whole.documents)
    (long,) = (s for s in whole.documents if s["text"].startswith("grain grain"))
    assert len(long["text"]) == TEXT_CHARS
    assert long["more_chars"] == len(LONG_LINE) - TEXT_CHARS


def test_spread_order_is_a_permutation_spread_out():
    assert spread_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    for count in (0, 1, 5, 100):
        assert sorted(spread_order(count)) == list(range(count))


def test_a_large_run_is_looked_at_in_parts(tmp_path):
    """What the page costs grows with the number of shards, not of documents: samples and scans are bounded. The same at
    1,000 shards of 10,000 documents takes seconds: `python tests/pipelines/big_run.py FOLDER 1000 10000`."""
    folder = big_run.build(tmp_path / "run", shards=60, documents=300)
    found, html = report(folder)
    data = found.data
    assert data["header"]["shards"] == 60
    assert data["header"]["read"] == 60 * 300 + 20  # a record of the first shard of each source is no JSON
    assert len(data["samples"]) < 400
    assert len(html) < 1_500_000
    few = scan(open_run(folder), limit=2_000)
    assert few.looked_at < 4_000 < few.documents
