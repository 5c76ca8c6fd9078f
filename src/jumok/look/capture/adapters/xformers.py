"""Attention of xformers, if it is loaded, with each of its types of ``attn_bias``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jumok.look.capture.adapters.kernel_arguments import KernelArguments, list_kernel_patches
from jumok.look.capture.call_site import UnsupportedCallError
from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.packing import PackedSequences, SequenceMask, fill_lengths, gather_pages
from jumok.look.capture.patching import Function, FunctionPatch

PACKAGES = ("xformers.ops", "xformers.ops.fmha")
FUNCTIONS = (
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
    "memory_efficient_attention_partial",
)
IGNORED_ARGUMENTS = {"p", "op", "output_dtype"}


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the functions of the package."""
    return list_kernel_patches(PACKAGES, FUNCTIONS, _read_call)


class _MaskRule(NamedTuple):
    """What a type of bias lets each query see, relative to its position in its sequence."""

    is_causal: bool = False
    is_aligned_at_end: bool = False
    has_window: bool = False  # given by attributes of the bias


_FREE, _CAUSAL = _MaskRule(), _MaskRule(is_causal=True)
_CAUSAL_AT_END = _MaskRule(is_causal=True, is_aligned_at_end=True)
_WINDOW_AT_END = _MaskRule(is_aligned_at_end=True, has_window=True)
_CAUSAL_WINDOW = _MaskRule(is_causal=True, has_window=True)
_CAUSAL_WINDOW_AT_END = _MaskRule(is_causal=True, is_aligned_at_end=True, has_window=True)

DENSE_RULES = {
    "LowerTriangularMask": _CAUSAL,
    "LowerTriangularMaskWithTensorBias": _CAUSAL,
    "LowerTriangularFromBottomRightMask": _CAUSAL_AT_END,
    "LowerTriangularFromBottomRightLocalAttentionMask": _CAUSAL_WINDOW_AT_END,
    "LocalAttentionFromBottomRightMask": _WINDOW_AT_END,
}
PACKED_RULES = {
    "BlockDiagonalMask": _FREE,
    "BlockDiagonalCausalMask": _CAUSAL,
    "BlockDiagonalCausalFromBottomRightMask": _CAUSAL_AT_END,
    "BlockDiagonalCausalLocalAttentionMask": _CAUSAL_WINDOW,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _CAUSAL_WINDOW_AT_END,
    "BlockDiagonalPaddedKeysMask": _FREE,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL_AT_END,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _WINDOW_AT_END,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _CAUSAL_WINDOW_AT_END,
    "BlockDiagonalGappyKeysMask": _FREE,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL_AT_END,
    "PagedBlockDiagonalPaddedKeysMask": _FREE,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _CAUSAL_AT_END,
    "PagedBlockDiagonalGappyKeysMask": _FREE,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _CAUSAL_AT_END,
}


def _read_call(name: str, function: Function, result: Any, *args: Any, **options: Any) -> ObservedCall:
    arguments = KernelArguments(f"xformers.ops.{name}", function, args, options)
    if name.endswith("partial"):
        raise UnsupportedCallError(
            f"{arguments.kernel_name} attends to a part of the keys, and its weights depend on the other parts; "
            "use memory_efficient_attention"
        )
    query, key, value = (_to_bqhd(arguments.take(x)) for x in ("query", "key", "value"))
    scale = arguments.take("scale", default=query.shape[-1] ** -0.5)
    bias = arguments.take("attn_bias")
    arguments.require_known(IGNORED_ARGUMENTS)
    bias_type = type(bias).__name__
    if bias_type in PACKED_RULES:
        return _read_packed_call(query, key, value, scale, bias)
    if bias_type in DENSE_RULES:
        window = _read_window(DENSE_RULES[bias_type], bias)
        mask = SequenceMask(fill_lengths(query), fill_lengths(key), *window)
        attention = mask.apply_to(query.transpose(1, 2), key.transpose(1, 2), scale)
        dense_bias = getattr(bias, "_subtensor", getattr(bias, "_bias", None))
        if bias_type.endswith("TensorBias") and dense_bias is not None:
            attention = replace(attention, mask=_to_mask(dense_bias, attention))
    elif bias is None or isinstance(bias, Tensor):
        attention = CapturedAttention(query.transpose(1, 2), key.transpose(1, 2), scale)
        attention = attention if bias is None else replace(attention, mask=_to_mask(bias, attention))
    else:
        raise UnsupportedCallError(f"{arguments.kernel_name} with a {bias_type} is not supported; pass it as a tensor")
    return ObservedCall(attention, value.transpose(1, 2), is_bqhd=True)


def _to_bqhd(x: Tensor) -> Tensor:
    """Return ``(B, L, D)``, ``(B, L, H, D)`` or ``(B, L, groups, heads of a group, D)`` as ``(B, L, H, D)``."""
    return x[:, :, None] if x.dim() == 3 else x.flatten(2, -2)


def _to_mask(bias: Tensor, attention: CapturedAttention) -> Tensor:
    """Return a bias ``(B or 1, Q, K)``, ``(B, H, Q, K)`` or ``(B, groups, heads, Q, K)`` as a mask."""
    if bias.dim() == 3:
        return bias[:, None]
    return bias.flatten(1, -3).expand(-1, attention.shape[1], -1, -1) if bias.dim() > 3 else bias


def _read_window(rule: _MaskRule, bias: Any) -> tuple[int | None, int | None, bool]:
    """Return the visible keys before and after the position of a query, and whether the ends are aligned."""
    left, right = None, 0 if rule.is_causal else None
    if rule.has_window:
        left = bias._window_size - 1 if rule.is_causal else bias.window_left
        right = 0 if rule.is_causal else bias.window_right
    return left, right, rule.is_aligned_at_end


def _read_packed_call(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Any) -> ObservedCall:
    """Read a call with sequences in one row: ``(1, tokens, H, D)``."""
    packing = _build_packing(bias.q_seqinfo)
    first_key: Tensor | None = None
    if hasattr(bias, "block_tables"):
        ends = torch.tensor(bias.k_seqinfo.seqlen_py)
        if "Gappy" in type(bias).__name__:
            first_key = torch.tensor(bias.k_seqinfo.seqstart_py[: len(ends)])
        pages = (x[0].unflatten(0, (-1, bias.page_size)) for x in (key, value))
        key, value = (gather_pages(x, bias.block_tables, int(ends.max())) for x in pages)
        num_keys = ends
    else:
        key_packing = _build_packing(bias.k_seqinfo)
        key, value = (key_packing.unpack(x[0]) for x in (key, value))
        num_keys = key_packing.lengths
    window = _read_window(PACKED_RULES[type(bias).__name__], bias)
    mask = SequenceMask(packing.lengths, num_keys, *window, first_key=first_key)
    attention = mask.apply_to(packing.unpack(query[0]).transpose(1, 2), key.transpose(1, 2), scale)
    return ObservedCall(attention, value.transpose(1, 2), packing=packing)


def _build_packing(info: Any) -> PackedSequences:
    """Return the sequences of a ``_SeqLenInfo`` of any version."""
    positions = getattr(info, "seqstart_py", None) or info.cu_seqlen_py
    num_sequences = len(positions) - 1
    starts = torch.tensor(positions[:num_sequences])
    lengths = getattr(info, "seqlen_py", None)
    return PackedSequences(starts, torch.tensor(positions).diff() if lengths is None else torch.tensor(lengths))
