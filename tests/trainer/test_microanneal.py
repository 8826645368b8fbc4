"""Microanneals: two trunks, each with and without a source; in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from gristmill.mixtures.mixture import Mixture
from gristmill.pipelines.microanneal import microanneal, with_candidate
from gristmill.pipelines.progress import Display
from gristmill.stages.settings_file import SettingsError
from gristmill.trainer import ablation_run as module
from gristmill.trainer import launch, metrics, train
from gristmill.trainer.config import RUN_FILE, Run, TrainError
from gristmill.trainer.group import ALONE

STEP_TOKENS = 256


def in_process(config: Any, mixture: str, tokens: str, out: str, on_progress: Any = None, key: str = "") -> Any:
    """Takes the place of launch.run."""
    Path(out).mkdir(parents=True, exist_ok=True)
    run = Run(config=config, mixture=mixture, tokens=tokens, out=out, key=key)
    run.save(Path(out) / RUN_FILE)
    train.work(run, ALONE)
    return launch.finished(Path(out), orjson.loads((Path(out) / "done.json").read_bytes())["key"])


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Run]) -> list[str]:
    """Two trunks of 20 steps on both sources at a constant rate."""
    folder, named = tmp_path_factory.mktemp("trunks"), []
    for seed in (1, 2):
        run = make_run(folder / f"trunk-{seed}", schedule="wsd", decay=0.0, warmup=2, seed=seed)
        run.save(Path(run.out) / RUN_FILE)
        train.work(run, ALONE)
        named.append(run.out)
    return named


@pytest.fixture
def control(tmp_path: Path) -> Path:
    path = tmp_path / "anneal.yaml"
    path.write_text("name: anneal\nmax_epochs: 1000\nsources: {tidy: 1}\n")
    return path


def go(trunks: list[str], control: Path, tokens: Path, out: Path, **more: Any) -> Any:
    with Display() as display:
        return microanneal(
            trunks, str(control), more.pop("source", "noise"), str(tokens), 12 * STEP_TOKENS, str(out), display, **more
        )


def test_a_source_that_is_noise_is_found_out(
    trunks: list[str], control: Path, tokens_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run", in_process)
    out = tmp_path / "out"
    ranking = go(trunks, control, tokens_folder, out, share=0.5)
    assert [row.mixture for row in ranking.mixtures] == ["control", "with_noise"]
    assert ranking.rank_by == ["tidy"]  # not by the candidate, which its own text makes better
    assert {run.name for run in ranking.runs} == {f"{m}-seed{n}" for m in ("control", "with_noise") for n in (1, 2)}
    assert ranking.notes[0] == "Each run is a branch of a trunk over 3,072 tokens; 50% of with_noise is noise."
    for n in (1, 2):
        lines = metrics.read(out / f"with_noise-seed{n}/metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(21, 33))
        assert lines[-1]["lr"] < lines[0]["lr"]
        assert Run.load(out / f"control-seed{n}" / RUN_FILE).config.seed == n
    assert Mixture.load(out / "with_noise.yaml").sources["noise"].weight == 0.5
    again = go(trunks, control, tokens_folder, out, share=0.5)
    assert all(run.reused for run in again.runs)


def test_weights_are_shares_of_what_is_left() -> None:
    mixture = Mixture(name="m", sources={"a": 3, "b": 1}, max_epochs=2)
    values = with_candidate(mixture, "new", 0.3)
    assert values["name"] == "with_new"
    assert values["max_epochs"] == 2
    weights = {name: wish["weight"] for name, wish in values["sources"].items()}
    assert weights == pytest.approx({"a": 0.525, "b": 0.175, "new": 0.3})


def test_what_cannot_be_compared_is_refused(
    trunks: list[str], control: Path, tokens_folder: Path, tmp_path: Path
) -> None:
    def refused(message: str, kind: type[Exception] = SettingsError, **more: Any) -> None:
        with pytest.raises(kind, match=message):
            go(more.pop("trunks", trunks), more.pop("control", control), tokens_folder, tmp_path / "out", **more)

    refused("has no source 'nois'. Did you mean `noise`", source="nois")
    refused("has the source 'tidy' already", source="tidy")
    refused("The same trunk is named twice", trunks=[trunks[0], trunks[0]])
    refused("--trunk .*there is no checkpoint of that step", TrainError, trunks=[f"{trunks[0]}@3"])
    phased = tmp_path / "phased.yaml"
    phased.write_text("name: p\nsources: {tidy: 1}\nphases: [{name: a, share: 1.0}]\n")
    refused("plain weights and no phases", control=phased)
    counted = tmp_path / "counted.yaml"
    counted.write_text("name: p\nsources: {tidy: {tokens: 100}}\n")
    refused("each source of the control needs a `weight`", control=counted)
