"""Nested tensors as padded ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pad_nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x``, nested in its last dimension but one, padded with zeros; and the lengths ``(B,)``."""
    parts = x.detach().unbind()
    lengths = [part.shape[-2] for part in parts]
    longest = max(lengths, default=0)
    stacked = torch.stack([F.pad(part, (0, 0, 0, longest - part.shape[-2])) for part in parts])
    return stacked, torch.tensor(lengths, device=stacked.device)


def lengths_to_mask(lengths: Tensor, max_length: int) -> Tensor:
    """Which of so many places lie within each length: bool ``(B, max_length)``."""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]
