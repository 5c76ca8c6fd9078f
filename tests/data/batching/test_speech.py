"""Batches of utterances with their symbols and frames."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jumok.batches.tokens import EOS
from jumok.data.batching.speech import SpeechBatcher
from jumok.errors import InputError

RNG = np.random.default_rng(11)
LENGTHS = [int(length) for length in RNG.integers(3, 90, 53)]
TEXTS = [[*RNG.integers(4, 19, 1 + length // 7).tolist(), EOS] for length in LENGTHS]
SPECTROGRAMS = [RNG.random((length, 5 + 3)).astype(np.float16) for length in LENGTHS]


def make_batcher(**settings: object) -> SpeechBatcher:
    return SpeechBatcher(TEXTS, SPECTROGRAMS, **{"max_frames": 400, "seed": 3, "n_mels": 5, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_every_utterance_occurs_once_with_its_data(fixed_shapes: bool) -> None:
    batcher = make_batcher(fixed_shapes=fixed_shapes)
    assert len(batcher) == 53
    indices = []
    for index in batcher.batches(epoch=2):
        batch = batcher.collate(index)
        assert batch.mels.shape[:2].numel() <= 400
        assert batch.count == sum(batch.mel_lengths)
        for row, number in enumerate(batch.example_indices):
            length = LENGTHS[number]
            assert batch.mel_lengths[row] == length
            assert batch.text.ids[row, : batch.text.lengths[row]].tolist() == TEXTS[number]
            spectrograms = torch.from_numpy(SPECTROGRAMS[number].astype(np.float32))
            assert torch.equal(batch.mels[row, :length], spectrograms[:, :5])
            assert batch.linear_spectrograms is not None
            assert torch.equal(batch.linear_spectrograms[row, :length], spectrograms[:, 5:])
            assert not batch.mels[row, length:].any()
        indices += batch.example_indices
    assert sorted(indices) == list(range(53))


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_frame_symbols(fixed_shapes: bool) -> None:
    frame_symbols = [np.sort(RNG.integers(0, 5, length)) for length in LENGTHS]
    batcher = make_batcher(fixed_shapes=fixed_shapes, frame_symbols=frame_symbols)
    for index in batcher.batches(epoch=0):
        batch = batcher.collate(index)
        assert batch.alignment is not None
        for row, frames in enumerate(batch.mel_lengths):
            expected = frame_symbols[batch.example_indices[row]].tolist() if row < len(batch.example_indices) else [-1]
            assert batch.alignment[row, :frames].tolist() == expected
            assert (batch.alignment[row, frames:] == -1).all()
    with pytest.raises(InputError, match="each frame"):
        make_batcher(frame_symbols=frame_symbols[1:])


def test_order_depends_on_seed_and_epoch() -> None:
    def order(epoch: int, seed: int = 3) -> list[list[int]]:
        return [batch.tolist() for batch in make_batcher(seed=seed).batches(epoch)]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=4)
    padding = [1 - sum(LENGTHS[i] for i in batch) / (len(batch) * max(LENGTHS[i] for i in batch)) for batch in order(0)]
    assert np.mean(padding) < 0.15


def test_graph_keys_recur() -> None:
    batcher = make_batcher(fixed_shapes=True)
    batches = [batcher.collate(index) for epoch in range(3) for index in batcher.batches(epoch)]
    graph_keys = {batch.graph_key for batch in batches}
    assert None not in graph_keys
    assert len({(batch.mels.shape, batch.text.ids.shape) for batch in batches}) == len(graph_keys) < len(batches) / 2
    fillers = [batch for batch in batches if len(batch.mel_lengths) > len(batch.example_indices)]
    assert fillers
    for batch in fillers:
        assert set(batch.mel_lengths[len(batch.example_indices) :]) == {1}
        assert batch.text.ids[-1, 0] == EOS
        assert not batch.mels[-1].any()
        assert batch.device_mel_lengths is not None
        assert batch.device_mel_lengths.tolist() == list(batch.mel_lengths)


def test_divide() -> None:
    batcher = make_batcher()
    index = max(batcher.batches(0), key=len)
    parts = batcher.divide(index, 3)
    assert sorted(np.concatenate(parts).tolist()) == sorted(index.tolist())
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_style_reference_has_the_same_style(fixed_shapes: bool) -> None:
    styles = ["ab"[number % 2] if number else "alone" for number in range(len(TEXTS))]
    batcher = SpeechBatcher(TEXTS, SPECTROGRAMS, max_frames=400, seed=1, fixed_shapes=fixed_shapes, style_groups=styles)
    for index in batcher.batches(0):
        batch = batcher.collate(index)
        assert batch.style_reference is not None
        references = batch.style_reference.tolist()
        assert sorted(references) == list(range(len(batch.mel_lengths)))  # each is listened to once
        for row, other in enumerate(references):
            if row >= len(index):
                assert other == row
                continue
            assert styles[index[other]] == styles[index[row]]
            is_alone = sum(styles[length] == styles[index[row]] for length in index) == 1
            assert (other == row) == is_alone
    assert make_batcher().collate([0, 1]).style_reference is None


def test_mels_only_and_utterance_over_the_budget() -> None:
    batcher = SpeechBatcher(TEXTS, SPECTROGRAMS, max_frames=10, seed=1)
    batch = batcher.collate([LENGTHS.index(max(LENGTHS))])
    assert batch.linear_spectrograms is None
    assert batch.mels.shape == (1, max(LENGTHS), 8)
    assert sum(map(len, batcher.batches(0))) == 53


def test_fingerprint() -> None:
    variants = [
        SpeechBatcher(TEXTS[:-1], SPECTROGRAMS[:-1], max_frames=400, seed=3, n_mels=5),
        SpeechBatcher([*TEXTS[:-1], [5, EOS]], SPECTROGRAMS, max_frames=400, seed=3, n_mels=5),
        SpeechBatcher(TEXTS, [*SPECTROGRAMS[:-1], SPECTROGRAMS[-1][:-1]], max_frames=400, seed=3, n_mels=5),
        make_batcher(n_mels=6),
        make_batcher(audio_names=["a"]),
        make_batcher(audio_names=["b"]),
    ]
    assert make_batcher().fingerprint == make_batcher(max_frames=100).fingerprint
    assert len({make_batcher().fingerprint, *(length.fingerprint for length in variants)}) == 7


@pytest.mark.parametrize(
    ("symbols", "spectrograms", "settings", "message"),
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
def test_invalid_arguments(symbols: list, spectrograms: list, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeechBatcher(symbols, spectrograms, **{"max_frames": 10, "seed": 1, **settings})
