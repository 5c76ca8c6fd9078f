"""``F.scaled_dot_product_attention``, whichever code calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from jumok.look.capture.call_site import UnsupportedCallError, get_call_site
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.layouts import pad_nested, to_4d
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import Function, FunctionPatch

# The function in torch.nn.functional, unless it has been replaced.
SDPA_FUNCTION: Function = torch._C._nn.scaled_dot_product_attention
# Beyond it, exp(score - lse) of the same score in two summation orders differs by more than 1e-5.
MAX_RELIABLE_LSE = 32.0


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the function."""
    yield FunctionPatch(SDPA_FUNCTION, wrap_sdpa)


class _SdpaArguments(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def wrap_sdpa(attention: Function) -> Function:
    """Wrap the function, or an operator with the same arguments."""

    def scaled_dot_product_attention(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        try:
            arguments = _SdpaArguments(*args, **options)
        except TypeError:  # an invalid call: the function raises its own error
            return attention(*args, **options)
        result = _run_with_lse(arguments) if attention is SDPA_FUNCTION else None
        out, lse = result or (attention(*args, **options), None)
        call = site.read_call(lambda: _read_call(arguments, lse))
        if call is None:
            return out
        out = site.modify_result(call, out)
        site.report(call)
        return out

    return scaled_dot_product_attention


def _read_call(arguments: _SdpaArguments, lse: Tensor | None) -> ObservedCall:
    query, key, value, mask = arguments[:4]
    if query.is_nested or key.is_nested:
        if mask is not None:
            raise UnsupportedCallError("it is called with nested sequences and a mask; pad the sequences")
        (query, _), (key, mask) = pad_nested(query), pad_nested(key)
    query, key = _apply_autocast(query), _apply_autocast(key)
    leading = query.shape[:-2]
    if not arguments.enable_gqa and leading != key.shape[:-2]:
        leading = torch.broadcast_shapes(leading, key.shape[:-2])
        query, key = (x.expand(*leading, *x.shape[-2:]) for x in (query, key))
    if mask is not None and mask.dim() > 2 and len(leading) != 2:
        mask = to_4d(mask.expand(*leading, *mask.shape[-2:]))
    if lse is not None and lse.device.type == "cpu" and bool((lse.abs() > MAX_RELIABLE_LSE).any()):
        lse = None  # the sums of the rows are computed from the captured scores
    attention = CapturedAttention(
        to_4d(query),
        to_4d(key),
        scale=query.shape[-1] ** -0.5 if arguments.scale is None else arguments.scale,
        mask=mask,
        diagonal=0 if arguments.is_causal else None,  # aligned at the top left
        lse=lse,
    )
    return ObservedCall(attention, None if value.is_nested else to_4d(value))


def _apply_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the type that autocast casts it to."""
    device_type = x.device.type
    is_enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return x.to(torch.get_autocast_dtype(device_type)) if is_enabled and x.dtype != torch.float64 else x


def _run_with_lse(arguments: _SdpaArguments) -> tuple[Tensor, Tensor] | None:
    """Return the output and the row log-sum-exp, computed by the kernel that the function would choose.

    Returns None if that kernel does not return it, or if the function does more than call the kernel.
    """
    query, key, value = tensors = arguments[:3]
    is_plain = all(type(x) in (Tensor, nn.Parameter) and x.dim() == 4 for x in tensors)
    if not is_plain or arguments.attn_mask is not None or arguments.dropout_p or arguments.enable_gqa:
        return None
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    has_equal_shapes = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] and key.shape == value.shape
    if needs_grad or not has_equal_shapes or torch.is_autocast_enabled(query.device.type):
        return None
    is_causal, scale = arguments.is_causal, arguments.scale
    backend = SDPBackend(torch._fused_sdp_choice(*tensors, None, 0.0, is_causal, scale=scale))
    rest: tuple[Any, ...] = (0.0, is_causal)
    match query.device.type, backend:
        case "cpu", SDPBackend.FLASH_ATTENTION:
            kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        case "cuda", SDPBackend.FLASH_ATTENTION if query.shape[-1] % 8 == 0:  # else it pads
            kernel = torch.ops.aten._scaled_dot_product_flash_attention
        case "cuda", SDPBackend.CUDNN_ATTENTION:
            kernel, rest = torch.ops.aten._scaled_dot_product_cudnn_attention, (None, True, 0.0, is_causal)
        case _:
            return None
    out, lse, *_ = kernel(*tensors, *rest, scale=scale)
    return out, lse.reshape(query.shape[:3])
