"""Beam search: several hypotheses per sentence at the same time.

At every step, each of the ``beam_size`` live hypotheses of a sentence is extended by every token. The
candidates are sorted by their log-probabilities. Then

- an EOS among the first ``beam_size`` candidates finishes its hypothesis;
- the first ``beam_size`` candidates that are not EOS are the new live hypotheses, so the beam keeps its size.

The search of a sentence **stops** when ``beam_size`` hypotheses have finished (those of one step count
together), at the length limit, or when no live hypothesis can be among the ``n_best`` any more. The last
condition only saves time: log-probabilities only decrease, so nothing better is missed. The first condition
may miss a better and longer hypothesis. It is common practice, and it makes a beam of size 1 equal to greedy
search. If the beam size is at least the number of candidates, the search is exact.

Hypotheses are **ranked** by the score of Wu et al. (2016)::

    score = logprob / ((5 + length) / 6) ** length_penalty  +  coverage

``length`` counts the terms of ``logprob``: the tokens, including EOS. With ``length_penalty=0`` the score is
the ``logprob``; higher values favour longer hypotheses. Live hypotheses all have the same length, so the
penalty only matters among finished ones. Of equal scores, the hypothesis that finished first comes first.
Unfinished hypotheses, cut off by the length limit, rank after all finished ones, and are returned only if
fewer than ``n_best`` have finished. They have no coverage term.
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

# Returns the terms to add to the scores of finished hypotheses, given their sentences (indices in the batch)
# and ids.
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
    """Return the ``n_best`` best hypotheses of each sentence, best first.

    There is always at least one, and fewer than ``n_best`` only if no others have a probability above 0.
    ``coverage(sentences, ids)`` is called once at the end with all finished hypotheses, and returns a
    weighted term for each, ``(M,)`` (see :func:`coverage_penalty`). The rules are at the top of this file and
    of :mod:`jumok.decoding.constraints`.

    >>> [[first, second]] = beam_search(model, Tokens.pad([[7, 8, EOS]]), n_best=2)  # doctest: +SKIP
    >>> first.score >= second.score  # doctest: +SKIP
    True
    """
    _check_options(beam_size, n_best, length_penalty)
    hypotheses = [[EMPTY_HYPOTHESIS] for _ in source.lengths]
    inputs = constraints.select_nonempty(source, max_length)
    if not inputs.rows:
        return hypotheses
    beam_state = BeamState(inputs.max_lengths, beam_size, n_best, length_penalty, stop_by_score=coverage is None)
    _run_search(model, inputs.source, beam_state, allow_unk=allow_unk)
    # Only hypotheses that are returned are read from the recorded steps; a coverage may change their ranks.
    limit = n_best if coverage is None else None
    finished = [beam_state.finished_hypotheses(n, limit) for n in range(len(inputs.rows))]
    if coverage is not None:
        finished = _add_coverage(finished, inputs.rows, coverage)
    for n, row in enumerate(inputs.rows):
        ranked = sorted(finished[n], key=lambda hypothesis: -hypothesis.score)
        if len(ranked) < n_best:
            ranked += beam_state.unfinished_hypotheses(n, n_best - len(ranked))
        if not ranked:
            raise constraints.build_invalid_scores_error(beam_state.find_dead_end_step(n))
        hypotheses[row] = ranked[:n_best]
    return hypotheses


def coverage_penalty(weights: Tensor, source_lengths: Sequence[int], strength: float) -> Tensor:
    """Compute the coverage of Wu et al. (2016), ``strength`` · Σ_j log min(Σ_t a_tj, 1), per map: ``(N,)``.

    ``weights`` ``(N, Q, K)`` has a row for each token, including EOS, and zeros in padding rows. j runs over
    the first ``source_lengths`` columns. The coverage is 0 if every source token receives a total weight of
    at least 1, and negative otherwise. A total below 1e-6 counts as 1e-6.

    >>> weights = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> coverage_penalty(weights, [2], strength=1.0)  # log 0.5 + log 1
    tensor([-0.6931], dtype=torch.float64)
    """
    lengths = constraints.move_to_device(torch.tensor(source_lengths), weights.device)
    is_source = torch.arange(weights.shape[-1], device=weights.device) < lengths[:, None]
    received = weights.double().sum(1).clamp(1e-6, 1.0)
    return strength * received.log().masked_fill(~is_source, 0.0).sum(1)


def _run_search(model: IncrementalDecoder[S], source: Tokens, beam_state: BeamState, *, allow_unk: bool) -> None:
    """Run steps until all sentences are done. Only ``beam_state.add_steps`` waits for a GPU."""
    device, num_sentences = source.ids.device, len(source.lengths)
    sync_interval = constraints.get_sync_interval(device)
    state = model.start(source)
    ids = torch.full((num_sentences, 1), BOS, device=device)  # (n, w): w live hypotheses per sentence
    log_probs = torch.zeros((num_sentences, 1), dtype=torch.float64, device=device)  # (n, w)
    steps: list[BeamStep] = []  # not yet passed to the host
    while True:
        logits, state = model.step(state, ids.flatten())
        token_log_probs = constraints.compute_log_probs(logits, allow_unk=allow_unk)
        step = _expand_hypotheses(token_log_probs, log_probs, beam_state.beam_size)
        steps.append(step)
        first_rows = torch.arange(0, ids.numel(), ids.shape[1], device=device)  # of each sentence
        ids, log_probs, index = step.token_ids, step.log_probs, step.parents + first_rows[:, None]
        sources: Sequence[int] = range(len(ids))
        if len(steps) == sync_interval or beam_state.num_steps + len(steps) > beam_state.max_length:
            open_rows = beam_state.add_steps(steps)
            steps = []
            if not open_rows:
                return
            if len(open_rows) < len(ids):
                rows = constraints.move_to_device(torch.tensor(open_rows), device)
                ids, log_probs, index, sources = ids[rows], log_probs[rows], index[rows], open_rows
        state = state.reorder(index.flatten(), sources)


def _expand_hypotheses(log_probs: Tensor, parent_log_probs: Tensor, beam_size: int) -> BeamStep:
    """Extend w live hypotheses of n sentences by one token.

    ``log_probs`` ``(n·w, V)`` are those of the tokens, ``parent_log_probs`` ``(n, w)`` those of the
    hypotheses.
    """
    num_sentences = len(parent_log_probs)
    # Only `beam_size` candidates of a hypothesis and an EOS matter.
    values, words = stable_topk(log_probs, min(beam_size + 1, log_probs.shape[1]))  # (n·w, k)
    k = values.shape[1]
    totals = (parent_log_probs[:, :, None] + values.reshape(num_sentences, -1, k)).flatten(1)  # (n, w·k)
    totals, columns = (x[:, : 2 * beam_size] for x in totals.sort(dim=1, descending=True, stable=True))
    words, parents = words.reshape(num_sentences, -1).gather(1, columns), columns // k  # (n, 2·beam_size)
    if (missing := 2 * beam_size - totals.shape[1]) > 0:  # at the first step, or with a tiny vocabulary
        totals = F.pad(totals, (0, missing), value=-torch.inf)
        words, parents = F.pad(words, (0, missing)), F.pad(parents, (0, missing))
    is_eos = words == EOS
    eos_log_probs = totals.masked_fill(~is_eos, -torch.inf)[:, :beam_size]
    live, order = totals.masked_fill(is_eos, -torch.inf).sort(dim=1, descending=True, stable=True)
    order = order[:, :beam_size]
    return BeamStep(
        token_ids=words.gather(1, order),
        parents=parents.gather(1, order),
        log_probs=live[:, :beam_size],
        eos_log_probs=eos_log_probs,
        eos_parents=parents[:, :beam_size],
    )


def _add_coverage(
    finished: list[list[Hypothesis]], rows: list[int], coverage: CoverageScorer
) -> list[list[Hypothesis]]:
    """Return the hypotheses with the coverage added to their scores."""
    flat = [(row, hypothesis) for row, hypotheses in zip(rows, finished, strict=True) for hypothesis in hypotheses]
    if not flat:
        return finished
    terms = coverage([row for row, _ in flat], [hypothesis.ids for _, hypothesis in flat])
    if terms.shape != (len(flat),) or not bool(terms.isfinite().all()):
        raise InputError(
            f"coverage returned {terms}; expected a finite number for each of the {len(flat)} finished hypotheses"
        )
    term = iter(terms.tolist())
    return [[replace(h, score=h.score + next(term)) for h in hypotheses] for hypotheses in finished]


def _check_options(beam_size: int, n_best: int, length_penalty: float) -> None:
    if not isinstance(beam_size, int) or isinstance(beam_size, bool) or beam_size < 1:
        raise InputError(f"beam_size: {beam_size!r} is invalid; expected an integer of at least 1")
    if not isinstance(n_best, int) or isinstance(n_best, bool) or not 1 <= n_best <= beam_size:
        raise InputError(
            f"n_best: {n_best!r} given with beam_size {beam_size}; expected an integer from 1 to {beam_size}"
        )
    if not (math.isfinite(length_penalty) and length_penalty >= 0):
        raise InputError(f"length_penalty: {length_penalty!r} is invalid; expected a number of at least 0")
