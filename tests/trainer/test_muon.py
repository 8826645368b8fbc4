"""Muon against torch's own, and in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from gristmill.trainer import metrics
from gristmill.trainer.group import ALONE
from gristmill.trainer.launch import run as launch_run
from gristmill.trainer.muon import Muon, orthogonal
from gristmill.trainer.train import work


def test_muon_and_adamw_equal_torch_bit_for_bit():
    torch.manual_seed(1)
    start = {
        "embed_tokens.weight": torch.randn(9, 4),
        "layers.0.mlp.up_proj.weight": torch.randn(6, 4),
        "layers.0.mlp.down_proj.weight": torch.randn(4, 6),
        "layers.0.input_layernorm.weight": torch.randn(4),
    }
    ours = {name: Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: Parameter(value.clone()) for name, value in start.items()}
    optimizer = Muon(ours.items(), (0.9, 0.95), 1e-8, 0.1)
    matrices = [theirs[n] for n in start if n.endswith("proj.weight")]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [theirs["embed_tokens.weight"]], "weight_decay": 0.1},
            {"params": [theirs["layers.0.input_layernorm.weight"]], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(1, 6):
        for name, value in start.items():
            gradient = torch.randn_like(value)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.01 / step
        optimizer.step(0.01 / step)
        muon.step()
        adamw.step()
        optimizer.zero_grad()
    assert optimizer.updates == 5
    for name, value in start.items():
        assert torch.equal(ours[name], theirs[name]), name
        assert not torch.equal(ours[name], value)


def test_an_update_has_singular_values_near_one():
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonal(torch.randn(40, 16) * 100).float())
    assert values.min() > 0.5
    assert values.max() < 1.5
    assert orthogonal(torch.zeros(3, 2)).abs().max() == 0


def test_it_learns_and_a_restart_in_the_middle_changes_nothing(tmp_path, make_run):
    whole = make_run(tmp_path / "whole", optimizer="muon", weight_decay=0.0)
    work(whole, ALONE)
    lines = metrics.read(Path(whole.out) / "metrics.jsonl")
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    resumed = tmp_path / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    step = "checkpoints/step-00000010"
    (Path(whole.out) / step).rename(resumed / step)
    work(whole.model_copy(update={"out": str(resumed)}), ALONE)
    again = metrics.read(resumed / "metrics.jsonl")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines[10:]]


def test_two_ranks_follow_the_same_curve(tmp_path, make_run):
    alone, two = (make_run(tmp_path / str(n), optimizer="muon", ranks=n, checkpoint_every=0) for n in (1, 2))
    work(alone, ALONE)
    assert launch_run(two.config, two.mixture, two.tokens, two.out).status == "done"
    curves = [[line["loss"] for line in metrics.read(Path(run.out) / "metrics.jsonl")] for run in (alone, two)]
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)
