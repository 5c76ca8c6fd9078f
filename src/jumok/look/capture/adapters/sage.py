"""SageAttention, if it is loaded.

Its kernels quantise queries and keys. The map shows the weights of the queries and keys that the model gave, before
they are quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from jumok.look.capture.adapters.kernel_arguments import KernelArguments, list_kernel_patches
from jumok.look.capture.call_site import UnsupportedCallError
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.packing import PackedSequences, SequenceMask, fill_lengths
from jumok.look.capture.patching import Function, FunctionPatch

PACKAGES = ("sageattention", "sageattention.core")
FUNCTIONS = (
    "sageattn",
    "sageattn_varlen",
    "sageattn_qk_int8_pv_fp16_triton",
    "sageattn_qk_int8_pv_fp16_cuda",
    "sageattn_qk_int8_pv_fp8_cuda",
    "sageattn_qk_int8_pv_fp8_cuda_sm90",
)
IGNORED_ARGUMENTS = {  # how queries, keys and products are quantised, and what is returned
    *("smooth_k", "smooth_v", "quantization_backend", "qk_quant_gran", "qk_quant_dtype", "pv_accum_dtype"),
    *("return_lse", "max_seqlen_q", "max_seqlen_k", "dropout_p"),
}


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the functions of the package."""
    return list_kernel_patches(PACKAGES, FUNCTIONS, _read_call)


def _read_call(name: str, function: Function, result: Any, *args: Any, **options: Any) -> ObservedCall:
    arguments = KernelArguments(f"sageattention.{name}", function, args, options)
    query, key, value = (arguments.take(x) for x in "qkv")
    layout = arguments.take("tensor_layout", default="HND")
    packing, cu_seqlens = None, arguments.take("cu_seqlens_q")
    if cu_seqlens is not None:  # (tokens, H, D)
        packing = PackedSequences.from_cumulative(cu_seqlens)
        key_packing = PackedSequences.from_cumulative(arguments.take("cu_seqlens_k"))
        query, key, value = packing.unpack(query), key_packing.unpack(key), key_packing.unpack(value)
        num_queries, num_keys = packing.lengths, key_packing.lengths
    elif layout not in ("HND", "NHD"):
        raise UnsupportedCallError(f"{arguments.kernel_name} with tensor_layout={layout!r}; HND or NHD is expected")
    is_bqhd = cu_seqlens is not None or layout == "NHD"
    if is_bqhd:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if cu_seqlens is None:
        num_queries, num_keys = (fill_lengths(x.transpose(1, 2)) for x in (query, key))
    is_causal, mask = arguments.take("is_causal", default=False), arguments.take("attn_mask")
    scale = arguments.take("sm_scale", default=query.shape[-1] ** -0.5)
    arguments.require_known(IGNORED_ARGUMENTS)
    sequence_mask = SequenceMask(num_queries, num_keys, right=0 if is_causal else None, is_aligned_at_end=False)
    attention = sequence_mask.apply_to(query, key, scale)
    attention = attention if mask is None else replace(attention, mask=mask)
    return ObservedCall(attention, value, is_bqhd=is_bqhd, packing=packing)
