"""Warming the kernels: a copy of the package with two tiny kernel modules and a cache of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
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


def start(package: Path, cache: Path, **more: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment |= more | {"PYTHONPATH": str(package), "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
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


def test_a_given_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """What it holds is taken along, code before its index, and what the user's own place has is left as it is."""
    given = tmp_path / "given"
    (given / "name/one_ab").mkdir(parents=True)
    for name in ("f-1.nbi", "f-1.1.nbc", "g-1.nbi", "notes.txt"):
        (given / "name/one_ab" / name).write_text(name)
    (tmp_path / "own/gristmill/name/one_ab").mkdir(parents=True)
    (tmp_path / "own/gristmill/name/one_ab/g-1.nbi").write_text("mine")
    for path in (tmp_path / "own/gristmill", tmp_path / "own/gristmill/name"):
        path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    real = tempfile.TemporaryFile

    def read_only(*, dir: Path) -> object:
        if Path(dir).is_relative_to(given):
            raise OSError(30, "Read-only file system")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    own = kernels.chosen_folder(str(given), "name")
    assert own == tmp_path / "own/gristmill/name"
    there = {path.name: path.read_text() for path in (own / "one_ab").iterdir()}
    assert there == {"f-1.nbi": "f-1.nbi", "f-1.1.nbc": "f-1.1.nbc", "g-1.nbi": "mine"}
    (warned,) = [str(warning.message) for warning in recwarn]
    assert "Read-only file system" in warned
    assert "2 files of the given place were copied" in warned


@pytest.mark.parametrize("given", ["kernels", "/proc/nowhere"])  # where nobody, not even root, makes a folder
def test_a_process_with_a_place_given(package: Path, tmp_path: Path, given: str) -> None:
    cache = tmp_path / "cache"
    process = start(package, cache, NUMBA_CACHE_DIR=str(tmp_path / given))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert out.splitlines()[-1] == "4 5"
    assert ("cannot be written" in err) == (given != "kernels")
    used = cache if given != "kernels" else tmp_path / given
    assert len(list(used.rglob("kernels-*/**/*.nbc"))) == 2
