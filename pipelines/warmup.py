"""Compiles the kernels once, before workers start: numba keeps what it compiled on disk, and workers load it."""

from __future__ import annotations

import importlib
import pkgutil
import time

from gristmill.stages import kernels


def warm() -> str:
    """Calls every kernel on a tiny input -> a line that says what was compiled and how long it took."""
    begun = time.perf_counter()
    names = []
    for info in sorted(pkgutil.iter_modules(kernels.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        if hasattr(module, "warm"):
            module.warm()
            names.append(info.name)
    seconds = time.perf_counter() - begun
    verb = "Kernels compiled" if seconds > 5 else "Kernels loaded from their cache"
    return f"{verb} in {seconds:.1f} s: {', '.join(names)}."
