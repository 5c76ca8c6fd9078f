"""Hierarchical attention network (Yang 2016): the words that make a sentence, the sentences that decide.

::

    words ─ GRU, both ways ─ attention ─ sentences ─ GRU, both ways ─ attention ─ document ─ class

Either level does the same: it reads its sequence, makes a key of each state, and asks all keys with one
learned query. The words of sentence i, say::

    u_it = tanh(W_w h_it + b_w)        the key of a word
    α_it = softmax_t(u_w · u_it)       how much it matters
    s_i  = Σ_t α_it h_it               the sentence

The sentences of all documents of a batch are read together, and neither level computes padding to speak of,
however unlike the lengths are: see :mod:`jumok.models.ragged`. Only padded batches that are alike (for a CUDA
graph) are read as they are, since the host does not know their lengths.

Shapes: ``B`` sentences and ``N`` documents of a batch, ``L`` words of the longest sentence, ``S`` sentences
of the longest document; widths: ``W`` of a state (of one direction), ``A`` of a key; ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.annotated import LabelledDocuments
from jumok.attention.core import mix, weights
from jumok.attention.masks import Mask
from jumok.attention.scores import Dot
from jumok.batch import Loss, Map, Tokens
from jumok.models.adversarial import with_moved_words
from jumok.models.bigrams import Bigrams
from jumok.models.labels import label_loss
from jumok.models.ragged import Ragged
from jumok.models.recurrent import read, recurrent, run_packed
from jumok.models.unknown import some_unknown

__all__ = ["Hierarchical", "HierarchicalConfig", "Level"]


@dataclass(frozen=True)
class HierarchicalConfig:
    """The sizes of a :class:`Hierarchical`; the paper's are width=50, attention=100, and no dropout."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["hierarchical"] = "hierarchical"
    embedding: int = 200
    bigrams: int = 0  # so many pairs of words have vectors too (see bigrams.py)
    width: int = 64  # of a GRU's state, each way, at both levels
    attention: int = 128  # of keys and queries
    dropout: float = 0.3  # of embeddings, of sentences, and before the classifier
    word_dropout: float = 0.0  # of whole words, which are unknown then
    adversarial: float = 0.0  # how far words are moved to make it hard (see adversarial.py)

    def __post_init__(self) -> None:
        for name in ("embedding", "width", "attention"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: 1 or more is expected")
        for name in ("dropout", "word_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share from 0 to below 1 is expected")
        for name in ("bigrams", "adversarial"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: 0 or more is expected")


@dataclass(frozen=True, eq=False)
class _Rows:
    """States of sequences in rows, with what attention needs to know of them."""

    states: Tensor  # (rows, length, 2 W)
    keys: Tensor  # (rows, length, A)
    mask: Mask | None


class Level(nn.Module):
    """From sequences to a vector each: a GRU reads them both ways, and attention picks what matters."""

    def __init__(self, inputs: int, width: int, attention: int) -> None:
        super().__init__()
        self.rnn = recurrent("gru", inputs, width, bidirectional=True)
        self.key = nn.Linear(2 * width, attention)
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        # Small, so that it looks everywhere at first.
        self.query = nn.Parameter(torch.empty(attention).normal_(std=attention**-0.5))
        self.score = Dot()

    def forward(self, look_up: Callable[[Tensor], Tensor], tokens: Tokens, *, weigh: bool = False) -> Tensor:
        """``(B, 2 W)``; ``look_up`` gives vectors ``(…, inputs)`` for the numbers ``(…)`` in the tokens.

        With ``weigh``, :meth:`weights` instead.
        """
        if weigh:
            return self._weighed(look_up, tokens)

        def mixed(rows: _Rows) -> Tensor:
            # Not `attend`: every batch has lengths of its own, and cuDNN's kernel is planned anew for each.
            # For a single query, two products do.
            looked = weights(self._queries(rows), rows.keys, score=self.score, mask=rows.mask)
            # States are finite, those of padding too, which are zeros or copies: no need to look for others.
            return mix(looked, rows.states.to(looked.dtype), finite=True).squeeze(1)

        return self._each(mixed, look_up, tokens, 2 * self.rnn.hidden_size)

    def weights(self, look_up: Callable[[Tensor], Tensor], tokens: Tokens) -> Tensor:
        """How much each token matters to its sequence, ``(B, L)``; zero at padding."""
        return self(look_up, tokens, weigh=True)  # type: ignore[no-any-return]  # as whoever watches it sees

    def _weighed(self, look_up: Callable[[Tensor], Tensor], tokens: Tokens) -> Tensor:
        length = max(tokens.lengths, default=0) if tokens.packed else tokens.ids.shape[1]

        def weighed(rows: _Rows) -> Tensor:
            found = weights(self._queries(rows), rows.keys, score=self.score, mask=rows.mask).squeeze(1)
            return F.pad(found, (0, length - found.shape[1]))

        return self._each(weighed, look_up, tokens, length)

    def _each(
        self, of: Callable[[_Rows], Tensor], look_up: Callable[[Tensor], Tensor], tokens: Tokens, width: int
    ) -> Tensor:
        """What is made of rows ``(rows, width)``, for all sequences in their order: ``(B, width)``."""
        if not tokens.packed and (tokens.mask is None or tokens.counts is not None):
            return self._each_row(of, look_up, tokens, width)
        ragged = Ragged.of(tokens)
        if not ragged.shelves:
            return self.query.new_zeros(len(tokens.lengths), width)
        words = look_up(tokens.ids.flatten().index_select(0, ragged.places))
        states = run_packed(self.rnn, words, ragged.packing)
        keys = self.key(states).tanh()
        shelved = zip(ragged.shelved(states), ragged.shelved(keys), ragged.shelves, strict=True)
        return ragged.each([of(_Rows(states, keys, shelf.mask)) for states, keys, shelf in shelved])

    def _each_row(
        self, of: Callable[[_Rows], Tensor], look_up: Callable[[Tensor], Tensor], tokens: Tokens, width: int
    ) -> Tensor:
        """The same of rows as they came: all are full, or the host does not know how full."""
        if not tokens.ids.numel():
            return self.query.new_zeros(len(tokens.lengths), width)
        words, mask = look_up(tokens.ids), None
        if tokens.counts is not None:
            words = words.masked_fill(~tokens.real[..., None], 0.0)  # whatever padding holds
            empty = tokens.counts < 1
            tokens = replace(tokens, counts=tokens.counts.clamp(min=1))
            mask = tokens.mask
        states, _ = read(self.rnn, words, tokens)
        found = of(_Rows(states, self.key(states).tanh(), mask))
        return found if mask is None else found.masked_fill(empty[:, None], 0.0)

    def _queries(self, rows: _Rows) -> Tensor:
        return self.query.to(rows.keys.dtype).expand(rows.keys.shape[0], 1, -1)


class Hierarchical(nn.Module):
    """One of C classes for each document; with a single class, a number.

    >>> model = Hierarchical(HierarchicalConfig(embedding=8, width=4, attention=8), vocabulary=11, classes=3)
    >>> batch = LabelledDocuments.of([[7, 8, 9], [5], [4, 6]], sentences=[[0, 1], [2]], labels=[2, 0])
    >>> model.logits(batch).shape
    torch.Size([2, 3])
    >>> {map.name: map.weights.shape for map in model.maps(batch)}
    {'words': torch.Size([3, 1, 1, 3]), 'sentences': torch.Size([2, 1, 1, 2])}
    """

    compiles = False  # every batch has lengths of its own, for each of which it would be compiled anew

    def __init__(self, config: HierarchicalConfig, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocabulary, config.embedding)
        nn.init.normal_(self.embedding.weight, std=config.embedding**-0.5)
        self.bigrams = Bigrams(config.bigrams, vocabulary, config.embedding) if config.bigrams else None
        self.words = Level(config.embedding, config.width, config.attention)
        self.sentences = Level(2 * config.width, config.width, config.attention)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * config.width, classes)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def logits(self, batch: LabelledDocuments) -> Tensor:
        """``(N, C)``, of the documents that have a label, if only one that does not count."""
        documents = self.sentences(_numbered(self._read(batch)), batch.sentences)
        return self.output(self.dropout(documents[: batch.labels.shape[0]]))  # type: ignore[no-any-return]

    def loss(self, batch: LabelledDocuments) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the documents.

        It is its own part, "nll" or "error"; and the only one, but in adversarial training.
        """
        size = self.config.adversarial
        if self.training and size:
            return with_moved_words(self.embedding, lambda: self._loss(batch), size, batch.labels)
        return self._loss(batch)

    def _loss(self, batch: LabelledDocuments) -> Loss:
        name, total = label_loss(self.logits(batch), batch.labels)
        return Loss(total, batch.count, {name: total.detach()})

    @torch.no_grad()
    def maps(self, batch: LabelledDocuments) -> list[Map]:
        """How much words matter in their sentences, ``(B, 1, 1, L)``, and sentences, ``(N, 1, 1, S)``."""
        words = self.words.weights(self._words, self._joined(batch.tokens))
        sentences = self.sentences.weights(_numbered(self._read(batch)), batch.sentences)
        found = {"words": words, "sentences": sentences[: len(batch.labels)]}
        return [Map(name, weights[:, None, None]) for name, weights in found.items()]

    def _read(self, batch: LabelledDocuments) -> Tensor:
        """The vectors of all sentences, ``(B, 2 W)``."""
        return self.dropout(self.words(self._words, self._joined(batch.tokens)))  # type: ignore[no-any-return]

    def _joined(self, tokens: Tokens) -> Tokens:
        """Words, or each word and the pair that it ends as one number."""
        return tokens if self.bigrams is None else self.bigrams.joined(tokens)

    def _words(self, numbers: Tensor) -> Tensor:
        share = self.config.word_dropout if self.training else 0.0
        if self.bigrams is None:
            return self.dropout(self.embedding(some_unknown(numbers, share)))  # type: ignore[no-any-return]
        ids, pairs = self.bigrams.parted(numbers)
        words = self.embedding(some_unknown(ids, share)) + self.bigrams(pairs, share)
        return self.dropout(words)  # type: ignore[no-any-return]


def _numbered(vectors: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives vectors ``(…, D)`` for numbers ``(…)`` of rows of ``vectors``."""
    return lambda numbers: vectors.index_select(0, numbers.flatten()).view(*numbers.shape, vectors.shape[-1])
