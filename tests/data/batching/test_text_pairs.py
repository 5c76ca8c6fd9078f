"""Batches of text pairs with labels."""

import numpy as np
import pytest
import torch

from jumok import InputError
from jumok.batches.tokens import IGNORE, UNK
from jumok.data.batching.text_pairs import TextPairBatcher

FIRSTS = [[4] * n for n in (3, 7, 1, 11, 2)]
SECONDS = [[5] * n for n in (2, 1, 13, 3, 5)]
LABELS = [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_pair_occurs_once(fixed_shapes: bool) -> None:
    batcher = TextPairBatcher(FIRSTS, SECONDS, LABELS, max_tokens=32, seed=1, fixed_shapes=fixed_shapes)
    indices = []
    for index in batcher.batches(3):
        batch = batcher.collate(index)
        assert max(batch.tokens.ids.numel(), batch.second_tokens.ids.numel()) <= 32
        assert batch.count == len(index)
        for row, number in enumerate(batch.example_indices):
            indices.append(number)
            assert batch.labels[row] == LABELS[number]
            for tokens, texts in ((batch.tokens, FIRSTS), (batch.second_tokens, SECONDS)):
                assert tokens.ids[row, : tokens.lengths[row]].tolist() == texts[number]
        assert (batch.labels[len(index) :] == IGNORE).all()
        assert (batch.graph_key is not None) == fixed_shapes or batch.tokens.mask is None
    assert sorted(indices) == LABELS


def test_regression_labels_and_empty_texts() -> None:
    batcher = TextPairBatcher([[], [4]], [[5], []], [0.5, 2.0], max_tokens=10, seed=1)
    batch = batcher.collate([0, 1])
    assert batch.labels.dtype == torch.float32
    assert batch.tokens.ids.tolist() == [[UNK], [4]]
    assert batch.second_tokens.ids.tolist() == [[5], [UNK]]
    parts = batcher.divide(np.arange(2), 2)
    assert sorted(int(n) for part in parts for n in part) == [0, 1]


def test_fingerprint() -> None:
    first, equal, other = (TextPairBatcher(x, SECONDS, LABELS, max_tokens=9, seed=1) for x in (FIRSTS, FIRSTS, SECONDS))
    assert first.fingerprint == equal.fingerprint != other.fingerprint
    relabelled = TextPairBatcher(FIRSTS, SECONDS, LABELS[::-1], max_tokens=9, seed=1)
    assert relabelled.fingerprint != first.fingerprint


def test_invalid_arguments() -> None:
    with pytest.raises(InputError, match="no pairs to train on"):
        TextPairBatcher([], [], [], max_tokens=9, seed=1)
    with pytest.raises(InputError, match="1 first texts, 2 second texts and 1 labels"):
        TextPairBatcher([[4]], [[5], [6]], [0], max_tokens=9, seed=1)
