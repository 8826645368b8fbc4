"""Mixtures: what a file says, what it is compiled to, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError, Plan, SourceSize, windows_in
from gristmill.mixtures.wishes import unimax

SIZES = {"docs": SourceSize(4_000_000, 17_000_000), "readmes": 700_000, "code": 1_500_000}
EXAMPLES = Path(__file__).parents[2] / "mixtures"


def mixture_of(text: str, folder: Path) -> Mixture:
    path = folder / "mixture.yaml"
    path.write_text(text, encoding="utf-8")
    return Mixture.load(path)


# --- plans ---


@pytest.mark.parametrize("name", ["docs_only", "blend", "curriculum"])
@pytest.mark.parametrize("budget", [300_000, 600_000])
def test_the_mixtures_of_the_demo_plan(name: str, budget: int) -> None:
    plan = Mixture.load(EXAMPLES / f"{name}.yaml").plan(SIZES, 256, budget, seed=1)
    assert plan.mixture == name
    assert plan.windows == budget // 256
    assert sum(row.windows for row in plan.totals()) == plan.windows
    assert plan.table().startswith(f"mixture {name}, plan {plan.hash}\n")


LARGE = {  # tokens of a corpus of the size of Dolma 1.7
    "web": 2_000_000_000_000,
    "code": 410_000_000_000,
    "papers": 70_000_000_000,
    "forums": 90_000_000_000,
    "books": 5_000_000_000,
    "encyclopedia": 4_000_000_000,
    "mathematics": 12_600_000_000,
    "web_low": 800_000_000_000,
    "web_mid": 700_000_000_000,
    "web_high": 500_000_000_000,
}


@pytest.mark.parametrize(
    ("name", "budget", "shares"),
    [
        ("single_source", None, {"web": 1.0}),
        # Of 600e9 tokens the three small ones give four epochs, 20, 16 and 50.4; the other four a quarter of the rest.
        ("unimax", 600_000_000_000, {"books": 20 / 600, "mathematics": 50.4 / 600, "papers": 513.6 / 4 / 600}),
        ("anneal_quality", 200_000_000_000, {"web": 0.76, "mathematics": 0.025}),
        ("quality_curriculum", 900_000_000_000, {"web_high": 0.3 * 0.2 + 0.5 * 0.45 + 0.2 * 0.9}),
    ],
)
def test_the_other_examples_plan_at_their_size(name: str, budget: int | None, shares: dict[str, float]) -> None:
    plan = Mixture.load(EXAMPLES / f"{name}.yaml").plan(LARGE, 2048, budget, seed=1)
    weights = {row.source: row.weight for row in plan.totals()}
    assert {source: weights[source] for source in shares} == pytest.approx(shares, abs=1e-6)


def test_the_quality_curriculum_plans_on_scored_documents(make_tokens: Callable[..., Any]) -> None:
    tokens = make_tokens({"web": [[50] * 400, [80] * 200]})
    rng = np.random.default_rng(1)
    scores = [np.sort(rng.random(n)) for n in (400, 200)]
    for shard, values in enumerate(scores):
        path = tokens.folder.parent / f"03-minhash/kept/part-{shard:05}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = [f"web-{shard}-{i}" for i in range(len(values))]
        pq.write_table(pa.table({"doc_id": ids, "classifier.score": values}), path)
    plan = Mixture.load(EXAMPLES / "quality_curriculum.yaml").plan(tokens, 64, 14_400, seed=1)
    # The mean score of what a stretch of the run sees rises, by the documents themselves.
    means = []
    for begin in range(0, plan.windows, plan.windows // 5):
        seen = []
        for position in range(begin, min(begin + plan.windows // 5, plan.windows)):
            name, _, window = plan.locate(position)
            _, shard, row = plan.tokens.sources[name].document_at(window * 64)
            seen.append(scores[int(shard[-5:])][row])
        means.append(np.mean(seen))
    assert means[0] < 0.5 < 0.7 < means[-1]
    assert means[1:] == sorted(means[1:])


def test_a_mixture_that_says_everything_needs_no_arguments(tokens: Any, tmp_path: Path) -> None:
    settings = f"tokens: {tokens.folder}\nseq_len: 16\nbudget_tokens: 800\nseed: 4\n"
    mixture = mixture_of(f"name: m\nsources: {{docs: 1}}\n{settings}", tmp_path)
    plan = mixture.plan()
    assert (plan.windows, plan.seq_len, plan.seed) == (50, 16, 4)
    assert [b.tokens.shape for b in mixture.plan().loader(1, 2, 10)] == [(5, 17)] * 5
    assert mixture.plan(seq_len=8, budget_tokens=80, seed=5).windows == 10
    same = Mixture(name="m", sources={"docs": 1})
    assert same.plan(tokens, 16, 800, 4).hash == plan.hash
    assert same.plan({"docs": 1000}, 16, 800).seed == 0
    for arguments, missing in (((), "tokens"), ((tokens,), "seq_len")):
        with pytest.raises(MixtureError, match=rf"does not say `{missing}`\. Give it to plan\({missing}=\.\.\.\)"):
            same.plan(*arguments)


def test_every_mixture_in_the_folder_is_tested() -> None:
    tested = {"docs_only", "blend", "curriculum", "single_source", "unimax", "anneal_quality", "quality_curriculum"}
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == tested


def test_worked_example() -> None:
    # 1,001 tokens are 100 windows of 10 (the last token only a target); 0.75 : 0.25 of 40 windows is 30 and 10.
    mixture = Mixture(name="m", sources={"a": 3, "b": 1})
    plan = mixture.plan({"a": SourceSize(1001, 4004), "b": SourceSize(101, 505)}, 10, 409, seed=7)
    assert (plan.windows, plan.budget_tokens, plan.source_windows) == (40, 400, (100, 10))
    a, b = plan.phases[0].rows
    assert (a.windows, a.tokens, a.utf8_bytes, a.epochs_after, a.windows_left) == (30, 300, 1200, 0.3, 70)
    assert (b.windows, b.tokens, b.utf8_bytes, b.epochs_after, b.windows_left) == (10, 100, 500, 1.0, 0)
    assert a.runs_out_tokens is None
    assert b.runs_out_tokens == next(10 * i for i in range(41) if plan.counts(i)["b"] == 10)
    assert plan.counts(40) == {"a": 30, "b": 10}


def test_curriculum_moves_linearly_and_anneals() -> None:
    plan = Mixture.load(EXAMPLES / "curriculum.yaml").plan(SIZES, 256, 512_000, seed=1)
    broad, shift, anneal = plan.phases
    assert [p.windows for p in plan.phases] == [1000, 600, 400]
    assert [row.windows for row in broad.rows] == [600, 400, 0]
    # A linear ramp from (.6, .4, 0) to (.2, .1, .7) gives the mean of both: (.4, .25, .35) of 600.
    assert [row.windows for row in shift.rows] == [240, 150, 210]
    assert [row.windows for row in anneal.rows] == [80, 40, 280]
    assert plan.anneal_begin == 1600
    weights = [w["readmes"] for tokens, w in plan.curve(300) if shift.begin * 256 <= tokens < shift.end * 256]
    assert weights == sorted(weights)
    # 64 steps of 9 or 10 windows, each with the weight of its middle: 4.5 and 595 of 600.
    assert (weights[0], weights[-1]) == (pytest.approx(0.7 * 4.5 / 600), pytest.approx(0.7 * 595 / 600))


def test_cosine_ramp_is_slow_at_both_ends() -> None:
    phases = [
        {"name": "one", "tokens": 1000, "weights": {"a": 1}},
        {"name": "two", "tokens": 64_000, "weights": {"b": 1}, "ramp": "cosine"},
    ]
    plan = Mixture(name="m", sources={"a": {}, "b": {}}, phases=phases).plan({"a": 10**6, "b": 10**6}, 10)
    quarter = [plan.counts(100 + 1600 * q)["b"] for q in range(5)]
    # The integral of (1 - cos pi x) / 2 is x / 2 - sin(pi x) / (2 pi): 0.0125, 0.0908, 0.2375, 0.5 of 6,400.
    assert quarter == pytest.approx([0, 79.7, 581.4, 1679.7, 3200], abs=2)


def test_exact_wishes_come_first() -> None:
    sources = {"a": {"tokens": 250}, "b": {"epochs": 1.5}, "c": {"weight": 2}, "d": {"weight": 1}}
    plan = Mixture(name="m", sources=sources).plan(dict.fromkeys("abcd", 1001), 10, 3050, seed=1)
    # 25 windows, 150 windows; the other 130 of 305 in 2 : 1.
    assert plan.counts(plan.windows) == {"a": 25, "b": 150, "c": 87, "d": 43}
    assert plan.phases[0].rows[1].epochs_after == 1.5


def test_without_a_budget_the_wishes_say_how_long() -> None:
    plan = Mixture(name="m", sources={"a": {"epochs": 1}, "b": {"tokens": 200}}).plan({"a": 1001, "b": 1001}, 10)
    assert plan.counts(plan.windows) == {"a": 100, "b": 20}
    with pytest.raises(MixtureError, match=r"does not say how long the run is\. Give budget_tokens"):
        Mixture(name="m", sources={"a": 1}).plan({"a": 1001}, 10)


def test_temperature_is_computed_and_shown() -> None:
    plan = Mixture(name="m", sources={"a": {}, "b": {}}, temperature=0.5).plan({"a": 160_000, "b": 10_000}, 10, 10_000)
    assert plan.counts(1000) == {"a": 800, "b": 200}  # square roots: 400 and 100
    assert "weights by temperature 0.5: a 0.8, b 0.2" in plan.table()


def test_unimax_worked_example() -> None:
    # Caps 100, 400, 10,000 in a run of 1,200: even is 400. The first gets 100; the others 550 each; the second can
    # give 400 only; the third takes 700.
    assert unimax({"big": 10_000, "tiny": 100, "mid": 400}, 1200) == {
        "big": Fraction(7, 12),
        "tiny": Fraction(1, 12),
        "mid": Fraction(1, 3),
    }
    with pytest.raises(MixtureError, match=r"may use 10 windows .* the run has 11"):
        unimax({"a": 10}, 11)


@given(st.lists(st.integers(20, 5000), min_size=1, max_size=8), st.floats(0.5, 4), st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_unimax_never_repeats_more_than_it_may(sizes: list[int], cap: float, part: float) -> None:
    tokens = {str(i): size * 10 + 1 for i, size in enumerate(sizes)}
    budget = max(10, int(part * sum(int(Fraction(str(cap)) * size) for size in sizes)) * 10)
    mixture = Mixture(name="m", sources={name: {} for name in tokens}, unimax={"max_epochs": cap}, max_epochs=cap)
    if budget // 10 > sum(int(Fraction(str(cap)) * size) for size in sizes):
        return
    plan = mixture.plan(tokens, 10, budget)
    counts = plan.counts(plan.windows)
    assert all(counts[name] <= int(Fraction(str(cap)) * size) for name, size in zip(tokens, sizes, strict=True))
    uncapped = [c for (n, c), size in zip(counts.items(), sizes, strict=True) if c < int(Fraction(str(cap)) * size) - 1]
    assert not uncapped or max(counts.values()) - min(uncapped) <= 2


def test_base_gives_what_is_not_said_here(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: b\nsources: {a: 1, b: 1}\nmax_epochs: 7\n", encoding="utf-8")
    mixture = mixture_of("base: base.yaml\nname: m\nsources: {a: 3}\n", tmp_path)
    assert mixture == Mixture(name="m", sources={"a": 3}, max_epochs=7)
    (tmp_path / "base.yaml").write_text("base: other.yaml\n", encoding="utf-8")
    with pytest.raises(MixtureError, match=r"mixture\.yaml:1: the base .*base\.yaml has a base itself"):
        mixture_of("base: base.yaml\nname: m\n", tmp_path)


def test_hash_is_of_what_matters() -> None:
    mixture = Mixture(name="m", sources={"a": 1, "b": 1})
    plan = mixture.plan({"a": 1001, "b": 1001}, 10, 1000, seed=1)
    same = Mixture(name="other words", description="x", sources={"a": 0.5, "b": 0.5}, max_epochs=2)
    assert same.plan({"a": 1001, "b": 1001, "unused": 5}, 10, 1009, seed=1).hash == plan.hash
    for other in (
        mixture.plan({"a": 1001, "b": 1001}, 10, 1000, seed=2),
        mixture.plan({"a": 1002, "b": 1001}, 10, 1000, seed=1),
        mixture.plan({"a": 1001, "b": 1001}, 20, 1000, seed=1),
        mixture.plan({"a": 1001, "b": 1001}, 10, 1010, seed=1),
        Mixture(name="m", sources={"a": 1, "b": 1.001}).plan({"a": 1001, "b": 1001}, 10, 1000, seed=1),
    ):
        assert other.hash != plan.hash


def test_a_larger_budget_and_a_further_phase_keep_the_prefix() -> None:
    sizes = {"a": 10_001, "b": 3_001}
    first = {"name": "first", "tokens": 8000, "weights": {"a": 0.7, "b": 0.3}}
    more = {"name": "more", "tokens": 4000, "weights": {"b": 1}, "ramp": "linear"}
    sources = {"a": 0.7, "b": 0.3}
    plans = [
        Mixture(name="m", sources=sources).plan(sizes, 10, 8000),
        Mixture(name="m", sources=sources).plan(sizes, 10, 14_000),
        Mixture(name="m", sources=sources, phases=[first, more]).plan(sizes, 10),
    ]
    orders = [[plan.locate(i) for i in range(800)] for plan in plans]
    assert orders[0] == orders[1] == orders[2]


def test_continue_from_avoids_what_was_used() -> None:
    sizes = {"a": 1001, "b": 501}
    trunk = Mixture(name="trunk", sources={"a": 0.5, "b": 0.5}).plan(sizes, 10, 600, seed=5)
    used = Consumption.after(trunk, 40)  # a checkpoint after 40 of its 60 windows
    seen = {trunk.locate(i) for i in range(40)}
    forks = [{"a": 0.9, "b": 0.1}, {"a": 0.1, "b": 0.9}]
    for weights in forks:
        fork = Mixture(name="fork", sources=weights, max_epochs=1).plan(sizes, 10, 300, seed=5, continue_from=used)
        windows = [fork.locate(i) for i in range(30)]
        assert len(set(windows)) == 30
        assert not seen & set(windows)
        rows = {row.source: row for row in fork.phases[0].rows}
        assert rows["b"].epochs_before == 20 / 50
    # The cap counts what was used: 50 windows of b, 20 of them gone, 27 asked; 31 would be one too many.
    with pytest.raises(MixtureError, match="of which 200 are used already; max_epochs 1 allows 300"):
        Mixture(name="f", sources={"b": 1}, max_epochs=1).plan(sizes, 10, 310, seed=5, continue_from=used)
    with pytest.raises(MixtureError, match="has seed 5, this plan seed 6"):
        Mixture(name="f", sources={"b": 1}).plan(sizes, 10, 10, seed=6, continue_from=used)


def test_length_and_seed_of_the_run_to_continue_from_are_taken_over(tmp_path: Path) -> None:
    sizes = {"a": 1001, "b": 501}
    trunk = Mixture(name="trunk", sources={"a": 0.5, "b": 0.5}).plan(sizes, 10, 600, seed=5)
    (tmp_path / "books.json").write_bytes(Consumption.after(trunk, 40).encoded())
    fork = Mixture(name="f", sources={"a": 1}, continue_from=str(tmp_path / "books.json")).plan(
        sizes, budget_tokens=200
    )
    assert (fork.seq_len, fork.seed, fork.used) == (10, 5, {"a": 20, "b": 20})
    (tmp_path / "books.json").write_text("{}")
    with pytest.raises(MixtureError, match=r"books\.json: not a record of what a run has used"):
        Mixture(name="f", sources={"a": 1}, continue_from=str(tmp_path / "books.json")).plan(sizes, 10, 100)


def test_a_used_source_is_kept_in_the_books_of_a_fork_that_leaves_it_out() -> None:
    sizes = {"a": 1001, "b": 501}
    trunk = Mixture(name="trunk", sources={"a": 0.5, "b": 0.5}).plan(sizes, 10, 400)
    fork = Mixture(name="f", sources={"a": 1}).plan(sizes, 10, 100, continue_from=Consumption.after(trunk, 40))
    books = Consumption.after(fork, 10)
    assert {name: use.windows for name, use in books.sources.items()} == {"a": 30, "b": 20}
    assert Consumption.model_validate_json(books.model_dump_json()) == books


def test_other_windows_cannot_be_continued_from(tokens: Any, make_tokens: Callable[..., Any]) -> None:
    mixture = Mixture(name="m", sources={"docs": 1})
    books = Consumption.after(mixture.plan(tokens, 10, 500), 50)
    with pytest.raises(MixtureError, match="'docs' had 99 windows in the run to continue from and has 49 now"):
        mixture.plan({"docs": 500}, 10, 100, continue_from=books)
    shorter = make_tokens({"docs": [[300, 13, 87, 100], [249, 251]]})  # as many tokens, cut into other documents
    with pytest.raises(MixtureError, match="'docs' has other token shards than in the run"):
        mixture.plan(shorter, 10, 100, continue_from=books)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 120), st.booleans())
@settings(max_examples=60, deadline=None)
def test_equal_prefix_hashes_mean_equal_windows(first: int, second: int, position: int, ramp: bool) -> None:
    sizes, sources = {"a": 301, "b": 101}, {"a": 0.7, "b": 0.3}
    plan = Mixture(name="m", sources=sources).plan(sizes, 10, first * 10)
    phases = [
        {"name": "x", "tokens": first * 10},
        {"name": "y", "tokens": second * 10, "weights": {"b": 1}, "ramp": "linear" if ramp else "step"},
    ]
    longer = Mixture(name="m", sources=sources, max_epochs=99).plan(sizes, 10, (first + second) * 10)
    phased = Mixture(name="m", sources=sources, max_epochs=99, phases=phases).plan(sizes, 10)
    position = min(position, first + second)
    for other in (longer, phased):
        if position <= first:
            assert other.prefix_hash(position) == plan.prefix_hash(position)
            assert [other.locate(i) for i in range(position)] == [plan.locate(i) for i in range(position)]
        assert other.prefix_hash(first) != other.prefix_hash(first - 1)
    if position > first:
        assert longer.prefix_hash(position) != phased.prefix_hash(position)


def test_the_table_shows_the_learning_rate_at_each_boundary() -> None:
    plan = Mixture.load(EXAMPLES / "curriculum.yaml").plan(SIZES, 256, 512_000)
    table = plan.table(learning_rate=lambda window: 1e-3 * (1 - window / 2000))
    assert "phase shift: tokens 256,000 to 409,600, linear ramp, learning rate 0.0005 to 0.0002" in table


# --- refusals ---


def test_too_many_epochs_are_refused_with_both_numbers_and_what_would_do() -> None:
    mixture = Mixture(name="m", sources={"a": 0.5, "b": {"weight": 0.5, "max_epochs": 2}})
    with pytest.raises(MixtureError) as caught:
        mixture.plan({"a": 100_001, "b": 1001}, 10, 10_000)
    assert str(caught.value) == (
        "Mixture m: source 'b' gives 5,000 tokens in this run, 5 epochs of its 1,000 tokens; max_epochs 2 allows "
        "2,000. Nearest that works: a weight of 0.2 of 1, or with these weights a budget of 4,000 tokens, or "
        "max_epochs 5."
    )
    mixture.plan({"a": 100_001, "b": 1001}, 10, 4_000)
    Mixture(name="m", sources={"a": 0.8, "b": {"weight": 0.2, "max_epochs": 2}}).plan(
        {"a": 100_001, "b": 1001}, 10, 10_000
    )


def test_an_exact_wish_that_is_too_much_is_told_what_to_ask_for() -> None:
    sizes = {"a": 10_001, "b": 100_001}
    phases = [{"name": "x", "share": 0.5, "weights": {"a": 0.1, "b": 0.9}}, {"name": "y", "share": 0.5}]
    for wish, again in (({"epochs": 3.5}, {"epochs": 3}), ({"tokens": 35_000}, {"tokens": 30_000})):
        phases[1]["weights"] = {"a": wish, "b": 1}
        mixture = Mixture.model_validate({"name": "m", "sources": {"a": {}, "b": {}}, "phases": phases})
        with pytest.raises(MixtureError) as caught:
            mixture.plan(sizes, 10, 200_000)
        # 10,000 by its weight in x, 35,000 in y; four epochs are 40,000.
        assert "Nearest that works: 30,000 tokens or 3 epochs of it where it asks for them, or max_epochs 4.5." in str(
            caught.value
        )
        phases[1]["weights"] = {"a": again, "b": 1}
        plan = Mixture.model_validate({"name": "m", "sources": {"a": {}, "b": {}}, "phases": phases}).plan(
            sizes, 10, 200_000
        )
        assert plan.counts(plan.windows)["a"] == 4000


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 100)), min_size=1, max_size=5),
    st.integers(1, 3000),
    st.sampled_from([0.5, 1, 2.5, 4]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_the_proposed_budget_is_feasible(
    sources: list[tuple[int, int]], windows: int, cap: float, phased: bool
) -> None:
    sizes = {str(i): n * 10 + 1 for i, (n, _) in enumerate(sources)}
    weights = {str(i): w for i, (_, w) in enumerate(sources)}
    phases = [{"name": "x", "share": 0.7}, {"name": "y", "share": 0.3, "weights": {"0": 1}, "ramp": "linear"}]
    mixture = Mixture(name="m", sources=weights, max_epochs=cap, phases=phases if phased else ())
    for _ in range(len(sources) + 1):  # each refusal may name a source that allows more than another
        try:
            plan = mixture.plan(sizes, 10, windows * 10)
        except MixtureError as error:
            if "less than one window" in str(error):
                return
            proposals = [int(t.split(" tokens")[0].replace(",", "")) for t in str(error).split("a budget of ")[1:]]
            assert max(proposals) < windows * 10
            windows = min(proposals) // 10
            if windows < 2:
                return
            continue
        for s, (n, _) in enumerate(sources):
            assert plan.counts(plan.windows)[str(s)] <= int(Fraction(str(cap)) * n)
        return
    raise AssertionError("no proposal worked")


REFUSED = [
    (
        "name: m\nsources:\n  docs: {wieght: 1}\n",
        r"mixture\.yaml:3: unknown key `sources\.docs\.wieght`\. Did you mean `weight`\?$",
    ),
    (
        "name: m\nsources: {docs: 1}\nphase: []\n",
        r"mixture\.yaml:3: unknown key `phase`\. Did you mean `phases`\?$",
    ),
    (
        "name: m\nsources: {a: 1}\nphases:\n - {name: x, shar: 1}\n",
        r"mixture\.yaml:4: unknown key `phases\.0\.shar`\. Did you mean `share`\?$",
    ),
    (
        "name: m\nsources: {a: 1}\nphases:\n - name: x\n   share: 1\n   weights: {a: {epoch: 1}}\n",
        r"mixture\.yaml:6: unknown key `phases\.0\.weights\.a\.epoch`\. Did you mean `epochs`\?$",
    ),
    (
        "name: m\nsources: {a: {}}\nunimax: {max_epoch: 4}\n",
        r"mixture\.yaml:3: unknown key `unimax\.max_epoch`\. Did you mean `max_epochs`\?$",
    ),
    ("sources: {docs: 1}\n", r"mixture\.yaml:1: `name` is missing\.$"),
    ("name: m\nsources: {}\n", r"mixture\.yaml:2: `sources`: a mixture needs at least one source\.$"),
    (
        "name: m\nsources: {a: {weight: 1, tokens: 5}}\n",
        r"mixture\.yaml:2: `sources\.a`: give one of weight, tokens and epochs, not several\.$",
    ),
    (
        "name: m\nsources: {a: -1}\n",
        r"mixture\.yaml:2: `sources\.a\.weight`: Input should be greater than or equal to 0\.$",
    ),
    ("name: m\nsources: {a: .nan}\n", r"mixture\.yaml:2: `sources\.a\.weight`: Input should be a finite number\.$"),
    (
        "name: m\nsources: {a: {}}\n",
        r"mixture\.yaml:1: source a has no wish: give weight, tokens or epochs\.$",
    ),
    (
        "name: m\nsources: {a: {}}\ntemperature: 0.5\nunimax: {max_epochs: 1}\n",
        r"mixture\.yaml:1: give either temperature or unimax\.$",
    ),
    ("name: m\nsources: {a: 1}\ntemperature: 0.5\n", r"mixture\.yaml:1: .*but a has a wish of its own\.$"),
    (
        "name: m\nsources: {docs: 1}\nphases: [{name: x, share: 1, weights: {dosc: 1}}]\n",
        r"mixture\.yaml:1: phase x names dosc, which is not under sources\. Did you mean `docs`\?$",
    ),
    (
        "name: m\nsources: {a: 1}\nphases: [{name: x, share: 1, ramp: linear}]\n",
        r"mixture\.yaml:1: phase x is the first: there are no weights to ramp from\.$",
    ),
    (
        "name: m\nsources: {a: 1}\nphases: [{name: x}]\n",
        r"mixture\.yaml:3: `phases\.0`: give either share or tokens\.$",
    ),
    (
        "name: m\nsources: {a: 1}\nphases: [{name: x, share: .5}, {name: x, share: .5}]\n",
        r"mixture\.yaml:1: two phases are called x\.$",
    ),
    ("name: m\nsources: [a\n", r"mixture\.yaml:3: not valid YAML: "),
    ("- 1\n", r"mixture\.yaml:1: a mapping of settings is expected, .* but here is a list\.$"),
    ("name: m\nname: n\nsources: {a: 1}\n", r"mixture\.yaml:2: the key `name` is given twice\. Keep one of them\.$"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_broken_files_are_refused_with_place_and_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MixtureError, match=message):
        mixture_of(text, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MixtureError, match=r"none\.yaml: no such file\.$"):
        Mixture.load(tmp_path / "none.yaml")


def plan_phases(phases: list[dict[str, object]], budget: int | None, sources: object = None) -> Plan:
    mixture = Mixture.model_validate({"name": "m", "sources": sources or {"a": 1, "b": 1}, "phases": phases})
    return mixture.plan({"a": 10_001, "b": 10_001}, 10, budget)


@pytest.mark.parametrize(
    ("phases", "budget", "message"),
    [
        ([{"name": "x", "tokens": 500}], 400, "name 500 tokens, but the budget is 400. Give a budget of 500"),
        ([{"name": "x", "tokens": 500}], 600, "name 500 tokens, but the budget is 600"),
        ([{"name": "x", "share": 0.5}, {"name": "y", "share": 0.4}], 600, "sum to 0.9; they must sum to 1"),
        ([{"name": "x", "share": 0.999}, {"name": "y", "share": 0.001}], 600, "phase y has less than one window"),
        ([{"name": "x", "share": 1, "weights": {"a": {"tokens": 800}}}], 600, "has 600 tokens, but .* come to 800"),
        ([{"name": "x", "share": 1, "weights": {"a": {"tokens": 300}}}], 600, "ask for 300 and none has a weight"),
        (
            [
                {"name": "x", "share": 0.5},
                {"name": "y", "share": 0.5, "ramp": "linear", "weights": {"a": {"tokens": 300}}},
            ],
            600,
            "ramps its weights, so it cannot give exact tokens",
        ),
    ],
)
def test_impossible_phases_are_refused(phases: list[dict[str, object]], budget: int, message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        plan_phases(phases, budget)


def test_unknown_and_empty_sources_are_refused() -> None:
    mixture = Mixture(name="m", sources={"dosc": 1})
    with pytest.raises(MixtureError, match=r"no tokens of source 'dosc'\. Did you mean `docs`\?$"):
        mixture.plan({"docs": 1000}, 10, 100)
    with pytest.raises(MixtureError, match="'dosc' has 10 tokens, less than one window of 11"):
        mixture.plan({"dosc": 10}, 10, 100)


@given(st.integers(0, 10**13), st.integers(1, 10**5))
def test_windows_cover_what_they_can(tokens: int, seq_len: int) -> None:
    n = windows_in(tokens, seq_len)
    assert n == 0 or (n - 1) * seq_len + seq_len + 1 <= tokens
    assert n * seq_len + seq_len + 1 > tokens
