"""Words that are made unknown by chance, so that a model does not rely on any single one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from jumok.batch import UNK

__all__ = ["some_unknown"]


def some_unknown(ids: Tensor, share: float) -> Tensor:
    """The same token ids, but for a ``share`` of them, drawn anew each time, that are ``UNK``."""
    return torch.where(torch.rand(ids.shape, device=ids.device) < share, UNK, ids) if share else ids
