"""Attention inside documents: the block mask of a GPU against the exact one, values and gradients, on a CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gristmill.trainer import attention
from gristmill.trainer.attention import attend, block_mask, document_mask, mask_of
from gristmill.trainer.config import ModelShape
from gristmill.trainer.model import Llama, initialise

# Without a GPU `flex_attention` runs as it is written, and says that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
POSITIONS = 161  # two blocks of 128, the second cut


def parts(documents: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(documents), 2, documents.shape[1], 16, generator=generator) for _ in range(3)]


def test_the_rule_by_hand():
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert document_mask(torch.tensor([[0, 0, 1, 1]]))[0, 0].int().tolist() == expected
    assert mask_of(None) is None


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(1, POSITIONS - 1), max_size=6), min_size=2, max_size=2), st.integers(0, 99))
def test_blocks_give_what_the_exact_mask_gives(ends, seed):
    """Two windows, cut anywhere."""
    documents = torch.zeros(2, POSITIONS, dtype=torch.int64)
    for row, cuts in enumerate(ends):
        documents[row, cuts] = 1
    documents = documents.cumsum(dim=1)
    q, k, v = parts(documents, seed)
    exact = attend(q, k, v, document_mask(documents))
    torch.testing.assert_close(attend(q, k, v, block_mask(documents)), exact, atol=1e-5, rtol=1e-5)


def test_gradients_through_blocks(monkeypatch):
    """torch refuses a backward pass on a CPU for its compiled kernel; the plain one behind it has one."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    documents = torch.tensor([[0] * 70 + [1] * 90 + [2], [0] * 161])
    found = []
    for mask in (document_mask(documents), block_mask(documents)):
        leaves = [part.requires_grad_() for part in parts(documents)]
        attend(*leaves, mask).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for exact, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", [document_mask, block_mask])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_document_in_a_window_is_what_it_is_alone(monkeypatch, rule, kv_heads):
    shape = ModelShape(width=64, layers=3, heads=4, kv_heads=kv_heads, vocab_size=50, init_std=0.1, qk_norm=True)
    model = Llama(shape.resolved(50))
    initialise(model, 3)
    monkeypatch.setattr(
        "gristmill.trainer.model.mask_of", lambda documents: None if documents is None else rule(documents)
    )
    texts = [torch.randint(50, (1, length), generator=torch.Generator().manual_seed(length)) for length in (5, 130, 33)]
    owners = torch.cat([torch.full((1, t.shape[1]), i) for i, t in enumerate(texts)], dim=1)
    with torch.no_grad():
        together = model.logits(torch.cat(texts, dim=1), owners)
        apart = torch.cat([model.logits(text) for text in texts], dim=1)
        across = model.logits(torch.cat(texts, dim=1))
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
    assert (across - apart).abs().max() > 1e-2  # or the mask proves nothing


def test_a_gpu_takes_blocks(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(attention, "block_mask", lambda documents: "blocks")
    assert mask_of(torch.zeros(1, 4).as_subclass(OnGpu)) == "blocks"
    assert isinstance(mask_of(torch.zeros(1, 4)), torch.Tensor)
