"""The hierarchical attention network as one writes it first: padded to the longest sentence and document.

A batch is one block of word ids ``(N, S, L)``: N documents, each filled up to the S sentences of the longest
one, each sentence to the L words of the longest one of all. Parameters are named as in
:mod:`jumok.models.hierarchical`, so that the weights of the one go into the other.

The GRUs read the block as it is, or packed (``pack_padded_sequence``). As it is, the direction that goes
backwards reads padding first. While biases are zero, as they are at first, its state stays zero there, and
the outputs of both are equal; once they are learned, only those of the packed one are what they should be.
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
    """Documents of one batch."""

    ids: Tensor  # (N, S, L)
    words: Tensor  # (N, S): of each sentence, 0 where there is none
    sentences: Tensor  # (N,): of each document
    labels: Tensor  # (N,)
    on_host: tuple[Tensor, Tensor]  # words and sentences once more: to pack them, one must know them here

    @classmethod
    def of(cls, documents: Sequence[Document], labels: Sequence[int]) -> Block:
        most = max(map(len, documents))
        longest = max(len(sentence) for document in documents for sentence in document)
        ids = np.full((len(documents), most, longest), PAD)
        words = np.zeros((len(documents), most), np.int64)
        for block, counts, document in zip(ids, words, documents, strict=True):
            counts[: len(document)] = [len(sentence) for sentence in document]
            block[np.arange(longest) < counts[:, None]] = np.concatenate(document)
        lengths = torch.from_numpy(words), torch.tensor([len(document) for document in documents])
        return cls(torch.from_numpy(ids), *lengths, torch.tensor(labels), lengths)

    def to(self, device: torch.device) -> Block:
        named = {name: getattr(self, name) for name in ("ids", "words", "sentences", "labels")}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in named.items()})


class PaddedLevel(nn.Module):
    """From rows to a vector each."""

    def __init__(self, inputs: int, width: int, attention: int, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.rnn = nn.GRU(inputs, width, batch_first=True, bidirectional=True)
        self.key = nn.Linear(2 * width, attention)
        self.query = nn.Parameter(torch.zeros(attention))

    def forward(self, x: Tensor, lengths: Tensor, on_host: Tensor) -> Tensor:
        """``(R, 2 W)`` of ``x`` ``(R, L, inputs)``; what is made of an empty row has no meaning."""
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
    """The network, with the sizes of ``config``."""

    def __init__(self, config: HierarchicalConfig, vocabulary: int, classes: int, packed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.embedding_width, padding_idx=PAD)
        self.word_level = PaddedLevel(config.embedding_width, config.width, config.attention_width, packed)
        self.sentence_level = PaddedLevel(2 * config.width, config.width, config.attention_width, packed)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(2 * config.width, classes)

    @classmethod
    def like(cls, ours: HierarchicalAttentionNetwork, packed: bool) -> PaddedNetwork:
        """With the same sizes and weights; padding is a vector of zeros."""
        model = cls(ours.config, ours.embedding.num_embeddings, ours.output.out_features, packed)
        model.load_state_dict(ours.state_dict())
        with torch.no_grad():
            model.embedding.weight[PAD] = 0
        return model.train(ours.training)

    def forward(self, block: Block) -> Tensor:
        """``(N, C)``"""
        words, sentences = block.on_host
        x = self.dropout(self.embedding(block.ids)).flatten(0, 1)  # (N · S, L, E)
        vectors = self.word_level(x, block.words.flatten(), words.flatten()).unflatten(0, block.words.shape)
        return self.output(self.dropout(self.sentence_level(vectors, block.sentences, sentences)))  # type: ignore[no-any-return]

    def loss(self, block: Block) -> Tensor:
        """The mean over the documents."""
        return F.cross_entropy(self(block).float(), block.labels)
