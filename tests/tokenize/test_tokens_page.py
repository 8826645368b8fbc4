"""The blocks of docs/tokens.md run: its commands in their order, on a finished run, and its mixture."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.mixtures.mixture import Mixture
from gristmill.pipelines.cli import app
from gristmill.pipelines.recipe import TokenSettings
from gristmill.tokenize.train import TokenizerSettings

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tokens.md").read_text("utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.M | re.S)


@pytest.fixture(scope="module")
def used(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all commands of the page were run."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(finished_run, folder / "out/demo/run")
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) == 11
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for line in lines:
            words = shlex.split(line)
            assert words[0] == "gristmill"
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}"
            assert done.output.strip()
    return folder


def test_the_commands_made_what_they_say(used: Path) -> None:
    for name in ("mine.json", "out/megatron/docs_train.idx", "out/datatrove/code_train.ds", "out/all/shards.json"):
        assert (used / name).exists(), name


def test_the_mixture_draws_from_what_was_imported(used: Path) -> None:
    (block,) = blocks("yaml")
    (used / "m.yaml").write_text(block)
    plan = Mixture.load(str(used / "m.yaml")).plan(used / "out/all", seq_len=64, budget_tokens=3_000, seed=1)
    drawn = {batch.sources[int(i)] for batch in plan.loader(batch_windows=4) for i in batch.source}
    assert drawn == {"mega", "trove", "readmes"}


@pytest.mark.parametrize(("section", "model"), [("tokenizer", TokenizerSettings), ("tokens", TokenSettings)])
def test_the_tables_name_every_setting(section: str, model: type) -> None:
    table = TEXT.split(f"| setting of `{section}` |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(model.model_fields)
