"""Encoded texts as batches: packed, padded and alike say the same, and what fills up does not count."""

from __future__ import annotations

import doctest
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jumok.batches.text import AnswerBatch, ClassificationBatch, TaggingBatch, TextBatch
from jumok.batches.tokens import IGNORE
from jumok.data.batching import texts as module
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.data.tokenizers import windows as windows_module
from jumok.errors import InputError
from jumok.models.bert import BertClassifier, BertConfig, BertSpanExtractor, BertTagger

LENGTHS = [3, 11, 5, 2, 7, 13, 3, 5, 17, 2]
LAYOUTS = [{"packed": packed, "fixed_shapes": alike} for packed in (False, True) for alike in (False, True)]


def rows(kind: type[TextBatch]) -> list[EncodedText]:
    found = []
    for number, length in enumerate(LENGTHS):
        ids = [2, *(5 + (number + at) % 20 for at in range(length - 2)), 3]
        segments = [int(at > length // 2) for at in range(length)]
        marks: dict[str, Any] = {"labels": number % 3}
        if kind is TaggingBatch:
            marks = {"labels": [IGNORE, *(at % 3 if at % 2 else IGNORE for at in range(length - 2)), IGNORE]}
        if kind is AnswerBatch:
            marks = {"answer_mask": [at == 0 or segment == 1 for at, segment in enumerate(segments)]}
            marks |= {"starts": length // 2 + 1 if length > 2 else 0, "ends": length - 1 if length > 2 else 0}
        found.append(EncodedText(ids, segments, marks))
    return found


MODELS = {
    ClassificationBatch: lambda config: BertClassifier(config, 30, 3),
    TaggingBatch: lambda config: BertTagger(config, 30, 3),
    AnswerBatch: lambda config: BertSpanExtractor(config, 30),
}


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module) == (0, 1)
    assert doctest.testmod(windows_module) == (0, 3)


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_loss_of_the_single_texts(kind: type[TextBatch], layout: dict[str, bool]) -> None:
    config = BertConfig(width=8, num_layers=2, num_heads=2, feed_forward_width=16, max_positions=17)
    model: Any = MODELS[kind](config).eval()
    given = rows(kind)
    data = TextBatcher(kind, given, max_tokens=64, seed=1, max_length=17, **layout)
    seen: list[int] = []
    total, count = 0.0, 0
    for index in data.batches(0):
        batch = data.collate(index)
        loss = model.loss(batch)
        total, count = total + float(loss.total), count + loss.count
        seen += batch.example_indices
    assert sorted(seen) == list(range(len(given)))
    alone = [model.loss(TextBatcher(kind, [row], max_tokens=64, seed=1).collate([0])) for row in given]
    assert count == sum(one.count for one in alone)
    assert total == pytest.approx(sum(float(one.total) for one in alone), rel=1e-4)


@torch.no_grad()
def test_numbers_are_learned_from_in_every_layout() -> None:
    config = BertConfig(width=8, num_layers=1, num_heads=2, feed_forward_width=16, max_positions=17)
    model = BertClassifier(config, 30, 1).eval()
    given = [
        EncodedText(row.ids, row.segments, {"labels": float(n)}) for n, row in enumerate(rows(ClassificationBatch))
    ]
    losses = []
    for layout in LAYOUTS:
        data = TextBatcher(ClassificationBatch, given, max_tokens=1000, seed=1, max_length=17, **layout)
        batch = data.collate(range(10))
        assert isinstance(batch, ClassificationBatch)
        assert batch.labels.dtype == torch.float32
        losses.append(float(model.loss(batch).total))
    assert losses == pytest.approx([losses[0]] * 4)


def test_batches_of_like_sizes_are_alike() -> None:
    given = rows(ClassificationBatch) * 20
    for packed in (False, True):
        data = TextBatcher(ClassificationBatch, given, max_tokens=128, seed=1, packed=packed, fixed_shapes=True)
        forms = [data.collate(index).graph_key for index in data.batches(0)]
        assert None not in forms
        assert len(set(forms)) < len(forms) / 2


def test_no_filler_is_longer_than_the_model_reads() -> None:
    data = TextBatcher(
        ClassificationBatch, rows(ClassificationBatch), max_tokens=512, seed=1, packed=True, max_length=17
    )
    assert max(data.collate(data.batches(0)[0]).tokens.lengths) <= 17


def test_the_parts_of_a_batch_are_all_of_it() -> None:
    data = TextBatcher(ClassificationBatch, rows(ClassificationBatch), max_tokens=64, seed=1)
    parts = data.divide(np.arange(10, dtype=np.uint32), 3)
    assert sorted(int(n) for part in parts for n in part) == list(range(10))


def test_other_labels_tags_or_spans_have_another_fingerprint() -> None:
    def found(kind: type[TextBatch], given: list[EncodedText]) -> str:
        return TextBatcher(kind, given, max_tokens=64, seed=1).fingerprint

    for kind, mark in (
        (ClassificationBatch, "labels"),
        (TaggingBatch, "labels"),
        (AnswerBatch, "starts"),
        (AnswerBatch, "ends"),
    ):
        given = rows(kind)
        old: Any = given[1].annotations[mark]
        new = [*old[:3], 2, *old[4:]] if isinstance(old, list) else old + 1
        assert new != old
        changed = [*given[:1], replace(given[1], annotations={**given[1].annotations, mark: new}), *given[2:]]
        assert found(kind, rows(kind)) == found(kind, given) != found(kind, changed)


def test_nothing_to_learn_from() -> None:
    with pytest.raises(InputError, match="no examples to train on"):
        TextBatcher(ClassificationBatch, [], max_tokens=64, seed=1)
