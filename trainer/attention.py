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


class _Products(torch.autograd.Function):
    """Attention written out, for the compiler: scores in q's dtype, softmax in float32, shares stored in q's dtype.

    The backward pass is written out too: of the one that torch derives, the compiler (torch 2.13, CPU) makes code whose
    gradient of k is no number.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        positions = torch.arange(q.shape[-2], device=q.device)
        seen = positions[:, None] >= positions if mask is None else mask
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        shares = torch.softmax(scores.masked_fill(~seen, UNSEEN), dim=-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, shares)
        return shares @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, shares = ctx.saved_tensors
        grad = grads[0]
        d_shares, exact = (grad @ v.transpose(-1, -2)).float(), shares.float()
        d_scores = exact * (d_shares - (d_shares * exact).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        d_scores = d_scores.to(q.dtype)
        return d_scores @ k, d_scores.transpose(-1, -2) @ q, shares.transpose(-1, -2) @ grad, None


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As `attend`; stores (batch, heads, positions, positions)."""
    result: Tensor = _Products.apply(q, k, v, mask)  # type: ignore[no-untyped-call]
    return result


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_width)) v over what may be seen; all (batch, heads, positions, head_width)."""
    if isinstance(mask, BlockMask):
        if q.is_cuda:
            return _compiled_flex()(q, k, v, block_mask=mask)
        seen: Tensor = flex_attention(q, k, v, block_mask=mask)
        return seen
    small = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-2] <= LONGEST_BY_PRODUCTS
    if small and torch.compiler.is_compiling():
        # torch's kernel for CPUs has a slow backward pass in bf16: forward and backward of (16, 5, 256, 64) took 43 ms
        # with it and 19 ms so, of (4, 12, 512, 64) 61 and 41 ms (two cores with AMX).
        return _by_products(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
