"""Global style tokens (Wang 2018): how something is said, learned from sound alone, without labels.

::

    mels ─ convolutions ─ GRU ─ reference ─ query
                                              │
    tokens 1 … N ─ keys, values ────────── attention ─ style             of every head: a mix of the tokens

The query is a sound, the keys are a handful of learned tokens. A style need not come from a sound: with
weights of one's own, one token or any mix makes one, and it is linear in them. ::

    style of a sound          tokens(mels, frames)
    token 3, by 0.4           tokens.mix(0.4 · one-hot of 3)             0.4 times what token 3 stands for
    the usual one             tokens.mix(tokens.usual)                   of a sound that was learned from

The usual one is that of the sound nearest to the mean. The mean itself would be a mix of all voices, which is
none.

Shapes: ``B`` utterances, ``T`` frames, ``M`` mels, ``N`` tokens, ``H`` heads, ``W`` the width of a style.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jumok.attention import core
from jumok.attention.heads import MultiHead
from jumok.batches.tokens import Tokens
from jumok.models.layers.cbhg import MaskedBatchNorm
from jumok.models.layers.precision import upcast
from jumok.models.layers.recurrent import build_rnn, run_rnn_on_tokens
from jumok.models.layers.module_list import build_module_list

__all__ = ["ReferenceEncoder", "StyleConfig", "StyleTokens"]

QUERY_INIT_SCALE, KEY_VALUE_INIT_SCALE = (
    4.0,
    3.0,
)  # how much larger the weights of queries, and of keys and values, begin if eager
MEAN_MOMENTUM = 0.01  # how much a batch counts in the mean: so it is that of some hundred


@dataclass(frozen=True)
class StyleConfig:
    """The sizes of :class:`StyleTokens`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    num_tokens: int = 10
    num_heads: int = 4
    width: int = 128  # of a style, and of the GRU that listens
    conv_channels: tuple[int, ...] = (32, 32, 64, 64, 128, 128)  # each convolution halves time and pitch
    # As a rule all tokens have about the same weight at first, whatever the sound, and it may take thousands
    # of steps until styles count. Eager ones count from the start; but with a learning rate above 0.001 or so
    # all sounds may end up with the same token.
    large_init: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"style.{name}={getattr(self, name)}: 1 or more is expected")
        if self.width % self.num_heads:
            raise ValueError(
                f"style.width={self.width} does not divide into style.heads={self.num_heads}: change one of them"
            )
        if not self.conv_channels or min(self.conv_channels) < 1:
            raise ValueError(
                f"style.channels={self.conv_channels}: at least one number is expected, of 1 or more"
            )


