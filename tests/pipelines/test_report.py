"""The report's figures equal the ledgers and the files."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.report.dedupe import duplicates, pair
from gristmill.pipelines.report.limits import Setting, rules_of
from gristmill.pipelines.report.scan import registered_domain, scan
from gristmill.pipelines.report.tokens import lengths
from gristmill.stages.documents import Rule

sys.path.append(str(Path(__file__).parent))
from fake_run import FakeQuality, FakeRun
from report_page import funnel_of, report


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
