"""FlexAttention, with block masks built from a mask's structure.

FlexAttention skips blocks in which nothing is allowed and does not mask blocks in which everything is. Its
own ``create_block_mask`` finds them by building the whole Q×K mask. Here they follow from the bands: the
smallest and largest ends of the bands of a block's rows tell whether these rows see any or all of the block's
keys. This takes O(Q + blocks) memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import get_gpu_properties, supports_compile
from jumok.attention.mask_types import AndMask, AttentionShape, Band, BandMask, Mask, NotMask, OrMask
from jumok.attention.packed_masks import DocumentMask
from jumok.attention.paths import NO_KEYS_REASON, NOT_APPLICABLE
from jumok.attention.paths.sdpa import (
    WIDE_QUERY_REASON,
    contains_tensor_mask,
    is_one_wide_query,
    make_4d_reshape,
)

BLOCK_SIZE = 128  # queries and keys of FlexAttention's blocks

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why FlexAttention does not serve the call, or None if it does."""
    if call.dot_score is None:
        return NOT_APPLICABLE
    if get_gpu_properties(call.shape.device) is None:
        return f"it runs on CUDA, and the tensors are on {call.shape.device.type}"
    if not supports_compile(call.shape.device):
        return "it needs torch.compile, which does not support this GPU here (is Triton installed?)"
    if call.query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it supports bfloat16, float16 and float32, not {call.query.dtype}"
    if call.shape.num_leading_dims > 2:
        return (
            "it supports the leading dimensions batch and heads, and there are "
            f"{call.shape.num_leading_dims} leading dimensions"
        )
    if call.mask is not None and contains_tensor_mask(call.mask):
        return "the mask is a tensor already"
    if call.mask is not None and not is_structured(call.mask):
        return "the mask has no structure that it could use"
    if call.bias is not None or call.dropout:
        return "it has no bias and no dropout here"
    if min(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) < 16:
        return "its kernels need widths of 16 and more"
    if min(call.shape.num_queries, call.shape.num_keys) == 0:
        return NO_KEYS_REASON
    return WIDE_QUERY_REASON if is_one_wide_query(call) else None


def run_flex(call: AttentionCall) -> Tensor:
    """Compute the call by compiled FlexAttention."""
    to_4d = make_4d_reshape(call)
    mask, shape = call.mask, call.shape
    block_mask = None
    if mask is not None:
        block_mask = mask.get_or_compute(("flex", shape), lambda: build_block_mask(mask, shape))
    # Each combination of dtype, head width and kind of shape is compiled once. Beyond PyTorch's default limit
    # of 8, it would silently fall back to code that builds Q×K scores. So the limit is raised, and exceeding
    # it is an error.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        out = _compile_flex_attention()(
            *(to_4d(x) for x in (call.query, call.prepare_keys(), call.prepare_value())),
            score_mod=_build_softcap_score_mod(call.softcap),
            block_mask=block_mask,
            scale=call.dot_scale(),
            enable_gqa=call.group_size > 1,
        )
    return cast(Tensor, out).reshape(*call.leading_shape, *out.shape[-2:])


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@functools.cache
def _build_softcap_score_mod(softcap: float | None) -> Callable[..., Tensor] | None:
    if softcap is None:
        return None

    def cap_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap_score


# ------------------------------------------------------------------------------------ block masks


class BlockCoverage(NamedTuple):
    """For every block of queries and keys, ``(*leading, Q blocks, K blocks)``: do any, do all pairs attend?

    ``any_allowed`` may be true for an empty block, and ``all_allowed`` false for a full one. That costs time,
    but does not change the result.
    """

    any_allowed: Tensor
    all_allowed: Tensor


def is_structured(mask: Mask) -> bool:
    """Return whether the mask is combined from bands by ``&``, ``|`` and ``~``."""
    if isinstance(mask, AndMask | OrMask):
        return is_structured(mask.a) and is_structured(mask.b)
    if isinstance(mask, NotMask):
        return is_structured(mask.a)
    return mask.contiguous if isinstance(mask, DocumentMask) else isinstance(mask, BandMask)


