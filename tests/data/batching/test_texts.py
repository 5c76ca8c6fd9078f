"""Batches of encoded texts: all layouts give the same loss, and fillers do not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jumok.batches.text import AnswerBatch, ClassificationBatch, TaggingBatch, TextBatch
from jumok.batches.tokens import IGNORE
from jumok.data.batching.texts import EncodedText, TextBatcher
from jumok.errors import InputError
from jumok.models.bert import BertClassifier, BertConfig, BertSpanExtractor, BertTagger

LENGTHS = [3, 11, 5, 2, 7, 13, 3, 5, 17, 2]
LAYOUTS = [{"packed": packed, "fixed_shapes": alike} for packed in (False, True) for alike in (False, True)]


def make_examples(batch_type: type[TextBatch]) -> list[EncodedText]:
    fingerprint = []
    for number, length in enumerate(LENGTHS):
        ids = [2, *(5 + (number + position) % 20 for position in range(length - 2)), 3]
        segments = [int(position > length // 2) for position in range(length)]
        annotations: dict[str, Any] = {"labels": number % 3}
        if batch_type is TaggingBatch:
            annotations = {
                "labels": [
                    IGNORE,
                    *(position % 3 if position % 2 else IGNORE for position in range(length - 2)),
                    IGNORE,
                ]
            }
        if batch_type is AnswerBatch:
            annotations = {"answer_mask": [position == 0 or segment == 1 for position, segment in enumerate(segments)]}
            annotations |= {"starts": length // 2 + 1 if length > 2 else 0, "ends": length - 1 if length > 2 else 0}
        fingerprint.append(EncodedText(ids, segments, annotations))
    return fingerprint


MODELS = {
    ClassificationBatch: lambda config: BertClassifier(config, 30, 3),
    TaggingBatch: lambda config: BertTagger(config, 30, 3),
    AnswerBatch: lambda config: BertSpanExtractor(config, 30),
}


@torch.no_grad()
@pytest.mark.parametrize("batch_type", MODELS, ids=lambda batch_type: batch_type.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_batched_loss_equals_single_losses(batch_type: type[TextBatch], layout: dict[str, bool]) -> None:
    config = BertConfig(width=8, num_layers=2, num_heads=2, feed_forward_width=16, max_positions=17)
    model: Any = MODELS[batch_type](config).eval()
    examples = make_examples(batch_type)
    batcher = TextBatcher(batch_type, examples, max_tokens=64, seed=1, max_length=17, **layout)
    indices: list[int] = []
    total, count = 0.0, 0
    for index in batcher.batches(0):
        batch = batcher.collate(index)
        loss = model.loss(batch)
        total, count = total + float(loss.total), count + loss.count
        indices += batch.example_indices
    assert sorted(indices) == list(range(len(examples)))
    single_losses = [model.loss(TextBatcher(batch_type, [row], max_tokens=64, seed=1).collate([0])) for row in examples]
    assert count == sum(loss.count for loss in single_losses)
    assert total == pytest.approx(sum(float(loss.total) for loss in single_losses), rel=1e-4)


@torch.no_grad()
def test_regression_loss_is_equal_in_all_layouts() -> None:
    config = BertConfig(width=8, num_layers=1, num_heads=2, feed_forward_width=16, max_positions=17)
    model = BertClassifier(config, 30, 1).eval()
    examples = [
        EncodedText(row.ids, row.segments, {"labels": float(n)})
        for n, row in enumerate(make_examples(ClassificationBatch))
    ]
    losses = []
    for layout in LAYOUTS:
        batcher = TextBatcher(ClassificationBatch, examples, max_tokens=1000, seed=1, max_length=17, **layout)
        batch = batcher.collate(range(10))
        assert isinstance(batch, ClassificationBatch)
        assert batch.labels.dtype == torch.float32
        losses.append(float(model.loss(batch).total))
    assert losses == pytest.approx([losses[0]] * 4)


def test_graph_keys_recur() -> None:
    examples = make_examples(ClassificationBatch) * 20
    for packed in (False, True):
        batcher = TextBatcher(ClassificationBatch, examples, max_tokens=128, seed=1, packed=packed, fixed_shapes=True)
        graph_keys = [batcher.collate(index).graph_key for index in batcher.batches(0)]
        assert None not in graph_keys
        assert len(set(graph_keys)) < len(graph_keys) / 2


def test_fillers_are_at_most_max_length() -> None:
    batcher = TextBatcher(
        ClassificationBatch, make_examples(ClassificationBatch), max_tokens=512, seed=1, packed=True, max_length=17
    )
    assert max(batcher.collate(batcher.batches(0)[0]).tokens.lengths) <= 17


def test_divide() -> None:
    batcher = TextBatcher(ClassificationBatch, make_examples(ClassificationBatch), max_tokens=64, seed=1)
    parts = batcher.divide(np.arange(10, dtype=np.uint32), 3)
    assert sorted(int(n) for part in parts for n in part) == list(range(10))


def test_fingerprint() -> None:
    def fingerprint(batch_type: type[TextBatch], examples: list[EncodedText]) -> str:
        return TextBatcher(batch_type, examples, max_tokens=64, seed=1).fingerprint

    for batch_type, name in (
        (ClassificationBatch, "labels"),
        (TaggingBatch, "labels"),
        (AnswerBatch, "starts"),
        (AnswerBatch, "ends"),
    ):
        examples = make_examples(batch_type)
        value: Any = examples[1].annotations[name]
        changed_value = [*value[:3], 2, *value[4:]] if isinstance(value, list) else value + 1
        assert changed_value != value
        changed = [
            *examples[:1],
            replace(examples[1], annotations={**examples[1].annotations, name: changed_value}),
            *examples[2:],
        ]
        assert (
            fingerprint(batch_type, make_examples(batch_type))
            == fingerprint(batch_type, examples)
            != fingerprint(batch_type, changed)
        )


def test_no_examples_raise() -> None:
    with pytest.raises(InputError, match="no examples to train on"):
        TextBatcher(ClassificationBatch, [], max_tokens=64, seed=1)
