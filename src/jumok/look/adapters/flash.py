"""The packages that bring attention kernels of their own, as far as they are loaded.

``flash_attn_func`` is seen. The others take their sequences in forms that are not read here: packed, with
paged caches, or with masks of their own kinds. They are named.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

from torch import Tensor

from jumok.look.adapters.patches import Function, Make
from jumok.look.adapters.site import here, told
from jumok.look.kept import Kept

UNREAD = {
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


def stand_ins() -> dict[Function, Make]:
    """For the functions of the packages that are loaded, wherever they are held."""
    found: dict[Function, Make] = {}
    for module, names in UNREAD.items():
        for name in names:
            function = getattr(sys.modules.get(module), name, None)
            if callable(function):
                found[function] = functools.partial(_named, f"{module}.{name}")
    function = getattr(sys.modules.get("flash_attn"), "flash_attn_func", None)
    return found | ({function: _watching} if callable(function) else {})


def _named(name: str, attention: Function) -> Function:
    def unread(*args: Any, **options: Any) -> Any:
        site = here()
        if site is None:
            return attention(*args, **options)
        site.cannot(f"it calls {name}, which is not read here; F.scaled_dot_product_attention is")
        with told(entirely=True):
            return attention(*args, **options)

    return unread


class _Given(NamedTuple):
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


def _watching(attention: Function) -> Function:
    def flash_attn_func(*args: Any, **options: Any) -> Any:
        site = here()
        if site is None:
            return attention(*args, **options)
        with told(entirely=True):
            result = attention(*args, **options)
        given = _Given(*args, **options)
        if given.alibi_slopes is not None:
            site.cannot(
                "FlashAttention with alibi_slopes; give F.scaled_dot_product_attention a mask of them"
            )
            return result

        def make() -> Kept:
            query, key = given.q.transpose(1, 2), given.k.transpose(1, 2)
            scale = query.shape[-1] ** -0.5 if given.softmax_scale is None else given.softmax_scale
            left, right = (None if side < 0 else side for side in given.window_size)
            return kept(query, key, scale, given.softcap or None, None, left, 0 if given.causal else right)

        seen = site.made(make)
        if seen is None:
            return result
        out = (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
        changed = site.output(seen, given.v.transpose(1, 2), out)
        site.saw(seen)
        if changed is out:
            return result
        changed = changed.transpose(1, 2)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    return flash_attn_func


def kept(
    query: Tensor,
    key: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
    left: int | None,
    right: int | None,
) -> Kept:
    """What is kept of ``(B, H, Q, D)`` attention, with so many keys to the left and right; None: all of them.

    FlashAttention's windows are aligned at the bottom right.
    """
    queries, keys = query.shape[2], key.shape[2]
    if right is None and left is None:
        return Kept(query, key, scale, softcap, mask)
    right = keys if right is None else right
    window = None if left is None else left + right + 1
    return Kept(query, key, scale, softcap, mask, diagonal=keys - queries + right, window=window)
