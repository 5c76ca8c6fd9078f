"""Forced alignment: which symbol of its text each frame of a recording belongs to.

The alignment is learned from many recordings, without labels. A symbol sounds similar in all of them. So the model of
how each symbol sounds, given its neighbours, and the alignment are estimated in turns: a hidden Markov model with one
state per symbol, by Viterbi training::

    frames      ▁ ▁ ▃ ▅ ▇ ▇ ▆ ▅ ▃ ▂ ▁
    at first    · · · d d d o o g g </s>       all symbols have the same duration
                        ↓  ↑                   fit the acoustic model; find the best path
    at the end  · · d o o o o g g g </s>

There may be silence (·) before the first symbol. Its frames count as the first symbol.

Shapes: ``T`` frames and ``L`` symbols of a recording, ``L + 1`` states, ``D`` features of a frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.tokens import PAD, Tokens
from jumok.data.readers.text_files import import_optional
from jumok.metrics.cepstral_distortion import mel_cepstra
from jumok.models.layers.module_list import build_module_list

FrameSymbols = NDArray[np.int64]  # (T,)
NUM_ITERATIONS = 12
MAX_TRAINING_RECORDINGS = 2000  # several hours of speech; limits memory and time
FIRST_ITERATION_STEPS, STEPS_PER_ITERATION = 150, 60  # of the optimizer
BATCH_SIZE, LEARNING_RATE = 64, 2e-3
HIDDEN_SIZE, NUM_CONVOLUTIONS, DROPOUT = 128, 2, 0.1
MIN_LOG_STD, MAX_LOG_STD = -2.0, 1.0  # of the features of a symbol


def align_recordings(
    symbol_ids: Sequence[Sequence[int]],
    mels: Sequence[NDArray[Any]],
    *,
    seed: int,
    device: torch.device,
    num_iterations: int = NUM_ITERATIONS,
) -> list[FrameSymbols]:
    """For each recording, the index of the symbol of each frame, in increasing order.

    ``mels`` are ``(T, M)``. If a recording has no more frames than symbols, all symbols have the same duration.
    """
    states = [[PAD, *text] for text in symbol_ids]
    sample = np.sort(np.random.default_rng([seed, 1]).permutation(len(states))[:MAX_TRAINING_RECORDINGS])
    frames = np.concatenate([_extract_features(mels[index]) for index in sample])
    mean, std = frames.mean(0), frames.std(0) + 1e-6

    def normalize(mel: NDArray[Any]) -> NDArray[np.float32]:
        normalized: NDArray[np.float32] = ((_extract_features(mel) - mean) / std).astype(np.float32)
        return normalized

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        texts = [states[index] for index in sample]
        features = [normalize(mels[index]) for index in sample]
        alignments = [_align_uniformly(len(x), len(text)) for x, text in zip(features, texts, strict=True)]
        model = _SymbolAcousticModel(max(map(max, states)) + 1, features[0].shape[1]).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for iteration in range(num_iterations):
            # The context is used only after the alignment is roughly right. Otherwise the model would learn the
            # initial alignment by heart.
            model.uses_context = iteration >= num_iterations // 2
            num_steps = STEPS_PER_ITERATION if iteration else FIRST_ITERATION_STEPS
            _fit_model(model, optimizer, _pad_texts(texts), features, alignments, rng, num_steps)
            alignments = list(_find_viterbi_paths(model, texts, features))
        return [np.maximum(path - 1, 0) for path in _find_viterbi_paths(model, states, map(normalize, mels))]


def _extract_features(mel: NDArray[Any]) -> NDArray[np.float64]:
    """Cepstra, loudness, and their differences in time: ``(T, D)``."""
    cepstra = mel_cepstra(mel, range_db=1.0)
    loudness = np.mean(mel, 1, dtype=np.float64, keepdims=True)
    # Relative to the recording, because voices and their loudness differ.
    static = np.concatenate([cepstra - cepstra.mean(0), loudness - loudness.max()], 1)
    padded = np.pad(static, ((2, 2), (0, 0)), mode="edge")
    return np.concatenate([static, padded[4:] - padded[:-4] + padded[3:-1] - padded[1:-3]], 1)


def _pad_texts(texts: Sequence[Sequence[int]]) -> Tensor:
    """``(B, L)``, with silence after each text, as far as the convolutions reach."""
    return Tokens.pad(texts, max(map(len, texts)) + NUM_CONVOLUTIONS).ids


def _align_uniformly(num_frames: int, num_states: int) -> FrameSymbols:
    """The alignment with the same duration for all states.

    >>> _align_uniformly(6, 3).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    return np.arange(num_frames) * num_states // num_frames


