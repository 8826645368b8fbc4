"""A document that a stage cannot take is found, dropped as `poison`, and remembered; its shard is finished."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.pipelines import poison, work
from gristmill.pipelines.engine import Care, Failure, open_engine
from gristmill.pipelines.isolation import Limits, SetAside, isolated
from gristmill.pipelines.upstream import Upstream, parts_of
from gristmill.stages.ledger import ShardLedger
from gristmill.stages.readers import READ_FIELDS
from gristmill.stages.shards import Shard

sys.path.append(str(Path(__file__).parent))
from poison_stage import Fragile, kill

SCHEMA = pa.schema([*READ_FIELDS.items(), ("text", pa.string()), *Fragile.adds.items()])
ALONE = Care(guarded=True)


def order_of(folder: Path, marks: Mapping[int, str], documents: int = 300, index: int = 0, **stage: Any) -> Any:
    """An order for a shard of that many documents, some of them marked; every tenth is too short."""
    path = folder / f"in-{index}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [f"{marks[i]} document" if i in marks else f"document {i}" if i % 10 else "x" for i in range(documents)]
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    shard = Shard(index=index, source="s", path=str(path), name=path.name, format="jsonl", size=1, stamp="")
    step = work.StageStep("fragile", Fragile(**stage))
    return work.ShardOrder(
        out=str(folder / "run"),
        folder="01-fragile",
        upstream=Upstream(str(folder / "run"), None, 1_000_000, count_unreadable=False),
        shard=shard,
        key=f"key-{index}",
        steps=(step,),
        schema=SCHEMA,
        sample_per_reason=3,
        removals_share=1.0,
    )


def published(order: Any) -> dict[str, bytes]:
    paths = [parts_of(order.out, order.folder, kind, order.shard, "parquet") for kind in ("kept", "dropped")]
    return {path: Path(path).read_bytes() for path in paths}


def gone(order: Any) -> dict[str, list[str]]:
    """doc_id -> reasons of dropped documents."""
    table = pq.read_table(parts_of(order.out, order.folder, "dropped", order.shard, "parquet"))
    return dict(zip(table["doc_id"].to_pylist(), table["reasons"].to_pylist(), strict=True))


def check(order: Any, poisonous: set[str], documents: int = 300) -> ShardLedger:
    """The books balance, and exactly these documents are dropped as poison."""
    path = parts_of(order.out, order.folder, "ledger", order.shard, "json")
    ledger = ShardLedger.opened(Path(path).read_bytes(), path)
    ledger.check(path)
    account = ledger.stages[-1]
    assert account.read.documents == documents
    assert account.dropped["poison"].documents == len(poisonous)
    assert {doc_id for doc_id, reasons in gone(order).items() if reasons == ["poison"]} == poisonous
    assert account.kept.documents + len(gone(order)) == documents
    assert all(any(f"document {doc_id} dropped as poison" in line for line in ledger.problems) for doc_id in poisonous)
    return ledger


def known(order: Any) -> Any:
    """The order as the driver gives it the next time."""
    return replace(order, poison=poison.load(poison.path_of(order), [order.key]))


def test_a_document_that_raises_is_dropped_and_the_same_bytes_come_again(tmp_path: Path) -> None:
    order = order_of(tmp_path, {137: "RAISE", 244: "RAISE"})
    work.run_shard(order)
    check(order, {"d137", "d244"})
    first = published(order)
    found = known(order).poison
    assert [(one.doc_id, one.stage, one.error) for one in found] == [
        ("d137", "fragile", "ValueError: no such luck"),
        ("d244", "fragile", "ValueError: no such luck"),
    ]
    work.run_shard(known(order))
    assert published(order) == first
    # Known documents do not reach the stage, so the same happens where they do no harm.
    work.run_shard(replace(known(order), steps=(work.StageStep("fragile", Fragile(healed=True)),)))
    assert published(order) == first


def test_findings_of_another_key_are_not_taken(tmp_path: Path) -> None:
    order = order_of(tmp_path, {5: "RAISE"})
    work.run_shard(order)
    assert poison.load(poison.path_of(order), ["key-0"])
    assert poison.load(poison.path_of(order), ["other"]) == ()


def test_a_stage_that_takes_nothing_is_a_fault_of_the_stage(tmp_path: Path) -> None:
    order = order_of(tmp_path, dict.fromkeys(range(300), "RAISE"))
    with pytest.raises(poison.StageFault, match=r"stage fragile: cannot take more than 20 documents.*no such luck"):
        work.run_shard(order)
    assert not Path(parts_of(order.out, order.folder, "ledger", order.shard, "json")).exists()


@settings(max_examples=15, deadline=None)
@given(marked=st.sets(st.integers(0, 59), max_size=8))
def test_the_rest_is_as_if_poison_had_never_been_there(
    tmp_path_factory: pytest.TempPathFactory, marked: set[int]
) -> None:
    folder = tmp_path_factory.mktemp("rest")
    order = order_of(folder, dict.fromkeys(marked, "RAISE"), 60)
    work.run_shard(order)
    kept = pq.read_table(parts_of(order.out, order.folder, "kept", order.shard, "parquet"))["doc_id"].to_pylist()
    assert kept == [f"d{i}" for i in range(60) if i not in marked and i % 10]


@pytest.mark.end_to_end
def test_a_document_that_kills_is_found_by_bisection(tmp_path: Path) -> None:
    order = order_of(tmp_path, {137: "KILL", 138: "CRASH"})
    isolated(work.run_shard, order, Limits())
    check(order, {"d137", "d138"})
    errors = {one.doc_id: one.error for one in known(order).poison}
    assert errors == {"d137": "was killed by SIGKILL, out of memory perhaps", "d138": "was killed by SIGSEGV"}
    first = published(order)
    work.run_shard(known(order))  # any later attempt, here or on another worker
    assert published(order) == first
    raising = order_of(tmp_path / "other", {137: "RAISE", 138: "RAISE"})
    work.run_shard(raising)
    assert gone(raising) == gone(order)


@pytest.mark.end_to_end
def test_a_document_that_hangs_is_found(tmp_path: Path) -> None:
    order = order_of(tmp_path, {3: "HANG"}, 16)
    isolated(work.run_shard, order, Limits(timeout_s=4.0, piece_s=3.0))
    check(order, {"d3"}, 16)
    assert [one.error for one in known(order).poison] == ["made no progress for 3 s"]


@pytest.mark.end_to_end
def test_a_document_that_takes_all_memory_is_found(tmp_path: Path) -> None:
    order = order_of(tmp_path, {9: "HOG"}, 16)
    isolated(work.run_shard, order, Limits(timeout_s=60.0, memory_bytes=900_000_000))
    check(order, {"d9"}, 16)
    assert [one.error for one in known(order).poison] == ["used more than its 0.90 GB of memory"]


@pytest.mark.end_to_end
def test_what_the_function_raises_is_raised_here(tmp_path: Path) -> None:
    order = order_of(tmp_path, {})
    Path(order.shard.path).unlink()
    with pytest.raises(work.ShardError, match="the file cannot be opened"):
        isolated(work.run_shard, order, Limits())


@pytest.mark.end_to_end
def test_a_shard_that_kills_without_a_document_is_set_aside(tmp_path: Path) -> None:
    with pytest.raises(SetAside, match="stage start: the process was killed by SIGKILL") as caught:
        isolated(kill, order_of(tmp_path, {}), Limits())
    assert caught.value.attempts == 3


HANGING = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from test_poison import order_of
from gristmill.pipelines.isolation import watched
from gristmill.pipelines.work import run_shard
watched(run_shard, order_of(Path(sys.argv[1]), {}, 10), 30.0)
print("passed", flush=True)
watched(run_shard, order_of(Path(sys.argv[1]), {5: "HANG"}, 10), 0.5)
"""


@pytest.mark.end_to_end
def test_a_worker_that_hangs_ends_itself_even_with_the_interpreter_stuck(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path), str(Path(__file__).parent)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("passed\n", 1), done.stderr
    assert time.monotonic() - began < 100


@pytest.mark.end_to_end
def test_a_cluster_goes_on_without_the_document_that_kills_its_workers(tmp_path: Path) -> None:
    marks: list[dict[int, str]] = [{}, {7: "KILL"}, {}, {11: "RAISE"}]
    orders = [order_of(tmp_path, marked, 60, index) for index, marked in enumerate(marks)]
    results: dict[int, Any] = {}
    with open_engine(workers=1) as engine:
        failures = engine.run(work.run_shard, orders, results.__setitem__, ALONE)
    assert failures == []
    assert set(results) == {0, 1, 2, 3}
    check(orders[1], {"d7"}, 60)
    check(orders[3], {"d11"}, 60)


def test_a_failure_says_what_is_known() -> None:
    from gristmill.pipelines.engine import _failure

    failure = _failure(3, SetAside("fragile", "the process was killed", "last words", 3), 1)
    assert failure == Failure(3, "stage fragile: the process was killed", "killed", "fragile", "last words", attempts=3)
