"""Pictures with captions as batches: every caption once an epoch, the right picture with each."""

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jumok import InputError
from jumok.batches.tokens import BOS, EOS, IGNORE
from jumok.data import counter_rng
from jumok.data.batching.captions import CaptionBatcher
from jumok.data.batching.length_batching import EPOCH_STRIDE
from jumok.data.builtin.scenes import BuiltinScene
from jumok.data.caches.image_features import ImageFeatureCache
from jumok.data.counter_rng import CounterRng
from jumok.data.image_inputs import (
    CachedFeatureInputs,
    DeviceFeatureInputs,
    ImageAugmentation,
    PixelInputs,
    build_square_resize,
)
from jumok.data.readers.captions import CaptionExample
from jumok.models.captioner import Captioner, CaptionerConfig, ImageCaptioner
from jumok.models.layers.image_encoder import ImageEncoder

CAPTIONS = [[[7, 8, 9], [10]], [[11, 12]], [[7], [8, 8, 8, 8, 8], [9, 7]]]
PICTURE = [0, 0, 1, 2, 2, 2]


@pytest.fixture
def places() -> CachedFeatureInputs:
    """Of the pictures 0 to 2, whose features are in other rows."""
    features = np.arange(5 * 6 * 3, dtype=np.float16).reshape(5, 6, 3) / 8
    return CachedFeatureInputs(features, np.array([4, 0, 2]), (2, 3))


def data(given: Any, **more: Any) -> CaptionBatcher:
    return CaptionBatcher(given, CAPTIONS, **{"max_tokens": 12, "seed": 3, **more})


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(counter_rng).failed == 0


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_caption_comes_once_an_epoch_with_its_picture(places: CachedFeatureInputs, fixed_shapes: bool) -> None:
    made = data(places, fixed_shapes=fixed_shapes)
    orders = []
    for epoch in range(4):
        seen: list[int] = []
        for index in made.batches(epoch):
            batch = made.collate(index)
            assert batch.target.ids.numel() <= max(12, batch.target.ids.shape[1])
            for row, number in enumerate(batch.example_indices):
                ids = [caption for some in CAPTIONS for caption in some][number]
                assert batch.target.ids[row].tolist()[: len(ids) + 1] == [BOS, *ids]
                assert batch.labels[row].tolist()[: len(ids) + 1] == [*ids, EOS]
                assert (batch.labels[row, len(ids) + 1 :] == IGNORE).all()
                expected = places.features[places.feature_rows[PICTURE[number]]]
                assert torch.equal(batch.features[row], torch.from_numpy(expected))
            assert (batch.labels[len(batch.example_indices) :] == IGNORE).all()  # what fills up
            assert batch.count == int((batch.labels != IGNORE).sum())
            assert not (fixed_shapes and batch.graph_key is None)
            seen += batch.example_indices
        assert sorted(seen) == list(range(6))
        orders.append(seen)
    assert len(set(map(tuple, orders))) > 1
    assert orders[0] == [n for index in data(places, fixed_shapes=fixed_shapes).batches(0) for n in index]


def test_mixed_batches_have_captions_of_any_length(places: CachedFeatureInputs) -> None:
    captions = [[[7] * n] for n in (1, 1, 1, 1, 9, 9, 9, 9)]
    rows = CachedFeatureInputs(places.features, np.zeros(8, np.int64), (2, 3))
    for mixed, expected in ((False, 1), (True, 2)):
        made = CaptionBatcher(rows, captions, max_tokens=24, seed=3, mix_lengths=mixed, fixed_shapes=mixed)
        batches = [made.collate(index) for epoch in range(5) for index in made.batches(epoch)]
        assert max(len(set(batch.target.lengths[: len(batch.example_indices)])) for batch in batches) == expected
        if mixed:  # so many captions that they have 24 words as a rule
            assert {len(batch.target.lengths) for batch in batches} == {4}


def test_another_caption_or_picture_is_other_data(places: CachedFeatureInputs) -> None:
    first = data(places, image_names=["a", "b", "c"]).fingerprint
    assert first == data(places, image_names=["a", "b", "c"], max_tokens=99).fingerprint
    assert first != data(places, image_names=["a", "b", "d"]).fingerprint
    other = [[[7, 8, 9]], [[10], [11, 12]], CAPTIONS[2]]
    assert first != CaptionBatcher(places, other, max_tokens=12, seed=3, image_names=["a", "b", "c"]).fingerprint
    with pytest.raises(InputError, match="no captions to train on"):
        CaptionBatcher(places, [], max_tokens=12, seed=3)


