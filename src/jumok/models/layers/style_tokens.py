"""Global style tokens (Wang 2018): speaking styles, learned from recordings without labels.

::

    mels ─ convolutions ─ GRU ─ reference embedding ─ query
                                                        │
    tokens 1 … N ─ keys, values ──────────────────── attention ─ style

The query is the embedding of a recording, and the keys are a few learned tokens. A style can also be computed
from given weights of the tokens. It is linear in them::

    style of a recording      style_tokens(mels, frames)
    0.4 times token 3         style_tokens.mix(0.4 · one-hot of 3)
    default style             style_tokens.mix(style_tokens.default_weights)

The default is the style of the training example nearest to the mean. The mean itself would be a mixture of
all voices, which sounds like none of them.

Shapes: ``B`` utterances, ``T`` frames, ``M`` mels, ``N`` tokens, ``H`` heads, ``W`` width of a style.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jumok.attention import core
from jumok.attention.heads import MultiHead
from jumok.batches.tokens import Tokens
from jumok.config import Config
from jumok.models.layers.cbhg import MaskedBatchNorm
from jumok.models.layers.module_list import build_module_list
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens

QUERY_INIT_SCALE, KEY_VALUE_INIT_SCALE = 4.0, 3.0  # factors of the initial weights, with large_init
MEAN_MOMENTUM = 0.01  # weight of a batch in the moving average


@dataclass(frozen=True)
class StyleConfig(Config):
    """Configuration of :class:`StyleTokens`."""

    num_tokens: int = 10
    num_heads: int = 4
    width: int = 128  # of a style, and of the GRU of the reference encoder
    conv_channels: tuple[int, ...] = (32, 32, 64, 64, 128, 128)  # each convolution halves time and frequency
    # Usually all tokens have about the same weight at first, whatever the recording, and it may take
    # thousands of steps until styles matter. With large_init they matter from the start. But with a learning
    # rate above about 0.001 all recordings may end up with the same token.
    large_init: bool = False

    def __post_init__(self) -> None:
        self.check_ranges(positive=("num_tokens", "num_heads", "width"), prefix="style.")
        self.check_divisible("width", "num_heads", prefix="style.")
        if not self.conv_channels or min(self.conv_channels) < 1:
            raise ValueError(f"style.conv_channels={self.conv_channels}: one or more numbers of 1 or more are expected")


class ReferenceEncoder(nn.Module):
    """Encodes mels ``(B, T, M)`` as one vector per recording, ``(B, W)``.

    >>> ReferenceEncoder(mels=5, channels=(2, 3), width=7)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 7])
    """

    def __init__(self, mels: int, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.convolutions: list[nn.Conv2d] = build_module_list(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            for inputs, outputs in itertools.pairwise((1, *channels))
        )
        self.norms: list[MaskedBatchNorm] = build_module_list(map(MaskedBatchNorm, channels))
        for _ in channels:
            mels = (mels + 1) // 2
        self.rnn = build_rnn("gru", channels[-1] * mels, width)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """``frames`` holds the lengths (see :func:`jumok.batches.speech.frames_as_tokens`)."""
        x = mels.where(frames.valid_mask[..., None], 0.0)[:, None]  # (B, C, T, M)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = convolution(x)
            frames = _halve_lengths(frames, x)
            x = norm(x, frames.valid_mask).relu()
        _, (last, *_) = run_rnn_on_tokens(self.rnn, x.transpose(1, 2).flatten(2), frames)
        return last[-1]


def _halve_lengths(frames: Tokens, x: Tensor) -> Tokens:
    """The lengths of ``x`` ``(B, C, T, M)`` after a convolution of stride 2."""
    lengths = tuple((length + 1) // 2 for length in frames.lengths)
    device_lengths = None if frames.device_lengths is None else (frames.device_lengths + 1) // 2
    return Tokens(x[:, 0], lengths, device_lengths=device_lengths)


class StyleTokens(nn.Module):
    """Styles ``(B, W)`` from recordings, or from weights of the tokens.

    >>> config = StyleConfig(num_tokens=3, num_heads=2, width=8, conv_channels=(4, 4))
    >>> style_tokens, mels = StyleTokens(config, mels=5), torch.ones(2, 9, 5)
    >>> style_tokens(mels, frames).shape, style_tokens.weights(mels, frames).shape
    (torch.Size([2, 8]), torch.Size([2, 2, 3]))
    >>> style = style_tokens.mix(torch.tensor([[0.0, 0.4, 0.0]]))
    >>> torch.allclose(style, 0.4 * style_tokens.compute_token_styles()[1])
    True
    """

    mean_weights: Tensor  # (1, H, N): moving average over the training examples, weighted by their lengths
    default_weights: Tensor  # (1, H, N): those of the example of the last batch that is nearest to the mean

    def __init__(self, config: StyleConfig, mels: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.reference_encoder = ReferenceEncoder(mels, config.conv_channels, width)
        token_width = width // config.num_heads
        self.tokens = nn.Parameter(torch.empty(config.num_tokens, token_width).normal_(std=0.5))
        # Without biases, so that styles are linear in the weights.
        self.attention = MultiHead(width, config.num_heads, key_width=token_width, bias=False)
        if config.large_init:
            with torch.no_grad():
                self.attention.project_query.weight *= QUERY_INIT_SCALE
                self.attention.project_source.weight *= KEY_VALUE_INIT_SCALE
        for name in ("mean_weights", "default_weights"):
            self.register_buffer(name, torch.full((1, config.num_heads, config.num_tokens), 1 / config.num_tokens))

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """Styles ``(B, W)`` of recordings ``(B, T, M)``. ``frames`` holds their lengths."""
        query = self.reference_encoder(mels, frames)[:, None]
        if self.training:
            self._update_statistics(query, frames.valid_mask)
        style: Tensor = self.attention(query, self._expand_tokens(len(mels)))
        return style.squeeze(1)

    @torch.no_grad()
    def _update_statistics(self, query: Tensor, valid_mask: Tensor) -> None:
        weights = upcast(self.attention.weights(query, self._expand_tokens(len(query))))
        weights = weights.squeeze(2)  # (B, H, N)
        lengths = valid_mask.sum(1).to(weights.dtype)
        mean = (weights * (lengths / lengths.sum())[:, None, None]).sum(0, keepdim=True)
        self.mean_weights.lerp_(mean.to(self.mean_weights.dtype), MEAN_MOMENTUM)
        distances = (weights - self.mean_weights).abs().sum((1, 2))
        distances = distances.masked_fill(lengths < 2, torch.inf)  # a single frame is a filler, no recording
        nearest = weights.index_select(0, distances.argmin()[None])
        self.default_weights.copy_(nearest)

    def weights(self, mels: Tensor, frames: Tokens) -> Tensor:
        """Attention weights ``(B, H, N)`` of the tokens for each recording."""
        query = self.reference_encoder(mels, frames)[:, None]
        return self.attention.weights(query, self._expand_tokens(len(mels))).squeeze(2)

    def mix(self, weights: Tensor) -> Tensor:
        """Styles ``(B, W)`` of weights ``(B, N)``, the same for all heads, or ``(B, H, N)``.

        The weights may have any sum and any sign.
        """
        heads, tokens = self.config.num_heads, self.config.num_tokens
        if (
            weights.dim() not in (2, 3)
            or weights.shape[-1] != tokens
            or (weights.dim() == 3 and weights.shape[1] not in (1, heads))
        ):
            raise ValueError(
                f"weights have shape {tuple(weights.shape)}; expected (styles, {tokens}), or "
                f"(styles, {heads}, {tokens}) with weights for each head"
            )
        values = self.attention.prepare(self._expand_tokens(1)).value  # (1, H, N, D)
        head_weights = (weights[:, None] if weights.dim() == 2 else weights).to(values.dtype)
        head_weights = head_weights.expand(-1, heads, -1)[:, :, None]  # (B, H, 1, N)
        mixed = core.mix(head_weights, values.expand(len(weights), -1, -1, -1))
        style: Tensor = self.attention.merge(mixed.flatten(1))
        return style

    def compute_token_styles(self) -> Tensor:
        """Style of each token, ``(N, W)``."""
        return self.mix(torch.eye(self.config.num_tokens, device=self.tokens.device, dtype=self.tokens.dtype))

    def _expand_tokens(self, batch_size: int) -> Tensor:
        return self.tokens.tanh().expand(batch_size, -1, -1)  # (B, N, D)
