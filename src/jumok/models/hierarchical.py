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

from jumok.attention.core import mix, weights
from jumok.attention.masks import Mask
from jumok.attention.scores import Dot
from jumok.batches.text import DocumentBatch
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.bigram_embedding import BigramEmbedding
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.ragged_layout import RaggedLayout
from jumok.models.layers.recurrent import build_rnn, run_packed_rnn, run_rnn_on_tokens
from jumok.models.layers.word_dropout import drop_words

__all__ = ["HierarchicalAttentionNetwork", "HierarchicalConfig", "HierarchicalLevel"]


@dataclass(frozen=True)
class HierarchicalConfig:
    """The sizes of a :class:`HierarchicalAttentionNetwork`; the paper's are width=50, attention=100, and no dropout."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    type: Literal["hierarchical"] = "hierarchical"
    embedding_width: int = 200
    num_bigrams: int = 0  # so many pairs of words have vectors too (see bigrams.py)
    width: int = 64  # of a GRU's state, each way, at both levels
    attention_width: int = 128  # of keys and queries
    dropout: float = 0.3  # of embeddings, of sentences, and before the classifier
    word_dropout: float = 0.0  # of whole words, which are unknown then
    adversarial_epsilon: float = 0.0  # how far words are moved to make it hard (see adversarial.py)

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
class _HierarchicalRows:
    """States of sequences in rows, with what attention needs to know of them."""

    states: Tensor  # (rows, length, 2 W)
    keys: Tensor  # (rows, length, A)
    mask: Mask | None


class HierarchicalLevel(nn.Module):
    """From sequences to a vector each: a GRU reads them both ways, and attention picks what matters."""

    def __init__(self, input_width: int, width: int, attention_width: int) -> None:
        super().__init__()
        self.rnn = build_rnn("gru", input_width, width, bidirectional=True)
        self.key = nn.Linear(2 * width, attention_width)
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        # Small, so that it looks everywhere at first.
        self.query = nn.Parameter(torch.empty(attention_width).normal_(std=attention_width**-0.5))
        self.score = Dot()

    def forward(
        self, embed: Callable[[Tensor], Tensor], tokens: Tokens, *, return_weights: bool = False
    ) -> Tensor:
        """``(B, 2 W)``; ``embed`` gives vectors ``(…, input_width)`` for the numbers ``(…)`` in the tokens.

        With ``return_weights``, :meth:`weights` instead.
        """
        if return_weights:
            return self._compute_weights(embed, tokens)

        def mixed(rows: _HierarchicalRows) -> Tensor:
            # Not `attend`: every batch has lengths of its own, and cuDNN's kernel is planned anew for each.
            # For a single query, two products do.
            looked = weights(self._expand_query(rows), rows.keys, score=self.score, mask=rows.mask)
            # States are finite, those of padding too, which are zeros or copies: no need to look for others.
            return mix(looked, rows.states.to(looked.dtype), assume_finite=True).squeeze(1)

        return self._map_sequences(mixed, embed, tokens, 2 * self.rnn.hidden_size)

    def weights(self, embed: Callable[[Tensor], Tensor], tokens: Tokens) -> Tensor:
        """How much each token matters to its sequence, ``(B, L)``; zero at padding."""
        return self(embed, tokens, weigh=True)  # type: ignore[no-any-return]  # as whoever watches it sees

    def _compute_weights(self, embed: Callable[[Tensor], Tensor], tokens: Tokens) -> Tensor:
        length = max(tokens.lengths, default=0) if tokens.packed else tokens.ids.shape[1]

        def weighed(rows: _HierarchicalRows) -> Tensor:
            found = weights(self._expand_query(rows), rows.keys, score=self.score, mask=rows.mask).squeeze(1)
            return F.pad(found, (0, length - found.shape[1]))

        return self._map_sequences(weighed, embed, tokens, length)

    def _map_sequences(
        self,
        function: Callable[[_HierarchicalRows], Tensor],
        embed: Callable[[Tensor], Tensor],
        tokens: Tokens,
        width: int,
    ) -> Tensor:
        """What is made of rows ``(rows, width)``, for all sequences in their order: ``(B, width)``."""
        if not tokens.packed and (tokens.mask is None or tokens.device_lengths is not None):
            return self._map_padded_rows(function, embed, tokens, width)
        ragged = RaggedLayout.from_tokens(tokens)
        if not ragged.buckets:
            return self.query.new_zeros(len(tokens.lengths), width)
        words = embed(tokens.ids.flatten().index_select(0, ragged.token_indices))
        states = run_packed_rnn(self.rnn, words, ragged.packed_steps)
        keys = self.key(states).tanh()
        shelved = zip(ragged.to_buckets(states), ragged.to_buckets(keys), ragged.buckets, strict=True)
        return ragged.from_buckets(
            [function(_HierarchicalRows(states, keys, shelf.mask)) for states, keys, shelf in shelved]
        )

    def _map_padded_rows(
        self,
        function: Callable[[_HierarchicalRows], Tensor],
        embed: Callable[[Tensor], Tensor],
        tokens: Tokens,
        width: int,
    ) -> Tensor:
        """The same of rows as they came: all are full, or the host does not know how full."""
        if not tokens.ids.numel():
            return self.query.new_zeros(len(tokens.lengths), width)
        words, mask = embed(tokens.ids), None
        if tokens.device_lengths is not None:
            words = words.masked_fill(~tokens.valid_mask[..., None], 0.0)  # whatever padding holds
            empty = tokens.device_lengths < 1
            tokens = replace(tokens, device_lengths=tokens.device_lengths.clamp(min=1))
            mask = tokens.mask
        states, _ = run_rnn_on_tokens(self.rnn, words, tokens)
        found = function(_HierarchicalRows(states, self.key(states).tanh(), mask))
        return found if mask is None else found.masked_fill(empty[:, None], 0.0)

    def _expand_query(self, rows: _HierarchicalRows) -> Tensor:
        return self.query.to(rows.keys.dtype).expand(rows.keys.shape[0], 1, -1)


class HierarchicalAttentionNetwork(nn.Module):
    """One of C classes for each document; with a single class, a number.

    >>> model = Hierarchical(HierarchicalConfig(embedding=8, width=4, attention=8), vocabulary=11, classes=3)
    >>> batch = LabelledDocuments.of([[7, 8, 9], [5], [4, 6]], sentences=[[0, 1], [2]], labels=[2, 0])
    >>> model.logits(batch).shape
    torch.Size([2, 3])
    >>> {map.name: map.weights.shape for map in model.maps(batch)}
    {'words': torch.Size([3, 1, 1, 3]), 'sentences': torch.Size([2, 1, 1, 2])}
    """

    supports_compile = (
        False  # every batch has lengths of its own, for each of which it would be compiled anew
    )

    def __init__(self, config: HierarchicalConfig, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.embedding_width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_width**-0.5)
        self.bigrams = (
            BigramEmbedding(config.num_bigrams, vocab_size, config.embedding_width)
            if config.num_bigrams
            else None
        )
        self.word_level = HierarchicalLevel(config.embedding_width, config.width, config.attention_width)
        self.sentence_level = HierarchicalLevel(2 * config.width, config.width, config.attention_width)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * config.width, num_classes)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def logits(self, batch: DocumentBatch) -> Tensor:
        """``(N, C)``, of the documents that have a label, if only one that does not count."""
        documents = self.sentence_level(
            _build_row_lookup(self._encode_sentences(batch)), batch.sentence_indices
        )
        return self.output(self.dropout(documents[: batch.labels.shape[0]]))  # type: ignore[no-any-return]

    def loss(self, batch: DocumentBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the documents.

        It is its own part, "nll" or "error"; and the only one, but in adversarial training.
        """
        size = self.config.adversarial_epsilon
        if self.training and size:
            return adversarial_loss(self.embedding, lambda: self._compute_loss(batch), size, batch.labels)
        return self._compute_loss(batch)

    def _compute_loss(self, batch: DocumentBatch) -> Loss:
        name, total = label_loss(self.logits(batch), batch.labels)
        return Loss(total, batch.count, {name: total.detach()})

    @torch.no_grad()
    def compute_attention_maps(self, batch: DocumentBatch) -> list[LayerAttention]:
        """How much words matter in their sentences, ``(B, 1, 1, L)``, and sentences, ``(N, 1, 1, S)``."""
        words = self.word_level.weights(self._embed_words, self._combine_bigrams(batch.tokens))
        sentences = self.sentence_level.weights(
            _build_row_lookup(self._encode_sentences(batch)), batch.sentence_indices
        )
        found = {"words": words, "sentences": sentences[: len(batch.labels)]}
        return [LayerAttention(name, weights[:, None, None]) for name, weights in found.items()]

    def _encode_sentences(self, batch: DocumentBatch) -> Tensor:
        """The vectors of all sentences, ``(B, 2 W)``."""
        return self.dropout(self.word_level(self._embed_words, self._combine_bigrams(batch.tokens)))  # type: ignore[no-any-return]

    def _combine_bigrams(self, tokens: Tokens) -> Tokens:
        """Words, or each word and the pair that it ends as one number."""
        return tokens if self.bigrams is None else self.bigrams.combine_ids(tokens)

    def _embed_words(self, word_ids: Tensor) -> Tensor:
        share = self.config.word_dropout if self.training else 0.0
        if self.bigrams is None:
            return self.dropout(self.embedding(drop_words(word_ids, share)))  # type: ignore[no-any-return]
        ids, pairs = self.bigrams.split_ids(word_ids)
        words = self.embedding(drop_words(ids, share)) + self.bigrams(pairs, share)
        return self.dropout(words)  # type: ignore[no-any-return]


def _build_row_lookup(vectors: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives vectors ``(…, D)`` for numbers ``(…)`` of rows of ``vectors``."""
    return lambda numbers: vectors.index_select(0, numbers.flatten()).view(*numbers.shape, vectors.shape[-1])
