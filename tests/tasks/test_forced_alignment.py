"""Forced alignment of symbols to the frames of recordings."""

import numpy as np
import pytest
import torch

from jumok.batches.tokens import EOS
from jumok.tasks.speak import forced_alignment

pytestmark = pytest.mark.long


CPU = torch.device("cpu")


def make_recordings(number: int, seed: int) -> tuple[list[list[int]], list[np.ndarray], list[np.ndarray]]:
    """Recordings of texts of eight symbols, each with its own spectrum for 2 to 12 frames, after silence.

    There are two voices with different spectra and loudness. Returns texts, spectrograms and alignments.
    """
    rng = np.random.default_rng(seed)
    spectra = rng.uniform(0.3, 0.8, (12, 30))
    voices = [rng.normal(0.0, 0.25, 30), rng.normal(-0.3, 0.25, 30)]
    spectra[EOS] = 0.0
    texts, mels, alignments = [], [], []
    for row in range(number):
        text = [*np.concatenate([rng.permutation(8) + 4 for _ in range(2)]).tolist(), EOS]
        durations = rng.integers(2, 13, len(text))
        num_silent = rng.integers(1, 9)
        mel = np.concatenate([np.zeros((num_silent, 30)), np.repeat(spectra[text], durations, 0)]) + voices[row % 2]
        texts.append(text)
        mels.append((mel + rng.normal(0, 0.04, mel.shape)).astype(np.float32))
        alignments.append(np.concatenate([np.zeros(num_silent, int), np.repeat(np.arange(len(text)), durations)]))
    return texts, mels, alignments


def test_symbols_are_aligned_to_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, mels, expected = make_recordings(30, seed=2)
    monkeypatch.setattr(forced_alignment, "MAX_TRAINING_RECORDINGS", 20)
    alignments = forced_alignment.align_recordings(texts, mels, seed=1, device=CPU, num_iterations=6)
    uniform = [forced_alignment._align_uniformly(len(mel), len(text)) for text, mel in zip(texts, mels, strict=True)]

    def compute_accuracy(alignments: list[np.ndarray]) -> float:
        return float(np.mean(np.concatenate(alignments) == np.concatenate(expected)))

    assert compute_accuracy(uniform) < 0.6
    assert compute_accuracy(alignments) > 0.95
    for text, mel, alignment in zip(texts, mels, alignments, strict=True):
        assert len(alignment) == len(mel)
        assert alignment[-1] == len(text) - 1
        assert set(np.diff(alignment)) <= {0, 1}


def test_alignment_depends_on_its_seed_only() -> None:
    texts, mels, _ = make_recordings(6, seed=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (
        forced_alignment.align_recordings(texts, mels, seed=4, device=CPU, num_iterations=2) for _ in range(2)
    )
    assert all(map(np.array_equal, first, second))
    assert torch.equal(torch.rand(3), expected)


def test_more_symbols_than_frames() -> None:
    texts, mels, _ = make_recordings(6, seed=3)
    texts[2], mels[2] = [4, 5, 6, EOS], mels[2][:4]
    texts[3], mels[3] = [4, 5, 6, 7, 8, EOS], mels[3][:3]
    texts[4], mels[4] = [EOS], mels[4][:1]
    alignments = forced_alignment.align_recordings(texts, mels, seed=4, device=CPU, num_iterations=2)
    assert [alignment.tolist() for alignment in alignments[2:5]] == [[0, 1, 2, 3], [0, 2, 4], [0]]
