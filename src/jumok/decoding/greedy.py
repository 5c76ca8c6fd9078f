"""Greedy search, which takes the most probable token at every step, and the loop that sampling shares."""

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

# Chooses the next tokens (N,) by log-probabilities (N, V), for the sentences with these indices (N,).
TokenChooser = Callable[[Tensor, Tensor], Tensor]


def greedy_search(
    model: IncrementalDecoder[S],
    source: Tokens,
    *,
    max_length: LengthLimit = default_max_length,
    allow_unk: bool = False,
) -> list[Hypothesis]:
    """Take the most probable token at every step, until EOS. Returns one hypothesis per sentence.

    ``source`` is padded. ``score`` is the ``logprob``. The rules (length limit, forbidden tokens, ties) are
    in :mod:`jumok.decoding.constraints`.

    >>> [hypothesis] = greedy_search(model, Tokens.pad([[7, 8, EOS]]))  # doctest: +SKIP
    >>> hypothesis.ids, hypothesis.finished  # doctest: +SKIP
    ((11, 5), True)
    """
    return decode_single_path(
        model, source, lambda log_probs, _: log_probs.argmax(-1), max_length=max_length, allow_unk=allow_unk
    )


@dataclass
class _DecodingPath:
    """The part of a sentence that the host has received."""

    max_length: int
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    is_open: bool = True
    finished: bool = False

    def extend(self, token_ids: list[int], log_probs: list[float], first_step: int) -> None:
        """Append the tokens of the steps from ``first_step`` on, up to the end of the sentence."""
        for step, (token_id, log_prob) in enumerate(zip(token_ids, log_probs, strict=True), first_step):
            if not math.isfinite(log_prob):
                raise constraints.build_invalid_scores_error(step)
            if token_id != EOS and len(self.ids) == self.max_length:
                self.is_open = False
                return
            self.logprob += log_prob
            if token_id == EOS:
                self.is_open, self.finished = False, True
                return
            self.ids.append(token_id)

    def to_hypothesis(self) -> Hypothesis:
        """Return the result."""
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
    """Decode one path per sentence, with each token selected by ``choose``."""
    hypotheses = [EMPTY_HYPOTHESIS] * len(source.lengths)
    inputs = constraints.select_nonempty(source, max_length)
    if not inputs.rows:
        return hypotheses
    paths = [_DecodingPath(limit) for limit in inputs.max_lengths]
    device = source.ids.device
    sync_interval = constraints.get_sync_interval(device)

    state = model.start(inputs.source)
    row_sentences = list(range(len(paths)))  # the sentences in the rows of the state
    sentence_indices = torch.arange(len(paths), device=device)  # the same on the device
    ids = torch.full((len(paths),), BOS, device=device)
    first_step, last_step = 0, max(inputs.max_lengths)
    pending_ids: list[Tensor] = []  # tokens of the steps from first_step on, which the host has not received
    pending_log_probs: list[Tensor] = []
    while True:
        logits, state = model.step(state, ids)
        log_probs = constraints.compute_log_probs(logits, allow_unk=allow_unk)
        ids = choose(log_probs, sentence_indices)
        pending_ids.append(ids)
        pending_log_probs.append(log_probs.gather(1, ids[:, None]).squeeze(1))
        if len(pending_ids) < sync_interval and first_step + len(pending_ids) <= last_step:
            continue
        host_ids = torch.stack(pending_ids, 1).tolist()
        host_log_probs = torch.stack(pending_log_probs, 1).tolist()
        for sentence, row_ids, row_log_probs in zip(row_sentences, host_ids, host_log_probs, strict=True):
            if paths[sentence].is_open:
                paths[sentence].extend(row_ids, row_log_probs, first_step)
        first_step += len(pending_ids)
        pending_ids, pending_log_probs = [], []
        open_rows = [row for row, sentence in enumerate(row_sentences) if paths[sentence].is_open]
        if not open_rows:
            break
        last_step = max(paths[row_sentences[row]].max_length for row in open_rows)
        # Dropping rows copies the state, which does not pay off for a few of many.
        if 8 * len(open_rows) <= 7 * len(row_sentences):
            row_sentences = [row_sentences[row] for row in open_rows]
            index = constraints.move_to_device(torch.tensor(open_rows), device)
            state = state.reorder(index, open_rows)
            ids, sentence_indices = ids[index], sentence_indices[index]
    for row, path in zip(inputs.rows, paths, strict=True):
        hypotheses[row] = path.to_hypothesis()
    return hypotheses
