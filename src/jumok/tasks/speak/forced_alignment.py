"""Where in each recording the symbols of its text are spoken, found from many recordings together (forced
alignment).

Nobody tells. But an "s" sounds alike in all of them: so what each symbol sounds like, between those around
it, and where it is, are found in turns (a hidden Markov model of one state a symbol, by Viterbi training)::

    frames      ▁ ▁ ▃ ▅ ▇ ▇ ▆ ▅ ▃ ▂ ▁
    at first    · · · d d d o o g g </s>       all take equally long
                        ↓  ↑                   what does each sound like? where is it, then?
    in the end  · · d o o o o g g g </s>

Before the first symbol there may be silence (·): it counts to the first symbol.

Shapes: ``T`` frames and ``L`` symbols of a recording, ``L + 1`` states, ``D`` features of a frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
MAX_TRAINING_RECORDINGS = 2000  # recordings at most, so that memory and time are bounded: they are hours of speech
STEPS_PER_ITERATION, FIRST_ITERATION_STEPS, BATCH_SIZE, LEARNING_RATE = (
    60,
    150,
    64,
    2e-3,
)  # of learning in a turn, and in the first
HIDDEN_SIZE, NUM_CONVOLUTIONS, DROPOUT = 128, 2, 0.1
MIN_LOG_STD, MAX_LOG_STD = -2.0, 1.0  # logs of how far a symbol's sounds may differ


def align_recordings(
    symbol_ids: Sequence[Sequence[int]],
    mels: Sequence[NDArray[Any]],
    *,
    seed: int,
    device: torch.device,
    num_iterations: int = NUM_ITERATIONS,
) -> list[FrameSymbols]:
    """For each recording the number of the symbol that each of its frames is of, from 0 on, never falling.

    ``mels`` are ``(T, M)``. Where frames are too few, as many as symbols or less, all take equally long.
    """
    states = [[PAD, *text] for text in symbol_ids]
    some = np.sort(np.random.default_rng([seed, 1]).permutation(len(states))[:MAX_TRAINING_RECORDINGS])
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        chance = np.random.default_rng(seed)
        texts = [states[number] for number in some]
        scale = _FeatureNormalizer.from_features(_extract_features(mels[number]) for number in some)
        heard = [scale(_extract_features(mels[number])) for number in some]
        found = [_align_uniformly(len(one), len(text)) for one, text in zip(heard, texts, strict=True)]
        model = _SymbolAcousticModel(max(map(max, states)) + 1, heard[0].shape[1]).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for turn in range(num_iterations):
            # What stands around them is not asked before they are about where they belong: else the first
            # guess would be learned by heart.
            model.uses_context = turn >= num_iterations // 2
            _fit_model(
                model,
                optimizer,
                _pad_texts(texts),
                heard,
                found,
                chance,
                STEPS_PER_ITERATION if turn else FIRST_ITERATION_STEPS,
            )
            found = list(_find_viterbi_paths(model, texts, heard))
        every = (scale(_extract_features(mel)) for mel in mels)
        return [np.maximum(way - 1, 0) for way in _find_viterbi_paths(model, states, every)]


def _extract_features(mel: NDArray[Any]) -> NDArray[np.float64]:
    """``(T, D)``: the shape of the spectrum, how loud it is, and how both change."""
    shape = mel_cepstra(mel, range_db=1.0)
    loud = np.mean(mel, 1, dtype=np.float64, keepdims=True)
    now = np.concatenate([shape - shape.mean(0), loud - loud.max()], 1)  # voices differ, and loudness
    around = np.pad(now, ((2, 2), (0, 0)), mode="edge")
    return np.concatenate([now, around[4:] - around[:-4] + around[3:-1] - around[1:-3]], 1)


@dataclass(frozen=True)
class _FeatureNormalizer:
    """Brings features to a mean of 0 and a variance of 1."""

    mean: NDArray[np.float64]
    std: NDArray[np.float64]

    @classmethod
    def from_features(cls, features: Iterable[NDArray[np.float64]]) -> _FeatureNormalizer:
        together = np.concatenate(list(features))
        return cls(together.mean(0), together.std(0) + 1e-6)

    def __call__(self, features: NDArray[np.float64]) -> NDArray[np.float32]:
        return ((features - self.mean) / self.std).astype(np.float32)


def _pad_texts(texts: Sequence[Sequence[int]]) -> Tensor:
    """``(B, L)``, with silence behind each, as far as convolutions reach."""
    return Tokens.pad(texts, max(map(len, texts)) + NUM_CONVOLUTIONS).ids


def _align_uniformly(num_frames: int, num_states: int) -> FrameSymbols:
    """All states alike.

    >>> _align_uniformly(6, 3).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    return np.arange(num_frames) * num_states // num_frames


