"""Pictures with captions as batches: every caption once an epoch, the right picture with each."""

import doctest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jumok import InputError
from jumok.batch import BOS, EOS, IGNORE
from jumok.data import drawn
from jumok.data.captioned import Captioned
from jumok.data.described import Described
from jumok.data.drawn import Drawn
from jumok.data.features import Cache
from jumok.data.masking import EPOCH, Chance
from jumok.data.views import Augment, KnownPlaces, Places, Squares, squashed
from jumok.models.captioner import Captioner, CaptionerConfig
from jumok.models.places import Encoder, Seeing

CAPTIONS = [[[7, 8, 9], [10]], [[11, 12]], [[7], [8, 8, 8, 8, 8], [9, 7]]]
PICTURE = [0, 0, 1, 2, 2, 2]


@pytest.fixture
def places() -> Places:
    """Of the pictures 0 to 2, whose features are in other rows."""
    features = np.arange(5 * 6 * 3, dtype=np.float16).reshape(5, 6, 3) / 8
    return Places(features, np.array([4, 0, 2]), (2, 3))


def data(given: Any, **more: Any) -> Described:
    return Described(given, CAPTIONS, **{"tokens": 12, "seed": 3, **more})


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(drawn).failed == 0


@pytest.mark.parametrize("alike", [False, True])
def test_every_caption_comes_once_an_epoch_with_its_picture(places: Places, alike: bool) -> None:
    made = data(places, alike=alike)
    orders = []
    for epoch in range(4):
        seen: list[int] = []
        for index in made.batches(epoch):
            batch = made.collate(index)
            assert batch.told.ids.numel() <= max(12, batch.told.ids.shape[1])
            for row, number in enumerate(batch.index):
                ids = [caption for some in CAPTIONS for caption in some][number]
                assert batch.told.ids[row].tolist()[: len(ids) + 1] == [BOS, *ids]
                assert batch.labels[row].tolist()[: len(ids) + 1] == [*ids, EOS]
                assert (batch.labels[row, len(ids) + 1 :] == IGNORE).all()
                expected = places.features[places.rows[PICTURE[number]]]
                assert torch.equal(batch.places[row], torch.from_numpy(expected))
            assert (batch.labels[len(batch.index) :] == IGNORE).all()  # what fills up
            assert batch.count == int((batch.labels != IGNORE).sum())
            assert not (alike and batch.form is None)
            seen += batch.index
        assert sorted(seen) == list(range(6))
        orders.append(seen)
    assert len(set(map(tuple, orders))) > 1
    assert orders[0] == [n for index in data(places, alike=alike).batches(0) for n in index]


def test_mixed_batches_have_captions_of_any_length(places: Places) -> None:
    captions = [[[7] * n] for n in (1, 1, 1, 1, 9, 9, 9, 9)]
    rows = Places(places.features, np.zeros(8, np.int64), (2, 3))
    for mixed, expected in ((False, 1), (True, 2)):
        made = Described(rows, captions, tokens=24, seed=3, mixed=mixed, alike=mixed)
        batches = [made.collate(index) for epoch in range(5) for index in made.batches(epoch)]
        assert max(len(set(batch.told.lengths[: len(batch.index)])) for batch in batches) == expected
        if mixed:  # so many captions that they have 24 words as a rule
            assert {len(batch.told.lengths) for batch in batches} == {4}


def test_another_caption_or_picture_is_other_data(places: Places) -> None:
    first = data(places, names=["a", "b", "c"]).fingerprint
    assert first == data(places, names=["a", "b", "c"], tokens=99).fingerprint
    assert first != data(places, names=["a", "b", "d"]).fingerprint
    other = [[[7, 8, 9]], [[10], [11, 12]], CAPTIONS[2]]
    assert first != Described(places, other, tokens=12, seed=3, names=["a", "b", "c"]).fingerprint
    with pytest.raises(InputError, match="nothing to learn from"):
        Described(places, [], tokens=12, seed=3)


