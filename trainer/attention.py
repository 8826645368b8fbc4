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

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

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


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(head_width)) v over what may be seen; all (batch, heads, positions, head_width)."""
    if isinstance(mask, BlockMask):
        if q.is_cuda:
            return _compiled_flex()(q, k, v, block_mask=mask)
        seen: Tensor = flex_attention(q, k, v, block_mask=mask)
        return seen
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
