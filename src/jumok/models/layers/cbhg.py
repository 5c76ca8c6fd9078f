"""CBHG (Wang 2017): a bank of 1-D convolutions, highway layers and a bidirectional GRU.

::

    x ─┬─ K convolutions of widths 1 … K ─ max-pooling ─ 2 convolutions ─ + ─ highways ─ bidirectional GRU
       └──────────────────────────────────────────────────────────────────┘

Batch norms compute their statistics without padding, and padding stays zero. In eval mode the output for a
sequence does not depend on the others of its batch.

Shapes: ``B`` sequences, ``T`` positions of the longest, ``C`` channels. Convolutions take ``(B, C, T)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.batches.tokens import Tokens
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens


class MaskedBatchNorm(nn.Module):
    """Batch norm of ``(B, C, T, …)`` over the valid positions ``(B, T)``. The output is zero at padding.

    >>> x = torch.tensor([[[1.0, 3.0, 99.0]]])
    >>> MaskedBatchNorm(1)(x, torch.tensor([[True, True, False]])).detach().round(decimals=3)
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
        inputs, extra_dims = upcast(x), (1,) * (x.dim() - 3)
        valid_mask = valid_mask.view(valid_mask.shape[0], 1, valid_mask.shape[1], *extra_dims)
        channel_shape = (-1, 1, *extra_dims)  # (C,) to (C, 1, …)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            dims = [0, *range(2, x.dim())]
            count = valid_mask.sum() * x.shape[3:].numel()
            mean = inputs.where(valid_mask, 0.0).sum(dims) / count
            variance = (inputs - mean.view(channel_shape)).square().where(valid_mask, 0.0).sum(dims) / count
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        normed = inputs * scale.view(channel_shape) + (self.bias - mean * scale).view(channel_shape)
        return normed.where(valid_mask, 0.0).to(x.dtype)


class MaskedConvNorm(nn.Module):
    """A convolution over ``(B, C, T)`` that keeps the length, and a batch norm. Padding stays zero."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(in_channels, out_channels, kernel_size, bias=False)  # the norm has a bias
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
        transformed, gate = self.projection(x).chunk(2, -1)
        return torch.lerp(x.to(transformed.dtype), transformed.relu(), gate.sigmoid())


class CBHG(nn.Module):
    """Encodes ``(B, T, input_width)`` as ``(B, T, 2 · width)``, zero at padding.

    ``num_banks`` is K, the width of the widest convolution.

    >>> cbhg = CBHG(input_width=5, width=3, num_banks=4, num_highways=2)
    >>> cbhg(torch.ones(2, 7, 5), Tokens(torch.zeros(2, 7), (7, 4))).shape
    torch.Size([2, 7, 6])
    """

    def __init__(self, input_width: int, width: int, num_banks: int, num_highways: int) -> None:
        super().__init__()
        self.bank: list[nn.Conv1d] = build_module_list(
            nn.Conv1d(input_width, width, kernel_size, bias=False) for kernel_size in range(1, num_banks + 1)
        )
        for convolution in self.bank:
            nn.init.xavier_uniform_(convolution.weight)
        self.bank_norm = MaskedBatchNorm(num_banks * width)
        self.first_convolution = MaskedConvNorm(num_banks * width, width, 3)
        self.second_convolution = MaskedConvNorm(width, input_width, 3)
        self.input_projection = nn.Linear(input_width, width) if input_width != width else nn.Identity()
        self.highways: list[Highway] = build_module_list(Highway(width) for _ in range(num_highways))
        self.rnn = build_rnn("gru", width, width, bidirectional=True)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """``tokens`` hold the lengths of the sequences, which are at least 1."""
        valid_mask = tokens.valid_mask
        x = x.masked_fill(~valid_mask[..., None], 0.0)
        channels = x.transpose(1, 2)
        bank = [_convolve_same_length(convolution, channels) for convolution in self.bank]
        hidden = self.bank_norm(torch.cat(bank, 1), valid_mask).relu()
        # Max-pooling. Nothing is below 0, so a 0 at padding never wins.
        hidden = torch.maximum(hidden, F.pad(hidden, (-1, 1)))
        hidden = self.second_convolution(self.first_convolution(hidden, valid_mask).relu(), valid_mask)
        hidden = self.input_projection(x + hidden.transpose(1, 2))
        for highway in self.highways:
            hidden = highway(hidden)
        return run_rnn_on_tokens(self.rnn, hidden, tokens)[0]


def _convolve_same_length(convolution: nn.Conv1d, x: Tensor) -> Tensor:
    """Apply a convolution to ``x`` ``(B, C, T)`` with zero padding that keeps the length."""
    (width,) = convolution.kernel_size
    output: Tensor = convolution(F.pad(x, ((width - 1) // 2, width // 2)))
    return output