class ReferenceEncoder(nn.Module):
    """What a sound is like as a whole: of mels ``(B, T, M)`` a vector each, ``(B, W)``.

    >>> ReferenceEncoder(mels=5, channels=(2, 3), width=7)(torch.ones(2, 9, 5), frames).shape
    torch.Size([2, 7])
    """

    def __init__(self, mels: int, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        before = (1, *channels[:-1])
        self.convolutions: list[nn.Conv2d] = build_module_list(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            for inputs, outputs in zip(before, channels, strict=True)
        )
        self.norms: list[MaskedBatchNorm] = build_module_list(map(MaskedBatchNorm, channels))
        for _ in channels:
            mels = (mels + 1) // 2
        self.rnn = build_rnn("gru", channels[-1] * mels, width)

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """``frames`` know which frames are real (see :func:`jumok.speech.frames_of`)."""
        x = mels.where(frames.valid_mask[..., None], 0.0)[:, None]  # (B, C, T, M)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = convolution(x)
            frames = _halve_lengths(frames, x)
            x = norm(x, frames.valid_mask).relu()
        _, (last, *_) = run_rnn_on_tokens(self.rnn, x.transpose(1, 2).flatten(2), frames)
        return last[-1]


def _halve_lengths(frames: Tokens, x: Tensor) -> Tokens:
    """Which of the frames of ``x`` ``(B, C, T, M)`` are real, after every other one was left out."""
    lengths = tuple((length + 1) // 2 for length in frames.lengths)
    counts = None if frames.device_lengths is None else (frames.device_lengths + 1) // 2
    return Tokens(x[:, 0], lengths, device_lengths=counts)


class StyleTokens(nn.Module):
    """Styles ``(B, W)``, from sounds or from weights.

    >>> style = StyleTokens(StyleConfig(tokens=3, heads=2, width=8, channels=(4, 4)), mels=5)
    >>> style(torch.ones(2, 9, 5), frames).shape, style.weights(torch.ones(2, 9, 5), frames).shape
    (torch.Size([2, 8]), torch.Size([2, 2, 3]))
    >>> mixed = style.mix(torch.tensor([[0.0, 0.4, 0.0]]))
    >>> torch.allclose(mixed, 0.4 * style.values()[1])
    True
    """

    mean_weights: (
        Tensor  # (1, H, N): of the weights of the sounds that were learned from, long ones counting more
    )
    default_weights: Tensor  # (1, H, N): the weights of one of the last of them, that nearest to the mean

    def __init__(self, config: StyleConfig, mels: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.reference_encoder = ReferenceEncoder(mels, config.conv_channels, width)
        token_width = width // config.num_heads
        self.tokens = nn.Parameter(torch.empty(config.num_tokens, token_width).normal_(std=0.5))
        # Without biases: then what comes of a mix is the mix of what comes of its tokens.
        self.attention = MultiHead(width, config.num_heads, key_width=token_width, bias=False)
        if config.large_init:
            with torch.no_grad():
                self.attention.project_query.weight *= QUERY_INIT_SCALE
                self.attention.project_source.weight *= KEY_VALUE_INIT_SCALE
        for name in ("mean_weights", "default_weights"):
            self.register_buffer(
                name, torch.full((1, config.num_heads, config.num_tokens), 1 / config.num_tokens)
            )

    def forward(self, mels: Tensor, frames: Tokens) -> Tensor:
        """The styles ``(B, W)`` of sounds ``(B, T, M)``; ``frames`` know which frames are real."""
        asked = self.reference_encoder(mels, frames)[:, None]
        if self.training:
            self._update_statistics(asked, frames.valid_mask)
        mixed: Tensor = self.attention(asked, self._expand_tokens(len(mels)))
        return mixed.squeeze(1)

    @torch.no_grad()
    def _update_statistics(self, query: Tensor, valid_mask: Tensor) -> None:
        weights = upcast(self.attention.weights(query, self._expand_tokens(len(query)))).squeeze(
            2
        )  # (B, H, N)
        counts = valid_mask.sum(1).to(weights.dtype)
        mean = (weights * (counts / counts.sum())[:, None, None]).sum(0, keepdim=True)
        self.mean_weights.lerp_(mean.to(self.mean_weights.dtype), MEAN_MOMENTUM)
        apart = (
            (weights - self.mean_weights).abs().sum((1, 2)).masked_fill(counts < 2, torch.inf)
        )  # one is no sound
        nearest = weights.index_select(0, apart.argmin()[None])
        self.default_weights.copy_(nearest)

    def weights(self, mels: Tensor, frames: Tokens) -> Tensor:
        """How much of each token is in the style of each sound, by head: ``(B, H, N)``."""
        asked = self.reference_encoder(mels, frames)[:, None]
        return self.attention.weights(asked, self._expand_tokens(len(mels))).squeeze(2)

    def mix(self, weights: Tensor) -> Tensor:
        """The styles ``(B, W)`` of weights ``(B, N)``, the same for all heads, or ``(B, H, N)``.

        They may sum to anything, and be negative.
        """
        heads, tokens = self.config.num_heads, self.config.num_tokens
        if (
            weights.dim() not in (2, 3)
            or weights.shape[-1] != tokens
            or (weights.dim() == 3 and weights.shape[1] not in (1, heads))
        ):
            raise ValueError(
                f"weights of shape {tuple(weights.shape)} came; expected (styles, {tokens}), or "
                f"(styles, {heads}, {tokens}) with weights for each head"
            )
        values = self.attention.prepare(self._expand_tokens(1)).value  # (1, H, N, D)
        by_head = (weights[:, None] if weights.dim() == 2 else weights).to(values.dtype)
        found = core.mix(by_head.expand(-1, heads, -1)[:, :, None], values.expand(len(weights), -1, -1, -1))
        mixed: Tensor = self.attention.merge(found.flatten(1))
        return mixed

    def compute_token_styles(self) -> Tensor:
        """The style that each token stands for, ``(N, W)``."""
        return self.mix(torch.eye(self.config.num_tokens, device=self.tokens.device, dtype=self.tokens.dtype))

    def _expand_tokens(self, batch_size: int) -> Tensor:
        return self.tokens.tanh().expand(batch_size, -1, -1)  # (B, N, D)
