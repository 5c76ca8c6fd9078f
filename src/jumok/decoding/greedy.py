"""Greedy search: the most probable word, again and again. And the walk that sampling shares with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jumok.batch import BOS, EOS, Tokens
from jumok.decoding import rules
from jumok.decoding.protocol import Hypothesis, Model, S
from jumok.decoding.rules import EMPTY, Limit, twice_plus_20

__all__ = ["Choice", "greedy", "walk"]

# The next words (N,), chosen by their log-probabilities (N, V), in the sentences of these numbers (N,).
Choice = Callable[[Tensor, Tensor], Tensor]


def greedy(
    model: Model[S], source: Tokens, *, longest: Limit = twice_plus_20, unknown: bool = False
) -> list[Hypothesis]:
    """The most probable word at every step, until EOS; one hypothesis for each sentence, in their order.

    ``source`` is padded. ``score`` is the ``logprob``. The rules (length limit, barred words, ties) are those
    of :mod:`jumok.decoding.rules`.

    >>> [found] = greedy(model, Tokens.padded([[7, 8, EOS]]))  # doctest: +SKIP
    >>> found.ids, found.finished  # doctest: +SKIP
    ((11, 5), True)
    """
    return walk(model, source, lambda logp, _: logp.argmax(-1), longest=longest, unknown=unknown)


@dataclass
class _Path:
    """One sentence as far as the host has seen it."""

    limit: int
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    open: bool = True
    finished: bool = False

    def follow(self, words: list[int], logp: list[float], step: int) -> None:
        """Go on by the words of the steps from ``step`` on, up to the end of the sentence."""
        for n, (word, value) in enumerate(zip(words, logp, strict=True)):
            if not math.isfinite(value):
                raise rules.broken(step + n)
            if word != EOS and len(self.ids) == self.limit:
                self.open = False
                return
            self.logprob += value
            if word == EOS:
                self.open, self.finished = False, True
                return
            self.ids.append(word)

    def hypothesis(self) -> Hypothesis:
        return Hypothesis(tuple(self.ids), self.logprob, self.logprob, self.finished)


@torch.no_grad()
def walk(
    model: Model[S], source: Tokens, choose: Choice, *, longest: Limit, unknown: bool
) -> list[Hypothesis]:
    """One path a sentence, each word by ``choose``."""
    found = [EMPTY] * len(source.lengths)
    asked = rules.ask(source, longest)
    if not asked.rows:
        return found
    paths = [_Path(limit) for limit in asked.limits]
    device = source.ids.device
    every = rules.look_every(device)

    state = model.start(asked.source)
    going = list(range(len(paths)))  # the sentences in the rows of the state
    numbers = torch.arange(len(paths), device=device)  # the same, there
    ids = torch.full((len(paths),), BOS, device=device)
    begin, last = 0, max(asked.limits)
    said: list[Tensor] = []  # the words of the steps from `begin` on, which the host has not seen yet
    sure: list[Tensor] = []  # and their log-probabilities
    while True:
        logits, state = model.step(state, ids)
        logp = rules.log_probabilities(logits, unknown=unknown)
        ids = choose(logp, numbers)
        said.append(ids)
        sure.append(logp.gather(1, ids[:, None]).squeeze(1))
        if len(said) < every and begin + len(said) <= last:
            continue
        seen = torch.stack(said, 1).tolist(), torch.stack(sure, 1).tolist()
        for n, words, values in zip(going, *seen, strict=True):
            if paths[n].open:
                paths[n].follow(words, values, begin)
        begin, said, sure = begin + len(said), [], []
        left = [row for row, n in enumerate(going) if paths[n].open]
        if not left:
            break
        last = max(paths[going[row]].limit for row in left)
        # To drop rows, the state is copied: for a few of many that does not pay.
        if 8 * len(left) <= 7 * len(going):
            going = [going[row] for row in left]
            index = rules.moved(torch.tensor(left), device)
            state, ids, numbers = state.reorder(index, left), ids[index], numbers[index]
    for row, path in zip(asked.rows, paths, strict=True):
        found[row] = path.hypothesis()
    return found
