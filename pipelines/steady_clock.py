"""A clock for Dask's messages that no time server sets back.

`distributed.batched` holds messages back until a time of the wall clock, a few milliseconds from now, and tornado's
timers are of the same clock. Set back by two hours between the two, it holds all messages for two hours: workers that
are done, and a driver that never hears of it. Here both take the wall clock of the process's start, and count on by
themselves.
"""

from __future__ import annotations

import time
from typing import Any

_OFFSET = time.time() - time.monotonic()


def steady() -> float:
    """Seconds since 1970, as the clock stood when this was loaded."""
    return _OFFSET + time.monotonic()


def keep_steady() -> None:
    """For this process: a driver, a scheduler or a worker."""
    from distributed import batched
    from tornado.ioloop import IOLoop

    batched.time = steady
    IOLoop.time = lambda self: steady()  # type: ignore[method-assign]


def dask_setup(worker: Any) -> None:
    """What Dask calls in a process that preloads this module."""
    keep_steady()
