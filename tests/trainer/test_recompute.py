"""Activation checkpointing: the same gradients to the bit, and as many numbers kept as the plan counts."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.trainer import recompute
from gristmill.trainer.config import ModelShape
from gristmill.trainer.model import Llama, initialise
from gristmill.trainer.sizing import activation_values

SHAPE = ModelShape(width=32, layers=2, heads=4, kv_heads=2, hidden=48, vocab_size=50, qk_norm=True, init_std=0.2)
IDS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(5))
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 7, [0] * 16, [0] * 2 + [1] * 14])


def gradients(how: recompute.Recompute, dtype: torch.dtype, masked: bool) -> dict[str, torch.Tensor]:
    model = Llama(SHAPE, dtype, how)
    initialise(model, 3)
    nll, _ = model(IDS[:, :-1], IDS[:, 1:].contiguous(), DOCUMENTS if masked else None)
    nll.backward()
    return {"nll": nll.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_gradients_are_the_same(how, dtype, masked):
    plain, ours = gradients("none", dtype, masked), gradients(how, dtype, masked)
    for name, value in plain.items():
        assert torch.equal(ours[name], value), name
        assert value.abs().sum() > 0


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in recompute.KEPT
        return func(*args, **(kwargs or {}))


def products(how) -> int:
    model = Llama(SHAPE, recompute=how)
    initialise(model, 3)
    with Products() as seen:
        model.hidden(IDS).sum().backward()
    return seen.count


def test_selective_repeats_no_product_and_full_repeats_them_all():
    a_block = 8  # q, k, v, attention, o, gate, up, down
    none = products("none")
    assert products("selective") == none
    # Recomputing stops where nothing more is needed: the last product of a block is not made again.
    assert products("full") == none + SHAPE.layers * (a_block - 1)


def kept_bytes(how: recompute.Recompute, dtype: torch.dtype) -> int:
    """Bytes of what one forward pass of a block made and that is still there at its end, its result left out."""
    model = Llama(SHAPE, dtype, how)
    initialise(model, 3)
    made: list[tuple[StorageWeakRef, int]] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.dtype == dtype:
                    storage = tensor.untyped_storage()
                    made.append((StorageWeakRef(storage), storage.nbytes()))
            return out

    weights = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    x = torch.randn(4, 64, SHAPE.width, dtype=dtype).requires_grad_()
    table = torch.ones(64, 8, dtype=dtype)
    with Made():
        out = model.layers[0](x, table, table, None)
    alive = {ref.cdata: size for ref, size in made if not ref.expired() and ref not in weights}
    alive.pop(StorageWeakRef(out.untyped_storage()).cdata)
    return sum(alive.values())


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_what_a_block_keeps_is_what_the_plan_counts(how):
    tokens, size = 4 * 64, 4
    expected = activation_values(SHAPE, how) - SHAPE.width  # the input was there before
    assert kept_bytes(how, torch.float32) == pytest.approx(tokens * size * expected, rel=0.05, abs=1)
