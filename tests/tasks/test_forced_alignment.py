"""Where symbols are in recordings: found again, though nobody told."""

import doctest

import numpy as np
import pytest
import torch

from jumok.batches.tokens import EOS
from jumok.tasks.speak import forced_alignment

CPU = torch.device("cpu")


def recorded(number: int, seed: int) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """Texts of eight symbols with a spectrum each, which last from 2 to 12 frames, after some silence; of two
    voices, which sound unlike, and of which one is softer.
    """
    chance = np.random.default_rng(seed)
    spectra = chance.uniform(0.3, 0.8, (12, 30))
    voices = [chance.normal(0.0, 0.25, 30), chance.normal(-0.3, 0.25, 30)]
    spectra[EOS] = 0.0
    texts, mels, places = [], [], []
    for row in range(number):
        text = [*np.concatenate([chance.permutation(8) + 4 for _ in range(2)]).tolist(), EOS]
        lasts = chance.integers(2, 13, len(text))
        silence = chance.integers(1, 9)
        sound = np.concatenate([np.zeros((silence, 30)), np.repeat(spectra[text], lasts, 0)])
        sound = sound + voices[row % 2]
        texts.append(text)
        mels.append((sound + chance.normal(0, 0.04, sound.shape)).astype(np.float32))
        places.append(np.concatenate([np.zeros(silence, int), np.repeat(np.arange(len(text)), lasts)]))
    return texts, mels, places


def test_symbols_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, mels, true = recorded(60, seed=2)
    monkeypatch.setattr(forced_alignment, "MAX_TRAINING_RECORDINGS", 40)
    found = forced_alignment.align_recordings(texts, mels, seed=1, device=CPU)
    evenly = [forced_alignment._align_uniformly(len(mel), len(text)) for text, mel in zip(texts, mels, strict=True)]

    def right(places: list[np.ndarray]) -> float:
        return float(np.mean(np.concatenate(places) == np.concatenate(true)))

    assert right(evenly) < 0.6
    assert right(found) > 0.95
    for text, mel, one in zip(texts, mels, found, strict=True):
        assert len(one) == len(mel)
        assert one[-1] == len(text) - 1
        assert set(np.diff(one)) <= {0, 1}


def test_the_same_seed_finds_the_same_and_leaves_chance_alone() -> None:
    texts, mels, _ = recorded(6, seed=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, again = (
        forced_alignment.align_recordings(texts, mels, seed=4, device=CPU, num_iterations=2) for _ in range(2)
    )
    assert all(map(np.array_equal, one, again))
    assert torch.equal(torch.rand(3), expected)


def test_more_symbols_than_frames_are_no_reason_to_fail() -> None:
    texts, mels, _ = recorded(6, seed=3)
    texts[2], mels[2] = [4, 5, 6, EOS], mels[2][:4]
    texts[3], mels[3] = [4, 5, 6, 7, 8, EOS], mels[3][:3]
    texts[4], mels[4] = [EOS], mels[4][:1]
    found = forced_alignment.align_recordings(texts, mels, seed=4, device=CPU, num_iterations=2)
    assert [one.tolist() for one in found[2:5]] == [[0, 1, 2, 3], [0, 2, 4], [0]]


def test_the_docstrings_are_right() -> None:
    found = doctest.testmod(forced_alignment)
    assert found.attempted
    assert found.failed == 0
