"""Small shards in bundles, plans of many shards, and that nothing of it grows with the square of their number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.pipelines import bundles as bundling
from gristmill.pipelines import plan as plans
from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.bundles import BUNDLE, BUNDLE_BYTES, Bundle, bundles, run_all, run_bundle
from gristmill.pipelines.engine import PLAIN, Care, Failure, open_engine
from gristmill.pipelines.plan import make_plan
from gristmill.stages.shards import Shard

sys.path.append(str(Path(__file__).parent))
from poison_stage import kill_third


@dataclass(frozen=True)
class Order:
    shard: Shard


def shard(index: int, size: int) -> Shard:
    path = f"/x/{index}.jsonl"
    return Shard(index=index, source="s", path=path, name=path, format="jsonl", size=size, stamp="1")


def orders(sizes: Sequence[int]) -> list[Order]:
    return [Order(shard(i, size)) for i, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 2 * BUNDLE_BYTES), max_size=300), st.integers(1, 3))
def test_bundles_are_bounded_keep_the_order_and_hold_a_piece_once(sizes: list[int], workers: int) -> None:
    groups = bundles(orders(sizes), workers)
    flat = [position for group in groups for position in group]
    assert flat == sorted(set(flat))
    for group in groups:
        assert 2 <= len(group) <= BUNDLE
        assert sum(sizes[position] for position in group) <= BUNDLE_BYTES
    if len(sizes) < bundling.MANY * workers:
        assert groups == []


def test_big_shards_and_other_orders_go_alone() -> None:
    sizes = [5_000_000] * 100 + [1_000] * 70
    assert [len(group) for group in bundles(orders(sizes), 1)] == [32, 32, 6]
    assert bundles(orders(sizes), 2) == []  # 170 pieces are few for two workers
    assert bundles(["a", "b"] * 500, 1) == []


class FakeEngine:
    """Does pieces at once; the second piece of the first call is lost with its worker."""

    workers, dashboard, cut_short = 1, None, 0

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def run(
        self, function: Callable[[Any], Any], orders: Sequence[Any], done: Any, care: Care = PLAIN
    ) -> list[Failure]:
        self.calls.append(list(orders))
        failures = []
        for position, order in enumerate(orders):
            if len(self.calls) == 1 and position == 1:
                failures.append(Failure(position, "killed its worker", "killed"))
                continue
            try:
                done(position, function(order))
            except ValueError as error:
                failures.append(Failure(position, str(error)))
        return failures

    def running(self) -> list[Any]:
        return []


def index_of(order: Order) -> int:
    if order.shard.index in (3, 40):
        raise ValueError(f"no {order.shard.index}")
    return order.shard.index


def test_what_fails_in_a_bundle_is_done_again_alone() -> None:
    engine, results, shown = FakeEngine(), {}, []
    failures = run_all(engine, index_of, orders([1_000] * 100), results.__setitem__, PLAIN, shown.append)
    assert [len(piece.orders) for piece in engine.calls[0]] == [32, 32, 32, 4]
    assert [order.shard.index for order in engine.calls[1]] == [3, *range(32, 64)]
    assert [(failure.position, failure.error) for failure in failures] == [(3, "no 3"), (40, "no 40")]
    assert results == {i: i for i in range(100) if i not in (3, 40)}
    assert [list(at) for at in shown] == [[0, 32, 64, 96], [3, *range(32, 64)]]


def test_a_full_disk_ends_a_bundle_at_once() -> None:
    seen = []

    def full(order: Order) -> None:
        seen.append(order.shard.index)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run_bundle(Bundle(full, tuple(orders([1, 1]))))
    assert seen == [0]


@pytest.mark.end_to_end
def test_a_worker_that_dies_in_a_bundle_costs_no_other_shard(tmp_path: Path) -> None:
    results: dict[int, Any] = {}
    pieces = orders([1_000] * 100)
    with open_engine(workers=1) as engine:
        failures = run_all(engine, kill_third, pieces, results.__setitem__, Care(guarded=True))
    assert [failure.position for failure in failures] == [3]
    assert failures[0].kind == "killed"
    assert results == {i: i for i in range(100) if i != 3}


def test_a_plan_looks_at_the_files_of_its_stages_once_however_many_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_text("word\n")
    (tmp_path / "r.yaml").write_text(
        f"name: m\nsources: {{s: {{files: '/x/*.jsonl'}}}}\nstages:\n  - url: {{word_files: [{tmp_path}/words.txt]}}\n"
        "  - exact\ntokenizer: {vocab_size: 300}\ntokens: {holdout_share: 0.1}\n"
    )
    recipe = recipes.load(tmp_path / "r.yaml")
    hashed, looked = [0], [0]

    def hash_of(*parts: Any) -> str:
        hashed[0] += sum(len(part) if isinstance(part, list) else 1 for part in parts)
        return real(*parts)

    real, stamps = plans.hash_of, plans._stamps
    monkeypatch.setattr(plans, "hash_of", hash_of)  # what stands in it as JSON already is of one shard
    monkeypatch.setattr(plans, "_stamps", lambda path: looked.__setitem__(0, looked[0] + 1) or stamps(path))
    counts = {}
    for n in (500, 1_000):
        hashed[0] = looked[0] = 0
        plan = make_plan(recipe, [shard(i, 1_000) for i in range(n)])
        assert len(set(plan.near)) == n
        counts[n] = (hashed[0], looked[0])
    assert counts[1_000][1] == counts[500][1] > 0
    assert counts[1_000][0] < 2.2 * counts[500][0]


def test_parts_that_are_json_already_give_the_same_key() -> None:
    parts = ["read", {"b": 1, "a": [None, 2.5]}, None, 7]
    assert plans._hash_of_canonical(*map(plans._canonical, parts)) == plans.hash_of(*parts)
