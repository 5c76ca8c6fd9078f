"""Rules that all searches follow.

- **Forbidden tokens.** PAD and BOS are never generated; UNK only with ``allow_unk=True``. The probabilities
  of the other tokens do not change: a ``logprob`` is always that of the model.
- **Ties.** Of equally probable tokens, the one with the lowest id wins; of paths, the one with the better
  rank.
- A hypothesis is **finished** when it has generated EOS.
- **Length limit.** A sentence has at most ``max_length`` tokens (ids without EOS). The limit is a number, or
  a function of the number of source ids. After the last token, EOS is still allowed. Otherwise the hypothesis
  is returned with ``finished=False``.
- **Empty source.** A source without tokens, or with EOS alone, has the empty translation with probability 1,
  without a call of the model.
- **Invalid scores.** NaN is an error, and so is a step in which all allowed tokens have probability 0.

The host waits for a GPU only every few steps, when it looks for finished sentences and removes them from the
batch. Tokens that were generated after the end of a sentence are discarded, so they do not affect the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, PAD, Tokens
from jumok.decoding.protocol import Hypothesis
from jumok.errors import InputError

LengthLimit = int | Callable[[int], int]

EMPTY_HYPOTHESIS = Hypothesis(ids=(), score=0.0, logprob=0.0, finished=True)


def default_max_length(source_length: int) -> int:
    """The default length limit, 2·n + 20."""
    return 2 * source_length + 20


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """The sentences that are not empty, which the model must translate."""

    source: Tokens
    rows: list[int]  # their indices in the batch of the caller
    max_lengths: list[int]  # length limit of each sentence


def select_nonempty(source: Tokens, max_length: LengthLimit) -> SearchInputs:
    """Select the sentences of ``source`` that are not empty, with their length limits."""
    if source.packed:
        raise InputError("got packed sentences; a search needs padded ones: make them with Tokens.pad(…)")
    is_empty = _find_empty(source)
    rows = [row for row, empty in enumerate(is_empty) if not empty]
    max_lengths = [_resolve_max_length(max_length, source.lengths[row]) for row in rows]
    if len(rows) < len(is_empty):
        ids = source.ids[move_to_device(torch.tensor(rows, dtype=torch.long), source.ids.device)]
        source = Tokens(ids, tuple(source.lengths[row] for row in rows))
    return SearchInputs(source, rows, max_lengths)


def compute_log_probs(logits: Tensor, *, allow_unk: bool) -> Tensor:
    """Return the log-probabilities ``(N, V)`` of the model in float32, with −inf for forbidden tokens."""
    if logits.dim() != 2 or logits.shape[1] <= EOS:
        raise InputError(
            f"step() returned logits of shape {tuple(logits.shape)}; expected (rows, words) with at least "
            f"{EOS + 1} words: every vocabulary starts with <pad>, <unk>, <s> and </s>"
        )
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    # PAD, UNK and BOS are adjacent, so one kernel masks them. A stride of two skips UNK.
    log_probs[:, PAD : BOS + 1 : 2 if allow_unk else 1] = -torch.inf
    return log_probs


def get_sync_interval(device: torch.device) -> int:
    """Return the number of steps after which the host looks for finished sentences."""
    return 1 if device.type == "cpu" else 8  # on a CPU this is free, and every row costs time


def move_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for it."""
    return x.to(device, non_blocking=device.type == "cuda")


def build_invalid_scores_error(step: int) -> InputError:
    """Return the error for scores that are NaN or that allow no token."""
    return InputError(
        f"at step {step + 1} of the search the scores of the model are NaN, or every allowed word has "
        "probability 0; its training has probably diverged, so use an earlier checkpoint"
    )


def _find_empty(source: Tokens) -> list[bool]:
    if min(source.lengths, default=2) > 1:
        return [False] * len(source.lengths)
    num_rows, width = source.ids.shape[:2]  # image features have a third dimension
    first_ids = source.ids[:, 0].tolist() if width else [EOS] * num_rows
    return [
        length == 0 or (length == 1 and first_id == EOS)
        for length, first_id in zip(source.lengths, first_ids, strict=True)
    ]


def _resolve_max_length(max_length: LengthLimit, source_length: int) -> int:
    limit = max_length(source_length) if callable(max_length) else max_length
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        context = f" (for a source of {source_length} ids)" if callable(max_length) else ""
        raise InputError(
            f"max_length: {limit!r} is invalid{context}; expected an integer of at least 1, or a function that "
            "returns one for the length of a source"
        )
    return limit
