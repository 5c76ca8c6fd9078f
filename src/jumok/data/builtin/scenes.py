"""Pictures of coloured shapes with a caption each, drawn on the spot from a seed: the built-in data set.

>>> for scene in scenes(seed=5, count=3):
...     print(scene.caption)
a purple square left of a small blue star and below a small red circle
a small purple star above a purple triangle
a purple circle left of a small purple moon
>>> scene.boxes[:4]
(None, (5, 34, 36, 65), (5, 34, 36, 65), None)
>>> [scene.caption for scene in scenes(seed=5, count=3, language="ko")][2]
'작은 보라색 달 왼쪽에 있는 보라색 동그라미'

A scene has one to three shapes, and decides its caption to the word, so that a model is right or wrong:

- A shape is told by its size (only if it is small), colour and kind. No two of a scene share colour and kind.
- Of two shapes that stand side by side, the left one is said first; of one above the other, the upper one.
- Three shapes stand around a corner. The one in the corner is said first: where it is as seen from the one
  beside it, and then as seen from the one below or above it.

Every word that tells of a shape (size, colour, kind) comes with the shape's box, so that attention can be
scored. The others, relations among them, are not about one place, and come with None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.shapes import SHAPE_DISTANCES, Box, PortableGenerator, draw_background, paint_shape
from jumok.errors import InputError

__all__ = ["IMAGE_SIZE", "Box", "Language", "ShapeScene", "draw_scene", "draw_scenes"]

Language = Literal["en", "ko"]

IMAGE_SIZE = 96  # pixels, both ways
# How far a shape reaches from its middle, in pixels: nothing between the two, so that small is small, and
# every box has the middle of a cell in a grid of 6 × 6 or finer.
SMALL_RADII, LARGE_RADII = (10.0, 11.5), (15.5, 18.5)
MAX_TILT = 0.2  # radians, either way
MIN_GAP, MARGIN = 4.0, 2.0  # pixels between two shapes, and to the edge
MAX_OFFSET_RATIO = 0.3  # how far "left of" may be off the line, by the distance along it
MIN_CORNER_RATIO = 0.65  # of the two that are not in the corner: the lesser by the greater of their distances
NUM_LAYOUT_DRAWS = 16  # places that are tried at once
SHAPE_COUNTS = (1, 2, 2, 3, 3)
# From the first shape to the one that it is left of, and so on; y is downwards.
RELATION_DIRECTIONS = {"left of": (1, 0), "right of": (-1, 0), "above": (0, 1), "below": (0, -1)}

COLORS = {
    "red": (216, 38, 44),
    "orange": (246, 134, 20),
    "yellow": (248, 218, 44),
    "green": (40, 158, 72),
    "blue": (36, 92, 218),
    "purple": (138, 58, 178),
}
KOREAN_WORDS = {
    "small": "작은",
    "red": "빨간",
    "orange": "주황색",
    "yellow": "노란",
    "green": "초록색",
    "blue": "파란",
    "purple": "보라색",
    "circle": "동그라미",
    "square": "네모",
    "triangle": "세모",
    "star": "별",
    "heart": "하트",
    "moon": "달",
    "left of": "왼쪽에",
    "right of": "오른쪽에",
    "above": "위에",
    "below": "아래에",
}
CaptionWord = tuple[str, Box | None]


@dataclass(frozen=True, eq=False)
class ShapeScene:
    """A picture ``(96, 96, 3)``, its caption, and for each word of ``caption.split()`` a box or None."""

    pixels: NDArray[np.uint8]
    caption: str
    boxes: tuple[Box | None, ...]


@dataclass(frozen=True)
class _SceneShape:
    """What is to be painted, and told: the words for it, of which the last two are its colour and kind."""

    words: tuple[str, ...]
    radius: float


@dataclass(frozen=True)
class _SceneLayout:
    """Where the first shape stands as seen from each other one, and where all of them are ``(shapes, 2)``."""

    relations: tuple[str, ...]
    centers: NDArray[np.float64]


def draw_scenes(seed: int, count: int, language: Language = "en") -> Iterator[ShapeScene]:
    """``count`` scenes, one by one; the same pictures in either language."""
    if count < 0:
        raise InputError(f"count is {count}; it is a number of scenes, 0 or more")
    _check_language(language)
    return (draw_scene(seed, number, language) for number in range(count))


def draw_scene(seed: int, index: int, language: Language = "en") -> ShapeScene:
    """The scene of this number, which depends on no other."""
    _check_language(language)
    # A digest, so that neighbouring seeds have nothing in common.
    chance = PortableGenerator(
        int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:16], "big")
    )
    shapes = _draw_shapes(chance)
    layout = _draw_layout(chance, [shape.radius for shape in shapes])
    pixels = draw_background(chance, IMAGE_SIZE)
    boxes = []
    for shape, (x, y) in zip(shapes, layout.centers.tolist(), strict=True):
        *_, colour, kind = shape.words
        shade = [tone + chance.uniform(-10, 10) for tone in COLORS[colour]]
        boxes.append(
            paint_shape(pixels, kind, shade, (x, y), shape.radius, chance.uniform(-MAX_TILT, MAX_TILT))
        )
    pixels += chance.uniform_array(-3, 3, (IMAGE_SIZE, IMAGE_SIZE, 1))  # grain
    told = (_describe_in_english if language == "en" else _describe_in_korean)(
        shapes, boxes, layout.relations
    )
    return ShapeScene(
        pixels=np.clip(np.rint(pixels), 0, 255).astype(np.uint8),
        caption=" ".join(word for word, _ in told),
        boxes=tuple(box for _, box in told),
    )


# ------------------------------------------------------------------------------------------------ captions


def _describe_in_english(
    shapes: Sequence[_SceneShape], boxes: Sequence[Box], relations: Sequence[str]
) -> list[CaptionWord]:
    """*a small red circle left of an orange star and above a green moon*"""
    told = _describe_with_article(shapes[0], boxes[0])
    for number, relation in enumerate(relations, 1):
        told += [(word, None) for word in ["and"] * (number > 1) + relation.split()]
        told += _describe_with_article(shapes[number], boxes[number])
    return told


def _describe_with_article(shape: _SceneShape, box: Box) -> list[CaptionWord]:
    return [("an" if shape.words[0] == "orange" else "a", None), *((word, box) for word in shape.words)]


def _describe_in_korean(
    shapes: Sequence[_SceneShape], boxes: Sequence[Box], relations: Sequence[str]
) -> list[CaptionWord]:
    """*주황색 별 왼쪽에 있고 초록색 달 위에 있는 작은 빨간 동그라미*"""
    told: list[CaptionWord] = []
    for number, relation in enumerate(relations, 1):
        told += [(KOREAN_WORDS[word], boxes[number]) for word in shapes[number].words]
        told += [(KOREAN_WORDS[relation], None), ("있고" if number < len(relations) else "있는", None)]
    return told + [(KOREAN_WORDS[word], boxes[0]) for word in shapes[0].words]


# --------------------------------------------------------------------------------------------------- scenes


def _draw_shapes(rng: PortableGenerator) -> list[_SceneShape]:
    wanted = rng.choice(SHAPE_COUNTS)
    looks: dict[tuple[str, str], _SceneShape] = {}
    while len(looks) < wanted:
        look = (rng.choice(tuple(COLORS)), rng.choice(tuple(SHAPE_DISTANCES)))
        small = rng.bernoulli(0.5)
        reach = rng.uniform(*(SMALL_RADII if small else LARGE_RADII))
        looks[look] = _SceneShape(("small", *look) if small else look, reach)
    return list(looks.values())


def _draw_layout(rng: PortableGenerator, shape_radii: Sequence[float]) -> _SceneLayout:
    """Places that leave no doubt what stands where, the first that chance finds."""
    if len(shape_radii) == 1:
        relations: tuple[str, ...] = ()
    elif len(shape_radii) == 2:
        relations = (rng.choice(("left of", "above")),)
    else:
        relations = (rng.choice(("left of", "right of")), rng.choice(("above", "below")))
    radii = np.asarray(shape_radii) * 1.1  # with corners
    low, high = (radii + MARGIN)[:, None], (IMAGE_SIZE - MARGIN - radii)[:, None]
    while True:
        places = np.zeros((NUM_LAYOUT_DRAWS, len(shape_radii), 2))  # as seen from the first, so far
        for number, relation in enumerate(relations, 1):
            far = (radii[0] + radii[number] + MIN_GAP, IMAGE_SIZE - 2 * MARGIN - radii[0] - radii[number])
            along = rng.uniform_array(*far, (NUM_LAYOUT_DRAWS, 1))
            off = along * rng.uniform_array(-MAX_OFFSET_RATIO, MAX_OFFSET_RATIO, (NUM_LAYOUT_DRAWS, 1))
            x, y = RELATION_DIRECTIONS[relation]
            places[:, number] = along * (x, y) + off * (y, x)
        room = (low - places).max(1), (high - places).min(1)  # for the first, so that all are in the picture
        fits = (room[0] <= room[1]).all(1)
        if len(relations) == 2:  # the two others neither beside nor below each other: who is in the corner?
            apart = np.abs(places[:, 1] - places[:, 2])
            fits &= apart.min(1) >= MIN_CORNER_RATIO * apart.max(1)
            fits &= apart.max(1) >= radii[1] + radii[2] + MIN_GAP  # not even their boxes meet
        if fits.any():
            first = fits.argmax()
            start, end = (side[first] for side in room)
            return _SceneLayout(
                relations, places[first] + start + (end - start) * rng.uniform_array(0, 1, (2,))
            )


def _check_language(language: str) -> None:
    if language not in get_args(Language):
        raise InputError(f"language={language!r} came; expected one of {', '.join(get_args(Language))}")