class _SymbolAcousticModel(nn.Module):
    """The means and log standard deviations of the features of symbols, ``(B, L, D)`` each.

    They depend on the neighbours of a symbol if ``uses_context``.
    """

    uses_context = False

    def __init__(self, num_symbols: int, num_features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, HIDDEN_SIZE)
        self.convolutions: list[nn.Conv1d] = build_module_list(
            nn.Conv1d(HIDDEN_SIZE, HIDDEN_SIZE, 3, padding=1) for _ in range(NUM_CONVOLUTIONS)
        )
        self.output = nn.Linear(HIDDEN_SIZE, 2 * num_features)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(states).transpose(1, 2)
        for convolution in self.convolutions if self.uses_context else ():
            x = x + convolution(F.dropout(x, DROPOUT, self.training)).relu()
        mean, log_std = self.output(x.transpose(1, 2)).chunk(2, -1)
        return mean, log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)


@torch.enable_grad()
def _fit_model(
    model: _SymbolAcousticModel,
    optimizer: torch.optim.Optimizer,
    texts: Tensor,
    features: Sequence[NDArray[np.float32]],
    frame_symbols: Sequence[FrameSymbols],
    rng: np.random.Generator,
    num_steps: int,
) -> None:
    """Maximize the likelihood of the frames, given their alignment.

    It depends only on the count, the sum and the sum of squares of the frames of each symbol.
    """
    model.train()
    device = model.output.weight.device
    num_rows, size = len(texts), features[0].shape[1]
    counts, sums, squares = (torch.zeros(*texts.shape, n) for n in (1, size, size))
    for row, (frames, path) in enumerate(zip(features, frame_symbols, strict=True)):
        states, x = torch.from_numpy(path), torch.from_numpy(frames)
        counts[row].index_add_(0, states, torch.ones(len(x), 1))
        sums[row].index_add_(0, states, x)
        squares[row].index_add_(0, states, x.square())
    texts, counts, sums, squares = (x.to(device) for x in (texts, counts, sums, squares))
    for _ in range(num_steps):
        batch = torch.from_numpy(rng.integers(0, num_rows, min(BATCH_SIZE, num_rows))).to(device)
        mean, log_std = model(texts[batch])
        count = counts[batch]
        deviation = squares[batch] - 2 * mean * sums[batch] + count * mean.square()
        nll = 0.5 * deviation * (-2 * log_std).exp() + count * log_std
        optimizer.zero_grad()
        (nll.sum() / count.sum()).backward()
        optimizer.step()


@torch.no_grad()
def _find_viterbi_paths(
    model: _SymbolAcousticModel, states: Sequence[Sequence[int]], features: Iterable[NDArray[np.float32]]
) -> Iterator[FrameSymbols]:
    """The most likely path of states through each recording. A frame has the state of the previous one, or the next."""
    dtw = import_optional("librosa.sequence", "speech").dtw
    model.eval()
    remaining = iter(features)
    for start in range(0, len(states), BATCH_SIZE):
        texts = states[start : start + BATCH_SIZE]
        means, log_stds = (x.cpu() for x in model(_pad_texts(texts).to(model.output.weight.device)))
        # ``texts`` comes first, so that zip does not consume the first features of the next batch.
        for text, mean, log_std, frames in zip(texts, means, log_stds, remaining, strict=False):
            if len(frames) < len(text):
                yield 1 + _align_uniformly(len(frames), len(text) - 1)  # without the silence
                continue
            mean, log_std, x = mean[: len(text)], log_std[: len(text)], torch.from_numpy(frames)
            precision = (-2 * log_std).exp()
            deviation = x.square() @ precision.T - 2 * x @ (mean * precision).T + (mean.square() * precision).sum(-1)
            nll = (0.5 * deviation + log_std.sum(-1)).double().numpy()  # (T, states)
            _, path = dtw(C=nll, step_sizes_sigma=np.array([[1, 0], [1, 1]]))
            yield np.ascontiguousarray(path[::-1, 1], np.int64)
