"""CBHG (Wang 2017): convolutions of many widths, highways, a GRU both ways: reads a sequence from all sides.

::

    x ─┬─ K convolutions, 1 … K wide ─ larger of neighbours ─ 2 convolutions ─ + ─ highways ─ GRU, both ways
       └───────────────────────────────────────────────────────────────────────┘

Batch norms take their means over what is real, and leave zeros at padding: so a sequence is read in a batch
as it would be alone.

Shapes: ``B`` sequences, ``T`` places of the longest, ``C`` channels. Convolutions have ``(B, C, T)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.tokens import Tokens
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens
from jumok.models.layers.module_list import build_module_list

__all__ = ["CBHG", "MaskedBatchNorm", "MaskedConvNorm"]


class MaskedBatchNorm(nn.Module):
    """Batch norm of ``(B, C, T, …)`` over the places that are real, ``(B, T)``; zeros at all others.

    >>> x = torch.tensor([[[1.0, 3.0, 99.0]]])
    >>> Norm(1)(x, torch.tensor([[True, True, False]])).detach().round(decimals=3)
    tensor([[[-1.,  1.,  0.]]])
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor, valid_mask: Tensor) -> Tensor:
        given, further = upcast(x), (1,) * (x.dim() - 3)
        valid_mask = valid_mask.view(valid_mask.shape[0], 1, valid_mask.shape[1], *further)
        spread = (-1, 1, *further)  # (C,) to (C, 1, …)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            over = [0, *range(2, x.dim())]
            number = valid_mask.sum() * x.shape[3:].numel()
            mean = given.where(valid_mask, 0.0).sum(over) / number
            variance = (given - mean.view(spread)).square().where(valid_mask, 0.0).sum(over) / number
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        normed = given * scale.view(spread) + (self.bias - mean * scale).view(spread)
        return normed.where(valid_mask, 0.0).to(x.dtype)


class MaskedConvNorm(nn.Module):
    """A convolution over ``(B, C, T)`` that keeps the length, and a norm. What comes is zero at padding."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(in_channels, out_channels, kernel_size, bias=False)  # the norm has one
        self.norm = MaskedBatchNorm(out_channels)
        nn.init.xavier_uniform_(self.convolution.weight)

    def forward(self, x: Tensor, valid_mask: Tensor) -> Tensor:
        normed: Tensor = self.norm(_convolve_same_length(self.convolution, x), valid_mask)
        return normed


class Highway(nn.Module):
    """``t ∘ relu(W x + b) + (1 − t) ∘ x``, ``t = σ(W_t x + b_t)``: at first mostly ``x``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(width, 2 * width)
        for weight in self.projection.weight.detach().chunk(2):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.projection.bias[:width])
        nn.init.constant_(self.projection.bias[width:], -1.0)

    def forward(self, x: Tensor) -> Tensor:
        made, gate = self.projection(x).chunk(2, -1)
        return torch.lerp(x.to(made.dtype), made.relu(), gate.sigmoid())


class CBHG(nn.Module):
    """Reads ``(B, T, inputs)``: ``(B, T, 2 · kernel_size)``, zero at padding.

    ``num_banks`` is K, the width of the widest convolution.

    >>> reader = CBHG(inputs=5, width=3, banks=4, highways=2)
    >>> reader(torch.ones(2, 7, 5), Tokens(torch.zeros(2, 7), (7, 4))).shape
    torch.Size([2, 7, 6])
    """

    def __init__(self, input_width: int, width: int, num_banks: int, num_highways: int) -> None:
        super().__init__()
        self.bank: list[nn.Conv1d] = build_module_list(
            nn.Conv1d(input_width, width, wide, bias=False) for wide in range(1, num_banks + 1)
        )
        for convolution in self.bank:
            nn.init.xavier_uniform_(convolution.weight)
        self.bank_norm = MaskedBatchNorm(num_banks * width)
        self.first_convolution, self.second_convolution = (
            MaskedConvNorm(num_banks * width, width, 3),
            MaskedConvNorm(width, input_width, 3),
        )
        self.input_projection = nn.Linear(input_width, width) if input_width != width else nn.Identity()
        self.highways: list[Highway] = build_module_list(Highway(width) for _ in range(num_highways))
        self.rnn = build_rnn("gru", width, width, bidirectional=True)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """``tokens`` know which of the places are real; at least one of each sequence is."""
        real = tokens.valid_mask
        x = x.masked_fill(~real[..., None], 0.0)
        made = x.transpose(1, 2)
        each = [_convolve_same_length(convolution, made) for convolution in self.bank]
        made = self.bank_norm(torch.cat(each, 1), real).relu()
        # No number is below 0, so a 0 at padding is never the larger one.
        made = torch.maximum(made, F.pad(made, (-1, 1)))
        made = self.second_convolution(self.first_convolution(made, real).relu(), real)
        made = self.input_projection(x + made.transpose(1, 2))
        for highway in self.highways:
            made = highway(made)
        return run_rnn_on_tokens(self.rnn, made, tokens)[0]


def _convolve_same_length(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """As long as ``x`` ``(B, C, T)``."""
    (width,) = convolution.kernel_size
    made: Tensor = convolution(F.pad(x, ((width - 1) // 2, width // 2)))
    return made
