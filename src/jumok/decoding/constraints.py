"""The rules that every search keeps to.

- **What is said.** PAD and BOS never are; UNK only if ``allow_unk=True``. Barring a word takes it from the
  choice and leaves the other probabilities as they are: a ``logprob`` is always the model's own.
- **Ties.** Of words that are equally probable, the one with the lowest id; of paths, the better ranked one's.
- **Finished** is a hypothesis that has said EOS.
- **The length limit.** A sentence has at most ``max_length`` words (ids without EOS), which is a number, or a
  function of how many ids the source has. After the last of them it may still say EOS; if it does not, it is
  given back as it is, with ``finished=False``.
- **An empty source** (nothing, or just EOS) has the empty translation, with probability 1; no model is asked.
- **Scores that are no numbers** are an error, as is a step in which every word has probability 0.

A GPU is waited for only every few steps, when the host looks at what is finished and drops it from the batch.
What was said in between, after the end of a sentence, is thrown away: the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, PAD, Tokens
from jumok.decoding.protocol import Hypothesis
from jumok.errors import InputError

__all__ = [
    "EMPTY_HYPOTHESIS",
    "LengthLimit",
    "SearchInputs",
    "build_invalid_scores_error",
    "compute_log_probs",
    "default_max_length",
    "get_sync_interval",
    "move_to_device",
    "select_nonempty",
]

LengthLimit = int | Callable[[int], int]

EMPTY_HYPOTHESIS = Hypothesis(ids=(), score=0.0, logprob=0.0, finished=True)


def default_max_length(source_length: int) -> int:
    """The usual length limit: a translation of 2·n + 20 words is hardly one."""
    return 2 * source_length + 20


@dataclass(frozen=True, eq=False)
class SearchInputs:
    """The sentences that a model has to be asked about: all but the empty ones."""

    source: Tokens
    rows: list[int]  # which sentences of the caller's these are
    max_lengths: list[int]  # the most words that each may have


def select_nonempty(source: Tokens, max_length: LengthLimit) -> SearchInputs:
    """The sentences of ``source`` that are not empty, each with its length limit."""
    if source.packed:
        raise InputError(
            "packed sentences came; a search steps through padded ones: make them with Tokens.padded(…)"
        )
    empty = _find_empty(source)
    rows = [row for row, nothing in enumerate(empty) if not nothing]
    limits = [_resolve_max_length(max_length, source.lengths[row]) for row in rows]
    if len(rows) < len(empty):
        ids = source.ids[move_to_device(torch.tensor(rows, dtype=torch.long), source.ids.device)]
        source = Tokens(ids, tuple(source.lengths[row] for row in rows))
    return SearchInputs(source, rows, limits)


def compute_log_probs(logits: Tensor, *, allow_unk: bool) -> Tensor:
    """The model's log-probabilities ``(N, V)`` in float32, −inf for the words that must not be said."""
    if logits.dim() != 2 or logits.shape[1] <= EOS:
        raise InputError(
            f"step() gave logits of shape {tuple(logits.shape)}; expected (rows, words), with at least "
            f"{EOS + 1} words: <pad>, <unk>, <s> and </s> begin every vocabulary"
        )
    logp = logits.log_softmax(-1, dtype=torch.float32)
    # PAD, UNK and BOS are neighbours, so that one launch bars them; in steps of two it leaves UNK out.
    logp[:, PAD : BOS + 1 : 2 if allow_unk else 1] = -torch.inf
    return logp


def get_sync_interval(device: torch.device) -> int:
    """After how many steps the host looks at what is finished."""
    return 1 if device.type == "cpu" else 8  # on a CPU nobody waits, and every row costs


def move_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, without waiting for it."""
    return x.to(device, non_blocking=device.type == "cuda")


def build_invalid_scores_error(step: int) -> InputError:
    """The error for scores that no word can be chosen by."""
    return InputError(
        f"at step {step + 1} of the search the model gave scores that no word can be chosen by: NaN, or "
        "probability 0 for every word that may be said. Probably its training has diverged; go back to an "
        "earlier checkpoint"
    )


def _find_empty(source: Tokens) -> list[bool]:
    if min(source.lengths, default=2) > 1:
        return [False] * len(source.lengths)
    width = source.ids.shape[1]
    first = source.ids[:, 0].tolist() if width else [EOS] * len(source.lengths)
    return [n == 0 or (n == 1 and word == EOS) for n, word in zip(source.lengths, first, strict=True)]


def _resolve_max_length(max_length: LengthLimit, source_length: int) -> int:
    limit = max_length(source_length) if callable(max_length) else max_length
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        where = f" (for a source of {source_length} ids)" if callable(max_length) else ""
        raise InputError(
            f"longest: {limit!r} came{where}; expected a whole number of words from 1 on, or a function that "
            "gives one for the length of a source"
        )
    return limit
