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

from jumok.batch import PAD, Tokens
from jumok.data.files import needed
from jumok.metrics.distortion import cepstra
from jumok.models.layers import layers

__all__ = ["Places", "places"]

Places = NDArray[np.int64]  # (T,)
TURNS = 12
LEARNED_FROM = 2000  # recordings at most, so that memory and time are bounded: they are hours of speech
STEPS, FIRST_STEPS, SIZE, RATE = 60, 150, 64, 2e-3  # of learning in a turn, and in the first
WIDTH, CONVOLUTIONS, DROPOUT = 128, 2, 0.1
NARROWEST, WIDEST = -2.0, 1.0  # logs of how far a symbol's sounds may differ


def places(
    symbols: Sequence[Sequence[int]],
    mels: Sequence[NDArray[Any]],
    *,
    seed: int,
    device: torch.device,
    turns: int = TURNS,
) -> list[Places]:
    """For each recording the number of the symbol that each of its frames is of, from 0 on, never falling.

    ``mels`` are ``(T, M)``. Where frames are too few, as many as symbols or less, all take equally long.
    """
    states = [[PAD, *text] for text in symbols]
    some = np.sort(np.random.default_rng([seed, 1]).permutation(len(states))[:LEARNED_FROM])
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        chance = np.random.default_rng(seed)
        texts = [states[number] for number in some]
        scale = _Scale.of(_features(mels[number]) for number in some)
        heard = [scale(_features(mels[number])) for number in some]
        found = [_evenly(len(one), len(text)) for one, text in zip(heard, texts, strict=True)]
        model = _Sounds(max(map(max, states)) + 1, heard[0].shape[1]).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        for turn in range(turns):
            # What stands around them is not asked before they are about where they belong: else the first
            # guess would be learned by heart.
            model.between = turn >= turns // 2
            _learn(model, optimizer, _rows(texts), heard, found, chance, STEPS if turn else FIRST_STEPS)
            found = list(_ways(model, texts, heard))
        every = (scale(_features(mel)) for mel in mels)
        return [np.maximum(way - 1, 0) for way in _ways(model, states, every)]


def _features(mel: NDArray[Any]) -> NDArray[np.float64]:
    """``(T, D)``: the shape of the spectrum, how loud it is, and how both change."""
    shape = cepstra(mel, spans=1.0)
    loud = np.mean(mel, 1, dtype=np.float64, keepdims=True)
    now = np.concatenate([shape - shape.mean(0), loud - loud.max()], 1)  # voices differ, and loudness
    around = np.pad(now, ((2, 2), (0, 0)), mode="edge")
    return np.concatenate([now, around[4:] - around[:-4] + around[3:-1] - around[1:-3]], 1)


@dataclass(frozen=True)
class _Scale:
    """Brings features to a mean of 0 and a variance of 1."""

    mean: NDArray[np.float64]
    spread: NDArray[np.float64]

    @classmethod
    def of(cls, features: Iterable[NDArray[np.float64]]) -> _Scale:
        together = np.concatenate(list(features))
        return cls(together.mean(0), together.std(0) + 1e-6)

    def __call__(self, features: NDArray[np.float64]) -> NDArray[np.float32]:
        return ((features - self.mean) / self.spread).astype(np.float32)


def _rows(texts: Sequence[Sequence[int]]) -> Tensor:
    """``(B, L)``, with silence behind each, as far as convolutions reach."""
    return Tokens.padded(texts, max(map(len, texts)) + CONVOLUTIONS).ids


def _evenly(frames: int, states: int) -> Places:
    """All states alike.

    >>> _evenly(6, 3).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    return np.arange(frames) * states // frames


class _Sounds(nn.Module):
    """What symbols sound like, wherever they stand, or ``between`` those around them: the means and the logs
    of deviations, ``(B, L, D)`` each.
    """

    between = False

    def __init__(self, symbols: int, features: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, WIDTH)
        self.convolutions: list[nn.Conv1d] = layers(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(CONVOLUTIONS)
        )
        self.output = nn.Linear(WIDTH, 2 * features)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(states).transpose(1, 2)
        for convolution in self.convolutions if self.between else ():
            x = x + convolution(F.dropout(x, DROPOUT, self.training)).relu()
        mean, spread = self.output(x.transpose(1, 2)).chunk(2, -1)
        return mean, spread.clamp(NARROWEST, WIDEST)


@torch.enable_grad()
def _learn(
    model: _Sounds,
    optimizer: torch.optim.Optimizer,
    texts: Tensor,
    features: Sequence[NDArray[np.float32]],
    found: Sequence[Places],
    chance: np.random.Generator,
    steps: int,
) -> None:
    """What symbols sound like, if they are where they were found: the likelihood of all frames there.

    That takes of the frames of each symbol only their number, their sum and that of their squares.
    """
    model.train()
    device = model.output.weight.device
    rows, size = len(texts), features[0].shape[1]
    counts, sums, squares = (torch.zeros(*texts.shape, n) for n in (1, size, size))
    for row, (frames, path) in enumerate(zip(features, found, strict=True)):
        at, x = torch.from_numpy(path), torch.from_numpy(frames)
        counts[row].index_add_(0, at, torch.ones(len(x), 1))
        sums[row].index_add_(0, at, x)
        squares[row].index_add_(0, at, x.square())
    texts, counts, sums, squares = (x.to(device) for x in (texts, counts, sums, squares))
    for _ in range(steps):
        some = torch.from_numpy(chance.integers(0, rows, min(SIZE, rows))).to(device)
        mean, spread = model(texts[some])
        number = counts[some]
        apart = squares[some] - 2 * mean * sums[some] + number * mean.square()
        surprise = 0.5 * apart * (-2 * spread).exp() + number * spread
        optimizer.zero_grad()
        (surprise.sum() / number.sum()).backward()
        optimizer.step()


@torch.no_grad()
def _ways(
    model: _Sounds, states: Sequence[Sequence[int]], features: Iterable[NDArray[np.float32]]
) -> Iterator[Places]:
    """The most likely way through each recording, which stays at a state or goes on to the next."""
    dtw = needed("librosa.sequence", "speech").dtw
    model.eval()
    heard = iter(features)
    for begin in range(0, len(states), SIZE):
        texts = states[begin : begin + SIZE]
        means, spreads = (x.cpu() for x in model(_rows(texts).to(model.output.weight.device)))
        # Texts end first, before frames are taken that are of the next ones.
        for text, mean, spread, frames in zip(texts, means, spreads, heard, strict=False):
            if len(frames) < len(text):
                yield 1 + _evenly(len(frames), len(text) - 1)  # without the silence
                continue
            mean, spread, x = mean[: len(text)], spread[: len(text)], torch.from_numpy(frames)
            sharp = (-2 * spread).exp()
            apart = x.square() @ sharp.T - 2 * x @ (mean * sharp).T + (mean.square() * sharp).sum(-1)
            surprise = (0.5 * apart + spread.sum(-1)).double().numpy()  # (T, states)
            _, way = dtw(C=surprise, step_sizes_sigma=np.array([[1, 0], [1, 1]]))
            yield np.ascontiguousarray(way[::-1, 1], np.int64)
