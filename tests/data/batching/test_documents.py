"""Batches of documents, which consist of sentences."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumok.batches.tokens import IGNORE, UNK
from jumok.data.batching.documents import DocumentBatcher, RaggedDocuments
from jumok.errors import InputError
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig

RNG = np.random.default_rng(3)
DOCUMENTS = [[RNG.integers(4, 30, RNG.integers(1, 12)).tolist() for _ in range(RNG.integers(1, 9))] for _ in range(101)]
LABELS = [number % 3 for number in range(101)]


def count_words(document: list[list[int]]) -> int:
    return sum(map(len, document))


def unpack(batch: Any) -> list[list[list[int]]]:
    sentences = [x.tolist() for x in batch.tokens.ids[0].split(list(batch.tokens.lengths))]
    numbers = batch.sentence_indices.ids[0].split(list(batch.sentence_indices.lengths))
    return [[sentences[n] for n in sentence_range.tolist()] for sentence_range in numbers]


def test_every_document_occurs_once_with_its_label() -> None:
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1)
    indices: list[int] = []
    for index in batcher.batches(0):
        batch = batcher.collate(index)
        assert unpack(batch) == [DOCUMENTS[n] for n in batch.example_indices]
        assert batch.labels.tolist() == [LABELS[n] for n in batch.example_indices]
        assert batch.count == len(batch.example_indices)
        assert sum(count_words(DOCUMENTS[n]) for n in batch.example_indices) <= 200
        assert batch.to("cpu").graph_key is None  # although it is packed
        indices += batch.example_indices
    assert sorted(indices) == list(range(len(batcher))) == list(range(101))
    assert batcher.unit == "documents"


def test_fingerprint() -> None:
    variants = [(DOCUMENTS, LABELS), (DOCUMENTS, LABELS), (DOCUMENTS, LABELS[::-1]), (DOCUMENTS[::-1], LABELS)]
    first, second, *others = (DocumentBatcher(*both, max_tokens=200, seed=1).fingerprint for both in variants)
    assert first == second
    assert len({first, *others}) == 3


def test_batches_have_similar_sizes_and_are_full() -> None:
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1)
    batches = [[count_words(DOCUMENTS[n]) for n in index] for index in batcher.batches(0)]
    ranges = sorted((min(sizes), max(sizes)) for sizes in batches)
    assert all(first[1] <= other[0] for first, other in itertools.pairwise(ranges))
    assert len(batches) < 1.5 * sum(map(count_words, DOCUMENTS)) / 200 + 1


def test_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [
            index.tolist() for index in DocumentBatcher(DOCUMENTS, LABELS, max_tokens=100, seed=seed).batches(epoch)
        ]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=100, seed=1)
    batcher.batches(7)
    assert [index.tolist() for index in batcher.batches(2)] == order(1, 2)


def test_document_over_the_budget_has_its_own_batch() -> None:
    documents = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    batches = [index.tolist() for index in DocumentBatcher(documents, [0, 1, 0], max_tokens=10, seed=1).batches(0)]
    assert sorted(map(sorted, batches)) == [[0, 2], [1]]


def test_empty_text_becomes_an_unknown_word() -> None:
    batcher = DocumentBatcher([[], [[]], [[5], [], [6]]], [0, 1, 2], max_tokens=10, seed=1)
    assert unpack(batcher.collate([0, 1, 2])) == [[[UNK]], [[UNK]], [[5], [UNK], [6]]]
    assert batcher.lengths.tolist() == [1, 1, 3]


def test_regression_labels() -> None:
    batcher = DocumentBatcher(DOCUMENTS[:3], [0.5, 2, -1.0], max_tokens=10, seed=1)
    labels = batcher.collate([2, 0]).labels
    assert labels.dtype == torch.float32
    assert labels.tolist() == [-1.0, 0.5]
    dtypes = {np.int32: torch.int64, np.float32: torch.float32, np.float64: torch.float32}
    for dtype, expected in dtypes.items():
        array: Any = np.array([1, 0], dtype)
        assert DocumentBatcher(DOCUMENTS[:2], array, max_tokens=9, seed=1).collate([0]).labels.dtype == expected


def test_ignored_labels() -> None:
    for labels in ([0, IGNORE, 2], [0.5, float("nan"), 2.0]):
        assert DocumentBatcher(DOCUMENTS[:3], labels, max_tokens=10, seed=1).collate([0, 1, 2]).count == 2


@settings(deadline=None, max_examples=20)
@given(parts=st.integers(1, 7), count=st.integers(1, 20))
def test_divide(parts: int, count: int) -> None:
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=64, seed=1)
    index = np.arange(count, dtype=np.uint32)
    divided = batcher.divide(index, parts)
    assert len(divided) == parts
    assert sorted(int(n) for part in divided for n in part) == list(range(count))
    assert max(map(len, divided)) - min(map(len, divided)) <= 1


@torch.no_grad()
def test_batched_loss_equals_single_losses() -> None:
    torch.manual_seed(0)
    model = (
        HierarchicalAttentionNetwork(HierarchicalConfig(embedding_width=5, width=3, attention_width=7), 30, 3)
        .double()
        .eval()
    )
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=500, seed=1)
    batched = sum(float(model.loss(batcher.collate(index)).total) for index in batcher.batches(0))
    alone = sum(float(model.loss(batcher.collate([n])).total) for n in range(len(batcher)))
    assert batched == pytest.approx(alone, rel=1e-9)


def test_to_device_preserves_the_type() -> None:
    batch = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=64, seed=1).collate([3, 1])
    assert isinstance(batch.to("cpu"), RaggedDocuments)
    assert batch.to("meta").sentence_indices.ids.is_meta


def test_invalid_arguments() -> None:
    with pytest.raises(InputError, match="no documents to train on"):
        DocumentBatcher([], [], max_tokens=10, seed=1)
    with pytest.raises(InputError, match="3 documents and 2 labels"):
        DocumentBatcher(DOCUMENTS[:3], [0, 1], max_tokens=10, seed=1)
    with pytest.raises(InputError, match="max_tokens=0"):
        DocumentBatcher(DOCUMENTS[:1], [0], max_tokens=0, seed=1)


def count_steps(document: list[list[int]]) -> int:
    return max(len(document), *map(len, document))


def test_group_by_steps() -> None:
    batcher = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1, group_by_steps=True)
    batches = [index.tolist() for index in batcher.batches(0)]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(101))
    assert all(sum(count_words(DOCUMENTS[n]) for n in index) <= 200 for index in batches)
    assert len(batches) < 1.2 * sum(map(count_words, DOCUMENTS)) / 200 + 1
    ranges = sorted((min(sizes), max(sizes)) for sizes in ([count_steps(DOCUMENTS[n]) for n in i] for i in batches))
    assert all(first[1] <= other[0] for first, other in itertools.pairwise(ranges))
    repeated = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1, group_by_steps=True)
    assert [index.tolist() for index in repeated.batches(0)] == batches
    assert [index.tolist() for index in repeated.batches(1)] != batches
    sizes = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    alone = DocumentBatcher(sizes, [0, 1, 0], max_tokens=10, seed=1, group_by_steps=True)
    assert sorted(sorted(index.tolist()) for index in alone.batches(0)) == [[0, 2], [1]]
