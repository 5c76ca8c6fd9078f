"""Batches of texts: how those of several sequences are laid, moved and made alike."""

import doctest
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok.batches import text
from jumok.batches.text import ClassificationBatch, DocumentBatch, TextPairBatch
from jumok.batches.tokens import IGNORE, PAD, Tokens
from jumok.training.prefetch import map_tensors

FIRST = [[7, 8, 9], [5], [4, 6]]


def pairs(seconds: Any = ((4,), (6, 7, 5), (8, 9)), **more: Any) -> TextPairBatch:
    return TextPairBatch.from_sequences(FIRST, second_tokens=seconds, labels=[2, IGNORE, 0], **more)


def documents(sentences: Any = ((0, 1), (2,)), **more: Any) -> DocumentBatch:
    return DocumentBatch.from_sequences(FIRST, sentence_indices=sentences, labels=[2, 0], **more)


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(text).failed == 0


def test_pairs_are_two_texts_and_a_label() -> None:
    batch = pairs(example_indices=(5, 3, 1))
    assert batch.tokens.ids.tolist() == [[7, 8, 9], [5, PAD, PAD], [4, 6, PAD]]
    assert batch.second_tokens.ids.tolist() == [[4, PAD, PAD], [6, 7, 5], [8, 9, PAD]]
    assert batch.second_tokens.lengths == (1, 3, 2)
    assert (batch.count, batch.example_indices, batch.unit) == (2, (5, 3, 1), "pairs")
    assert isinstance(batch, ClassificationBatch)


def test_documents_are_sentences_and_the_order_they_come_in() -> None:
    batch = documents()
    assert batch.sentence_indices.ids.tolist() == [[0, 1], [2, 0]]
    assert batch.sentence_indices.lengths == (2, 1)
    assert (batch.count, batch.unit) == (2, "documents")


def test_all_tokens_are_packed_alike() -> None:
    packed = pairs(packed=True)
    assert packed.tokens.ids.tolist() == [[7, 8, 9, 5, 4, 6]]
    assert packed.second_tokens.ids.tolist() == [[4, 6, 7, 5, 8, 9]]
    assert documents(packed=True).sentence_indices.ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("first", "like_it", "unlike"),
    [
        (pairs(), pairs([[4, 5], [6], [7, 8, 9]]), pairs([[4], [5], [6, 7]])),
        (documents(), documents([[0], [1, 2]]), documents([[0, 1, 2], [1]])),
    ],
    ids=["pairs", "documents"],
)
def test_the_form_is_that_of_both(first: Any, like_it: Any, unlike: Any) -> None:
    assert first.graph_key is None
    assert (
        first.with_static_shapes().graph_key
        == like_it.with_static_shapes().graph_key
        != unlike.with_static_shapes().graph_key
    )
    second = "second_tokens" if isinstance(first, TextPairBatch) else "sentence_indices"
    for name in ("tokens", second):  # with one of them alone there is none
        assert replace(first, **{name: getattr(first, name).with_static_shapes()}).graph_key is None
    assert (
        first.with_static_shapes().graph_key != replace(first, labels=first.labels[:1]).with_static_shapes().graph_key
    )


@pytest.mark.parametrize("batch", [pairs(), documents()], ids=["pairs", "documents"])
def test_every_tensor_is_moved_and_changed(batch: Any) -> None:
    batch = batch.with_static_shapes()
    second = "second_tokens" if isinstance(batch, TextPairBatch) else "sentence_indices"
    gone = batch.to("meta")
    assert type(gone) is type(batch)
    met: list[Tensor] = []

    def meet(x: Tensor) -> Tensor:
        met.append(x)
        return x + 100

    map_tensors(gone, meet)
    assert len(met) == 6  # ids and counts of both, segments, labels
    assert {x.device.type for x in met} == {"meta"}
    changed: Tokens = getattr(map_tensors(batch, meet), second)
    assert torch.equal(changed.ids, getattr(batch, second).ids + 100)
    assert changed.lengths == getattr(batch, second).lengths
