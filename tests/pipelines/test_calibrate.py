"""Proposed limits: by hand, as a property of any values, and as settings that a recipe takes."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from ruamel.yaml import YAML

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.calibrate import (
    CalibrateError,
    Calibration,
    Goal,
    Group,
    Limit,
    StageLimits,
    _rank_of,
    calibrate,
    rounded,
)
from gristmill.pipelines.calibrate_write import as_json, open_run_of, shares, tables, yaml_text
from gristmill.pipelines.cli import main
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.quantiles import READINGS, StreamedRank, from_ordered_bits, ordered_bits
from gristmill.pipelines.recipe import STAGES as RECIPE_STAGES

sys.path.append(str(Path(__file__).parent))
from fake_run import FakeExact, FakeLanguage, FakeQuality, FakeRun

STAGES = {"fake_language": FakeLanguage, "fake_quality": FakeQuality, "exact": FakeExact}
FINITE = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return FakeRun(documents=480, parts=frozenset()).build(tmp_path_factory.mktemp("calibrate") / "run")


def reached(folder, stage):
    """Documents that reached a stage of the first segment, read in the plainest way: rows as dicts."""
    names = ["source", "language", "language_score", "fake_quality.words", "fake_quality.mean_word_length"]
    kept = ds.dataset(folder / "01-extract/kept").to_table(columns=names).to_pylist()
    dropped = ds.dataset(folder / "01-extract/dropped").to_table(columns=[*names, "stage", "reasons"]).to_pylist()
    after = {"fake_language": ("fake_language", "fake_quality"), "fake_quality": ("fake_quality",)}[stage]
    return kept + [row for row in dropped if row["stage"] in after]


def streamed(values, rank_of, pieces=3):
    rank = StreamedRank(rank_of)
    for _ in range(READINGS):
        for piece in np.array_split(np.asarray(values, np.float64), pieces):
            rank.show(piece)
        rank.end_reading()
    return rank


def limit(side, *, integer=False):
    return Limit("r", side, "c", "", "s", integer, 0.0)


# Ranks and rounding


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=60), st.data())
def test_a_streamed_rank_is_that_of_the_sorted_values(values, data):
    at = data.draw(st.integers(0, len(values) - 1))
    found = streamed(values, lambda n: at)
    assert (found.value, found.count) == (sorted(values)[at], len(values))


@given(st.lists(st.floats(allow_nan=False), min_size=2, max_size=30))
def test_bits_have_the_order_of_the_values(values):
    array = np.array(sorted(values))
    bits = ordered_bits(array)
    assert (bits[1:] >= bits[:-1]).all()
    assert [from_ordered_bits(int(b)) for b in bits] == array.tolist()


def test_no_values_have_no_rank():
    found = streamed([], lambda n: pytest.fail("asked for the rank of nothing"))
    assert (found.value, found.count) == (None, 0)


@pytest.mark.parametrize(
    ("value", "side", "integer", "expected"),
    [
        (0.41178, "at_least", False, 0.411),
        (0.41178, "at_most", False, 0.412),
        (0.411, "at_least", False, 0.411),
        (0.411, "at_most", False, 0.411),
        (0.0, "at_least", False, 0.0),
        (-12.345, "at_least", False, -12.4),
        (-12.345, "at_most", False, -12.3),
        (0.99951, "at_most", False, 1.0),
        (1234.0, "at_least", True, 1230),
        (1234.0, "at_most", True, 1240),
        (99_951.0, "at_most", True, 100_000),
        (21.7, "at_least", True, 21),
        (21.2, "at_most", True, 22),
        (0.4, "at_least", True, 0),
        (0.4, "at_most", True, 1),
    ],
)
def test_rounding_goes_towards_keeping(value, side, integer, expected):
    found = rounded(value, side, integer=integer)
    assert (found, type(found)) == (expected, int if integer else float)


def coarser(value, side, *, integer):
    """The next value of three digits that removes more."""
    up = side == "at_least"
    if value == 0:
        return (1 if up else -1) * (1 if integer else 1e-300)
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    exponent = round(math.log10(step))
    step = max(step, 1) if integer else step
    moved = value + step if up else value - step
    return round(moved, max(0, -exponent)) if abs(exponent) < 15 else moved


@given(
    values=st.lists(st.one_of(st.floats(0.001, 1e6), st.integers(1, 50).map(float)), min_size=1, max_size=80),
    share=st.sampled_from((0.0, 0.01, 0.05, 0.1, 0.29, 0.5, 0.9)),
    side=st.sampled_from(("at_least", "at_most")),
    integer=st.booleans(),
)
def test_a_proposal_removes_at_most_the_target_and_the_next_coarser_one_more(values, share, side, integer):
    of = limit(side, integer=integer)
    found = rounded(streamed(values, _rank_of(of, share)).value, side, integer=integer)
    array = np.array(values)
    assert of.removes(array, found).sum() <= share * len(values) + 1e-9
    assert of.removes(array, coarser(found, side, integer=integer)).sum() > share * len(values) - 1e-9


# A worked example


WORKED = {"fake_language": FakeLanguage}


def write_worked(folder: Path) -> Path:
    """Twenty documents of one source with scores 0.05, 0.10, ... 1.00: the limit 0.3 dropped the first five."""
    run = FakeRun(documents=20, sources=("docs",), shards_per_source=1, parts=frozenset())
    folder.mkdir(parents=True)
    rows = [
        {
            "doc_id": f"d{i}",
            "source": "docs",
            "metadata": json.dumps({"language": "en" if i % 2 else "de", "score": round((i + 1) * 0.05, 2)}),
            "text": f"the mill number {i} turns its wheel and " * 5,
        }
        for i in range(20)
    ]
    (folder / "recipe.yaml").write_text(
        "name: worked\nstages:\n- fake_language: {min_score: 0.3}\n- fake_quality: {}\n"
    )
    schema = pa.schema([(n, pa.string()) for n in ("doc_id", "source", "url", "dump", "date", "metadata", "text")])
    run._first_segment(folder, 0, pa.RecordBatch.from_pylist(rows, schema=schema))
    return folder


def test_worked_example(tmp_path):
    """A tenth of 20 documents are 2: 0.05 and 0.10 go, and the limit is 0.15, where the third stands."""
    found = calibrate(open_run(write_worked(tmp_path / "run")), WORKED, Goal(0.1))
    (proposal,) = found.stages[0].overall.proposals
    assert (proposal.limit.setting, proposal.now, proposal.value) == ("min_score", 0.3, 0.15)
    assert (proposal.documents, proposal.removed_now, proposal.removed) == (20, 5, 2)
    assert (found.stages[0].overall.dropped_now, found.stages[0].overall.dropped) == (5, 2)
    assert yaml_text(found, WORKED) == (
        "# Limits proposed by `gristmill calibrate`: each rule alone removes at most 10 % of\n"
        "# the documents that reached its stage and have a value; rounded to 3 significant digits towards keeping.\n"
        f"# Run: {tmp_path}/run (recipe worked)\n"
        "# Documents that reached fake_language: 20\n"
        "stages:\n"
        "- fake_language:\n"
        "    min_score: 0.15  # too_low: removes 10.0% of 20 documents; 0.3 removes 25.0%\n"
    ).replace("too_low", "unsure_language")


# A run of several sources and languages


def test_proposals_equal_those_counted_by_hand(folder):
    found = calibrate(open_run(folder), STAGES, Goal(0.1, by_language=True))
    assert [stage.label for stage in found.stages] == ["fake_language", "fake_quality"]
    assert found.problems == []
    for stage in found.stages:
        rows = reached(folder, stage.label)
        counts = {}
        for row in rows:
            counts[row["language"]] = counts.get(row["language"], 0) + 1
        assert {g.language for g in stage.languages} == {name for name, count in counts.items() if count >= 50}
        for group in (stage.overall, *stage.languages):
            own = [r for r in rows if group.language in (None, r["language"])]
            assert group.documents == len(own)
            for p in group.proposals:
                values = sorted(r[p.limit.column] for r in own if r[p.limit.column] is not None)
                k = len(values) // 10
                exact = values[k] if p.limit.side == "at_least" else values[-1 - k]
                assert p.value == rounded(exact, p.limit.side, integer=p.limit.integer)
                assert p.documents == p.ranked == len(values)
                beyond = (lambda v, b: v < b) if p.limit.side == "at_least" else (lambda v, b: v > b)
                assert p.removed == sum(beyond(v, p.value) for v in values) <= 0.1 * len(values)
                assert p.removed_now == sum(beyond(v, p.now) for v in values)


def test_joint_shares_are_those_of_the_ledger_and_of_a_stage_with_the_proposals(folder):
    run = open_run(folder)
    (stage,) = calibrate(run, STAGES, Goal(0.05), ["fake_quality"]).stages
    book = run.stages()["fake_quality"]
    assert stage.overall.documents == book.read.documents
    assert stage.overall.dropped_now == sum(amount.documents for amount in book.dropped.values())
    rules = FakeQuality(**{p.limit.setting: p.value for p in stage.overall.proposals}).rules()
    rows = reached(folder, "fake_quality")
    fails = [r.fails(np.array([row[r.column] for row in rows], np.float64)) for r in rules]  # None is NaN: it fails
    assert stage.overall.dropped == int(np.logical_or.reduce(fails).sum())


def test_what_a_side_of_a_two_sided_rule_removes_is_told_by_the_value(folder):
    (stage,) = calibrate(open_run(folder), STAGES, Goal(0.05), ["fake_quality"]).stages
    book = open_run(folder).stages()["fake_quality"]
    sides = [p for p in stage.overall.proposals if p.limit.reason == "mean_word_length"]
    assert [p.limit.side for p in sides] == ["at_least", "at_most"]
    missing = book.histograms["fake_quality.mean_word_length"].missing
    assert sum(p.removed_now for p in sides) + missing == book.counters["rule.mean_word_length"]


def test_limits_of_a_reference_source(folder):
    """The limit is where 5 % of the reference's documents lie beyond it; what it removes is of all documents."""
    found = calibrate(open_run(folder), STAGES, Goal(0.05, reference="docs"))
    for stage in found.stages:
        rows = reached(folder, stage.label)
        for p in stage.overall.proposals:
            values = [r[p.limit.column] for r in rows if r["source"] == "docs" and r[p.limit.column] is not None]
            place = (
                sorted(values)[len(values) // 20]
                if p.limit.side == "at_least"
                else sorted(values)[-1 - len(values) // 20]
            )
            assert p.value == rounded(place, p.limit.side, integer=p.limit.integer)
            assert p.ranked == len(values) < p.documents
    assert "source docs" in yaml_text(found, STAGES)


def test_yaml_loads_as_stage_settings(folder):
    found = calibrate(open_run(folder), STAGES, Goal(0.1, by_language=True))
    text = yaml_text(found, STAGES)
    proposed = {}
    for entry in YAML(typ="safe", pure=True).load(text)["stages"]:
        ((key, settings),) = entry.items()
        proposed[key] = STAGES[key](**settings)
    for stage in found.stages:
        for p in stage.overall.proposals:
            assert getattr(proposed[stage.key], p.limit.setting) == p.value
    assert f"# Run: {folder}" in text
    with_json = json.loads(as_json(found, "x.yaml"))
    assert with_json["stages"][1]["limits"][0]["proposed"] == found.stages[1].overall.proposals[0].value
    assert sum(table.row_count for table in tables(found)) == sum(
        1 + len(g.proposals) for s in found.stages for g in (s.overall, *s.languages)
    )


def test_limits_that_a_stage_has_by_language_are_in_force_and_go(folder, tmp_path):
    """A language's limit in force is its own; in the recipe's form one limit for all replaces them."""

    class Tabled(FakeLanguage):
        min_score_of: dict[str, float] = Field(default_factory=dict)

    copy = shutil.copytree(folder, tmp_path / "run")
    text = (copy / "recipe.yaml").read_text("utf-8")
    text = text.replace("min_score: 0.3", "min_score: 0.3\n    min_score_of: {de: 0.2}")
    (copy / "recipe.yaml").write_text(text, "utf-8")
    stages = {**STAGES, "fake_language": Tabled}
    for by_language in (True, False):
        found = calibrate(open_run(copy), stages, Goal(0.1, by_language=by_language), ["fake_language"])
        data = YAML(typ="safe", pure=True).load(yaml_text(found, stages))
        settings = data["stages"][0]["fake_language"]
        built = Tabled(**settings)
        now = {g.language: g.proposals[0].now for g in found.stages[0].languages}
        assert now == (dict.fromkeys(now, 0.3) | {"de": 0.2} if by_language else {})
        assert built.min_score == found.stages[0].overall.proposals[0].value
        assert "min_score_of" not in settings


def test_a_limit_that_the_stage_refuses_stays(folder, tmp_path):

    class Bounded(FakeQuality):
        max_words: int = Field(900, ge=800)

    found = calibrate(open_run(folder), {**STAGES, "fake_quality": Bounded}, Goal(0.1), ["fake_quality"])
    (p,) = (p for p in found.stages[0].overall.proposals if p.limit.setting == "max_words")
    assert (p.value, p.bound, p.removed) == (None, 900, p.removed_now)
    assert any("max_words" in problem and "stays" in problem for problem in found.problems)
    assert "as it was" in yaml_text(found, STAGES)


# Questions that make no sense, runs that are not whole


@pytest.mark.parametrize(
    ("goal", "chosen", "says"),
    [
        (Goal(1.0), (), "to below 1"),
        (Goal(-0.1), (), "to below 1"),
        (Goal(float("nan")), (), "to below 1"),
        (Goal(0.1, reference="dosc"), (), "Did you mean `docs`"),
        (Goal(0.1), ("fake_qualty",), "Did you mean `fake_quality`"),
        (Goal(0.1), ("exact",), "Stage exact has no limit"),
    ],
)
def test_wrong_questions(folder, goal, chosen, says):
    with pytest.raises(CalibrateError, match=says):
        calibrate(open_run(folder), STAGES, goal, chosen)


def test_a_run_with_a_part_missing_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    (copy / "01-extract/dropped/part-00001.parquet").unlink()
    with pytest.raises(RunError, match="run the recipe again"):
        calibrate(open_run(copy), STAGES, Goal(0.1))


def test_a_column_that_is_missing_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    part = copy / "01-extract/kept/part-00000.parquet"
    pq.write_table(pq.read_table(part).drop_columns(["language_score"]), part)
    with pytest.raises(RunError, match="language_score"):
        calibrate(open_run(copy), STAGES, Goal(0.1))


def test_a_stage_for_other_sources_again_is_told_of(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    text = (copy / "recipe.yaml").read_text("utf-8")
    (copy / "recipe.yaml").write_text(text + "- fake_quality: {min_words: 5}\n", "utf-8")
    found = calibrate(open_run(copy), STAGES, Goal(0.1))
    assert any("fake_quality is used 2 times" in problem for problem in found.problems)


def test_many_ranks_are_read_in_turns(folder, monkeypatch):
    from gristmill.pipelines import calibrate as module

    at_once = as_json(calibrate(open_run(folder), STAGES, Goal(0.1, by_language=True)), None)
    monkeypatch.setattr(module, "RANKS_AT_ONCE", 3)
    assert as_json(calibrate(open_run(folder), STAGES, Goal(0.1, by_language=True)), None) == at_once


def test_shares_of_options():
    assert shares(None, None, None) == 0.1
    assert shares(0.2, None, None) == 0.2
    assert shares(None, "docs", None) == 0.05
    assert shares(None, "docs", 2.5) == 0.025
    for wrong in ((None, None, 5.0), (0.1, "docs", None), (None, "docs", 50.0), (None, "docs", -1.0)):
        with pytest.raises(CalibrateError):
            shares(*wrong)


# A real run


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_command_on_a_real_run(finished_run, tmp_path, capsys):
    out = tmp_path / "limits.yaml"
    asked = ("calibrate", str(finished_run), "--target-removal", "0.2", "--out", str(out))
    code, shown, err = call(capsys, *asked, "--json")
    assert (code, err) == (0, "")
    result = json.loads(shown)
    assert {"extract", "language", "gopher_quality", "perplexity", "classifier"} <= {
        s["stage"] for s in result["stages"]
    }
    for stage in result["stages"]:
        for row in stage["limits"]:
            assert row["would_remove"] <= 0.2 * row["documents"]
    assert result["problems"] == []
    data = YAML(typ="safe", pure=True).load(out.read_text("utf-8"))
    for entry, stage in zip(data["stages"], result["stages"], strict=True):
        key = next(iter(entry))
        built = RECIPE_STAGES[key](**entry[key])
        assert [getattr(built, row["setting"]) for row in stage["limits"]] == [
            row["limit"] if row["proposed"] is None else row["proposed"] for row in stage["limits"]
        ]
    code, shown, _ = call(capsys, *asked[:4], "--stage", "gopher_quality")
    assert (code, "too_few_words" in shown, "all rules together" in shown) == (0, True, True)
    assert "min_words:" in shown


def test_the_proposed_limits_do_in_a_run_what_was_said(finished_run, crawl, recipe_file, tmp_path, capsys):
    """The entries replace those of the recipe: the recipe loads, other settings stay."""
    found = calibrate(open_run(finished_run), RECIPE_STAGES, Goal(0.1), ["gopher_quality"])
    data = YAML(typ="safe", pure=True).load(yaml_text(found, RECIPE_STAGES))
    path = recipe_file()
    with path.open("r", encoding="utf-8") as file:
        recipe = YAML(typ="safe", pure=True).load(file)
    at = next(i for i, entry in enumerate(recipe["stages"]) if "gopher_quality" in entry)
    recipe["stages"][at] = data["stages"][0]
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(recipe, file)
    use = next(use for use in recipes.load(path).uses if use.key == "gopher_quality")
    assert use.only == ("docs", "readmes")
    kept = open_run(finished_run).segment_of("gopher_quality")
    table = ds.dataset(finished_run / kept / "kept").to_table()
    dropped = ds.dataset(finished_run / kept / "dropped").to_table()
    dropped = dropped.filter(pc.equal(dropped["stage"], "gopher_quality"))
    table = table.filter(pc.is_in(table["source"], value_set=pa.array(use.only)))
    fails = 0
    for part in (table, dropped):
        columns = [(r, np.array(part[r.column].to_pylist(), np.float64)) for r in use.stage.rules()]
        fails += int(np.logical_or.reduce([r.fails(v) for r, v in columns]).sum()) if part.num_rows else 0
    assert found.stages[0].overall.dropped == fails


def test_a_variant_is_written_with_what_differs_from_its_own_defaults():
    """0.2 is datatrove's default and not dolma's, so it is written; 0.3 is dolma's own."""
    for chars, expected in ((0.2, {"variant": "dolma", "max_duplicate_line_chars": 0.2}), (0.3, {"variant": "dolma"})):
        stage = RECIPE_STAGES["gopher_repetition"](variant="dolma", max_duplicate_line_chars=chars)
        limits = StageLimits(
            "gopher_repetition", "gopher_repetition", (), stage.model_dump(mode="json"), Group(None, [])
        )
        found = Calibration("run", "", Goal(0.1), [limits], [])
        (entry,) = YAML(typ="safe", pure=True).load(yaml_text(found, RECIPE_STAGES))["stages"]
        assert entry == {"gopher_repetition": expected}
        assert RECIPE_STAGES["gopher_repetition"](**entry["gopher_repetition"]) == stage


def test_a_recipe_file_stands_for_its_run(finished_run, tmp_path, recipe_file):
    path = recipe_file(replace={"name: small": f"name: small\nout: {finished_run}"})
    assert open_run_of(str(path)).path == str(finished_run)
    path = recipe_file(replace={"name: small": f"name: small\nout: {tmp_path}/none"})
    with pytest.raises(CalibrateError, match="has not been run"):
        open_run_of(str(path))


def test_all_pairs_of_sides_are_covered(folder):
    (stage,) = calibrate(open_run(folder), STAGES, Goal(0.1), ["fake_quality"]).stages
    pairs = {(p.limit.side, p.limit.integer) for p in stage.overall.proposals}
    assert pairs == set(itertools.product(("at_least", "at_most"), (True, False)))
