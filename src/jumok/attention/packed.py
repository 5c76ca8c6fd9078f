"""The fast paths for packed sequences: our kernel for short ones, FlashAttention for any others, on a GPU.

On the CPU one sequence is attended to after the other.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import blocks, chunks
from jumok.attention.call import Call
from jumok.attention.capability import has_triton, why_no_packed
from jumok.attention.kinds import Mask, Window, moved
from jumok.attention.packings import Documents, Packed

NOT_MEANT = ""  # the reason of a path that is for other calls altogether
HALF = (torch.float16, torch.bfloat16)
UNMATCHED = "each sequence must have both queries and keys, or neither"
FLASH_WIDTH = 256
SHORT_WIDTH = SHORT_LENGTH = 128  # what a program of our kernel holds


def packed_kernel_why_not(call: Call) -> str | None:
    """Why no kernel for packed sequences on a GPU serves the call."""
    if call.dot is None:
        return NOT_MEANT
    return why_no_packed(call.at.device)


def short_why_not(call: Call) -> str | None:
    """Why our kernel for short sequences does not serve the call."""
    reason = _why_not(call, SHORT_WIDTH, "our kernel")
    if reason is not None:
        return reason
    packed = _packing(call)
    longest = max(packed.longest, packed.longest_query)
    if longest > SHORT_LENGTH:
        return f"it serves sequences of at most {SHORT_LENGTH} tokens, and these have up to {longest}"
    if not has_triton():
        return "Triton is not installed"
    from jumok.attention.kernels.short import has_room

    queries = packed.longest if packed.queries is None else packed.longest_query
    room = has_room(call.at.device, queries, packed.longest, call.query.shape[-1])
    return None if room else "this GPU has too little shared memory for sequences of this length and width"


def varlen_why_not(call: Call) -> str | None:
    """Why FlashAttention over packed sequences does not serve the call."""
    reason = _why_not(call, FLASH_WIDTH, "FlashAttention")
    if reason is not None:
        return reason
    if call.dropout:
        return "it has no dropout"
    return None if _part(call).matched is not False else UNMATCHED


def is_fast(device: torch.device, longest: int, width: int, dropout: float) -> bool:
    """Whether packed sequences of this length, in half precision with heads this wide, have a fast path."""
    if why_no_packed(device) is not None:
        return False
    if not dropout:
        return True
    if longest > SHORT_LENGTH or width > SHORT_WIDTH or width % 8 or not has_triton():
        return False
    from jumok.attention.kernels.short import has_room

    return has_room(device, longest, longest, width)


def each_why_not(call: Call) -> str | None:
    """Why the sequences are not attended to one after the other."""
    reason = _layout_why_not(call)
    if reason == NOT_MEANT or call.at.device.type != "cpu":
        return NOT_MEANT  # on a GPU, a launch for each would take longest
    if reason is None and _part(call).matched is False:
        return UNMATCHED
    if reason is None and min(call.at.queries, call.at.keys) == 0:
        return "there is nothing to attend to"
    if reason is None and call.dropout:
        packed = _packing(call)
        weights = packed.longest * (packed.longest_query or packed.longest) * call.leading.numel()
        if weights > chunks.AT_ONCE:
            return "with dropout, SDPA computes all weights of a sequence at once on the CPU"
    return reason


def _why_not(call: Call, widest: int, kernel: str) -> str | None:
    """Why no kernel for packed sequences serves the call."""
    reason = _layout_why_not(call)
    if reason != NOT_MEANT:
        reason = packed_kernel_why_not(call) or reason
    if reason is not None:
        return reason
    if call.query.dtype not in HALF:
        return f"{kernel} takes float16 and bfloat16, not {call.query.dtype}"
    width = call.query.shape[-1]
    if width != cast(Tensor, call.value).shape[-1] or not 0 < width <= widest or width % 8:
        return f"{kernel} needs keys and values of one width, at most {widest} and a multiple of 8"
    return "there are no heads" if 0 in call.leading else None


def _layout_why_not(call: Call) -> str | None:
    """Why this is no call over packed sequences that a path here could serve."""
    parts = () if call.mask is None else call.mask.parts()
    packed = [part for part in parts if isinstance(part, Documents | Packed)]
    if call.dot is None or not packed:
        return NOT_MEANT
    others = [part for part in parts if not isinstance(part, Documents | Packed)]
    if len(packed) != 1 or not _in_order(packed[0]):
        return "it serves packed documents, each in one piece, in one order and without padding"
    if isinstance(packed[0], Documents) and packed[0].ids.numel() != call.at.keys:
        return "it serves one packing for all heads"
    if any(not (isinstance(part, Window) and part.is_causal) for part in others):
        return "beside documents it knows only causal"
    if call.at.leading != 2 or call.leading[0] != 1:
        return "it serves the shape (1, heads, length, width)"
    if packed[0].among_themselves and call.at.queries != call.at.keys:
        return "it serves all queries of the documents, not the last ones alone"
    if others and not packed[0].among_themselves:
        return "from one packing to another it knows no causal"
    if call.softcap is not None or call.bias is not None:
        return "it has no softcap and no bias"
    return "it has no grouped queries" if call.group > 1 else None


def _in_order(packed: Documents | Packed) -> bool:
    if isinstance(packed, Packed):
        return True
    return not packed.padded and packed.remember("same order", lambda: blocks.same_order(packed))


def _part(call: Call) -> Documents | Packed:
    return next(part for part in cast(Mask, call.mask).parts() if isinstance(part, Documents | Packed))


def _packing(call: Call) -> Packed:
    """The packed sequences of the mask, with their edges where the query is."""
    part, device = _part(call), call.at.device
    if isinstance(part, Documents):
        return part.remember(("packing", device), lambda: blocks.packing(part, device))
    return part


def _edges(call: Call) -> tuple[Tensor, Tensor, int, int]:
    """The edges of queries and keys, on the device of the query, and the longest of each."""
    packed = _packing(call)
    keys = moved(packed.edges, call.at.device).contiguous()
    if packed.queries is None:
        return keys, keys, packed.longest, packed.longest
    queries = moved(packed.queries, call.at.device).contiguous()
    return queries, keys, packed.longest_query, packed.longest


def _rows(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as ``(length, heads, width)``, without a copy."""

    def rows(x: Tensor) -> Tensor:
        # squeeze, not [0]: the gradient of an index is a tensor of zeros, into which it is copied.
        return x.expand(*call.leading, *x.shape[-2:]).squeeze(0).transpose(0, 1)

    return rows(call.query), rows(call.prepared_keys()), rows(call.clean_value())


