"""The engine when things break: windows, retries, stragglers, full disks, workers that are not alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.pipelines import engine as engines
from gristmill.pipelines.engine import WINDOW, Care, EngineError, OnDask, open_engine, straggling
from gristmill.pipelines.worker_check import compare_workers, differences, here, look

sys.path.append(str(Path(__file__).parent))
from poison_stage import flaky, full, kill, twice


class FakeFuture:
    """Ends when the client says so."""

    status = "finished"

    def __init__(self, client: FakeClient, value: Any) -> None:
        self._client, self._value = client, value

    def add_done_callback(self, ended: Callable[[Any], None]) -> None:
        self._client.flying.append((self, ended))
        self._client.most = max(self._client.most, len(self._client.flying))
        if len(self._client.flying) == self._client.holds:  # the scheduler is as full as it gets: one ends
            future, first = self._client.flying.pop(0)
            first(future)

    def result(self) -> Any:
        return self._value

    def release(self) -> None:
        return


class FakeClient:
    """Two workers; calls the function at once, and ends futures one by one when the window is full."""

    dashboard_link, status = None, "running"

    def __init__(self, holds: int) -> None:
        self.holds, self.most = holds, 0
        self.flying: list[tuple[FakeFuture, Callable[[Any], None]]] = []

    def nthreads(self) -> dict[str, int]:
        return {"tcp://a": 1, "tcp://b": 1}

    def submit(self, call: Any, function: Any, order: Any, timeout_s: float, **_: Any) -> FakeFuture:
        return FakeFuture(self, function(order))


def test_the_scheduler_holds_a_few_pieces_a_worker_however_many_there_are() -> None:
    pieces = 50_000
    client = FakeClient(holds=WINDOW * 2)
    done: list[int] = []

    def land(position: int, result: int) -> None:
        assert result == position * 2
        done.append(position)
        if len(done) > pieces - client.holds and client.flying:  # nothing is submitted any more: let the rest end
            future, ended = client.flying.pop(0)
            ended(future)

    failures = OnDask(client).run(lambda order: order * 2, range(pieces), land)
    assert failures == []
    assert len(done) == pieces
    assert client.most == WINDOW * 2


class Piece:
    def __init__(self, started: float | None, copied: bool = False) -> None:
        self.started, self.copied = started, copied


def test_a_straggler_takes_twice_the_median_and_half_a_minute() -> None:
    old, young, copied, waiting = Piece(0.0), Piece(75.0), Piece(0.0, True), Piece(None)
    pieces = [old, young, copied, waiting]
    assert straggling(pieces, [10, 20, 30], 100.0, 30.0) == [old]  # 100 s against 2 x 20 s; 25 s is under 40 s
    assert straggling(pieces, [1, 1, 1], 100.0, 30.0) == [old]  # 2 s would do, but under 30 s nothing is copied
    assert straggling(pieces, [60, 60, 60], 100.0, 30.0) == []
    assert straggling(pieces, [], 100.0, 30.0) == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[OnDask]:
    with open_engine(workers=2) as engine:
        assert isinstance(engine, OnDask)
        engine.pauses_s, engine.straggler_s = (0.01, 0.01), 0.2
        yield engine


@pytest.mark.end_to_end
def test_a_piece_that_is_slow_near_the_end_is_begun_on_another_worker(cluster: OnDask, tmp_path: Path) -> None:
    slow = (str(tmp_path / "begun"), False)
    quick = ("", False)
    results: dict[int, str] = {}
    care = Care(copy=lambda order: (order[0], True))
    assert cluster.run(twice, [slow, quick, quick], results.__setitem__, care) == []
    assert results[1] == results[2] == "first"
    assert results[0] in ("copy", "first")  # whichever ends first
    assert (tmp_path / "begun").exists()


@pytest.mark.end_to_end
def test_errors_of_the_storage_are_tried_again_on_workers(cluster: OnDask, tmp_path: Path) -> None:
    results: dict[int, str] = {}
    assert cluster.run(flaky, [str(tmp_path)], results.__setitem__) == []
    assert results == {0: "attempt 3"}


@pytest.mark.end_to_end
def test_a_full_disk_ends_the_work(cluster: OnDask) -> None:
    failures = cluster.run(full, list(range(100)), lambda *_: None)
    assert 1 <= len(failures) < 100
    assert failures[0].kind == "storage"
    assert "No space left on device" in failures[0].error


@pytest.mark.end_to_end
def test_a_piece_that_kills_three_workers_is_given_up_and_its_neighbours_are_not(
    cluster: OnDask, tmp_path: Path
) -> None:
    results: dict[int, str] = {}
    orders: list[Any] = [("", False)] * 6
    (failure,) = cluster.run(kill, [0], lambda *_: None)
    assert (failure.kind, failure.attempts) == ("killed", 3)
    assert "the process was killed by SIGKILL" in failure.error
    assert cluster.run(twice, orders, results.__setitem__) == []
    assert len(results) == 6


@pytest.mark.end_to_end
def test_workers_that_are_alike_pass_and_leave_nothing_behind(cluster: OnDask, tmp_path: Path) -> None:
    compare_workers(cluster._client, "tcp://x", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Answers:
    """A client whose workers say what a test wants."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said

    def wait_for_workers(self, count: int, timeout: float) -> None:
        if not self._said:
            raise TimeoutError

    def run(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self._said


def answer(**change: Any) -> dict[str, Any]:
    return {"host": "node7", "here": here(), "storage": "", "answer": "", **change}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            {"tcp://7": answer(here={**here(), "numpy": "1.0", "machine": "sparc"})},
            r"1 of 1 workers of tcp://s.*\n  node7 \(tcp://7\) runs other versions: machine .* here, sparc there, "
            r"numpy .* here, 1\.0 there\. Install the same ones",
        ),
        ({"tcp://7": ModuleNotFoundError("gristmill")}, "tcp://7 cannot import gristmill"),
        ({"tcp://7": answer(storage="PermissionError: no")}, r"node7 .* cannot use the run folder .*PermissionError"),
        ({"tcp://7": answer(answer=".gone.tmp")}, "writes to a folder .* of its own, which is not seen here"),
        ({}, "has no worker. Start at least one"),
    ],
)
def test_workers_that_cannot_do_the_work_are_named(tmp_path: Path, said: dict[str, Any], wanted: str) -> None:
    with pytest.raises(EngineError, match=wanted):
        compare_workers(Answers(said), "tcp://s", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_looks_at_the_storage(tmp_path: Path) -> None:
    question = tmp_path / "question"
    assert "not on a storage that all machines share" in look(str(question), str(tmp_path), "w")["storage"]
    question.write_text("other")
    assert "another folder of the same name" in look(str(question), str(tmp_path), "w")["storage"]
    question.write_text("w")
    said = look(str(question), str(tmp_path), "w")
    assert said["storage"] == ""
    assert (tmp_path / said["answer"]).exists()
    assert differences({"a": "1", "b": "2"}, {"a": "1"}) == "b 2 here, none there"


def test_a_lost_scheduler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(holds=1_000)
    client.status = "closed"
    with pytest.raises(engines.EngineError, match="The connection to the scheduler is lost"):
        OnDask(client).run(lambda order: order, [1], lambda *_: None)
