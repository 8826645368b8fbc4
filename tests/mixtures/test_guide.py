"""docs/mixtures.md: its files, commands and Python run as they stand, on a small finished run."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from gristmill.pipelines import cli

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs/mixtures.md").read_text("utf-8"), re.M | re.S)


@pytest.fixture
def place(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run and the files that the page shows."""
    (tmp_path / "out/demo").mkdir(parents=True)
    (tmp_path / "out/demo/run").symlink_to(finished_run)
    (tmp_path / "mixtures").symlink_to(ROOT / "mixtures")
    for kind, text in BLOCKS:
        if kind == "yaml":
            name = text.splitlines()[0].removeprefix("# ")
            assert name.endswith(".yaml")
            (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.mark.parametrize("line", [line for line in COMMANDS if "measures" not in line])
def test_commands_work(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = shlex.split(line)
    assert words[0] == "gristmill"
    with pytest.raises(SystemExit) as ended:
        cli.main(words[1:])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert said.out.strip()


def test_python_prints_what_it_says(place: Path) -> None:
    names: dict[str, object] = {}
    for kind, code in BLOCKS:
        if kind != "python":
            continue
        said = [line.split("# ", 1)[1] for line in code.splitlines() if line.startswith("print(")]
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(compile(code, "docs/mixtures.md", "exec"), names)
        shown_lines = [line for line in shown.getvalue().splitlines() if not line.startswith("{'")]  # Trainer's log
        assert said
        assert shown_lines == said