def _is_causal(call: Call) -> bool:
    return len(cast(Mask, call.mask).parts()) > 1


def short(call: Call) -> Tensor:
    """A program for each sequence and head: see :mod:`jumok.attention.kernels.short`."""
    from jumok.attention.kernels.short import Packing, short_attention

    packing = Packing(*_edges(call), causal=_is_causal(call))
    out = short_attention(*_rows(call), packing, call.dot_scale(), call.dropout)
    return out.transpose(0, 1)[None]


def varlen(call: Call) -> Tensor:
    """PyTorch's FlashAttention over packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = _rows(call)
    q_edges, k_edges, *longest = _edges(call)
    edges = q_edges.to(torch.int32), k_edges.to(torch.int32)
    causal = {"window_size": (-1, 0)} if _is_causal(call) else {}
    out = varlen_attn(query, key, value, *edges, *longest, scale=call.dot_scale(), **cast(Any, causal))
    return cast(Tensor, out).transpose(0, 1)[None]


def each(call: Call) -> Tensor:
    """SDPA of one sequence after the other: no score is computed between two of them."""
    packed = _packing(call)
    keys = packed.remember("lengths", lambda: packed.edges.diff().tolist())
    asking = keys
    if packed.queries is not None:
        queries = packed.queries
        asking = packed.remember("lengths of queries", lambda: queries.diff().tolist())
    query, key, value = (
        x.expand(*call.leading, *x.shape[-2:]).split(lengths, dim=-2)
        for x, lengths in (
            (call.query, asking),
            (call.prepared_keys(), keys),
            (call.clean_value(), keys),
        )
    )
    causal, scale = _is_causal(call), call.dot_scale()
    mixed = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, is_causal=causal, scale=scale)
        for q, k, v in zip(query, key, value, strict=True)
        if q.shape[-2]
    ]
    return torch.cat(mixed, dim=-2)
