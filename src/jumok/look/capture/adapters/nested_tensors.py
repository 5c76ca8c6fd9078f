"""Padding of nested tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pad_nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pad ``x``, nested in its second to last dimension, with zeros. Returns it with the lengths ``(B,)``."""
    sequences = x.detach().unbind()
    lengths = [sequence.shape[-2] for sequence in sequences]
    max_length = max(lengths, default=0)
    stacked = torch.stack([F.pad(sequence, (0, 0, 0, max_length - sequence.shape[-2])) for sequence in sequences])
    return stacked, torch.tensor(lengths, device=stacked.device)


def lengths_to_mask(lengths: Tensor, max_length: int) -> Tensor:
    """Return which positions lie within each length: bool ``(B, max_length)``."""
    return torch.arange(max_length, device=lengths.device) < lengths[:, None]
