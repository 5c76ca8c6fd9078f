"""The keys and values of past steps. They are passed in and returned, never stored on a module.

A cache is immutable. ``append`` returns a new cache, and the old one can be continued a second time in
another way. Rows of the batch may hold different numbers of keys (a *ragged* cache). Each row starts at the
left, and new keys are written at the end of each row::

    lengths (2, 4)      append 2 tokens per row    lengths (4, 6)

        a a · ·                  A A                 a a A A · ·
        b b b b                  B B                 b b b b B B

Shapes: ``B`` batch, ``Hk`` heads of the keys, ``K`` cached keys, ``T`` new tokens, ``D`` width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import masks
from jumok.attention.mask_types import PaddingMask, move_to_device
from jumok.attention.masks import Mask
from jumok.errors import InputError

PerRowInts = Sequence[int] | Tensor  # one for each row


class KVBuffer:
    """Keys and values with free capacity after them, shared by a cache and the caches that continue it.

    ``used_lengths`` is the length of each row in the newest of these caches. Only that cache may write into
    the free capacity. Continuing an older cache copies the buffer first, so that both stay valid. None means
    that no cache may write, because the tensors belong to the caller or to autograd.
    """

    def __init__(self, key: Tensor, value: Tensor, used_lengths: tuple[int, ...] | None) -> None:
        self.key = key  # (B, Hk, capacity, D)
        self.value = value  # (B, Hk, capacity, Dv)
        self.used_lengths = used_lengths


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one attention layer. ``KVCache()`` is empty; the first ``append`` sets its sizes.

    Rows start at the left. For a left-padded prompt, move the tokens of each row to the left first, or pass
    the mask of the whole row, including the padding, at every step.

    >>> past = KVCache().append(torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8), lengths=[4, 5])
    >>> past = past.append(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8))
    >>> past.lengths
    (5, 6)
    >>> past.key[:, 0, :, 0]
    tensor([[0., 0., 0., 0., 1., 0.],
            [0., 0., 0., 0., 0., 1.]])
    """

    lengths: tuple[int, ...] = ()  # the number of keys of each row, on the host
    buffer: KVBuffer | None = field(default=None, repr=False)
    owner: object | None = field(default=None, repr=False)  # the layer that created the keys, if known
    padding_is_zero: bool = field(default=False, repr=False)  # whether the rest of each row is known to be 0

    @property
    def key(self) -> Tensor:
        """``(B, Hk, K, D)``, where K is ``max_length``. The rest of a shorter row is undefined."""
        return self._require_buffer().key[:, :, : self.max_length]

    @property
    def value(self) -> Tensor:
        """``(B, Hk, K, Dv)``. The rest of a shorter row is undefined."""
        return self._require_buffer().value[:, :, : self.max_length]

    @property
    def max_length(self) -> int:
        """The number of keys of the longest row."""
        return max(self.lengths, default=0)

    @property
    def offset(self) -> int | tuple[int, ...]:
        """The number of tokens before the next one: one number, or one for each row if the rows differ."""
        return self.lengths if _is_ragged(self.lengths) else self.max_length

    def append(self, key: Tensor, value: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """Return a cache that contains ``key`` and ``value`` too.

        Args:
            key: ``(B, Hk, T, D)``.
            value: ``(B, Hk, T, Dv)``.
            lengths: how many of the T new tokens of each row are real, counted from the left. Default: all.
        """
        self._check_append(key, value)
        batch_size, num_new_tokens = key.shape[0], key.shape[2]
        new_lengths = self._lengths_after(batch_size, num_new_tokens, lengths)
        if self.buffer is None:
            return KVCache(new_lengths, KVBuffer(key, value, used_lengths=None), self.owner)
        write_positions = self._get_write_positions(num_new_tokens, key.device)
        if torch.is_grad_enabled():
            # Autograd saves tensors for the backward pass by reference, so nothing is written in place.
            key = _append_out_of_place(self.key, key, write_positions)
            value = _append_out_of_place(self.value, value, write_positions)
            return KVCache(new_lengths, KVBuffer(key, value, used_lengths=None), self.owner)
        buffer = self._get_writable_buffer(self.max_length + num_new_tokens)
        _write_in_place(buffer.key, key, write_positions)
        _write_in_place(buffer.value, value, write_positions)
        buffer.used_lengths = new_lengths
        return KVCache(new_lengths, buffer, self.owner)

    def reorder(self, index: PerRowInts) -> KVCache:
        """Return the rows ``index`` of the batch, in that order. A row may be repeated or left out.

        The host waits for an index on a GPU only if the rows differ in length.
        """
        buffer = self._require_buffer()
        rows = torch.as_tensor(index)
        if rows.dim() != 1 or (rows.numel() and (rows.is_floating_point() or rows.dtype == torch.bool)):
            raise InputError(
                "reorder(index) takes row numbers, integers in one dimension, not "
                f"{rows.dtype} of shape {tuple(rows.shape)}"
            )
        lengths = (self.max_length,) * len(rows)
        if rows.device.type == "cpu" or _is_ragged(self.lengths):
            row_numbers = rows.tolist()
            for row in row_numbers:
                if not 0 <= row < len(self.lengths):
                    raise InputError(
                        f"reorder(index) asks for row {row} of a batch of {len(self.lengths)}; the first row is 0"
                    )
            lengths = tuple(self.lengths[row] for row in row_numbers)
        rows = move_to_device(rows.long(), buffer.key.device)
        # The free capacity is copied too, so that the next step need not allocate it again.
        key, value = (x.index_select(0, rows) for x in (buffer.key, buffer.value))
        used_lengths = None if torch.is_grad_enabled() else lengths
        return KVCache(lengths, KVBuffer(key, value, used_lengths), self.owner, self.padding_is_zero)

    def zero_padding(self) -> KVCache:
        """Return the same cache with zeros after the end of each row. Later steps then need not do it."""
        if self.padding_is_zero or not _is_ragged(self.lengths):
            return self
        lengths = move_to_device(torch.tensor(self.lengths), self.key.device)
        is_real = (torch.arange(self.max_length, device=lengths.device) < lengths[:, None])[:, None, :, None]
        key, value = (x.where(is_real, 0) for x in (self.key, self.value))
        return KVCache(self.lengths, KVBuffer(key, value, used_lengths=None), self.owner, padding_is_zero=True)

    def build_causal_mask(self, num_new_tokens: int, lengths: PerRowInts | None = None) -> Mask:
        """Return the mask for tokens about to be appended: each sees the past and itself, but no later token.

        ``lengths`` as in :meth:`append`. All layers of a model can share the mask: build it once per step.

        >>> KVCache().build_causal_mask(3)
        causal()
        >>> past = KVCache().append(torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8), lengths=[4, 5])
        >>> past.build_causal_mask(2)
        causal(offset=[4, 5]) & padding([6, 7])
        """
        batch_size = len(self.lengths) if self.buffer is not None or lengths is None else len(lengths)
        before = self._lengths_before(batch_size)
        after = self._lengths_after(batch_size, num_new_tokens, lengths)
        if not _is_ragged(before) and all(b + num_new_tokens == a for b, a in zip(before, after, strict=True)):
            return masks.causal()  # equal to offset=before if all rows are equal, and fast paths support it
        if num_new_tokens == 1:
            return masks.padding(after)  # no token is later than the only new one
        return masks.causal(offset=before) & masks.padding(after)

    @functools.cached_property
    def padding_mask(self) -> Mask | None:
        """The mask for queries that may see all cached keys (cross-attention), or None if none is needed."""
        if not _is_ragged(self.lengths):
            return None
        return replace(cast(PaddingMask, masks.padding(self.lengths)), padding_is_zero=self.padding_is_zero)

    def _require_buffer(self) -> KVBuffer:
        if self.buffer is None:
            raise InputError("this cache is empty; append(key, value) returns a cache with keys and values")
        return self.buffer

    def _get_writable_buffer(self, capacity: int) -> KVBuffer:
        """Return a buffer with this capacity per row, into which this cache may write."""
        buffer = self._require_buffer()
        current_capacity = buffer.key.shape[2]
        # Tensors created in inference mode cannot be written outside of it.
        is_writable = torch.is_inference_mode_enabled() or not buffer.key.is_inference()
        if buffer.used_lengths == self.lengths and capacity <= current_capacity and is_writable:
            return buffer
        # Doubling the capacity: T steps copy O(T), not O(T²).
        num_free = max(capacity, 2 * current_capacity) - self.max_length
        key, value = (F.pad(x, (0, 0, 0, num_free)) for x in (self.key, self.value))
        return KVBuffer(key, value, self.lengths)

    def _get_write_positions(self, num_new_tokens: int, device: torch.device) -> int | Tensor:
        """Return the first position of new tokens, or their positions ``(B, T)`` if the rows differ."""
        if not _is_ragged(self.lengths):
            return self.max_length
        return move_to_device(torch.tensor(self.lengths)[:, None] + torch.arange(num_new_tokens), device)

    def _lengths_before(self, batch_size: int) -> tuple[int, ...]:
        return self.lengths or (0,) * batch_size

    def _lengths_after(self, batch_size: int, num_new_tokens: int, lengths: PerRowInts | None) -> tuple[int, ...]:
        before = self._lengths_before(batch_size)
        if lengths is None:
            return tuple(b + num_new_tokens for b in before)
        if isinstance(lengths, int):
            raise InputError(f"lengths={lengths} is one number; expected one for each of the {batch_size} rows")
        num_added = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if len(num_added) != batch_size or any(
            not isinstance(n, int) or not 0 <= n <= num_new_tokens for n in num_added
        ):
            raise InputError(
                f"lengths {num_added} do not fit {batch_size} rows of {num_new_tokens} new tokens; expected "
                f"an integer from 0 to {num_new_tokens} for each row: how many of its tokens are real"
            )
        return tuple(b + n for b, n in zip(before, num_added, strict=True))

    def _check_append(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise InputError(
                f"append: the key has shape {tuple(key.shape)}, the value {tuple(value.shape)}; expected "
                "(batch, heads, tokens, width), with the same batch, heads and tokens in both"
            )
        if self.buffer is None:
            return
        for name, new, old in (("key", key, self.buffer.key), ("value", value, self.buffer.value)):
            if (*new.shape[:2], new.shape[3]) != (*old.shape[:2], old.shape[3]):
                raise InputError(
                    f"append: the {name} has shape {tuple(new.shape)}, but the cache has a batch of "
                    f"{old.shape[0]}, {old.shape[1]} heads and width {old.shape[3]}; a cache belongs to one "
                    "layer and one batch: start another from KVCache(), or select rows with reorder(index)"
                )
            if (new.dtype, new.device) != (old.dtype, old.device):
                raise InputError(
                    f"append: the {name} is {new.dtype} on {new.device}, but the cache is {old.dtype} "
                    f"on {old.device}; convert one with .to()"
                )


def _append_out_of_place(old: Tensor, new: Tensor, write_positions: int | Tensor) -> Tensor:
    """Return a new tensor with ``new`` after the end of each row of ``old``."""
    if isinstance(write_positions, int):
        return torch.cat([old, new], dim=2)
    return F.pad(old, (0, 0, 0, new.shape[2])).scatter(2, _expand_scatter_index(write_positions, new), new)


def _write_in_place(buffer: Tensor, new: Tensor, write_positions: int | Tensor) -> None:
    """Write ``new`` into the free capacity after the end of each row of ``buffer``."""
    if isinstance(write_positions, int):
        buffer[:, :, write_positions : write_positions + new.shape[2]] = new
    else:
        buffer.scatter_(2, _expand_scatter_index(write_positions, new), new)


def _expand_scatter_index(write_positions: Tensor, new: Tensor) -> Tensor:
    """Expand the positions ``(B, T)`` to the shape of ``new``, as ``scatter`` requires."""
    return write_positions[:, None, :, None].expand_as(new)


def _is_ragged(lengths: tuple[int, ...]) -> bool:
    return len(set(lengths)) > 1
