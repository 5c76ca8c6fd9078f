"""Sampling: every token is drawn at random from the distribution of the model."""

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
    """Draw a random token at every step, until EOS. Returns one hypothesis per sentence.

    The allowed tokens (see :mod:`jumok.decoding.constraints`) have the probabilities softmax(logits /
    ``temperature``). ``top_k`` keeps the k most probable tokens. Of these, ``top_p`` keeps the smallest set
    of the most probable tokens whose total probability is at least ``top_p``.

    ``score`` and ``logprob`` are the log-probability under the model, at temperature 1 and without top-k and
    top-p. With a seeded ``generator``, the same batch gives the same tokens. A generator on the CPU also
    works for a model on a GPU, and draws the same random numbers.
    """
    _check_options(temperature, top_k, top_p)
    num_sentences = len(source.lengths)

    def choose(log_probs: Tensor, sentence_indices: Tensor) -> Tensor:
        # Draw for all sentences, so that the numbers of the others do not change when a row is dropped.
        device = log_probs.device if generator is None else generator.device
        uniforms = torch.rand(num_sentences, dtype=torch.float64, generator=generator, device=device)
        uniforms = move_to_device(uniforms, log_probs.device)[sentence_indices]
        return sample_tokens(log_probs, uniforms, temperature, top_k, top_p)

    return decode_single_path(model, source, choose, max_length=max_length, allow_unk=allow_unk)


def sample_tokens(
    log_probs: Tensor, uniforms: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Sample tokens ``(N,)`` by inverting the cumulative distribution at ``uniforms`` ``(N,)`` in [0, 1).

    With top-k or top-p, the tokens are in descending order of probability.

    >>> log_probs = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, 3)
    >>> sample_tokens(log_probs, torch.tensor([0.1, 0.3, 0.8]), 1.0, None, None)
    tensor([0, 1, 2])
    >>> sample_tokens(log_probs, torch.tensor([0.1, 0.3, 0.8]), 1.0, 2, None)  # probabilities 5/8 and 3/8
    tensor([1, 1, 2])
    """
    ids: Tensor | None = None  # None: the columns are the token ids
    if top_k is not None and top_k < log_probs.shape[1]:
        log_probs, ids = stable_topk(log_probs, top_k)
    elif top_p is not None:
        log_probs, ids = log_probs.sort(dim=1, descending=True, stable=True)
    probs = (log_probs.double() / temperature).softmax(-1)
    if top_p is not None:
        preceding = probs.cumsum(-1) - probs
        probs = probs.masked_fill(preceding >= top_p, 0.0)
    cumulative = probs.cumsum(-1)
    column = torch.searchsorted(cumulative, uniforms.to(cumulative)[:, None] * cumulative[:, -1:], right=True)
    column = column.clamp(max=log_probs.shape[1] - 1)  # rounding may reach the very end
    return (column if ids is None else ids.gather(1, column)).squeeze(1)


def _check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(
            f"temperature: {temperature!r} is invalid; expected a number above 0 (use greedy search for the most "
            "probable word at every step)"
        )
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise InputError(f"top_k: {top_k!r} is invalid; expected an integer of at least 1, or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p: {top_p!r} is invalid; expected a number above 0 and at most 1, or None")
