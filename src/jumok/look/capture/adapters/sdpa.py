"""``F.scaled_dot_product_attention``, whichever code calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from jumok.errors import InputError
from jumok.look.capture.adapters.call_site import get_call_site, get_query_hint
from jumok.look.capture.adapters.nested_tensors import lengths_to_mask, pad_nested
from jumok.look.capture.adapters.patching import Function, WrapperFactory
from jumok.look.capture.captured_attention import CapturedAttention

# The function in torch.nn.functional, unless it has been replaced.
SDPA_FUNCTION: Function = torch._C._nn.scaled_dot_product_attention


class _SdpaCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def wrap_sdpa(attention: Function) -> Function:
    """Wrap this function, or one that was compiled from it."""

    def scaled_dot_product_attention(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        try:
            call = _SdpaCall(*args, **options)
        except TypeError:  # an invalid call: the function raises its own error
            return attention(*args, **options)
        result = _run_with_lse(call) if attention is SDPA_FUNCTION else None
        out, lse = result or (attention(*args, **options), None)
        unpacked = _unpack_grouped_queries(call, get_query_hint())
        if lse is not None:
            lse = lse.reshape(unpacked.query.shape[:3])
        captured = site.try_capture(lambda: _capture_call(unpacked, lse))
        if captured is None:
            return out
        if not out.is_nested:
            out_4d = _to_4d(out if unpacked is call else out.reshape(*unpacked.query.shape[:3], -1))
            modified = site.modify_output(captured, _to_4d(call.value), out_4d)
            out = out if modified is out_4d else modified.reshape(out.shape)
        site.report(captured)
        return out

    return scaled_dot_product_attention


def get_wrappers() -> dict[Function, WrapperFactory]:
    """Return the wrapper of the function."""
    return {SDPA_FUNCTION: wrap_sdpa}


def _unpack_grouped_queries(call: _SdpaCall, query: Tensor | None) -> _SdpaCall:
    """Undo the packing of a single query with grouped heads, ``(B, H, 1, D)`` to ``(B, G, H / G, D)``.

    Transformers packs so, to have a group of heads share its keys. ``query`` is the query before that.
    """
    if query is None or query.dim() != 4 or query.shape[2] != 1 or query.shape[1] == call.key.shape[1]:
        return call
    batch_size, num_heads, _, width = query.shape
    num_groups = call.key.shape[1]
    if call.query.shape != (batch_size, num_groups, num_heads // num_groups, width):
        return call
    mask = call.attn_mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], num_heads, 1, mask.shape[3])
    return call._replace(query=query, attn_mask=mask, enable_gqa=True)


def _capture_call(call: _SdpaCall, lse: Tensor | None) -> CapturedAttention:
    query, key, mask = call.query, call.key, call.attn_mask
    if query.is_nested or key.is_nested:
        if mask is not None:
            raise InputError("nested sequences with a mask")
        (query, _), (key, lengths) = pad_nested(query), pad_nested(key)
        mask = lengths_to_mask(lengths, key.shape[2])[:, None, None]
    query, key = _apply_autocast(query), _apply_autocast(key)
    if call.enable_gqa:
        leading = query.shape[:-2]
    else:
        leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = (x.expand(*leading, *x.shape[-2:]) for x in (query, key))
    if mask is not None and mask.dim() > 2 and len(leading) != 2:
        mask = _to_4d(mask.expand(*leading, *mask.shape[-2:]))
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    diagonal = 0 if call.is_causal else None  # aligned at the top left
    return CapturedAttention(_to_4d(query), _to_4d(key), scale=scale, mask=mask, diagonal=diagonal, lse=lse)


def _to_4d(x: Tensor) -> Tensor:
    """Return ``(…, length, width)`` as (batch, heads, length, width). Further axes are batch."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    return x if x.dim() == 4 else x[:, None] if x.dim() == 3 else x[None, None]


def _apply_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the type that autocast casts it to."""
    device_type = x.device.type
    is_enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return x.to(torch.get_autocast_dtype(device_type)) if is_enabled and x.dtype != torch.float64 else x


def _run_with_lse(call: _SdpaCall) -> tuple[Tensor, Tensor] | None:
    """Return the output and the row log-sum-exp, computed by the kernel that the function would choose.

    Returns None if that kernel does not return it, or if the function does more than call the kernel.
    """
    query, key, value = call[:3]
    is_plain = all(type(x) in (Tensor, nn.Parameter) and x.dim() == 4 for x in (query, key, value))
    if not is_plain or call.attn_mask is not None or call.dropout_p or call.enable_gqa:
        return None
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    has_equal_shapes = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] and key.shape == value.shape
    if needs_grad or not has_equal_shapes or torch.is_autocast_enabled(query.device.type):
        return None
    is_causal, scale = call.is_causal, call.scale
    backend = SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, scale=scale))
    aten = torch.ops.aten
    rest: tuple[Any, ...] = (0.0, is_causal)
    match query.device.type, backend:
        case "cpu", SDPBackend.FLASH_ATTENTION:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
        case "cuda", SDPBackend.FLASH_ATTENTION if query.shape[-1] % 8 == 0:  # else it pads
            kernel = aten._scaled_dot_product_flash_attention
        case "cuda", SDPBackend.CUDNN_ATTENTION:
            kernel, rest = aten._scaled_dot_product_cudnn_attention, (None, True, 0.0, is_causal)
        case _:
            return None
    out, lse, *_ = kernel(query, key, value, *rest, scale=scale)
    return out, lse.reshape(query.shape[:3])
