"""Documents of sentences of token ids, with a label each, as batches: what a hierarchical model learns from.

A batch has as many documents as its budget of words allows, of like size, so that their sentences are about
equally many. The words of all sentences lie in a row, and so do the sentences of all documents: nothing is
filled up.

What takes time on a GPU are the steps, one after the other, of which a batch has as many as the longest of
its sentences has words, and the longest of its documents sentences: a single long sentence makes all others
wait. So documents can also come together *by steps*, those that need equally many. Of IMDB's reviews, batches
of 65,536 words then take 117 steps on average, and by size 298. ::

    documents    a a a / b      c c / d d d / e       a document, its sentences divided by /
    tokens       a a a b c c d d d e                  sentences of 3, 1, 2, 3, 1 words
    sentences    0 1 2 3 4                            documents of 2, 3 sentences

All of it is held in memory, 4 bytes a word: data that people have labelled is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from jumok.batches.text import DocumentBatch, label_mask
from jumok.batches.tokens import UNK, Tokens
from jumok.data.batching.length_batching import (
    BatchPlan,
    IndexArray,
    LengthArray,
    divide_batch,
    fingerprint_arrays,
    plan_batches,
)
from jumok.errors import InputError

__all__ = ["DocumentBatcher", "RaggedDocuments", "TokenizedDocument"]

TokenizedDocument = Sequence[Sequence[int]]  # sentences of token ids


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedDocuments(DocumentBatch):
    """Documents that are read by the lengths of all their sentences, which no two batches have in common.

    So, although they are packed, there is no form by which they would be alike to others.
    """

    @property
    def graph_key(self) -> None:
        return None


class DocumentBatcher:
    """Documents with a label each, the number of a class or any number: what the training loop asks for.

    ``max_tokens`` is how many words a batch has at most, unless a single document has more. A sentence without a
    word gets one unknown word, and a document without a sentence one such sentence. ``group_by_steps``: a batch has
    documents that take about equally many steps to read, where otherwise they have equally many words.

    >>> data = DocumentBatcher([[[7, 8, 9], [5]], [[4, 6]], []], labels=[2, 0, 1], max_tokens=100, seed=1)
    >>> batch = data.collate([1, 0])
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
            raise InputError("there is nothing to learn from: no document is left")
        if len(documents) != len(labels):
            raise InputError(
                f"{len(documents)} documents came with {len(labels)} labels; each document has one"
            )
        if max_tokens < 1:
            raise InputError(f"tokens={max_tokens}: a batch needs a budget of at least one token")
        self.max_tokens, self.seed, self.group_by_steps = max_tokens, seed, group_by_steps
        given = np.asarray(labels)
        self.labels = torch.from_numpy(given.astype(np.float32 if given.dtype.kind == "f" else np.int64))

        nothing = (UNK,)
        every = [document if len(document) else (nothing,) for document in documents]
        sentences = [sentence if len(sentence) else nothing for sentence in chain.from_iterable(every)]
        self._token_ids = np.fromiter(chain.from_iterable(sentences), np.int32)
        self._sentence_lengths = np.fromiter(map(len, sentences), np.int64)  # the words of each
        self._document_sizes = np.fromiter(map(len, every), np.int64)  # the sentences of each
        ends = np.cumsum(self._document_sizes)
        self._sentence_offsets = ends - self._document_sizes
        self.lengths: LengthArray = np.add.reduceat(self._sentence_lengths, self._sentence_offsets).astype(
            np.int32
        )
        longest = np.maximum.reduceat(self._sentence_lengths, self._sentence_offsets)
        self._num_steps = np.maximum(longest, self._document_sizes)  # whichever level has more decides
        self._token_offsets = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._latest_epoch: tuple[int, BatchPlan] | None = (
            None  # asked for again, the same need not be made again
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def fingerprint(self) -> str:
        """Another one for other documents, or for other labels."""
        return fingerprint_arrays(
            self._token_ids, self._sentence_lengths, self._document_sizes, self.labels.numpy()
        )

    def batches(self, epoch: int) -> BatchPlan:
        """The batches of an epoch, in order."""
        latest = self._latest_epoch
        if latest is None or latest[0] != epoch:
            latest = self._latest_epoch = (epoch, self._plan_epoch(epoch))
        return latest[1]

    def _plan_epoch(self, epoch: int) -> BatchPlan:
        if not self.group_by_steps:
            return plan_batches(
                self.lengths, self.lengths, max_tokens=self.max_tokens, seed=self.seed, epoch=epoch
            )
        chance = np.random.default_rng([self.seed, epoch])
        order = chance.permutation(len(self))
        order = order[np.argsort(self._num_steps[order], kind="stable")]  # chance decides among equals
        ends = np.cumsum(self.lengths[order], dtype=np.int64)
        bounds = [0]
        while bounds[-1] < len(order):
            before = ends[bounds[-1]] - self.lengths[order[bounds[-1]]]
            fits = int(np.searchsorted(ends, before + self.max_tokens, side="right"))
            bounds.append(max(bounds[-1] + 1, fits))
        return BatchPlan(order, np.array(bounds, np.int64), chance.permutation(len(bounds) - 1))

    def divide(self, index: IndexArray, num_parts: int) -> list[IndexArray]:
        """A batch in parts of like work."""
        return divide_batch(index, self.lengths, self.lengths, num_parts)

    def collate(self, index: Sequence[int] | IndexArray) -> DocumentBatch:
        """The documents of these numbers as a model takes them."""
        numbers = np.asarray(index, np.int64)
        words = self._token_ids[_expand_ranges(self._token_offsets[numbers], self.lengths[numbers])]
        sizes = self._document_sizes[numbers]
        lengths = self._sentence_lengths[_expand_ranges(self._sentence_offsets[numbers], sizes)]
        labels = self.labels[torch.from_numpy(numbers)]
        ids = torch.from_numpy(words.astype(np.int64))
        return RaggedDocuments(
            tokens=Tokens.from_packed_ids(ids, lengths.tolist()),
            sentence_indices=Tokens.from_packed_ids(torch.arange(len(lengths)), sizes.tolist()),
            segments=torch.zeros_like(ids)[None],
            labels=labels,
            count=int(label_mask(labels).sum()),
            example_indices=tuple(numbers.tolist()),
        )


def _expand_ranges(starts: NDArray[np.int64], lengths: IndexArray) -> IndexArray:
    """The numbers of some runs, each from where it begins and as long as it is, one after the other."""
    before: IndexArray = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
