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

from jumok.attention.capability import has_bfloat16
from jumok.training.settings import Settings

__all__ = ["LossScale", "autocast_dtype"]

INITIAL, GROWTH, BACKOFF = 65536.0, 2.0, 0.5
LARGEST = 2.0**40
GROWTH_INTERVAL = 2000  # steps in a row without overflow


def autocast_dtype(settings: Settings, device: torch.device) -> torch.dtype | None:
    """The type of products in training; None: float32.

    auto: bfloat16 where the GPU multiplies it in hardware. An older GPU gets float32, not float16, for which
    not every model has been tried.
    """
    if settings.precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else None
    return {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision]


class LossScale:
    """The factor on the loss, as tensors on the device.

    >>> scale = LossScale(torch.device("cpu"))
    >>> scale.update(overflow=torch.tensor(True))
    >>> scale.factor
    tensor(32768.)
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), INITIAL, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        """After a step: ``overflow`` says whether its gradient was not finite, and the step was skipped."""
        good = (self.good_steps + 1).masked_fill(overflow, 0)
        grows = good == GROWTH_INTERVAL
        self.factor *= torch.ones_like(self.factor).masked_fill(overflow, BACKOFF).masked_fill(grows, GROWTH)
        self.factor.clamp_(max=LARGEST)  # it would grow to infinity in very long trainings
        self.good_steps.copy_(good.masked_fill(grows, 0))

    def state(self) -> dict[str, Tensor]:
        return {"loss_scale": self.factor, "loss_scale_good_steps": self.good_steps}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """The counterpart of :meth:`state`; without a saved one, the scale stays at its beginning."""
        for name, tensor in self.state().items():
            if name in saved:
                tensor.copy_(saved[name])
