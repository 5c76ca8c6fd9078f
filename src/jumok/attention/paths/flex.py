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

from jumok.attention.mask_types import AndMask, AttentionShape, Band, BandMask, Mask, NotMask, OrMask
from jumok.attention.packed_masks import DocumentMask, PackedMask

BLOCK_SIZE = 128  # FlexAttention's block of queries and of keys


class BlockCoverage(NamedTuple):
    """For every block of queries and keys, ``(*leading, blocks of Q, blocks of K)``: may some, do all attend?

    ``any_allowed`` may be true of an empty block and ``all_allowed`` false of a full one: that costs time, nothing else.
    """

    any_allowed: Tensor
    all_allowed: Tensor


def is_structured(mask: Mask) -> bool:
    """Whether the mask is made of bands by ``&``, ``|`` and ``~``."""
    if isinstance(mask, AndMask | OrMask):
        return is_structured(mask.a) and is_structured(mask.b)
    if isinstance(mask, NotMask):
        return is_structured(mask.a)
    return mask.contiguous if isinstance(mask, DocumentMask) else isinstance(mask, BandMask)


def compute_block_coverage(mask: Mask, shape: AttentionShape, block_size: int = BLOCK_SIZE) -> BlockCoverage:
    """Which blocks are empty, full or mixed, for a structured mask."""
    band = mask.to_band(shape)
    if band is not None:
        return _compute_band_coverage(band, shape, block_size)
    if isinstance(mask, NotMask):
        inner = compute_block_coverage(mask.a, shape, block_size)
        # Places beyond Q and K are in no mask, so a block that sticks out is never full.
        inside = _find_complete_blocks(shape, block_size)
        return BlockCoverage(~inner.all_allowed, ~inner.any_allowed & inside)
    assert isinstance(mask, AndMask | OrMask)
    a, b = (
        compute_block_coverage(mask.a, shape, block_size),
        compute_block_coverage(mask.b, shape, block_size),
    )
    if isinstance(mask, AndMask):
        return BlockCoverage(a.any_allowed & b.any_allowed, a.all_allowed & b.all_allowed)
    return BlockCoverage(a.any_allowed | b.any_allowed, a.all_allowed | b.all_allowed)


def _compute_band_coverage(band: Band, shape: AttentionShape, block_size: int) -> BlockCoverage:
    first, last = (
        x.expand(*x.shape[:-1], shape.num_queries) for x in torch.broadcast_tensors(band.first, band.last)
    )
    empty = first.clamp(min=0) > last.clamp(max=shape.num_keys - 1)
    # Empty rows, and the rows that fill up the last block, begin behind the end and end before the beginning.
    first, last = first.masked_fill(empty, shape.num_keys), last.masked_fill(empty, -1)
    short = -shape.num_queries % block_size
    first = torch.nn.functional.pad(first, (0, short), value=shape.num_keys).unflatten(-1, (-1, block_size))
    last = torch.nn.functional.pad(last, (0, short), value=-1).unflatten(-1, (-1, block_size))
    begin = torch.arange(0, shape.num_keys, block_size, device=shape.device)
    end = begin + block_size - 1
    earliest, latest = first.amin(-1)[..., None], first.amax(-1)[..., None]
    soonest, furthest = last.amin(-1)[..., None], last.amax(-1)[..., None]
    some = (earliest <= end) & (furthest >= begin)
    full = (latest <= begin) & (soonest >= end) & (end < shape.num_keys)
    return BlockCoverage(some, full)


def _find_complete_blocks(shape: AttentionShape, block_size: int) -> Tensor:
    queries = (
        torch.arange(0, shape.num_queries, block_size, device=shape.device) + block_size <= shape.num_queries
    )
    keys = torch.arange(0, shape.num_keys, block_size, device=shape.device) + block_size <= shape.num_keys
    return queries[:, None] & keys[None, :]


MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build_mask_mod(mask: Mask, shape: AttentionShape) -> MaskMod:
    """The mask as FlexAttention's function of (batch, head, query, key)."""
    band = mask.to_band(shape)
    if band is not None:
        return _build_band_mask_mod(band, shape)
    if isinstance(mask, NotMask):
        inner = build_mask_mod(mask.a, shape)
        return lambda b, h, q, k: ~inner(b, h, q, k)
    assert isinstance(mask, AndMask | OrMask)
    one, other = build_mask_mod(mask.a, shape), build_mask_mod(mask.b, shape)
    if isinstance(mask, AndMask):
        return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)
    return lambda b, h, q, k: one(b, h, q, k) | other(b, h, q, k)


def _build_band_mask_mod(band: Band, shape: AttentionShape) -> MaskMod:
    ends = torch.broadcast_tensors(band.first, band.last)
    first, last = (_add_leading_dims(x.clamp(-1, shape.num_keys).int(), shape).contiguous() for x in ends)
    # A dimension in which all is alike has one entry, which every index finds: i · 0.
    batch, head, query = (int(n > 1) for n in first.shape)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at_row = b * batch, h * head, q * query
        return (k >= first[at_row]) & (k <= last[at_row])

    return allowed


def _add_leading_dims(x: Tensor, shape: AttentionShape) -> Tensor:
    """``(*leading, …)`` with exactly batch and heads in front."""
    return x.reshape(*[1] * (2 - shape.num_leading_dims), *x.shape)


def build_block_mask(mask: Mask, shape: AttentionShape) -> Any:
    """FlexAttention's block mask for a structured mask."""
    from torch.nn.attention.flex_attention import BlockMask

    some, full = (_add_leading_dims(x, shape) for x in compute_block_coverage(mask, shape))
    mixed = some & ~full
    return BlockMask.from_kv_blocks(
        *_list_blocks(mixed),
        *_list_blocks(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=build_mask_mod(mask, shape),
        seq_lengths=(shape.num_queries, shape.num_keys),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which: theirs first, in order."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int().contiguous()


def run_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    shape: AttentionShape,
    *,
    softcap: float | None,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """``(B, H, Q, D)`` attention by compiled FlexAttention."""
    blocks = (
        None if mask is None else mask.get_or_compute(("flex", shape), lambda: build_block_mask(mask, shape))
    )
    # Each combination of dtype, head width and kind of shape is compiled once. Beyond PyTorch's usual limit
    # of 8 it would quietly fall back to code that builds Q×K scores: the limit is raised, and reaching it is
    # an error.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        out = _compile_flex_attention()(
            query,
            key,
            value,
            score_mod=_build_softcap_score_mod(softcap),
            block_mask=blocks,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return cast(Tensor, out)


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.cache
def _build_softcap_score_mod(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def pack_documents(documents: DocumentMask, device: torch.device) -> PackedMask:
    """Documents that are in one piece each, told by their edges on a device."""

    def edges(ids: Tensor) -> tuple[Tensor, int]:
        ids = ids.reshape(-1)
        inner = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
        begins = torch.cat([torch.tensor([0]), inner, torch.tensor([len(ids)])])
        return begins.to(device=device, dtype=torch.int32), int(begins.diff().max())

    asked = (None, 0) if documents.query_ids is None else edges(documents.query_ids)
    return PackedMask(*edges(documents.ids), *asked)


def have_same_order(documents: DocumentMask) -> bool:
    """Whether queries and keys hold the same documents in the same order, each in one piece."""
    if documents.query_ids is None:
        return documents.contiguous
    keys, queries = (ids.reshape(-1).unique_consecutive() for ids in (documents.ids, documents.query_ids))
    return documents.contiguous and torch.equal(keys, queries)
