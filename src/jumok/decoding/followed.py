"""A search that is followed: what it says is heard while it says it, and a sentence can be given up.

A search knows no audience. So this stands between it and its model, and watches the words go by::

    search  ── ids ──►  Followed  ── ids ──►  model
            ◄─ logits ──          ◄─ logits ──

A sentence that nobody waits for any more is told that its next word is EOS, and with that the search is done
with it. The sentences beside it notice nothing: their scores are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self

import torch
from torch import Tensor

from jumok.batch import EOS, Tokens
from jumok.decoding import rules
from jumok.decoding.protocol import Model, S

__all__ = ["Followed", "Listener"]


class Listener(Protocol):
    """Who follows a search. Sentences have the numbers that whoever began it has given them."""

    def gone(self, sentence: int) -> bool:
        """Whether nobody waits for this one any more. Asked at every step."""
        ...

    def hears(self, sentence: int) -> bool:
        """Whether somebody wants to hear this one while it is said. (A GPU is waited for then.)"""
        ...

    def heard(self, sentence: int, ids: Sequence[int]) -> None:
        """All words of this one so far; of a beam, those of the best path that still goes on."""
        ...


@dataclass(frozen=True, eq=False)
class _State(Generic[S]):
    """The model's own state, and whose rows they are: equally many of each sentence, side by side."""

    inner: S
    sentences: tuple[int, ...]
    rows: int  # in all
    said: Tensor | None  # (rows, steps), BOS included; None: nobody listens

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Self:
        if sources is None:  # only the numbers in the index tell
            each = self.rows // len(self.sentences)
            sentences = tuple(self.sentences[row // each] for row in index.tolist())
        else:
            sentences = tuple(self.sentences[n] for n in sources)
        said = None if self.said is None else self.said[index]
        inner = self.inner.reorder(index, sources)
        return replace(self, inner=inner, sentences=sentences, rows=len(index), said=said)


class Followed(Generic[S]):
    """A model for one search, whose sentences have these numbers. Empty ones are asked about by no search."""

    def __init__(self, model: Model[S], listener: Listener, sentences: Sequence[int]) -> None:
        self.model, self.listener, self.sentences = model, listener, tuple(sentences)

    def start(self, source: Tokens) -> _State[S]:
        assert len(source.lengths) == len(self.sentences)
        rows, said = len(source.lengths), None
        if any(map(self.listener.hears, self.sentences)):
            said = torch.zeros((rows, 0), dtype=torch.long, device=source.ids.device)
        return _State(self.model.start(source), self.sentences, rows, said)

    def step(self, state: _State[S], ids: Tensor) -> tuple[Tensor, _State[S]]:
        said, each = state.said, len(ids) // len(state.sentences)
        if said is not None:
            said = torch.cat([said, ids[:, None]], 1)
            for n, sentence in enumerate(state.sentences):
                words = said[n * each, 1:].tolist() if self.listener.hears(sentence) else []
                if words and EOS not in words:  # of its rows, the first is the best
                    self.listener.heard(sentence, words)
        logits, inner = self.model.step(state.inner, ids)
        left = [n for n, sentence in enumerate(state.sentences) if self.listener.gone(sentence)]
        if left:
            logits = _ended(logits, left, each)
        return logits, replace(state, inner=inner, said=said)


def _ended(logits: Tensor, left: list[int], each: int) -> Tensor:
    """The same scores, but for the rows of some sentences: there only EOS is possible."""
    rows = rules.moved(torch.tensor([n * each + at for n in left for at in range(each)]), logits.device)
    ends = torch.full_like(logits[:1], -torch.inf)
    ends[:, EOS] = 0
    return logits.index_copy(0, rows, ends.expand(len(rows), -1))
