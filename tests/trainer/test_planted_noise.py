"""Real English against the same with planted noise: ranked right, with significance, by models trained here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from gristmill.trainer import ablate as module
from gristmill.trainer.ablate import Ablation, ablate

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))
from conftest import write_token_texts
from test_ablate import InProcess

PIECE = 600  # bytes of a document: the bootstrap wants many

ABLATION = """\
name: planted
mixtures: [clean.yaml, noisy.yaml, again.yaml]
seeds: [1, 2]
rank_by: [clean]
control: clean
control_seeds: [3, 4]
train:
  model: {width: 48, layers: 2, heads: 2}
  steps: 60
  seq_len: 64
  batch_windows: 16
  lr: 0.01
  checkpoint_every: 0
  eval_bytes: 30_000
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
    """Bytes as tokens: texts, and the same texts with their characters in another order."""
    rng = np.random.default_rng(0)
    whole = [text.encode() for text in english()]
    texts = [text[low : low + PIECE] for text in whole for low in range(0, len(text), PIECE)]
    noise = [bytes(rng.permutation(np.frombuffer(text, np.uint8))) for text in texts]
    as_ids = {"clean": texts, "noise": noise}
    tokens = {name: [np.frombuffer(t, np.uint8).astype(np.uint16) for t in own] for name, own in as_ids.items()}
    write_token_texts(tmp_path / "tokens", tokens, eos=256)
    mixtures = {"clean": "{clean: 1}", "noisy": "{clean: 0.7, noise: 0.3}", "again": "{clean: 1}"}
    for name, sources in mixtures.items():
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmax_epochs: 1000\nsources: {sources}\n")
    (tmp_path / "ablation.yaml").write_text(ABLATION)
    return tmp_path


def test_clean_text_beats_noise_and_a_copy_is_not_told_apart(planted, monkeypatch):
    monkeypatch.setattr(module, "run", InProcess())
    found = ablate(Ablation.load(planted / "ablation.yaml"), str(planted / "tokens"), str(planted / "out"))
    assert found.mixtures[-1].mixture == "noisy"
    verdicts = {(p.first, p.second): p for p in found.pairs}
    assert verdicts["clean", "noisy"].verdict == "clean is better"
    assert verdicts["noisy", "again"].verdict == "again is better"
    assert verdicts["clean", "noisy"].p < 0.05
    # A copy with the same seed is the same run: no difference at all.
    assert verdicts["clean", "again"].verdict == "not distinguishable"
    assert verdicts["clean", "again"].difference.mean == 0
    assert found.smallest_difference < -verdicts["clean", "noisy"].difference.mean
