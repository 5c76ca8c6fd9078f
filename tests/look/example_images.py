"""Captions with known attention: built-in drawings, in which each word attends to the box of its object."""

from __future__ import annotations

import numpy as np

from jumok.data.builtin import scenes
from jumok.look.viewer.attended_image import WHOLE_IMAGE, AttendedImage, ImageRegion
from jumok.look.viewer.viewer_data import ViewerData
from jumok.metrics.pointing_game import Box

Grid = tuple[int, int]


def build_box_weights(boxes: tuple[Box | None, ...], size: Grid, grid: Grid) -> np.ndarray:
    """Return weights ``(words, patches)`` with a peak in the middle of a word's box; uniform without a box."""
    y, x = ((np.arange(cells) + 0.5) * length / cells for cells, length in zip(grid, size, strict=True))
    words = []
    for box in boxes:
        scores = np.zeros(grid)
        if box is not None:
            left, top, right, bottom = box
            down, across = y[:, None] - (top + bottom) / 2, x - (left + right) / 2
            scores = 6 * np.exp(-(down**2 + across**2) / (right - left) ** 2 * 2)
        words.append(np.exp(scores).ravel() / np.exp(scores).sum())
    return np.asarray(words, np.float32)


def build_drawing_data(
    number: int = 0, *, language: scenes.Language = "en", grid: Grid = (7, 8), num_heads: int = 1, num_layers: int = 1
) -> ViewerData:
    """Return the caption of a built-in drawing. Only the first head attends to objects; the others are uniform."""
    drawing = scenes.draw_scene(5, number, language)
    weights = build_box_weights(drawing.boxes, (scenes.IMAGE_SIZE, scenes.IMAGE_SIZE), grid)
    uniform = np.full_like(weights, 1 / weights.shape[1])
    names = ["decoder"] if num_layers == 1 else [f"decoder.{n}.source_attention" for n in range(num_layers)]
    return ViewerData.from_weights(
        {name: np.stack([weights] + [uniform] * (num_heads - 1)) for name in names},
        row_labels=drawing.caption.split(),
        title=drawing.caption,
        image=AttendedImage.from_pixels(drawing.pixels, grid),
    )


def build_corner_data(words: tuple[str, ...] = ("right", "left"), region: ImageRegion = WHOLE_IMAGE) -> ViewerData:
    """Return a grid of 2 × 3 over a grey image.

    The first word attends to the upper right, the second to the lower left and slightly to the upper right, and
    others are uniform.
    """
    weights = np.full((len(words), 6), 1 / 6, np.float32)
    weights[0] = [0, 0, 1, 0, 0, 0]
    weights[1:2] = [0, 0, 0.25, 0.75, 0, 0]
    image = AttendedImage.from_pixels(np.full((200, 300, 3), 128, np.uint8), (2, 3), region=region)
    return ViewerData.from_weights({"decoder": weights}, row_labels=words, image=image, title="Corners")
