"""Paths for packed sequences: our kernel for short ones and FlashAttention on a GPU, SDPA on the CPU."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import HALF_DTYPES, MAX_FLASH_WIDTH, has_triton, packed_unsupported_reason
from jumok.attention.mask_types import Mask, WindowMask, move_to_device
from jumok.attention.packed_masks import DocumentMask, PackedMask
from jumok.attention.paths import NO_KEYS_REASON, NOT_APPLICABLE

UNMATCHED_REASON = "each sequence must have both queries and keys, or neither"
MAX_SHORT_WIDTH = MAX_SHORT_LENGTH = 128  # limits of our kernel for short sequences


def short_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why our kernel for short sequences does not serve the call, or None if it does."""
    reason = _kernel_unsupported_reason(call, MAX_SHORT_WIDTH, "our kernel")
    if reason is not None:
        return reason
    packed = _get_packed_mask(call)
    max_seqlen = max(packed.max_seqlen, packed.max_seqlen_q)
    if max_seqlen > MAX_SHORT_LENGTH:
        return f"it serves sequences of at most {MAX_SHORT_LENGTH} tokens, and these have up to {max_seqlen}"
    max_seqlen_q = packed.max_seqlen if packed.cu_seqlens_q is None else packed.max_seqlen_q
    width = call.query.shape[-1]
    return _short_kernel_unsupported_reason(call.shape.device, max_seqlen_q, packed.max_seqlen, width)


def varlen_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why FlashAttention over packed sequences does not serve the call, or None if it does."""
    reason = _kernel_unsupported_reason(call, MAX_FLASH_WIDTH, "FlashAttention")
    if reason is not None:
        return reason
    if call.dropout:
        return "it has no dropout"
    return None if _find_packed_mask(call).queries_match_keys is not False else UNMATCHED_REASON


def per_sequence_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why SDPA does not process the sequences one at a time, or None if it does."""
    reason = _layout_unsupported_reason(call)
    if reason == NOT_APPLICABLE or call.shape.device.type != "cpu":
        return NOT_APPLICABLE  # on a GPU, one launch per sequence would be slowest
    if reason is not None:
        return reason
    if _find_packed_mask(call).queries_match_keys is False:
        return UNMATCHED_REASON
    if min(call.shape.num_queries, call.shape.num_keys) == 0:
        return NO_KEYS_REASON
    if call.dropout:
        packed = _get_packed_mask(call)
        max_pairs = packed.max_seqlen * (packed.max_seqlen_q or packed.max_seqlen)
        if max_pairs * call.leading_shape.numel() > chunking.MAX_CHUNK_ELEMENTS:
            return "with dropout, SDPA computes all weights of a sequence at once on the CPU"
    return None


def has_fast_varlen_path(device: torch.device, max_seqlen: int, head_width: int, dropout: float) -> bool:
    """Return whether packed sequences of this length have a fast path, in half precision."""
    if packed_unsupported_reason(device) is not None:
        return False
    if not dropout:
        return True
    if max_seqlen > MAX_SHORT_LENGTH or head_width > MAX_SHORT_WIDTH or head_width % 8:
        return False
    return _short_kernel_unsupported_reason(device, max_seqlen, max_seqlen, head_width) is None


def _short_kernel_unsupported_reason(
    device: torch.device, max_seqlen_q: int, max_seqlen_k: int, width: int
) -> str | None:
    if not has_triton():
        return "Triton is not installed"
    from jumok.attention.kernels.short_sequences import fits_shared_memory

    if fits_shared_memory(device, max_seqlen_q, max_seqlen_k, width):
        return None
    return "this GPU has too little shared memory for sequences of this length and width"


def _kernel_unsupported_reason(call: AttentionCall, max_width: int, kernel_name: str) -> str | None:
    """Return why no GPU kernel for packed sequences of at most this width serves the call, or None."""
    reason = _layout_unsupported_reason(call)
    if reason != NOT_APPLICABLE:
        reason = packed_unsupported_reason(call.shape.device) or reason
    if reason is not None:
        return reason
    if call.query.dtype not in HALF_DTYPES:
        return f"{kernel_name} supports float16 and bfloat16, not {call.query.dtype}"
    width = call.query.shape[-1]
    if width != cast(Tensor, call.value).shape[-1] or not 0 < width <= max_width or width % 8:
        return f"{kernel_name} needs keys and values of the same width, at most {max_width} and a multiple of 8"
    return "there are no heads" if 0 in call.leading_shape else None


