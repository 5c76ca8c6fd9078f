"""Sampling: every word drawn at random, as probable as the model holds it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jumok.batches.tokens import Tokens
from jumok.decoding.constraints import LengthLimit, default_max_length, move_to_device
from jumok.decoding.greedy import decode_single_path
from jumok.decoding.protocol import Hypothesis, IncrementalDecoder, S
from jumok.decoding.topk import stable_topk
from jumok.errors import InputError

__all__ = ["sample"]


def sample(
    model: IncrementalDecoder[S],
    source: Tokens,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    max_length: LengthLimit = default_max_length,
    allow_unk: bool = False,
) -> list[Hypothesis]:
    """A random word at every step, until EOS; one hypothesis for each sentence, in their order.

    The words that may be said (see :mod:`jumok.decoding.rules`) have the probabilities softmax(logits /
    ``temperature``). Of them stay the ``top_k`` most probable ones; of these, the fewest of the most probable
    whose share is at least ``top_p``. One of the rest is drawn.

    ``score`` and ``logprob`` are the model's own log-probability, at temperature 1 and before any cut. With a
    seeded ``generator`` the same batch gives the same words. A generator of the CPU serves a model on a GPU
    too, which then draws the same random numbers.
    """
    _check_options(temperature, top_k, top_p)
    sentences = len(source.lengths)

    def choose(logp: Tensor, numbers: Tensor) -> Tensor:
        # Drawn for all sentences, finished ones too: when a row is dropped, the others' luck does not change.
        home = logp.device if generator is None else generator.device
        luck = torch.rand(sentences, dtype=torch.float64, generator=generator, device=home)
        return sample_tokens(logp, move_to_device(luck, logp.device)[numbers], temperature, top_k, top_p)

    return decode_single_path(model, source, choose, max_length=max_length, allow_unk=allow_unk)


def sample_tokens(
    log_probs: Tensor, uniforms: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """The words ``(N,)`` that numbers ``(N,)`` from [0, 1) fall on, if the words lie side by side on a line.

    Each takes as much of the line as its probability after the cuts, the words of a cut in falling order.

    >>> logp = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, 3)
    >>> draw(logp, torch.tensor([0.1, 0.3, 0.8]), 1.0, None, None)
    tensor([0, 1, 2])
    >>> draw(logp, torch.tensor([0.1, 0.3, 0.8]), 1.0, 2, None)  # 5/8 for the one, 3/8 for the other
    tensor([1, 1, 2])
    """
    ids: Tensor | None = None  # None: a word's place is its id
    if top_k is not None and top_k < log_probs.shape[1]:
        log_probs, ids = stable_topk(log_probs, top_k)
    elif top_p is not None:
        log_probs, ids = log_probs.sort(dim=1, descending=True, stable=True)
    share = (log_probs.double() / temperature).softmax(-1)
    if top_p is not None:
        before = share.cumsum(-1) - share
        share = share.masked_fill(before >= top_p, 0.0)
    ends = share.cumsum(-1)
    place = torch.searchsorted(ends, uniforms.to(ends)[:, None] * ends[:, -1:], right=True)
    place = place.clamp(max=log_probs.shape[1] - 1)  # should rounding put a number on the very end
    return (place if ids is None else ids.gather(1, place)).squeeze(1)


def _check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"temperature: {temperature!r} came; expected a number above 0 (greedy search takes the most "
            "probable word at every step)"
        )
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise InputError(f"top_k: {top_k!r} came; expected a whole number from 1 on, or None to cut nothing")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(
            f"top_p: {top_p!r} came; expected a share above 0 and up to 1, or None to cut nothing"
        )
