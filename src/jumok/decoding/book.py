"""What the host knows of a beam search: every step of every sentence, and which sentences are done."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.decoding import rules
from jumok.decoding.protocol import Hypothesis

__all__ = ["Book", "Step"]

Number = TypeVar("Number", np.int64, np.float64)


class Step(NamedTuple):
    """What one step brought, for n sentences with ``size`` live hypotheses each. −inf: there is none."""

    words: Tensor  # (n, size), said last by the live hypotheses, best first
    parents: Tensor  # (n, size), which of the live ones of the step before each goes on from
    totals: Tensor  # (n, size), their log-probabilities, float64
    ended: Tensor  # (n, size), those of the hypotheses that said EOS
    ended_parents: Tensor  # (n, size), which of the live ones of the step before these were


class _End(NamedTuple):
    """A finished hypothesis: its number of words, which live one it was after them, its log-probability."""

    length: int
    slot: int
    logprob: float


class Book:
    """Filled step by step; then the hypotheses are read from it, each from its last word backwards."""

    def __init__(
        self, limits: list[int], size: int, n_best: int, length_penalty: float, *, scores_known: bool
    ) -> None:
        self.limits = limits
        self.size = size
        self.n_best = n_best
        self.length_penalty = length_penalty
        self.scores_known = scores_known  # during the search; if not, only numbers stop it
        self._going = list(range(len(limits)))  # the sentences in the rows of the state
        self._open = [True] * len(limits)
        self._ends: list[list[_End]] = [[] for _ in limits]
        self._words: list[NDArray[np.int64]] = []  # a step each, (sentences, size)
        self._parents: list[NDArray[np.int64]] = []
        self._totals: list[NDArray[np.float64]] = []

    @property
    def steps(self) -> int:
        """How many are written down."""
        return len(self._words)

    @property
    def limit(self) -> int:
        """The greatest length limit of the sentences that are still searched for."""
        return max(self.limits[n] for n in self._going)

    def note(self, steps: list[Step]) -> list[int]:
        """Write these steps down; gives the rows of the sentences that are not done yet."""
        seen = [torch.stack(list(x)).cpu().numpy() for x in zip(*steps, strict=True)]
        for words, parents, totals, ended, ended_parents in zip(*seen, strict=True):
            self._check(totals, ended)
            self._end(ended, ended_parents)
            self._words.append(self._of_all(words, 0))
            self._parents.append(self._of_all(parents, 0))
            self._totals.append(self._of_all(totals, -np.inf))
        for n in self._going:
            self._open[n] = self._open[n] and not self._decided(n)
        left = [row for row, n in enumerate(self._going) if self._open[n]]
        self._going = [self._going[row] for row in left]
        return left

    def finished(self, n: int) -> list[Hypothesis]:
        """Those of sentence n that said EOS, in the order in which they did."""
        return [
            Hypothesis(self._ids(n, length, slot), self._score(logprob, length + 1), logprob, finished=True)
            for length, slot, logprob in self._ends[n]
        ]

    def unfinished(self, n: int) -> list[Hypothesis]:
        """Those of sentence n that reached the length limit without an end, best first."""
        limit = self.limits[n]
        if self.steps < limit:
            return []
        ended = {slot for length, slot, _ in self._ends[n] if length == limit}
        return [
            Hypothesis(self._ids(n, limit, slot), self._score(logprob, limit), logprob, finished=False)
            for slot, logprob in enumerate(self._totals[limit - 1][n].tolist())
            if slot not in ended and logprob > -math.inf
        ]

    def died(self, n: int) -> int:
        """The step after which sentence n had no live hypothesis left."""
        return next(step for step, totals in enumerate(self._totals) if totals[n, 0] == -np.inf)

    def _check(self, *values: NDArray[np.float64]) -> None:
        """What a sentence brings after its end does not matter; before, it has to be a number."""
        wrong = np.isnan(np.concatenate(values, axis=1)).any(axis=1)
        if any(self._open[self._going[row]] for row in np.flatnonzero(wrong)):
            raise rules.broken(self.steps)

    def _end(self, ended: NDArray[np.float64], parents: NDArray[np.int64]) -> None:
        """Close what ends in the step after those written down."""
        said = self.steps  # so many words before it
        for row, place in np.argwhere(ended > -np.inf).tolist():
            n = self._going[row]
            if self._open[n]:
                self._ends[n].append(_End(said, int(parents[row, place]), float(ended[row, place])))
        for n in self._going:
            if len(self._ends[n]) >= self.size or said >= self.limits[n]:
                self._open[n] = False

    def _decided(self, n: int) -> bool:
        """Whether no live hypothesis can come among the n best any more."""
        highest = float(self._totals[-1][n, 0])
        if highest == -math.inf:
            return True
        if not self.scores_known or len(self._ends[n]) < self.n_best:
            return False
        # A log-probability is below 0 and only falls: it weighs least where it is divided by the most.
        reachable = self._score(highest, self.limits[n] + 1)
        scores = sorted((self._score(end.logprob, end.length + 1) for end in self._ends[n]), reverse=True)
        return reachable <= scores[self.n_best - 1]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / math.pow((5 + length) / 6, self.length_penalty)

    def _ids(self, n: int, length: int, slot: int) -> tuple[int, ...]:
        """The words of the hypothesis that was live in ``slot`` after ``length`` of them."""
        ids = []
        for step in range(length - 1, -1, -1):
            ids.append(int(self._words[step][n, slot]))
            slot = int(self._parents[step][n, slot])
        return tuple(reversed(ids))

    def _of_all(self, rows: NDArray[Number], missing: float) -> NDArray[Number]:
        """With a row for every sentence, those that are done and dropped included."""
        full = np.full((len(self.limits), rows.shape[1]), missing, rows.dtype)
        full[self._going] = rows
        return full
