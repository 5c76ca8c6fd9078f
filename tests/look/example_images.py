"""Captions with known attention: the built-in drawings, each word looking at the box of what it tells of."""

from __future__ import annotations

import numpy as np

from jumok.data.builtin import scenes
from jumok.look.viewer.attended_image import WHOLE_IMAGE, AttendedImage, ImageRegion
from jumok.look.viewer.viewer_data import ViewerData
from jumok.metrics.pointing_game import Box

Grid = tuple[int, int]


def peaked(boxes: tuple[Box | None, ...], size: Grid, grid: Grid) -> np.ndarray:
    """Weights ``(words, places)``, strongest in the middle of a word's box; without a box, all alike."""
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


def drawing(
    number: int = 0, *, language: scenes.Language = "en", grid: Grid = (7, 8), heads: int = 1, layers: int = 1
) -> ViewerData:
    """A caption of one of the built-in drawings. Of several heads only the first looks at what is told."""
    drawn = scenes.draw_scene(5, number, language)
    weights = peaked(drawn.boxes, (scenes.IMAGE_SIZE, scenes.IMAGE_SIZE), grid)
    even = np.full_like(weights, 1 / weights.shape[1])
    names = ["decoder"] if layers == 1 else [f"decoder.{n}.source_attention" for n in range(layers)]
    return ViewerData.from_weights(
        {name: np.stack([weights] + [even] * (heads - 1)) for name in names},
        row_labels=drawn.caption.split(),
        title=drawn.caption,
        image=AttendedImage.from_pixels(drawn.pixels, grid),
    )


def corners(words: tuple[str, ...] = ("right", "left"), part: ImageRegion = WHOLE_IMAGE) -> ViewerData:
    """A grid of 2 × 3 over plain grey. The first word looks at the upper right, the second at the lower left
    and a bit at the upper right, others nowhere in particular."""
    weights = np.full((len(words), 6), 1 / 6, np.float32)
    weights[0] = [0, 0, 1, 0, 0, 0]
    weights[1:2] = [0, 0, 0.25, 0.75, 0, 0]
    grey = np.full((200, 300, 3), 128, np.uint8)
    picture = AttendedImage.from_pixels(grey, (2, 3), region=part)
    return ViewerData.from_weights({"decoder": weights}, row_labels=words, image=picture, title="Corners")
