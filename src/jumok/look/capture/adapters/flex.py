"""FlexAttention, compiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jumok.look.capture.call_site import UnsupportedCallError, wrap_kernel
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod
from jumok.look.capture.closures import collect_tensors
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import Function, FunctionPatch
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker


def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
    """List the patches of the function."""
    yield FunctionPatch(cast(Function, flex_attention), wrap_flex_attention)


def wrap_flex_attention(attention: Function) -> Function:
    """Wrap this function, or one that was compiled from it."""
    return wrap_kernel(attention, _read_call, run_within=lambda: get_tracker().suspend())


def _read_call(
    result: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    return_aux: Any = None,
) -> ObservedCall:
    if query.is_nested:
        raise UnsupportedCallError("FlexAttention of nested sequences; pad them, or pack them into one row")
    lse = None  # (B, H, Q), if the caller requested it
    if isinstance(result, tuple):
        lse = result[1] if isinstance(result[1], Tensor) else result[1].lse
        lse = lse if lse is None or lse.shape == query.shape[:3] else None
    attention = CapturedAttention(
        query,
        key.expand(len(query), *key.shape[1:]),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        score_mod=_build_score_mod(score_mod, block_mask),
        lse=lse,
    )
    mask_mod = None if block_mask is None else block_mask.mask_mod
    return ObservedCall(attention, value, score_tensors=collect_tensors(score_mod, mask_mod))


def _build_score_mod(score_mod: Function | None, block_mask: BlockMask | None) -> ScoreMod | None:
    if score_mod is None and block_mask is None:
        return None
    is_allowed = None if block_mask is None else _build_block_predicate(block_mask)

    def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if score_mod is not None:
            scores = _vmap_scores(score_mod, scores, b, h, q, k)
        if is_allowed is not None:
            scores = scores.masked_fill(~is_allowed(scores, b, h, q, k), -torch.inf)
        return scores

    return modify_scores


def _build_block_predicate(mask: BlockMask) -> Function:
    """Return the rule of a block mask as the kernel applies it.

    The kernel skips blocks, takes some as a whole, and evaluates ``mask_mod`` in the others.
    """
    block_rows, block_cols = mask.BLOCK_SIZE
    num_key_blocks = -(-mask.seq_lengths[1] // block_cols)
    partial_blocks = _expand_blocks(mask.kv_num_blocks, mask.kv_indices, num_key_blocks)
    full_blocks = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full_blocks = _expand_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, num_key_blocks)

    def is_allowed(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = (
            _broadcast_index(b, partial_blocks.shape[0]),
            _broadcast_index(h, partial_blocks.shape[1]),
            q // block_rows,
            k // block_cols,
        )
        visible = _vmap_scores(lambda score, *position: mask.mask_mod(*position), scores, b, h, q, k)
        visible = visible & partial_blocks[block]
        return visible if full_blocks is None else visible | full_blocks[block]

    return is_allowed


def _broadcast_index(index: Tensor, size: int) -> Tensor:
    """Return the index, or 0 along an axis of size one, which is broadcast."""
    return index if size > 1 else torch.zeros_like(index)


def _expand_blocks(num_blocks: Tensor, indices: Tensor, num_key_blocks: int) -> Tensor:
    """Return which blocks are listed: bool ``(B, H, query blocks, key blocks)``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    table = torch.zeros(*indices.shape[:-1], num_key_blocks + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, indices.long().where(listed, num_key_blocks), True)[..., :num_key_blocks]


def _vmap_scores(mod: Function, scores: Tensor, *positions: Tensor) -> Tensor:
    """Apply ``mod``, a function of one score and its position, to all scores by a vmap over each axis."""
    num_dims = scores.dim()
    shaped = [position.reshape((1,) * (num_dims - position.dim()) + tuple(position.shape)) for position in positions]
    axes = [[None if position.shape[axis] == 1 else 0 for position in shaped] for axis in range(num_dims)]
    flat = [position.reshape(-1) if position.numel() > 1 else position.reshape(()) for position in shaped]
    for axis in reversed(range(num_dims)):
        mod = torch.vmap(mod, in_dims=(0, *axes[axis]), out_dims=0)
    return cast(Tensor, mod(scores, *flat))
