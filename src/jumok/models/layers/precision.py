"""Conversions between the dtypes of mixed precision."""

from __future__ import annotations

import torch
from torch import Tensor


def to_autocast_dtype(x: Tensor) -> Tensor:
    """Convert ``x`` to autocast's dtype if autocast is on. Like autocast, leave float64 as it is.

    The next matrix product would do the same. Inside a compiled block the conversion is fused and costs
    nothing.
    """
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def upcast(x: Tensor) -> Tensor:
    """Convert ``x`` to float32, unless it has a higher precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
