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

from jumok.batches.tokens import EOS, Tokens
from jumok.decoding import constraints
from jumok.decoding.protocol import IncrementalDecoder, S

__all__ = ["StreamListener", "StreamingDecoder"]


class StreamListener(Protocol):
    """Who follows a search. Sentences have the numbers that whoever began it has given them."""

    def is_cancelled(self, sentence: int) -> bool:
        """Whether nobody waits for this one any more. Asked at every step."""
        ...

    def is_streaming(self, sentence: int) -> bool:
        """Whether somebody wants to hear this one while it is said. (A GPU is waited for then.)"""
        ...

    def on_tokens(self, sentence: int, ids: Sequence[int]) -> None:
        """All words of this one so far; of a beam, those of the best path that still goes on."""
        ...


@dataclass(frozen=True, eq=False)
class _StreamingState(Generic[S]):
    """The model's own state, and whose rows they are: equally many of each sentence, side by side."""

    inner: S
    sentences: tuple[int, ...]
    num_rows: int  # in all
    token_ids: Tensor | None  # (rows, steps), BOS included; None: nobody listens

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Self:
        if sources is None:  # only the numbers in the index tell
            each = self.num_rows // len(self.sentences)
            sentences = tuple(self.sentences[row // each] for row in index.tolist())
        else:
            sentences = tuple(self.sentences[n] for n in sources)
        said = None if self.token_ids is None else self.token_ids[index]
        inner = self.inner.reorder(index, sources)
        return replace(self, inner=inner, sentences=sentences, num_rows=len(index), token_ids=said)


class StreamingDecoder(Generic[S]):
    """A model for one search, whose sentences have these numbers. Empty ones are asked about by no search."""

    def __init__(
        self, model: IncrementalDecoder[S], listener: StreamListener, sentences: Sequence[int]
    ) -> None:
        self.model, self.listener, self.sentences = model, listener, tuple(sentences)

    def start(self, source: Tokens) -> _StreamingState[S]:
        assert len(source.lengths) == len(self.sentences)
        rows, said = len(source.lengths), None
        if any(map(self.listener.is_streaming, self.sentences)):
            said = torch.zeros((rows, 0), dtype=torch.long, device=source.ids.device)
        return _StreamingState(self.model.start(source), self.sentences, rows, said)

    def step(self, state: _StreamingState[S], ids: Tensor) -> tuple[Tensor, _StreamingState[S]]:
        said, each = state.token_ids, len(ids) // len(state.sentences)
        if said is not None:
            said = torch.cat([said, ids[:, None]], 1)
            for n, sentence in enumerate(state.sentences):
                words = said[n * each, 1:].tolist() if self.listener.is_streaming(sentence) else []
                if words and EOS not in words:  # of its rows, the first is the best
                    self.listener.on_tokens(sentence, words)
        logits, inner = self.model.step(state.inner, ids)
        left = [n for n, sentence in enumerate(state.sentences) if self.listener.is_cancelled(sentence)]
        if left:
            logits = _force_eos(logits, left, each)
        return logits, replace(state, inner=inner, token_ids=said)


def _force_eos(logits: Tensor, sentences: list[int], rows_per_sentence: int) -> Tensor:
    """The same scores, but for the rows of some sentences: there only EOS is possible."""
    rows = constraints.move_to_device(
        torch.tensor([n * rows_per_sentence + at for n in sentences for at in range(rows_per_sentence)]),
        logits.device,
    )
    ends = torch.full_like(logits[:1], -torch.inf)
    ends[:, EOS] = 0
    return logits.index_copy(0, rows, ends.expand(len(rows), -1))
