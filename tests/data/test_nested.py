"""Documents of sentences as batches: every document once, of like size, and as it was given."""

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jumok.batch import IGNORE, UNK
from jumok.data import nested as module
from jumok.data.nested import Loose, Nested
from jumok.errors import InputError
from jumok.models.hierarchical import Hierarchical, HierarchicalConfig

CHANCE = np.random.default_rng(3)
DOCUMENTS = [
    [CHANCE.integers(4, 30, CHANCE.integers(1, 12)).tolist() for _ in range(CHANCE.integers(1, 9))]
    for _ in range(101)
]
LABELS = [number % 3 for number in range(101)]


def words(document: list[list[int]]) -> int:
    return sum(map(len, document))


def unpacked(batch: Any) -> list[list[list[int]]]:
    sentences = [x.tolist() for x in batch.tokens.ids[0].split(list(batch.tokens.lengths))]
    numbers = batch.sentences.ids[0].split(list(batch.sentences.lengths))
    return [[sentences[n] for n in of.tolist()] for of in numbers]


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module) == (0, 4)


def test_every_document_comes_once_with_its_label() -> None:
    data = Nested(DOCUMENTS, LABELS, tokens=200, seed=1)
    seen: list[int] = []
    for index in data.batches(0):
        batch = data.collate(index)
        assert unpacked(batch) == [DOCUMENTS[n] for n in batch.index]
        assert batch.labels.tolist() == [LABELS[n] for n in batch.index]
        assert batch.count == len(batch.index)
        assert sum(words(DOCUMENTS[n]) for n in batch.index) <= 200
        assert batch.to("cpu").form is None  # although it is packed
        seen += batch.index
    assert sorted(seen) == list(range(len(data))) == list(range(101))
    assert data.unit == "documents"


def test_other_documents_or_labels_have_another_fingerprint() -> None:
    given = [(DOCUMENTS, LABELS), (DOCUMENTS, LABELS), (DOCUMENTS, LABELS[::-1]), (DOCUMENTS[::-1], LABELS)]
    one, same, *others = (Nested(*both, tokens=200, seed=1).fingerprint for both in given)
    assert one == same
    assert len({one, *others}) == 3


def test_documents_of_a_batch_are_of_like_size_and_batches_are_full() -> None:
    data = Nested(DOCUMENTS, LABELS, tokens=200, seed=1)
    batches = [[words(DOCUMENTS[n]) for n in index] for index in data.batches(0)]
    ranges = sorted((min(sizes), max(sizes)) for sizes in batches)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    assert len(batches) < 1.5 * sum(map(words, DOCUMENTS)) / 200 + 1


def test_the_order_is_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [index.tolist() for index in Nested(DOCUMENTS, LABELS, tokens=100, seed=seed).batches(epoch)]

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    data = Nested(DOCUMENTS, LABELS, tokens=100, seed=1)
    data.batches(7)
    assert [index.tolist() for index in data.batches(2)] == order(1, 2)


def test_a_document_longer_than_the_budget_is_a_batch_by_itself() -> None:
    documents = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    found = [index.tolist() for index in Nested(documents, [0, 1, 0], tokens=10, seed=1).batches(0)]
    assert sorted(map(sorted, found)) == [[0, 2], [1]]


def test_what_is_empty_has_an_unknown_word() -> None:
    data = Nested([[], [[]], [[5], [], [6]]], [0, 1, 2], tokens=10, seed=1)
    assert unpacked(data.collate([0, 1, 2])) == [[[UNK]], [[UNK]], [[5], [UNK], [6]]]
    assert data.lengths.tolist() == [1, 1, 3]


def test_labels_may_be_numbers() -> None:
    data = Nested(DOCUMENTS[:3], [0.5, 2, -1.0], tokens=10, seed=1)
    labels = data.collate([2, 0]).labels
    assert labels.dtype == torch.float32
    assert labels.tolist() == [-1.0, 0.5]
    kinds = {np.int32: torch.int64, np.float32: torch.float32, np.float64: torch.float32}
    for kind, expected in kinds.items():
        of_array: Any = np.array([1, 0], kind)
        assert Nested(DOCUMENTS[:2], of_array, tokens=9, seed=1).collate([0]).labels.dtype == expected


def test_labels_that_do_not_count() -> None:
    for labels in ([0, IGNORE, 2], [0.5, float("nan"), 2.0]):
        assert Nested(DOCUMENTS[:3], labels, tokens=10, seed=1).collate([0, 1, 2]).count == 2


@settings(deadline=None, max_examples=20)
@given(parts=st.integers(1, 7), count=st.integers(1, 20))
def test_the_parts_of_a_batch_are_all_of_it(parts: int, count: int) -> None:
    data = Nested(DOCUMENTS, LABELS, tokens=64, seed=1)
    index = np.arange(count, dtype=np.uint32)
    divided = data.divide(index, parts)
    assert len(divided) == parts
    assert sorted(int(n) for part in divided for n in part) == list(range(count))
    assert max(map(len, divided)) - min(map(len, divided)) <= 1


@torch.no_grad()
def test_batches_have_the_loss_of_the_single_documents() -> None:
    torch.manual_seed(0)
    model = Hierarchical(HierarchicalConfig(embedding=5, width=3, attention=7), 30, 3).double().eval()
    data = Nested(DOCUMENTS, LABELS, tokens=500, seed=1)
    together = sum(float(model.loss(data.collate(index)).total) for index in data.batches(0))
    alone = sum(float(model.loss(data.collate([n])).total) for n in range(len(data)))
    assert together == pytest.approx(alone, rel=1e-9)


def test_a_batch_stays_what_it_is() -> None:
    batch = Nested(DOCUMENTS, LABELS, tokens=64, seed=1).collate([3, 1])
    assert isinstance(batch.to("cpu"), Loose)
    assert batch.to("meta").sentences.ids.is_meta


def test_what_cannot_be_learned_from() -> None:
    with pytest.raises(InputError, match="no document is left"):
        Nested([], [], tokens=10, seed=1)
    with pytest.raises(InputError, match="3 documents came with 2 labels"):
        Nested(DOCUMENTS[:3], [0, 1], tokens=10, seed=1)
    with pytest.raises(InputError, match="tokens=0"):
        Nested(DOCUMENTS[:1], [0], tokens=0, seed=1)


def steps(document: list[list[int]]) -> int:
    return max(len(document), *map(len, document))


def test_by_steps_a_long_sentence_holds_up_few_others() -> None:
    data = Nested(DOCUMENTS, LABELS, tokens=200, seed=1, by_steps=True)
    batches = [index.tolist() for index in data.batches(0)]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(101))
    assert all(sum(words(DOCUMENTS[n]) for n in index) <= 200 for index in batches)
    assert len(batches) < 1.2 * sum(map(words, DOCUMENTS)) / 200 + 1
    ranges = sorted((min(taken), max(taken)) for taken in ([steps(DOCUMENTS[n]) for n in i] for i in batches))
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
    again = Nested(DOCUMENTS, LABELS, tokens=200, seed=1, by_steps=True)
    assert [index.tolist() for index in again.batches(0)] == batches
    assert [index.tolist() for index in again.batches(1)] != batches
    sizes = [[[5, 6]], [[7] * 30, [8] * 40], [[9]]]
    alone = Nested(sizes, [0, 1, 0], tokens=10, seed=1, by_steps=True)
    assert sorted(sorted(index.tolist()) for index in alone.batches(0)) == [[0, 2], [1]]
