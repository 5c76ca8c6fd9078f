"""Top-k with a fixed order of equal values.

``torch.topk`` does not specify which of two equal values comes first. Scores in bfloat16 are often equal, and
random ties would mean another translation on another device or with other sentences in the batch.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

MAX_SORTED_WORDS = 256  # up to this number of words, sorting the whole row is fastest
MAX_DIRECT_ELEMENTS = 1 << 18  # up to this number of values, a GPU takes less time to find them than to launch chunks
# Relative difference that separates equal values in float64 and keeps the order of different float32 values,
# for up to 2²⁵ words.
TIE_BREAK_EPSILON = 2.0**-50


def stable_topk(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row in descending order, and their ids. Ties: lowest id first.

    ``log_probs`` ``(N, V)`` are float32 log-probabilities: none above 0, and at most one 0 in a row.

    >>> stable_topk(torch.tensor([[-2.0, -1.0, -2.0, -1.0]]), 3)
    (tensor([[-1., -1., -2.]]), tensor([[1, 3, 0]]))
    """
    num_rows, num_words = log_probs.shape
    if num_words <= max(MAX_SORTED_WORDS, 2 * k):
        values, ids = log_probs.sort(dim=1, descending=True, stable=True)
        return values[:, :k], ids[:, :k]
    if log_probs.is_cuda and log_probs.numel() <= MAX_DIRECT_ELEMENTS:
        _, tie_breakers = _build_tie_breakers(num_words, log_probs.device)
        ids = (log_probs * tie_breakers).topk(k).indices
        return log_probs.gather(1, ids), ids
    # The top k words are in the k chunks with the highest maxima. So the whole row is read once, and only
    # about the square root of it is sorted.
    chunk_size = math.isqrt(num_words // k)
    num_chunks = num_words // chunk_size
    chunk_maxima = log_probs[:, : num_chunks * chunk_size].unflatten(1, (num_chunks, chunk_size)).amax(-1)
    indices, tie_breakers = _build_tie_breakers(num_words, log_probs.device)
    top_chunks = (chunk_maxima * tie_breakers[:num_chunks]).topk(k).indices
    ids = (top_chunks[:, :, None] * chunk_size + indices[:chunk_size]).flatten(1)
    remainder = indices[num_chunks * chunk_size :]  # not in any chunk
    if len(remainder):
        ids = torch.cat([ids, remainder.expand(num_rows, -1)], dim=1)
    values = log_probs.gather(1, ids)
    order = (values * tie_breakers[ids]).topk(k).indices
    return values.gather(1, order), ids.gather(1, order)


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)
def _build_tie_breakers(num_words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of words, and factors that make each value lower than its equals before it."""
    indices = torch.arange(num_words, device=device)
    # Log-probabilities are negative, so a larger factor lowers the value of a higher index.
    return indices, 1.0 + TIE_BREAK_EPSILON * indices.double()
