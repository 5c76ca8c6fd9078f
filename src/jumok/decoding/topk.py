"""The best words of every row, in a fixed order.

``torch.topk`` leaves open which of two equal values it takes. Scores in bfloat16 often are equal; ties left
to chance would mean another translation on another device, or with other sentences in the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["stable_topk"]

MAX_SORTED_WORDS = 256  # up to so many words a row, sorting them all is quickest
TIE_BREAK_EPSILON = (
    2.0**-50
)  # relative: two float64 differ by less, and two float32 by more, for up to 2²⁵ words


def stable_topk(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of each row, in order, and their ids; of equals, the lowest id comes first.

    ``log_probs`` ``(N, V)`` holds float32 log-probabilities: nothing above 0, and no two of a row at 0.

    >>> best(torch.tensor([[-2.0, -1.0, -2.0, -1.0]]), 3)
    (tensor([[-1., -1., -2.]]), tensor([[1, 3, 0]]))
    """
    rows, words = log_probs.shape
    if words <= max(MAX_SORTED_WORDS, 2 * k):
        values, ids = log_probs.sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    # The best `k` words lie in the `k` chunks with the highest maxima. So the whole row is read once,
    # and what has to be ordered is about the square root of it.
    width = math.isqrt(words // k)
    chunks = words // width
    highest = log_probs[:, : chunks * width].unflatten(1, (chunks, width)).amax(-1)
    numbers = torch.arange(words, device=log_probs.device)
    nudges = (
        1.0 + TIE_BREAK_EPSILON * numbers.double()
    )  # the higher the number, the lower a value: no two are equal
    chosen = (highest * nudges[:chunks]).topk(k).indices
    ids = (chosen[:, :, None] * width + numbers[:width]).flatten(1)
    rest = numbers[chunks * width :]  # belongs to no chunk
    if len(rest):
        ids = torch.cat([ids, rest.expand(rows, -1)], dim=1)
    values = log_probs.gather(1, ids)
    order = (values * nudges[ids]).topk(k).indices
    return values.gather(1, order), ids.gather(1, order)
