"""Mixed precision: the dtype of matrix products, and loss scaling for float16.

Float16 has no number between 0 and 6e-8, so small gradients vanish. The loss is therefore multiplied by a
large scale before the backward pass, and the gradients are divided by it afterwards. If they overflow, the
step is skipped and the scale is halved; after many steps without overflow it is doubled. The rule is that of
:class:`torch.amp.GradScaler`, but everything stays on the device, so that steps can be CUDA graphs. All
processes agree, because the norm of the total gradient shows an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jumok.attention.gpu_support import supports_bfloat16
from jumok.training.config import TrainConfig

INITIAL_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR = 65536.0, 2.0, 0.5
MAX_SCALE = 2.0**40
GROWTH_INTERVAL = 2000  # consecutive steps without overflow


def select_autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """Return the dtype of matrix products in training. None: float32.

    ``precision: auto`` means bfloat16 on GPUs that support it in hardware. Older GPUs use float32, not
    float16, because not every model is tested with float16.
    """
    if config.precision == "auto":
        return torch.bfloat16 if supports_bfloat16(device) else None
    return {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]


class LossScaler:
    """Scale of the loss, as tensors on the device.

    >>> scaler = LossScaler(torch.device("cpu"))
    >>> scaler.update(overflow=torch.tensor(True))
    >>> scaler.scale
    tensor(32768.)
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device)
        self.num_good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step. ``overflow``: its gradient was not finite, and it was skipped."""
        num_good_steps = (self.num_good_steps + 1).masked_fill(overflow, 0)
        grows = num_good_steps == GROWTH_INTERVAL
        self.scale *= (
            torch.ones_like(self.scale).masked_fill(overflow, BACKOFF_FACTOR).masked_fill(grows, GROWTH_FACTOR)
        )
        self.scale.clamp_(max=MAX_SCALE)  # in a very long training it would become infinite
        self.num_good_steps.copy_(num_good_steps.masked_fill(grows, 0))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": self.num_good_steps}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned. Missing tensors keep their initial values."""
        for name, tensor in self.state_dict().items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
