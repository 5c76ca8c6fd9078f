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

from jumok.data.shapes import KINDS, Box, Chance, background, paint
from jumok.errors import InputError

__all__ = ["SIZE", "Box", "Language", "Scene", "scene", "scenes"]

Language = Literal["en", "ko"]

SIZE = 96  # pixels, both ways
# How far a shape reaches from its middle, in pixels: nothing between the two, so that small is small, and
# every box has the middle of a cell in a grid of 6 × 6 or finer.
SMALL, LARGE = (10.0, 11.5), (15.5, 18.5)
TILT = 0.2  # radians, either way
GAP, MARGIN = 4.0, 2.0  # pixels between two shapes, and to the edge
ASLANT = 0.3  # how far "left of" may be off the line, by the distance along it
APART = 0.65  # of the two that are not in the corner: the lesser by the greater of their distances
DRAWS = 16  # places that are tried at once
HOW_MANY = (1, 2, 2, 3, 3)
# From the first shape to the one that it is left of, and so on; y is downwards.
WAYS = {"left of": (1, 0), "right of": (-1, 0), "above": (0, 1), "below": (0, -1)}

COLOURS = {
    "red": (216, 38, 44),
    "orange": (246, 134, 20),
    "yellow": (248, 218, 44),
    "green": (40, 158, 72),
    "blue": (36, 92, 218),
    "purple": (138, 58, 178),
}
KOREAN = {
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
Word = tuple[str, Box | None]


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture ``(96, 96, 3)``, its caption, and for each word of ``caption.split()`` a box or None."""

    pixels: NDArray[np.uint8]
    caption: str
    boxes: tuple[Box | None, ...]


@dataclass(frozen=True)
class _Shape:
    """What is to be painted, and told: the words for it, of which the last two are its colour and kind."""

    words: tuple[str, ...]
    reach: float


@dataclass(frozen=True)
class _Layout:
    """Where the first shape stands as seen from each other one, and where all of them are ``(shapes, 2)``."""

    relations: tuple[str, ...]
    places: NDArray[np.float64]


def scenes(seed: int, count: int, language: Language = "en") -> Iterator[Scene]:
    """``count`` scenes, one by one; the same pictures in either language."""
    if count < 0:
        raise InputError(f"count is {count}; it is a number of scenes, 0 or more")
    _check(language)
    return (scene(seed, number, language) for number in range(count))


def scene(seed: int, number: int, language: Language = "en") -> Scene:
    """The scene of this number, which depends on no other."""
    _check(language)
    # A digest, so that neighbouring seeds have nothing in common.
    chance = Chance(int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:16], "big"))
    shapes = _shapes(chance)
    layout = _layout(chance, [shape.reach for shape in shapes])
    pixels = background(chance, SIZE)
    boxes = []
    for shape, (x, y) in zip(shapes, layout.places.tolist(), strict=True):
        *_, colour, kind = shape.words
        shade = [tone + chance.number(-10, 10) for tone in COLOURS[colour]]
        boxes.append(paint(pixels, kind, shade, (x, y), shape.reach, chance.number(-TILT, TILT)))
    pixels += chance.numbers(-3, 3, (SIZE, SIZE, 1))  # grain
    told = (_english if language == "en" else _korean)(shapes, boxes, layout.relations)
    return Scene(
        pixels=np.clip(np.rint(pixels), 0, 255).astype(np.uint8),
        caption=" ".join(word for word, _ in told),
        boxes=tuple(box for _, box in told),
    )


# ------------------------------------------------------------------------------------------------ captions


def _english(shapes: Sequence[_Shape], boxes: Sequence[Box], relations: Sequence[str]) -> list[Word]:
    """*a small red circle left of an orange star and above a green moon*"""
    told = _with_article(shapes[0], boxes[0])
    for number, relation in enumerate(relations, 1):
        told += [(word, None) for word in ["and"] * (number > 1) + relation.split()]
        told += _with_article(shapes[number], boxes[number])
    return told


def _with_article(shape: _Shape, box: Box) -> list[Word]:
    return [("an" if shape.words[0] == "orange" else "a", None), *((word, box) for word in shape.words)]


def _korean(shapes: Sequence[_Shape], boxes: Sequence[Box], relations: Sequence[str]) -> list[Word]:
    """*주황색 별 왼쪽에 있고 초록색 달 위에 있는 작은 빨간 동그라미*"""
    told: list[Word] = []
    for number, relation in enumerate(relations, 1):
        told += [(KOREAN[word], boxes[number]) for word in shapes[number].words]
        told += [(KOREAN[relation], None), ("있고" if number < len(relations) else "있는", None)]
    return told + [(KOREAN[word], boxes[0]) for word in shapes[0].words]


# --------------------------------------------------------------------------------------------------- scenes


def _shapes(chance: Chance) -> list[_Shape]:
    wanted = chance.pick(HOW_MANY)
    looks: dict[tuple[str, str], _Shape] = {}
    while len(looks) < wanted:
        look = (chance.pick(tuple(COLOURS)), chance.pick(tuple(KINDS)))
        small = chance.chance(0.5)
        reach = chance.number(*(SMALL if small else LARGE))
        looks[look] = _Shape(("small", *look) if small else look, reach)
    return list(looks.values())


def _layout(chance: Chance, reaches: Sequence[float]) -> _Layout:
    """Places that leave no doubt what stands where, the first that chance finds."""
    if len(reaches) == 1:
        relations: tuple[str, ...] = ()
    elif len(reaches) == 2:
        relations = (chance.pick(("left of", "above")),)
    else:
        relations = (chance.pick(("left of", "right of")), chance.pick(("above", "below")))
    radii = np.asarray(reaches) * 1.1  # with corners
    low, high = (radii + MARGIN)[:, None], (SIZE - MARGIN - radii)[:, None]
    while True:
        places = np.zeros((DRAWS, len(reaches), 2))  # as seen from the first, so far
        for number, relation in enumerate(relations, 1):
            far = (radii[0] + radii[number] + GAP, SIZE - 2 * MARGIN - radii[0] - radii[number])
            along = chance.numbers(*far, (DRAWS, 1))
            off = along * chance.numbers(-ASLANT, ASLANT, (DRAWS, 1))
            x, y = WAYS[relation]
            places[:, number] = along * (x, y) + off * (y, x)
        room = (low - places).max(1), (high - places).min(1)  # for the first, so that all are in the picture
        fits = (room[0] <= room[1]).all(1)
        if len(relations) == 2:  # the two others neither beside nor below each other: who is in the corner?
            apart = np.abs(places[:, 1] - places[:, 2])
            fits &= apart.min(1) >= APART * apart.max(1)
            fits &= apart.max(1) >= radii[1] + radii[2] + GAP  # not even their boxes meet
        if fits.any():
            first = fits.argmax()
            start, end = (side[first] for side in room)
            return _Layout(relations, places[first] + start + (end - start) * chance.numbers(0, 1, (2,)))


def _check(language: str) -> None:
    if language not in get_args(Language):
        raise InputError(f"language={language!r} came; expected one of {', '.join(get_args(Language))}")
