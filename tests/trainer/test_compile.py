"""torch.compile of blocks and loss: the same numbers but for rounding. Needs a C++ compiler."""

from __future__ import annotations

import shutil

import pytest
import torch

from gristmill.trainer.attention import _by_products, added_mask, document_mask
from gristmill.trainer.config import ModelShape
from gristmill.trainer.model import Llama, initialise

SHAPE = ModelShape(width=32, layers=2, heads=4, kv_heads=2, hidden=48, vocab_size=50, qk_norm=True, init_std=0.2)


@pytest.mark.end_to_end
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch asks for it itself
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_compiled_gradients_are_those_of_the_code_as_written(dtype, rounding):
    """In bf16, attention is written out in the compiled one: both against float32 as written."""
    ids = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(5))
    documents = torch.tensor([[0] * 9 + [1] * 7, [0] * 16, [0] * 2 + [1] * 14])
    targets = ids[:, 1:].clone()
    targets[0, 3] = -1
    found = []
    for compiled in (False, True):
        model = Llama(SHAPE, dtype if compiled else torch.float32, recompute="selective")
        initialise(model, 3)
        if compiled:
            model.compile_parts()
        nll, penalty = model(ids[:, :-1], targets, documents, 0.01)
        nll.backward()
        found.append([nll.detach(), penalty, *(p.grad for p in model.parameters())])
    for plain, ours in zip(*found, strict=True):
        assert (ours - plain).norm() <= rounding * plain.norm()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_by_products_is_attention(masked):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, 20, 8, generator=generator) for _ in range(3))
    mask = document_mask(torch.tensor([[0] * 7 + [1] * 13, [0] * 20])) if masked else None
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked)
    torch.testing.assert_close(_by_products(q, k, v, added_mask(mask, 20)), exact)
    rough = _by_products(*(part.bfloat16() for part in (q, k, v)), added_mask(mask, 20))
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, atol=0.03, rtol=0.03)
