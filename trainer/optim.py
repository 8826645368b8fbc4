"""AdamW on shards, and the learning rate as a function of the step.

An elementwise optimizer needs no collective: each rank updates its own shard with torch's fused kernel. Moments are
kept under the parameter's name and with its sharding, so that a checkpoint of one world size opens in another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.parallel import holders


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class AdamW:
    """Loshchilov & Hutter 2019, as torch.optim.AdamW computes it. Matrices decay, vectors (gains) do not."""

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], betas: tuple[float, float], eps: float, weight_decay: float
    ):
        self.parameters = dict(parameters)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.updates = 0
        self.first = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}

    def step(self, lr: float) -> None:
        """One update from the gradients at hand; a parameter without one is left alone."""
        counter = torch.tensor(float(self.updates))
        for decays in (True, False):
            names = [n for n, p in self.parameters.items() if (p.dim() > 1) == decays and p.grad is not None]
            shards = [local(self.parameters[n].detach()) for n in names]
            held = [i for i, shard in enumerate(shards) if shard.numel()]  # a rank may hold no row of a small matrix
            if not held:
                continue
            with torch.no_grad():
                adamw(
                    [shards[i] for i in held],
                    [local(_gradient(self.parameters[names[i]])) for i in held],
                    [local(self.first[names[i]]) for i in held],
                    [local(self.second[names[i]]) for i in held],
                    [],
                    [counter.clone().to(shards[i].device) for i in held],
                    fused=True,
                    amsgrad=False,
                    beta1=self.betas[0],
                    beta2=self.betas[1],
                    lr=lr,
                    weight_decay=self.weight_decay if decays else 0.0,
                    eps=self.eps,
                    maximize=False,
                )
        self.updates += 1

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Moments by parameter name, the tensors themselves: a checkpoint reads from them and loads into them."""
        return {name: {"first": self.first[name], "second": self.second[name]} for name in self.parameters}


def _gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def squared_norm(parameters: Iterable[Parameter], world: int = 1) -> Tensor:
    """Sum of squares of this rank's shards of all gradients, float64 scalar. Summed over `world` ranks: the norm
    squared; what several ranks hold counts on each of them for its share."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    squares = torch.stack([n.double() for n in torch._foreach_norm([local(g) for g in grads])]).square()
    return (squares / squares.new_tensor([holders(g, world) for g in grads])).sum()


def scale_gradients(parameters: Iterable[Parameter], factor: float) -> None:
    """Multiplies every gradient by factor."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)


def warmup_steps(config: TrainConfig) -> int:
    return round(config.warmup * config.total_steps) if config.warmup < 1 else round(config.warmup)


def learning_rate(config: TrainConfig, step: int, decay_from: int | None = None) -> float:
    """The rate of step 0, 1, ..., total_steps - 1.

    Linear warmup to `lr`, then
        cosine   half a cosine down to min_lr_ratio * lr at the last step (GPT-3, appendix B)
        linear   a straight line down to it
        wsd      constant, from `decay_from` a straight line down (warmup, stable, decay: MiniCPM, section 4)
    """
    last, warm = config.total_steps - 1, warmup_steps(config)
    if step < warm:
        return config.lr * (step + 1) / warm
    floor = config.min_lr_ratio
    start = warm if config.schedule != "wsd" else max(warm, decay_start(config) if decay_from is None else decay_from)
    if step < start:
        return config.lr
    progress = min(1.0, (step - start + 1) / max(1, last - start + 1))
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.lr * (floor + (1 - floor) * fall)


def decay_start(config: TrainConfig) -> int:
    """First step of wsd's decay, where `decay` is a share of the steps."""
    if isinstance(config.decay, str):
        raise TrainError(f"The decay is bound to phase {config.decay!r}; its first step comes from the mixture.")
    return config.total_steps - round(config.decay * config.total_steps)


def decay_start_of_phase(config: TrainConfig, phases: dict[str, int]) -> int | None:
    """First step of wsd's decay. phases: first window of each phase of the mixture, by name.

    None where the schedule has no stable part. Raises TrainError where the mixture has no such phase.
    """
    if config.schedule != "wsd":
        return None
    if not isinstance(config.decay, str):
        return decay_start(config)
    if config.decay not in phases:
        raise TrainError(
            f"The learning rate should decay in phase {config.decay!r}, but the mixture has "
            f"{', '.join(repr(p) for p in phases) or 'no phases'}. Set `decay` to one of these, or to a "
            "share such as 0.2."
        )
    return phases[config.decay] // config.batch_windows
