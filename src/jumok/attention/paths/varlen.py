"""The fast paths for packed sequences: our kernel for short ones, FlashAttention for any others, on a GPU.

On the CPU one sequence is attended to after the other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import has_triton, packed_unsupported_reason
from jumok.attention.mask_types import Mask, WindowMask, move_to_device
from jumok.attention.packed_masks import DocumentMask, PackedMask
from jumok.attention.paths import flex

NOT_APPLICABLE = ""  # the reason of a path that is for other calls altogether
HALF_DTYPES = (torch.float16, torch.bfloat16)
UNMATCHED_REASON = "each sequence must have both queries and keys, or neither"
MAX_FLASH_WIDTH = 256
MAX_SHORT_WIDTH = MAX_SHORT_LENGTH = 128  # what a program of our kernel holds


def packed_call_unsupported_reason(call: AttentionCall) -> str | None:
    """Why no kernel for packed sequences on a GPU serves the call."""
    if call.dot_score is None:
        return NOT_APPLICABLE
    return packed_unsupported_reason(call.shape.device)


def short_unsupported_reason(call: AttentionCall) -> str | None:
    """Why our kernel for short sequences does not serve the call."""
    reason = _kernel_unsupported_reason(call, MAX_SHORT_WIDTH, "our kernel")
    if reason is not None:
        return reason
    packed = _get_packed_mask(call)
    longest = max(packed.max_seqlen, packed.max_seqlen_q)
    if longest > MAX_SHORT_LENGTH:
        return f"it serves sequences of at most {MAX_SHORT_LENGTH} tokens, and these have up to {longest}"
    if not has_triton():
        return "Triton is not installed"
    from jumok.attention.kernels.short_sequences import fits_shared_memory

    queries = packed.max_seqlen if packed.cu_seqlens_q is None else packed.max_seqlen_q
    room = fits_shared_memory(call.shape.device, queries, packed.max_seqlen, call.query.shape[-1])
    return None if room else "this GPU has too little shared memory for sequences of this length and width"


def varlen_unsupported_reason(call: AttentionCall) -> str | None:
    """Why FlashAttention over packed sequences does not serve the call."""
    reason = _kernel_unsupported_reason(call, MAX_FLASH_WIDTH, "FlashAttention")
    if reason is not None:
        return reason
    if call.dropout:
        return "it has no dropout"
    return None if _find_packed_mask(call).queries_match_keys is not False else UNMATCHED_REASON


def has_fast_varlen_path(device: torch.device, max_seqlen: int, head_width: int, dropout: float) -> bool:
    """Whether packed sequences of this length, in half precision with heads this wide, have a fast path."""
    if packed_unsupported_reason(device) is not None:
        return False
    if not dropout:
        return True
    if max_seqlen > MAX_SHORT_LENGTH or head_width > MAX_SHORT_WIDTH or head_width % 8 or not has_triton():
        return False
    from jumok.attention.kernels.short_sequences import fits_shared_memory

    return fits_shared_memory(device, max_seqlen, max_seqlen, head_width)


def per_sequence_unsupported_reason(call: AttentionCall) -> str | None:
    """Why the sequences are not attended to one after the other."""
    reason = _layout_unsupported_reason(call)
    if reason == NOT_APPLICABLE or call.shape.device.type != "cpu":
        return NOT_APPLICABLE  # on a GPU, a launch for each would take longest
    if reason is None and _find_packed_mask(call).queries_match_keys is False:
        return UNMATCHED_REASON
    if reason is None and min(call.shape.num_queries, call.shape.num_keys) == 0:
        return "there is nothing to attend to"
    if reason is None and call.dropout:
        packed = _get_packed_mask(call)
        weights = packed.max_seqlen * (packed.max_seqlen_q or packed.max_seqlen) * call.leading_shape.numel()
        if weights > chunking.MAX_CHUNK_ELEMENTS:
            return "with dropout, SDPA computes all weights of a sequence at once on the CPU"
    return reason


def _kernel_unsupported_reason(call: AttentionCall, max_width: int, kernel_name: str) -> str | None:
    """Why no kernel for packed sequences serves the call."""
    reason = _layout_unsupported_reason(call)
    if reason != NOT_APPLICABLE:
        reason = packed_call_unsupported_reason(call) or reason
    if reason is not None:
        return reason
    if call.query.dtype not in HALF_DTYPES:
        return f"{kernel_name} takes float16 and bfloat16, not {call.query.dtype}"
    width = call.query.shape[-1]
    if width != cast(Tensor, call.value).shape[-1] or not 0 < width <= max_width or width % 8:
        return f"{kernel_name} needs keys and values of one width, at most {max_width} and a multiple of 8"
    return "there are no heads" if 0 in call.leading_shape else None


def _layout_unsupported_reason(call: AttentionCall) -> str | None:
    """Why this is no call over packed sequences that a path here could serve."""
    parts = () if call.mask is None else call.mask.conjuncts()
    packed = [part for part in parts if isinstance(part, DocumentMask | PackedMask)]
    if call.dot_score is None or not packed:
        return NOT_APPLICABLE
    others = [part for part in parts if not isinstance(part, DocumentMask | PackedMask)]
    if len(packed) != 1 or not _is_in_order(packed[0]):
        return "it serves packed documents, each in one piece, in one order and without padding"
    if isinstance(packed[0], DocumentMask) and packed[0].ids.numel() != call.shape.num_keys:
        return "it serves one packing for all heads"
    if any(not (isinstance(part, WindowMask) and part.is_causal) for part in others):
        return "beside documents it knows only causal"
    if call.shape.num_leading_dims != 2 or call.leading_shape[0] != 1:
        return "it serves the shape (1, heads, length, width)"
    if packed[0].is_self_attention and call.shape.num_queries != call.shape.num_keys:
        return "it serves all queries of the documents, not the last ones alone"
    if others and not packed[0].is_self_attention:
        return "from one packing to another it knows no causal"
    if call.softcap is not None or call.bias is not None:
        return "it has no softcap and no bias"
    return "it has no grouped queries" if call.group_size > 1 else None


def _is_in_order(mask: DocumentMask | PackedMask) -> bool:
    if isinstance(mask, PackedMask):
        return True
    return not mask.has_padding and mask.get_or_compute("same order", lambda: flex.have_same_order(mask))


def _find_packed_mask(call: AttentionCall) -> DocumentMask | PackedMask:
    return next(
        part for part in cast(Mask, call.mask).conjuncts() if isinstance(part, DocumentMask | PackedMask)
    )


def _get_packed_mask(call: AttentionCall) -> PackedMask:
    """The packed sequences of the mask, with their edges where the query is."""
    part, device = _find_packed_mask(call), call.shape.device
    if isinstance(part, DocumentMask):
        return part.get_or_compute(("packing", device), lambda: flex.pack_documents(part, device))
    return part


def _get_cu_seqlens(call: AttentionCall) -> tuple[Tensor, Tensor, int, int]:
    """The edges of queries and keys, on the device of the query, and the longest of each."""
    packed = _get_packed_mask(call)
    keys = move_to_device(packed.cu_seqlens, call.shape.device).contiguous()
    if packed.cu_seqlens_q is None:
        return keys, keys, packed.max_seqlen, packed.max_seqlen
    queries = move_to_device(packed.cu_seqlens_q, call.shape.device).contiguous()
    return queries, keys, packed.max_seqlen_q, packed.max_seqlen


def _to_varlen_layout(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as ``(length, heads, head_width)``, without a copy."""

    def rows(x: Tensor) -> Tensor:
        # squeeze, not [0]: the gradient of an index is a tensor of zeros, into which it is copied.
        return x.expand(*call.leading_shape, *x.shape[-2:]).squeeze(0).transpose(0, 1)

    return rows(call.query), rows(call.prepare_keys()), rows(call.prepare_value())


