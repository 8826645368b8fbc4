"""A stage that some documents are too much for: what it does to them stands in their text."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, judge, log_edges, with_columns


def kill(order: Any) -> None:
    """Work that always ends its process."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_third(order: Any) -> int:
    """Ends its process for the shard with index 3; else the shard's index."""
    if order.shard.index == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return int(order.shard.index)


class Fragile(Settings):
    """Measures length; dies of KILL, CRASH, HANG, HOG and RAISE. Drops texts under `min_chars`."""

    name: ClassVar[str] = "fragile"
    version: ClassVar[int] = 1
    needs: ClassVar[tuple[str, ...]] = ("text",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {"fragile.chars": pa.float64()}
    measures: ClassVar[tuple[Measure, ...]] = (Measure("fragile.chars", "characters", log_edges(1, 1e6)),)
    min_chars: int = 8
    healed: bool = False
    without_effect: ClassVar[tuple[str, ...]] = ("healed",)

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("too_few_chars", "fragile.chars", at_least=self.min_chars),)

    def __call__(self, batch: Batch) -> Result:
        texts = batch["text"].to_pylist()
        for text in texts:
            if not self.healed:
                self._suffer(text)
        chars = pa.array(np.array([len(text) for text in texts], np.float64))
        return judge(with_columns(batch, {"fragile.chars": chars}), self.rules())

    def _suffer(self, text: str) -> None:
        if "KILL" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "CRASH" in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        if "HANG" in text:  # a pattern that backtracks for ever, in C and with the interpreter's lock
            re.match(r"(a+)+$", "a" * 64 + "b")
        if "HOG" in text:
            hog = np.ones(150_000_000)  # 1.2 GB
            while hog.sum():
                pass
        if "RAISE" in text:
            raise ValueError("no such luck")


def flaky(folder: str) -> str:
    """Fails twice with an error of the storage, as a count of files says."""
    before = len(os.listdir(folder))
    open(os.path.join(folder, str(before)), "w").close()
    if before < 2:
        raise ConnectionResetError("the storage is away")
    return f"attempt {before + 1}"


def twice(order: tuple[str, bool]) -> str:
    """The first attempt ends only when a copy of it was begun."""
    marker, is_copy = order
    if is_copy:
        open(marker, "w").close()
        return "copy"
    while marker and not os.path.exists(marker):
        os.sched_yield()
    return "first"


def full(order: int) -> int:
    """A disk without room."""
    raise OSError(28, "No space left on device")


def tokens_or_death(order: Any) -> Any:
    """Token shards of an order, or its sorted part, by an encoder that KILL kills."""
    from gristmill.pipelines.learn import run_tokens
    from gristmill.pipelines.shuffled_tokens import ScatterOrder, run_scatter
    from gristmill.tokenize.encode import Encoder

    encode = Encoder.encode

    def deadly(self: Any, texts: Any) -> Any:
        if any("KILL" in text for text in texts.to_pylist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, texts)

    Encoder.encode = deadly  # type: ignore[method-assign]
    return run_scatter(order) if isinstance(order, ScatterOrder) else run_tokens(order)


def stops(mark: str) -> str:
    """The first attempt stops its own process, as a machine does that hangs."""
    if mark and not os.path.exists(mark):
        with open(mark + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(mark + ".new", mark)
        os.kill(os.getpid(), signal.SIGSTOP)
    return "done"
