"""Is the attention alive? Figures of attention maps that tell, long before a score does; and alarms.

===================  ==================================================================================
attention/entropy    how widely a query looks: 0 at one key only, 1 at all of its keys alike
attention/peak       the largest weight of a query, on average
attention/coverage   how much of the keys is looked at: the mean over keys of the sum they get, at most 1
attention/uniform    the share of heads that look at everything alike, and so do nothing
attention/stuck      the share of heads all of whose queries look at one and the same key
===================  ==================================================================================

:func:`alarms` says what the figures of validations mean, if they mean trouble: those above, and those of
speech (:mod:`jumok.metrics.alignment_health`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from jumok.errors import InputError
from jumok.metrics.alignment_health import attention_alarm, style_alarm

__all__ = ["alarms", "attention_health"]

UNIFORM = 0.99  # of the highest possible entropy
STUCK = 0.95  # of all weight is on one key
MOST = 0.5  # of the heads may do nothing
PATIENCE = 0.3  # of the training, before they count as dead


@torch.no_grad()
def attention_health(
    maps: Sequence[Tensor], queries: Sequence[int], keys: Sequence[int] | None = None
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
    keys = queries if keys is None else keys
    if not maps or not queries:
        return {}
    heads = [_figures(weights, queries, keys) for weights in maps]  # (H, 4) a layer
    entropy, peak, coverage, favourite = torch.cat(heads).unbind(1)
    return {
        "attention/entropy": entropy.mean().item(),
        "attention/peak": peak.mean().item(),
        "attention/coverage": coverage.mean().item(),
        "attention/uniform": (entropy > UNIFORM).double().mean().item(),
        "attention/stuck": (favourite > STUCK).double().mean().item(),
    }


def alarms(figures: Sequence[Mapping[str, float]], done: float) -> list[str]:
    """What to say of a training whose validations had these figures so far, the last one last.

    ``done`` is the share of it that is behind. Before a good part of it is, there is nothing to say.

    >>> alarms([{"attention/uniform": 1.0, "attention/stuck": 0.0}], done=0.5)[0][:36]
    'attention does nothing: 100% of the '
    """
    if not figures:
        return []
    last = figures[-1]
    found = [
        attention_alarm([one.get("alignment/diagonality", math.nan) for one in figures], done),
        style_alarm({name: value for name, value in last.items() if name.startswith("style/")}, done),
        _heads_alarm(last, done),
    ]
    return [one for one in found if one is not None]


def _heads_alarm(figures: Mapping[str, float], done: float) -> str | None:
    uniform, stuck = (figures.get(f"attention/{name}", math.nan) for name in ("uniform", "stuck"))
    if done < PATIENCE or not max(uniform, stuck) > MOST:
        return None
    share, how = max((uniform, "look at everything alike"), (stuck, "look at one and the same place always"))
    return (
        f"attention does nothing: {share:.0%} of the heads {how}, with {done:.0%} of the training done. What "
        "may help: a lower train.learning_rate or a longer train.warmup, fewer heads or layers, more data"
    )


def _figures(weights: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Entropy, peak, coverage and the share of the favourite key, of each head: ``(H, 4)``."""
    if weights.dim() != 4 or not len(weights) == len(queries) == len(keys):
        raise InputError(
            f"attention_health: a map {tuple(weights.shape)} came with {len(queries)} lengths of queries and "
            f"{len(keys)} of keys; expected (batch, heads, queries, keys) and a length for each of the batch"
        )
    rows, columns = (torch.tensor(lengths, device=weights.device) for lengths in (queries, keys))
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
        _mean(entropy, choice),
        _mean(w.amax(-1), asked[..., 0].expand(w.shape[:3])),
        _mean(covered, given[:, :, 0].expand(covered.shape)),
        _mean(received.amax(-1, keepdim=True) / rows.clamp(min=1)[:, None, None], several),
    )
    return torch.stack(means, dim=1)


def _mean(x: Tensor, counts: Tensor) -> Tensor:
    """For each head ``(H,)``, over the batch and what counts of it."""
    return x.where(counts, 0.0).sum((0, 2)) / counts.sum((0, 2)).clamp(min=1)
