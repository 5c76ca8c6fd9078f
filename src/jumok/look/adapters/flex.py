"""FlexAttention, compiled or not."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jumok.look.adapters.closures import tensors_of
from jumok.look.adapters.follow import follower
from jumok.look.adapters.patches import Function, Make
from jumok.look.adapters.site import here, told
from jumok.look.kept import Change, Kept


class _Given(NamedTuple):
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


def watching(attention: Function) -> Function:
    """The stand-in for this function, or for one that was compiled from it."""

    def watched_flex_attention(*args: Any, **options: Any) -> Any:
        site = here()
        if site is None:
            return attention(*args, **options)
        with follower().suspended(), told(entirely=True):
            result = attention(*args, **options)
        given = _Given(*args, **options)
        if given.query.is_nested:
            site.cannot("FlexAttention of nested sequences; pad them, or pack them into one row")
            return result
        out, *more = result if isinstance(result, tuple) else (result,)
        kept = site.made(lambda: _kept(given, _lse(given, more)))
        if kept is None:
            return result
        changed = site.output(kept, given.value, out)
        rule = None if given.block_mask is None else given.block_mask.mask_mod
        site.saw(kept, uses=tensors_of(given.score_mod, rule))
        return result if changed is out else (changed, *more) if more else changed

    return watched_flex_attention


def stand_ins() -> dict[Function, Make]:
    """For the function, wherever it is held."""
    return {cast(Function, flex_attention): watching}


def _kept(given: _Given, lse: Tensor | None) -> Kept:
    scale = given.query.shape[-1] ** -0.5 if given.scale is None else given.scale
    key = given.key.expand(len(given.query), *given.key.shape[1:])
    return Kept(given.query, key, scale=scale, change=_changes(given.score_mod, given.block_mask), lse=lse)


def _lse(given: _Given, more: list[Any]) -> Tensor | None:
    """The row log-sum-exp, if the caller asked for it."""
    if not more:
        return None
    found = more[0] if isinstance(more[0], Tensor) else more[0].lse
    return found if found is None or found.shape == given.query.shape[:3] else None


def _changes(score_mod: Function | None, block_mask: BlockMask | None) -> Change | None:
    if score_mod is None and block_mask is None:
        return None
    allowed = None if block_mask is None else _allowed(block_mask)

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if score_mod is not None:
            scores = _each(score_mod, scores, b, h, q, k)
        if allowed is not None:
            scores = scores.masked_fill(~allowed(scores, b, h, q, k), -torch.inf)
        return scores

    return change


def _allowed(mask: BlockMask) -> Function:
    """What the kernel makes of a block mask: skips blocks, takes some whole, and asks the rule in others."""
    rows, columns = mask.BLOCK_SIZE
    blocks = -(-mask.seq_lengths[1] // columns)
    mixed = _dense(mask.kv_num_blocks, mask.kv_indices, blocks)
    full = None
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _dense(mask.full_kv_num_blocks, mask.full_kv_indices, blocks)

    def allowed(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = (_one(b, mixed.shape[0]), _one(h, mixed.shape[1]), q // rows, k // columns)
        ruled = _each(lambda score, *place: mask.mask_mod(*place), scores, b, h, q, k)
        ruled = ruled & mixed[at]
        return ruled if full is None else ruled | full[at]

    return allowed


def _one(index: Tensor, size: int) -> Tensor:
    """Where all is alike there is one entry, which every index finds."""
    return index if size > 1 else torch.zeros_like(index)


def _dense(count: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Which blocks are listed: bool ``(B, H, blocks of queries, blocks of keys)``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < count[..., None]
    table = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(-1, indices.long().where(listed, blocks), True)[..., :blocks]


def _each(mod: Function, scores: Tensor, *places: Tensor) -> Tensor:
    """``mod`` of every score and its place. It is written for one: so vmap, over one axis after the other."""
    dims = scores.dim()
    shaped = [place.reshape((1,) * (dims - place.dim()) + tuple(place.shape)) for place in places]
    axes = [[None if place.shape[axis] == 1 else 0 for place in shaped] for axis in range(dims)]
    flat = [place.reshape(-1) if place.numel() > 1 else place.reshape(()) for place in shaped]
    for axis in reversed(range(dims)):
        mod = torch.vmap(mod, in_dims=(0, *axes[axis]), out_dims=0)
    return cast(Tensor, mod(scores, *flat))
