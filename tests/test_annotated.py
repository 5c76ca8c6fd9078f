"""Batches of texts: how those of several sequences are laid, moved and made alike."""

import doctest
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jumok import annotated
from jumok.annotated import Labelled, LabelledDocuments, LabelledPairs
from jumok.batch import IGNORE, PAD, Tokens
from jumok.training.prefetch import each_tensor

FIRST = [[7, 8, 9], [5], [4, 6]]


def pairs(seconds: Any = ((4,), (6, 7, 5), (8, 9)), **more: Any) -> LabelledPairs:
    return LabelledPairs.of(FIRST, seconds=seconds, labels=[2, IGNORE, 0], **more)


def documents(sentences: Any = ((0, 1), (2,)), **more: Any) -> LabelledDocuments:
    return LabelledDocuments.of(FIRST, sentences=sentences, labels=[2, 0], **more)


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(annotated).failed == 0


def test_pairs_are_two_texts_and_a_label() -> None:
    batch = pairs(index=(5, 3, 1))
    assert batch.tokens.ids.tolist() == [[7, 8, 9], [5, PAD, PAD], [4, 6, PAD]]
    assert batch.seconds.ids.tolist() == [[4, PAD, PAD], [6, 7, 5], [8, 9, PAD]]
    assert batch.seconds.lengths == (1, 3, 2)
    assert (batch.count, batch.index, batch.unit) == (2, (5, 3, 1), "pairs")
    assert isinstance(batch, Labelled)


def test_documents_are_sentences_and_the_order_they_come_in() -> None:
    batch = documents()
    assert batch.sentences.ids.tolist() == [[0, 1], [2, 0]]
    assert batch.sentences.lengths == (2, 1)
    assert (batch.count, batch.unit) == (2, "documents")


def test_all_tokens_are_packed_alike() -> None:
    packed = pairs(packed=True)
    assert packed.tokens.ids.tolist() == [[7, 8, 9, 5, 4, 6]]
    assert packed.seconds.ids.tolist() == [[4, 6, 7, 5, 8, 9]]
    assert documents(packed=True).sentences.ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("one", "like_it", "unlike"),
    [
        (pairs(), pairs([[4, 5], [6], [7, 8, 9]]), pairs([[4], [5], [6, 7]])),
        (documents(), documents([[0], [1, 2]]), documents([[0, 1, 2], [1]])),
    ],
    ids=["pairs", "documents"],
)
def test_the_form_is_that_of_both(one: Any, like_it: Any, unlike: Any) -> None:
    assert one.form is None
    assert one.alike().form == like_it.alike().form != unlike.alike().form
    second = "seconds" if isinstance(one, LabelledPairs) else "sentences"
    for name in ("tokens", second):  # with one of them alone there is none
        assert replace(one, **{name: getattr(one, name).alike()}).form is None
    assert one.alike().form != replace(one, labels=one.labels[:1]).alike().form


@pytest.mark.parametrize("batch", [pairs(), documents()], ids=["pairs", "documents"])
def test_every_tensor_is_moved_and_changed(batch: Any) -> None:
    batch = batch.alike()
    second = "seconds" if isinstance(batch, LabelledPairs) else "sentences"
    gone = batch.to("meta")
    assert type(gone) is type(batch)
    met: list[Tensor] = []

    def meet(x: Tensor) -> Tensor:
        met.append(x)
        return x + 100

    each_tensor(gone, meet)
    assert len(met) == 6  # ids and counts of both, segments, labels
    assert {x.device.type for x in met} == {"meta"}
    changed: Tokens = getattr(each_tensor(batch, meet), second)
    assert torch.equal(changed.ids, getattr(batch, second).ids + 100)
    assert changed.lengths == getattr(batch, second).lengths
