"""Warming the kernels: a copy of the package with two tiny kernel modules and a cache of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill.pipelines.warmup
import gristmill.stages.kernels as kernels

pytestmark = pytest.mark.end_to_end

KERNEL = """
import numpy as np
from numba import njit

@njit(nogil=True, cache=True)
def added(values):
    total = 0
    for value in values:
        total += value
    return total + {number}

def warm():
    added(np.arange(3))
"""
PROGRAM = """
import numpy as np
from gristmill.pipelines.warmup import warm
print(warm())
from gristmill.stages.kernels import one, two
print(one.__file__)
print(one.added(np.arange(3)), two.added(np.arange(3)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH, in which nothing may be written."""
    root = tmp_path / "site"
    for folder, names in (
        ("stages", ["__init__"]),
        ("stages/kernels", ["__init__"]),
        ("pipelines", ["__init__", "warmup"]),
    ):
        source = Path(kernels.__file__).parent if "kernels" in folder else Path(kernels.__file__).parent.parent
        source = Path(gristmill.pipelines.warmup.__file__).parent if folder == "pipelines" else source
        (root / "gristmill" / folder).mkdir(parents=True)
        for name in names:
            shutil.copy(source / f"{name}.py", root / "gristmill" / folder)
    for number, name in enumerate(("one", "two"), 1):
        (root / "gristmill/stages/kernels" / f"{name}.py").write_text(KERNEL.format(number=number))
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return root


def start(package: Path, cache: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(package), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=cache.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[str], package: Path) -> str:
    """What a process said of its warming; it must have used the copy, and counted right."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    said, file, found = out.splitlines()
    assert Path(file).is_relative_to(package)
    assert found == "4 5"
    return said


def test_processes_that_warm_at_once_and_a_package_that_cannot_be_written(package: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    files = {path: path.stat().st_mtime_ns for path in package.rglob("*")}
    racing = [start(package, cache) for _ in range(2)]
    assert "Kernels compiled in " in "".join([ended(process, package) for process in racing])
    code = {path: path.read_bytes() for path in cache.rglob("*.nbc")}
    assert len(code) == 2
    assert {path.suffix for path in cache.rglob("*") if path.is_file()} == {".nbc", ".nbi"}  # nothing half-written
    assert {path: path.stat().st_mtime_ns for path in package.rglob("*")} == files

    said = ended(start(package, cache), package)
    assert said.startswith("Kernels loaded from their cache in ")
    assert said.endswith(" s: one, two.")
    assert {path: path.read_bytes() for path in cache.rglob("*.nbc")} == code

    for path in sorted(code)[:1]:  # a cache that lost a part, as when a first run was killed
        path.unlink()
    assert ended(start(package, cache), package).startswith("Kernels compiled in ")
