"""``nn.MultiheadAttention`` and the layers that contain it, on each of their paths.

Without weights, the regular path ends in ``F.scaled_dot_product_attention`` and is captured there. With
weights, it multiplies queries and keys itself, and this product is captured. The fast paths are single fused
operations from a layer's input to its output: queries and keys are projected again beside them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture.adapters import handwritten
from jumok.look.capture.call_site import CallHints, get_call_site, is_observing, provide_hints, set_variable
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.layouts import pad_nested
from jumok.look.capture.observer import FusedLayerInputs, ObservedCall
from jumok.look.capture.patching import AttributePatch, Function
from jumok.look.views import statistics

FORWARD_ARGUMENTS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches of the functions that the layers of ``torch.nn`` call."""
    yield AttributePatch(F, "multi_head_attention_forward", _wrap_forward)
    yield AttributePatch(torch, "bmm", functools.partial(_wrap_product, first_factor=0))
    yield AttributePatch(torch, "baddbmm", functools.partial(_wrap_product, first_factor=1))
    yield AttributePatch(torch, "_native_multi_head_attention", _wrap_native_attention)
    yield AttributePatch(torch, "_transformer_encoder_layer_fwd", _wrap_encoder_layer)


# ----------------------------------------------------------------- the regular path, with weights

# Number of heads of the call whose product of queries and keys comes next; 0: none.
_PENDING_NUM_HEADS: ContextVar[int] = ContextVar("jumok.look.pending_num_heads", default=0)


def _wrap_forward(forward: Function) -> Function:
    def multi_head_attention_forward(*args: Any, **options: Any) -> Any:
        if not is_observing():
            return forward(*args, **options)
        arguments = dict(zip(FORWARD_ARGUMENTS, args, strict=False)) | options
        num_heads = arguments["num_heads"] if arguments.get("need_weights", True) else 0
        kind = "self" if arguments["query"] is arguments["key"] else "cross"
        with (
            set_variable(_PENDING_NUM_HEADS, num_heads),
            provide_hints(CallHints(kind=kind)),
            handwritten.catch_scores(),
        ):
            return forward(*args, **options)

    return multi_head_attention_forward


def _wrap_product(multiply: Function, first_factor: int) -> Function:
    """Wrap ``torch.bmm`` or ``torch.baddbmm``, whose arguments before its two factors are an addend."""

    def watched_product(*args: Any, **options: Any) -> Any:
        factors = args[first_factor : first_factor + 2]
        if is_observing() and _PENDING_NUM_HEADS.get():
            _report_score_product(factors[0], factors[1], args[0] if first_factor else None)
        out = multiply(*args, **options)
        handwritten.record_product(out, *factors)
        return out

    return watched_product