def compute_block_coverage(mask: Mask, shape: AttentionShape, block_size: int = BLOCK_SIZE) -> BlockCoverage:
    """Return which blocks of a structured mask are empty, full or mixed."""
    band = mask.to_band(shape)
    if band is not None:
        return _compute_band_coverage(band, shape, block_size)
    if isinstance(mask, NotMask):
        inner = compute_block_coverage(mask.a, shape, block_size)
        # Positions beyond Q and K are not allowed by any mask, so an incomplete block is never full.
        is_complete = _find_complete_blocks(shape, block_size)
        return BlockCoverage(~inner.all_allowed, ~inner.any_allowed & is_complete)
    assert isinstance(mask, AndMask | OrMask)
    a, b = (compute_block_coverage(part, shape, block_size) for part in (mask.a, mask.b))
    if isinstance(mask, AndMask):
        return BlockCoverage(a.any_allowed & b.any_allowed, a.all_allowed & b.all_allowed)
    return BlockCoverage(a.any_allowed | b.any_allowed, a.all_allowed | b.all_allowed)


def _compute_band_coverage(band: Band, shape: AttentionShape, block_size: int) -> BlockCoverage:
    first, last = (x.expand(*x.shape[:-1], shape.num_queries) for x in torch.broadcast_tensors(band.first, band.last))
    is_empty = first.clamp(min=0) > last.clamp(max=shape.num_keys - 1)
    # Empty rows, and the rows that pad the last block, start after the last key and end before the first.
    first, last = first.masked_fill(is_empty, shape.num_keys), last.masked_fill(is_empty, -1)
    padding = -shape.num_queries % block_size
    first = F.pad(first, (0, padding), value=shape.num_keys).unflatten(-1, (-1, block_size))
    last = F.pad(last, (0, padding), value=-1).unflatten(-1, (-1, block_size))
    block_start = torch.arange(0, shape.num_keys, block_size, device=shape.device)
    block_end = block_start + block_size - 1
    min_first, max_first = first.amin(-1)[..., None], first.amax(-1)[..., None]
    min_last, max_last = last.amin(-1)[..., None], last.amax(-1)[..., None]
    any_allowed = (min_first <= block_end) & (max_last >= block_start)
    all_allowed = (max_first <= block_start) & (min_last >= block_end) & (block_end < shape.num_keys)
    return BlockCoverage(any_allowed, all_allowed)


def _find_complete_blocks(shape: AttentionShape, block_size: int) -> Tensor:
    """Return which blocks lie entirely within Q queries and K keys."""
    queries, keys = (
        torch.arange(0, length, block_size, device=shape.device) + block_size <= length
        for length in (shape.num_queries, shape.num_keys)
    )
    return queries[:, None] & keys[None, :]


def build_mask_mod(mask: Mask, shape: AttentionShape) -> MaskMod:
    """Return the mask as FlexAttention's function of (batch, head, query, key)."""
    band = mask.to_band(shape)
    if band is not None:
        return _build_band_mask_mod(band, shape)
    if isinstance(mask, NotMask):
        inner = build_mask_mod(mask.a, shape)
        return lambda b, h, q, k: ~inner(b, h, q, k)
    assert isinstance(mask, AndMask | OrMask)
    left, right = build_mask_mod(mask.a, shape), build_mask_mod(mask.b, shape)
    if isinstance(mask, AndMask):
        return lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k)
    return lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k)


def _build_band_mask_mod(band: Band, shape: AttentionShape) -> MaskMod:
    ends = torch.broadcast_tensors(band.first, band.last)
    first, last = (_add_leading_dims(x.clamp(-1, shape.num_keys).int(), shape).contiguous() for x in ends)
    # A dimension of size 1 is indexed by i · 0.
    batch_factor, head_factor, query_factor = (int(size > 1) for size in first.shape)

    def is_allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        row = b * batch_factor, h * head_factor, q * query_factor
        return (k >= first[row]) & (k <= last[row])

    return is_allowed


def _add_leading_dims(x: Tensor, shape: AttentionShape) -> Tensor:
    """Add leading dimensions to ``(*leading, …)``, so that there are exactly batch and heads."""
    return x.reshape(*[1] * (2 - shape.num_leading_dims), *x.shape)


def build_block_mask(mask: Mask, shape: AttentionShape) -> Any:
    """Return FlexAttention's block mask for a structured mask."""
    from torch.nn.attention.flex_attention import BlockMask

    any_allowed, all_allowed = (_add_leading_dims(x, shape) for x in compute_block_coverage(mask, shape))
    return BlockMask.from_kv_blocks(
        *_list_blocks(any_allowed & ~all_allowed),
        *_list_blocks(all_allowed),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=build_mask_mod(mask, shape),
        seq_lengths=(shape.num_queries, shape.num_keys),
    )


def _list_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected blocks of each row, and the block indices, selected ones first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int().contiguous()
