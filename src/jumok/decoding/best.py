"""The best words of every row, in a fixed order.

``torch.topk`` leaves open which of two equal values it takes. Scores in bfloat16 often are equal; ties left
to chance would mean another translation on another device, or with other sentences in the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["best"]

SMALL = 256  # up to so many words a row, sorting them all is quickest
NUDGE = 2.0**-50  # relative: two float64 differ by less, and two float32 by more, for up to 2²⁵ words


def best(logp: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row, in order, and their ids; of equals, the lowest id comes first.

    ``logp`` ``(N, V)`` holds float32 log-probabilities: nothing above 0, and no two of a row at 0.

    >>> best(torch.tensor([[-2.0, -1.0, -2.0, -1.0]]), 3)
    (tensor([[-1., -1., -2.]]), tensor([[1, 3, 0]]))
    """
    rows, words = logp.shape
    if words <= max(SMALL, 2 * count):
        values, ids = logp.sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    # The best `count` words lie in the `count` chunks with the highest maxima. So the whole row is read once,
    # and what has to be ordered is about the square root of it.
    width = math.isqrt(words // count)
    chunks = words // width
    highest = logp[:, : chunks * width].unflatten(1, (chunks, width)).amax(-1)
    numbers = torch.arange(words, device=logp.device)
    nudges = 1.0 + NUDGE * numbers.double()  # the higher the number, the lower a value: no two are equal
    chosen = (highest * nudges[:chunks]).topk(count).indices
    ids = (chosen[:, :, None] * width + numbers[:width]).flatten(1)
    rest = numbers[chunks * width :]  # belongs to no chunk
    if len(rest):
        ids = torch.cat([ids, rest.expand(rows, -1)], dim=1)
    values = logp.gather(1, ids)
    order = (values * nudges[ids]).topk(count).indices
    return values.gather(1, order), ids.gather(1, order)
