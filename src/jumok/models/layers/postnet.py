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

from jumok.batches.tokens import Tokens
from jumok.models.layers.cbhg import CBHG, MaskedConvNorm
from jumok.models.layers.module_list import build_module_list

__all__ = ["LinearPostnet", "MelPostnet"]

KERNEL_SIZE = 5  # frames that a convolution sees
NUM_BANKS = 8  # of the CBHG: its widest convolution
NUM_HIGHWAYS = 4


class MelPostnet(nn.Module):
    """Mels ``(B, T, M)`` to better ones.

    >>> Refiner(mels=5, width=7, convolutions=3)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 5])
    """

    def __init__(self, mels: int, width: int, num_layers: int) -> None:
        super().__init__()
        sizes = [mels, *[width] * (num_layers - 1), mels]
        self.convolutions: list[MaskedConvNorm] = build_module_list(
            MaskedConvNorm(inputs, outputs, KERNEL_SIZE) for inputs, outputs in itertools.pairwise(sizes)
        )
        # At first what it adds is nothing.
        nn.init.zeros_(self.convolutions[-1].norm.weight)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """``frames`` know which frames are real (see :func:`jumok.speech.frames_of`)."""
        real = frames.valid_mask
        x = mels.masked_fill(~real[..., None], 0.0).transpose(1, 2)
        *firsts, last = self.convolutions
        for convolution in firsts:
            x = convolution(x, real).tanh()
        added: Tensor = last(x, real)
        return mels + added.transpose(1, 2)


class LinearPostnet(nn.Module):
    """Mels ``(B, T, M)`` to linear spectra ``(B, T, F)``.

    >>> Spectra(mels=5, linear=11, width=7)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 9, 11])
    """

    def __init__(self, mels: int, linear_bins: int, width: int) -> None:
        super().__init__()
        self.cbhg = CBHG(mels, width, NUM_BANKS, NUM_HIGHWAYS)
        self.output = nn.Linear(2 * width, linear_bins)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        spectra: Tensor = self.output(self.cbhg(mels, frames))
        return spectra
