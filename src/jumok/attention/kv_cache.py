"""The keys and values of past steps: passed in, returned, never stored on a module.

A cache never changes once made. ``append`` gives a new one, and the old one may be continued a second
time, in another way. Rows of the batch may hold different numbers of keys (a *ragged* cache): each
begins at the left, and what is appended is written at each row's own place::

    lengths (2, 4)      append 2 tokens a row      lengths (4, 6)

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

__all__ = ["KVCache"]

PerRowInts = Sequence[int] | Tensor  # one for each row


class KVBuffer:
    """Keys and values with free places behind them, shared by a cache and those that continue it.

    ``used_lengths`` tells how much of each row belongs to the newest of these caches. Only that one may write
    into the free places; whoever continues an older one takes a copy first, so that both stay right.
    None: nobody may write, since the tensors are the caller's own or autograd's.
    """

    def __init__(self, key: Tensor, value: Tensor, used_lengths: tuple[int, ...] | None) -> None:
        self.key = key  # (B, Hk, places, D)
        self.value = value  # (B, Hk, places, Dv)
        self.used_lengths = used_lengths


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one attention layer. ``KVCache()`` is empty; the first ``append`` gives it its sizes.

    Rows begin at the left: of a left-padded prompt, move each row's tokens to the left first, or pass the
    mask of the whole row, padding and all, at every step.

    >>> past = Cache().append(torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8), lengths=[4, 5])
    >>> past = past.append(torch.ones(2, 3, 1, 8), torch.ones(2, 3, 1, 8))
    >>> past.lengths
    (5, 6)
    >>> past.key[:, 0, :, 0]
    tensor([[0., 0., 0., 0., 1., 0.],
            [0., 0., 0., 0., 0., 1.]])
    """

    lengths: tuple[int, ...] = ()  # how many keys each row holds; on the host, so that no GPU is waited for
    buffer: KVBuffer | None = field(default=None, repr=False)
    owner: object | None = field(default=None, repr=False)  # the layer that these are of, if one said so
    padding_is_zero: bool = field(
        default=False, repr=False
    )  # known: behind each row's length there are zeros

    @property
    def key(self) -> Tensor:
        """``(B, Hk, K, D)``, K the largest of ``lengths``; what lies behind a row's length means nothing."""
        return self._require_buffer().key[:, :, : self.max_length]

    @property
    def value(self) -> Tensor:
        """``(B, Hk, K, Dv)``, as :attr:`key`."""
        return self._require_buffer().value[:, :, : self.max_length]

    @property
    def max_length(self) -> int:
        """The number of keys of the longest row."""
        return max(self.lengths, default=0)

    @property
    def offset(self) -> int | tuple[int, ...]:
        """How many tokens lie before the next one: one number, or, where the rows differ, one for each."""
        return self.lengths if _is_ragged(self.lengths) else self.max_length

    def append(self, key: Tensor, value: Tensor, lengths: PerRowInts | None = None) -> KVCache:
        """A cache that holds ``key`` ``(B, Hk, T, D)`` and ``value`` ``(B, Hk, T, Dv)`` too.

        ``lengths`` tells how many of the T new tokens of each row are real, counted from the left;
        None: all of them.
        """
        self._check_append(key, value)
        batch, new = key.shape[0], key.shape[2]
        after = self._lengths_after(batch, new, lengths)
        if self.buffer is None:
            return KVCache(after, KVBuffer(key, value, used_lengths=None), self.owner)
        begin = self._get_write_positions(new, key.device)
        if torch.is_grad_enabled():
            # Autograd keeps tensors for the backward pass by reference: nothing may be written in place.
            joined = (
                _append_out_of_place(self.key, key, begin),
                _append_out_of_place(self.value, value, begin),
            )
            return KVCache(after, KVBuffer(*joined, used_lengths=None), self.owner)
        room = self._get_writable_buffer(self.max_length + new)
        _write_in_place(room.key, key, begin)
        _write_in_place(room.value, value, begin)
        room.used_lengths = after
        return KVCache(after, room, self.owner)

    def reorder(self, index: PerRowInts) -> KVCache:
        """The rows ``index`` of the batch, in that order; a row may be left out or come twice (beam search).

        An index on a GPU is waited for only if the rows differ in length.
        """
        room = self._require_buffer()
        rows = torch.as_tensor(index)
        if rows.dim() != 1 or (rows.numel() and (rows.is_floating_point() or rows.dtype == torch.bool)):
            raise InputError(
                "reorder(index) takes the numbers of the rows, whole numbers in one dimension; "
                f"{rows.dtype} of shape {tuple(rows.shape)} came"
            )
        lengths = (self.max_length,) * len(rows)
        if rows.device.type == "cpu" or _is_ragged(self.lengths):
            known = rows.tolist()
            for row in known:
                if not 0 <= row < len(self.lengths):
                    raise InputError(f"reorder(index) asks for row {row} of a batch of {len(self.lengths)}; "
                                     "the first row is 0")  # fmt: skip
            lengths = tuple(self.lengths[row] for row in known)
        rows = move_to_device(rows.long(), room.key.device)
        # The free places come along, so that the step that follows need not make new ones.
        taken = None if torch.is_grad_enabled() else lengths
        key, value = (x.index_select(0, rows) for x in (room.key, room.value))
        return KVCache(lengths, KVBuffer(key, value, taken), self.owner, self.padding_is_zero)

    def zero_padding(self) -> KVCache:
        """The same, with zeros behind each row's length: done once, so that no step has to see to it."""
        if self.padding_is_zero or not _is_ragged(self.lengths):
            return self
        ends = move_to_device(torch.tensor(self.lengths), self.key.device)
        real = (torch.arange(self.max_length, device=ends.device) < ends[:, None])[:, None, :, None]
        key, value = (x.where(real, 0) for x in (self.key, self.value))
        return KVCache(
            self.lengths, KVBuffer(key, value, used_lengths=None), self.owner, padding_is_zero=True
        )

    def build_causal_mask(self, num_new_tokens: int, lengths: PerRowInts | None = None) -> Mask:
        """The mask for ``num_new_tokens`` tokens about to be appended: each sees the past, itself, and nothing later.

        ``lengths`` as in :meth:`append`. The layers of a model share this mask: make it once a step.

        >>> Cache().causal(3)
        causal()
        >>> past = Cache().append(torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5, 8), lengths=[4, 5])
        >>> past.causal(2)
        causal(offset=[4, 5]) & padding([6, 7])
        """
        batch = len(self.lengths) if self.buffer is not None or lengths is None else len(lengths)
        before, after = self._lengths_before(batch), self._lengths_after(batch, num_new_tokens, lengths)
        if not _is_ragged(before) and all(
            b + num_new_tokens == a for b, a in zip(before, after, strict=True)
        ):
            return masks.causal()  # all rows alike: bottom-right says the same, and the fast paths know it
        if num_new_tokens == 1:
            return masks.padding(after)  # nothing is later than the only new token
        return masks.causal(offset=before) & masks.padding(after)

    @functools.cached_property
    def padding_mask(self) -> Mask | None:
        """The mask for queries that may see all that is cached (cross-attention); None: none is needed."""
        if not _is_ragged(self.lengths):
            return None
        return replace(cast(PaddingMask, masks.padding(self.lengths)), padding_is_zero=self.padding_is_zero)

    def _require_buffer(self) -> KVBuffer:
        if self.buffer is None:
            raise InputError("this cache is empty; append(key, value) gives one that is not")
        return self.buffer

    def _get_writable_buffer(self, capacity: int) -> KVBuffer:
        """Room for so many keys a row, which this cache may write into."""
        room = self._require_buffer()
        have = room.key.shape[2]
        # What was made in inference mode cannot be written outside of it.
        writable = torch.is_inference_mode_enabled() or not room.key.is_inference()
        if room.used_lengths == self.lengths and capacity <= have and writable:
            return room
        free = max(capacity, 2 * have) - self.max_length  # doubling: T steps copy O(T), not O(T²)
        key, value = (F.pad(x, (0, 0, 0, free)) for x in (self.key, self.value))
        return KVBuffer(key, value, self.lengths)

    def _get_write_positions(self, num_new_tokens: int, device: torch.device) -> int | Tensor:
        """Where the new tokens go: from one place on, or, where the rows differ, to places ``(B, T)``."""
        if not _is_ragged(self.lengths):
            return self.max_length
        return move_to_device(torch.tensor(self.lengths)[:, None] + torch.arange(num_new_tokens), device)

    def _lengths_before(self, batch_size: int) -> tuple[int, ...]:
        return self.lengths or (0,) * batch_size

    def _lengths_after(
        self, batch_size: int, num_new_tokens: int, lengths: PerRowInts | None
    ) -> tuple[int, ...]:
        before = self._lengths_before(batch_size)
        if lengths is None:
            return tuple(b + num_new_tokens for b in before)
        if isinstance(lengths, int):
            raise InputError(
                f"lengths={lengths} came; one number for each of the {batch_size} rows is expected"
            )
        added = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        if len(added) != batch_size or any(
            not isinstance(n, int) or not 0 <= n <= num_new_tokens for n in added
        ):
            raise InputError(
                f"lengths {added} came with {batch_size} rows of {num_new_tokens} new tokens; "
                f"expected a whole number from 0 to {num_new_tokens} for each row: how many of its tokens are real"
            )
        return tuple(b + n for b, n in zip(before, added, strict=True))

    def _check_append(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise InputError(
                f"append: key {tuple(key.shape)} and value {tuple(value.shape)} came; expected "
                "(batch, heads, tokens, width), with the same batch, heads and tokens in both"
            )
        if self.buffer is None:
            return
        for name, new, old in (("key", key, self.buffer.key), ("value", value, self.buffer.value)):
            if (*new.shape[:2], new.shape[3]) != (*old.shape[:2], old.shape[3]):
                raise InputError(
                    f"append: a {name} of shape {tuple(new.shape)} came, but the cache holds a batch of "
                    f"{old.shape[0]}, {old.shape[1]} heads and width {old.shape[3]}; a cache belongs to one "
                    "layer and one batch: start from Cache() for another, or choose rows with reorder(index)"
                )
            if (new.dtype, new.device) != (old.dtype, old.device):
                raise InputError(
                    f"append: a {name} of {new.dtype} on {new.device} came, but the cache holds {old.dtype} "
                    f"on {old.device}; bring them together with .to()"
                )


def _append_out_of_place(old: Tensor, new: Tensor, write_positions: int | Tensor) -> Tensor:
    """``num_new_tokens`` behind what each row of ``old`` holds, as a tensor of its own."""
    if isinstance(write_positions, int):
        return torch.cat([old, new], dim=2)
    return F.pad(old, (0, 0, 0, new.shape[2])).scatter(2, _expand_scatter_index(write_positions, new), new)


def _write_in_place(buffer: Tensor, new: Tensor, write_positions: int | Tensor) -> None:
    """``num_new_tokens`` into the free places behind what each row of ``buffer`` holds."""
    if isinstance(write_positions, int):
        buffer[:, :, write_positions : write_positions + new.shape[2]] = new
    else:
        buffer.scatter_(2, _expand_scatter_index(write_positions, new), new)


def _expand_scatter_index(write_positions: Tensor, new: Tensor) -> Tensor:
    """The places ``(B, T)`` as ``scatter`` wants them: one for every number of ``num_new_tokens``."""
    return write_positions[:, None, :, None].expand_as(new)


def _is_ragged(lengths: tuple[int, ...]) -> bool:
    return len(set(lengths)) > 1
