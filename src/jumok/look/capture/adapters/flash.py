"""The packages that bring attention kernels of their own, as far as they are loaded.

``flash_attn_func`` is seen. The others take their sequences in forms that are not read here: packed, with
paged caches, or with masks of their own kinds. They are named.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

from torch import Tensor

from jumok.look.capture.adapters.call_site import get_call_site, suppress_reports
from jumok.look.capture.adapters.patching import Function, WrapperFactory
from jumok.look.capture.captured_attention import CapturedAttention

UNSUPPORTED_FUNCTIONS = {
    "flash_attn": (
        "flash_attn_varlen_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_with_kvcache",
    ),
    "flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "xformers.ops": ("memory_efficient_attention", "memory_efficient_attention_forward"),
    "sageattention": ("sageattn", "sageattn_varlen"),
    "torch.nn.attention.varlen": ("varlen_attn",),
}


def get_wrappers() -> dict[Function, WrapperFactory]:
    """For the functions of the packages that are loaded, wherever they are held."""
    found: dict[Function, WrapperFactory] = {}
    for module, names in UNSUPPORTED_FUNCTIONS.items():
        for name in names:
            function = getattr(sys.modules.get(module), name, None)
            if callable(function):
                found[function] = functools.partial(_wrap_unsupported, f"{module}.{name}")
    function = getattr(sys.modules.get("flash_attn"), "flash_attn_func", None)
    return found | ({function: _wrap_flash_attention} if callable(function) else {})


def _wrap_unsupported(name: str, attention: Function) -> Function:
    def unread(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        site.report_missed(f"it calls {name}, which is not read here; F.scaled_dot_product_attention is")
        with suppress_reports(entirely=True):
            return attention(*args, **options)

    return unread


class _FlashCall(NamedTuple):
    """The arguments, by the names that the function has for them."""

    q: Tensor  # (B, Q, H, D)
    k: Tensor  # (B, K, G, D)
    v: Tensor
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False


def _wrap_flash_attention(attention: Function) -> Function:
    def flash_attn_func(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        with suppress_reports(entirely=True):
            result = attention(*args, **options)
        given = _FlashCall(*args, **options)
        if given.alibi_slopes is not None:
            site.report_missed(
                "FlashAttention with alibi_slopes; give F.scaled_dot_product_attention a mask of them"
            )
            return result

        def make() -> CapturedAttention:
            query, key = given.q.transpose(1, 2), given.k.transpose(1, 2)
            scale = query.shape[-1] ** -0.5 if given.softmax_scale is None else given.softmax_scale
            left, right = (None if side < 0 else side for side in given.window_size)
            return capture_windowed_attention(
                query, key, scale, given.softcap or None, None, left, 0 if given.causal else right
            )

        seen = site.try_capture(make)
        if seen is None:
            return result
        out = (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
        changed = site.modify_output(seen, given.v.transpose(1, 2), out)
        site.report(seen)
        if changed is out:
            return result
        changed = changed.transpose(1, 2)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    return flash_attn_func


def capture_windowed_attention(
    query: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
    left: int | None,
    right: int | None,
) -> CapturedAttention:
    """What is kept of ``(B, H, Q, D)`` attention, with so many keys to the left and right; None: all of them.

    FlashAttention's windows are aligned at the bottom right.
    """
    queries, keys = query.shape[2], key.shape[2]
    if right is None and left is None:
        return CapturedAttention(query, key, scale, softcap, mask)
    right = keys if right is None else right
    window = None if left is None else left + right + 1
    return CapturedAttention(query, key, scale, softcap, mask, diagonal=keys - queries + right, window=window)
