"""Muon for the matrices of the blocks, AdamW for the rest: embedding, output layer, gains.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) moves a matrix by its momentum made nearly
orthogonal. That takes the whole matrix, so the ranks gather each update, and all compute the same. The update is
scaled by 0.2 * sqrt(longer side) (Liu et al. 2025, Muon is Scalable, section 2.2), which makes it about as large as
AdamW's: one learning rate and one weight decay serve both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from gristmill.trainer.config import TrainConfig
from gristmill.trainer.model import Llama
from gristmill.trainer.optim import AdamW, local

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic, from the post
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """(rows, columns) -> the same in bfloat16 with singular values near 1, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon:
    """The same face as `optim.AdamW`; the state of a matrix is one momentum instead of two moments."""

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], betas: tuple[float, float], eps: float, weight_decay: float
    ):
        self.parameters = dict(parameters)
        self.weight_decay = weight_decay
        matrices = [n for n, p in self.parameters.items() if p.dim() == 2 and n.startswith("layers.")]
        self.momentum = {n: torch.zeros_like(self.parameters[n], requires_grad=False) for n in matrices}
        self.rest = AdamW(
            [(n, p) for n, p in self.parameters.items() if n not in self.momentum], betas, eps, weight_decay
        )

    @property
    def updates(self) -> int:
        return self.rest.updates

    @updates.setter
    def updates(self, value: int) -> None:
        self.rest.updates = value

    def step(self, lr: float) -> None:
        """One update from the gradients at hand. All ranks together: updates are gathered in the order of names."""
        with torch.no_grad():
            for name, momentum in self.momentum.items():
                parameter = self.parameters[name]
                if parameter.grad is None:
                    continue
                momentum.lerp_(parameter.grad, 1 - MOMENTUM)
                update = orthogonal(_whole(parameter.grad.lerp(momentum, MOMENTUM)))
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    update = distribute_tensor(update, mesh, placements, src_data_rank=None).to_local()
                shard = local(parameter.detach())
                shard.mul_(1 - lr * self.weight_decay)
                shard.add_(update, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
        self.rest.step(lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """By parameter name, the tensors themselves: a checkpoint reads from them and loads into them."""
        return self.rest.state() | {name: {"momentum": momentum} for name, momentum in self.momentum.items()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_optimizer(model: Llama, config: TrainConfig) -> AdamW | Muon:
    kind = Muon if config.optimizer == "muon" else AdamW
    return kind(model.named_parameters(), config.betas, config.eps, config.weight_decay)
