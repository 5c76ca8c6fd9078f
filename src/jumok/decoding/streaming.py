"""Streaming: report the tokens of a search while it runs, and cancel sentences.

A search knows nothing about listeners. A :class:`StreamingDecoder` stands between the search and the model
and
observes the tokens::

    search  ── ids ──►  StreamingDecoder  ── ids ──►  model
            ◄─ logits ──                  ◄─ logits ──

A cancelled sentence gets EOS as its only possible next token, which ends its search. The scores of the other
sentences do not change.
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


class StreamListener(Protocol):
    """Receives the tokens of a search. The caller of the search numbers the sentences."""

    def is_cancelled(self, sentence: int) -> bool:
        """Whether this sentence is cancelled. Called at every step."""
        ...

    def is_streaming(self, sentence: int) -> bool:
        """Whether to report the tokens of this sentence. The host then waits for the GPU at every step."""
        ...

    def on_tokens(self, sentence: int, ids: Sequence[int]) -> None:
        """Receive all tokens of this sentence so far; in a beam, those of the best live hypothesis."""
        ...


@dataclass(frozen=True, eq=False)
class _StreamingState(Generic[S]):
    """The state of the model, and the sentences of its rows: adjacent, the same number for each."""

    inner: S
    sentences: tuple[int, ...]
    num_rows: int  # in total
    token_ids: Tensor | None  # (rows, steps), with BOS; None: no sentence is streamed

    def reorder(self, index: Tensor, sources: Sequence[int] | None = None) -> Self:
        """Reorder the rows. See :class:`jumok.decoding.protocol.DecoderState`."""
        if sources is None:  # only the values of the index show the sentences
            rows_per_sentence = self.num_rows // len(self.sentences)
            sentences = tuple(self.sentences[row // rows_per_sentence] for row in index.tolist())
        else:
            sentences = tuple(self.sentences[source] for source in sources)
        token_ids = None if self.token_ids is None else self.token_ids[index]
        inner = self.inner.reorder(index, sources)
        return replace(self, inner=inner, sentences=sentences, num_rows=len(index), token_ids=token_ids)


class StreamingDecoder(Generic[S]):
    """A model that reports to a listener.

    ``sentences`` are the numbers of the sentences of one search, without the empty ones.
    """

    def __init__(self, model: IncrementalDecoder[S], listener: StreamListener, sentences: Sequence[int]) -> None:
        self.model, self.listener, self.sentences = model, listener, tuple(sentences)

    def start(self, source: Tokens) -> _StreamingState[S]:
        """Return the state before the first token."""
        assert len(source.lengths) == len(self.sentences)
        num_rows, token_ids = len(source.lengths), None
        if any(map(self.listener.is_streaming, self.sentences)):
            token_ids = torch.zeros((num_rows, 0), dtype=torch.long, device=source.ids.device)
        return _StreamingState(self.model.start(source), self.sentences, num_rows, token_ids)

    def step(self, state: _StreamingState[S], ids: Tensor) -> tuple[Tensor, _StreamingState[S]]:
        """Report the tokens so far, and return the logits of the next tokens."""
        token_ids, rows_per_sentence = state.token_ids, len(ids) // len(state.sentences)
        if token_ids is not None:
            token_ids = torch.cat([token_ids, ids[:, None]], 1)
            for source, sentence in enumerate(state.sentences):
                if self.listener.is_streaming(sentence):
                    best = token_ids[source * rows_per_sentence, 1:].tolist()  # its first row is the best
                    if best and EOS not in best:
                        self.listener.on_tokens(sentence, best)
        logits, inner = self.model.step(state.inner, ids)
        cancelled = [source for source, sentence in enumerate(state.sentences) if self.listener.is_cancelled(sentence)]
        if cancelled:
            logits = _force_eos(logits, cancelled, rows_per_sentence)
        return logits, replace(state, inner=inner, token_ids=token_ids)


def _force_eos(logits: Tensor, sentences: list[int], rows_per_sentence: int) -> Tensor:
    """Return the logits, with EOS as the only possible token in the rows of these sentences."""
    rows = [n * rows_per_sentence + row for n in sentences for row in range(rows_per_sentence)]
    index = constraints.move_to_device(torch.tensor(rows), logits.device)
    eos_logits = torch.full_like(logits[:1], -torch.inf)
    eos_logits[:, EOS] = 0
    return logits.index_copy(0, index, eos_logits.expand(len(rows), -1))
