"""What a search asks of a model, and what it gives back.

A search never looks inside a model. It hands over the source once, then, step after step, the words said
last, and gets the scores of the words to say next::

    state = model.start(source)                     # rows B
    logits, state = model.step(state, ids)          # ids (N,), logits (N, V)
    state = state.reorder(index, sources)           # rows may repeat, vanish, change places

**Sources.** Rows that continue the same sentence stand side by side, equally many of each. What belongs to
the sentence need not be kept, or moved, for each of them. But which sentence a row belongs to, only the
numbers in ``index`` tell, and these are on the GPU. So a search, which knows it, says it: ``sources`` are the
sentences that go on, and the rows of ``index`` come in as many equal runs, each of rows of one source::

    start                       a b c                   sources a b c
    reorder([0, 0, 1, 1, 2, 2], sources=[0, 1, 2])
                                a a b b c c             sources a b c
    reorder([1, 0, 5, 5], sources=[0, 2])
                                a a c c                 sources a c: from now on, c has the number 1

Without it any index will do, and each row counts as a source of its own from then on.

Shapes: ``B`` sentences, ``N`` rows of the state (one a path that is followed), ``V`` words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from torch import Tensor

from jumok.batches.tokens import Tokens

__all__ = ["DecoderState", "Hypothesis", "IncrementalDecoder"]


class DecoderState(Protocol):
    """All that a model remembers between steps, a row for each path. It never changes once made."""

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Self:
        """The rows ``index`` ``(M,)``, in that order; a row may come twice, or not at all.

        ``sources`` promises what is told above; a state may rely on it, or do without.
        """
        ...


S = TypeVar("S", bound=DecoderState)


class IncrementalDecoder(Protocol[S]):
    """Anything that says one word after another. Put it into eval mode first: a search leaves it as it is."""

    def start(self, source: Tokens) -> S:
        """The state before the first word, a row for each sentence of the padded source."""
        ...

    def step(self, state: S, ids: Tensor) -> tuple[Tensor, S]:
        """Unnormalised scores ``(N, V)`` of the words after ``ids`` ``(N,)``, and the state behind these."""
        ...


@dataclass(frozen=True)
class Hypothesis:
    """What a search found for one sentence.

    ``ids`` has neither BOS nor EOS. ``logprob`` is the model's own log-probability of all that was said, the
    EOS of a finished one included. ``score`` is what the search ranked by. ``finished`` is False where the
    length limit cut the sentence off: the text may end in the middle, and whoever shows it should say so.
    """

    ids: tuple[int, ...]
    score: float
    logprob: float
    finished: bool
