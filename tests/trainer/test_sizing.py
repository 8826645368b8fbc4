"""The plan of a run: counts by hand, memory beside what torch keeps, hours beside published ones."""

from __future__ import annotations

import orjson
import pytest
import torch
from typer.testing import CliRunner

from gristmill.pipelines.cli import app
from gristmill.trainer import metrics
from gristmill.trainer.config import ModelShape, TrainConfig, TrainError
from gristmill.trainer.model import Llama, initialise
from gristmill.trainer.sizing import GPUS, activation_values, measured_peak, memory, peak_of, size


def saved_bytes(shape: ModelShape, tokens: tuple[int, int]) -> int:
    """Bytes of the storages that autograd keeps for the backward pass of a block, parameters and tables left out."""
    model = Llama(shape)
    initialise(model, 1)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.requires_grad:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    cos, sin = torch.ones(tokens[1], shape.width // shape.heads), torch.zeros(tokens[1], shape.width // shape.heads)
    x = torch.randn(*tokens, shape.width, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.layers[0](x, cos, sin, None)
    return sum(kept.values())


@pytest.mark.parametrize(
    "change", [{}, {"kv_heads": 2, "width": 128}, {"qk_norm": True}, {"qk_norm": True, "kv_heads": 1}]
)
def test_activations_are_what_torch_keeps(change):
    shape = ModelShape.model_validate({"width": 64, "layers": 1, "heads": 4, **change}).resolved(50)
    expected = 2 * 32 * activation_values(shape) * 4
    assert saved_bytes(shape, (2, 32)) == pytest.approx(expected, rel=0.01)


def test_memory_by_hand():
    shape = ModelShape(width=8, layers=2, heads=2, hidden=16, vocab_size=10).resolved(10)
    # A block: 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 = 656; two of them, 10 * 8 of the embedding, 8 of the last norm: 1,400.
    config = TrainConfig(model=shape, seq_len=4, batch_windows=6, ranks=2, steps=1, micro_windows=1, dtype="bf16")
    found = memory(shape, config)
    assert (found.parameters, found.gradients, found.optimizer) == (2800, 2800, 5600)
    assert found.gathered == 1400 * 2 + 656 * 4
    assert found.activations == 4 * 2 * (2 * (10 * 8 + 4 * 16) + 3 * 8)
    with_muon = memory(shape, config.model_copy(update={"optimizer": "muon"}))
    assert with_muon.optimizer == 5600 - 2 * 640 * 4 / 2  # the gains of a block, 16, keep two moments
    on_gpu = memory(shape, config.model_copy(update={"device": "cuda"}))
    assert on_gpu.gathered == (88 + 2 * 656) * 2 + 656 * 4


def test_memory_by_mesh():
    shape = ModelShape(width=8, layers=2, heads=2, hidden=16, vocab_size=10).resolved(10)
    config = TrainConfig(model=shape, seq_len=4, batch_windows=8, ranks=4, steps=1, micro_windows=1, device="cuda")
    matrices, rest = 2 * 640, 2 * 16 + 80 + 8  # of 1,400 parameters
    found = {
        name: memory(shape, config.model_copy(update=change))
        for name, change in {
            "fsdp": {},
            "hsdp": {"parallel": "hsdp"},
            "ddp": {"parallel": "ddp"},
            "tensor": {"tensor": 2},
            "tensor, full": {"tensor": 2, "recompute": "full"},
        }.items()
    }
    assert [found[n].parameters for n in ("fsdp", "hsdp", "ddp")] == [1400, 2800, 5600]
    assert found["tensor"].parameters == (matrices / 2 + rest) * 4 / 2
    assert found["tensor"].optimizer == 2 * found["tensor"].gradients
    assert found["fsdp"].activations == 4 * 4 * (2 * (10 * 8 + 4 * 16) + 3 * 8)
    assert found["tensor"].activations == 4 * 4 * (2 * (6 * 8 + (4 * 8 + 4 * 16) / 2) + 3 * 8)
    assert found["tensor, full"].activations == 4 * 4 * (2 * 8 + 6 * 8 + (4 * 8 + 4 * 16) / 2 + 3 * 8)
    # A mask is a matrix on a CPU only.
    masked = config.model_copy(update={"mask_documents": True})
    assert memory(shape, masked).activations == found["fsdp"].activations
    on_cpu = memory(shape, masked.model_copy(update={"device": "cpu"}))
    assert on_cpu.activations == found["fsdp"].activations + 4 * 4


def test_the_plan_names_the_mesh():
    config = TrainConfig(model="14m", ranks=8, tensor=2, parallel="hsdp", batch_windows=8, steps=1, recompute="full")
    plan = size(config, vocab_size=8192)
    assert plan.mesh == "hsdp: 2 copies x 2 shards each x 2 tensor ranks; recompute full"
    assert plan.mesh in plan.table()
    assert (
        size(TrainConfig(model="10m", ranks=2, steps=1), 8192).mesh == "fsdp: one copy x 2 shards each; recompute none"
    )


def test_hours_are_near_those_that_dclm_published():
    """DCLM's README: 1B-1x is 28.8 B tokens and 240 H100 hours."""
    config = TrainConfig(
        model="1b-1x", seq_len=2048, batch_windows=256, micro_windows=4, budget_tokens=28_795_904_000, dtype="bf16"
    )
    plan = size(config, mfu=0.4)
    assert 150 < plan.hours < 240  # theirs ran at a lower share of the peak
    assert plan.flops == plan.flops_per_token * config.total_tokens
    assert size(config, mfu=0.2).hours == pytest.approx(2 * plan.hours)
    eight = size(config.model_copy(update={"ranks": 8}), mfu=0.4)
    assert eight.hours == pytest.approx(plan.hours / 8)
    assert eight.memory.optimizer == plan.memory.optimizer / 8


def test_what_does_not_fit_is_said(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text("model: 8b\nseq_len: 2048\nbatch_windows: 8\nbudget_tokens: 100_000_000\ndtype: bf16\n")
    result = CliRunner().invoke(app, ["train", str(file), "--plan", "--gpu", "h100"])
    assert result.exit_code == 0, result.output
    assert "8,030,261,248" in result.output
    assert "It will not fit: more than 90% of the memory of h100." in result.output
    file.write_text(file.read_text() + "ranks: 8\ndevice: cuda\nmicro_windows: 1\n")
    result = CliRunner().invoke(app, ["train", str(file), "--plan", "--gpu", "h200", "--json"])
    body = orjson.loads(result.stdout)
    assert body["fits"] is True
    assert body["memory_bytes"]["total"] == sum(v for k, v in body["memory_bytes"].items() if k != "total")


def test_unknown_things_are_refused():
    config = TrainConfig(steps=1)
    with pytest.raises(TrainError, match="no GPU 'h1000' in the table"):
        size(config, 100, "h1000")
    with pytest.raises(TrainError, match="a number above 0 and up to 1"):
        size(config, 100, mfu=40)
    with pytest.raises(TrainError, match="The vocabulary is not known"):
        size(config)
    with pytest.raises(TrainError, match="no float32 peak of b200"):
        _ = size(config, 100, "b200").hours


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_a_device_is_found_by_its_name(name, gpu):
    assert peak_of(name, "bf16") == GPUS[gpu].bf16
    assert peak_of(name, "float32") == GPUS[gpu].float32
    assert peak_of("NVIDIA L40", "bf16") is None


def test_the_measured_peak_is_what_products_reach():
    assert 1e8 < measured_peak(torch.device("cpu"), torch.float32, size=256, seconds=0.02) < 1e14


def test_metrics_have_the_share_of_the_peak_and_the_memory(undisturbed):
    lines = metrics.read(undisturbed / "metrics.jsonl")
    assert all(0 < line["mfu"] < 1.5 for line in lines)  # a machine with other work may measure a low peak
    ratios = [line["mfu"] / line["tokens_per_s"] for line in lines]
    assert max(ratios) == pytest.approx(min(ratios), rel=0.2)  # the same peak in all; both are rounded
    assert all(1e7 < line["memory_bytes"] < 1e11 for line in lines)
