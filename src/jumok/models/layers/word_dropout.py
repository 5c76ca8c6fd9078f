"""Words that are made unknown by chance, so that a model does not rely on any single one of them."""

from __future__ import annotations

import torch
from torch import Tensor

from jumok.batches.tokens import UNK

__all__ = ["drop_words"]


def drop_words(ids: Tensor, p: float) -> Tensor:
    """The same token ids, but for a ``p`` of them, drawn anew each time, that are ``UNK``."""
    return torch.where(torch.rand(ids.shape, device=ids.device) < p, UNK, ids) if p else ids
