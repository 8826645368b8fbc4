"""Compiles the kernels once, before workers start: numba keeps what it compiled on disk, and workers load it."""

from __future__ import annotations

import importlib
import os
import pkgutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numba

from gristmill.stages import kernels


def warm() -> str:
    """Calls every kernel on a tiny input -> a line that says what was compiled and how long it took.

    An empty cache is filled by several processes at once: compiling takes about a minute on one core.
    """
    begun = time.perf_counter()
    names = [info.name for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda info: info.name)]
    before = _compiled()
    if not before and (cores := os.cpu_count() or 1) > 1:
        with ProcessPoolExecutor(min(cores, 4), mp_context=get_context("spawn")) as pool:
            list(pool.map(_warm_module, names))
    warmed = [name for name in names if _warm_module(name)]
    seconds = time.perf_counter() - begun
    verb = "Kernels loaded from their cache" if _compiled() <= before else "Kernels compiled"
    return f"{verb} in {seconds:.1f} s: {', '.join(warmed)}."


def _compiled() -> set[str]:
    """The files of machine code in numba's cache."""
    return {str(path) for path in Path(numba.config.CACHE_DIR).rglob("*.nbc")}


def _warm_module(name: str) -> bool:
    """True when the module has kernels to warm."""
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    if not hasattr(module, "warm"):
        return False
    module.warm()
    return True
