"""What the host knows of a beam search: every step of every sentence, and which sentences are done."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.decoding import constraints
from jumok.decoding.protocol import Hypothesis

__all__ = ["BeamState", "BeamStep"]

Number = TypeVar("Number", np.int64, np.float64)


class BeamStep(NamedTuple):
    """What one step brought, for n sentences with ``beam_size`` live hypotheses each. −inf: there is none."""

    token_ids: Tensor  # (n, size), said last by the live hypotheses, best first
    parents: Tensor  # (n, size), which of the live ones of the step before each goes on from
    log_probs: Tensor  # (n, size), their log-probabilities, float64
    eos_log_probs: Tensor  # (n, size), those of the hypotheses that said EOS
    eos_parents: Tensor  # (n, size), which of the live ones of the step before these were


class _FinishedBeam(NamedTuple):
    """A finished hypothesis: its number of words, which live one it was after them, its log-probability."""

    length: int
    slot: int
    logprob: float


class BeamState:
    """Filled step by step; then the hypotheses are read from it, each from its last word backwards."""

    def __init__(
        self,
        max_lengths: list[int],
        beam_size: int,
        n_best: int,
        length_penalty: float,
        *,
        stop_by_score: bool,
    ) -> None:
        self.max_lengths = max_lengths
        self.beam_size = beam_size
        self.n_best = n_best
        self.length_penalty = length_penalty
        self.stop_by_score = stop_by_score  # during the search; if not, only numbers stop it
        self._row_sentences = list(range(len(max_lengths)))  # the sentences in the rows of the state
        self._is_open = [True] * len(max_lengths)
        self._finished: list[list[_FinishedBeam]] = [[] for _ in max_lengths]
        self._token_ids: list[NDArray[np.int64]] = []  # a step each, (sentences, size)
        self._parents: list[NDArray[np.int64]] = []
        self._log_probs: list[NDArray[np.float64]] = []

    @property
    def num_steps(self) -> int:
        """How many are written down."""
        return len(self._token_ids)

    @property
    def max_length(self) -> int:
        """The greatest length limit of the sentences that are still searched for."""
        return max(self.max_lengths[n] for n in self._row_sentences)

    def add_steps(self, steps: list[BeamStep]) -> list[int]:
        """Write these steps down; gives the rows of the sentences that are not done yet."""
        seen = [torch.stack(list(x)).cpu().numpy() for x in zip(*steps, strict=True)]
        for words, parents, totals, ended, ended_parents in zip(*seen, strict=True):
            self._check_not_nan(totals, ended)
            self._record_finished(ended, ended_parents)
            self._token_ids.append(self._scatter_rows(words, 0))
            self._parents.append(self._scatter_rows(parents, 0))
            self._log_probs.append(self._scatter_rows(totals, -np.inf))
        for n in self._row_sentences:
            self._is_open[n] = self._is_open[n] and not self._is_decided(n)
        left = [row for row, n in enumerate(self._row_sentences) if self._is_open[n]]
        self._row_sentences = [self._row_sentences[row] for row in left]
        return left

    def finished_hypotheses(self, sentence: int) -> list[Hypothesis]:
        """Those of sentence n that said EOS, in the order in which they did."""
        return [
            Hypothesis(
                self._backtrack(sentence, length, slot),
                self._compute_score(logprob, length + 1),
                logprob,
                finished=True,
            )
            for length, slot, logprob in self._finished[sentence]
        ]

    def unfinished_hypotheses(self, sentence: int) -> list[Hypothesis]:
        """Those of sentence n that reached the length limit without an end, best first."""
        limit = self.max_lengths[sentence]
        if self.num_steps < limit:
            return []
        ended = {slot for length, slot, _ in self._finished[sentence] if length == limit}
        return [
            Hypothesis(
                self._backtrack(sentence, limit, slot),
                self._compute_score(logprob, limit),
                logprob,
                finished=False,
            )
            for slot, logprob in enumerate(self._log_probs[limit - 1][sentence].tolist())
            if slot not in ended and logprob > -math.inf
        ]

    def find_dead_end_step(self, sentence: int) -> int:
        """The step after which sentence n had no live hypothesis left."""
        return next(step for step, totals in enumerate(self._log_probs) if totals[sentence, 0] == -np.inf)

    def _check_not_nan(self, *values: NDArray[np.float64]) -> None:
        """What a sentence brings after its end does not matter; before, it has to be a number."""
        wrong = np.isnan(np.concatenate(values, axis=1)).any(axis=1)
        if any(self._is_open[self._row_sentences[row]] for row in np.flatnonzero(wrong)):
            raise constraints.build_invalid_scores_error(self.num_steps)

    def _record_finished(self, eos_log_probs: NDArray[np.float64], parents: NDArray[np.int64]) -> None:
        """Close what ends in the step after those written down."""
        said = self.num_steps  # so many words before it
        for row, place in np.argwhere(eos_log_probs > -np.inf).tolist():
            n = self._row_sentences[row]
            if self._is_open[n]:
                self._finished[n].append(
                    _FinishedBeam(said, int(parents[row, place]), float(eos_log_probs[row, place]))
                )
        for n in self._row_sentences:
            if len(self._finished[n]) >= self.beam_size or said >= self.max_lengths[n]:
                self._is_open[n] = False

    def _is_decided(self, sentence: int) -> bool:
        """Whether no live hypothesis can come among the n best any more."""
        highest = float(self._log_probs[-1][sentence, 0])
        if highest == -math.inf:
            return True
        if not self.stop_by_score or len(self._finished[sentence]) < self.n_best:
            return False
        # A log-probability is below 0 and only falls: it weighs least where it is divided by the most.
        reachable = self._compute_score(highest, self.max_lengths[sentence] + 1)
        scores = sorted(
            (self._compute_score(end.logprob, end.length + 1) for end in self._finished[sentence]),
            reverse=True,
        )
        return reachable <= scores[self.n_best - 1]

    def _compute_score(self, logprob: float, length: int) -> float:
        return logprob / math.pow((5 + length) / 6, self.length_penalty)

    def _backtrack(self, sentence: int, length: int, slot: int) -> tuple[int, ...]:
        """The words of the hypothesis that was live in ``slot`` after ``length`` of them."""
        ids = []
        for step in range(length - 1, -1, -1):
            ids.append(int(self._token_ids[step][sentence, slot]))
            slot = int(self._parents[step][sentence, slot])
        return tuple(reversed(ids))

    def _scatter_rows(self, rows: NDArray[Number], fill_value: float) -> NDArray[Number]:
        """With a row for every sentence, those that are done and dropped included."""
        full = np.full((len(self.max_lengths), rows.shape[1]), fill_value, rows.dtype)
        full[self._row_sentences] = rows
        return full
