"""Cross-entropy of the output layer, without the full matrix of logits.

`token_nll` projects a few rows at a time and takes the gradient of each piece at once, while its logits are still in
cache. What is kept for the backward pass is the gradient of the hidden states and of the output matrix: for 4,096
tokens and 50,000 ids that is megabytes where the logits would be a gigabyte. The idea is that of Liger Kernel's fused
linear cross-entropy (Hsu et al. 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROJECT_LOGITS = 1 << 20  # projected at a time: 4 MiB of float32, about what a core's cache holds
GRADIENT_LOGITS = 1 << 23  # whose gradient goes to the output matrix in one product


def _pieces(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, with_grad: bool) -> Any:
        rows, vocab = len(hidden), len(weight)
        everything = bool((targets >= 0).all())
        nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
        penalty = torch.zeros_like(nll)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if with_grad else None
        project = max(32, PROJECT_LOGITS // vocab)
        outer = max(project, GRADIENT_LOGITS // vocab)
        d_logits = hidden.new_empty(min(outer, rows), vocab) if with_grad else None
        for block in _pieces(rows, outer):
            for piece in _pieces(block.stop - block.start, project):
                at = slice(block.start + piece.start, block.start + piece.stop)
                mask = (targets[at] >= 0).float()[:, None]  # (n, 1)
                target = targets[at].clamp_min(0)[:, None]
                logits = hidden[at] @ weight.T  # (n, vocab)
                chosen_logit = logits.gather(1, target).float()
                log_p = torch.log_softmax(logits, dim=1, dtype=torch.float32)
                chosen = log_p.gather(1, target)
                log_z = chosen_logit - chosen  # (n, 1)
                # Left out by selection: a product with 0 would let an infinite loss through as NaN.
                nll -= torch.where(mask > 0, chosen, 0.0).sum()
                penalty += torch.where(mask > 0, log_z.square(), 0.0).sum()
                if d_logits is not None:
                    # d nll / d logits = softmax - one-hot; d log_z^2 / d logits = 2 log_z softmax
                    softmax = log_p.exp_()
                    if z_loss or not everything:
                        softmax.mul_((1 + 2 * z_loss * log_z) * mask)
                    d_logits[piece] = softmax.scatter_add_(1, target, -mask)
            if d_hidden is not None and d_weight is not None and d_logits is not None:
                part = d_logits[: block.stop - block.start]
                torch.mm(part, weight, out=d_hidden[block])
                d_weight += part.T @ hidden[block]
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(penalty)
        return nll, penalty

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        return d_hidden * scale.to(d_hidden.dtype), (d_weight * scale).to(ctx.weight_dtype), None, None, None


def token_nll(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood in nats, and the sum of log Z squared.

    hidden (rows, width) and weight (vocab, width) of one dtype; targets (rows,) int64, negative where nothing is
    predicted. The backward pass from the first result is that of `nll + z_loss * penalty`: the penalty's gradient
    rides along, and its value is for the log.
    """
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    result: tuple[Tensor, Tensor] = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, z_loss, with_grad
    )
    return result


def token_nll_each(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target (rows,) float32, 0 where it is negative. Shapes as `token_nll`."""
    out = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    for piece in _pieces(len(hidden), max(32, PROJECT_LOGITS // len(weight))):
        log_p = torch.log_softmax(hidden[piece] @ weight.T, dim=1, dtype=torch.float32)
        target = targets[piece]
        out[piece] = torch.where(target >= 0, -log_p.gather(1, target.clamp_min(0)[:, None])[:, 0], 0.0)
    return out
