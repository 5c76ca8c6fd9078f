"""Mixed precision: the type of products in training, and loss scaling for float16.

Float16 has no number between 0 and 6e-8, so small gradients vanish. The loss is therefore multiplied by a
large factor before backward, and the gradients are divided by it after. Where they overflow, the step is
skipped and the factor halved; after many good steps it is doubled. The rule is that of
:class:`torch.amp.GradScaler`, but it stays on the device, so that steps can be CUDA graphs and many processes
agree: what overflows is known from the norm of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jumok.attention.gpu_support import supports_bfloat16
from jumok.training.config import TrainConfig

__all__ = ["LossScaler", "select_autocast_dtype"]

INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR = 65536.0, 2.0, 0.5
MAX_SCALE = 2.0**40
GROWTH_INTERVAL = 2000  # steps in a row without overflow


def select_autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """The type of products in training; None: float32.

    auto: bfloat16 where the GPU multiplies it in hardware. An older GPU gets float32, not float16, for which
    not every model has been tried.
    """
    if config.precision == "auto":
        return torch.bfloat16 if supports_bfloat16(device) else None
    return {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]


class LossScaler:
    """The factor on the loss, as tensors on the device.

    >>> scale = LossScale(torch.device("cpu"))
    >>> scale.update(overflow=torch.tensor(True))
    >>> scale.factor
    tensor(32768.)
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.num_good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        """After a step: ``overflow`` says whether its gradient was not finite, and the step was skipped."""
        good = (self.num_good_steps + 1).masked_fill(overflow, 0)
        grows = good == GROWTH_INTERVAL
        self.scale *= (
            torch.ones_like(self.scale)
            .masked_fill(overflow, BACKOFF_FACTOR)
            .masked_fill(grows, GROWTH_FACTOR)
        )
        self.scale.clamp_(max=MAX_SCALE)  # it would grow to infinity in very long trainings
        self.num_good_steps.copy_(good.masked_fill(grows, 0))

    def state_dict(self) -> dict[str, Tensor]:
        return {"loss_scale": self.scale, "loss_scale_good_steps": self.num_good_steps}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """The counterpart of :meth:`state_dict`; without a saved one, the scale stays at its beginning."""
        for name, tensor in self.state_dict().items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
