"""Many processes, one training: who I am among them, and how they share a model's gradients or weights.

``torchrun --nproc-per-node 2 -m jumok train …`` starts the same command twice; the processes find each other
by the environment that it sets. Each works on its own part of every batch. With *DDP* each holds all weights,
and gradients are added up; with *FSDP* weights, gradients and the optimiser's memory are in shards, put
together layer by layer when needed. Both are PyTorch's own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from jumok.errors import InputError, JumokError

__all__ = [
    "DistributedRanks",
    "LossModule",
    "gather_to_main",
    "init_distributed",
    "parallelize",
    "set_gradient_sync",
]

PROCESS_GROUP_TIMEOUT = datetime.timedelta(hours=2)  # others wait while the first process validates


@dataclass(frozen=True)
class DistributedRanks:
    """One process, number ``rank`` of ``world_size``. The first, ``is_main``, is the one that writes and prints."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  it never changes

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place and without waiting for a GPU."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def all_reduce_max(self, *values: float) -> list[float]:
        """Of each number the highest that any process has."""
        if self.world_size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.tolist()

    def broadcast_from_main(self, *values: float) -> list[float]:
        """The numbers that the first process has."""
        if self.world_size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(x, 0)
        return x.tolist()

    def barrier(self) -> None:
        """Until all processes are here."""
        self.all_reduce_max(0.0)


@contextlib.contextmanager
def init_distributed(device: str = "auto") -> Iterator[DistributedRanks]:
    """Join the processes that torchrun started; without it, be the only one.

    Where a group is there already, it is used, and left as it is.

    >>> with joined("cpu") as ranks:
    ...     ranks.main, ranks.world
    (True, 1)
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield DistributedRanks(device=_resolve_device(device))
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    own = _resolve_device(device, local)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo", timeout=PROCESS_GROUP_TIMEOUT)
    try:
        yield DistributedRanks(dist.get_rank(), dist.get_world_size(), own)
    except JumokError:  # what is raised on purpose is raised by all; after anything else, others may hang
        if begun:
            dist.destroy_process_group()
        raise
    if begun:
        dist.destroy_process_group()


def _resolve_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device={name}: torch {torch.__version__} finds no GPU here; use device=cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise InputError(
                f"{device} is not there: this machine has {torch.cuda.device_count()} GPUs; "
                "start as many processes on it (torchrun --nproc-per-node)"
            )
    return device


class LossModule(nn.Module):
    """``model.loss`` as a module's forward, which is where DDP, FSDP and torch.compile take hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.model.loss(batch)  # type: ignore[operator]  # every model of ours has one
        return loss.total, loss.parts


def parallelize(model: nn.Module, ranks: DistributedRanks, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    """The model's objective, over all processes. All begin with the first one's weights."""
    objective = LossModule(model)
    if ranks.world_size == 1:
        return objective
    if parallel == "ddp":
        return DistributedDataParallel(objective, gradient_as_bucket_view=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # Layer by layer, those inside others first: what a layer holds is put together only while it works.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in (layer for layers in reversed(lists) for layer in layers):
        if not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


def set_gradient_sync(loss_module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """For one part of a batch, forward and backward: whether gradients are shared, or only collected."""
    if isinstance(loss_module, FSDPModule):
        loss_module.set_requires_gradient_sync(enabled)
    elif isinstance(loss_module, DistributedDataParallel) and not enabled:
        return loss_module.no_sync()
    return contextlib.nullcontext()


def gather_to_main(tensors: Mapping[str, Tensor], ranks: DistributedRanks) -> dict[str, Tensor]:
    """Whole tensors on the host of the first process; nothing on the others, which must call this too."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.is_main:
            whole[name] = full.detach().cpu()
    return whole
