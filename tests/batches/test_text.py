"""Batches of labelled texts: layout, graph keys, and moving to a device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok.batches.text import ClassificationBatch, DocumentBatch, TextPairBatch
from jumok.batches.tokens import IGNORE, PAD, Tokens
from jumok.training.prefetch import map_tensors

FIRST = [[7, 8, 9], [5], [4, 6]]


def pairs(second_texts: Any = ((4,), (6, 7, 5), (8, 9)), **options: Any) -> TextPairBatch:
    return TextPairBatch.from_sequences(FIRST, second_tokens=second_texts, labels=[2, IGNORE, 0], **options)


def documents(sentences: Any = ((0, 1), (2,)), **options: Any) -> DocumentBatch:
    return DocumentBatch.from_sequences(FIRST, sentence_indices=sentences, labels=[2, 0], **options)


def test_text_pair_batch() -> None:
    batch = pairs(example_indices=(5, 3, 1))
    assert batch.tokens.ids.tolist() == [[7, 8, 9], [5, PAD, PAD], [4, 6, PAD]]
    assert batch.second_tokens.ids.tolist() == [[4, PAD, PAD], [6, 7, 5], [8, 9, PAD]]
    assert batch.second_tokens.lengths == (1, 3, 2)
    assert (batch.count, batch.example_indices, batch.unit) == (2, (5, 3, 1), "pairs")
    assert isinstance(batch, ClassificationBatch)


def test_document_batch() -> None:
    batch = documents()
    assert batch.sentence_indices.ids.tolist() == [[0, 1], [2, 0]]
    assert batch.sentence_indices.lengths == (2, 1)
    assert (batch.count, batch.unit) == (2, "documents")


def test_all_token_fields_are_packed() -> None:
    packed = pairs(packed=True)
    assert packed.tokens.ids.tolist() == [[7, 8, 9, 5, 4, 6]]
    assert packed.second_tokens.ids.tolist() == [[4, 6, 7, 5, 8, 9]]
    assert documents(packed=True).sentence_indices.ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("batch", "equal", "different"),
    [
        (pairs(), pairs([[4, 5], [6], [7, 8, 9]]), pairs([[4], [5], [6, 7]])),
        (documents(), documents([[0], [1, 2]]), documents([[0, 1, 2], [1]])),
    ],
    ids=["pairs", "documents"],
)
def test_graph_key_covers_all_token_fields(batch: Any, equal: Any, different: Any) -> None:
    assert batch.graph_key is None
    assert (
        batch.with_static_shapes().graph_key
        == equal.with_static_shapes().graph_key
        != different.with_static_shapes().graph_key
    )
    second = "second_tokens" if isinstance(batch, TextPairBatch) else "sentence_indices"
    for name in ("tokens", second):  # with one of them alone there is none
        assert replace(batch, **{name: getattr(batch, name).with_static_shapes()}).graph_key is None
    assert (
        batch.with_static_shapes().graph_key != replace(batch, labels=batch.labels[:1]).with_static_shapes().graph_key
    )


@pytest.mark.parametrize("batch", [pairs(), documents()], ids=["pairs", "documents"])
def test_to_device_and_map_tensors_reach_every_tensor(batch: Any) -> None:
    batch = batch.with_static_shapes()
    second = "second_tokens" if isinstance(batch, TextPairBatch) else "sentence_indices"
    moved = batch.to("meta")
    assert type(moved) is type(batch)
    seen: list[Tensor] = []

    def record(x: Tensor) -> Tensor:
        seen.append(x)
        return x + 100

    map_tensors(moved, record)
    assert len(seen) == 6  # ids and counts of both, segments, labels
    assert {x.device.type for x in seen} == {"meta"}
    changed: Tokens = getattr(map_tensors(batch, record), second)
    assert torch.equal(changed.ids, getattr(batch, second).ids + 100)
    assert changed.lengths == getattr(batch, second).lengths