def _layout_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why this is not a call over packed sequences that a path of this module could serve, or None."""
    masks = () if call.mask is None else call.mask.conjuncts()
    packed_masks = [mask for mask in masks if isinstance(mask, DocumentMask | PackedMask)]
    if call.dot_score is None or not packed_masks:
        return NOT_APPLICABLE
    packed = packed_masks[0]
    other_masks = [mask for mask in masks if not isinstance(mask, DocumentMask | PackedMask)]
    if len(packed_masks) != 1 or not _is_in_order(packed):
        return "it serves packed documents that are contiguous, in one order and without padding"
    if isinstance(packed, DocumentMask) and packed.ids.numel() != call.shape.num_keys:
        return "it serves one packing for all heads"
    if any(not (isinstance(mask, WindowMask) and mask.is_causal) for mask in other_masks):
        return "in addition to documents it supports only a causal mask"
    if call.shape.num_leading_dims != 2 or call.leading_shape[0] != 1:
        return "it serves the shape (1, heads, length, width)"
    if packed.is_self_attention and call.shape.num_queries != call.shape.num_keys:
        return "it serves all queries of the documents, not only the last ones"
    if other_masks and not packed.is_self_attention:
        return "from one packing to another it supports no causal mask"
    if call.softcap is not None or call.bias is not None:
        return "it has no softcap and no bias"
    return "it has no grouped queries" if call.group_size > 1 else None


def _is_in_order(mask: DocumentMask | PackedMask) -> bool:
    if isinstance(mask, PackedMask):
        return True
    return not mask.has_padding and mask.get_or_compute("same order", mask.has_same_order)


def _find_packed_mask(call: AttentionCall) -> DocumentMask | PackedMask:
    return next(mask for mask in cast(Mask, call.mask).conjuncts() if isinstance(mask, DocumentMask | PackedMask))


def _get_packed_mask(call: AttentionCall) -> PackedMask:
    """Return the packed sequences of the mask. Those of documents have boundaries on the query's device."""
    mask, device = _find_packed_mask(call), call.shape.device
    if isinstance(mask, DocumentMask):
        return mask.get_or_compute(("packed", device), lambda: mask.to_packed(device))
    return mask


def _get_cu_seqlens(call: AttentionCall) -> tuple[Tensor, Tensor, int, int]:
    """Return the boundaries of queries and of keys on the query's device, and the maximum length of each."""
    packed = _get_packed_mask(call)
    cu_seqlens_k = move_to_device(packed.cu_seqlens, call.shape.device).contiguous()
    if packed.cu_seqlens_q is None:
        return cu_seqlens_k, cu_seqlens_k, packed.max_seqlen, packed.max_seqlen
    cu_seqlens_q = move_to_device(packed.cu_seqlens_q, call.shape.device).contiguous()
    return cu_seqlens_q, cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen


def _expand_leading_dims(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as ``(1, heads, length, width)``, without copies."""

    def expand(x: Tensor) -> Tensor:
        return x if x.shape[:-2] == call.leading_shape else x.expand(*call.leading_shape, *x.shape[-2:])

    return expand(call.query), expand(call.prepare_keys()), expand(call.prepare_value())


def _is_causal(call: AttentionCall) -> bool:
    return len(cast(Mask, call.mask).conjuncts()) > 1


def run_short(call: AttentionCall) -> Tensor:
    """Compute the call with our kernel (:mod:`jumok.attention.kernels.short_sequences`)."""
    from jumok.attention.kernels.short_sequences import ShortSequenceLayout, attend_short_sequences

    layout = ShortSequenceLayout(*_get_cu_seqlens(call), causal=_is_causal(call))
    return attend_short_sequences(*_expand_leading_dims(call), layout, call.dot_scale(), call.dropout)


def run_varlen(call: AttentionCall) -> Tensor:
    """Compute the call with PyTorch's FlashAttention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = _get_cu_seqlens(call)
    causal_kwargs = {"window_size": (-1, 0)} if _is_causal(call) else {}
    # squeeze, not [0]: the backward pass of an index copies the gradient into a tensor of zeros.
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in _expand_leading_dims(call))  # (length, heads, width)
    out = varlen_attn(
        query,
        key,
        value,
        cu_seqlens_q.to(torch.int32),
        cu_seqlens_k.to(torch.int32),
        max_seqlen_q,
        max_seqlen_k,
        scale=call.dot_scale(),
        **cast(Any, causal_kwargs),
    )
    return cast(Tensor, out).transpose(0, 1)[None]


def run_per_sequence(call: AttentionCall) -> Tensor:
    """Compute the call with SDPA, one sequence at a time: no score between two sequences is computed."""
    packed = _get_packed_mask(call)
    key_lengths = packed.get_or_compute("key lengths", lambda: packed.cu_seqlens.diff().tolist())
    query_lengths = key_lengths
    if packed.cu_seqlens_q is not None:
        cu_seqlens_q = packed.cu_seqlens_q
        query_lengths = packed.get_or_compute("query lengths", lambda: cu_seqlens_q.diff().tolist())
    queries, keys, values = (
        x.expand(*call.leading_shape, *x.shape[-2:]).split(lengths, dim=-2)
        for x, lengths in (
            (call.query, query_lengths),
            (call.prepare_keys(), key_lengths),
            (call.prepare_value(), key_lengths),
        )
    )
    is_causal, scale = _is_causal(call), call.dot_scale()
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, is_causal=is_causal, scale=scale)
        for q, k, v in zip(queries, keys, values, strict=True)
        if q.shape[-2]
    ]
    return torch.cat(outputs, dim=-2)