class _SymbolAcousticModel(nn.Module):
    """What symbols sound like, wherever they stand, or ``uses_context`` those around them: the means and the logs
    of deviations, ``(B, L, D)`` each.
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
        mean, spread = self.output(x.transpose(1, 2)).chunk(2, -1)
        return mean, spread.clamp(MIN_LOG_STD, MAX_LOG_STD)


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
    """What symbols sound like, if they are where they were found: the likelihood of all frames there.

    That takes of the frames of each symbol only their number, their sum and that of their squares.
    """
    model.train()
    device = model.output.weight.device
    rows, size = len(texts), features[0].shape[1]
    counts, sums, squares = (torch.zeros(*texts.shape, n) for n in (1, size, size))
    for row, (frames, path) in enumerate(zip(features, frame_symbols, strict=True)):
        at, x = torch.from_numpy(path), torch.from_numpy(frames)
        counts[row].index_add_(0, at, torch.ones(len(x), 1))
        sums[row].index_add_(0, at, x)
        squares[row].index_add_(0, at, x.square())
    texts, counts, sums, squares = (x.to(device) for x in (texts, counts, sums, squares))
    for _ in range(num_steps):
        some = torch.from_numpy(rng.integers(0, rows, min(BATCH_SIZE, rows))).to(device)
        mean, spread = model(texts[some])
        number = counts[some]
        apart = squares[some] - 2 * mean * sums[some] + number * mean.square()
        surprise = 0.5 * apart * (-2 * spread).exp() + number * spread
        optimizer.zero_grad()
        (surprise.sum() / number.sum()).backward()
        optimizer.step()


@torch.no_grad()
def _find_viterbi_paths(
    model: _SymbolAcousticModel, states: Sequence[Sequence[int]], features: Iterable[NDArray[np.float32]]
) -> Iterator[FrameSymbols]:
    """The most likely way through each recording, which stays at a state or goes on to the next."""
    dtw = import_optional("librosa.sequence", "speech").dtw
    model.eval()
    heard = iter(features)
    for begin in range(0, len(states), BATCH_SIZE):
        texts = states[begin : begin + BATCH_SIZE]
        means, spreads = (x.cpu() for x in model(_pad_texts(texts).to(model.output.weight.device)))
        # Texts end first, before frames are taken that are of the next ones.
        for text, mean, spread, frames in zip(texts, means, spreads, heard, strict=False):
            if len(frames) < len(text):
                yield 1 + _align_uniformly(len(frames), len(text) - 1)  # without the silence
                continue
            mean, spread, x = mean[: len(text)], spread[: len(text)], torch.from_numpy(frames)
            sharp = (-2 * spread).exp()
            apart = x.square() @ sharp.T - 2 * x @ (mean * sharp).T + (mean.square() * sharp).sum(-1)
            surprise = (0.5 * apart + spread.sum(-1)).double().numpy()  # (T, states)
            _, way = dtw(C=surprise, step_sizes_sigma=np.array([[1, 0], [1, 1]]))
            yield np.ascontiguousarray(way[::-1, 1], np.int64)
