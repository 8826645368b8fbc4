"""AdamW against torch's own, gradient norms, and every schedule by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import Parameter

from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.optim import (
    AdamW,
    decay_start_of_phase,
    learning_rate,
    scale_gradients,
    squared_norm,
    warmup_steps,
)


def test_adamw_equals_torch_bit_for_bit():
    torch.manual_seed(1)
    start = {"matrix": torch.randn(5, 3), "gain": torch.randn(7), "empty": torch.randn(0, 3)}
    ours = {name: Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: Parameter(value.clone()) for name, value in start.items()}
    optimizer = AdamW(ours.items(), (0.9, 0.95), 1e-8, 0.1)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["matrix"]], "weight_decay": 0.1},
            {"params": [theirs["gain"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step in range(1, 8):
        for name, value in start.items():
            gradient = torch.randn_like(value)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        for group in reference.param_groups:
            group["lr"] = 0.01 / step
        optimizer.step(0.01 / step)
        reference.step()
        optimizer.zero_grad()
        assert ours["matrix"].grad is None
    assert optimizer.updates == 7
    for name in ("matrix", "gain"):
        assert torch.equal(ours[name], theirs[name])


def test_norm_and_scaling():
    parameters = [Parameter(torch.zeros(2)), Parameter(torch.zeros(1, 2)), Parameter(torch.zeros(3))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([[0.0, 12.0]])
    assert squared_norm(parameters).item() == pytest.approx(169.0)
    scale_gradients(parameters, 0.5)
    assert squared_norm(parameters).item() == pytest.approx(169.0 / 4)
    parameters[1].grad[0, 0] = math.nan
    assert math.isnan(squared_norm(parameters).item())
    assert squared_norm([Parameter(torch.zeros(1))]).item() == 0


def rates(**settings):
    config = TrainConfig(steps=10, lr=1.0, min_lr_ratio=0.1, **settings)
    return [learning_rate(config, step) for step in range(10)]


def test_schedules_by_hand():
    assert rates(warmup=2, schedule="linear") == pytest.approx([0.5, 1.0, *[1 - 0.9 * i / 8 for i in range(1, 9)]])
    cosine = rates(warmup=0, schedule="cosine")
    assert cosine[-1] == pytest.approx(0.1)
    assert cosine[4] == pytest.approx(0.55)  # half way
    assert all(a > b for a, b in pairwise(cosine))
    # warmup 1 step, stable to step 5, decay over the last 4
    assert rates(warmup=0.1, schedule="wsd", decay=0.4) == pytest.approx([1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])
    assert rates(warmup=0, schedule="wsd", decay=0.0)[-1] == 1.0
    assert warmup_steps(TrainConfig(steps=10, warmup=0.25)) == 2
    assert warmup_steps(TrainConfig(steps=10, warmup=7)) == 7


def test_decay_bound_to_a_phase():
    config = TrainConfig(steps=10, batch_windows=4, schedule="wsd", decay="polish", lr=1.0, min_lr_ratio=0.0, warmup=0)
    start = decay_start_of_phase(config, {"broad": 0, "polish": 30})
    assert start == 7  # window 30 comes in step 7
    assert [learning_rate(config, s, start) for s in range(10)] == pytest.approx([1] * 7 + [2 / 3, 1 / 3, 0])
    with pytest.raises(TrainError, match=r"decay in phase 'polish', but the mixture has 'broad', 'anneal'\. Set"):
        decay_start_of_phase(config, {"broad": 0, "anneal": 30})
    assert decay_start_of_phase(TrainConfig(steps=10, schedule="cosine"), {}) is None
    assert decay_start_of_phase(TrainConfig(steps=10, schedule="wsd", decay=0.3), {}) == 7
