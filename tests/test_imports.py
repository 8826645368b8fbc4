"""Imports point one way: stages <- tokenize <- mixtures <- trainer, pipelines on top."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("stages", "tokenize", "mixtures", "trainer", "pipelines")
MAY_IMPORT = {
    "stages": {"stages"},
    "tokenize": {"tokenize", "stages"},
    "mixtures": {"mixtures", "tokenize", "stages"},
    "trainer": {"trainer", "mixtures", "tokenize", "stages"},
    "pipelines": set(FOLDERS),
}
ONLY_IN = {  # package -> the places that may import it
    "dask": ("pipelines/",),
    "distributed": ("pipelines/",),
    "torch": ("trainer/", "mixtures/torch_loader.py"),
    "requests": ("stages/download", "stages/shards.py"),
    "httpx": ("stages/download", "stages/shards.py"),
    "aiohttp": ("stages/download", "stages/shards.py"),
    "urllib.request": ("stages/download", "stages/shards.py"),
    "http.client": ("stages/download", "stages/shards.py"),
    "huggingface_hub": ("stages/download",),
    "s3fs": ("stages/download", "stages/shards.py"),
    "boto3": ("stages/download", "stages/shards.py"),
}


def imported(source: str) -> Iterator[str]:
    """Every module named by an import statement, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield "." * node.level + (node.module or "")


def wrong_edges(place: str, source: str) -> list[str]:
    """Imports of the file at `place` (below the root) that the architecture forbids."""
    folder = place.split("/", maxsplit=1)[0]
    faults = []
    for name in imported(source):
        parts = name.split(".")
        if name.startswith("."):
            faults.append(f"{place}: relative import {name}")
        if parts[0] == "gristmill" and len(parts) > 1 and parts[1] not in MAY_IMPORT[folder]:
            faults.append(f"{place} imports {name}")
        for package, places in ONLY_IN.items():
            if (name == package or name.startswith(f"{package}.")) and not place.startswith(places):
                faults.append(f"{place} imports {name}")
    return faults


def test_imports_point_one_way() -> None:
    faults = []
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 30
    for path in files:
        faults.extend(wrong_edges(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")))
    assert faults == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("stages/x.py", "from gristmill.tokenize.shards import TokenSet"),
        ("tokenize/x.py", "import gristmill.mixtures.plan"),
        ("mixtures/x.py", "def f():\n    from gristmill.trainer import train"),
        ("trainer/x.py", "from gristmill.pipelines.run import run"),
        ("stages/x.py", "import dask.array"),
        ("mixtures/plan.py", "import torch"),
        ("pipelines/x.py", "import requests"),
        ("stages/x.py", "from . import documents"),
    ],
)
def test_an_edge_the_wrong_way_is_found(place: str, source: str) -> None:
    assert len(wrong_edges(place, source)) >= 1


@pytest.mark.parametrize("folder", ["tokenize", "mixtures"])
def test_these_folders_are_namespaces(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_standard_library_is_not_shadowed_in_the_repository_root() -> None:
    code = "import tokenize, linecache; print(tokenize.__file__)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Path(shown.strip()).parent == Path(sysconfig.get_paths()["stdlib"])
    ours = "import gristmill.tokenize.shards as s; print(s.__file__)"
    shown = subprocess.run([sys.executable, "-c", ours], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert Path(shown.strip()).parent == ROOT / "tokenize"
