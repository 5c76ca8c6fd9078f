"""Distributed training with DDP or FSDP.

``torchrun --nproc-per-node 2 -m jumok train …`` starts the same command twice and sets environment variables
by which the processes find each other. Each trains on its own part of every batch. With *DDP* each process
holds all weights, and gradients are summed. With *FSDP* the weights, gradients and optimizer state are
sharded, and gathered layer by layer when needed. Both are PyTorch's implementations.
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

PROCESS_GROUP_TIMEOUT = datetime.timedelta(hours=2)  # the other processes wait while the first one validates


@dataclass(frozen=True)
class DistributedRanks:
    """One process, number ``rank`` of ``world_size``. Only the first one, ``is_main``, writes and prints."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009  it is immutable

    @property
    def is_main(self) -> bool:
        """Whether this is the first process."""
        return self.rank == 0

    def all_reduce_sum(self, x: Tensor) -> Tensor:
        """Sum over all processes, in place and without waiting for a GPU."""
        if self.world_size > 1:
            dist.all_reduce(x)
        return x

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the maximum of each number over all processes."""
        if self.world_size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.tolist()

    def broadcast_from_main(self, *values: float) -> list[float]:
        """Return the numbers of the first process."""
        if self.world_size == 1:
            return list(values)
        x = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(x, 0)
        return x.tolist()

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.all_reduce_max(0.0)


@contextlib.contextmanager
def init_distributed(device: str = "auto") -> Iterator[DistributedRanks]:
    """Join the processes that torchrun started. Without torchrun there is only this process.

    An existing process group is used and left open.

    >>> with init_distributed("cpu") as ranks:
    ...     ranks.is_main, ranks.world_size
    (True, 1)
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        yield DistributedRanks(device=_resolve_device(device))
        return
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_device = _resolve_device(device, local_rank)
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    owns_group = not dist.is_initialized()
    if owns_group:
        backend = "nccl" if local_device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PROCESS_GROUP_TIMEOUT)
    try:
        yield DistributedRanks(dist.get_rank(), dist.get_world_size(), local_device)
    except JumokError:  # all processes raise it; after any other error, another process may hang
        if owns_group:
            dist.destroy_process_group()
        raise
    if owns_group:
        dist.destroy_process_group()


def _resolve_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(f"device={name}: torch {torch.__version__} finds no GPU; use device=cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise InputError(
                f"{device} does not exist: this machine has {torch.cuda.device_count()} GPUs; "
                "start as many processes (torchrun --nproc-per-node)"
            )
    return device


class LossModule(nn.Module):
    """A module whose ``forward`` is ``model.loss``, because DDP, FSDP and torch.compile wrap ``forward``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a batch and its components."""
        loss = self.model.loss(batch)  # type: ignore[operator]  # every model has one
        return loss.total, loss.parts


def parallelize(model: nn.Module, ranks: DistributedRanks, parallel: Literal["ddp", "fsdp"]) -> nn.Module:
    """Wrap a model for training over all processes. All start with the weights of the first one."""
    loss_module = LossModule(model)
    if ranks.world_size == 1:
        return loss_module
    if parallel == "ddp":
        return DistributedDataParallel(loss_module, gradient_as_bucket_view=True)
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, 0)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    # Layer by layer, inner layers first, so that the weights of a layer are gathered only while it runs.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in (layer for layers in reversed(lists) for layer in layers):
        if not isinstance(layer, FSDPModule):
            fully_shard(layer, mesh=mesh)
    fully_shard(loss_module, mesh=mesh)
    return loss_module


def set_gradient_sync(loss_module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
    """A context for one micro-batch: whether its gradients are reduced over the processes or accumulated."""
    if isinstance(loss_module, FSDPModule):
        loss_module.set_requires_gradient_sync(enabled)
    elif isinstance(loss_module, DistributedDataParallel) and not enabled:
        return loss_module.no_sync()
    return contextlib.nullcontext()


def gather_to_main(tensors: Mapping[str, Tensor], ranks: DistributedRanks) -> dict[str, Tensor]:
    """Gather tensors on the host of the first process. The others get nothing, and must call this too."""
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full_tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if ranks.is_main:
            gathered[name] = full_tensor.detach().cpu()
    return gathered
