"""What was loaded from a path is loaded again when the file changes."""

from __future__ import annotations

import os
from pathlib import Path

from gristmill.stages.loading import loaded_once, stamp


def test_loaded_once_until_the_file_changes(tmp_path: Path) -> None:
    calls = []

    @loaded_once(4)
    def load(path: str, suffix: str = "") -> str:
        calls.append(path)
        return "".join(p.read_text() for p in sorted(Path(path).iterdir())) + suffix

    (tmp_path / "model").write_text("old")
    assert load(str(tmp_path)) == load(str(tmp_path)) == "old"
    assert len(calls) == 1
    assert load(str(tmp_path), suffix="!") == "old!"
    (tmp_path / "model").write_text("new")
    os.utime(tmp_path / "model", ns=(1, 1))
    assert load(str(tmp_path)) == "new"
    (tmp_path / "more").write_text("er")
    assert load(str(tmp_path)) == "newer"


def test_no_path_and_a_missing_one_have_no_stamp(tmp_path: Path) -> None:
    assert stamp(None) == ()
    assert stamp(str(tmp_path / "none")) == ()
