"""Ablating the pipeline: variants are run, scored on the same texts that none of them trains on, and ranked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from gristmill.pipelines.cli import app
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options
from gristmill.pipelines.vary import is_variation, load, vary
from gristmill.stages.settings_file import SettingsError
from gristmill.tokenize.shards import TokenSet
from gristmill.trainer import ablation_run as module
from gristmill.trainer import launch, train
from gristmill.trainer.config import Run
from gristmill.trainer.group import ALONE

FILE = """\
name: filters
recipe: small.yaml
mixture: blend.yaml
vary:
  all_pages: {stages.exact: false, stages.minhash: false}
  long_pages: {stages.gopher_quality.min_words: 400}
seeds: [1, 2]
budget_tokens: 2_100
train:
  model: {width: 32, layers: 1, heads: 2}
  seq_len: 32
  batch_windows: 8
  lr: 0.01
"""

VARIANTS = ["all_pages", "control", "long_pages"]


def tokens_of(out: Path, variant: str) -> TokenSet:
    return TokenSet.open(out / "variants" / variant / "tokens")


@pytest.fixture
def file(recipe_file: Callable[..., Path], tmp_path: Path) -> Path:
    recipe_file(replace={"holdout_share: 0.1": "holdout_share: 0.3"})
    (tmp_path / "blend.yaml").write_text("name: blend\nmax_epochs: 100\nsources: {docs: 1, readmes: 1, code: 1}\n")
    (tmp_path / "filters.yaml").write_text(FILE)
    return tmp_path / "filters.yaml"


def in_process(config: Any, mixture: str, tokens: str, out: str, on_progress: Any = None, key: str = "") -> Any:
    """Takes the place of launch.run."""
    Path(out).mkdir(parents=True, exist_ok=True)
    run = Run(config=config, mixture=mixture, tokens=tokens, out=out, key=key)
    run.save(Path(out) / "run.json")
    train.work(run, ALONE)
    return launch.finished(Path(out), orjson.loads((Path(out) / "done.json").read_bytes())["key"])


@pytest.mark.end_to_end
def test_variants_are_run_and_ranked_on_the_same_texts(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "run", in_process)
    out = tmp_path / "out"
    with Display() as display:
        ranking = vary(file, str(out), Options(debug=True), display)
    assert sorted(row.mixture for row in ranking.mixtures) == VARIANTS
    assert {run.name for run in ranking.runs} == {f"{n}-seed{s}" for n in VARIANTS for s in (1, 2)}
    # The scores are of texts that the control holds out and no variant trains on.
    texts = {
        path.stem: [orjson.loads(line) for line in path.read_bytes().splitlines()]
        for path in (out / "held_out").iterdir()
    }
    assert ranking.sources == sorted(f"control.{name}" for name in texts)
    for name, rows in texts.items():
        ids = {row["id"] for row in rows}
        held = {doc_id for doc_id, _, _ in tokens_of(out, "control").holdout[name].documents()}
        assert ids <= held
        for variant in VARIANTS:
            trained = tokens_of(out, variant).sources[name]
            assert not ids & {doc_id for doc_id, _, _ in trained.documents()}
    tokens = {v: sum(s.tokens for s in tokens_of(out, v).sources.values()) for v in VARIANTS}
    assert tokens["long_pages"] < tokens["control"] < tokens["all_pages"]
    said = "\n".join(ranking.notes)
    assert f"control (the recipe as it is): {tokens['control']:,} tokens" in said
    share = (tokens["long_pages"] / tokens["control"] - 1) * 100
    assert f"long_pages (stages.gopher_quality.min_words: 400): {tokens['long_pages']:,} tokens" in said
    assert f", {share:+.1f} % against the control." in said
    capsys.readouterr()
    with Display() as display:
        again = vary(file, str(out), Options(debug=True), display)
    assert all(run.reused for run in again.runs)
    assert "Nothing to train: all 6 runs" in capsys.readouterr().err


def test_files_of_both_kinds_are_told_apart(file: Path) -> None:
    assert is_variation(file)
    assert not is_variation("pipelines/recipes/ablation_demo.yaml")
    settings, ablation = load(file)
    assert (settings.recipe, settings.mixture) == (str(file.parent / "small.yaml"), str(file.parent / "blend.yaml"))
    assert (ablation.name, ablation.seeds, ablation.train.budget_tokens) == ("filters", (1, 2), 2_100)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mixture: blend.yaml", "mixtures: [blend.yaml]", r"filters.yaml:1: `mixture` is missing"),
        ("  all_pages:", "  control:", r"filters.yaml:\d+: .*beside `control`, which is the recipe as it is"),
        ("  all_pages:", "  a/b:", "becomes a folder"),
        ("{stages.gopher_quality.min_words: 400}", "{}", "`long_pages` changes nothing"),
        ("seeds: [1, 2]", "seeds: [1, 1]", r"filters.yaml:\d+: .*1 is named twice"),
        ("recipe: small.yaml", "recipe: smal.yaml", "Did you mean .*small.yaml"),
        ("min_words: 400", "min_wrods: 150", "variant long_pages: .*Did you mean `min_words`"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    file: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    with Display() as display, pytest.raises(SettingsError, match=message):
        vary(file, str(tmp_path / "out"), Options(debug=True), display)
    assert not (tmp_path / "out/variants").exists()


def test_a_recipe_without_held_out_documents_is_refused(
    file: Path, tmp_path: Path, recipe_file: Callable[..., Path]
) -> None:
    recipe_file(replace={"holdout_share: 0.1": "holdout_share: 0.0"})
    with Display() as display, pytest.raises(SettingsError, match="variant control has no token shards with held-out"):
        vary(file, str(tmp_path / "out"), Options(debug=True), display)


def test_the_command_wants_no_tokens(file: Path) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["ablate", str(file), "--tokens", "out/run/tokens"])
    assert result.exit_code != 0
    assert "leave out --tokens" in str(result.exception) + result.output
