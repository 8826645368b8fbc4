"""Activation checkpointing: what a block's forward pass does not keep, its backward pass computes again.

none       everything is kept
selective  results of matrix products and of attention are kept; norms, rotations and products of gates are made
           again: little time for about half of the memory (Korthikanti et al. 2022, section 5, draw the line so)
full       only the block's input is kept: one more forward pass (Chen et al. 2016), a third more time at most
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

Recompute = Literal["none", "selective", "full"]

_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.linear.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


def _policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)


def recomputed(block: Callable[..., Tensor], how: Recompute, *arguments: Any) -> Tensor:
    """block(*arguments), the same values and gradients whatever `how`. Nothing random may be in the block."""
    if how == "none" or not torch.is_grad_enabled():
        return block(*arguments)
    contexts = selective_contexts if how == "selective" else noop_context_fn
    result: Tensor = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return result
