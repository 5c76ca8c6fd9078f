"""Built-in scenes: captions agree with the pixels and the boxes."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest

from jumok.data.builtin.scenes import COLORS, IMAGE_SIZE, KOREAN_WORDS, ShapeScene, draw_scene, draw_scenes
from jumok.data.builtin.shapes import SHAPE_DISTANCES, Box, PortableGenerator, draw_background, paint_shape
from jumok.errors import InputError

SCENES = list(draw_scenes(seed=11, count=97))


def list_shapes(scene: ShapeScene) -> list[tuple[str, Box]]:
    """The words and the box of each shape, in the order of the caption."""
    words: dict[Box, list[str]] = {}
    for word, box in zip(scene.caption.split(), scene.boxes, strict=True):
        if box is not None:
            words.setdefault(box, []).append(word)
    return [(" ".join(shape_words), box) for box, shape_words in words.items()]


def find_relation(first: Box, second: Box) -> str | None:
    """The relation of the first box to the second; None if it is not clear."""
    x, y = (((second[i] + second[i + 2]) - (first[i] + first[i + 2])) / 2 for i in (0, 1))
    if abs(y) < 0.45 * abs(x):
        return "left of" if x > 0 else "right of"
    if abs(x) < 0.45 * abs(y):
        return "above" if y > 0 else "below"
    return None


def test_caption_follows_from_the_boxes() -> None:
    """Of all orders of the shapes, one gives a valid caption."""
    for scene in SCENES:
        shapes = list_shapes(scene)
        named = {box: f"{'an' if name.startswith('orange') else 'a'} {name}" for name, box in shapes}
        boxes = sorted(named)
        captions = [named[boxes[0]]] if len(boxes) == 1 else []
        for first, *others in itertools.permutations(boxes):
            relations = [find_relation(first, box) for box in others]
            parts = [f"{relation} {named[box]}" for relation, box in zip(relations, others, strict=True)]
            if relations in (["left of"], ["above"]) or (
                len(relations) == 2 and relations[0] in ("left of", "right of") and relations[1] in ("above", "below")
            ):
                captions.append(f"{named[first]} {' and '.join(parts)}")
        assert captions == [scene.caption]


def test_a_box_contains_the_color_of_its_words() -> None:
    for scene in SCENES:
        for name, (left, top, right, bottom) in list_shapes(scene):
            inside = scene.pixels[top:bottom, left:right].reshape(-1, 3).astype(float)
            near = {color: (np.abs(inside - tones).max(1) < 42).mean() for color, tones in COLORS.items()}
            assert max(near, key=near.__getitem__) == name.split()[-2]
            assert near[name.split()[-2]] > 0.25  # a star fills little of its box


def test_sizes_are_distinct_and_fit_a_cell() -> None:
    sides: dict[tuple[str, bool], set[int]] = {}
    for scene in SCENES:
        for name, (left, top, right, bottom) in list_shapes(scene):
            assert 0 <= left < right <= IMAGE_SIZE
            assert 0 <= top < bottom <= IMAGE_SIZE
            assert min(right - left, bottom - top) >= IMAGE_SIZE / 6  # it contains the center of a cell of a 6 × 6 grid
            sides.setdefault((name.split()[-1], name.startswith("small")), set()).add(max(right - left, bottom - top))
    for kind in SHAPE_DISTANCES:
        assert max(sides[kind, True]) + 2 < min(sides[kind, False])


def test_shapes_of_a_scene_are_separate_and_different() -> None:
    for scene in SCENES:
        shapes = list_shapes(scene)
        looks = [tuple(name.split()[-2:]) for name, _ in shapes]
        assert len(set(looks)) == len(looks)
        for (_, a), (_, b) in itertools.combinations(shapes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_every_word_occurs() -> None:
    words = {word for scene in SCENES for word in scene.caption.split()}
    assert words >= {*SHAPE_DISTANCES, *COLORS}
    others = {"a", "an", "and", "small", "left", "right", "of", "above", "below"}
    assert words - {*SHAPE_DISTANCES, *COLORS} == others
    assert {len(list_shapes(scene)) for scene in SCENES} == {1, 2, 3}
    assert len({scene.caption for scene in SCENES}) > 80


def test_korean_captions_describe_the_same_images() -> None:
    for scene, korean in zip(SCENES, draw_scenes(11, 97, "ko"), strict=True):
        assert (scene.pixels == korean.pixels).all()
        words = korean.caption.split()
        assert len(words) == len(korean.boxes)
        first, *others = list_shapes(scene)
        names = [" ".join(KOREAN_WORDS[word] for word in name.split()) for name, _ in (*others, first)]
        assert [name for name, _ in list_shapes(korean)] == names
        assert words[-1] in {KOREAN_WORDS[kind] for kind in SHAPE_DISTANCES}
        assert words.count("있는") == (len(names) > 1)
        assert words.count("있고") == (len(names) > 2)


def test_a_scene_depends_only_on_seed_and_index() -> None:
    assert (draw_scene(11, 23).pixels == SCENES[23].pixels).all()
    assert (draw_scene(12, 23).pixels != SCENES[23].pixels).any()
    assert (draw_scene(112, 3).pixels != draw_scene(11, 23).pixels).any()
    assert SCENES[0].pixels.shape == (IMAGE_SIZE, IMAGE_SIZE, 3)
    assert SCENES[0].pixels.dtype == np.uint8


def test_scenes_are_unchanged() -> None:
    captions = "\n".join(scene.caption for scene in SCENES)
    assert hashlib.sha256(captions.encode()).hexdigest()[:16] == "a0d08e471e2fb0eb"


@pytest.mark.parametrize(
    ("kind", "area", "middle"),  # of the mass, downwards
    [("circle", math.pi * 0.93**2, 0), ("square", 1.6**2, 0), ("triangle", 1.8**2 / math.sqrt(3), 0.22)],
)
def test_painted_areas(kind: str, area: float, middle: float) -> None:
    """The area does not depend on the position between pixels. The lower part is darker."""
    area *= 1 - 0.07 * middle
    for center, tilt in (((40.0, 40.0), 0.0), ((41.37, 39.61), 0.17)):
        pixels = np.zeros((83, 79, 3))
        left, top, right, bottom = paint_shape(pixels, kind, (100, 100, 100), center, 29, tilt)
        assert pixels.sum() / 300 == pytest.approx(area * 29**2, rel=0.01)
        rows, columns = np.nonzero(pixels[:, :, 0] > 56)  # half of the brightest
        assert (left, top) == pytest.approx((columns.min(), rows.min()), abs=1)
        assert (right, bottom) == pytest.approx((columns.max() + 1, rows.max() + 1), abs=1)
        assert ((pixels > 20) & (pixels < 40)).any()


def test_backgrounds_are_nearly_gray() -> None:
    for seed in range(31):
        background = draw_background(PortableGenerator(seed), 47)
        assert background.shape == (47, 47, 3)
        assert np.ptp(background, axis=2).max() <= 20
        assert np.ptp(background, axis=(0, 1)).max() <= 28


def test_invalid_arguments_are_errors() -> None:
    assert list(draw_scenes(1, 0)) == []
    with pytest.raises(InputError, match="count=-1"):
        draw_scenes(1, -1)
    with pytest.raises(InputError, match="language='de'"):
        draw_scenes(1, 1, "de")  # type: ignore[arg-type]