def _report_score_product(query: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    """Report the first product of a call: queries ``(B · H, Q, D)``, scaled, and keys ``(B · H, D, K)``."""
    num_heads = _PENDING_NUM_HEADS.get()
    _PENDING_NUM_HEADS.set(0)  # the next product is that of weights and values
    site = get_call_site()
    if site is None:
        return
    if mask is not None:  # a mask (B · H, Q, K), or one for all (1, Q, K)
        mask = mask[None] if len(mask) == 1 else mask.unflatten(0, (-1, num_heads))
    query, keys = (x.unflatten(0, (-1, num_heads)) for x in (query, keys.mT))
    site.report(ObservedCall(CapturedAttention(query, keys, mask=mask)))


# --------------------------------------------------------------------------------- the fast paths


class _FusedEncoderCall(NamedTuple):
    """The arguments that the two fused operations have in common."""

    x: Tensor  # (B, L, E), may be nested
    num_heads: int
    weight: Tensor  # (3 E, E) and (3 E,): queries, keys and values in one projection
    bias: Tensor
    output_weight: Tensor  # (E, E): the weight of the output projection
    mask: Tensor | None  # not zero: blocked
    mask_type: int | None  # 0: (L, L), 1: (B, L), 2: (B, H, L, L)
    norm: tuple[Tensor, Tensor, float] | None = None  # weight, bias and ε of the norm before the projection


def _wrap_native_attention(native: Function) -> Function:
    def _native_multi_head_attention(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or options or len(args) != 13:  # not called by torch itself
            return native(*args, **options)
        call = _FusedEncoderCall(args[0], args[4], args[5], args[6], args[7], args[9], args[12])
        output_weight, mask, mask_type, modified = _report_fused_call(call)
        out, weights = native(*args[:7], output_weight, args[8], mask, *args[10:12], mask_type)
        if modified is not None and weights is not None:
            weights = statistics.compute_weights(modified).to(out.dtype)
            weights = weights.mean(1) if args[11] else weights
        return out, weights

    return _native_multi_head_attention


def _wrap_encoder_layer(native: Function) -> Function:
    def _transformer_encoder_layer_fwd(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or options or len(args) != 20:
            return native(*args, **options)
        norm = (args[10], args[11], args[9]) if args[8] else None
        call = _FusedEncoderCall(args[0], args[2], args[3], args[4], args[5], args[18], args[19], norm)
        output_weight, mask, mask_type, _ = _report_fused_call(call)
        return native(*args[:5], output_weight, *args[6:18], mask, mask_type)

    return _transformer_encoder_layer_fwd


def _report_fused_call(
    call: _FusedEncoderCall,
) -> tuple[Tensor, Tensor | None, int | None, CapturedAttention | None]:
    """Report the attention inside. Returns the output projection, the mask and its type to be passed on.

    The last item is the modified attention, or None if nothing was modified.
    """
    site = get_call_site()
    if site is None:
        return call.output_weight, call.mask, call.mask_type, None
    site = get_call_site(_find_attention_module(site.module, call.weight)) or site
    blocked = _get_blocked_mask(call)
    attention = _capture_call(call, blocked)
    site.report(ObservedCall(attention, kind="self"))
    modified = site.modify_fused_inputs(FusedLayerInputs(blocked, call.output_weight), attention)
    mask, mask_type = call.mask, call.mask_type
    if modified.blocked_mask is not None and modified.blocked_mask is not blocked:
        if call.x.is_nested:
            raise InputError(
                "knock_out: an edge cannot be taken out of nested sequences; switch off PyTorch's fast path "
                "with torch.backends.mha.set_fastpath_enabled(False)"
            )
        mask, mask_type = modified.blocked_mask.expand(attention.shape).contiguous(), 2
    is_modified = modified.output_weight is not call.output_weight or mask is not call.mask
    return modified.output_weight, mask, mask_type, site.modify_attention(attention) if is_modified else None


def _find_attention_module(module: nn.Module, weight: Tensor) -> nn.Module:
    """Return the attention inside ``module`` that has this projection."""
    for child in module.modules():
        if isinstance(child, nn.MultiheadAttention) and child.in_proj_weight is weight:
            return child
    return module


def _get_blocked_mask(call: _FusedEncoderCall) -> Tensor | None:
    if call.mask is None:
        return None
    blocked = call.mask.bool()
    return blocked[:, None, None] if call.mask_type == 1 else blocked


@torch.no_grad()
def _capture_call(call: _FusedEncoderCall, blocked_mask: Tensor | None) -> CapturedAttention:
    x, mask = call.x, None if blocked_mask is None else ~blocked_mask
    if x.is_nested:
        x, mask = pad_nested(x)
    width = x.shape[-1]
    if call.norm is not None:
        x = F.layer_norm(x, (width,), *call.norm)
    projected = F.linear(x, call.weight[: 2 * width], call.bias[: 2 * width])
    query, key = projected.unflatten(-1, (2, call.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return CapturedAttention(query, key, scale=query.shape[-1] ** -0.5, mask=mask)
