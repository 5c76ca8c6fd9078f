"""Tests of merging the tokens of a word, with numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.word_merging import find_word_starts, merge_into_words


@pytest.mark.parametrize(
    ("tokens", "starts"),
    [
        (["[CLS]", "play", "##ing", "##s", "out", "[SEP]"], [0, 1, 4, 5]),
        (["▁이것", "은", "▁예문", "이다", "</s>"], [0, 2, 4]),
        (["<s>", "▁a", "<0xEC>", "<0x9D>", "b"], [0, 1]),
        (["<s>", "no", "▁mark"], [0, 1, 2]),
        (["##ing", "on"], [0, 1]),
        (["a", "b"], [0, 1]),
        ([], []),
    ],
)
def test_word_starts(tokens: list[str], starts: list[int]) -> None:
    assert find_word_starts(tokens) == starts


def test_merged_weights_are_sums_over_keys_and_means_over_queries() -> None:
    weights = np.array([[0.2, 0.3, 0.5], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]], np.float32)
    tokens = ["play", "##ing", "outside"]
    data = merge_into_words(
        ViewerData.from_weights({"layer": np.stack([weights, weights.T])}, row_labels=tokens, col_labels=tokens)
    )
    (layer,) = data.layers
    assert (layer.row_labels, layer.col_labels, layer.shape) == (["playing", "outside"], ["playing", "outside"], (2, 2))
    merged = layer.source.weights(0, slice(0, 2), slice(0, 2))
    np.testing.assert_allclose(merged, [[0.55, 0.45], [0.2, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(layer.source.received_weight(0, slice(0, 2)), [0.75, 1.25], rtol=1e-6)


def test_rows_and_columns_are_merged_separately() -> None:
    weights = torch.rand(3, 2).softmax(-1)
    data = ViewerData.from_weights({"cross": weights}, row_labels=["▁이것", "은", "</s>"], col_labels=["▁this", "</s>"])
    (layer,) = merge_into_words(data).layers
    assert (layer.row_labels, layer.col_labels) == (["이것은", "</s>"], ["this", "</s>"])


def test_layers_without_labels_are_unchanged() -> None:
    data = ViewerData.from_weights({"layer": torch.eye(3)})
    assert merge_into_words(data).layers[0] is data.layers[0]


def test_long_layers_are_rejected() -> None:
    tokens = ["a"] * 2048 + ["##b"]
    data = ViewerData.from_weights({"layer": torch.eye(2049)}, row_labels=tokens, col_labels=tokens)
    with pytest.raises(InputError, match="up to 2048"):
        merge_into_words(data)
