"""Documents of sentences as batches: every document once, of like size, and as it was given."""

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumok.batches.tokens import IGNORE, UNK
from jumok.data.batching import documents as module
from jumok.data.batching.documents import DocumentBatcher, RaggedDocuments
from jumok.errors import InputError
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig

CHANCE = np.random.default_rng(3)
DOCUMENTS = [
    [CHANCE.integers(4, 30, CHANCE.integers(1, 12)).tolist() for _ in range(CHANCE.integers(1, 9))] for _ in range(101)
]
LABELS = [number % 3 for number in range(101)]


def words(document: list[list[int]]) -> int:
    return sum(map(len, document))


def unpacked(batch: Any) -> list[list[list[int]]]:
    sentences = [x.tolist() for x in batch.tokens.ids[0].split(list(batch.tokens.lengths))]
    numbers = batch.sentence_indices.ids[0].split(list(batch.sentence_indices.lengths))
    return [[sentences[n] for n in of.tolist()] for of in numbers]


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module) == (0, 5)


def test_every_document_comes_once_with_its_label() -> None:
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1)
    seen: list[int] = []
    for index in data.batches(0):
        batch = data.collate(index)
        assert unpacked(batch) == [DOCUMENTS[n] for n in batch.example_indices]
        assert batch.labels.tolist() == [LABELS[n] for n in batch.example_indices]
        assert batch.count == len(batch.example_indices)
        assert sum(words(DOCUMENTS[n]) for n in batch.example_indices) <= 200
        assert batch.to("cpu").graph_key is None  # although it is packed
        seen += batch.example_indices
    assert sorted(seen) == list(range(len(data))) == list(range(101))
    assert data.unit == "documents"


def test_other_documents_or_labels_have_another_fingerprint() -> None:
    given = [(DOCUMENTS, LABELS), (DOCUMENTS, LABELS), (DOCUMENTS, LABELS[::-1]), (DOCUMENTS[::-1], LABELS)]
    one, same, *others = (DocumentBatcher(*both, max_tokens=200, seed=1).fingerprint for both in given)
    assert one == same
    assert len({one, *others}) == 3


def test_documents_of_a_batch_are_of_like_size_and_batches_are_full() -> None:
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1)
    batches = [[words(DOCUMENTS[n]) for n in index] for index in data.batches(0)]
    ranges = sorted((min(sizes), max(sizes)) for sizes in batches)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert len(batches) < 1.5 * sum(map(words, DOCUMENTS)) / 200 + 1


def test_the_order_is_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [
            index.tolist() for index in DocumentBatcher(DOCUMENTS, LABELS, max_tokens=100, seed=seed).batches(epoch)
        ]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=100, seed=1)
    data.batches(7)
    assert [index.tolist() for index in data.batches(2)] == order(1, 2)


def test_a_document_longer_than_the_budget_is_a_batch_by_itself() -> None:
    documents = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    found = [index.tolist() for index in DocumentBatcher(documents, [0, 1, 0], max_tokens=10, seed=1).batches(0)]
    assert sorted(map(sorted, found)) == [[0, 2], [1]]


def test_what_is_empty_has_an_unknown_word() -> None:
    data = DocumentBatcher([[], [[]], [[5], [], [6]]], [0, 1, 2], max_tokens=10, seed=1)
    assert unpacked(data.collate([0, 1, 2])) == [[[UNK]], [[UNK]], [[5], [UNK], [6]]]
    assert data.lengths.tolist() == [1, 1, 3]


def test_labels_may_be_numbers() -> None:
    data = DocumentBatcher(DOCUMENTS[:3], [0.5, 2, -1.0], max_tokens=10, seed=1)
    labels = data.collate([2, 0]).labels
    assert labels.dtype == torch.float32
    assert labels.tolist() == [-1.0, 0.5]
    kinds = {np.int32: torch.int64, np.float32: torch.float32, np.float64: torch.float32}
    for kind, expected in kinds.items():
        of_array: Any = np.array([1, 0], kind)
        assert DocumentBatcher(DOCUMENTS[:2], of_array, max_tokens=9, seed=1).collate([0]).labels.dtype == expected


def test_labels_that_do_not_count() -> None:
    for labels in ([0, IGNORE, 2], [0.5, float("nan"), 2.0]):
        assert DocumentBatcher(DOCUMENTS[:3], labels, max_tokens=10, seed=1).collate([0, 1, 2]).count == 2


@settings(deadline=None, max_examples=20)
@given(parts=st.integers(1, 7), count=st.integers(1, 20))
def test_the_parts_of_a_batch_are_all_of_it(parts: int, count: int) -> None:
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=64, seed=1)
    index = np.arange(count, dtype=np.uint32)
    divided = data.divide(index, parts)
    assert len(divided) == parts
    assert sorted(int(n) for part in divided for n in part) == list(range(count))
    assert max(map(len, divided)) - min(map(len, divided)) <= 1


@torch.no_grad()
def test_batches_have_the_loss_of_the_single_documents() -> None:
    torch.manual_seed(0)
    model = (
        HierarchicalAttentionNetwork(HierarchicalConfig(embedding_width=5, width=3, attention_width=7), 30, 3)
        .double()
        .eval()
    )
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=500, seed=1)
    together = sum(float(model.loss(data.collate(index)).total) for index in data.batches(0))
    alone = sum(float(model.loss(data.collate([n])).total) for n in range(len(data)))
    assert together == pytest.approx(alone, rel=1e-9)


def test_a_batch_stays_what_it_is() -> None:
    batch = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=64, seed=1).collate([3, 1])
    assert isinstance(batch.to("cpu"), RaggedDocuments)
    assert batch.to("meta").sentence_indices.ids.is_meta


def test_what_cannot_be_learned_from() -> None:
    with pytest.raises(InputError, match="no documents to train on"):
        DocumentBatcher([], [], max_tokens=10, seed=1)
    with pytest.raises(InputError, match="3 documents and 2 labels"):
        DocumentBatcher(DOCUMENTS[:3], [0, 1], max_tokens=10, seed=1)
    with pytest.raises(InputError, match="max_tokens=0"):
        DocumentBatcher(DOCUMENTS[:1], [0], max_tokens=0, seed=1)


def steps(document: list[list[int]]) -> int:
    return max(len(document), *map(len, document))


def test_by_steps_a_long_sentence_holds_up_few_others() -> None:
    data = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1, group_by_steps=True)
    batches = [index.tolist() for index in data.batches(0)]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(101))
    assert all(sum(words(DOCUMENTS[n]) for n in index) <= 200 for index in batches)
    assert len(batches) < 1.2 * sum(map(words, DOCUMENTS)) / 200 + 1
    ranges = sorted((min(taken), max(taken)) for taken in ([steps(DOCUMENTS[n]) for n in i] for i in batches))
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    again = DocumentBatcher(DOCUMENTS, LABELS, max_tokens=200, seed=1, group_by_steps=True)
    assert [index.tolist() for index in again.batches(0)] == batches
    assert [index.tolist() for index in again.batches(1)] != batches
    sizes = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    alone = DocumentBatcher(sizes, [0, 1, 0], max_tokens=10, seed=1, group_by_steps=True)
    assert sorted(sorted(index.tolist()) for index in alone.batches(0)) == [[0, 2], [1]]
