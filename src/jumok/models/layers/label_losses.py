"""Losses of classification and regression.

Shapes: ``N`` texts, ``C`` classes.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from jumok.batches.text import label_mask
from jumok.batches.tokens import IGNORE
from jumok.models.layers.precision import upcast


def label_loss(logits: Tensor, labels: Tensor) -> tuple[str, Tensor]:
    """Return the name and the sum of the loss over the labels ``(N,)`` that count.

    Logits ``(N, C)`` of several classes have the cross-entropy, "nll". Predictions ``(N, 1)`` of a regression
    have the squared error, "error".

    >>> import torch
    >>> label_loss(torch.zeros(2, 5), torch.tensor([3, IGNORE]))  # log 5
    ('nll', tensor(1.6094))
    >>> label_loss(torch.zeros(2, 1), torch.tensor([3.0, float("nan")]))
    ('error', tensor(9.))
    """
    logits = upcast(logits)
    if logits.shape[1] > 1:
        return "nll", F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    predictions = logits[:, 0]
    # A label that does not count is replaced by the prediction, so that its error is zero.
    targets = labels.to(predictions.dtype).where(label_mask(labels), predictions.detach())
    return "error", F.mse_loss(predictions, targets, reduction="sum")
