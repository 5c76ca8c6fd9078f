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
    """The arguments, by the names that the function has for them."""

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
    """The stand-in for this function, or for one that was compiled from it."""

    def watched_flex_attention(*args: Any, **options: Any) -> Any:
        site = get_call_site()
        if site is None:
            return attention(*args, **options)
        with get_tracker().suspend(), suppress_reports(entirely=True):
            result = attention(*args, **options)
        given = _FlexCall(*args, **options)
        if given.query.is_nested:
            site.report_missed("FlexAttention of nested sequences; pad them, or pack them into one row")
            return result
        out, *more = result if isinstance(result, tuple) else (result,)
        kept = site.try_capture(lambda: _capture_call(given, _extract_lse(given, more)))
        if kept is None:
            return result
        changed = site.modify_output(kept, given.value, out)
        rule = None if given.block_mask is None else given.block_mask.mask_mod
        site.report(kept, score_tensors=collect_tensors(given.score_mod, rule))
        return result if changed is out else (changed, *more) if more else changed

    return watched_flex_attention


def get_wrappers() -> dict[Function, WrapperFactory]:
    """For the function, wherever it is held."""
    return {cast(Function, flex_attention): wrap_flex_attention}


def _capture_call(call: _FlexCall, lse: Tensor | None) -> CapturedAttention:
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    key = call.key.expand(len(call.query), *call.key.shape[1:])
    return CapturedAttention(
        call.query, key, scale=scale, score_mod=_build_score_mod(call.score_mod, call.block_mask), lse=lse
    )


def _extract_lse(call: _FlexCall, extra_outputs: list[Any]) -> Tensor | None:
    """The row log-sum-exp, if the caller asked for it."""
    if not extra_outputs:
        return None
    found = extra_outputs[0] if isinstance(extra_outputs[0], Tensor) else extra_outputs[0].lse
    return found if found is None or found.shape == call.query.shape[:3] else None


def _build_score_mod(score_mod: Function | None, block_mask: BlockMask | None) -> ScoreMod | None:
    if score_mod is None and block_mask is None:
        return None
    allowed = None if block_mask is None else _build_block_predicate(block_mask)

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if score_mod is not None:
            scores = _vmap_scores(score_mod, scores, b, h, q, k)
        if allowed is not None:
            scores = scores.masked_fill(~allowed(scores, b, h, q, k), -torch.inf)
        return scores

    return change


def _build_block_predicate(mask: BlockMask) -> Function:
    """What the kernel makes of a block mask: skips blocks, takes some whole, and asks the rule in others."""
    rows, columns = mask.BLOCK_SIZE
    blocks = -(-mask.seq_lengths[1] // columns)
    mixed = _expand_blocks(mask.kv_num_blocks, mask.kv_indices, blocks)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _expand_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)

    def allowed(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = (
            _broadcast_index(b, mixed.shape[0]),
            _broadcast_index(h, mixed.shape[1]),
            q // rows,
            k // columns,
        )
        ruled = _vmap_scores(lambda score, *place: mask.mask_mod(*place), scores, b, h, q, k)
        ruled = ruled & mixed[at]
        return ruled if full is None else ruled | full[at]

    return allowed


def _broadcast_index(index: Tensor, size: int) -> Tensor:
    """Where all is alike there is one entry, which every index finds."""
    return index if size > 1 else torch.zeros_like(index)


def _expand_blocks(num_blocks: Tensor, indices: Tensor, num_key_blocks: int) -> Tensor:
    """Which blocks are listed: bool ``(B, H, num_key_blocks of queries, num_key_blocks of keys)``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    table = torch.zeros(*indices.shape[:-1], num_key_blocks + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, indices.long().where(listed, num_key_blocks), True)[..., :num_key_blocks]


def _vmap_scores(mod: Function, scores: Tensor, *positions: Tensor) -> Tensor:
    """``mod`` of every score and its place. It is written for one: so vmap, over one axis after the other."""
    dims = scores.dim()
    shaped = [place.reshape((1,) * (dims - place.dim()) + tuple(place.shape)) for place in positions]
    axes = [[None if place.shape[axis] == 1 else 0 for place in shaped] for axis in range(dims)]
    flat = [place.reshape(-1) if place.numel() > 1 else place.reshape(()) for place in shaped]
    for axis in reversed(range(dims)):
        mod = torch.vmap(mod, in_dims=(0, *axes[axis]), out_dims=0)
    return cast(Tensor, mod(scores, *flat))
