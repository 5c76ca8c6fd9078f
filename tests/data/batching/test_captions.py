"""Batches of captions with their images, and augmentation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jumok import InputError
from jumok.batches.tokens import BOS, EOS, IGNORE
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
IMAGE_INDICES = [0, 0, 1, 2, 2, 2]


@pytest.fixture
def feature_inputs() -> CachedFeatureInputs:
    """Of the pictures 0 to 2, whose features are in other rows."""
    features = np.arange(5 * 6 * 3, dtype=np.float16).reshape(5, 6, 3) / 8
    return CachedFeatureInputs(features, np.array([4, 0, 2]), (2, 3))


def make_batcher(image_inputs: Any, **options: Any) -> CaptionBatcher:
    return CaptionBatcher(image_inputs, CAPTIONS, **{"max_tokens": 12, "seed": 3, **options})


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_caption_occurs_once_per_epoch_with_its_image(
    feature_inputs: CachedFeatureInputs, fixed_shapes: bool
) -> None:
    batcher = make_batcher(feature_inputs, fixed_shapes=fixed_shapes)
    orders = []
    for epoch in range(4):
        indices: list[int] = []
        for index in batcher.batches(epoch):
            batch = batcher.collate(index)
            assert batch.target.ids.numel() <= max(12, batch.target.ids.shape[1])
            for row, number in enumerate(batch.example_indices):
                ids = [caption for image_captions in CAPTIONS for caption in image_captions][number]
                assert batch.target.ids[row].tolist()[: len(ids) + 1] == [BOS, *ids]
                assert batch.labels[row].tolist()[: len(ids) + 1] == [*ids, EOS]
                assert (batch.labels[row, len(ids) + 1 :] == IGNORE).all()
                expected = feature_inputs.features[feature_inputs.feature_rows[IMAGE_INDICES[number]]]
                assert torch.equal(batch.features[row], torch.from_numpy(expected))
            assert (batch.labels[len(batch.example_indices) :] == IGNORE).all()  # what fills up
            assert batch.count == int((batch.labels != IGNORE).sum())
            assert not (fixed_shapes and batch.graph_key is None)
            indices += batch.example_indices
        assert sorted(indices) == list(range(6))
        orders.append(indices)
    assert len(set(map(tuple, orders))) > 1
    assert orders[0] == [
        n for index in make_batcher(feature_inputs, fixed_shapes=fixed_shapes).batches(0) for n in index
    ]


def test_mix_lengths(feature_inputs: CachedFeatureInputs) -> None:
    captions = [[[7] * n] for n in (1, 1, 1, 1, 9, 9, 9, 9)]
    rows = CachedFeatureInputs(feature_inputs.features, np.zeros(8, np.int64), (2, 3))
    for mixed, expected in ((False, 1), (True, 2)):
        batcher = CaptionBatcher(rows, captions, max_tokens=24, seed=3, mix_lengths=mixed, fixed_shapes=mixed)
        batches = [batcher.collate(index) for epoch in range(5) for index in batcher.batches(epoch)]
        assert max(len(set(batch.target.lengths[: len(batch.example_indices)])) for batch in batches) == expected
        if mixed:  # so many captions that they have 24 words as a rule
            assert {len(batch.target.lengths) for batch in batches} == {4}


def test_fingerprint(feature_inputs: CachedFeatureInputs) -> None:
    first = make_batcher(feature_inputs, image_names=["a", "b", "c"]).fingerprint
    assert first == make_batcher(feature_inputs, image_names=["a", "b", "c"], max_tokens=99).fingerprint
    assert first != make_batcher(feature_inputs, image_names=["a", "b", "d"]).fingerprint
    second_batch = [[[7, 8, 9]], [[10], [11, 12]], CAPTIONS[2]]
    assert (
        first
        != CaptionBatcher(feature_inputs, second_batch, max_tokens=12, seed=3, image_names=["a", "b", "c"]).fingerprint
    )
    with pytest.raises(InputError, match="no captions to train on"):
        CaptionBatcher(feature_inputs, [], max_tokens=12, seed=3)


def test_device_features_give_the_same_loss(feature_inputs: CachedFeatureInputs) -> None:
    torch.manual_seed(1)
    config = CaptionerConfig(width=5, embedding_width=7, attention_width=3)
    model = ImageCaptioner(ImageEncoder.from_name("small"), Captioner(config, 13, feature_width=3)).eval()
    plain, device = make_batcher(feature_inputs), make_batcher(DeviceFeatureInputs.from_cached(feature_inputs))
    index = plain.batches(0)[0]
    first_batch, second_batch = plain.collate(index), device.collate(index)
    assert second_batch.features.shape == (len(index),)
    assert torch.equal(model.loss(first_batch).total, model.loss(second_batch).total)
    assert torch.equal(
        model.compute_attention_maps(first_batch)[0].weights, model.compute_attention_maps(second_batch)[0].weights
    )


# -------------------------------------------------------------------------------------------------- pixels


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.manual_seed(0))


def test_augmentation_depends_on_epoch_and_example(pixels: Tensor) -> None:
    pixel_inputs = PixelInputs(
        pixels.numpy(), np.array([2, 0, 1]), ImageAugmentation(min_crop_area=0.5, horizontal_flip=True)
    )
    batcher = make_batcher(pixel_inputs)
    first, second = batcher.batches(0)[0], batcher.batches(1)[0]
    assert (second // EPOCH_STRIDE == 1).all()
    features = batcher.collate(first).features
    assert torch.equal(features, batcher.collate(first).features)
    same_examples = batcher.collate(first + EPOCH_STRIDE).features
    assert features.shape == same_examples.shape == (len(first), 3, 16, 16)
    assert not torch.equal(features, same_examples)
    # A part of a batch draws as the whole does: each picture by its own number.
    assert torch.equal(batcher.collate(first[:1]).features, features[:1])
    plain = make_batcher(PixelInputs(pixels.numpy(), np.array([2, 0, 1])))
    assert plain.collate(plain.batches(1)[0]).example_indices == tuple(plain.batches(1)[0].tolist())
    assert int(plain.batches(1)[0].max()) < EPOCH_STRIDE


def test_horizontal_flip(pixels: Tensor) -> None:
    images = pixels[:1].expand(64, -1, -1, -1)
    numbers = np.arange(64)
    assert torch.equal(ImageAugmentation()(images, numbers, CounterRng(1, 0)), images)
    augmented = ImageAugmentation(horizontal_flip=True)(images, numbers, CounterRng(1, 0))
    mirrored = [torch.equal(first_batch, pixels[0].flip(-1)) for first_batch in augmented]
    assert all(
        torch.equal(first_batch, pixels[0]) != same for first_batch, same in zip(augmented, mirrored, strict=True)
    )
    assert 20 < sum(mirrored) < 44


def test_random_crop() -> None:
    """A ramp from left to right: a part of it has fewer greys, and stays a ramp."""
    ramp = torch.arange(0, 256, 4, dtype=torch.uint8).expand(1, 3, 64, 64).repeat(50, 1, 1, 1)
    indices = ImageAugmentation(min_crop_area=0.25)(ramp, np.arange(50), CounterRng(5, 0)).int()
    assert (indices.diff(dim=-1) >= 0).all()
    spans = (indices[:, 0, 0, -1] - indices[:, 0, 0, 0]) / 252
    assert 0.4 < float(spans.min()) < 0.6
    assert float(spans.max()) > 0.85


def test_square_resize() -> None:
    pytest.importorskip("PIL")
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 30:] = (10, 20, 30)
    square = build_square_resize(12)(wide)
    assert square.shape == (3, 12, 12)
    assert square[:, 5, 0].tolist() == [0, 0, 0]
    assert square[:, 5, 11].tolist() == [10, 20, 30]
    same = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
    assert np.array_equal(build_square_resize(12)(same), same.transpose(2, 0, 1))


def test_pixels_are_cached_as_bytes(tmp_path: Path) -> None:
    cache = ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96, storage_type="uint8")
    examples = [CaptionExample(BuiltinScene(1, n), ("a",), "here") for n in range(3)]
    assert list(cache.fill(examples, build_square_resize(96), np.stack)) == examples
    features = ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96, storage_type="uint8")
    assert features.features.dtype == np.uint8
    rows = features.row_indices([examples[2].image])
    assert np.array_equal(features.features[rows][0], BuiltinScene(1, 2).decode().transpose(2, 0, 1))
    assert len(ImageFeatureCache.open(tmp_path, encoder="squashed", image_size=96)) == 0
