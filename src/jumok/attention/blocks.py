"""Block masks for FlexAttention and edges for packed attention, made from a mask's structure.

FlexAttention skips blocks in which nothing is allowed and does not mask blocks in which everything is.
Its own ``create_block_mask`` finds them by building the whole Q×K mask. Here they follow from the bands:
a block's rows see something of its keys, or all of them, judging by the smallest and largest ends of
their bands. So O(Q + blocks) memory, whatever the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from jumok.attention.kinds import All, At, Band, Banded, Either, Mask, Not
from jumok.attention.packings import Documents, Packed

SIZE = 128  # FlexAttention's block of queries and of keys


class Tiles(NamedTuple):
    """For every block of queries and keys, ``(*leading, blocks of Q, blocks of K)``: may some, do all attend?

    ``some`` may be true of an empty block and ``full`` false of a full one: that costs time, nothing else.
    """

    some: Tensor
    full: Tensor


def is_structured(mask: Mask) -> bool:
    """Whether the mask is made of bands by ``&``, ``|`` and ``~``."""
    if isinstance(mask, All | Either):
        return is_structured(mask.a) and is_structured(mask.b)
    if isinstance(mask, Not):
        return is_structured(mask.a)
    return mask.contiguous if isinstance(mask, Documents) else isinstance(mask, Banded)


def tiles(mask: Mask, at: At, size: int = SIZE) -> Tiles:
    """Which blocks are empty, full or mixed, for a structured mask."""
    band = mask.band(at)
    if band is not None:
        return _band_tiles(band, at, size)
    if isinstance(mask, Not):
        inner = tiles(mask.a, at, size)
        # Places beyond Q and K are in no mask, so a block that sticks out is never full.
        inside = _inside(at, size)
        return Tiles(~inner.full, ~inner.some & inside)
    assert isinstance(mask, All | Either)
    a, b = tiles(mask.a, at, size), tiles(mask.b, at, size)
    if isinstance(mask, All):
        return Tiles(a.some & b.some, a.full & b.full)
    return Tiles(a.some | b.some, a.full | b.full)


def _band_tiles(band: Band, at: At, size: int) -> Tiles:
    first, last = (
        x.expand(*x.shape[:-1], at.queries) for x in torch.broadcast_tensors(band.first, band.last)
    )
    empty = first.clamp(min=0) > last.clamp(max=at.keys - 1)
    # Empty rows, and the rows that fill up the last block, begin behind the end and end before the beginning.
    first, last = first.masked_fill(empty, at.keys), last.masked_fill(empty, -1)
    short = -at.queries % size
    first = torch.nn.functional.pad(first, (0, short), value=at.keys).unflatten(-1, (-1, size))
    last = torch.nn.functional.pad(last, (0, short), value=-1).unflatten(-1, (-1, size))
    begin = torch.arange(0, at.keys, size, device=at.device)
    end = begin + size - 1
    earliest, latest = first.amin(-1)[..., None], first.amax(-1)[..., None]
    soonest, furthest = last.amin(-1)[..., None], last.amax(-1)[..., None]
    some = (earliest <= end) & (furthest >= begin)
    full = (latest <= begin) & (soonest >= end) & (end < at.keys)
    return Tiles(some, full)


def _inside(at: At, size: int) -> Tensor:
    queries = torch.arange(0, at.queries, size, device=at.device) + size <= at.queries
    keys = torch.arange(0, at.keys, size, device=at.device) + size <= at.keys
    return queries[:, None] & keys[None, :]


Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def rule(mask: Mask, at: At) -> Rule:
    """The mask as FlexAttention's function of (batch, head, query, key)."""
    band = mask.band(at)
    if band is not None:
        return _band_rule(band, at)
    if isinstance(mask, Not):
        inner = rule(mask.a, at)
        return lambda b, h, q, k: ~inner(b, h, q, k)
    assert isinstance(mask, All | Either)
    one, other = rule(mask.a, at), rule(mask.b, at)
    if isinstance(mask, All):
        return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)
    return lambda b, h, q, k: one(b, h, q, k) | other(b, h, q, k)


def _band_rule(band: Band, at: At) -> Rule:
    ends = torch.broadcast_tensors(band.first, band.last)
    first, last = (_four(x.clamp(-1, at.keys).int(), at).contiguous() for x in ends)
    # A dimension in which all is alike has one entry, which every index finds: i · 0.
    batch, head, query = (int(n > 1) for n in first.shape)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at_row = b * batch, h * head, q * query
        return (k >= first[at_row]) & (k <= last[at_row])

    return allowed


def _four(x: Tensor, at: At) -> Tensor:
    """``(*leading, …)`` with exactly batch and heads in front."""
    return x.reshape(*[1] * (2 - at.leading), *x.shape)


def block_mask(mask: Mask, at: At) -> Any:
    """FlexAttention's block mask for a structured mask."""
    from torch.nn.attention.flex_attention import BlockMask

    some, full = (_four(x, at) for x in tiles(mask, at))
    mixed = some & ~full
    return BlockMask.from_kv_blocks(
        *_listed(mixed),
        *_listed(full),
        BLOCK_SIZE=SIZE,
        mask_mod=rule(mask, at),
        seq_lengths=(at.queries, at.keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which: theirs first, in order."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int().contiguous()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    at: At,
    *,
    softcap: float | None,
    scale: float,
    grouped: bool,
) -> Tensor:
    """``(B, H, Q, D)`` attention by compiled FlexAttention."""
    blocks = None if mask is None else mask.remember(("flex", at), lambda: block_mask(mask, at))
    # Each combination of dtype, head width and kind of shape is compiled once. Beyond PyTorch's usual limit
    # of 8 it would quietly fall back to code that builds Q×K scores: the limit is raised, and reaching it is
    # an error.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        out = _compiled()(
            query, key, value, score_mod=_softcap(softcap), block_mask=blocks, scale=scale, enable_gqa=grouped
        )
    return cast(Tensor, out)


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.cache
def _softcap(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def packing(documents: Documents, device: torch.device) -> Packed:
    """Documents that are in one piece each, told by their edges on a device."""

    def edges(ids: Tensor) -> tuple[Tensor, int]:
        ids = ids.reshape(-1)
        inner = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
        begins = torch.cat([torch.tensor([0]), inner, torch.tensor([len(ids)])])
        return begins.to(device=device, dtype=torch.int32), int(begins.diff().max())

    asked = (None, 0) if documents.queries is None else edges(documents.queries)
    return Packed(*edges(documents.ids), *asked)


def same_order(packed: Documents) -> bool:
    """Whether queries and keys hold the same documents in the same order, each in one piece."""
    if packed.queries is None:
        return packed.contiguous
    keys, queries = (ids.reshape(-1).unique_consecutive() for ids in (packed.ids, packed.queries))
    return packed.contiguous and torch.equal(keys, queries)
