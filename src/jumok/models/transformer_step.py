"""Decoding steps of the Transformer without gradients, bound to its weights once per search.

A step of one token per row consists of many small operations, and calling modules takes longer than computing
them. Here the weights of each layer are bound to plain functions, the keys and values of all layers are in
one tensor, and what all layers share is made once: views of this tensor, the position, the mask of the source.
The computation is that of :meth:`jumok.models.transformer.Transformer.decode`, which serves all other calls.

Shapes: ``N`` rows, ``B`` sources with ``N / B`` neighbouring rows each, ``H`` heads of width ``Dh``, ``D``
width, ``T`` target tokens so far, ``S`` source tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.attention.arguments import get_autocast_dtype
from jumok.attention.compiled_block import Projection, has_hooks
from jumok.attention.core import is_observed
from jumok.attention.heads import MultiHead
from jumok.attention.kv_cache import KVBuffer, KVCache
from jumok.attention.mask_types import move_to_device
from jumok.attention.positions import SinusoidalPositions

if TYPE_CHECKING:
    from jumok.models.transformer import ResidualNorm, ResidualStream, Transformer, TransformerDecoderLayer

MIN_CAPACITY = 16  # tokens for which the first buffer has room
MIN_POSITIONS = 64  # rows of the first table of positions
MASK_ALIGNMENT = 16  # of the rows of a mask: on a GPU, SDPA copies others at each call
TRANSFORMER_FILE = "jumok.models.transformer"
PLAIN_MODULES = frozenset(
    {nn.Dropout, nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList, MultiHead, Projection, SinusoidalPositions}
)

# ------------------------------------------------------------------------------------ keys and values


class _StackedBuffer:
    """Keys and values of all layers. Only a cache of ``used_length`` tokens, the newest one, may write into it."""

    def __init__(self, key_values: Tensor, used_length: int) -> None:
        self.key_values = key_values  # (layers, N, 2, H, capacity, Dh)
        self.used_length = used_length


@dataclass(frozen=True, eq=False)
class StackedKVCache:
    """Keys and values of the target so far, of all layers. All rows have the same length.

    It is immutable, as a :class:`KVCache` is. Empty before the first step.
    """

    length: int = 0
    buffer: _StackedBuffer | None = None

    def reorder(self, index: Tensor) -> StackedKVCache:
        """Return the rows ``index``, in that order. Rows may be repeated or left out."""
        if self.buffer is None:
            return self
        key_values = self.buffer.key_values
        # The free capacity is copied too, so that the next step need not allocate it again.
        key_values = key_values.index_select(1, move_to_device(index, key_values.device))
        return StackedKVCache(self.length, _StackedBuffer(key_values, self.length))

    def extend(self, num_layers: int, num_rows: int, like: Tensor) -> StackedKVCache:
        """Return a cache with one more token, which the caller writes. Nothing in it may need gradients.

        ``like``: keys ``(·, H, ·, Dh)`` of the same dtype and device.
        """
        length, buffer = self.length + 1, self.buffer
        if (
            buffer is None
            or buffer.used_length != self.length
            or buffer.key_values.shape[4] < length
            or (buffer.key_values.is_inference() and not torch.is_inference_mode_enabled())
        ):
            capacity = max(MIN_CAPACITY, 2 * self.length)  # so T steps copy O(T), not O(T²)
            key_values = like.new_empty(num_layers, num_rows, 2, like.shape[1], capacity, like.shape[3])
            if self.buffer is not None:
                key_values[..., : self.length, :] = self.buffer.key_values[..., : self.length, :]
            buffer = _StackedBuffer(key_values, length)
        buffer.used_length = length
        return StackedKVCache(length, buffer)

    def split_layers(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return for each layer keys and values ``(N, H, T, Dh)``, and those of the last token ``(N, 2, H, Dh)``."""
        assert self.buffer is not None
        keys, values = self.buffer.key_values.narrow(4, 0, self.length).unbind(2)
        last = self.buffer.key_values.select(4, self.length - 1)
        return list(zip(keys.unbind(), values.unbind(), last.unbind(), strict=True))

    def to_layer_caches(self, num_layers: int, length: int) -> list[KVCache]:
        """Return for each layer a cache of the first ``length`` tokens. It may write the others."""
        if self.buffer is None:
            return [KVCache()] * num_layers
        keys, values = self.buffer.key_values.unbind(2)
        lengths = (length,) * keys.shape[1]
        return [
            KVCache(lengths, KVBuffer(key, value, used_lengths=lengths))
            for key, value in zip(keys, values, strict=True)
        ]

    @staticmethod
    def from_layer_caches(caches: Sequence[KVCache]) -> StackedKVCache:
        """Return the keys and values of all layers, given a cache for each layer."""
        key_values = torch.stack([torch.stack([cache.key, cache.value], 1) for cache in caches])
        length = key_values.shape[4]
        return StackedKVCache(length, _StackedBuffer(key_values, length))


