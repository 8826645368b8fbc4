"""A small folder of token shards whose text can be learned, and mixtures over it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gristmill.trainer.config import Run, TrainConfig
from gristmill.trainer.group import ALONE
from gristmill.trainer.train import work

sys.path.append(str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path
from token_texts import spelled, write_tokens


@pytest.fixture(scope="session")
def tokens_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: `tidy` can be learned, `noise` cannot."""
    return write_tokens(tmp_path_factory.mktemp("trainer") / "tokens", {"tidy": (400, True), "noise": (150, False)})


@pytest.fixture(scope="session")
def letters() -> str:
    """The 60 characters that the tokenizer of `spelled_tokens` knows, in the order of their ids."""
    return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV .,?:\n'-0123"


@pytest.fixture(scope="session")
def spelled_tokens(tokens_folder: Path, letters: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token shards with a tokenizer that can be read: an id for each letter, and <eos>."""
    return spelled(tokens_folder, tmp_path_factory.mktemp("spelled") / "tokens", letters)


@pytest.fixture(scope="session")
def even(tokens_folder: Path) -> Path:
    """A mixture of both sources, half and half."""
    path = tokens_folder.parent / "even.yaml"
    path.write_text("name: even\nmax_epochs: 1000\nsources: {tidy: 0.5, noise: 0.5}\n")
    return path


@pytest.fixture(scope="session")
def make_run(tokens_folder: Path, even: Path) -> Callable[..., Run]:
    """make_run(out, **changes) -> a run of 20 steps of a tiny model."""

    def make(out: Path, mixture: Path = even, **changes: object) -> Run:
        out.mkdir(parents=True, exist_ok=True)
        settings = {
            "model": {"width": 32, "layers": 2, "heads": 2},
            "seq_len": 32,
            "batch_windows": 8,
            "steps": 20,
            "lr": 0.01,
            "checkpoint_every": 5,
            "keep_last": 4,
            **changes,
        }
        if "budget_tokens" in changes:
            settings.pop("steps")
        config = TrainConfig.model_validate(settings)
        return Run(config=config, mixture=str(mixture), tokens=str(tokens_folder), out=str(out))

    return make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Run]) -> Path:
    """The folder of a finished run of make_run's settings, one rank, in this process."""
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run")
    work(run, ALONE)
    return Path(run.out)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
