"""Cross-entropy of the output layer, without the full matrix of logits.

`token_nll` projects a few rows at a time and takes the gradient of each piece at once, while its logits are still in
cache. What is kept for the backward pass is the gradient of the hidden states and of the output matrix: for 4,096
tokens and 50,000 ids that is megabytes where the logits would be a gigabyte. The idea is that of Liger Kernel's fused
linear cross-entropy (Hsu et al. 2024).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PROJECT_ROWS = 256  # projected at a time: fewer starve the product, more leave the cache (64 to 512 tried on a CPU)
GRADIENT_LOGITS = 1 << 26  # at most, whose gradient goes to the output matrix in one product


def _pieces(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def rows_at_once(rows: int, vocab: int) -> int:
    """Rows whose gradient of logits is stored at a time."""
    return min(rows, max(PROJECT_ROWS, GRADIENT_LOGITS // vocab))


class _Piece(NamedTuple):
    """Of some rows."""

    nll: Tensor  # () summed nats
    penalty: Tensor  # () summed log Z squared
    at_target: Tensor  # (n, 1) what replaces the exponential of the target's logit
    factor: Tensor  # (n, 1) what the rows of the gradient are to be multiplied by


def _piece(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, out: Tensor | None) -> _Piece:
    """out (n, vocab) gets exponentials as they are, so that they are computed once: with `at_target` in its place and
    multiplied by `factor`, they are the gradient of the logits."""
    mask = (targets >= 0)[:, None]  # (n, 1)
    logits = hidden @ weight.T  # (n, vocab)
    top = logits.amax(dim=1, keepdim=True).float()
    powers = torch.exp(logits.float() - top)
    total = powers.sum(dim=1, keepdim=True)
    above = logits.gather(1, targets.clamp_min(0)[:, None]).float() - top
    log_total = total.log()
    log_z = top + log_total
    if out is not None:
        out.copy_(powers)
    # Left out by selection: a product with 0 would let an infinite loss through as NaN.
    nll = torch.where(mask, log_total - above, 0.0).sum()
    penalty = torch.where(mask, log_z.square(), 0.0).sum()
    # d nll / d logits = softmax - one-hot; d log_z^2 / d logits = 2 log_z softmax
    scale = 1 + 2 * z_loss * log_z
    return _Piece(nll, penalty, above.exp() - total / scale, torch.where(mask, scale / total, 0.0))


@functools.cache
def _compiled_piece() -> Callable[..., _Piece]:
    return torch.compile(_piece, dynamic=False)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, with_grad: bool, compiled: bool
    ) -> Any:
        rows, vocab = len(hidden), len(weight)
        of_piece = _compiled_piece() if compiled else _piece
        nll = torch.zeros((), dtype=torch.float32, device=hidden.device)
        penalty = torch.zeros_like(nll)
        outer = rows_at_once(rows, vocab)
        d_hidden = torch.empty_like(hidden) if with_grad else None
        d_logits = hidden.new_empty(outer, vocab) if with_grad else None
        factors, chosen = torch.empty(rows, 1, device=hidden.device), targets.clamp_min(0)
        d_weight: Tensor | None = None
        for block in _pieces(rows, outer):
            for piece in _pieces(block.stop - block.start, PROJECT_ROWS):
                at = slice(block.start + piece.start, block.start + piece.stop)
                out = None if d_logits is None else d_logits[piece]
                found = of_piece(hidden[at], weight, targets[at], z_loss, out)
                nll += found.nll
                penalty += found.penalty
                if out is not None:
                    # scatter_ copies the whole of it
                    out[torch.arange(len(out), device=out.device), chosen[at]] = found.at_target[:, 0].to(out.dtype)
                    factors[at] = found.factor
            if d_hidden is not None and d_logits is not None:
                part = d_logits[: block.stop - block.start]
                torch.mm(part, weight, out=d_hidden[block])
                d_hidden[block] *= factors[block]
                product = part.T @ (hidden[block] * factors[block]).to(hidden.dtype)
                # One product is summed inside in float32; more of them are added up in it.
                d_weight = product if rows == outer else product.float() if d_weight is None else d_weight.add_(product)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(penalty)
        return nll, penalty

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = grads[0]
        d_weight = d_weight * scale.to(d_weight.dtype) if d_weight is not None else None
        d_weight = d_weight.to(ctx.weight_dtype) if d_weight is not None else None
        return d_hidden * scale.to(d_hidden.dtype), d_weight, None, None, None, None


def token_nll(
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Summed negative log-likelihood in nats, and the sum of log Z squared.

    hidden (rows, width) and weight (vocab, width) of one dtype; targets (rows,) int64, negative where nothing is
    predicted. The backward pass from the first result is that of `nll + z_loss * penalty`: the penalty's gradient
    rides along, and its value is for the log. compiled: by torch.compile, which takes its time once for each number of
    rows.
    """
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    result: tuple[Tensor, Tensor] = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, z_loss, with_grad, compiled
    )
    return result


def token_nll_each(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target (rows,) float32, 0 where it is negative. Shapes as `token_nll`."""
    out = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    for piece in _pieces(len(hidden), PROJECT_ROWS):
        log_p = torch.log_softmax(hidden[piece] @ weight.T, dim=1, dtype=torch.float32)
        target = targets[piece]
        out[piece] = torch.where(target >= 0, -log_p.gather(1, target.clamp_min(0)[:, None])[:, 0], 0.0)
    return out
