"""PyTorch's ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.attention import chunking
from jumok.attention.arguments import AttentionCall
from jumok.attention.gpu_support import MAX_FLASH_WIDTH, get_gpu_properties
from jumok.attention.mask_types import AdditiveMask, DenseMask, Mask, WindowMask
from jumok.attention.paths import NO_KEYS_REASON

WIDE_QUERY_REASON = f"for one query wider than {MAX_FLASH_WIDTH}, two matrix products are faster"


def sdpa_unsupported_reason(call: AttentionCall) -> str | None:
    """Return why SDPA does not serve the call, or None if it does."""
    if call.dot_score is None:
        return "the score is not a dot product"
    if call.softcap is not None:
        return "it has no softcap"
    if call.shape.num_queries == 0 or call.shape.num_keys == 0:
        return NO_KEYS_REASON
    if call.shape.device.type == "cpu":
        return "with dropout it computes all weights at once on the CPU" if call.dropout else None
    if call.query.dtype == torch.float64:
        return "it has no float64 kernel on this device"
    if is_one_wide_query(call):
        return WIDE_QUERY_REASON
    if call.mask is None or get_causal_kwargs(call) is not None:
        return None
    if _is_query_independent(call) or contains_tensor_mask(call.mask) or _is_mask_small(call):
        return None
    return "the mask as a Q×K tensor would be larger than the query"


def is_one_wide_query(call: AttentionCall) -> bool:
    """Return whether there is one query, wider than FlashAttention supports. SDPA's gradient takes 0.4 ms."""
    return (
        call.shape.num_queries == 1 and max(call.query.shape[-1], cast(Tensor, call.value).shape[-1]) > MAX_FLASH_WIDTH
    )


def is_wide_decoder_step(call: AttentionCall) -> bool:
    """Return whether ``attend`` is called with one wide query on a GPU, as by recurrent decoders.

    The scores then stay in the dtype of the query: converting all keys would take longer than the rest of
    the step.
    """
    return call.value is not None and get_gpu_properties(call.shape.device) is not None and is_one_wide_query(call)


def describe_sdpa(call: AttentionCall) -> str:
    """Describe how SDPA computes the call."""
    name = "PyTorch's scaled_dot_product_attention"
    if call.mask is None and call.bias is None:
        return name
    if get_causal_kwargs(call) is not None:
        return f"{name}, causal by flag"
    if _is_query_independent(call) and call.bias is None:
        return f"{name} with a mask of one row"
    if call.shape.device.type == "cpu" and call.bias is None:
        return f"{name}, the mask built in chunks of queries"
    return f"{name} with the mask as a tensor"


def get_causal_kwargs(call: AttentionCall) -> dict[str, Any] | None:
    """Return the arguments that describe the mask to SDPA without a tensor, or None if a tensor is needed."""
    if call.mask is None or call.bias is not None:
        return None
    if not all(isinstance(mask, WindowMask) and mask.is_causal for mask in call.mask.conjuncts()):
        return None
    if call.shape.num_queries == 1:
        return {}  # the only query sees every key
    return {"is_causal": True} if call.shape.num_queries == call.shape.num_keys else None


def contains_tensor_mask(mask: Mask) -> bool:
    """Return whether any part of the mask was given as a tensor."""
    return any(isinstance(leaf, DenseMask | AdditiveMask) for leaf in mask.leaves())


def _is_query_independent(call: AttentionCall) -> bool:
    return call.mask is not None and call.mask.is_query_independent()


def _is_mask_small(call: AttentionCall) -> bool:
    """Return whether the mask's Q×K tensor takes less memory than the query.

    Memory then stays O(length), and SDPA is several times faster than FlexAttention, whose launch alone takes
    longer than attention over a batch of sentences (bench/attention.py).
    """
    band = cast(Mask, call.mask).to_band(call.shape)
    num_masks = call.leading_shape.numel() if band is None else band.first.shape[:-1].numel()
    return num_masks * call.shape.num_queries * call.shape.num_keys <= call.query.numel()