@dataclass(frozen=True, eq=False)
class SourceMemory:
    """Keys and values of the sources, for cross-attention."""

    caches: tuple[KVCache, ...]  # for each layer

    def reorder(self, rows: list[int]) -> SourceMemory:
        """Return these sources, in that order."""
        index = torch.tensor(rows, dtype=torch.long)
        return SourceMemory(tuple(cache.reorder(index) for cache in self.caches))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each source."""
        return self.caches[0].lengths

    @functools.cached_property
    def key_values(self) -> list[tuple[Tensor, Tensor]]:
        """Of each layer, ``(B, H, S, Dh)``."""
        return [(cache.key, cache.value) for cache in self.caches]

    @functools.cached_property
    def additive_mask(self) -> Tensor | None:
        """0 at tokens and −inf at padding, ``(B, 1, 1, S)``. None: there is no padding."""
        if self.caches[0].padding_mask is None:
            return None
        key, num_keys = self.caches[0].key, self.caches[0].max_length
        row_size = -(-num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
        lengths = move_to_device(torch.tensor(self.lengths), key.device)
        is_padding = torch.arange(row_size, device=key.device) >= lengths[:, None]
        return key.new_zeros(is_padding.shape).masked_fill_(is_padding, -torch.inf)[:, None, None, :num_keys]


# ------------------------------------------------------------------------------------------- the step


class TransformerStep:
    """The decoder of a Transformer for one new token per row, in eval mode and without gradients.

    It holds the weights of the model at the time of the call, converted to autocast's dtype if autocast is on.
    """

    @classmethod
    def bind(cls, model: Transformer, source: SourceMemory, previous: TransformerStep | None) -> TransformerStep | None:
        """Return the step of a model, or None if only :meth:`Transformer.decode` can serve it.

        That is so if gradients are needed, attention is observed (``jumok.watch``), a source is empty, or
        modules of the decoder are replaced or hooked. ``previous`` is the result for the previous step.
        """
        if torch.is_grad_enabled() or model.training or is_observed() or min(source.lengths, default=0) == 0:
            return None
        autocast_dtype = get_autocast_dtype(model.output.weight.device)
        if previous is not None and previous.autocast_dtype == autocast_dtype:
            return previous
        return cls(model, autocast_dtype) if consists_of_plain_modules(model) else None

    def __init__(self, model: Transformer, autocast_dtype: torch.dtype | None) -> None:
        self.autocast_dtype = autocast_dtype
        embedding, input_layer = model.target_embedding, model.target_input_layer
        self.embed = functools.partial(F.embedding, weight=embedding.weight)
        self.scale, self.width = input_layer.scale, model.config.width
        self.input_norm = None if input_layer.norm is None else bind_layer_norm(input_layer.norm)
        self.layers = [DecoderLayerStep(layer, self.autocast_dtype) for layer in model.decoder]
        self.output = bind_linear(model.output, self.autocast_dtype)

    def __call__(self, ids: Tensor, past: StackedKVCache, source: SourceMemory, rows_per_source: int) -> Tensor:
        """Return the logits ``(N, V)`` after the tokens ``ids`` ``(N,)``, which are written to the cache."""
        x = self.embed(ids) * self.scale
        x = x + get_position_vector(self.width, past.length - 1, x.dtype, x.device)
        normed = x if self.input_norm is None else self.input_norm(x)
        if self.autocast_dtype is not None:
            normed = normed.to(self.autocast_dtype)
        layers = zip(self.layers, past.split_layers(), source.key_values, strict=True)
        for layer, layer_past, layer_source in layers:
            x, normed = layer(x, normed, layer_past, layer_source, source.additive_mask, rows_per_source)
        return self.output(normed)


class DecoderLayerStep:
    """A :class:`TransformerDecoderLayer` for one new token per row."""

    def __init__(self, layer: TransformerDecoderLayer, dtype: torch.dtype | None) -> None:
        own, cross, feed_forward = layer.self_attention, layer.cross_attention, layer.feed_forward
        self.num_heads, self.head_width = own.num_heads, own.head_width
        self.project, self.merge = bind_linear(own.project, dtype), bind_linear(own.merge, dtype)
        self.self_attention_residual = bind_residual(layer.self_attention_residual, dtype)
        self.project_query, self.merge_cross = bind_linear(cross.project_query, dtype), bind_linear(cross.merge, dtype)
        self.cross_attention_residual = bind_residual(feed_forward.attention_residual, dtype)
        self.widen, self.narrow = bind_linear(feed_forward.widen, dtype), bind_linear(feed_forward.narrow, dtype)
        self.activation = feed_forward.activation
        self.feed_forward_residual = bind_residual(feed_forward.residual, dtype)

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        past: tuple[Tensor, Tensor, Tensor],
        source: tuple[Tensor, Tensor],
        source_mask: Tensor | None,
        rows_per_source: int,
    ) -> ResidualStream:
        """Return the residual stream ``(N, D)`` after the layer."""
        x, normed = self.self_attention_residual(x, self.self_attention(normed, *past))
        attended = self.cross_attention(normed, *source, source_mask, rows_per_source)
        x, normed = self.cross_attention_residual(x, attended)
        return self.feed_forward_residual(x, self.narrow(self.activation(self.widen(normed))))

    def self_attention(self, x: Tensor, key: Tensor, value: Tensor, last: Tensor) -> Tensor:
        """Write keys and values of the new tokens to ``last``, and attend from these tokens to all."""
        projected = self.project(x).view(-1, 3, self.num_heads, self.head_width)
        query, key_value = projected.split_with_sizes((1, 2), 1)
        last.copy_(key_value)
        attended = F.scaled_dot_product_attention(query.transpose(1, 2), key, value)  # (N, H, 1, Dh)
        return self.merge(attended.reshape(len(x), -1))

    def cross_attention(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows_per_source: int
    ) -> Tensor:
        """Attend to the source. Rows that share a source are several queries to it."""
        query = self.project_query(x).view(-1, rows_per_source, self.num_heads, self.head_width).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, mask)  # (B, H, rows per source, Dh)
        return self.merge_cross(attended.transpose(1, 2).reshape(len(x), -1))


def bind_linear(linear: Any, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Return the function of a linear layer, with its weights in this dtype."""
    weights = {"weight": linear.weight, "bias": getattr(linear, "bias", None)}
    if dtype is not None:
        weights = {name: None if weight is None else weight.to(dtype) for name, weight in weights.items()}
    return functools.partial(F.linear, **weights)


