"""FlexAttention, compiled or not."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jumok.look.capture.adapters.call_site import get_call_site, suppress_reports
from jumok.look.capture.adapters.closures import collect_tensors
from jumok.look.capture.adapters.patching import Function, WrapperFactory
from jumok.look.capture.adapters.weight_tracker import get_tracker
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod


class _FlexCall(NamedTuple):
    """The arguments of ``flex_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Function | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: Any = None


def wrap_flex_attention(attention: Function) -> Function:
    """Wrap this function, or one that was compiled from it."""

    def watched_flex_attention(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        with get_tracker().suspend(), suppress_reports(entirely=True):
            result = attention(*args, **options)
        call = _FlexCall(*args, **options)
        if call.query.is_nested:
            site.report_missed("FlexAttention of nested sequences; pad them, or pack them into one row")
            return result
        out, *extra_outputs = result if isinstance(result, tuple) else (result,)
        captured = site.try_capture(lambda: _capture_call(call, _extract_lse(call, extra_outputs)))
        if captured is None:
            return result
        modified = site.modify_output(captured, call.value, out)
        mask_mod = None if call.block_mask is None else call.block_mask.mask_mod
        site.report(captured, score_tensors=collect_tensors(call.score_mod, mask_mod))
        return result if modified is out else (modified, *extra_outputs) if extra_outputs else modified

    return watched_flex_attention


def get_wrappers() -> dict[Function, WrapperFactory]:
    """Return the wrapper of the function."""
    return {cast(Function, flex_attention): wrap_flex_attention}


def _capture_call(call: _FlexCall, lse: Tensor | None) -> CapturedAttention:
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    key = call.key.expand(len(call.query), *call.key.shape[1:])
    return CapturedAttention(
        call.query, key, scale=scale, score_mod=_build_score_mod(call.score_mod, call.block_mask), lse=lse
    )


def _extract_lse(call: _FlexCall, extra_outputs: list[Any]) -> Tensor | None:
    """Return the row log-sum-exp, if the caller requested it."""
    if not extra_outputs:
        return None
    lse = extra_outputs[0] if isinstance(extra_outputs[0], Tensor) else extra_outputs[0].lse
    return lse if lse is None or lse.shape == call.query.shape[:3] else None


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
