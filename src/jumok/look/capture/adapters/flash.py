"""Third-party packages with attention kernels, as far as they are loaded.

``flash_attn_func`` is captured. The other functions take packed sequences, paged caches or their own types of
masks, which are not supported: calls of them are reported by name.
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
    """Return wrappers for the functions of the packages that are loaded."""
    wrappers: dict[Function, WrapperFactory] = {}
    for module, names in UNSUPPORTED_FUNCTIONS.items():
        for name in names:
            function = getattr(sys.modules.get(module), name, None)
            if callable(function):
                wrappers[function] = functools.partial(_wrap_unsupported, f"{module}.{name}")
    function = getattr(sys.modules.get("flash_attn"), "flash_attn_func", None)
    return wrappers | ({function: _wrap_flash_attention} if callable(function) else {})


def _wrap_unsupported(name: str, attention: Function) -> Function:
    def run_unsupported(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        site.report_missed(f"it calls {name}, which is not supported; F.scaled_dot_product_attention is")
        with suppress_reports(entirely=True):
            return attention(*args, **options)

    return run_unsupported


class _FlashCall(NamedTuple):
    """The arguments of ``flash_attn_func``."""

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
        call = _FlashCall(*args, **options)
        if call.alibi_slopes is not None:
            site.report_missed("FlashAttention with alibi_slopes; give F.scaled_dot_product_attention a mask of them")
            return result

        def capture() -> CapturedAttention:
            query, key = call.q.transpose(1, 2), call.k.transpose(1, 2)
            scale = query.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
            left, right = (None if size < 0 else size for size in call.window_size)
            return capture_windowed_attention(
                query, key, scale, call.softcap or None, None, left, 0 if call.causal else right
            )

        captured = site.try_capture(capture)
        if captured is None:
            return result
        out = (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
        modified = site.modify_output(captured, call.v.transpose(1, 2), out)
        site.report(captured)
        if modified is out:
            return result
        modified = modified.transpose(1, 2)
        return (modified, *result[1:]) if isinstance(result, tuple) else modified

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
    """Capture ``(B, H, Q, D)`` attention with ``left`` and ``right`` visible keys; None: all of them.

    Windows of FlashAttention are aligned at the bottom right.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if right is None and left is None:
        return CapturedAttention(query, key, scale, softcap, mask)
    right = num_keys if right is None else right
    window = None if left is None else left + right + 1
    return CapturedAttention(query, key, scale, softcap, mask, diagonal=num_keys - num_queries + right, window=window)