def _is_causal(call: AttentionCall) -> bool:
    return len(cast(Mask, call.mask).conjuncts()) > 1


def run_short(call: AttentionCall) -> Tensor:
    """A program for each sequence and head: see :mod:`jumok.attention.kernels.run_short`."""
    from jumok.attention.kernels.short_sequences import ShortSequenceLayout, attend_short_sequences

    packing = ShortSequenceLayout(*_get_cu_seqlens(call), causal=_is_causal(call))
    out = attend_short_sequences(*_to_varlen_layout(call), packing, call.dot_scale(), call.dropout)
    return out.transpose(0, 1)[None]


def run_varlen(call: AttentionCall) -> Tensor:
    """PyTorch's FlashAttention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = _to_varlen_layout(call)
    q_edges, k_edges, *longest = _get_cu_seqlens(call)
    edges = q_edges.to(torch.int32), k_edges.to(torch.int32)
    causal = {"window_size": (-1, 0)} if _is_causal(call) else {}
    out = varlen_attn(query, key, value, *edges, *longest, scale=call.dot_scale(), **cast(Any, causal))
    return cast(Tensor, out).transpose(0, 1)[None]


def run_per_sequence(call: AttentionCall) -> Tensor:
    """SDPA of one sequence after the other: no score is computed between two of them."""
    packed = _get_packed_mask(call)
    keys = packed.get_or_compute("lengths", lambda: packed.cu_seqlens.diff().tolist())
    asking = keys
    if packed.cu_seqlens_q is not None:
        queries = packed.cu_seqlens_q
        asking = packed.get_or_compute("lengths of queries", lambda: queries.diff().tolist())
    query, key, value = (
        x.expand(*call.leading_shape, *x.shape[-2:]).split(lengths, dim=-2)
        for x, lengths in (
            (call.query, asking),
            (call.prepare_keys(), keys),
            (call.prepare_value(), keys),
        )
    )
    causal, scale = _is_causal(call), call.dot_scale()
    mixed = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, is_causal=causal, scale=scale)
        for q, k, v in zip(query, key, value, strict=True)
        if q.shape[-2]
    ]
    return torch.cat(mixed, dim=-2)
