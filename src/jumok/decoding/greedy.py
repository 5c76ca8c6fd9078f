"""Greedy search: the most probable word, again and again. And the walk that sampling shares with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, Tokens
from jumok.decoding import constraints
from jumok.decoding.constraints import EMPTY_HYPOTHESIS, LengthLimit, default_max_length
from jumok.decoding.protocol import Hypothesis, IncrementalDecoder, S

__all__ = ["TokenChooser", "decode_single_path", "greedy_search"]

# The next words (N,), chosen by their log-probabilities (N, V), in the sentences of these numbers (N,).
TokenChooser = Callable[[Tensor, Tensor], Tensor]


def greedy_search(
    model: IncrementalDecoder[S],
    source: Tokens,
    *,
    max_length: LengthLimit = default_max_length,
    allow_unk: bool = False,
) -> list[Hypothesis]:
    """The most probable word at every step, until EOS; one hypothesis for each sentence, in their order.

    ``source`` is padded. ``score`` is the ``logprob``. The rules (length limit, barred words, ties) are those
    of :mod:`jumok.decoding.constraints`.

    >>> [found] = greedy(model, Tokens.padded([[7, 8, EOS]]))  # doctest: +SKIP
    >>> found.ids, found.finished  # doctest: +SKIP
    ((11, 5), True)
    """
    return decode_single_path(
        model, source, lambda logp, _: logp.argmax(-1), max_length=max_length, allow_unk=allow_unk
    )


@dataclass
class _DecodingPath:
    """One sentence as far as the host has seen it."""

    max_length: int
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    is_open: bool = True
    finished: bool = False

    def extend(self, token_ids: list[int], log_probs: list[float], first_step: int) -> None:
        """Go on by the words of the steps from ``first_step`` on, up to the end of the sentence."""
        for n, (word, value) in enumerate(zip(token_ids, log_probs, strict=True)):
            if not math.isfinite(value):
                raise constraints.build_invalid_scores_error(first_step + n)
            if word != EOS and len(self.ids) == self.max_length:
                self.is_open = False
                return
            self.logprob += value
            if word == EOS:
                self.is_open, self.finished = False, True
                return
            self.ids.append(word)

    def to_hypothesis(self) -> Hypothesis:
        return Hypothesis(tuple(self.ids), self.logprob, self.logprob, self.finished)


@torch.no_grad()
def decode_single_path(
    model: IncrementalDecoder[S],
    source: Tokens,
    choose: TokenChooser,
    *,
    max_length: LengthLimit,
    allow_unk: bool,
) -> list[Hypothesis]:
    """One path a sentence, each word by ``choose``."""
    found = [EMPTY_HYPOTHESIS] * len(source.lengths)
    asked = constraints.select_nonempty(source, max_length)
    if not asked.rows:
        return found
    paths = [_DecodingPath(limit) for limit in asked.max_lengths]
    device = source.ids.device
    every = constraints.get_sync_interval(device)

    state = model.start(asked.source)
    going = list(range(len(paths)))  # the sentences in the rows of the state
    numbers = torch.arange(len(paths), device=device)  # the same, there
    ids = torch.full((len(paths),), BOS, device=device)
    begin, last = 0, max(asked.max_lengths)
    said: list[Tensor] = []  # the words of the steps from `begin` on, which the host has not seen yet
    sure: list[Tensor] = []  # and their log-probabilities
    while True:
        logits, state = model.step(state, ids)
        logp = constraints.compute_log_probs(logits, allow_unk=allow_unk)
        ids = choose(logp, numbers)
        said.append(ids)
        sure.append(logp.gather(1, ids[:, None]).squeeze(1))
        if len(said) < every and begin + len(said) <= last:
            continue
        seen = torch.stack(said, 1).tolist(), torch.stack(sure, 1).tolist()
        for n, words, values in zip(going, *seen, strict=True):
            if paths[n].is_open:
                paths[n].extend(words, values, begin)
        begin, said, sure = begin + len(said), [], []
        left = [row for row, n in enumerate(going) if paths[n].is_open]
        if not left:
            break
        last = max(paths[going[row]].max_length for row in left)
        # To drop rows, the state is copied: for a few of many that does not pay.
        if 8 * len(left) <= 7 * len(going):
            going = [going[row] for row in left]
            index = constraints.move_to_device(torch.tensor(left), device)
            state, ids, numbers = state.reorder(index, left), ids[index], numbers[index]
    for row, path in zip(asked.rows, paths, strict=True):
        found[row] = path.to_hypothesis()
    return found
