"""A straightforward hierarchical attention network, padded to the longest sentence and document.

A batch is one block of word ids ``(N, S, L)``: N documents, each padded to the S sentences of the longest one,
each sentence padded to the L words of the longest one of the batch. Parameters have the names of
:mod:`jumok.models.hierarchical`, so that both networks can load each other's weights.

The GRUs read the padded block, or packed sequences (``pack_padded_sequence``). In the padded block, the backward
direction reads padding first. While biases are zero, as they are initially, its state stays zero there, and the
outputs of both are equal. With trained biases, only packed sequences give correct outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from jumok.batches.tokens import PAD
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig

Document = Sequence[Sequence[int]]  # sentences of word ids


@dataclass(frozen=True, eq=False)
class Block:
    """The documents of a batch."""

    ids: Tensor  # (N, S, L)
    words: Tensor  # (N, S): length of each sentence, 0 for padding
    sentences: Tensor  # (N,): number in each document
    labels: Tensor  # (N,)
    on_host: tuple[Tensor, Tensor]  # words and sentences again: packing needs them on the host

    @classmethod
    def from_documents(cls, documents: Sequence[Document], labels: Sequence[int]) -> Block:
        max_sentences = max(map(len, documents))
        longest = max(len(sentence) for document in documents for sentence in document)
        ids = np.full((len(documents), max_sentences, longest), PAD)
        words = np.zeros((len(documents), max_sentences), np.int64)
        for block, counts, document in zip(ids, words, documents, strict=True):
            counts[: len(document)] = [len(sentence) for sentence in document]
            block[np.arange(longest) < counts[:, None]] = np.concatenate(document)
        lengths = torch.from_numpy(words), torch.tensor([len(document) for document in documents])
        return cls(torch.from_numpy(ids), *lengths, torch.tensor(labels), lengths)

    def to(self, device: torch.device) -> Block:
        named = {name: getattr(self, name) for name in ("ids", "words", "sentences", "labels")}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in named.items()})


class PaddedLevel(nn.Module):
    """A GRU and attention that turn each row into a vector."""

    def __init__(self, inputs: int, width: int, attention: int, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.rnn = nn.GRU(inputs, width, batch_first=True, bidirectional=True)
        self.key = nn.Linear(2 * width, attention)
        self.query = nn.Parameter(torch.zeros(attention))

    def forward(self, x: Tensor, lengths: Tensor, on_host: Tensor) -> Tensor:
        """Return vectors ``(R, 2 W)`` of ``x`` ``(R, L, inputs)``; those of empty rows are undefined."""
        if self.packed:
            at_least_one = on_host.clamp(min=1)
            packed = pack_padded_sequence(x, at_least_one, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        else:
            states, _ = self.rnn(x)
        scores = self.key(states).tanh() @ self.query  # (R, L)
        real = torch.arange(x.shape[1], device=x.device) < lengths.clamp(min=1)[:, None]
        weights = scores.masked_fill(~real, float("-inf")).softmax(-1)
        return (weights[:, None] @ states).squeeze(1)


class PaddedNetwork(nn.Module):
    """The padded network."""

    def __init__(self, config: HierarchicalConfig, vocabulary: int, classes: int, packed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.embedding_width, padding_idx=PAD)
        self.word_level = PaddedLevel(config.embedding_width, config.width, config.attention_width, packed)
        self.sentence_level = PaddedLevel(2 * config.width, config.width, config.attention_width, packed)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * config.width, classes)

    @classmethod
    def copy_of(cls, ours: HierarchicalAttentionNetwork, packed: bool) -> PaddedNetwork:
        """Copy sizes and weights; the embedding of padding is zero."""
        model = cls(ours.config, ours.embedding.num_embeddings, ours.output.out_features, packed)
        model.load_state_dict(ours.state_dict())
        with torch.no_grad():
            model.embedding.weight[PAD] = 0
        return model.train(ours.training)

    def forward(self, block: Block) -> Tensor:
        """Return logits ``(N, C)``."""
        words, sentences = block.on_host
        x = self.dropout(self.embedding(block.ids)).flatten(0, 1)  # (N · S, L, E)
        vectors = self.word_level(x, block.words.flatten(), words.flatten()).unflatten(0, block.words.shape)
        return self.output(self.dropout(self.sentence_level(vectors, block.sentences, sentences)))  # type: ignore[no-any-return]

    def loss(self, block: Block) -> Tensor:
        """Return the mean cross entropy of the documents."""
        return F.cross_entropy(self(block).float(), block.labels)
