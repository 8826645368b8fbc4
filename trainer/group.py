"""The ranks that train together, and the few things they tell each other.

Under torchrun a group is as large as WORLD_SIZE; without it there is one rank and no process group at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.model import Llama

TIMEOUT = timedelta(minutes=10)  # of one collective; a dead peer is noticed much sooner, by its closed socket


@dataclass(frozen=True)
class Group:
    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None  # None: one rank, nothing to talk to
    talk: dist.ProcessGroup | None = None  # over which `gather` goes; None: the default one

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, in place, the same bits on every rank."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """A small object of every rank, in rank order, on every rank."""
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.talk)
        return values

    def apart(self) -> Group:
        """The same ranks with a gloo group of their own, for a thread that talks beside the loop. All ranks together.

        Two threads on one process group mix up their messages, and abort.
        """
        return self if self.mesh is None else replace(self, talk=dist.new_group(backend="gloo", timeout=TIMEOUT))

    def leave(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()


ALONE = Group(0, 1, torch.device("cpu"), None)


def join(config: TrainConfig) -> Group:
    """This process's place among the ranks. Raises TrainError where torchrun started another number of them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.ranks:
        raise TrainError(
            f"The settings ask for {config.ranks} ranks, but {world} were started. Start with "
            f"`torchrun --nproc-per-node {config.ranks}`, or through gristmill.trainer.launch."
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise TrainError("The settings ask for device cuda, but torch sees none. Set `device: cpu`.")
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    if world == 1:
        return Group(0, 1, device, None)
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    return Group(dist.get_rank(), world, device, init_device_mesh(config.device, (world,), mesh_dim_names=("shard",)))


def shard(model: Llama, group: Group) -> None:
    """Spreads the parameters over the ranks: one FSDP unit a block, and one for the rest.

    Weights are gathered in the activations' dtype; gradients are summed in float32.
    """
    if group.mesh is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Gathered weights stay until the backward pass: on gloo a second gather costs more than the memory
    # (327 against 358 tokens/s at 110 M parameters), on one machine with GPUs memory is what is short.
    again = group.device.type == "cuda"
    units: list[nn.Module] = [*model.layers]
    for unit in units:
        fully_shard(unit, mesh=group.mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=group.mesh, mp_policy=policy, reshard_after_forward=False)
