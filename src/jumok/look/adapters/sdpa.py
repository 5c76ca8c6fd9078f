"""``F.scaled_dot_product_attention``, whoever calls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from jumok.errors import InputError
from jumok.look.adapters.nested import padded, real
from jumok.look.adapters.patches import Function, Make
from jumok.look.adapters.site import here
from jumok.look.kept import Kept

# What the name in torch.nn.functional stands for, unless somebody has changed it.
ATTENTION: Function = torch._C._nn.scaled_dot_product_attention


class _Given(NamedTuple):
    """The arguments, by the names that the function has for them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def watching(attention: Function) -> Function:
    """The stand-in for this function, or for one that was compiled from it."""

    def scaled_dot_product_attention(*args: Any, **options: Any) -> Any:
        site = here()
        if site is None:
            return attention(*args, **options)
        try:
            given = _Given(*args, **options)
        except TypeError:  # not a call that the function takes: it says so itself
            return attention(*args, **options)
        found = _with_lse(given) if attention is ATTENTION else None
        out, lse = found or (attention(*args, **options), None)
        kept = site.made(lambda: _kept(given, lse))
        if kept is None:
            return out
        if not out.is_nested:
            four = _four(out)
            changed = site.output(kept, _four(given.value), four)
            out = out if changed is four else changed.reshape(out.shape)
        site.saw(kept)
        return out

    return scaled_dot_product_attention


def stand_ins() -> dict[Function, Make]:
    """For the function, wherever it is held."""
    return {ATTENTION: watching}


def _kept(given: _Given, lse: Tensor | None) -> Kept:
    query, key, mask = given.query, given.key, given.attn_mask
    if query.is_nested or key.is_nested:
        if mask is not None:
            raise InputError("nested sequences with a mask")
        (query, _), (key, lengths) = padded(query), padded(key)
        mask = real(lengths, key.shape[2])[:, None, None]
    query, key = _as_computed(query), _as_computed(key)
    if given.enable_gqa:
        leading = query.shape[:-2]
    else:
        leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = (x.expand(*leading, *x.shape[-2:]) for x in (query, key))
    if mask is not None and mask.dim() > 2 and len(leading) != 2:
        mask = _four(mask.expand(*leading, *mask.shape[-2:]))
    scale = query.shape[-1] ** -0.5 if given.scale is None else given.scale
    diagonal = 0 if given.is_causal else None  # aligned at the top left
    return Kept(_four(query), _four(key), scale=scale, mask=mask, diagonal=diagonal, lse=lse)


def _four(x: Tensor) -> Tensor:
    """``(…, length, width)`` as (batch, heads, length, width): what else is in front belongs to the batch."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    return x if x.dim() == 4 else x[:, None] if x.dim() == 3 else x[None, None]


def _as_computed(x: Tensor) -> Tensor:
    """``x`` in the type that autocast gives it."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if on and x.dtype != torch.float64 else x


def _with_lse(given: _Given) -> tuple[Tensor, Tensor] | None:
    """The output and the row log-sum-exp, by the very kernel that the function would have chosen.

    None where that kernel does not tell it, or where the function does something before or after the kernel.
    """
    query, key, value = given[:3]
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dim() == 4 for x in (query, key, value))
    if not plain or given.attn_mask is not None or given.dropout_p or given.enable_gqa:
        return None
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    alike = query.shape[:2] == key.shape[:2] and query.shape[3] == key.shape[3] and key.shape == value.shape
    if learning or not alike or torch.is_autocast_enabled(query.device.type):
        return None
    causal, scale = given.is_causal, given.scale
    chosen = SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale))
    aten = torch.ops.aten
    rest: tuple[Any, ...] = (0.0, causal)
    match query.device.type, chosen:
        case "cpu", SDPBackend.FLASH_ATTENTION:
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
        case "cuda", SDPBackend.FLASH_ATTENTION if query.shape[-1] % 8 == 0:  # else it pads
            kernel = aten._scaled_dot_product_flash_attention
        case "cuda", SDPBackend.CUDNN_ATTENTION:
            kernel, rest = aten._scaled_dot_product_cudnn_attention, (None, True, 0.0, causal)
        case _:
            return None
    out, lse, *_ = kernel(query, key, value, *rest, scale=scale)
    return out, lse.reshape(query.shape[:3])
