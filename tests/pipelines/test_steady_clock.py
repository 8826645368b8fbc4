"""The wall clock is set back while Dask holds a message back for some milliseconds: it is sent all the same."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from distributed.batched import BatchedSend
from tornado.ioloop import IOLoop

from gristmill.pipelines.steady_clock import keep_steady, steady


class Comm:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    async def write(self, message: Any, **_: Any) -> int:
        self.written += message
        return 1

    def closed(self) -> bool:
        return False

    def abort(self) -> None:
        """Nothing is open."""


@pytest.fixture
def steadied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed.batched.time", lambda: time.time())  # noqa: PLW0108  the one that is set below
    monkeypatch.setattr(IOLoop, "time", IOLoop.time)  # both are given back afterwards
    keep_steady()


@pytest.mark.usefixtures("steadied")
@pytest.mark.parametrize("jump_s", [7_200, -7_200])
def test_messages_are_not_held_back(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    async def talk() -> list[Any]:
        comm, sender = Comm(), BatchedSend(interval="100ms")
        sender.start(comm)
        sender.send("before")
        await asyncio.sleep(0.05)  # written, and the next one is held back for a while
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + jump_s)
        sender.send("after")
        await asyncio.sleep(0.5)
        sender.abort()
        return comm.written

    assert asyncio.run(talk()) == ["before", "after"]


def test_the_clock_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady()
    assert abs(before - time.time()) < 60
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= steady() - before < 60
