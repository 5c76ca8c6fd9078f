"""The pieces of a word as one, with numbers that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.look.viewer.viewer_data import ViewerData
from jumok.look.viewer.word_merging import find_word_starts, merge_into_words


@pytest.mark.parametrize(
    ("tokens", "begins"),
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
def test_where_words_begin(tokens: list[str], begins: list[int]) -> None:
    assert find_word_starts(tokens) == begins


def test_a_word_gets_what_its_pieces_get_and_looks_as_they_do_on_average() -> None:
    weights = np.array([[0.2, 0.3, 0.5], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]], np.float32)
    tokens = ["play", "##ing", "outside"]
    scene = merge_into_words(
        ViewerData.from_weights({"layer": np.stack([weights, weights.T])}, row_labels=tokens, col_labels=tokens)
    )
    (layer,) = scene.layers
    assert (layer.row_labels, layer.col_labels, layer.shape) == (
        ["playing", "outside"],
        ["playing", "outside"],
        (2, 2),
    )
    found = layer.source.weights(0, slice(0, 2), slice(0, 2))
    np.testing.assert_allclose(found, [[0.55, 0.45], [0.2, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(layer.source.received_weight(0, slice(0, 2)), [0.75, 1.25], rtol=1e-6)


def test_two_texts_have_words_of_their_own() -> None:
    weights = torch.rand(3, 2).softmax(-1)
    scene = ViewerData.from_weights(
        {"cross": weights}, row_labels=["▁이것", "은", "</s>"], col_labels=["▁this", "</s>"]
    )
    (layer,) = merge_into_words(scene).layers
    assert (layer.row_labels, layer.col_labels) == (["이것은", "</s>"], ["this", "</s>"])


def test_without_texts_nothing_changes() -> None:
    scene = ViewerData.from_weights({"layer": torch.eye(3)})
    assert merge_into_words(scene).layers[0] is scene.layers[0]


def test_what_is_too_long_is_told() -> None:
    tokens = ["a"] * 2049
    scene = ViewerData.from_weights({"layer": torch.eye(2049)}, row_labels=tokens, col_labels=tokens)
    with pytest.raises(InputError, match="up to 2048"):
        merge_into_words(scene)
