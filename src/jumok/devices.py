"""Devices: where a model is placed for prediction."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from jumok.errors import InputError

M = TypeVar("M", bound=nn.Module)


def move_to_device(model: M, device: str = "auto") -> M:
    """Move a model to a device and switch it to evaluation mode. ``auto`` means a GPU if there is one."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        return model.to(name).eval()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {device!r} cannot be used here: {error}") from None
