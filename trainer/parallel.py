"""How the ranks share one model: which of them hold what, and what they add up.

    fsdp    every data rank holds a shard of every weight (`fully_shard`, one unit a block)
    hsdp    `replicas` groups of ranks; each holds a copy between its ranks, as fsdp, and the groups add up gradients
    ddp     every data rank holds everything: hsdp with as many replicas as data ranks
    tensor  with any of them: `tensor` neighbouring ranks share the products of a block, and read the same windows

Ranks are numbered with `tensor` fastest, then shards, then replicas, so that those that talk most are neighbours.

A block under `tensor` splits heads and hidden units (Shoeybi et al. 2019, Megatron-LM, section 3): queries, keys,
values, gate and up by rows of their matrices, output and down by columns; one sum over the ranks each way after each
of the two parts is all that a block needs. Embedding and output matrix are whole on each of these ranks, and each
takes a part of the rows of hidden states through the output layer: so any vocabulary works, and no logit is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gristmill.trainer.config import TrainConfig

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


def mesh_of(config: TrainConfig) -> DeviceMesh:
    """(replicas, shards, tensor) of ranks; collective. A mesh with fewer axes is cut from it."""
    sizes = (config.copies, config.data_ranks // config.copies, config.tensor)
    return init_device_mesh(config.device, sizes, mesh_dim_names=(REPLICATE, SHARD, TENSOR))


def share(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> DeviceMesh | None:
    """Spreads the parameters of a `Llama` over the ranks, in place -> the mesh of its tensor ranks, if there are any.

    Weights are gathered in the activations' dtype; gradients are summed in float32.
    """
    layers = cast(Iterable[nn.Module], model.layers)
    tensor = mesh[TENSOR] if mesh[TENSOR].size() > 1 else None
    if tensor is not None:
        for layer in layers:
            parallelize_module(layer, tensor, _split(layer))
    data = mesh[SHARD] if mesh[REPLICATE].size() == 1 else mesh[REPLICATE, SHARD]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Gathered weights stay until the backward pass: on gloo a second gather costs more than the memory
    # (327 against 358 tokens/s at 110 M parameters), on one machine with GPUs memory is what is short.
    again = device.type == "cuda"
    for layer in layers:
        fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)
    return tensor


def _split(layer: nn.Module) -> dict[str, ParallelStyle]:
    """Which parts of a block are cut how. Norms of queries and keys see their own heads only: axis 2 is cut."""
    rows, columns = ColwiseParallel(), RowwiseParallel()  # of the matrix as it is stored, (out, in)
    plan: dict[str, ParallelStyle] = {
        "self_attn.q_proj": rows,
        "self_attn.k_proj": rows,
        "self_attn.v_proj": rows,
        "self_attn.o_proj": columns,
        "mlp.gate_proj": rows,
        "mlp.up_proj": rows,
        "mlp.down_proj": columns,
    }
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        if any(True for _ in layer.get_submodule(name).parameters()):
            plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def part_of_rows(hidden: Tensor, weight: Tensor, targets: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """This tensor rank's rows of hidden states (rows, width) and targets (rows,), with the whole weight.

    The backward pass gives every rank the gradients of all rows, and of the weight their sum.
    """
    own = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
    whole = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
    count, rank = mesh.size(), mesh.get_local_rank()
    piece = -(-len(targets) // count)  # as Shard cuts
    chosen = targets[min(rank * piece, len(targets)) : (rank + 1) * piece]
    return own.to_local(), whole.to_local(grad_placements=[Partial()]), chosen


def sum_of_parts(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of a number over the tensor ranks, the same on each; the gradient of each part is that of the sum."""
    parts = DTensor.from_local(value, mesh, [Partial()], run_check=False)
    whole: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
    return whole.clone()  # `fully_shard` hangs a hook on it, and warns of a view


def defer_sums(model: nn.Module, defer: bool) -> None:
    """Whether the backward passes that follow leave gradients on their ranks, for a later one to add up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not defer)


def holders(parameter: Tensor, world: int) -> int:
    """How many of `world` ranks hold each number of a parameter: what to divide by where all of them are summed."""
    if not isinstance(parameter, DTensor):
        return world
    mesh, cut = parameter.device_mesh, 1
    for axis, placement in enumerate(parameter.placements):
        cut *= 1 if placement.is_replicate() else mesh.size(axis)
    return world // cut
