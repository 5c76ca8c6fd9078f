"""Images of coloured shapes with captions, drawn from a seed: the built-in captioning data set.

>>> for scene in draw_scenes(seed=5, count=3):
...     print(scene.caption)
a purple square left of a small blue star and below a small red circle
a small purple star above a purple triangle
a purple circle left of a small purple moon
>>> scene.boxes[:4]
(None, (5, 34, 36, 65), (5, 34, 36, 65), None)
>>> [scene.caption for scene in draw_scenes(seed=5, count=3, language="ko")][2]
'작은 보라색 달 왼쪽에 있는 보라색 동그라미'
>>> BuiltinScene.from_name("scenes:7").decode().shape
(96, 96, 3)

A scene has one to three shapes. It determines its caption completely, so that a prediction is right or wrong:

- A shape is described by its size (only if it is small), colour and kind. No two shapes of a scene share both
  colour and kind.
- Of two shapes side by side, the left one comes first. Of two shapes above each other, the upper one.
- Three shapes form a corner. The shape in the corner comes first, with its position relative to the shape
  beside it and then relative to the shape below or above it.

Every word that describes a shape (size, colour, kind) has the box of the shape, so that attention can be
scored. All other words, including relations, have None.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from jumok.data.builtin.shapes import SHAPE_DISTANCES, Box, PortableGenerator, draw_background, paint_shape
from jumok.data.caches.feature_cache import digest_sources
from jumok.data.images import IMAGE_LIMITS, ImageLimits, Pixels
from jumok.errors import InputError

Language = Literal["en", "ko"]

LANGUAGES: dict[str, Language] = {"scenes": "en", "scenes-en": "en", "scenes-ko": "ko"}  # by data set name
DATA_SEED, UNSEEN_SEED = 1, 2  # scenes for training, validation and test; scenes that users ask for
CACHED_SCENES = 1 << 13  # scenes of 27 KiB: a scene drawn for its caption is soon used as an image

IMAGE_SIZE = 96  # pixels, width and height
# Radii of shapes in pixels. No radius lies between the two ranges, so that "small" is unambiguous, and every
# box contains the centre of a cell of any grid of 6 × 6 or finer.
SMALL_RADII, LARGE_RADII = (10.0, 11.5), (15.5, 18.5)
MAX_TILT = 0.2  # radians, in either direction
MIN_GAP, MARGIN = 4.0, 2.0  # pixels between two shapes, and between a shape and the edge
MAX_OFFSET_RATIO = 0.3  # largest offset across the direction of a relation, relative to the distance along it
MIN_CORNER_RATIO = 0.65  # of the two shapes that are not in the corner: smaller / larger of their x and y distances
NUM_LAYOUT_DRAWS = 16  # candidate layouts drawn at once
SHAPE_COUNTS = (1, 2, 2, 3, 3)
# Direction from the first shape to the other one; y points down.
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
    """An image ``(96, 96, 3)``, its caption, and a box or None for each word of ``caption.split()``."""

    pixels: NDArray[np.uint8]
    caption: str
    boxes: tuple[Box | None, ...]


@dataclass(frozen=True)
class _SceneShape:
    """A shape to paint. The last two words are its colour and kind."""

    words: tuple[str, ...]
    radius: float


@dataclass(frozen=True)
class _SceneLayout:
    """The relation of the first shape to each other shape, and the centers ``(shapes, 2)`` of all shapes."""

    relations: tuple[str, ...]
    centers: NDArray[np.float64]


def draw_scenes(seed: int, count: int, language: Language = "en") -> Iterator[ShapeScene]:
    """Draw ``count`` scenes. The images are the same in all languages."""
    if count < 0:
        raise InputError(f"count={count}: expected 0 or more scenes")
    _check_language(language)
    return (draw_scene(seed, index, language) for index in range(count))


def draw_scene(seed: int, index: int, language: Language = "en") -> ShapeScene:
    """Draw the scene with this index. It does not depend on other scenes."""
    _check_language(language)
    rng = PortableGenerator.from_key(f"{seed} {index}")
    shapes = _draw_shapes(rng)
    layout = _draw_layout(rng, [shape.radius for shape in shapes])
    pixels = draw_background(rng, IMAGE_SIZE)
    boxes = []
    for shape, (x, y) in zip(shapes, layout.centers.tolist(), strict=True):
        *_, color, kind = shape.words
        shade = [tone + rng.uniform(-10, 10) for tone in COLORS[color]]
        boxes.append(paint_shape(pixels, kind, shade, (x, y), shape.radius, rng.uniform(-MAX_TILT, MAX_TILT)))
    pixels += rng.uniform_array(-3, 3, (IMAGE_SIZE, IMAGE_SIZE, 1))  # grain
    describe = _describe_in_english if language == "en" else _describe_in_korean
    words = describe(shapes, boxes, layout.relations)
    return ShapeScene(
        pixels=np.clip(np.rint(pixels), 0, 255).astype(np.uint8),
        caption=" ".join(word for word, _ in words),
        boxes=tuple(box for _, box in words),
    )


@functools.lru_cache(CACHED_SCENES)
def draw_cached_scene(seed: int, index: int) -> ShapeScene:
    """A scene with its English caption."""
    return draw_scene(seed, index)


@functools.cache
def _renderer_digest() -> str:
    return digest_sources("jumok.data.builtin.scenes", "jumok.data.builtin.shapes")


@dataclass(frozen=True, slots=True)
class BuiltinScene:
    """A scene as an image input, like :class:`~jumok.data.images.ImageFile`.

    It is drawn when it is decoded.
    """

    seed: int
    index: int

    @classmethod
    def from_name(cls, name: str) -> BuiltinScene | None:
        """The scene that ``scenes:7`` refers to, on which no model was trained. None for other names."""
        kind, colon, number = name.partition(":")
        if kind not in LANGUAGES or not colon:
            return None
        if not number.isdecimal() or len(number) > 18:
            raise InputError(f"{name}: expected the number of a scene, as in {kind}:7")
        return cls(UNSEEN_SEED, int(number))

    @property
    def name(self) -> str:
        return f"scene {self.index}"

    @property
    def location(self) -> str:
        return f"scenes:{self.index}"

    @property
    def identity(self) -> list[object]:
        """Values that differ between scenes, and between versions of the renderer."""
        return ["scenes", _renderer_digest(), self.seed, self.index]

    def decode(self, location: str | None = None, limits: ImageLimits = IMAGE_LIMITS) -> Pixels:
        """The pixels ``(height, width, 3)``."""
        return draw_cached_scene(self.seed, self.index).pixels


# ------------------------------------------------------------------------------------------------ captions


def _describe_in_english(
    shapes: Sequence[_SceneShape], boxes: Sequence[Box], relations: Sequence[str]
) -> list[CaptionWord]:
    """*a small red circle left of an orange star and above a green moon*"""
    words = _describe_with_article(shapes[0], boxes[0])
    for number, relation in enumerate(relations, 1):
        words += [(word, None) for word in ["and"] * (number > 1) + relation.split()]
        words += _describe_with_article(shapes[number], boxes[number])
    return words


def _describe_with_article(shape: _SceneShape, box: Box) -> list[CaptionWord]:
    return [("an" if shape.words[0] == "orange" else "a", None), *((word, box) for word in shape.words)]


def _describe_in_korean(
    shapes: Sequence[_SceneShape], boxes: Sequence[Box], relations: Sequence[str]
) -> list[CaptionWord]:
    """*주황색 별 왼쪽에 있고 초록색 달 위에 있는 작은 빨간 동그라미*"""
    words: list[CaptionWord] = []
    for number, relation in enumerate(relations, 1):
        words += [(KOREAN_WORDS[word], boxes[number]) for word in shapes[number].words]
        words += [(KOREAN_WORDS[relation], None), ("있고" if number < len(relations) else "있는", None)]
    return words + [(KOREAN_WORDS[word], boxes[0]) for word in shapes[0].words]


# ---------------------------------------------------------------------------------------- shapes and layout


def _draw_shapes(rng: PortableGenerator) -> list[_SceneShape]:
    num_shapes = rng.choice(SHAPE_COUNTS)
    shapes: dict[tuple[str, str], _SceneShape] = {}
    while len(shapes) < num_shapes:
        color_and_kind = (rng.choice(tuple(COLORS)), rng.choice(tuple(SHAPE_DISTANCES)))
        is_small = rng.bernoulli(0.5)
        radius = rng.uniform(*(SMALL_RADII if is_small else LARGE_RADII))
        words = ("small", *color_and_kind) if is_small else color_and_kind
        shapes[color_and_kind] = _SceneShape(words, radius)
    return list(shapes.values())


def _draw_layout(rng: PortableGenerator, shape_radii: Sequence[float]) -> _SceneLayout:
    """Draw layouts until one is unambiguous."""
    if len(shape_radii) == 1:
        relations: tuple[str, ...] = ()
    elif len(shape_radii) == 2:
        relations = (rng.choice(("left of", "above")),)
    else:
        relations = (rng.choice(("left of", "right of")), rng.choice(("above", "below")))
    radii = np.asarray(shape_radii) * 1.1  # corners reach further
    low, high = (radii + MARGIN)[:, None], (IMAGE_SIZE - MARGIN - radii)[:, None]
    while True:
        centers = np.zeros((NUM_LAYOUT_DRAWS, len(shape_radii), 2))  # relative to the first shape
        for number, relation in enumerate(relations, 1):
            distances = (radii[0] + radii[number] + MIN_GAP, IMAGE_SIZE - 2 * MARGIN - radii[0] - radii[number])
            along = rng.uniform_array(*distances, (NUM_LAYOUT_DRAWS, 1))
            across = along * rng.uniform_array(-MAX_OFFSET_RATIO, MAX_OFFSET_RATIO, (NUM_LAYOUT_DRAWS, 1))
            x, y = RELATION_DIRECTIONS[relation]
            centers[:, number] = along * (x, y) + across * (y, x)
        room = (low - centers).max(1), (high - centers).min(1)  # for the first shape, so that all are inside
        fits = (room[0] <= room[1]).all(1)
        if len(relations) == 2:  # the other two must not be beside or above each other: the corner is clear
            apart = np.abs(centers[:, 1] - centers[:, 2])
            fits &= apart.min(1) >= MIN_CORNER_RATIO * apart.max(1)
            fits &= apart.max(1) >= radii[1] + radii[2] + MIN_GAP  # their boxes do not touch
        if fits.any():
            first = fits.argmax()
            start, end = (side[first] for side in room)
            return _SceneLayout(relations, centers[first] + start + (end - start) * rng.uniform_array(0, 1, (2,)))


def _check_language(language: str) -> None:
    if language not in get_args(Language):
        raise InputError(f"language={language!r}: expected one of {', '.join(get_args(Language))}")
