"""FlashAttention, in its packages and in others with the same functions, as far as they are loaded.

Versions 2, 3 and 4 differ in their signatures, but not in what a name means: the arguments are read by name. Packed
sequences and sequences in pages of a cache become one batch entry each (:mod:`..packing`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.look.capture.adapters.kernel_arguments import KernelArguments
from jumok.look.capture.call_site import UnsupportedCallError, wrap_kernel
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.packing import PackedSequences, SequenceMask, fill_lengths, gather_pages, to_lengths
from jumok.look.capture.patching import Function, FunctionPatch

PACKAGES = (
    "flash_attn",
    "flash_attn.flash_attn_interface",
    "flash_attn.cute",
    "flash_attn.cute.interface",
    "flash_attn_interface",
    "flash_attn_3.flash_attn_interface",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
    "aiter",
)
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_with_kvcache",
)
# Where transformers keeps the functions that it has loaded, perhaps from the hub.
TRANSFORMERS_MODULE = "transformers.modeling_flash_attention_utils"
TRANSFORMERS_FUNCTIONS = {
    "_flash_fn": "flash_attn_func",
    "_flash_varlen_fn": "flash_attn_varlen_func",
    "_flash_with_kvcache_fn": "flash_attn_with_kvcache",
}
TORCH_MODULE = "torch.nn.attention.varlen"
TORCH_FUNCTIONS = ("varlen_attn", "varlen_attn_out")
# Arguments that change how weights are computed, what is returned, or what happens after the softmax.
IGNORED_ARGUMENTS = {
    *("dropout_p", "deterministic", "zero_tensors", "out", "softmax_lse", "enable_gqa"),
    *("return_attn_probs", "return_softmax_lse", "return_lse", "return_softmax", "return_aux"),
    *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k"),
    *("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "fa_version"),
}


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the functions of the packages that are loaded."""
    names = [(package, name, f"{package}.{name}") for package in PACKAGES for name in FUNCTIONS]
    names += [(TORCH_MODULE, name, f"{TORCH_MODULE}.{name}") for name in TORCH_FUNCTIONS]
    names += [(TRANSFORMERS_MODULE, slot, name) for slot, name in TRANSFORMERS_FUNCTIONS.items()]
    for module, attribute, name in names:
        function = getattr(sys.modules.get(module), attribute, None)
        if callable(function) and not hasattr(function, "__jumok_original__"):
            read_call = functools.partial(_read_call, name, function)
            yield FunctionPatch(function, functools.partial(wrap_kernel, read_call=read_call))


class _Keys(NamedTuple):
    """The keys and values of a call, one sequence per batch entry."""

    key: Tensor  # (B, K, G, D)
    value: Tensor  # (B, K, G, Dv)
    lengths: Tensor  # (B,): how many keys each sequence has; the others are padding
    first_key: Tensor | None = None  # (B,): earlier ones are padding, too


def _read_call(name: str, function: Function, result: Any, *args: Any, **options: Any) -> ObservedCall:
    arguments = KernelArguments(name, function, args, options)
    query, key, value = _take_tensors(arguments)
    cu_seqlens = arguments.take("cu_seqlens")  # of queries and keys
    packing, query, num_queries = _unpack_queries(arguments, query, cu_seqlens)
    query_value = arguments.take("qv", "q_v")
    left, right = _take_window(arguments)
    if name.endswith("kvcache"):
        query, keys = _read_cache(arguments, query, key, value, is_local=(left, right) != (None, None))
    else:
        keys = _read_keys(arguments, key, value, cu_seqlens)
    if query_value is not None:  # MLA: (q kᵀ + qv vᵀ), as the keys are a part of the values
        query_value = query_value if packing is None else packing.unpack(query_value)
        query = torch.cat([query, query_value], dim=-1)
        keys = keys._replace(key=torch.cat([keys.key, keys.value], dim=-1))
    alibi_slopes, chunk_size = arguments.take("alibi_slopes"), arguments.take("attention_chunk") or None
    if chunk_size is not None and keys.first_key is not None:
        raise UnsupportedCallError(f"{name} with attention_chunk and cache_leftpad together is not supported")
    scale = arguments.take("softmax_scale", "scale", default=query.shape[-1] ** -0.5)
    softcap, sink = arguments.take("softcap") or None, arguments.take("s_aux", "learnable_sink")
    arguments.require_known(IGNORED_ARGUMENTS)
    mask = SequenceMask(
        num_queries,
        keys.lengths,
        left,
        right,
        first_key=keys.first_key,
        chunk_size=chunk_size,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach(),
    )
    attention = mask.apply_to(query.transpose(1, 2), keys.key.transpose(1, 2), scale, softcap)
    return ObservedCall(
        attention,
        keys.value.transpose(1, 2),
        "self" if right == 0 else None,
        sink=sink,
        score_tensors=() if alibi_slopes is None else (alibi_slopes,),
        is_bqhd=True,
        packing=packing,
    )


