"""Beam search: several hypotheses of every sentence side by side.

At every step each of the ``beam_size`` live hypotheses of a sentence goes on with every word. Of all these
candidates, in the order of their log-probabilities,

- an EOS among the first ``beam_size`` finishes its hypothesis;
- the first ``beam_size`` that are no EOS live on, so that the beam stays as wide as it was.

A sentence's search **stops** when ``beam_size`` hypotheses have finished (those of one step count together), at
the length limit, or when no live hypothesis can come among the ``n_best`` any more. The last only saves time:
whatever is said next lowers a log-probability, so nothing better is missed. The first may miss a better one
that is longer; it is what the field does, and makes a beam of size 1 the same as greedy search. With a size
as large as the number of candidates the search is exact.

Hypotheses are **ranked** by the score of Wu et al. (2016)::

    score = logprob / ((5 + length) / 6) ** length_penalty  +  coverage

``length`` counts what ``logprob`` sums over: the words, and EOS. With ``length_penalty=0`` the score is the
``logprob``; the higher the penalty, the better longer ones do. Live hypotheses are all of one length, so it
matters among finished ones only. Of equal scores, the one that finished first comes first. Unfinished ones,
cut off by the length limit, stand behind all finished ones, and only where these are fewer than ``n_best``;
coverage is not asked for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.batches.tokens import BOS, EOS, Tokens
from jumok.decoding import constraints
from jumok.decoding.beam_state import BeamState, BeamStep
from jumok.decoding.constraints import EMPTY_HYPOTHESIS, LengthLimit, default_max_length
from jumok.decoding.protocol import Hypothesis, IncrementalDecoder, S
from jumok.decoding.topk import stable_topk
from jumok.errors import InputError

__all__ = ["CoverageScorer", "beam_search", "coverage_penalty"]

# Of finished hypotheses, given their sentences (numbers in the batch) and ids: what is added to their scores.
CoverageScorer = Callable[[Sequence[int], Sequence[tuple[int, ...]]], Tensor]


@torch.no_grad()
def beam_search(
    model: IncrementalDecoder[S],
    source: Tokens,
    *,
    beam_size: int = 5,
    n_best: int = 1,
    length_penalty: float = 0.0,
    coverage: CoverageScorer | None = None,
    max_length: LengthLimit = default_max_length,
    allow_unk: bool = False,
) -> list[list[Hypothesis]]:
    """The ``n_best`` best hypotheses that a beam of ``beam_size`` finds for each sentence, best first.

    There are fewer than ``n_best`` only if the model holds no more to be possible; there is always one.
    ``coverage(sentences, ids)`` is called once, at the end, with all finished hypotheses; it gives a number
    for each, ``(M,)``, already weighted (see :func:`coverage_penalty`). The rules are told at the top of this
    file and of :mod:`jumok.decoding.constraints`.

    >>> [[first, second]] = beam(model, Tokens.padded([[7, 8, EOS]]), n_best=2)  # doctest: +SKIP
    >>> first.score >= second.score  # doctest: +SKIP
    True
    """
    _check_options(beam_size, n_best, length_penalty)
    found = [[EMPTY_HYPOTHESIS] for _ in source.lengths]
    asked = constraints.select_nonempty(source, max_length)
    if not asked.rows:
        return found
    book = BeamState(asked.max_lengths, beam_size, n_best, length_penalty, stop_by_score=coverage is None)
    _run_search(model, asked.source, book, allow_unk=allow_unk)
    finished = [book.finished_hypotheses(n) for n in range(len(asked.rows))]
    if coverage is not None:
        finished = _add_coverage(finished, asked.rows, coverage)
    for n, row in enumerate(asked.rows):
        ranked = sorted(finished[n], key=lambda hypothesis: -hypothesis.score)
        if len(ranked) < n_best:
            ranked += book.unfinished_hypotheses(n)
        if not ranked:
            raise constraints.build_invalid_scores_error(book.find_dead_end_step(n))
        found[row] = ranked[:n_best]
    return found


def coverage_penalty(weights: Tensor, source_lengths: Sequence[int], strength: float) -> Tensor:
    """The coverage of Wu et al. (2016), ``strength`` · Σ_j log min(Σ_t a_tj, 1), of each map: ``(N,)``.

    ``weights`` ``(N, Q, K)`` has a row for each word said, EOS included, and zeros for rows of padding; j
    goes over the first ``source_lengths`` columns. It is 0 if every source word got a weight of 1 in all, and
    lower the more were left out; one that got nothing counts as if it had got a millionth.

    >>> weights = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> coverage_term(weights, [2], strength=1.0)  # log 0.5 + log 1
    tensor([-0.6931], dtype=torch.float64)
    """
    lengths = constraints.move_to_device(torch.tensor(source_lengths), weights.device)
    real = torch.arange(weights.shape[-1], device=weights.device) < lengths[:, None]
    received = weights.double().sum(1).clamp(1e-6, 1.0)
    return strength * received.log().masked_fill(~real, 0.0).sum(1)


def _run_search(
    model: IncrementalDecoder[S], source: Tokens, beam_state: BeamState, *, allow_unk: bool
) -> None:
    """Take steps until the book is full. On a GPU, ``beam_state.note`` is all that waits."""
    device, sentences = source.ids.device, len(source.lengths)
    every = constraints.get_sync_interval(device)
    state = model.start(source)
    ids = torch.full((sentences, 1), BOS, device=device)
    totals = torch.zeros((sentences, 1), dtype=torch.float64, device=device)
    steps: list[BeamStep] = []  # that the host has not seen yet
    while True:
        logits, state = model.step(state, ids.flatten())
        step = _expand_hypotheses(
            constraints.compute_log_probs(logits, allow_unk=allow_unk), totals, beam_state.beam_size
        )
        steps.append(step)
        first = torch.arange(0, ids.numel(), ids.shape[1], device=device)  # row of each sentence in the state
        ids, totals, index = step.token_ids, step.log_probs, step.parents + first[:, None]
        sources: Sequence[int] = range(len(ids))
        if len(steps) == every or beam_state.num_steps + len(steps) > beam_state.max_length:
            left = beam_state.add_steps(steps)
            steps = []
            if not left:
                return
            if len(left) < len(ids):
                kept = constraints.move_to_device(torch.tensor(left), device)
                ids, totals, index, sources = ids[kept], totals[kept], index[kept], left
        state = state.reorder(index.flatten(), sources)


def _expand_hypotheses(log_probs: Tensor, parent_log_probs: Tensor, beam_size: int) -> BeamStep:
    """n sentences with w live hypotheses each go on: ``log_probs (n·w, V)`` on top of ``parent_log_probs (n, w)``."""
    sentences = len(parent_log_probs)
    # Of one hypothesis, at most `beam_size` candidates matter, and an EOS.
    values, words = stable_topk(log_probs, min(beam_size + 1, log_probs.shape[1]))
    each = values.shape[1]
    sums = (parent_log_probs[:, :, None] + values.reshape(sentences, -1, each)).flatten(1)
    sums, places = (x[:, : 2 * beam_size] for x in sums.sort(dim=1, descending=True, stable=True))
    words, parents = words.reshape(sentences, -1).gather(1, places), places // each
    if (room := 2 * beam_size - sums.shape[1]) > 0:  # the first step, or a tiny vocabulary
        sums = F.pad(sums, (0, room), value=-torch.inf)
        words, parents = F.pad(words, (0, room)), F.pad(parents, (0, room))
    ends = words == EOS
    ended = sums.masked_fill(~ends, -torch.inf)[:, :beam_size]
    live, order = sums.masked_fill(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
    order = order[:, :beam_size]
    return BeamStep(
        words.gather(1, order), parents.gather(1, order), live[:, :beam_size], ended, parents[:, :beam_size]
    )


def _add_coverage(
    finished: list[list[Hypothesis]], rows: list[int], coverage: CoverageScorer
) -> list[list[Hypothesis]]:
    """The same hypotheses, with the coverage in their scores."""
    flat = [(row, hypothesis) for row, some in zip(rows, finished, strict=True) for hypothesis in some]
    if not flat:
        return finished
    terms = coverage([row for row, _ in flat], [hypothesis.ids for _, hypothesis in flat])
    if terms.shape != (len(flat),) or not bool(terms.isfinite().all()):
        raise InputError(
            f"coverage gave {terms}; expected a finite number for each of the {len(flat)} finished hypotheses"
        )
    term = iter(terms.tolist())
    return [[replace(h, score=h.score + next(term)) for h in some] for some in finished]


def _check_options(beam_size: int, n_best: int, length_penalty: float) -> None:
    if not isinstance(beam_size, int) or isinstance(beam_size, bool) or beam_size < 1:
        raise InputError(f"size: {beam_size!r} came; expected a whole number of hypotheses from 1 on")
    if not isinstance(n_best, int) or isinstance(n_best, bool) or not 1 <= n_best <= beam_size:
        raise InputError(
            f"n_best: {n_best!r} came with a beam of size {beam_size}; expected a whole number from 1 to {beam_size} "
            "(a wider beam finds more)"
        )
    if not (math.isfinite(length_penalty) and length_penalty >= 0):
        raise InputError(f"length_penalty: {length_penalty!r} came; expected a number from 0 (none) on")