def run_sdpa(call: AttentionCall) -> Tensor:
    """Compute the call by SDPA. On the CPU, a mask with a row per query is built in chunks of queries."""
    to_4d = make_4d_reshape(call)
    query, key, value = to_4d(call.query), to_4d(call.prepare_keys()), to_4d(call.prepare_value())

    def compute_rows(rows: slice, **mask_kwargs: Any) -> Tensor:
        out = F.scaled_dot_product_attention(
            query[..., rows, :],
            key,
            value,
            dropout_p=call.dropout,
            scale=call.dot_scale(),
            enable_gqa=key.shape[1] != query.shape[1],
            **mask_kwargs,
        )
        return out if call.shape.num_leading_dims == 2 else out.reshape(*call.leading_shape, *out.shape[-2:])

    all_rows = slice(0, call.shape.num_queries)
    if call.mask is None and call.bias is None:
        return compute_rows(all_rows)
    causal_kwargs = get_causal_kwargs(call)
    if causal_kwargs is not None:
        return compute_rows(all_rows, **causal_kwargs)
    if call.group_size > 1 and call.shape.device.type == "cuda":
        # PyTorch's kernels for grouped queries take no mask tensor, except one that stores all weights. So
        # the keys are repeated for each query head.
        key, value = call.repeat_kv(key), call.repeat_kv(value)

    def compute_masked_rows(rows: slice) -> Tensor:
        if isinstance(call.mask, AdditiveMask) and call.bias is None:
            return compute_rows(rows, attn_mask=to_4d(call.mask.to_additive_rows(call.shape, rows)))
        allowed, is_nonempty, bias = build_allowed_rows(call, rows)
        # A row without any key may attend everywhere here, so that it stays finite, and is zeroed afterwards.
        attn_mask = allowed if is_nonempty is None else allowed | ~is_nonempty
        if bias is not None:
            bias = _cast_bias(bias if is_nonempty is None else bias.where(is_nonempty, 0), call.query.dtype)
            attn_mask = torch.where(attn_mask, bias, -torch.inf)
        out = compute_rows(rows, attn_mask=to_4d(attn_mask))
        return out if is_nonempty is None else out.where(is_nonempty, 0)

    if call.shape.device.type != "cpu" or (_is_query_independent(call) and call.bias is None):
        return compute_masked_rows(all_rows)
    elements_per_row = call.leading_shape.numel() * call.shape.num_keys
    inputs = tuple(x for x in (query, key, value, call.bias) if x is not None)
    return chunking.map_row_chunks(compute_masked_rows, call.shape.num_queries, elements_per_row, inputs)


def _cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the bias to the dtype of the query. Values out of range become its largest finite number."""
    largest = torch.finfo(dtype).max
    return (bias.clamp(-largest, largest) if torch.finfo(bias.dtype).max > largest else bias).to(dtype)


def build_allowed_rows(call: AttentionCall, rows: slice) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the mask of some rows, which of them see any key (None if all do), and their bias."""
    bias = call.slice_bias(rows)
    if bias is None:
        mask = cast(Mask, call.mask)
        is_nonempty = mask.find_nonempty_rows(call.shape)
        if is_nonempty is not None:
            is_nonempty = (is_nonempty[..., rows] if is_nonempty.shape[-1] > 1 else is_nonempty)[..., None]
        return mask.to_dense_rows(call.shape, rows), is_nonempty, None
    allowed = bias != -torch.inf
    if call.mask is not None:
        allowed = allowed & call.mask.to_dense_rows(call.shape, rows)
    allowed = allowed.reshape(*[1] * (call.shape.num_leading_dims + 2 - allowed.dim()), *allowed.shape)
    return allowed, allowed.any(-1, keepdim=True), bias


def make_4d_reshape(call: AttentionCall) -> Callable[[Tensor], Tensor]:
    """Return a function that brings ``(*leading, rows, D)`` to SDPA's ``(batch, heads, rows, D)``."""
    leading = call.leading_shape

    def to_4d(x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[:-2] == leading:
            return x
        x = x.reshape(*[1] * (len(leading) + 2 - x.dim()), *x.shape)
        if x.dtype != torch.bool:  # SDPA broadcasts a mask, but not keys and values
            x = x.expand(*leading, -1, -1) if call.group_size == 1 else x.expand(leading[0], -1, -1, -1)
        if len(leading) <= 2:
            return x.reshape(*[1] * (2 - len(leading)), *x.shape)
        return x.expand(*leading[:-1], *x.shape[-3:]).flatten(0, len(leading) - 2)

    return to_4d
