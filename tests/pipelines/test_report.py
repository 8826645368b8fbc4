"""The report: figures that equal the ledgers and the files, texts that stay texts, runs with parts missing."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.report import charts
from gristmill.pipelines.report.dedupe import duplicates, pair
from gristmill.pipelines.report.figures import lengths, page_data
from gristmill.pipelines.report.limits import Setting, rules_of
from gristmill.pipelines.report.samples import TEXT_CHARS, sample, spread_order
from gristmill.pipelines.report.scan import registered_domain, scan
from gristmill.pipelines.report.what_if import what_ifs
from gristmill.pipelines.report.write import duration, embedded, percent, size, write_report
from gristmill.stages.documents import Measure, Rule, linear_edges
from gristmill.stages.ledger import Amount, Histogram, ShardLedger, StageLedger

sys.path.append(str(Path(__file__).parent))
from fake_run import HOSTILE, FakeExact, FakeLanguage, FakeQuality, FakeRun

STAGES = {"fake_language": FakeLanguage, "fake_quality": FakeQuality, "exact": FakeExact}
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
LONG_LINE = "grain " * 2000


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.json = ""
        self._inside: str | None = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else None
        if dict(attrs).get("id") == "data":
            self._inside = "data"

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "data":
            self.json += data
        elif self._inside is None:
            self.text += data

    @property
    def data(self):
        return json.loads(self.json)


def report(folder: Path) -> tuple[Page, str]:
    path = write_report(folder, stages=STAGES)
    html = Path(path).read_text("utf-8")
    return Page(html), html


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    extra = (HOSTILE * 3, HOSTILE + " mill stone of the river " * 10, LONG_LINE)
    return FakeRun(extra_texts=extra).build(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def page(folder):
    return report(folder)[0]


def funnel_of(data, source=None):
    rows = [dict(zip(data["funnel"]["columns"], row, strict=True)) for row in data["funnel"]["rows"]]
    return {row["stage"]: row for row in rows if row["source"] == source}


# Figures


def test_the_funnel_on_the_page_equals_ledgers_and_files(folder, page):
    rows = funnel_of(page.data)
    for label, book in open_run(folder).stages().items():
        kept = {k: rows[label][k] for k in ("documents", "chars", "bytes", "tokens")}
        assert kept == book.kept.model_dump()
    texts = ds.dataset(folder / "02-exact/kept").to_table(columns=["text"])["text"]
    assert rows["exact"]["documents"] == len(texts)
    assert rows["exact"]["bytes"] == pc.sum(pc.binary_length(texts)).as_py()
    assert f"{rows['exact']['bytes']:,}" in page.text
    assert f"{rows['tokenize']['tokens']:,}" in page.text
    for source in ("docs", "forum", "news"):
        own = ds.dataset(folder / "02-exact/kept").count_rows(filter=ds.field("source") == source)
        assert funnel_of(page.data, source)["exact"]["documents"] == own


@pytest.mark.parametrize(
    ("measure", "stage"),
    [
        ("language_score", "fake_language"),
        ("fake_quality.words", "fake_quality"),
        ("fake_quality.mean_word_length", "fake_quality"),
    ],
)
def test_rule_panels_equal_the_files(folder, page, measure, stage):
    """Kept by a stage: documents that were kept, or that a later stage dropped."""
    (panel,) = (m for m in page.data["measures"] if m["measure"] == measure)
    last = ["fake_language", "fake_quality"][["fake_language", "fake_quality"].index(stage) + 1 :]
    kept = ds.dataset(folder / "01-extract/kept").to_table(columns=[measure])[measure].to_pylist()
    dropped = ds.dataset(folder / "01-extract/dropped").to_table(columns=["stage", "reasons", measure]).to_pylist()
    kept += [d[measure] for d in dropped if d["stage"] in last]
    own = [d for d in dropped if d["stage"] == stage]
    for side, values in (("kept", kept), ("dropped", [d[measure] for d in own])):
        known = np.array([v for v in values if v is not None])
        edges = [-np.inf, *panel["edges"], np.inf]
        expected = [int(((known >= a) & (known < b)).sum()) for a, b in itertools.pairwise(edges)]
        assert panel[side] == expected, side
    assert panel["missing"] == sum(v is None for v in kept) + sum(d[measure] is None for d in own)
    for limit in panel["limits"]:
        broken = [d["reasons"] for d in own if limit["reason"] in d["reasons"]]
        assert limit["breaks"] == len(broken) > 0
        assert limit["only"] == sum(len(reasons) == 1 for reasons in broken)
        assert limit["booked"] == sum(reasons[0] == limit["reason"] for reasons in broken)
        assert limit["low"][limit["now_at"]] == limit["high"][limit["now_at"]] == len(kept)


def test_reasons_are_the_ledgers_own(folder, page):
    rows = {(r["stage"], r["reason"]): r for r in page.data["reasons"]}
    assert rows["read", "bad_json"]["kind"] == "failed"
    assert rows["tokenize", "holdout"]["kind"] == "held out"
    for label, book in open_run(folder).stages().items():
        for reason, amount in book.dropped.items():
            assert rows[label, reason]["documents"] == amount.documents
            assert rows[label, reason]["chars"] == amount.chars


def test_limits_and_settings_come_from_the_recipe(folder, page):
    limits = {(x["reason"], x["side"]): x for m in page.data["measures"] for x in m["limits"]}
    words = limits["too_few_words", "at_least"]
    assert (words["now"], words["setting"], words["key"]) == (20, "min_words", "fake_quality")
    assert all(isinstance(value, int) for value in words["values"])
    assert words["published"] == "Rae et al. 2021, A1.1"
    length = limits["mean_word_length", "at_most"]
    assert (length["now"], length["setting"]) == (8.0, "max_mean_word_length")
    assert length["values"][:2] == [0, 0.5]
    assert "≥ 20" in page.text
    assert "≤ 900" in page.text


def test_settings_that_this_version_does_not_take_are_told(tmp_path):
    folder = FakeRun(documents=12).build(tmp_path / "run")
    recipe = (folder / "recipe.yaml").read_text().replace("min_words: 20", "min_wrods: 20")
    (folder / "recipe.yaml").write_text(recipe)
    data = report(folder)[0].data
    assert any("limits of stage fake_quality are not drawn" in w for w in data["warnings"])
    assert [len(m["limits"]) for m in data["measures"] if m["stage"] == "fake_language"] == [1]


def test_a_setting_is_found_only_where_the_limit_follows_it(tmp_path):
    class Odd(FakeQuality):
        other: int = 20  # the same value, and no limit

        def rules(self):
            return (Rule("a", "m", at_least=self.min_words), Rule("b", "m", at_most=self.max_words * 2))

    folder = FakeRun(documents=12).build(tmp_path / "run")
    found, problems = rules_of(open_run(folder), {"fake_quality": Odd})
    assert problems == []
    assert found["fake_quality"].settings == {("a", "at_least"): Setting("min_words", True)}


def test_scan_counts_languages_and_domains(folder, page):
    kept = open_run(folder).kept().to_table(columns=["language", "url", "dump"]).to_pylist()
    dropped = open_run(folder).dropped().to_table(columns=["language", "url"]).to_pylist()
    rows = {r["name"]: r for r in page.data["scan"]["languages"]}
    for language in ("en", "de", "zh", "ar"):
        assert rows[language]["kept"] == sum(d["language"] == language for d in kept)
        assert rows[language]["dropped"] == sum(d["language"] == language for d in dropped)
    domains = {r["name"]: r for r in page.data["scan"]["domains"]}
    assert domains["bread.co.uk"]["kept"] == sum("//www.bread.co.uk/" in (d["url"] or "") for d in kept)
    assert domains["bread.co.uk"]["dropped"] == sum("//www.bread.co.uk/" in (d["url"] or "") for d in dropped)
    assert sum(r["kept"] for r in page.data["scan"]["dumps"]) == len(kept)


def test_a_scan_is_bounded(folder):
    found = scan(open_run(folder), limit=40)
    assert 0 < found.looked_at < found.documents
    assert sum(found.languages[True].values()) + sum(found.languages[False].values()) == found.looked_at


@pytest.mark.parametrize(
    ("host", "domain"),
    [("www.bread.co.uk", "bread.co.uk"), ("a.b.example.org", "example.org"), ("10.0.0.1", "10.0.0.1"), ("x", "x")],
)
def test_registered_domains(host, domain):
    assert registered_domain(host) == domain


def test_tokens_dedupe_models_and_operations(folder, page):
    data = page.data
    books = open_run(folder).stages()
    assert data["tokens"]["total"] == books["tokenize"].kept.tokens == data["header"]["tokens"]
    assert sum(count for _, count in data["tokens"]["lengths"]["columns"]) == books["tokenize"].kept.documents
    assert data["clusters"]["02-exact"]["sizes"] == [["17", 1]]
    assert data["models"]["quality"]["recall"] == 0.87
    stage = next(s for s in data["operations"]["stages"] if s["stage"] == "fake_quality")
    assert stage["seconds"] == books["fake_quality"].seconds == 5.25
    assert stage["mb_per_s"] == pytest.approx(books["fake_quality"].read.bytes / 5.25 / 1e6)
    assert data["operations"]["slow"][0]["shard"] == 5
    assert "Stage read failed on 1 document." in data["warnings"][0]


def test_models_of_many_languages_are_one_table(tmp_path):
    """A row a language, with the percentiles of its own documents; one language is shown as any card."""
    folder = FakeRun(documents=30).build(tmp_path / "run")
    names = {"en": 10.0, "de": 20.0, "<b>": 30.0}
    languages = {
        name: {
            "documents": 7_000 + i, "bytes": 2_500_000, "estimate": {"kept": [10, 20, 12]},
            "held_out": {"documents": 9, "perplexity": 123.5 + i},
            "percentiles": [first * 100 + at for at in range(101)] if name != "de" else [],
        }
        for i, (name, first) in enumerate(names.items())
    }  # fmt: skip
    (folder / "models/by_language").mkdir()
    card = {"kind": "kenlm", "languages": languages, "languages_skipped": {"ja": 77_777}}
    (folder / "models/by_language/card.json").write_text(json.dumps(card))
    html = report(folder)[1]
    section = html[html.index('<section id="models">') :]
    rows = {row.split("<bdi>")[1].split("</bdi>")[0]: row for row in section.split("<tr>") if "<td><bdi>" in row}
    assert {"en", "de", "&lt;b&gt;"} <= set(rows)
    cells = re.findall(r'data-v="([^"]*)"', rows["en"].split("</tr>")[0])
    assert [float(c) for c in cells] == [7000, 2.5, 42, 123.5, 1005, 1030, 1050, 1060, 1095]
    assert rows["de"].split("</tr>")[0].count(">–<") == 5
    assert "77,777" in section


# Duplicates


def test_copies_by_source(folder, page):
    card = page.data["clusters"]["02-exact"]
    dropped = ds.dataset(folder / "02-exact/dropped").to_table(columns=["source", "exact.cluster"]).to_pylist()
    expected: dict[tuple[str, str], int] = {}
    for row in dropped:
        key = row["source"], row["exact.cluster"].split("-")[0]
        expected[key] = expected.get(key, 0) + 1
    assert {(a, b): n for a, b, n in card["matrix"]} == expected
    assert card["pairs"][0]["same"] == 1
    assert card["pairs"][0]["parts"][0][1].startswith("This page has moved.")


def test_a_pair_shows_what_differs():
    same = "the mill turns. " * 60
    copy = {"doc_id": "a", "source": "s", "text": f"Note. {same}And then it stopped."}
    stays = {"doc_id": "b", "source": "t", "text": f"{same}And then it broke!"}
    found = pair(copy, stays)
    assert found["parts"][0] == ("copy", "Note. ")
    assert [kind for kind, _ in found["parts"]] == ["copy", "same", "cut", "same", "stays", "copy"]
    assert found["parts"][-2:] == [("stays", "broke!"), ("copy", "stopped.")]
    assert found["parts"][2][1] == f"{len(same) + len('And then it ') - 240:,} equal characters"
    assert 0.95 < found["same"] < 1
    assert (found["copy_source"], found["stays_source"]) == ("s", "t")


def test_a_name_that_two_documents_have_is_not_guessed(tmp_path):
    folder = FakeRun(documents=120).build(tmp_path / "run")
    before = duplicates(open_run(folder), "02-exact", "exact")
    stays = before.pairs[0]["stays"]
    path = next(
        p for p in sorted((folder / "02-exact/kept").iterdir()) if stays not in pq.read_table(p)["doc_id"].to_pylist()
    )
    table = pq.read_table(path)
    ids = [stays, *table["doc_id"].to_pylist()[1:]]
    pq.write_table(table.set_column(0, "doc_id", pa.array(ids)), path)
    after = duplicates(open_run(folder), "02-exact", "exact")
    assert {where for _, where, _ in after.matrix} == {"unknown"}
    assert after.pairs == []
    assert duplicates(open_run(folder), "01-extract", "read").matrix == []


# Ablations


def test_the_fake_ranking_is_what_the_trainer_writes(folder):
    pytest.importorskip("torch")
    from gristmill.trainer.ranking import Ranking

    found = Ranking.load(folder / "ablation/ranking.json")
    assert [row.mixture for row in found.mixtures] == ["curriculum", "docs_heavy", "uniform"]


def test_ranking_curves_and_diets(folder, page):
    data = page.data["ablation"]
    ranking = json.loads((folder / "ablation/ranking.json").read_text())
    for row, written in zip(data["mixtures"], ranking["mixtures"], strict=True):
        assert row["score"] == written["score"]
        assert row["points"] == [r["score"] for r in ranking["runs"] if r["mixture"] == row["mixture"]]
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert f"{row['score']['mean']:.4f} ({row['score']['low']:.4f} to {row['score']['high']:.4f})" in page.text
    curve = data["curves"]["curriculum-seed1"]
    assert (curve["mixture"], curve["seed"], curve["steps"], curve["skipped"]) == ("curriculum", 1, 200, 1)
    assert len(curve["points"]) == 199  # the loss of one step is no number
    (diet,) = (d for d in data["diets"] if d["mixture"] == "curriculum")
    assert diet["ends"][-1] == 200 * 4096
    half = next(i for i, end in enumerate(diet["ends"]) if end > 100 * 4096)
    assert diet["shares"]["docs"][: half - 1] == [1.0] * (half - 1)
    assert diet["shares"]["news"][half + 1 :] == [1.0] * (len(diet["ends"]) - half - 1)


@pytest.mark.parametrize(
    ("tied", "verdict"),
    [
        ([True, False], "Best: a. The tests tell it apart from every other mixture."),
        ([True, True], "Best mean: a. It cannot be told apart from b."),
        ([True], "Only a was scored: there is nothing to compare it with."),
    ],
)
def test_verdicts_claim_no_more_than_the_tests(tmp_path, tied, verdict):
    rows = [{"mixture": "ab"[i], "rank": i + 1, "tied_with_best": t} for i, t in enumerate(tied)]
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation/ranking.json").write_text(json.dumps({"mixtures": rows}))
    found, _ = report(tmp_path)
    assert found.data["ablation"]["verdict"] == verdict
    assert verdict in found.text


@pytest.mark.parametrize("ranking", ["{}", "[]", '{"mixtures": null, "pairs": [{}], "runs": [{}], "notes": null}'])
def test_an_ablation_with_little_in_it(tmp_path, ranking):
    (tmp_path / "ablation/x").mkdir(parents=True)
    (tmp_path / "ablation/ranking.json").write_text(ranking)
    (tmp_path / "ablation/x/metrics.jsonl").write_text('{"loss": 1}\n{}\n')
    assert "There is no ranking yet" in report(tmp_path)[0].text


def test_documents_by_length():
    class Tokens:
        def files(self, folder, suffix):
            return ["part-00000.idx", "part-00001.idx"]

        def arrow_column(self, name, column):
            return pa.chunked_array([pa.array([1, 2, 3, 4, 5, 40], pa.uint32())])

    found = lengths(Tokens(), ["part-00000", "part-00001", "part-00002"])
    assert found["columns"] == [("1", 2), ("2", 2), ("4", 4), ("8", 2), ("16", 0), ("32", 0), ("64", 2)]
    assert (found["shards"], found["of"]) == (2, 2)


# Hostile texts


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


# Missing parts, extremes


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


# What another limit would keep


def books_of(values, other, rule, measure):
    """The ledger of a stage with `rule` on values and a second rule that drops where `other` is true."""
    fails = rule.fails(values)
    drop = fails | other
    histogram = Histogram.empty(measure)
    histogram.add(values[~drop], kept=True)
    histogram.add(values[drop], kept=False)
    return StageLedger(
        stage="s",
        read=Amount(documents=len(values)),
        kept=Amount(documents=int((~drop).sum())),
        counters={f"rule.{rule.reason}": int(fails.sum()), f"only.{rule.reason}": int((fails & ~other).sum())},
        histograms={measure.column: histogram},
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-2, 12) | st.sampled_from([0.0, 3.0, 5.0, 10.0, float("nan")]), st.booleans())),
    st.sampled_from([(4.5, None), (None, 6.2), (3.0, None), (None, 5.0), (2.5, 7.5), (-1.0, 11.0)]),
)
def test_what_if_bounds_hold_the_truth(rows, bounds):
    """Against running the rule again with every limit. An upper limit is answered for the values below it."""
    values, other = np.array([v for v, _ in rows], dtype=float), np.array([o for _, o in rows], dtype=bool)
    rule = Rule("r", "s.x", at_least=bounds[0], at_most=bounds[1])
    measure = Measure("s.x", "", linear_edges(0, 10, 10))
    book = books_of(values, other, rule, measure)
    for answer in what_ifs(rule, book.histograms["s.x"], book):
        for limit, low, high in zip(answer.limits, answer.low, answer.high, strict=True):
            least = limit if answer.side == "at_least" else bounds[0]
            most = limit if answer.side == "at_most" else bounds[1]
            passes = ~np.isnan(values) & ~other
            if least is not None:
                passes &= values >= least
            if most is not None:
                exact = answer.side != "at_most" or limit in (answer.now, measure.edges[-1])
                passes &= (values <= most) if exact else (values < most)
            if answer.side == "at_most" and limit > answer.now:
                passes |= ~other & ~rule.fails(values)  # those on the limit in force stay in any case
            truth = int(passes.sum())
            assert low <= truth <= high, (answer.side, limit)
            tighter = limit > answer.now if answer.side == "at_least" else limit < answer.now
            if tighter:
                assert low == high


@pytest.mark.parametrize(
    ("side", "now", "expected"),
    [
        ("at_least", 3, {0: 0, 2: 2, 2.5: 3, 3: 3, 5: 5, 8: 8}),  # at least 2.5 words are at least 3
        ("at_most", 6, {0: -1, 2: 1, 2.5: 2, 5: 4, 6: 6, 8: 7, 10: 10}),  # below 5 is at most 4; 10 is in the last bin
    ],
)
def test_whole_numbers_to_write_into_a_recipe(side, now, expected):
    rule = Rule("r", "s.x", **{side: now})
    book = books_of(np.arange(11.0), np.zeros(11, bool), rule, Measure("s.x", "", (0.0, 2.0, 2.5, 5.0, 8.0, 10.0)))
    (answer,) = what_ifs(rule, book.histograms["s.x"], book)
    edges = book.histograms["s.x"].edges
    assert dict(zip(answer.limits, answer.values(edges, integer=True), strict=True)) == expected
    for value, low, high in zip(answer.values(edges, integer=True), answer.low, answer.high, strict=True):
        truth = int((~Rule("r", "s.x", **{side: value}).fails(np.arange(11.0))).sum())
        assert low == high == truth, value


def test_what_if_by_hand():
    """Ten documents of 0.5, 1.5, ... 9.5 words; at least 3: three are dropped, one of them for another rule too."""
    values, other = np.arange(10) + 0.5, np.zeros(10, dtype=bool)
    other[1] = True
    rule = Rule("r", "s.x", at_least=3)
    book = books_of(values, other, rule, Measure("s.x", "", linear_edges(0, 10, 10)))
    (answer,) = what_ifs(rule, book.histograms["s.x"], book)
    by_limit = {limit: (low, high) for limit, low, high in zip(answer.limits, answer.low, answer.high, strict=True)}
    assert by_limit[3] == (7, 7)
    assert by_limit[5] == (5, 5)
    assert by_limit[2] == (7, 8)  # 2.5 comes back, unless it is the one that the other rule drops
    assert by_limit[0] == (9, 9)  # 0.5 and 2.5 come back
    assert by_limit[9] == (1, 1)


# Charts and words


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (1234567, "1,234,567"), (0.25, "0.25"), (1234.5678, "1,235"), (1e-9, "1e-09"), (3.0, "3")],
)
def test_numbers(value, text):
    assert charts.number(value) == text


def test_shares_sizes_and_times():
    assert [percent(x) for x in (0.0, 0.0001, 0.5, 0.9999, 1.0)] == [
        "0.0 %",
        "< 0.1 %",
        "50.0 %",
        "> 99.9 %",
        "100.0 %",
    ]
    assert [size(x) for x in (0, 999, 1500, 2_500_000, 3.2e12)] == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.2 TB"]
    assert [duration(x) for x in (0.25, 12.34, 75, 7260)] == ["250 ms", "12.3 s", "1 min 15 s", "2 h 1 min"]


def test_scales():
    linear = charts.Scale(0, 10, 100, 200)
    assert [linear(0), linear(5), linear(10)] == [100, 150, 200]
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    log = charts.Scale(1, 1000, 0, 300, log=True)
    assert [log(1), log(10), log(1000)] == [0, 100, 300]
    assert log.ticks() == [1, 10, 100, 1000]
    assert charts.value_scale([1.0, 10.0, 100.0]).log
    assert not charts.value_scale([0.0, 1.0, 2.0]).log
    assert not charts.value_scale([1.0, 2.0, 3.0]).log


def test_curves_take_values_that_are_no_numbers():
    points = {"a": [(1.0, float("nan")), (2.0, 3.0), (3.0, float("inf"))], "b": []}
    assert "NaN" not in (svg := str(charts.curves("loss", points, {"a": 0, "b": 1})))
    assert "inf" not in svg
    assert "No finite values" in charts.curves("loss", {"a": [(1.0, float("nan"))]}, {})
    assert "No finite values" in charts.intervals("score", [charts.Interval("a", float("nan"))], {})


def test_thin_keeps_means():
    line = [(float(i), float(i)) for i in range(1000)]
    thinned = charts.thin(line, 10)
    assert len(thinned) == 10
    assert thinned[0] == (49.5, 49.5)
    assert charts.thin(line[:5], 10) == line[:5]


# In a browser


def _missing_browser() -> str:
    if importlib.util.find_spec("playwright") is None:
        return "playwright for Python is not installed"
    return "" if Path(CHROMIUM).exists() else f"there is no {CHROMIUM} (Debian's package chromium)"


@pytest.fixture(scope="module")
def browser():
    if why := _missing_browser():
        pytest.skip(f"No browser to look at the page with: {why}.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def watch(browser, folder):
    """Opens the page -> page, and a list of everything it should not do: errors, requests, dialogs."""
    path = Path(write_report(folder, stages=STAGES))
    opened = []

    def open_page(width=1280, height=900, scheme="light"):
        tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        tab.set_default_timeout(5_000)
        opened.append(tab)
        wrong: list[str] = []
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        tab.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
        tab.goto(path.as_uri())
        return tab, wrong

    yield open_page
    for tab in opened:
        tab.close()


def test_the_page_works_in_chromium(watch, folder, page, tmp_path):
    tab, wrong = watch()
    data = page.data

    # a slider says what an independent count says
    measure = next(i for i, m in enumerate(data["measures"]) if m["measure"] == "fake_quality.words")
    limit = next(x for x in data["measures"][measure]["limits"] if x["reason"] == "too_few_words")
    at = next(i for i, x in enumerate(limit["limits"]) if x > 45)
    value = limit["limits"][at]
    kept = ds.dataset(folder / "01-extract/kept").to_table(columns=["fake_quality.words"])["fake_quality.words"]
    expected = int((kept.to_numpy() >= value).sum())
    panel = tab.locator(f'.what-if[data-measure="{measure}"][data-limit="0"]')
    panel.locator("input").fill(str(at))
    assert panel.locator(".answer").inner_text().startswith(f"keeps {expected:,} documents, −{len(kept) - expected}")
    assert f"- fake_quality: {{min_words: {int(np.ceil(value))}}}" in panel.locator(".yaml").inner_text()

    # samples: reasons, search, pages
    tab.select_option("[name=reason]", "too_few_words")
    few = [s for s in data["samples"] if "too_few_words" in s["reasons"]]
    assert tab.inner_text("#sample-count") == f"{len(few)} documents"
    assert tab.locator("#sample-list .sample").count() == min(10, len(few))
    tab.select_option("[name=reason]", "")
    tab.fill("[name=text]", "onerror=")
    assert tab.locator("#sample-list pre").first.inner_text().startswith("</script><img src=x onerror=")
    assert tab.locator("#sample-list mark.hit").first.inner_text() == "onerror="
    tab.fill("[name=text]", "")
    tab.select_option("[name=measure]", "fake_quality.words")
    tab.fill("[name=low]", "10")
    tab.fill("[name=high]", "40")
    between = [s for s in data["samples"] if 10 <= (s["measures"].get("fake_quality.words") or 0) <= 40]
    assert tab.inner_text("#sample-count") == f"{len(between)} documents"
    lowest = min(s["measures"]["fake_quality.words"] for s in between)
    assert f"fake_quality.words {lowest:.0f}" in tab.locator("#sample-list .sample").first.text_content()
    tab.select_option("[name=measure]", "")
    assert tab.locator("[name=low]").is_hidden()
    first = tab.locator("#sample-list .sample").first.inner_text()
    tab.click("#sample-after")
    assert tab.inner_text("#sample-page").startswith("page 2 of")
    assert tab.locator("#sample-list .sample").first.inner_text() != first

    # the funnel of one source, a sorted table, logarithmic counts
    tab.select_option("#funnel-source", "news")
    assert f"{funnel_of(data, 'news')['exact']['documents']}" in tab.inner_text("#funnel-table tbody tr:nth-child(5)")
    tab.click("#reasons-table th:nth-child(3) button")
    booked = [int(t.replace(",", "")) for t in tab.locator("#reasons-table td:nth-child(3)").all_inner_texts()]
    assert booked == sorted(booked, reverse=True)
    tab.check("#log-counts")
    assert tab.locator(".histogram .linear").first.is_hidden()

    # what each rule removes, of one source and language, counted again from the files
    gone = ds.dataset(folder / "01-extract/dropped").to_table(columns=["source", "language", "reasons"]).to_pylist()
    few = Counter((r["source"], r["language"]) for r in gone if "too_few_words" in r["reasons"])
    (source, language), count = few.most_common(1)[0]
    tab.select_option("#removals-source", source)
    tab.select_option("#removals-language", language)
    row = tab.locator("#removals-table tr", has_text="too few words")
    assert row.locator("td").nth(1).inner_text() == str(count)
    assert count < sum(few.values())

    assert tab.title() == "fake · Gristmill report"
    assert tab.evaluate("document.querySelectorAll('img').length") == 0
    assert wrong == []
    tab.screenshot(path=tmp_path / "light.png", full_page=True)


def test_dark_and_narrow_screens(watch, tmp_path):
    dark, wrong = watch(scheme="dark")
    colour = dark.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", colour)[:3])) < 120
    dark.screenshot(path=tmp_path / "dark.png", full_page=True)
    narrow, wrong_too = watch(width=375, height=800)
    assert narrow.evaluate("document.documentElement.scrollWidth") == 375
    assert narrow.locator("#funnel-picture .step").first.is_visible()
    narrow.screenshot(path=tmp_path / "narrow.png", full_page=True)
    assert wrong + wrong_too == []


def test_page_data_is_the_same_twice(folder):
    run = open_run(folder)
    first, second = page_data(run, STAGES), page_data(open_run(folder), STAGES)
    first["header"].pop("written"), second["header"].pop("written")
    assert first == second
