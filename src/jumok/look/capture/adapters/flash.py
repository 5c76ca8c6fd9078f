"""Third-party packages with attention kernels, as far as they are loaded.

``flash_attn_func`` is captured. The other functions take packed sequences, paged caches or their own types of
masks, which are not supported: calls of them are reported by name.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from jumok.look.capture.call_site import UnsupportedCallError, wrap_kernel
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import FunctionPatch

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


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the functions of the packages that are loaded."""
    read_calls = {("flash_attn", "flash_attn_func"): _read_flash_call}
    for module, names in UNSUPPORTED_FUNCTIONS.items():
        read_calls |= {(module, name): functools.partial(_refuse_call, f"{module}.{name}") for name in names}
    for (module, name), read_call in read_calls.items():
        function = getattr(sys.modules.get(module), name, None)
        if callable(function):
            yield FunctionPatch(function, functools.partial(wrap_kernel, read_call=read_call, is_bqhd=True))


def _refuse_call(name: str, *args: Any, **options: Any) -> NoReturn:
    raise UnsupportedCallError(f"it calls {name}, which is not supported; F.scaled_dot_product_attention is")


def _read_flash_call(
    result: Any,
    q: Tensor,  # (B, Q, H, D)
    k: Tensor,  # (B, K, G, D)
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> ObservedCall:
    if alibi_slopes is not None:
        raise UnsupportedCallError(
            "FlashAttention with alibi_slopes; give F.scaled_dot_product_attention a mask of them"
        )
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = (None if size < 0 else size for size in window_size)
    right = 0 if causal else right
    return ObservedCall(capture_windowed_attention(query, key, scale, softcap or None, None, left, right), value)


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
