"""The command line: help that ends in an example, exit codes that mean something, JSON where a program reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gristmill.pipelines.cli import app, main

VERBS = (
    "demo",
    "run",
    "status",
    "inspect",
    "report",
    "compare",
    "mixture",
    "train",
    "ablate",
    "verify",
    "warmup",
    "calibrate",
    "models",
    "tokenizer",
    "tokens",
)

TOKEN_VERBS = ("tokenizer train", "tokenizer report", *(f"tokens {v}" for v in "show verify export import".split()))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_all_verbs_are_there() -> None:
    assert set(VERBS) <= set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", [*VERBS, "mixture plan", "models train", "models eval", "models score", *TOKEN_VERBS])
def test_help_ends_in_an_example(verb: str) -> None:
    shown = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert shown.exit_code == 0
    assert f"Example:  gristmill {verb.split(maxsplit=1)[0]}" in " ".join(shown.output.split("\n\n")[-1].split("\n"))


def test_status_and_verify_as_json(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "status", str(finished_run), "--json")
    assert code == 0
    rows = json.loads(out)["segments"]
    assert rows[0]["segment"] == "01-extract"
    assert [stage["stage"] for stage in rows[0]["by_stage"]][:2] == ["read", "extract"]
    assert json.loads(out)["driver"]["alive"] is False
    assert all(row["done"] == row["shards"] for row in rows)
    code, out, _ = call(capsys, "verify", str(finished_run), "--json")
    assert code == 0
    assert json.loads(out) == {"run": str(finished_run), "sound": True, "problems": []}


def test_inspect_as_json_lines(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "inspect", str(finished_run), "--stage", "exact", "-n", "2", "--json")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert 1 <= len(found) <= 2
    assert all(document["stage"] == "exact" for document in found)


def test_a_wrong_question_is_2_and_a_failure_is_1(
    tmp_path: Path, finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "run", str(tmp_path / "none.yaml"))
    assert (code, "no such file" in err) == (2, True)
    code, _, err = call(capsys, "status", str(tmp_path / "none"))
    assert (code, "There is no run folder" in err) == (2, True)
    code, _, err = call(capsys, "run", "--no-such-option")
    assert code == 2
    broken = tmp_path / "run"
    broken.mkdir()
    code, out, _ = call(capsys, "verify", str(broken))
    assert (code, "nothing to verify" in out) == (1, True)


def test_a_faulty_mixture_is_asked_wrongly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: m\nsources: {docs: {wieght: 1}}\n", "utf-8")
    code, out, err = call(capsys, "mixture", "plan", str(path), "--tokens", str(tmp_path))
    assert (code, out) == (2, "")
    assert err == f"{path}:2: unknown key `sources.docs.wieght`. Did you mean `weight`?\n"


def test_dry_run_says_what_is_left(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(finished_run.parent / "small.yaml")
    code, out, _ = call(capsys, "run", recipe, "--out", str(finished_run), "--dry-run", "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["todo"] == 0
    assert plan["found"] > 20
    assert [s["segment"] for s in plan["segments"]][-1] == "04-minhash"


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys, gristmill.pipelines.cli; print([m for m in ('torch', 'numba', 'distributed') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
