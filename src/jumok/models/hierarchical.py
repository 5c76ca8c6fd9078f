"""Hierarchical attention network (Yang 2016): attention to words, and to sentences of documents.

::

    words ─ bidirectional GRU ─ attention ─ sentences ─ bidirectional GRU ─ attention ─ document ─ class

Both levels do the same. A GRU encodes a sequence, and attention with one learned query pools its states. For
the words of sentence i::

    u_it = tanh(W_w h_it + b_w)        key of a word
    α_it = softmax_t(u_w · u_it)       its weight
    s_i  = Σ_t α_it h_it               the sentence

The sentences of all documents of a batch are encoded together. Almost no padding is computed at either level,
however different the lengths are (see :mod:`jumok.models.layers.ragged_layout`). On a GPU, one kernel pools
them, unless the weights are requested or observed. Only padded batches with static shapes (for CUDA graphs)
are encoded as they are, because the host does not know their lengths.

Shapes: ``B`` sentences and ``N`` documents of a batch, ``L`` words of the longest sentence, ``S`` sentences
of the longest document; widths: ``W`` of a state (of one direction), ``A`` of a key; ``C`` classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention import core
from jumok.attention.compiled_block import has_hooks
from jumok.attention.core import mix, weights
from jumok.attention.gpu_support import triton_unsupported_reason
from jumok.attention.masks import Mask
from jumok.attention.scores import Dot
from jumok.batches.text import DocumentBatch
from jumok.batches.tokens import LayerAttention, Loss, Tokens
from jumok.config import Config
from jumok.models.layers.adversarial_training import adversarial_loss
from jumok.models.layers.label_losses import label_loss
from jumok.models.layers.ragged_layout import RaggedLayout
from jumok.models.layers.recurrent import build_rnn, run_packed_rnn, run_rnn_on_tokens
from jumok.models.layers.word_embedding import BigramEmbedding, drop_words

EmbeddingFunction = Callable[[Tensor], Tensor]  # ids (…) to vectors (…, width)


@dataclass(frozen=True)
class HierarchicalConfig(Config):
    """Configuration of a :class:`HierarchicalAttentionNetwork`.

    The paper has width=50, attention_width=100 and no dropout.
    """

    type: Literal["hierarchical"] = "hierarchical"
    embedding_width: int = 200
    num_bigrams: int = 0  # number of frequent bigrams with embeddings (see layers/word_embedding.py)
    width: int = 64  # of a GRU's state in each direction, at both levels
    attention_width: int = 128  # of keys and queries
    dropout: float = 0.3  # of embeddings, of sentences, and before the classifier
    word_dropout: float = 0.0  # fraction of words that become unknown
    adversarial_epsilon: float = 0.0  # size of perturbations (see layers/adversarial_training.py)

    def __post_init__(self) -> None:
        self.check_ranges(
            positive=("embedding_width", "width", "attention_width"),
            fraction=("dropout", "word_dropout"),
            non_negative=("num_bigrams", "adversarial_epsilon"),
        )


class HierarchicalLevel(nn.Module):
    """One level: a bidirectional GRU, and attention that pools each sequence into a vector."""

    def __init__(self, input_width: int, width: int, attention_width: int) -> None:
        super().__init__()
        self.rnn = build_rnn("gru", input_width, width, bidirectional=True)
        self.key = nn.Linear(2 * width, attention_width)
        nn.init.xavier_uniform_(self.key.weight)
        nn.init.zeros_(self.key.bias)
        # Small, so that weights are almost uniform at first.
        self.query = nn.Parameter(torch.empty(attention_width).normal_(std=attention_width**-0.5))
        self.score = Dot()

    def forward(self, embed: EmbeddingFunction, tokens: Tokens, *, return_weights: bool = False) -> Tensor:
        """Return a vector ``(B, 2 W)`` for each sequence, or the attention weights ``(B, L)``.

        ``embed`` maps the ids of the tokens ``(…)`` to vectors ``(…, input_width)``.
        """
        weights_length = None
        if return_weights:
            weights_length = max(tokens.lengths, default=0) if tokens.packed else tokens.ids.shape[1]
        if not tokens.packed and (tokens.mask is None or tokens.device_lengths is not None):
            return self._pool_padded(embed, tokens, weights_length)
        layout = RaggedLayout.from_tokens(tokens)
        if not layout.packed_steps.num_sequences:
            return self._build_zeros(tokens, weights_length)
        inputs = embed(tokens.ids.flatten().index_select(0, layout.token_indices))
        states = run_packed_rnn(self.rnn, inputs, layout.packed_steps)
        if weights_length is None and self._is_fusible(states):
            from jumok.models.kernels.attention_pooling import pool_packed_words

            key = self.key
            return pool_packed_words(states, key.weight, key.bias, self.query, layout.ranks, layout.packed_steps)
        keys = self.key(states).tanh()
        buckets = zip(layout.to_buckets(states), layout.to_buckets(keys), layout.buckets, strict=True)
        return layout.from_buckets(
            [self._pool(states, keys, bucket.mask, weights_length) for states, keys, bucket in buckets]
        )

    def _is_fusible(self, states: Tensor) -> bool:
        """Return whether one kernel may pool ``states``: nothing observes the keys or the attention."""
        if triton_unsupported_reason(states) is not None or core.is_observed():
            return False
        from jumok.models.kernels.attention_pooling import MAX_WIDTH

        is_plain = type(self.key) is nn.Linear and not has_hooks(self.key) and not has_hooks(self.score)
        return is_plain and max(self.key.weight.shape) <= MAX_WIDTH

    def weights(self, embed: EmbeddingFunction, tokens: Tokens) -> Tensor:
        """Attention weights ``(B, L)``, zero at padding."""
        # Called as a module, so that hooks run.
        return self(embed, tokens, return_weights=True)  # type: ignore[no-any-return]

    def _pool(self, states: Tensor, keys: Tensor, mask: Mask | None, weights_length: int | None) -> Tensor:
        """Pool states ``(rows, length, 2 W)`` by attention with keys ``(rows, length, A)``: ``(rows, 2 W)``.

        With a ``weights_length``, return the weights ``(rows, weights_length)`` instead.
        """
        query = self.query.to(keys.dtype).expand(keys.shape[0], 1, -1)  # u_w
        # Not `attend`: cuDNN would plan its kernel anew for the lengths of every batch. For a single query
        # two products are enough.
        alpha = weights(query, keys, score=self.score, mask=mask)  # softmax(u_w · u), (rows, 1, length)
        if weights_length is not None:
            return F.pad(alpha.squeeze(1), (0, weights_length - alpha.shape[2]))
        # States are finite, even at padding, where they are zeros or copies.
        return mix(alpha, states.to(alpha.dtype), assume_finite=True).squeeze(1)  # Σ α h

    def _pool_padded(self, embed: EmbeddingFunction, tokens: Tokens, weights_length: int | None) -> Tensor:
        """Pool padded rows as they are: there is no padding, or only the device knows the lengths."""
        if not tokens.ids.numel():
            return self._build_zeros(tokens, weights_length)
        inputs, mask = embed(tokens.ids), None
        if tokens.device_lengths is not None:
            inputs = inputs.masked_fill(~tokens.valid_mask[..., None], 0.0)  # padding may hold any ids
            is_empty = tokens.device_lengths < 1
            tokens = replace(tokens, device_lengths=tokens.device_lengths.clamp(min=1))
            mask = tokens.mask
        states, _ = run_rnn_on_tokens(self.rnn, inputs, tokens)
        pooled = self._pool(states, self.key(states).tanh(), mask, weights_length)
        return pooled if mask is None else pooled.masked_fill(is_empty[:, None], 0.0)

    def _build_zeros(self, tokens: Tokens, weights_length: int | None) -> Tensor:
        width = 2 * self.rnn.hidden_size if weights_length is None else weights_length
        return self.query.new_zeros(len(tokens.lengths), width)


class HierarchicalAttentionNetwork(nn.Module):
    """Classifies documents, or with a single class, predicts a number for each.

    >>> config = HierarchicalConfig(embedding_width=8, width=4, attention_width=8)
    >>> model = HierarchicalAttentionNetwork(config, vocab_size=11, num_classes=3)
    >>> batch = DocumentBatch.from_sequences(
    ...     [[7, 8, 9], [5], [4, 6]], sentence_indices=[[0, 1], [2]], labels=[2, 0]
    ... )
    >>> model.logits(batch).shape
    torch.Size([2, 3])
    >>> {layer.name: layer.weights.shape for layer in model.compute_attention_maps(batch)}
    {'word_level': torch.Size([3, 1, 1, 3]), 'sentence_level': torch.Size([2, 1, 1, 2])}
    """

    supports_compile = False  # batches have different lengths, and each would be compiled anew

    def __init__(self, config: HierarchicalConfig, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocab_size, config.embedding_width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_width**-0.5)
        self.bigrams = (
            BigramEmbedding(config.num_bigrams, vocab_size, config.embedding_width) if config.num_bigrams else None
        )
        self.word_level = HierarchicalLevel(config.embedding_width, config.width, config.attention_width)
        self.sentence_level = HierarchicalLevel(2 * config.width, config.width, config.attention_width)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * config.width, num_classes)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def logits(self, batch: DocumentBatch) -> Tensor:
        """Logits ``(N, C)`` of the documents that have a label, including IGNORE."""
        sentences = self._encode_sentences(batch)
        documents = self.sentence_level(_build_row_lookup(sentences), batch.sentence_indices)
        return self.output(self.dropout(documents[: batch.labels.shape[0]]))  # type: ignore[no-any-return]

    def loss(self, batch: DocumentBatch) -> Loss:
        """Cross-entropy, or with one class the squared error, summed over the documents.

        The parts are "nll" or "error", and in adversarial training "adversarial".
        """
        epsilon = self.config.adversarial_epsilon
        if self.training and epsilon:
            return adversarial_loss(self.embedding, lambda: self._compute_loss(batch), epsilon, batch.labels)
        return self._compute_loss(batch)

    def _compute_loss(self, batch: DocumentBatch) -> Loss:
        name, total = label_loss(self.logits(batch), batch.labels)
        return Loss(total, batch.count, {name: total.detach()})

    @torch.no_grad()
    def compute_attention_maps(self, batch: DocumentBatch) -> list[LayerAttention]:
        """Weights of words in their sentences, ``(B, 1, 1, L)``, and of sentences, ``(N, 1, 1, S)``."""
        words = self.word_level.weights(self._embed_words, self._combine_bigrams(batch.tokens))
        sentences = self.sentence_level.weights(
            _build_row_lookup(self._encode_sentences(batch)), batch.sentence_indices
        )
        maps = {"word_level": words, "sentence_level": sentences[: len(batch.labels)]}
        return [LayerAttention(name, weights[:, None, None]) for name, weights in maps.items()]

    def _encode_sentences(self, batch: DocumentBatch) -> Tensor:
        """Vectors ``(B, 2 W)`` of all sentences."""
        return self.dropout(self.word_level(self._embed_words, self._combine_bigrams(batch.tokens)))  # type: ignore[no-any-return]

    def _combine_bigrams(self, tokens: Tokens) -> Tokens:
        """Combine token ids with bigram ids, if the model has bigrams."""
        return tokens if self.bigrams is None else self.bigrams.combine_ids(tokens)

    def _embed_words(self, word_ids: Tensor) -> Tensor:
        word_dropout = self.config.word_dropout if self.training else 0.0
        if self.bigrams is None:
            return self.dropout(self.embedding(drop_words(word_ids, word_dropout)))  # type: ignore[no-any-return]
        ids, bigram_ids = self.bigrams.split_ids(word_ids)
        embeddings = self.embedding(drop_words(ids, word_dropout)) + self.bigrams(bigram_ids, word_dropout)
        return self.dropout(embeddings)  # type: ignore[no-any-return]


def _build_row_lookup(vectors: Tensor) -> EmbeddingFunction:
    """A function that maps indices ``(…)`` to rows of ``vectors``, ``(…, D)``."""
    return lambda index: vectors.index_select(0, index.flatten()).view(*index.shape, vectors.shape[-1])
