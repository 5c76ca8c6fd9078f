"""The pointing game, by hand: which places are inside a box, ties, and what chance gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jumok.errors import InputError
from jumok.metrics.pointing_game import Box, PointingScore, score_pointing

SIZE = (30, 70)  # height, width: cells of 10 × 10 in a grid of 3 × 7


def pointed(row: int, column: int) -> np.ndarray:
    map_ = np.zeros((3, 7))
    map_[row, column] = 0.4
    return map_


@pytest.mark.parametrize(
    ("box", "hit"),
    [
        ((50, 0, 60, 10), True),  # the cell itself, whose centre is (55, 5)
        ((55, 5, 56, 6), True),
        ((56, 5, 70, 30), False),  # just right of the centre
        ((0, 0, 55, 30), False),  # left of it: the right edge lies outside
        ((0, 6, 70, 30), False),  # below
        ((0, 0, 70, 5), False),  # above
    ],
)
def test_the_centre_of_the_strongest_cell_must_be_in_the_box(box: Box, hit: bool) -> None:
    assert score_pointing([pointed(0, 5)[None]], [[box]], SIZE).accuracy == hit


def test_words_without_a_box_are_skipped() -> None:
    maps = [np.stack([pointed(0, 0), pointed(2, 6), pointed(1, 1)]), torch.tensor(pointed(1, 3)[None])]
    boxes = [[(0, 0, 10, 10), None, (20, 0, 50, 30)], [(20, 0, 50, 30)]]
    result = score_pointing(maps, boxes, SIZE)
    assert result == PointingScore(pytest.approx(2 / 3), pytest.approx((1 + 9 + 9) / 21 / 3), 3)  # type: ignore[arg-type]
    assert str(result) == "pointing 0.667 (chance 0.302, 3 words)"


def test_a_uniform_map_scores_at_chance_level() -> None:
    flat = np.full((1, 3, 7), 1 / 21)
    result = score_pointing([flat], [[(0, 0, 20, 10)]], SIZE)
    assert result.accuracy == result.chance == pytest.approx(2 / 21)


def test_maps_with_gradients() -> None:
    maps = torch.rand(5, 3, 7, dtype=torch.bfloat16, requires_grad=True)
    assert score_pointing([maps], [[(0, 0, 70, 30)] * 5], SIZE) == PointingScore(1.0, 1.0, 5)


@pytest.mark.parametrize(
    ("maps", "boxes", "size", "message"),
    [
        ([np.zeros((1, 3, 7))], [], SIZE, "maps of 1 images, boxes of 0"),
        ([np.zeros((1, 3, 7))], [[None]], (0, 7), r"size=\(0, 7\)"),
        ([np.zeros((2, 3, 7))], [[None]], SIZE, "image 0 has maps of shape"),
        ([np.zeros((1, 21))], [[None]], SIZE, "image 0 has maps of shape"),
        ([np.zeros((1, 0, 7))], [[(0, 0, 5, 5)]], SIZE, "image 0 has maps of shape"),
        ([np.full((1, 3, 7), np.nan)], [[(0, 0, 5, 5)]], SIZE, "NaN"),
        ([np.zeros((1, 3, 7))], [[None]], SIZE, "no word has a box"),
        ([], [], SIZE, "no word has a box"),
    ],
)
def test_invalid_inputs_raise(maps: list, boxes: list, size: tuple[int, int], message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InputError, match=message):
        score_pointing(maps, boxes, size)
