"""State of a beam search on the host: all steps of all sentences, and which sentences are done."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.decoding import constraints
from jumok.decoding.protocol import Hypothesis

Number = TypeVar("Number", np.int64, np.float64)


class BeamStep(NamedTuple):
    """Result of one step for n sentences with ``beam_size`` live hypotheses each. −inf: no hypothesis."""

    token_ids: Tensor  # (n, size), last tokens of the live hypotheses, best first
    parents: Tensor  # (n, size), slots of their predecessors in the previous step
    log_probs: Tensor  # (n, size), their total log-probabilities, float64
    eos_log_probs: Tensor  # (n, size), of the hypotheses that generated EOS
    eos_parents: Tensor  # (n, size), slots of their predecessors


class _FinishedBeam(NamedTuple):
    """A finished hypothesis: the number of its tokens, its slot before EOS, and its log-probability."""

    length: int
    slot: int
    logprob: float


class BeamState:
    """Records the steps of a beam search. Hypotheses are then read backwards from their last token."""

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
        self.stop_by_score = stop_by_score  # stop when no live hypothesis can be among the n best
        self._row_sentences = list(range(len(max_lengths)))  # sentences in the rows of the decoder state
        self._is_open = [True] * len(max_lengths)
        self._finished: list[list[_FinishedBeam]] = [[] for _ in max_lengths]
        self._token_ids: list[NDArray[np.int64]] = []  # one array (sentences, size) per step
        self._parents: list[NDArray[np.int64]] = []
        self._log_probs: list[NDArray[np.float64]] = []

    @property
    def num_steps(self) -> int:
        """The number of recorded steps."""
        return len(self._token_ids)

    @property
    def max_length(self) -> int:
        """The largest length limit of the sentences that are not done."""
        return max(self.max_lengths[n] for n in self._row_sentences)

    def add_steps(self, steps: list[BeamStep]) -> list[int]:
        """Record steps. Returns the rows of the sentences that are not done."""
        arrays = [torch.stack(list(field)).cpu().numpy() for field in zip(*steps, strict=True)]
        for token_ids, parents, log_probs, eos_log_probs, eos_parents in zip(*arrays, strict=True):
            self._check_not_nan(log_probs, eos_log_probs)
            self._record_finished(eos_log_probs, eos_parents)
            self._token_ids.append(self._scatter_rows(token_ids, 0))
            self._parents.append(self._scatter_rows(parents, 0))
            self._log_probs.append(self._scatter_rows(log_probs, -np.inf))
        for n in self._row_sentences:
            self._is_open[n] = self._is_open[n] and not self._is_decided(n)
        open_rows = [row for row, n in enumerate(self._row_sentences) if self._is_open[n]]
        self._row_sentences = [self._row_sentences[row] for row in open_rows]
        return open_rows

    def finished_hypotheses(self, sentence: int, n_best: int | None = None) -> list[Hypothesis]:
        """Return the hypotheses of a sentence that generated EOS, in the order in which they did.

        With ``n_best``, return only so many of them, best first.
        """
        scored = [(self._compute_score(beam.logprob, beam.length + 1), beam) for beam in self._finished[sentence]]
        if n_best is not None:
            scored = sorted(scored, key=lambda item: -item[0])[:n_best]
        return [
            Hypothesis(self._backtrack(sentence, length, slot), score, logprob, finished=True)
            for score, (length, slot, logprob) in scored
        ]

    def unfinished_hypotheses(self, sentence: int, n_best: int) -> list[Hypothesis]:
        """Return the ``n_best`` hypotheses of a sentence that reached the length limit without EOS, best first."""
        limit = self.max_lengths[sentence]
        if self.num_steps < limit:
            return []
        finished_slots = {slot for length, slot, _ in self._finished[sentence] if length == limit}
        live = [
            (slot, logprob)
            for slot, logprob in enumerate(self._log_probs[limit - 1][sentence].tolist())
            if slot not in finished_slots and logprob > -math.inf
        ]
        return [
            Hypothesis(
                self._backtrack(sentence, limit, slot), self._compute_score(logprob, limit), logprob, finished=False
            )
            for slot, logprob in live[:n_best]
        ]

    def find_dead_end_step(self, sentence: int) -> int:
        """Return the step after which a sentence had no live hypothesis."""
        return next(step for step, log_probs in enumerate(self._log_probs) if log_probs[sentence, 0] == -np.inf)

    def _check_not_nan(self, *values: NDArray[np.float64]) -> None:
        """Raise an error if values of a sentence are NaN before its end."""
        has_nan = np.isnan(np.concatenate(values, axis=1)).any(axis=1)
        if any(self._is_open[self._row_sentences[row]] for row in np.flatnonzero(has_nan)):
            raise constraints.build_invalid_scores_error(self.num_steps)

    def _record_finished(self, eos_log_probs: NDArray[np.float64], parents: NDArray[np.int64]) -> None:
        """Record the hypotheses that finish in the next step, and close the sentences that are done."""
        length = self.num_steps  # number of tokens before EOS
        for row, rank in np.argwhere(eos_log_probs > -np.inf).tolist():
            n = self._row_sentences[row]
            if self._is_open[n]:
                self._finished[n].append(
                    _FinishedBeam(length, int(parents[row, rank]), float(eos_log_probs[row, rank]))
                )
        for n in self._row_sentences:
            if len(self._finished[n]) >= self.beam_size or length >= self.max_lengths[n]:
                self._is_open[n] = False

    def _is_decided(self, sentence: int) -> bool:
        """Whether no live hypothesis can be among the n best any more."""
        best_log_prob = float(self._log_probs[-1][sentence, 0])
        if best_log_prob == -math.inf:
            return True
        if not self.stop_by_score or len(self._finished[sentence]) < self.n_best:
            return False
        # A log-probability is negative and only decreases, so its score is at most that with the largest
        # divisor.
        upper_bound = self._compute_score(best_log_prob, self.max_lengths[sentence] + 1)
        scores = sorted(
            (self._compute_score(beam.logprob, beam.length + 1) for beam in self._finished[sentence]),
            reverse=True,
        )
        return upper_bound <= scores[self.n_best - 1]

    def _compute_score(self, logprob: float, length: int) -> float:
        return logprob / math.pow((5 + length) / 6, self.length_penalty)

    def _backtrack(self, sentence: int, length: int, slot: int) -> tuple[int, ...]:
        """Return the tokens of the hypothesis that was in ``slot`` after ``length`` tokens."""
        ids = []
        for step in range(length - 1, -1, -1):
            ids.append(int(self._token_ids[step][sentence, slot]))
            slot = int(self._parents[step][sentence, slot])
        return tuple(reversed(ids))

    def _scatter_rows(self, rows: NDArray[Number], fill_value: float) -> NDArray[Number]:
        """Return an array with a row for every sentence, including those that are done."""
        full = np.full((len(self.max_lengths), rows.shape[1]), fill_value, rows.dtype)
        full[self._row_sentences] = rows
        return full
