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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gristmill.trainer.config import TrainConfig, TrainError
from gristmill.trainer.model import Llama
from gristmill.trainer.parallel import mesh_of, share

TIMEOUT = timedelta(minutes=10)  # of one collective; a dead peer is noticed much sooner, by its closed socket


@dataclass(frozen=True)
class Group:
    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None  # `parallel.mesh_of`; None: one rank, nothing to talk to
    tensor: int = 1  # neighbouring ranks that share products and read the same windows
    talk: dist.ProcessGroup | None = None  # over which `gather` goes; None: the default one

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Place among the ranks that read different windows."""
        return self.rank // self.tensor

    @property
    def data_world(self) -> int:
        return self.world // self.tensor

    @property
    def speaks(self) -> bool:
        """Whether this rank's windows are to be counted: one of the ranks that read the same ones does."""
        return self.rank % self.tensor == 0

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
    return Group(dist.get_rank(), world, device, mesh_of(config), config.tensor)


def shard(model: Llama, group: Group) -> None:
    """Spreads the parameters over the ranks, as `parallel.share`."""
    if group.mesh is not None:
        model.tensor_mesh = share(model, group.mesh, model.dtype, group.device)