def test_what_is_known_by_number_is_learned_from_alike(places: Places) -> None:
    torch.manual_seed(1)
    config = CaptionerConfig(width=5, embedding=7, attention_width=3)
    model = Seeing(Encoder.of("small"), Captioner(config, 13, features=3)).eval()
    plain, known = data(places), data(KnownPlaces.of(places))
    index = plain.batches(0)[0]
    one, other = plain.collate(index), known.collate(index)
    assert other.places.shape == (len(index),)
    assert torch.equal(model.loss(one).total, model.loss(other).total)
    assert torch.equal(model.maps(one)[0].weights, model.maps(other)[0].weights)


# -------------------------------------------------------------------------------------------------- pixels


@pytest.fixture
def pixels() -> Tensor:
    return torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.manual_seed(0))


def test_pictures_look_other_at_every_epoch_and_the_same_again(pixels: Tensor) -> None:
    squares = Squares(pixels.numpy(), np.array([2, 0, 1]), Augment(crop=0.5, flip=True))
    made = data(squares)
    first, second = made.batches(0)[0], made.batches(1)[0]
    assert (second // EPOCH == 1).all()
    again = made.collate(first).places
    assert torch.equal(again, made.collate(first).places)
    same_examples = made.collate(first + EPOCH).places
    assert again.shape == same_examples.shape == (len(first), 3, 16, 16)
    assert not torch.equal(again, same_examples)
    # A part of a batch draws as the whole does: each picture by its own number.
    assert torch.equal(made.collate(first[:1]).places, again[:1])
    plain = data(Squares(pixels.numpy(), np.array([2, 0, 1])))
    assert plain.collate(plain.batches(1)[0]).index == tuple(plain.batches(1)[0].tolist())
    assert int(plain.batches(1)[0].max()) < EPOCH


def test_all_of_a_picture_is_the_picture_and_half_of_them_are_mirrored(pixels: Tensor) -> None:
    many = pixels[:1].expand(64, -1, -1, -1)
    numbers = np.arange(64)
    assert torch.equal(Augment()(many, numbers, Chance(1, 0)), many)
    flipped = Augment(flip=True)(many, numbers, Chance(1, 0))
    mirrored = [torch.equal(one, pixels[0].flip(-1)) for one in flipped]
    assert all(torch.equal(one, pixels[0]) != same for one, same in zip(flipped, mirrored, strict=True))
    assert 20 < sum(mirrored) < 44


def test_a_part_of_a_picture_is_enlarged() -> None:
    """A ramp from left to right: a part of it has fewer greys, and stays a ramp."""
    ramp = torch.arange(0, 256, 4, dtype=torch.uint8).expand(1, 3, 64, 64).repeat(50, 1, 1, 1)
    seen = Augment(crop=0.25)(ramp, np.arange(50), Chance(5, 0)).int()
    assert (seen.diff(dim=-1) >= 0).all()
    spans = (seen[:, 0, 0, -1] - seen[:, 0, 0, 0]) / 252
    assert 0.4 < float(spans.min()) < 0.6
    assert float(spans.max()) > 0.85


def test_a_picture_of_any_shape_becomes_a_square() -> None:
    pytest.importorskip("PIL")
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 30:] = (10, 20, 30)
    square = squashed(12)(wide)
    assert square.shape == (3, 12, 12)
    assert square[:, 5, 0].tolist() == [0, 0, 0]
    assert square[:, 5, 11].tolist() == [10, 20, 30]
    same = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
    assert np.array_equal(squashed(12)(same), same.transpose(2, 0, 1))


def test_squares_are_kept_in_bytes(tmp_path: Path) -> None:
    cache = Cache.open(tmp_path, encoder="squashed", size=96, kind="uint8")
    found = [Captioned(Drawn(1, n), ("a",), "here") for n in range(3)]
    assert list(cache.filled(found, squashed(96), np.stack)) == found
    again = Cache.open(tmp_path, encoder="squashed", size=96, kind="uint8")
    assert again.features.dtype == np.uint8
    rows = again.rows([found[2].picture])
    assert np.array_equal(again.features[rows][0], Drawn(1, 2).decode().transpose(2, 0, 1))
    assert len(Cache.open(tmp_path, encoder="squashed", size=96)) == 0
