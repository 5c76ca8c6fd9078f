"""Metrics of attention maps that reveal failures long before the task metrics do, and alarms based on them.

==========================  =========================================================================
attention/entropy           mean entropy of a query's weights: 0 is a single key, 1 is uniform
attention/max_weight        mean of the largest weight of each query
attention/coverage          mean over the keys of the total weight that they receive, clipped to 1
attention/uniform_heads     fraction of heads with uniform weights, which have no effect
attention/single_key_heads  fraction of heads whose queries all attend to the same key
==========================  =========================================================================

:func:`find_alarms` interprets these metrics, and those of speech alignment
(:mod:`jumok.metrics.alignment_health`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.metrics.alignment_health import diagnose_attention, diagnose_style

UNIFORM_ENTROPY = 0.99  # fraction of the maximum entropy
STUCK_WEIGHT = 0.95  # fraction of the total weight on one key
MAX_DEAD_HEADS = 0.5  # fraction of the heads that may have no effect
MIN_PROGRESS = 0.3  # fraction of the training before heads count as dead


@torch.no_grad()
def compute_attention_health(
    maps: Sequence[Tensor], query_lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> dict[str, float]:
    """Compute the metrics over all heads of all maps.

    Args:
        maps: weights ``(B, H, Q, K)``, one tensor per layer. Padding is ignored.
        query_lengths: the number of queries of each of the B sequences.
        key_lengths: the number of keys. None: the number of queries, as in self-attention.

    >>> uniform, sharp = torch.full((1, 1, 2, 2), 0.5), torch.eye(2)[None, None]
    >>> metrics = compute_attention_health([torch.cat([uniform, sharp], dim=1)], query_lengths=[2])
    >>> [round(value, 3) for value in metrics.values()]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    if not maps or not query_lengths:
        return {}
    layers = [_compute_head_statistics(weights, query_lengths, key_lengths) for weights in maps]  # (H, 4) each
    entropy, max_weight, coverage, max_key_share = torch.cat(layers).unbind(1)
    return {
        "attention/entropy": entropy.mean().item(),
        "attention/max_weight": max_weight.mean().item(),
        "attention/coverage": coverage.mean().item(),
        "attention/uniform_heads": (entropy > UNIFORM_ENTROPY).double().mean().item(),
        "attention/single_key_heads": (max_key_share > STUCK_WEIGHT).double().mean().item(),
    }


def find_alarms(validations: Sequence[Mapping[str, float]], progress: float) -> list[str]:
    """Return messages about the problems that the metrics of all validations so far show.

    ``progress`` is the fraction of the training that is done. Early in training there are no alarms.

    >>> metrics = {"attention/uniform_heads": 1.0, "attention/single_key_heads": 0.0}
    >>> find_alarms([metrics], progress=0.5)[0][:42]
    'attention has no effect: 100% of the heads'
    """
    if not validations:
        return []
    last = validations[-1]
    diagonality = [metrics.get("alignment/diagonality", math.nan) for metrics in validations]
    alarms = [
        diagnose_attention(diagonality, progress),
        diagnose_style({name: value for name, value in last.items() if name.startswith("style/")}, progress),
        _find_dead_heads(last, progress),
    ]
    return [alarm for alarm in alarms if alarm is not None]


def _find_dead_heads(metrics: Mapping[str, float], progress: float) -> str | None:
    uniform = metrics.get("attention/uniform_heads", math.nan)
    single_key = metrics.get("attention/single_key_heads", math.nan)
    if progress < MIN_PROGRESS or not max(uniform, single_key) > MAX_DEAD_HEADS:
        return None
    fraction, symptom = max((uniform, "attend to all keys equally"), (single_key, "always attend to the same key"))
    return (
        f"attention has no effect: {fraction:.0%} of the heads {symptom}, with {progress:.0%} of the "
        "training done. Try a lower train.learning_rate, more train.warmup_steps, fewer heads or layers, or "
        "more data"
    )


def _compute_head_statistics(weights: Tensor, query_lengths: Sequence[int], key_lengths: Sequence[int]) -> Tensor:
    """Compute entropy, maximum weight, coverage and the largest share of one key per head: ``(H, 4)``."""
    if weights.dim() != 4 or not len(weights) == len(query_lengths) == len(key_lengths):
        raise InputError(
            f"compute_attention_health: a map {tuple(weights.shape)} given with {len(query_lengths)} query "
            f"lengths and {len(key_lengths)} key lengths; expected (batch, heads, queries, keys) and one "
            "length per row"
        )
    num_queries, num_keys = (torch.tensor(lengths, device=weights.device) for lengths in (query_lengths, key_lengths))
    is_query = (torch.arange(weights.shape[2], device=weights.device) < num_queries[:, None])[:, None, :, None]
    is_key = (torch.arange(weights.shape[3], device=weights.device) < num_keys[:, None])[:, None, None, :]
    w = weights.double().where(is_query & is_key, 0.0)  # (B, H, Q, K)
    # With a single key the entropy is always 0, and log 1 = 0 cannot be divided by.
    has_choice = (is_query[..., 0] & (num_keys > 1)[:, None, None]).expand(w.shape[:3])
    entropy = torch.special.entr(w).sum(-1) / num_keys.clamp(min=2).log()[:, None, None]
    received = w.sum(2)  # (B, H, K)
    coverage = received.clamp(max=1.0)
    max_key_share = received.amax(-1, keepdim=True) / num_queries.clamp(min=1)[:, None, None]
    # The share of a key needs several queries and several keys.
    has_several = ((num_queries > 1) & (num_keys > 1))[:, None, None].expand(*coverage.shape[:2], 1)
    means = (
        _compute_masked_mean(entropy, has_choice),
        _compute_masked_mean(w.amax(-1), is_query[..., 0].expand(w.shape[:3])),
        _compute_masked_mean(coverage, is_key[:, :, 0].expand(coverage.shape)),
        _compute_masked_mean(max_key_share, has_several),
    )
    return torch.stack(means, dim=1)


def _compute_masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of each head ``(H,)`` over the unmasked elements ``(B, H, N)`` of the batch."""
    return x.where(mask, 0.0).sum((0, 2)) / mask.sum((0, 2)).clamp(min=1)
