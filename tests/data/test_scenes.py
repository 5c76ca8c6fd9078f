"""The built-in pictures: what a caption says is read off the pixels and boxes again, by other means."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest

from jumok.data.builtin.scenes import COLORS, IMAGE_SIZE, KOREAN_WORDS, ShapeScene, draw_scene, draw_scenes
from jumok.data.builtin.shapes import SHAPE_DISTANCES, Box, PortableGenerator, draw_background, paint_shape
from jumok.errors import InputError

MADE = list(draw_scenes(seed=11, count=97))


def told(one: ShapeScene) -> list[tuple[str, Box]]:
    """The shapes in the order of the caption: all words for each, and its box."""
    found: dict[Box, list[str]] = {}
    for word, box in zip(one.caption.split(), one.boxes, strict=True):
        if box is not None:
            found.setdefault(box, []).append(word)
    return [(" ".join(words), box) for box, words in found.items()]


def relation(one: Box, other: Box) -> str | None:
    """Of the first box to the second, if one can say it in a word."""
    x, y = (((other[i] + other[i + 2]) - (one[i] + one[i + 2])) / 2 for i in (0, 1))
    if abs(y) < 0.45 * abs(x):
        return "left of" if x > 0 else "right of"
    if abs(x) < 0.45 * abs(y):
        return "above" if y > 0 else "below"
    return None


def test_a_caption_follows_from_its_boxes() -> None:
    """Shapes in any order, and where they are: that decides the sentence."""
    for one in MADE:
        shapes = told(one)
        named = {box: f"{'an' if name.startswith('orange') else 'a'} {name}" for name, box in shapes}
        boxes = sorted(named)
        sentences = []
        if len(boxes) == 1:
            sentences = [named[boxes[0]]]
        for first, *others in itertools.permutations(boxes):
            said = [relation(first, box) for box in others]
            parts = [f"{how} {named[box]}" for how, box in zip(said, others, strict=True)]
            if said in (["left of"], ["above"]) or (
                len(said) == 2 and said[0] in ("left of", "right of") and said[1] in ("above", "below")
            ):
                sentences.append(f"{named[first]} {' and '.join(parts)}")
        assert sentences == [one.caption]


def test_a_box_holds_the_colour_that_its_words_say() -> None:
    for one in MADE:
        for name, (left, top, right, bottom) in told(one):
            inside = one.pixels[top:bottom, left:right].reshape(-1, 3).astype(float)
            near = {colour: (np.abs(inside - tones).max(1) < 42).mean() for colour, tones in COLORS.items()}
            assert max(near, key=lambda colour: near[colour]) == name.split()[-2]
            assert near[name.split()[-2]] > 0.25  # a star fills little of its box


def test_small_is_small_and_fits_a_cell() -> None:
    sides: dict[tuple[str, bool], set[int]] = {}
    for one in MADE:
        for name, (left, top, right, bottom) in told(one):
            assert 0 <= left < right <= IMAGE_SIZE
            assert 0 <= top < bottom <= IMAGE_SIZE
            assert min(right - left, bottom - top) >= IMAGE_SIZE / 6  # it holds the middle of a cell of 6 × 6
            look = name.split()[-1], name.startswith("small")
            sides.setdefault(look, set()).add(max(right - left, bottom - top))
    for kind in SHAPE_DISTANCES:
        assert max(sides[kind, True]) + 2 < min(sides[kind, False])


def test_boxes_of_one_scene_are_apart_and_look_different() -> None:
    for one in MADE:
        shapes = told(one)
        looks = [tuple(name.split()[-2:]) for name, _ in shapes]
        assert len(set(looks)) == len(looks)
        for (_, a), (_, b) in itertools.combinations(shapes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_everything_comes_up() -> None:
    words = {word for one in MADE for word in one.caption.split()}
    assert words >= {*SHAPE_DISTANCES, *COLORS}
    others = {"a", "an", "and", "small", "left", "right", "of", "above", "below"}
    assert words - {*SHAPE_DISTANCES, *COLORS} == others
    assert {len(told(one)) for one in MADE} == {1, 2, 3}
    assert len({one.caption for one in MADE}) > 80


def test_korean_tells_the_same_pictures() -> None:
    for one, other in zip(MADE, draw_scenes(11, 97, "ko"), strict=True):
        assert (one.pixels == other.pixels).all()
        words = other.caption.split()
        assert len(words) == len(other.boxes)
        first, *others = told(one)
        names = [" ".join(KOREAN_WORDS[word] for word in name.split()) for name, _ in (*others, first)]
        assert [name for name, _ in told(other)] == names
        assert words[-1] in {KOREAN_WORDS[kind] for kind in SHAPE_DISTANCES}
        assert words.count("있는") == (len(names) > 1)
        assert words.count("있고") == (len(names) > 2)


def test_a_scene_depends_on_its_seed_and_number_only() -> None:
    assert (draw_scene(11, 23).pixels == MADE[23].pixels).all()
    assert (draw_scene(12, 23).pixels != MADE[23].pixels).any()
    assert (draw_scene(112, 3).pixels != draw_scene(11, 23).pixels).any()
    assert MADE[0].pixels.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert MADE[0].pixels.dtype == np.uint8


def test_the_drawn_numbers_stay_what_they_are() -> None:
    captions = "\n".join(one.caption for one in MADE)
    assert hashlib.sha256(captions.encode()).hexdigest()[:16] == "a0d08e471e2fb0eb"


@pytest.mark.parametrize(
    ("kind", "area", "middle"),  # the last of its mass, how far down
    [("circle", math.pi * 0.93**2, 0), ("square", 1.6**2, 0), ("triangle", 1.8**2 / math.sqrt(3), 0.22)],
)
def test_painted_areas(kind: str, area: float, middle: float) -> None:
    """Smooth edges cover what the shape covers, wherever it lies between pixels; less light comes below."""
    area *= 1 - 0.07 * middle
    for at, tilt in (((40.0, 40.0), 0.0), ((41.37, 39.61), 0.17)):
        pixels = np.zeros((83, 79, 3))
        left, top, right, bottom = paint_shape(pixels, kind, (100, 100, 100), at, 29, tilt)
        assert pixels.sum() / 300 == pytest.approx(area * 29**2, rel=0.01)
        rows, columns = np.nonzero(pixels[:, :, 0] > 56)  # half, where the light is brightest
        assert (left, top) == pytest.approx((columns.min(), rows.min()), abs=1)
        assert (right, bottom) == pytest.approx((columns.max() + 1, rows.max() + 1), abs=1)
        assert ((pixels > 20) & (pixels < 40)).any()


def test_a_ground_is_dull() -> None:
    """Nobody takes it for one of the colours."""
    for number in range(31):
        ground = draw_background(PortableGenerator(number), 47)
        assert ground.shape == (47, 47, 3)
        assert np.ptp(ground, axis=2).max() <= 20
        assert np.ptp(ground, axis=(0, 1)).max() <= 28


def test_what_cannot_be_drawn() -> None:
    assert list(draw_scenes(1, 0)) == []
    with pytest.raises(InputError, match="count=-1"):
        draw_scenes(1, -1)
    with pytest.raises(InputError, match="language='de'"):
        draw_scenes(1, 1, "de")  # type: ignore[arg-type]
