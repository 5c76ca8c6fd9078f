"""How far what a model says of texts is from their labels.

Shapes: ``N`` texts, ``C`` classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.text import label_mask
from jumok.batches.tokens import IGNORE

__all__ = ["label_loss", "upcast"]


def label_loss(logits: Tensor, labels: Tensor) -> tuple[str, Tensor]:
    """Its name and the sum over the labels ``(N,)`` that count: cross-entropy, or the squared error.

    The first, "nll", of logits ``(N, C)`` of several classes; the second, "error", of numbers ``(N, 1)``.

    >>> label_loss(torch.zeros(2, 5), torch.tensor([3, IGNORE]))  # log 5
    ('nll', tensor(1.6094))
    >>> label_loss(torch.zeros(2, 1), torch.tensor([3.0, float("nan")]))
    ('error', tensor(9.))
    """
    logits = upcast(logits)
    if logits.shape[1] > 1:
        return "nll", F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    said = logits[:, 0]
    wanted = labels.to(said.dtype).where(label_mask(labels), said.detach())  # what does not count, is right
    return "error", F.mse_loss(said, wanted, reduction="sum")


def upcast(x: Tensor) -> Tensor:
    """In at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
