"""Models and lists are loaded once a process, and again when their files change.

A worker outlives a run: a model trained anew under the same path must not be scored with the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def stamp(path: str | None) -> tuple[tuple[str, int, int], ...]:
    """(name, size, modification time in ns) of a local file or of each file of a folder; empty where there is none."""
    if path is None:
        return ()
    root = Path(path)
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    states = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def loaded_once(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`lru_cache` for a function whose first argument is a path: what it gave is kept until the files change."""

    def decorate(load: Callable[P, R]) -> Callable[P, R]:
        @lru_cache(maxsize=maxsize)
        def cached(_stamp: Any, args: Any, kwargs: Any) -> R:
            return load(*args, **dict(kwargs))

        @wraps(load)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            path = args[0] if args else next(iter(kwargs.values()), None)
            return cached(stamp(path if path is None else str(path)), args, tuple(sorted(kwargs.items())))

        return call

    return decorate
