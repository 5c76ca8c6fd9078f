"""Batches of documents with one label each, for hierarchical models. A document is a list of sentences.

The words of all sentences of a batch are packed, and so are the sentences of all documents; there is no
padding::

    documents    a a a / b      c c / d d d / e       two documents; / separates sentences
    tokens       a a a b c c d d d e                  sentences of 3, 1, 2, 3, 1 words
    sentences    0 1 2 3 4                            documents of 2, 3 sentences

A batch contains as many documents of similar size as its budget of words allows. Time on a GPU, however,
depends on the number of sequential steps: the words of the longest sentence or the sentences of the longest
document. A single long sentence makes all others wait. ``group_by_steps`` therefore groups documents by their
number of steps. With 65,536 words per batch, IMDB takes 117 steps per batch on average, instead of 298.

All documents are held in memory, at 4 bytes per word: labelled data is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from jumok.batches.text import DocumentBatch, label_mask
from jumok.batches.tokens import UNK, Tokens
from jumok.data.batching.length_batching import (
    BatchPlan,
    IndexArray,
    LengthArray,
    LengthBatcher,
    SequenceLayout,
    convert_labels,
    expand_ranges,
    fingerprint_arrays,
)
from jumok.errors import InputError

TokenizedDocument = Sequence[Sequence[int]]  # sentences of token ids


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedDocuments(DocumentBatch):
    """Documents whose kernels depend on the length of every sentence: no CUDA graph fits two batches."""

    @property
    def graph_key(self) -> None:
        return None


class DocumentBatcher(LengthBatcher[DocumentBatch]):
    """Documents with a label each, a class index or a number.

    ``max_tokens`` limits the words of a batch, unless a single document has more. An empty sentence becomes
    one unknown word, and an empty document one such sentence. ``group_by_steps`` groups documents by the
    number of sequential steps that they take instead of by their number of words.

    >>> documents = [[[7, 8, 9], [5]], [[4, 6]], []]
    >>> batcher = DocumentBatcher(documents, labels=[2, 0, 1], max_tokens=100, seed=1)
    >>> batch = batcher.collate([1, 0])
    >>> batch.tokens.ids, batch.tokens.lengths
    (tensor([[4, 6, 7, 8, 9, 5]]), (2, 3, 1))
    >>> batch.sentence_indices.ids, batch.sentence_indices.lengths, batch.labels
    (tensor([[0, 1, 2]]), (1, 2), tensor([0, 2]))
    """

    unit = DocumentBatch.unit

    def __init__(
        self,
        documents: Sequence[TokenizedDocument],
        labels: Sequence[int] | Sequence[float],
        *,
        max_tokens: int,
        seed: int,
        group_by_steps: bool = False,
    ) -> None:
        if not documents:
            raise InputError("there are no documents to train on")
        if len(documents) != len(labels):
            raise InputError(
                f"there are {len(documents)} documents and {len(labels)} labels; expected one label per document"
            )
        if max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens}: a batch needs a budget of at least one token")
        self.group_by_steps, self.labels = group_by_steps, torch.from_numpy(convert_labels(labels))
        unknown = (UNK,)
        nonempty = [document if len(document) else (unknown,) for document in documents]
        sentences = [sentence if len(sentence) else unknown for sentence in chain.from_iterable(nonempty)]
        self._token_ids = np.fromiter(chain.from_iterable(sentences), np.int32)
        self._sentence_lengths = np.fromiter(map(len, sentences), np.int64)  # words per sentence
        self._document_sizes = np.fromiter(map(len, nonempty), np.int64)  # sentences per document
        self._sentence_offsets = np.cumsum(self._document_sizes) - self._document_sizes
        words = np.add.reduceat(self._sentence_lengths, self._sentence_offsets)
        self.lengths: LengthArray = words.astype(np.int32)  # words per document
        super().__init__(SequenceLayout(max_tokens), self.lengths, seed=seed)
        self._token_offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        longest_sentence = np.maximum.reduceat(self._sentence_lengths, self._sentence_offsets)
        self._num_steps = np.maximum(longest_sentence, self._document_sizes)

    @property
    def fingerprint(self) -> str:
        """Identifies the documents and the labels."""
        return fingerprint_arrays(self._token_ids, self._sentence_lengths, self._document_sizes, self.labels.numpy())

    def _plan_epoch(self, epoch: int) -> BatchPlan:
        if not self.group_by_steps:
            return super()._plan_epoch(epoch)
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self))
        order = order[np.argsort(self._num_steps[order], kind="stable")]  # random among equals
        ends = np.cumsum(self.lengths[order], dtype=np.int64)
        bounds = [0]
        while bounds[-1] < len(order):
            before = ends[bounds[-1]] - self.lengths[order[bounds[-1]]]
            stop = int(np.searchsorted(ends, before + self.layout.budget, side="right"))
            bounds.append(max(bounds[-1] + 1, stop))
        return BatchPlan(order, np.array(bounds, np.int64), rng.permutation(len(bounds) - 1))

    def collate(self, index: Sequence[int] | IndexArray) -> DocumentBatch:
        indices = np.asarray(index, np.int64)
        token_positions = expand_ranges(self._token_offsets[indices], self.lengths[indices])
        ids = torch.from_numpy(self._token_ids[token_positions].astype(np.int64))
        sizes = self._document_sizes[indices]
        lengths = self._sentence_lengths[expand_ranges(self._sentence_offsets[indices], sizes)]
        labels = self.labels[torch.from_numpy(indices)]
        return RaggedDocuments(
            tokens=Tokens.from_packed_ids(ids, lengths.tolist()),
            sentence_indices=Tokens.from_packed_ids(torch.arange(len(lengths)), sizes.tolist()),
            segments=torch.zeros_like(ids)[None],
            labels=labels,
            count=int(label_mask(labels).sum()),
            example_indices=tuple(indices.tolist()),
        )