def test_what_is_known_by_number_is_learned_from_alike(places: CachedFeatureInputs) -> None:
    torch.manual_seed(1)
    config = CaptionerConfig(width=5, embedding_width=7, attention_width=3)
    model = ImageCaptioner(ImageEncoder.from_name("small"), Captioner(config, 13, feature_width=3)).eval()
    plain, known = data(places), data(DeviceFeatureInputs.from_cached(places))
    index = plain.batches(0)[0]
    one, other = plain.collate(index), known.collate(index)
    assert other.features.shape == (len(index),)
    assert torch.equal(model.loss(one).total, model.loss(other).total)
    assert torch.equal(model.compute_attention_maps(one)[0].weights, model.compute_attention_maps(other)[0].weights)


# -------------------------------------------------------------------------------------------------- pixels


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.manual_seed(0))


def test_pictures_look_other_at_every_epoch_and_the_same_again(pixels: Tensor) -> None:
    squares = PixelInputs(
        pixels.numpy(), np.array([2, 0, 1]), ImageAugmentation(min_crop_area=0.5, horizontal_flip=True)
    )
    made = data(squares)
    first, second = made.batches(0)[0], made.batches(1)[0]
    assert (second // EPOCH_STRIDE == 1).all()
    again = made.collate(first).features
    assert torch.equal(again, made.collate(first).features)
    same_examples = made.collate(first + EPOCH_STRIDE).features
    assert again.shape == same_examples.shape == (len(first), 3, 16, 16)
    assert not torch.equal(again, same_examples)
    # A part of a batch draws as the whole does: each picture by its own number.
    assert torch.equal(made.collate(first[:1]).features, again[:1])
    plain = data(PixelInputs(pixels.numpy(), np.array([2, 0, 1])))
    assert plain.collate(plain.batches(1)[0]).example_indices == tuple(plain.batches(1)[0].tolist())
    assert int(plain.batches(1)[0].max()) < EPOCH_STRIDE


def test_all_of_a_picture_is_the_picture_and_half_of_them_are_mirrored(pixels: Tensor) -> None:
    many = pixels[:1].expand(64, -1, -1, -1)
    numbers = np.arange(64)
    assert torch.equal(ImageAugmentation()(many, numbers, CounterRng(1, 0)), many)
    flipped = ImageAugmentation(horizontal_flip=True)(many, numbers, CounterRng(1, 0))
    mirrored = [torch.equal(one, pixels[0].flip(-1)) for one in flipped]
    assert all(torch.equal(one, pixels[0]) != same for one, same in zip(flipped, mirrored, strict=True))
    assert 20 < sum(mirrored) < 44


def test_a_part_of_a_picture_is_enlarged() -> None:
    """A ramp from left to right: a part of it has fewer greys, and stays a ramp."""
    ramp = torch.arange(0, 256, 4, dtype=torch.uint8).expand(1, 3, 64, 64).repeat(50, 1, 1, 1)
    seen = ImageAugmentation(min_crop_area=0.25)(ramp, np.arange(50), CounterRng(5, 0)).int()
    assert (seen.diff(dim=-1) >= 0).all()
    spans = (seen[:, 0, 0, -1] - seen[:, 0, 0, 0]) / 252
    assert 0.4 < float(spans.min()) < 0.6
    assert float(spans.max()) > 0.85


def test_a_picture_of_any_shape_becomes_a_square() -> None:
    pytest.importorskip("PIL")
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 30:] = (10, 20, 30)
    square = build_square_resize(12)(wide)
    assert square.shape == (3, 12, 12)
    assert square[:, 5, 0].tolist() == [0, 0, 0]
    assert square[:, 5, 11].tolist() == [10, 20, 30]
    same = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
    assert np.array_equal(build_square_resize(12)(same), same.transpose(2, 0, 1))


def test_squares_are_kept_in_bytes(tmp_path: Path) -> None:
    cache = ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96, storage_type="uint8")
    found = [CaptionExample(BuiltinScene(1, n), ("a",), "here") for n in range(3)]
    assert list(cache.fill(found, build_square_resize(96), np.stack)) == found
    again = ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96, storage_type="uint8")
    assert again.features.dtype == np.uint8
    rows = again.row_indices([found[2].image])
    assert np.array_equal(again.features[rows][0], BuiltinScene(1, 2).decode().transpose(2, 0, 1))
    assert len(ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96)) == 0
