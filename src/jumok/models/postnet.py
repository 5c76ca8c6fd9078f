"""What is made of a decoder's mels once all of them are there: better mels, or linear spectra.

A decoder says frame after frame and knows only what came before. Afterwards each can be seen with what
stands around it::

    mels ─┬─ convolutions ─ + ─ mels                     Tacotron 2
          └─────────────────┘

    mels ─ CBHG ─ linear spectra                         Tacotron

Shapes: ``B`` utterances, ``T`` frames, ``M`` mels, ``F`` frequencies.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from jumok.batch import Tokens
from jumok.models.cbhg import CBHG, Convolution
from jumok.models.layers import layers

__all__ = ["Refiner", "Spectra"]

REACH = 5  # frames that a convolution sees
BANKS = 8  # of the CBHG: its widest convolution
HIGHWAYS = 4


class Refiner(nn.Module):
    """Mels ``(B, T, M)`` to better ones.

    >>> Refiner(mels=5, width=7, convolutions=3)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 5])
    """

    def __init__(self, mels: int, width: int, convolutions: int) -> None:
        super().__init__()
        sizes = [mels, *[width] * (convolutions - 1), mels]
        self.convolutions: list[Convolution] = layers(
            Convolution(inputs, outputs, REACH) for inputs, outputs in itertools.pairwise(sizes)
        )
        # At first what it adds is nothing.
        nn.init.zeros_(self.convolutions[-1].norm.weight)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """``frames`` know which frames are real (see :func:`jumok.speech.frames_of`)."""
        real = frames.real
        x = mels.masked_fill(~real[..., None], 0.0).transpose(1, 2)
        *firsts, last = self.convolutions
        for convolution in firsts:
            x = convolution(x, real).tanh()
        added: Tensor = last(x, real)
        return mels + added.transpose(1, 2)


class Spectra(nn.Module):
    """Mels ``(B, T, M)`` to linear spectra ``(B, T, F)``.

    >>> Spectra(mels=5, linear=11, width=7)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 11])
    """

    def __init__(self, mels: int, linear: int, width: int) -> None:
        super().__init__()
        self.reader = CBHG(mels, width, BANKS, HIGHWAYS)
        self.output = nn.Linear(2 * width, linear)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        spectra: Tensor = self.output(self.reader(mels, frames))
        return spectra