def bind_layer_norm(norm: nn.LayerNorm) -> Callable[[Tensor], Tensor]:
    """Return the function of a layer norm."""
    return functools.partial(
        torch.layer_norm, normalized_shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias, eps=norm.eps
    )


def bind_residual(residual: ResidualNorm, dtype: torch.dtype | None) -> Callable[[Tensor, Tensor], ResidualStream]:
    """Return the function of a residual connection in eval mode."""
    norm, is_pre_norm = bind_layer_norm(residual.norm), residual.is_pre_norm

    def add_and_norm(x: Tensor, sublayer_output: Tensor) -> ResidualStream:
        total = x + sublayer_output
        normed = norm(total)
        return total if is_pre_norm else normed, normed if dtype is None else normed.to(dtype)

    return add_and_norm


def get_position_vector(width: int, position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the sinusoidal vector ``(D,)`` of a position, from a table that is computed once."""
    num_positions = max(MIN_POSITIONS, 1 << position.bit_length())
    return _build_position_table(width, num_positions, dtype, device)[position]


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def _build_position_table(
    width: int, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    positions = torch.arange(num_positions, device=device)
    return SinusoidalPositions(width).embed(positions).to(dtype).unbind()


def consists_of_plain_modules(model: Transformer) -> bool:
    """Return whether the decoder has its own modules only: nothing is overridden, replaced, hooked, or sharded."""
    parts: tuple[Any, ...] = (model.target_embedding, model.target_input_layer, model.decoder, model.output)
    return type(model).decode.__module__ == TRANSFORMER_FILE and all(
        (type(module) in PLAIN_MODULES or type(module).__module__ == TRANSFORMER_FILE)
        and not has_hooks(module)
        and all(type(weight) is nn.Parameter for weight in module._parameters.values() if weight is not None)
        for part in parts
        for module in part.modules()
    )
