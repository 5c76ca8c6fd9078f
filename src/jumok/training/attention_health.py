"""Is the attention alive? Figures of attention maps that tell, long before a score does; and alarms.

===================  ==================================================================================
attention/entropy    how widely a query looks: 0 at one key only, 1 at all of its keys alike
attention/peak       the largest weight of a query, on average
attention/coverage   how much of the keys is looked at: the mean over keys of the sum they get, at most 1
attention/uniform    the share of heads that look at everything alike, and so do nothing
attention/stuck      the share of heads all of whose queries look at one and the same key
===================  ==================================================================================

:func:`find_alarms` says what the figures of validations mean, if they mean trouble: those above, and those of
speech (:mod:`jumok.metrics.alignment_health`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.metrics.alignment_health import diagnose_attention, diagnose_style

__all__ = ["compute_attention_health", "find_alarms"]

UNIFORM_ENTROPY = 0.99  # of the highest possible entropy
STUCK_WEIGHT = 0.95  # of all weight is on one key
MAX_DEAD_HEADS = 0.5  # of the heads may do nothing
MIN_PROGRESS = 0.3  # of the training, before they count as dead


@torch.no_grad()
def compute_attention_health(
    maps: Sequence[Tensor], query_lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> dict[str, float]:
    """The figures over all heads of all maps.

    Args:
        maps: weights ``(B, H, Q, K)``, one tensor a layer; what lies behind a row's lengths is not looked at.
        queries: how many queries each of the B sequences has.
        keys: how many keys; None: as many as queries, as in self-attention.

    >>> uniform, sharp = torch.full((1, 1, 2, 2), 0.5), torch.eye(2)[None, None]
    >>> figures = attention_health([torch.cat([uniform, sharp], dim=1)], queries=[2])
    >>> [round(figure, 3) for figure in figures.values()]
    [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    if not maps or not query_lengths:
        return {}
    heads = [
        _compute_head_statistics(weights, query_lengths, key_lengths) for weights in maps
    ]  # (H, 4) a layer
    entropy, peak, coverage, favourite = torch.cat(heads).unbind(1)
    return {
        "attention/entropy": entropy.mean().item(),
        "attention/peak": peak.mean().item(),
        "attention/coverage": coverage.mean().item(),
        "attention/uniform": (entropy > UNIFORM_ENTROPY).double().mean().item(),
        "attention/stuck": (favourite > STUCK_WEIGHT).double().mean().item(),
    }


def find_alarms(validations: Sequence[Mapping[str, float]], progress: float) -> list[str]:
    """What to say of a training whose validations had these figures so far, the last one last.

    ``progress`` is the share of it that is behind. Before a good part of it is, there is nothing to say.

    >>> alarms([{"attention/uniform": 1.0, "attention/stuck": 0.0}], done=0.5)[0][:36]
    'attention does nothing: 100% of the '
    """
    if not validations:
        return []
    last = validations[-1]
    found = [
        diagnose_attention([one.get("alignment/diagonality", math.nan) for one in validations], progress),
        diagnose_style({name: value for name, value in last.items() if name.startswith("style/")}, progress),
        _find_dead_heads(last, progress),
    ]
    return [one for one in found if one is not None]


def _find_dead_heads(metrics: Mapping[str, float], progress: float) -> str | None:
    uniform, stuck = (metrics.get(f"attention/{name}", math.nan) for name in ("uniform", "stuck"))
    if progress < MIN_PROGRESS or not max(uniform, stuck) > MAX_DEAD_HEADS:
        return None
    share, how = max((uniform, "look at everything alike"), (stuck, "look at one and the same place always"))
    return (
        f"attention does nothing: {share:.0%} of the heads {how}, with {progress:.0%} of the training done. What "
        "may help: a lower train.learning_rate or a longer train.warmup, fewer heads or layers, more data"
    )


def _compute_head_statistics(
    weights: Tensor, query_lengths: Sequence[int], key_lengths: Sequence[int]
) -> Tensor:
    """Entropy, peak, coverage and the share of the favourite key, of each head: ``(H, 4)``."""
    if weights.dim() != 4 or not len(weights) == len(query_lengths) == len(key_lengths):
        raise InputError(
            f"attention_health: a map {tuple(weights.shape)} came with {len(query_lengths)} lengths of queries and "
            f"{len(key_lengths)} of keys; expected (batch, heads, queries, keys) and a length for each of the batch"
        )
    rows, columns = (torch.tensor(lengths, device=weights.device) for lengths in (query_lengths, key_lengths))
    asked = (torch.arange(weights.shape[2], device=weights.device) < rows[:, None])[:, None, :, None]
    given = (torch.arange(weights.shape[3], device=weights.device) < columns[:, None])[:, None, None, :]
    w = weights.double().where(asked & given, 0.0)  # (B, H, Q, K)
    # One key alone leaves no choice: its entropy of 0 says nothing, and log 1 = 0 cannot be divided by.
    choice = (asked[..., 0] & (columns > 1)[:, None, None]).expand(w.shape[:3])
    entropy = torch.special.entr(w).sum(-1) / columns.clamp(min=2).log()[:, None, None]
    received = w.sum(2)  # (B, H, K)
    covered = received.clamp(max=1.0)
    # One query, or one key, is no favourite.
    several = ((rows > 1) & (columns > 1))[:, None, None].expand(*covered.shape[:2], 1)
    means = (
        _compute_masked_mean(entropy, choice),
        _compute_masked_mean(w.amax(-1), asked[..., 0].expand(w.shape[:3])),
        _compute_masked_mean(covered, given[:, :, 0].expand(covered.shape)),
        _compute_masked_mean(received.amax(-1, keepdim=True) / rows.clamp(min=1)[:, None, None], several),
    )
    return torch.stack(means, dim=1)


def _compute_masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """For each head ``(H,)``, over the batch and what counts of it."""
    return x.where(mask, 0.0).sum((0, 2)) / mask.sum((0, 2)).clamp(min=1)