def _take_tensors(arguments: KernelArguments) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values, or their caches: ``(…, H, D)``."""
    qkv, kv = arguments.take("qkv"), arguments.take("kv")
    num_heads = arguments.take("num_heads_q")
    if qkv is not None and num_heads is not None and qkv.dim() == 4:  # (B, L, H + 2 G, D)
        num_key_heads = (qkv.shape[2] - num_heads) // 2
        query, key, value = qkv.split([num_heads, num_key_heads, num_key_heads], dim=2)
        return query, key, value
    if qkv is not None:  # (…, 3, H, D)
        query, key, value = qkv.unbind(-3)
        return query, key, value
    query = arguments.take("q", "query")
    if kv is not None:  # (…, 2, G, D)
        key, value = kv.unbind(-3)
        return query, key, value
    if arguments.kernel_name.endswith("kvcache"):
        return query, arguments.take("k_cache"), arguments.take("v_cache")
    return query, arguments.take("k", "key"), arguments.take("v", "value")


def _unpack_queries(
    arguments: KernelArguments, query: Tensor, cu_seqlens: Tensor | None
) -> tuple[PackedSequences | None, Tensor, Tensor]:
    """Return how the queries are packed, if they are; the queries ``(B, Q, H, D)``; and their number ``(B,)``."""
    cu_seqlens = arguments.take("cu_seqlens_q", "cu_seq_q", default=cu_seqlens)
    num_used = arguments.take("seqused_q")
    if cu_seqlens is None:
        lengths = fill_lengths(query) if num_used is None else to_lengths(num_used)
        return None, query, lengths
    packing = PackedSequences.from_cumulative(cu_seqlens, num_used)
    return packing, packing.unpack(query), packing.lengths


def _read_keys(arguments: KernelArguments, key: Tensor, value: Tensor, cu_seqlens: Tensor | None) -> _Keys:
    """Read keys in rows ``(B, K, G, D)``, packed ``(T, G, D)``, or in pages ``(pages, page size, G, D)``."""
    cu_seqlens = arguments.take("cu_seqlens_k", "cu_seq_k", default=cu_seqlens)
    num_used, table = arguments.take("seqused_k"), arguments.take("block_table", "page_table")
    if table is not None:
        if num_used is None and cu_seqlens is None:
            raise UnsupportedCallError(f"{arguments.kernel_name} with pages, but without the number of keys")
        lengths = to_lengths(num_used) if num_used is not None else to_lengths(cu_seqlens).diff()
        key, value = (gather_pages(x, table, int(lengths.max())) for x in (key, value))
        return _Keys(key, value, lengths)
    if cu_seqlens is not None:
        packing = PackedSequences.from_cumulative(cu_seqlens, num_used)
        return _Keys(packing.unpack(key), packing.unpack(value), packing.lengths)
    if num_used is None:
        return _Keys(key, value, fill_lengths(key))
    lengths = to_lengths(num_used)
    return _Keys(key[:, : int(lengths.max())], value[:, : int(lengths.max())], lengths)


def _read_cache(
    arguments: KernelArguments, query: Tensor, key_cache: Tensor, value_cache: Tensor, is_local: bool
) -> tuple[Tensor, _Keys]:
    """Read the keys of a cache, to which the kernel has appended new ones. Returns the queries as rotated by it."""
    batch = len(query)
    table, rows = arguments.take("block_table", "page_table"), arguments.take("cache_batch_idx")
    new_keys, new_lengths = arguments.take("k"), arguments.take("cu_seqlens_k_new")
    arguments.take("v")
    cached = arguments.take("cache_seqlens")
    if cached is None and table is not None:
        raise UnsupportedCallError(f"{arguments.kernel_name} with pages, but without cache_seqlens")
    num_cached = torch.full((batch,), key_cache.shape[1] if cached is None else 0)
    if cached is not None:
        num_cached += to_lengths(torch.as_tensor(cached))
    first_key = arguments.take("cache_leftpad")
    cos, sin = arguments.take("rotary_cos"), arguments.take("rotary_sin")
    is_interleaved = arguments.take("rotary_interleaved", default=True)
    if cos is not None:
        if first_key is not None:
            raise UnsupportedCallError(f"{arguments.kernel_name} with rotary_cos and cache_leftpad is not supported")
        steps = torch.arange(query.shape[1]) if is_local else torch.zeros(query.shape[1], dtype=torch.int64)
        positions = (num_cached[:, None] + steps).clamp(max=len(cos) - 1).to(cos.device)
        query = _rotate(query, cos[positions], sin[positions], is_interleaved)
    num_keys = num_cached
    if new_keys is not None:
        num_keys = num_cached + (new_keys.shape[1] if new_lengths is None else to_lengths(new_lengths).diff())
    length = int(num_keys.max())
    if table is not None:
        key, value = (gather_pages(x, table, length) for x in (key_cache, value_cache))
    else:  # copies: the next call overwrites the cache
        row_slice = slice(0, batch) if rows is None else rows.long()
        key, value = (x[row_slice, :length].clone() for x in (key_cache, value_cache))
    return query, _Keys(key, value, num_keys, None if first_key is None else to_lengths(first_key))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Return ``x`` ``(B, L, H, D)`` after the rotary embedding of ``cos``, ``sin`` ``(B, L, R / 2)``: of R dimensions.

    Pairs of dimensions are neighbours if ``is_interleaved``; else ``i`` and ``i + R / 2``.
    """
    width = 2 * cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    rotated, rest = x[..., :width].to(dtype), x[..., width:]
    pairs = rotated.unflatten(-1, (-1, 2)) if is_interleaved else rotated.unflatten(-1, (2, -1)).transpose(-1, -2)
    first, second = pairs.unbind(-1)
    cos, sin = (table[:, :, None].to(dtype) for table in (cos, sin))
    pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    rotated = (pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def _take_window(arguments: KernelArguments) -> tuple[int | None, int | None]:
    """Take how many keys are visible before and after the position of a query; None: all of them."""
    sizes = arguments.take("window_size", default=(None, None))
    left, right = (None if size is None or size < 0 else int(size) for size in sizes)
    return left, 0 if arguments.take("causal", "is_causal", default=False) else right


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
    num_queries, num_keys = (fill_lengths(x.transpose(1, 2)) for x in (query, key))
    attention = SequenceMask(num_queries, num_keys, left, right).apply_to(query, key, scale, softcap)
    return replace(attention, mask=mask)
