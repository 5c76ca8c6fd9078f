"""Optimizers: construction, gradient clipping, and their state by name for checkpoints.

All are PyTorch's fused optimizers. They are the fastest, also on a CPU, and they skip the update if
``found_inf`` is set, a flag on the device. So a gradient that is not finite never reaches the weights, and
the host does not wait for the GPU to find out.
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


def build_optimizer(model: nn.Module, config: TrainConfig, graph_device: torch.device | None = None) -> Optimizer:
    """Build the optimizer. Weight decay applies to matrices only, not to biases and norms.

    With ``graph_device``, its steps can be captured as a CUDA graph: the learning rate, which changes from
    step to step, is then a tensor on that device.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise InputError("nothing to train: the model has no parameters that require a gradient")
    matrices, vectors = [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    learning_rate: float | Tensor = config.learning_rate
    if graph_device is not None:
        learning_rate = torch.tensor(learning_rate, device=graph_device)
    if config.optimizer == "sgd":
        return FusedSGD(groups, learning_rate, momentum=config.momentum, fused=True)
    adam = AdamW if config.optimizer == "adamw" else Adam
    is_captured = graph_device is not None
    return adam(groups, learning_rate, config.betas, config.eps, fused=True, capturable=is_captured)


class FusedSGD(SGD):
    """SGD by PyTorch's fused kernel, with two things that ``torch.optim.SGD(fused=True)`` does not support.

    Parameters may be sharded (FSDP): each process runs the kernel on its own shards. The first step may be
    skipped (``found_inf``), which leaves PyTorch's momentum uninitialised. Here the momentum starts at zero,
    so after the first step it is the gradient, as in PyTorch.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for dtype in {p.dtype for p in parameters}:
                self._step_group([p for p in parameters if p.dtype == dtype], group)

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
    """Return the shard of a tensor that this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate, in place if it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def get_optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the optimizer by names such as ``exp_avg/encoder.weight``."""
    return {
        f"{key}/{name}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)  # it is None for SGD without momentum
    }


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore what :func:`get_optimizer_state` returned. Sharded parameters take their shards."""
    parameters = dict(model.named_parameters())
    _check_parameter_names({full_name.partition("/")[2] for full_name in state}, parameters)
    optimizer.state.clear()
    for full_name, value in state.items():
        key, _, name = full_name.partition("/")
        parameter = parameters[name]
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            mesh, placements = parameter.device_mesh, parameter.placements
            value = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
        elif value.shape == parameter.shape:
            # The memory layout must be that of the parameter: a fused step treats both as flat arrays.
            value = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _check_parameter_names(names: Iterable[str], parameters: Mapping[str, nn.Parameter]) -> None:
    if unknown := sorted(set(names) - set(parameters)):
        raise InputError(
            f"the state of the optimizer belongs to another model: this one has no {', '.join(unknown[:5])}"
        )


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
    """Divide the gradients by ``loss_scale`` and clip their total norm to ``max_norm`` (0: no clipping).

    Returns the norm before clipping, on the device.
    """
    trainable = [p for p in parameters if p.grad is not None]
    if loss_scale is not None:
        torch._foreach_mul_([_get_local_shard(p.grad) for p in trainable if p.grad is not None], 1 / loss_scale)
    norm = nn.utils.get_total_norm([p.grad for p in trainable if p.grad is not None])
    if max_norm:
        nn.utils.clip_grads_with_norm_(trainable, max_norm, norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
