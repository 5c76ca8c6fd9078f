"""Utterances as batches: all come once an epoch, with their own symbols and frames."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch

from jumok.batches.tokens import EOS
from jumok.data.batching import speech as module
from jumok.data.batching.speech import SpeechBatcher
from jumok.errors import InputError

chance = np.random.default_rng(11)
LENGTHS = [int(one) for one in chance.integers(3, 90, 53)]
TEXTS = [[*chance.integers(4, 19, 1 + length // 7).tolist(), EOS] for length in LENGTHS]
SPECTRA = [chance.random((length, 5 + 3)).astype(np.float16) for length in LENGTHS]


def data(**settings: object) -> SpeechBatcher:
    return SpeechBatcher(TEXTS, SPECTRA, **{"max_frames": 400, "seed": 3, "n_mels": 5, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_utterance_comes_once_with_what_is_its_own(fixed_shapes: bool) -> None:
    utterances = data(fixed_shapes=fixed_shapes)
    assert len(utterances) == 53
    seen = []
    for index in utterances.batches(epoch=2):
        batch = utterances.collate(index)
        assert batch.mels.shape[:2].numel() <= 400
        assert batch.count == sum(batch.mel_lengths)
        for row, number in enumerate(batch.example_indices):
            length = LENGTHS[number]
            assert batch.mel_lengths[row] == length
            assert batch.text.ids[row, : batch.text.lengths[row]].tolist() == TEXTS[number]
            spectra = torch.from_numpy(SPECTRA[number].astype(np.float32))
            assert torch.equal(batch.mels[row, :length], spectra[:, :5])
            assert batch.linear_spectrograms is not None
            assert torch.equal(batch.linear_spectrograms[row, :length], spectra[:, 5:])
            assert not batch.mels[row, length:].any()
        seen += batch.example_indices
    assert sorted(seen) == list(range(53))


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_places_lie_beside_frames(fixed_shapes: bool) -> None:
    places = [np.sort(chance.integers(0, 5, length)) for length in LENGTHS]
    utterances = data(fixed_shapes=fixed_shapes, frame_symbols=places)
    for index in utterances.batches(epoch=0):
        batch = utterances.collate(index)
        assert batch.alignment is not None
        for row, frames in enumerate(batch.mel_lengths):
            known = places[batch.example_indices[row]].tolist() if row < len(batch.example_indices) else [-1]
            assert batch.alignment[row, :frames].tolist() == known
            assert (batch.alignment[row, frames:] == -1).all()
    with pytest.raises(InputError, match="each frame"):
        data(frame_symbols=places[1:])


def test_the_order_is_one_of_seed_and_epoch() -> None:
    def order(epoch: int, seed: int = 3) -> list[list[int]]:
        return [batch.tolist() for batch in data(seed=seed).batches(epoch)]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=4)
    padding = [1 - sum(LENGTHS[i] for i in batch) / (len(batch) * max(LENGTHS[i] for i in batch)) for batch in order(0)]
    assert np.mean(padding) < 0.15


def test_batches_that_are_alike_have_few_forms() -> None:
    utterances = data(fixed_shapes=True)
    batches = [utterances.collate(index) for epoch in range(3) for index in utterances.batches(epoch)]
    forms = {batch.graph_key for batch in batches}
    assert None not in forms
    assert len({(batch.mels.shape, batch.text.ids.shape) for batch in batches}) == len(forms) < len(batches) / 2
    fillers = [batch for batch in batches if len(batch.mel_lengths) > len(batch.example_indices)]
    assert fillers
    for batch in fillers:
        assert set(batch.mel_lengths[len(batch.example_indices) :]) == {1}
        assert batch.text.ids[-1, 0] == EOS
        assert not batch.mels[-1].any()
        assert batch.device_mel_lengths is not None
        assert batch.device_mel_lengths.tolist() == list(batch.mel_lengths)


def test_parts_of_a_batch_are_the_batch() -> None:
    utterances = data()
    index = max(utterances.batches(0), key=len)
    parts = utterances.divide(index, 3)
    assert sorted(np.concatenate(parts).tolist()) == sorted(index.tolist())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_a_style_comes_from_another_that_is_spoken_alike(fixed_shapes: bool) -> None:
    manners = ["ab"[number % 2] if number else "alone" for number in range(len(TEXTS))]
    utterances = SpeechBatcher(TEXTS, SPECTRA, max_frames=400, seed=1, fixed_shapes=fixed_shapes, style_groups=manners)
    for index in utterances.batches(0):
        batch = utterances.collate(index)
        assert batch.style_reference is not None
        there = batch.style_reference.tolist()
        assert sorted(there) == list(range(len(batch.mel_lengths)))  # each is listened to once
        for row, other in enumerate(there):
            if row >= len(index):
                assert other == row
                continue
            assert manners[index[other]] == manners[index[row]]
            lonely = sum(manners[one] == manners[index[row]] for one in index) == 1
            assert (other == row) == lonely
    assert data().collate([0, 1]).style_reference is None


def test_mels_alone_and_one_that_is_longer_than_the_budget() -> None:
    utterances = SpeechBatcher(TEXTS, SPECTRA, max_frames=10, seed=1)
    batch = utterances.collate([LENGTHS.index(max(LENGTHS))])
    assert batch.linear_spectrograms is None
    assert batch.mels.shape == (1, max(LENGTHS), 8)
    assert sum(map(len, utterances.batches(0))) == 53


def test_the_fingerprint_tells_data_apart() -> None:
    others = [
        SpeechBatcher(TEXTS[:-1], SPECTRA[:-1], max_frames=400, seed=3, n_mels=5),
        SpeechBatcher([*TEXTS[:-1], [5, EOS]], SPECTRA, max_frames=400, seed=3, n_mels=5),
        SpeechBatcher(TEXTS, [*SPECTRA[:-1], SPECTRA[-1][:-1]], max_frames=400, seed=3, n_mels=5),
        data(n_mels=6),
        data(audio_names=["a"]),
        data(audio_names=["b"]),
    ]
    assert data().fingerprint == data(max_frames=100).fingerprint
    assert len({data().fingerprint, *(one.fingerprint for one in others)}) == 7


@pytest.mark.parametrize(
    ("symbols", "spectra", "settings", "message"),
    [
        ([], [], {}, "no utterances to train on"),
        ([[3]], [], {}, "1 texts and 0 spectrograms"),
        ([[3], []], [np.zeros((2, 5))] * 2, {}, "utterance 1 has 0 symbols"),
        ([[3], [3]], [np.zeros((2, 5)), np.zeros((2, 4))], {}, r"utterance 1 .* expected .* \(frames, 5\)"),
        ([[3]], [np.zeros((0, 5))], {}, "utterance 0"),
        ([[3]], [np.zeros((2, 5))], {"n_mels": 6}, "n_mels=6"),
        ([[3]], [np.zeros((2, 5))], {"max_frames": 0}, "max_frames=0"),
        ([[3]], [np.zeros((2, 5))], {"style_groups": []}, "1 texts and 0 style_groups"),
    ],
)
def test_what_does_not_fit(symbols: list, spectra: list, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeechBatcher(symbols, spectra, **{"max_frames": 10, "seed": 1, **settings})


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0
