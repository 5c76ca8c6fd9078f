"""Where in each recording the symbols of its text are spoken, found from many recordings together.

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

from collections.abc import Sequence
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
STEPS, FIRST_STEPS, SIZE, RATE = 60, 150, 64, 2e-3  # of learning in a turn, and in the first
WIDTH, DROPOUT = 128, 0.1
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

    ``mels`` are ``(T, M)``. Where there are more symbols than frames, all take equally long.
    """
    states = [[PAD, *one] for one in symbols]
    texts = Tokens.padded(states).ids.to(device)
    features = _features(mels)
    found = [_evenly(len(one), len(text)) for one, text in zip(features, states, strict=True)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode(False):
        torch.manual_seed(seed)
        model = _Sounds(max(map(max, states)) + 1, features[0].shape[1]).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        chance = np.random.default_rng(seed)
        for turn in range(turns):
            # What stands around them is not asked before they are about where they belong: else the first
            # guess would be learned by heart.
            model.between = turn >= turns // 2
            _learn(model, optimizer, texts, features, found, chance, FIRST_STEPS if turn == 0 else STEPS)
            found = _placed(model, texts, features, found)
    return [np.maximum(path - 1, 0) for path in found]


def _features(mels: Sequence[NDArray[Any]]) -> list[NDArray[np.float32]]:
    """``(T, D)`` each: the shape of the spectrum, how loud it is, and how both change; of variance 1."""
    found = []
    for mel in mels:
        shape, loud = cepstra(mel, spans=1.0), np.mean(mel, 1, dtype=np.float64, keepdims=True)
        now = np.concatenate([shape - shape.mean(0), loud - loud.max()], 1)  # voices differ, and loudness
        around = np.pad(now, ((2, 2), (0, 0)), mode="edge")
        found.append(np.concatenate([now, around[4:] - around[:-4] + around[3:-1] - around[1:-3]], 1))
    everything = np.concatenate(found)
    mean, spread = everything.mean(0), everything.std(0) + 1e-6
    return [((one - mean) / spread).astype(np.float32) for one in found]


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
        self.convolutions: list[nn.Conv1d] = layers(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
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
    rows, size = len(texts), features[0].shape[1]
    counts, sums, squares = (torch.zeros(*texts.shape, n) for n in (1, size, size))
    for row, (frames, path) in enumerate(zip(features, found, strict=True)):
        at, x = torch.from_numpy(path), torch.from_numpy(frames)
        counts[row].index_add_(0, at, torch.ones(len(x), 1))
        sums[row].index_add_(0, at, x)
        squares[row].index_add_(0, at, x.square())
    counts, sums, squares = (x.to(texts.device) for x in (counts, sums, squares))
    for _ in range(steps):
        some = torch.from_numpy(chance.integers(0, rows, min(SIZE, rows))).to(texts.device)
        mean, spread = model(texts[some])
        number = counts[some]
        apart = squares[some] - 2 * mean * sums[some] + number * mean.square()
        surprise = 0.5 * apart * (-2 * spread).exp() + number * spread
        optimizer.zero_grad()
        (surprise.sum() / number.sum()).backward()
        optimizer.step()


@torch.no_grad()
def _placed(
    model: _Sounds, texts: Tensor, features: Sequence[NDArray[np.float32]], found: Sequence[Places]
) -> list[Places]:
    """The most likely way through each recording, which stays at a state or goes on to the next."""
    dtw = needed("librosa.sequence", "speech").dtw
    model.eval()
    sounds = [[x.cpu() for x in model(some)] for some in texts.split(SIZE)]
    means, spreads = (torch.cat(each) for each in zip(*sounds, strict=True))
    paths = []
    for frames, before, mean, spread in zip(features, found, means, spreads, strict=True):
        states = before[-1] + 1  # a way ends with the last
        if len(frames) < states:
            paths.append(before)
            continue
        mean, spread, x = mean[:states], spread[:states], torch.from_numpy(frames)
        sharp = (-2 * spread).exp()
        apart = x.square() @ sharp.T - 2 * x @ (mean * sharp).T + (mean.square() * sharp).sum(-1)
        surprise = (0.5 * apart + spread.sum(-1)).double().numpy()  # (T, states)
        _, way = dtw(C=surprise, step_sizes_sigma=np.array([[1, 0], [1, 1]]))
        paths.append(np.ascontiguousarray(way[::-1, 1], np.int64))
    return paths
