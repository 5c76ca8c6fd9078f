"""From a decoder's hidden states to its loss, without ever holding the logits of a whole batch.

For 14,000 places and 32,000 words the logits are the largest tensor of a training step, and autograd would
keep them, their softmax and its gradient. Here some places are worked on at a time, and their share of the
gradients is computed while their logits are at hand: nothing is kept, and nothing computed twice.

Shapes: ``N`` places, ``D`` width, ``V`` words of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jumok.batch import IGNORE, Pairs

__all__ = ["counted", "smoothed_loss"]

AT_ONCE = 1 << 26  # logits held at one time, …
AT_ONCE_ON_CPU = 1 << 22  # … and where they should stay in the cache


def counted(hidden: Tensor, batch: Pairs) -> tuple[Tensor, Tensor]:
    """Of hidden states ``(B, L, D)``, those with a label that counts, ``(N, D)``, and these labels ``(N,)``.

    Where padding is comes from the lengths on the host, so that no GPU is waited for. Tokens that are alike
    to others do not tell: there padding is carried along, and its label is IGNORE.
    """
    target, hidden, labels = batch.target, hidden.flatten(0, 1), batch.labels.flatten()
    if target.form is not None:
        return hidden, labels
    real = torch.arange(target.ids.shape[1]) < torch.tensor(target.lengths)[:, None]
    places = real.flatten().nonzero()[:, 0].to(hidden.device, non_blocking=hidden.is_cuda)
    return hidden.index_select(0, places), labels.index_select(0, places)


def smoothed_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, smoothing: float = 0.0, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``hidden @ weight.T + bias`` and the labels, summed: label-smoothed, and plain.

    Both are numbers in at least float32. Only the first has a graph. The logits are in autocast's type, if it
    is on, and their softmax in at least float32.

    Args:
        hidden: ``(N, D)``.
        weight: ``(V, D)``.
        labels: ``(N,)``; those that are ``IGNORE`` do not count.
        smoothing: this share of each label is spread over all words evenly, as in ``F.cross_entropy``.
        bias: ``(V,)``.

    >>> hidden, weight = torch.zeros(2, 5), torch.zeros(7, 5)
    >>> smoothed_loss(hidden, weight, torch.tensor([3, IGNORE]))  # log 7
    (tensor(1.9459), tensor(1.9459))
    """
    inputs = (hidden, weight, bias)
    learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _Output.apply(hidden, weight, bias, labels, smoothing, learning)  # type: ignore[no-any-return, no-untyped-call]


class _Output(torch.autograd.Function):
    """The two sums, and while the logits are there, the gradients of the first."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        device, words = hidden.device.type, weight.shape[0]
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        high = torch.promote_types(low, torch.float32)
        narrow = weight.to(low)
        total = plain = torch.zeros((), dtype=high, device=hidden.device)
        by_hidden: list[Tensor] = []
        by_weight = torch.zeros_like(weight) if learning else None
        by_bias = torch.zeros_like(bias) if learning and bias is not None else None
        rows = max(1, (AT_ONCE_ON_CPU if device == "cpu" else AT_ONCE) // words)
        with torch.autocast(device, enabled=False):
            for here, said in zip(hidden.split(rows), labels.split(rows), strict=True):
                counts = (said != IGNORE)[:, None]  # (n, 1)
                said = said[:, None].clamp(min=0)
                here = here.to(low).where(counts, 0)
                logits = here @ narrow.t()
                if bias is not None:
                    logits += bias
                log_p = logits.log_softmax(-1, dtype=high)
                right = smoothed = log_p.gather(1, said)
                if smoothing:
                    smoothed = torch.lerp(right, log_p.mean(-1, keepdim=True), smoothing)
                plain = plain - right.where(counts, 0).sum()
                total = total - smoothed.where(counts, 0).sum()
                if by_weight is None:
                    continue
                # The gradient of the logits: p − (1 − smoothing) · [the label] − smoothing / V.
                slope = log_p.exp_().scatter_(1, said, right.exp() + (smoothing - 1))
                if smoothing:
                    slope.sub_(smoothing / words)
                if by_bias is not None:
                    by_bias += (counts.to(high).t() @ slope)[0]  # a product: it copies nothing
                slope = slope.to(low)
                by_hidden.append((slope @ narrow).where(counts, 0).to(hidden.dtype))
                by_weight += slope.t() @ here
        if by_weight is not None:
            ctx.save_for_backward(torch.cat(by_hidden), by_weight, by_bias)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        scaled = (x if x is None else x * slope.to(x.dtype) for x in (hidden, weight, bias))
        return (*scaled, None, None, None)
