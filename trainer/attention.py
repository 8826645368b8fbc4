"""Attention inside documents: an exact mask on a CPU, blocks that are skipped on a GPU.

    mask = mask_of(documents)               # None, a Tensor or a BlockMask, by the device
    y = attend(q, k, v, mask)

On a GPU `flex_attention` compiles the rule into its kernel: no matrix of positions by positions is stored, and blocks
in which nothing may be seen cost nothing (Dong et al. 2024, Flex Attention). On a CPU it has no backward pass, and the
mask is a matrix of bools. Both give the same numbers, in a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

LONGEST_BY_PRODUCTS = 1024  # positions
UNSEEN = -1e30  # a score whose share is 0 in float32
Mask = Tensor | BlockMask | None  # None: causal, over document boundaries


def document_mask(documents: Tensor) -> Tensor:
    """(batch, positions) numbers -> (batch, 1, positions, positions) bool: causal, and inside one document."""
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril()[:, None]


def block_mask(documents: Tensor) -> BlockMask:
    """The same rule as `document_mask`, for `flex_attention`."""
    batch, positions = documents.shape

    def inside(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[b, query] == documents[b, key])

    return create_block_mask(inside, batch, None, positions, positions, device=documents.device)


def mask_of(documents: Tensor | None) -> Mask:
    """What `attend` takes, for numbers of documents (batch, positions) int; None where attention crosses documents."""
    if documents is None:
        return None
    return block_mask(documents) if documents.is_cuda else document_mask(documents)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """As written it stores all scores. Made at the first use: the compiler's packages take seconds to load."""
    return torch.compile(flex_attention, dynamic=False)


def by_products(dtype: torch.dtype, positions: int, device: torch.device) -> bool:
    """Whether compiled code attends by `_Products`.

    torch's kernel for CPUs has a slow backward pass in bf16: forward and backward of (16, 5, 256, 64) took 43 ms with
    it and 19 ms so, of (4, 12, 512, 64) 61 and 41 ms (two cores with AMX).
    """
    return device.type == "cpu" and dtype == torch.bfloat16 and positions <= LONGEST_BY_PRODUCTS


def added_mask(mask: Tensor | None, positions: int) -> Tensor:
    """What `_Products` adds to scores, float32, made once for all blocks: 0 where something is seen, else UNSEEN."""
    seen = torch.ones(positions, positions, dtype=torch.bool).tril() if mask is None else mask
    return torch.where(seen, 0.0, UNSEEN)


class _Products(torch.autograd.Function):
    """Attention written out, for the compiler, as Flash attention does it (Dao 2023, section 3.1): exponentials are
    stored in q's dtype, and rows divided by their float32 sums after the product with v; the backward pass takes its
    sum over keys from the result. Scores stay in q's dtype.

    The backward pass is written out: of the one that torch derives, the compiler (torch 2.13, CPU) makes code whose
    gradient of k is no number.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5 + mask
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        inverse = 1 / powers.sum(-1, keepdim=True)
        powers = powers.to(q.dtype)
        result = ((powers @ v).float() * inverse).to(q.dtype)
        ctx.save_for_backward(q, k, v, powers, inverse, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, powers, inverse, result = ctx.saved_tensors
        grad = grads[0]
        mean = (grad.float() * result.float()).sum(-1, keepdim=True)  # over keys, of what each would change
        d_shares = (grad @ v.transpose(-1, -2)).float()
        d_scores = powers.float() * ((d_shares - mean) * (inverse * q.shape[-1] ** -0.5))
        d_scores = d_scores.to(q.dtype)
        d_v = powers.transpose(-1, -2) @ (grad.float() * inverse).to(q.dtype)
        return d_scores @ k, d_scores.transpose(-1, -2) @ q, d_v, None


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As `attend`, mask from `added_mask`; stores (batch, heads, positions, positions)."""
    result: Tensor = _Products.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return result


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_width)) v over what may be seen; all (batch, heads, positions, head_width)."""
    if isinstance(mask, BlockMask):
        if q.is_cuda:
            return _compiled_flex()(q, k, v, block_mask=mask)
        seen: Tensor = flex_attention(q, k, v, block_mask=mask)
        return seen
    if mask is not None and mask.is_floating_point():
        return _by_products(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
