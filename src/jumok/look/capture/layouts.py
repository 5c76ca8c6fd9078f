"""Conversion of tensors to ``(batch, heads, length, width)``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def to_4d(x: Tensor) -> Tensor:
    """Return ``(…, length, width)`` as ``(batch, heads, length, width)``. Further axes are batch."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    return x if x.dim() == 4 else x[:, None] if x.dim() == 3 else x[None, None]


def pad_nested(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pad ``x``, nested in its second to last dimension, with zeros.

    Also returns the mask of the positions within each sequence, bool ``(B, 1, 1, length)``.
    """
    sequences = x.detach().unbind()
    lengths = torch.tensor([sequence.shape[-2] for sequence in sequences])
    max_length = int(lengths.max()) if sequences else 0
    padded = torch.stack([F.pad(sequence, (0, 0, 0, max_length - sequence.shape[-2])) for sequence in sequences])
    mask = torch.arange(max_length) < lengths[:, None]
    return padded, mask[:, None, None].to(padded.device)
