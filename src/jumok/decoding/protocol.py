"""Interface between a search and a model.

A search knows nothing about the model. It passes the source once and then, at every step, the last tokens. It
receives the scores of the next tokens::

    state = model.start(source)                     # B rows
    logits, state = model.step(state, ids)          # ids (N,), logits (N, V)
    state = state.reorder(index, sources)           # rows are repeated, dropped and permuted

**Sources.** Rows that continue the same sentence are adjacent, and every sentence has the same number of
rows. So a state can store what belongs to a sentence once. Only the values of ``index`` show which sentence a
row belongs to, and they are on the GPU. The search knows it on the host, so it passes ``sources``, the
sentences that
continue. The rows of ``index`` are then as many equal runs, each with the rows of one source::

    start                       a b c                   sources a b c
    reorder([0, 0, 1, 1, 2, 2], sources=[0, 1, 2])
                                a a b b c c             sources a b c
    reorder([1, 0, 5, 5], sources=[0, 2])
                                a a c c                 sources a c: now c has the number 1

Without ``sources`` any index is valid, and each row becomes a source of its own.

Shapes: ``B`` sentences, ``N`` rows of the state (one per path), ``V`` words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

from jumok.batches.tokens import Tokens


class DecoderState(Protocol):
    """State of a decoder between steps, with one row per path. It is immutable."""

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Self:
        """Return the rows ``index`` ``(M,)``, in that order. Rows may be repeated or left out.

        ``sources`` is described above. A state may use or ignore it.
        """
        ...


S = TypeVar("S", bound=DecoderState)


class IncrementalDecoder(Protocol[S]):
    """A model that generates one token after another. Call ``eval()`` before a search, which does not."""

    def start(self, source: Tokens) -> S:
        """Return the state before the first token, with one row per sentence of the padded source."""
        ...

    def step(self, state: S, ids: Tensor) -> tuple[Tensor, S]:
        """Return the logits ``(N, V)`` of the tokens after ``ids`` ``(N,)``, and the next state."""
        ...


@dataclass(frozen=True)
class Hypothesis:
    """Result of a search for one sentence.

    ``ids`` contains neither BOS nor EOS. ``logprob`` is the log-probability of the tokens under the model,
    including the EOS of a finished hypothesis. ``score`` is the value by which the search ranks. ``finished``
    is False if the length limit cut the sentence off.
    """

    ids: tuple[int, ...]
    score: float
    logprob: float
    finished: bool
