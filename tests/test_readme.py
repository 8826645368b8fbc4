"""The README's blocks run: Python as it stands, `gristmill` commands against a small finished run."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_prints_what_it_says(code: str) -> None:
    said = [line.split("# ", 1)[1] for line in code.splitlines() if line.startswith("print(")]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "README.md", "exec"), {})
    assert said
    assert shown.getvalue().splitlines() == said


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines()])
def test_command_works_on_a_finished_run(line: str, finished_run: Path, tmp_path: Path) -> None:
    (tmp_path / "out/demo").mkdir(parents=True)
    (tmp_path / "out/demo/run").symlink_to(finished_run)
    (tmp_path / "mixtures").symlink_to(ROOT / "mixtures")
    words = line.split()
    assert words[0] == "gristmill"
    command = [sys.executable, "-m", "gristmill.pipelines.cli", *words[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_folder_tree_names_every_folder() -> None:
    (tree,) = [block for block in blocks("") if "pipelines/ " in block]
    named = {line.split("/")[0] for line in tree.splitlines()}
    there = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith((".", "_"))}
    assert named == there - {"build", "out", "tools", "gristmill.egg-info"}


def test_no_placeholder_is_left() -> None:
    assert "@@" not in TEXT
