"""Real English against the same with planted noise: ranked right, with significance, by models trained here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gristmill.trainer import ablation_run as module
from gristmill.trainer.ablate import Ablation, ablate

sys.path.append(str(Path(__file__).parent))
from test_ablate import InProcess
from token_texts import write_token_texts

SPOILT = 0.3  # of the bytes of a document
PIECE = 600  # bytes of a document: the bootstrap wants many

ABLATION = """\
name: planted
mixtures: [clean.yaml, noisy.yaml]
seeds: [1, 2]
rank_by: [clean]
control: clean
control_seeds: [3, 4]
train:
  model: {width: 32, layers: 2, heads: 2}
  steps: 40
  seq_len: 64
  batch_windows: 16
  lr: 0.01
  checkpoint_every: 0
  eval_bytes: 20_000
"""


def english() -> list[str]:
    """Documentation of the standard library, as the corpus of the other tests has it."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("corpus_of_tests", Path(__file__).parents[1] / "conftest.py")
    corpus = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(corpus)
    return [text for _, text in corpus.docstrings()]


@pytest.fixture
def planted(tmp_path) -> Path:
    """Bytes as tokens: texts, and the same with characters replaced at random."""
    rng = np.random.default_rng(0)
    whole = [text.encode() for text in english()]
    texts = [text[low : low + PIECE] for text in whole for low in range(0, len(text), PIECE)]
    spoilt = []
    for text in texts:
        swapped = rng.random(len(text)) < SPOILT
        spoilt.append(bytes(np.where(swapped, rng.integers(32, 127, len(text)), list(text)).astype(np.uint8)))
    as_ids = {"clean": texts, "spoilt": spoilt}
    tokens = {name: [np.frombuffer(t, np.uint8).astype(np.uint16) for t in own] for name, own in as_ids.items()}
    write_token_texts(tmp_path / "tokens", tokens, eos=256)
    mixtures = {"clean": "{clean: 1}", "noisy": "{spoilt: 1}"}
    for name, sources in mixtures.items():
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmax_epochs: 1000\nsources: {sources}\n")
    (tmp_path / "ablation.yaml").write_text(ABLATION)
    return tmp_path


def test_clean_text_beats_planted_noise_with_significance(planted, monkeypatch):
    monkeypatch.setattr(module, "run", InProcess())
    found = ablate(Ablation.load(planted / "ablation.yaml"), str(planted / "tokens"), str(planted / "out"))
    assert [row.mixture for row in found.mixtures] == ["clean", "noisy"]
    (pair,) = found.pairs
    assert pair.verdict == "clean is better"
    assert pair.p < 0.01
    assert found.smallest_difference < abs(pair.difference.mean)
    # On the noise itself the other mixture is better, and the ranking says so too.
    assert next(row for row in found.measures if row.name == "spoilt").pairs[0].verdict == "noisy is better"
