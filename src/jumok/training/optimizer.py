"""The optimiser: made from the settings, and its numbers by name, to be saved and restored.

Always PyTorch's fused ones. They are the fastest, on a CPU too, and they look at ``found_inf``, a flag on the
device: where it is set, nothing changes, neither weights nor moments. So a gradient that is not finite never
reaches the weights, and nobody waits for the GPU to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from jumok.errors import InputError
from jumok.training.config import TrainConfig

__all__ = [
    "build_optimizer",
    "clip_gradients",
    "get_optimizer_state",
    "load_optimizer_state",
    "set_learning_rate",
]


def build_optimizer(
    model: nn.Module, config: TrainConfig, graph_device: torch.device | None = None
) -> Optimizer:
    """Over the parameters that learn; weight decay for matrices only, not for biases and norms.

    Its steps can be recorded as a CUDA graph if ``graph_device`` says on which device: the learning rate, which
    changes from step to step, is then there as well.
    """
    learned = [p for p in model.parameters() if p.requires_grad]
    if not learned:
        raise InputError("nothing to train: the model has no parameters that require a gradient")
    matrices, vectors = [p for p in learned if p.dim() > 1], [p for p in learned if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate: float | Tensor = config.learning_rate
    if graph_device is not None:
        rate = torch.tensor(rate, device=graph_device)
    if config.optimizer == "sgd":
        return FusedSGD(groups, rate, momentum=config.momentum, fused=True)
    kind = AdamW if config.optimizer == "adamw" else Adam
    return kind(groups, rate, config.betas, config.eps, fused=True, capturable=graph_device is not None)


class FusedSGD(SGD):
    """SGD by PyTorch's fused kernel, with two things that ``torch.optim.SGD(fused=True)`` does not support.

    Parameters may be sharded (FSDP): each process runs the kernel on its own shards. The first step may be
    skipped (``found_inf``), which leaves PyTorch's momentum uninitialised. Here the momentum starts at zero,
    so after the first step it is the gradient, as in PyTorch.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            learned = [p for p in group["params"] if p.grad is not None]
            for dtype in {p.dtype for p in learned}:
                self._step_group([p for p in learned if p.dtype == dtype], group)

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        buffers: list[Tensor] = []
        for p in parameters if group["momentum"] else ():
            if self.state[p].get("momentum_buffer") is None:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers.append(_get_local_shard(self.state[p]["momentum_buffer"]))
        torch._fused_sgd_(
            [_get_local_shard(p) for p in parameters],
            [_get_local_shard(p.grad) for p in parameters if p.grad is not None],
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=getattr(self, "found_inf", None),
        )


def _get_local_shard(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The learning rate from now on, kept wherever the optimiser has it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def get_optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """All that the optimiser remembers, as ``what/parameter``: ``exp_avg/encoder.weight``."""
    return {
        f"{what}/{name}": value
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)  # SGD without momentum remembers None
    }


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The counterpart of :func:`get_optimizer_state`; sharded parameters take their share."""
    parameters = dict(model.named_parameters())
    _check_parameter_names({key.partition("/")[2] for key in state}, parameters)
    optimizer.state.clear()
    for key, value in state.items():
        what, _, name = key.partition("/")
        parameter = parameters[name]
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
        elif value.shape == parameter.shape:
            # It must lie in memory as the parameter does: a fused step goes through both in one line.
            value = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        optimizer.state[parameter][what] = value.to(parameter.device, copy=True)


def _check_parameter_names(names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> None:
    if unknown := sorted(set(names) - set(parameters)):
        raise InputError(
            f"the optimiser's state was saved by another model: this one has no {', '.join(unknown[:5])}"
        )


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, loss_scale: Tensor | None = None
) -> Tensor:
    """The length of the whole gradient, on the device. It is then cut to ``max_norm``; 0: left as it is.

    Before that, the gradient is divided by ``loss_scale``.
    """
    learned = [p for p in parameters if p.grad is not None]
    if loss_scale is not None:
        torch._foreach_mul_([_get_local_shard(p.grad) for p in learned if p.grad is not None], 1 / loss_scale)
    norm = nn.utils.get_total_norm([p.grad for p in learned if p.grad is not None])
    if max_norm:
        nn.utils.clip_grads_with_norm_(learned, max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
