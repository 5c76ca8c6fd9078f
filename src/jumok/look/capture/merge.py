"""Merging of the parts in which a model computed one attention: decoding steps, or chunks of the queries.

::

    prompt     ■ · · · · ·         each part has its own queries (rows) and sees some of
               ■ ■ · · · ·         the keys, from ``first_key`` on; together they are one map
               ■ ■ ■ · · ·
    step 1     ■ ■ ■ ■ · ·
    step 2     ■ ■ ■ ■ ■ ·
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture.captured_attention import CapturedAttention, ScoreFunction, ScoreMod, return_scores

# Masks that several layers share, with references to the tensors whose ids are in the keys.
MaskCache = dict[Any, tuple[Tensor, Any]]


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Some queries of an attention, with the keys ``first_key … first_key + num_keys`` that they saw."""

    query: Tensor  # (B, H, Q, D)
    num_keys: int
    first_key: int = 0
    mask: Tensor | None = None
    diagonal: int | None = None
    window: int | None = None
    score_mod: ScoreMod | None = None
    score_function: ScoreFunction | None = None
    batch_rows: Tensor | None = None  # (B,): the rows of the batch of ``score_mod``

    @classmethod
    def from_attention(cls, attention: CapturedAttention) -> AttentionPart:
        fields = ("query", "mask", "diagonal", "window", "score_mod", "score_function")
        return cls(num_keys=attention.shape[3], **{name: getattr(attention, name) for name in fields})

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    def select_rows(self, rows: Tensor) -> AttentionPart:
        """Return the part for some rows of the batch, in this order."""
        mask = self.mask
        if mask is not None and mask.dim() == 4 and len(mask) > 1:
            mask = mask[rows.to(mask.device)]
        batch_rows = self.batch_rows if self.batch_rows is not None else torch.arange(len(self.query))
        return replace(self, query=self.query[rows.to(self.query.device)], mask=mask, batch_rows=batch_rows[rows.cpu()])

    def truncate(self, num_queries: int, num_keys: int) -> AttentionPart:
        """Return the part with its first queries and keys only."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., :num_queries, :] if mask.shape[-2] > 1 else mask
            mask = mask[..., :num_keys] if mask.shape[-1] > 1 else mask
        return replace(self, query=self.query[:, :, :num_queries], mask=mask, num_keys=num_keys)

    def pad_queries(self, num_keys: int) -> Tensor:
        """Return the queries; if they are scores, padded to their positions among ``num_keys`` keys."""
        if self.score_function is not return_scores:
            return self.query
        num_behind = num_keys - self.first_key - self.num_keys
        return F.pad(self.query[..., : self.num_keys], (self.first_key, num_behind), value=-torch.inf)


def merge_parts(
    parts: Sequence[AttentionPart],
    key: Tensor,
    scale: float,
    softcap: float | None,
    mask_cache: MaskCache | None = None,
) -> CapturedAttention:
    """Merge parts, from top to bottom, into one attention to ``key`` ``(B, G, K, D)``."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.num_queries)
    mask, diagonal, window = _merge_masks(parts, starts, key.shape[2], {} if mask_cache is None else mask_cache)
    query, score = _merge_score_functions(parts, key.shape[2])
    return CapturedAttention(
        query, key, scale, softcap, mask, diagonal, window, _merge_score_mods(parts, starts), score
    )


def merge_batch(attentions: Sequence[CapturedAttention]) -> CapturedAttention:
    """Merge attentions of different lengths into one batch. Padding attends to nothing."""
    num_queries, num_keys = (max(attention.shape[axis] for attention in attentions) for axis in (2, 3))
    if any(attention.score_function not in (None, return_scores) for attention in attentions):
        raise InputError("beams of a score that is not a dot product cannot be merged; each step is in captures.calls")
    padded = [AttentionPart.from_attention(attention).pad_queries(num_keys) for attention in attentions]
    query = torch.cat([F.pad(queries, (0, 0, 0, num_queries - queries.shape[2])) for queries in padded])
    key = torch.cat([F.pad(attention.key, (0, 0, 0, num_keys - attention.shape[3])) for attention in attentions])
    first = attentions[0]
    is_uniform = len({(attention.shape[2:], attention.diagonal, attention.window) for attention in attentions}) == 1
    mask, diagonal, window = None, first.diagonal, first.window
    if not is_uniform or any(attention.mask is not None for attention in attentions):
        masks = _unify_masks([_build_part_mask(AttentionPart.from_attention(attention)) for attention in attentions])
        blocked = False if masks[0].dtype == torch.bool else -torch.inf
        mask = torch.cat(
            [
                F.pad(
                    part_mask.expand(attention.shape[0], -1, -1, -1),
                    (0, num_keys - attention.shape[3], 0, num_queries - attention.shape[2]),
                    value=blocked,
                )
                for part_mask, attention in zip(masks, attentions, strict=True)
            ]
        )
        diagonal = window = None
    score_mod = _merge_batch_score_mods(attentions)
    return CapturedAttention(
        query, key, first.scale, first.softcap, mask, diagonal, window, score_mod, first.score_function
    )


def _merge_batch_score_mods(attentions: Sequence[CapturedAttention]) -> ScoreMod | None:
    """Merge score mods along the batch."""
    if all(attention.score_mod is None for attention in attentions):
        return None
    owners = [(attention, row) for attention in attentions for row in range(attention.shape[0])]

    def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        attention, row = owners[int(b)]
        if attention.score_mod is None:
            return scores
        _, _, num_queries, num_keys = attention.shape  # everything beyond is masked
        indices = torch.full_like(b, row), h, q.clamp(max=num_queries - 1), k.clamp(max=num_keys - 1)
        return attention.score_mod(scores, *indices)

    return modify_scores


# --------------------------------------------------------------------------------------- masks


def _merge_masks(
    parts: Sequence[AttentionPart], starts: Sequence[int], num_keys: int, mask_cache: MaskCache
) -> tuple[Tensor | None, int | None, int | None]:
    """Return mask, diagonal and window of the whole; no mask if a diagonal suffices."""
    is_unmasked = all(
        part.mask is None and part.diagonal is None and part.first_key == 0 and part.num_keys == num_keys
        for part in parts
    )
    if is_unmasked:
        return None, None, None
    bands = {_shift_band(part, start) for part, start in zip(parts, starts, strict=False)}
    if len(bands) == 1 and (band := bands.pop()) is not None:
        return None, *band
    if len(parts) == 1:
        return parts[0].mask, parts[0].diagonal, parts[0].window
    masks = tuple(part.mask for part in parts)
    rows = [None if part.batch_rows is None else tuple(part.batch_rows.tolist()) for part in parts[-1:]]
    shapes = tuple((id(p.mask), p.num_queries, p.num_keys, p.first_key, p.diagonal, p.window) for p in parts)
    key = (num_keys, *rows, shapes)
    if key not in mask_cache:
        mask_cache[key] = (_build_merged_mask(parts, starts, num_keys), masks)
    return mask_cache[key][0], None, None


def _shift_band(part: AttentionPart, start: int) -> tuple[int, int | None] | None:
    """Return diagonal and window of a part relative to the whole; None if it needs a mask."""
    if part.mask is not None or part.first_key > 0:
        return None
    if part.diagonal is not None:
        return part.diagonal - start, part.window
    return (part.num_keys - 1 - start, None) if part.num_queries == 1 else None


def _build_merged_mask(parts: Sequence[AttentionPart], starts: Sequence[int], num_keys: int) -> Tensor:
    """Merge the masks of all parts into one ``(B or 1, H or 1, Q, K)``."""
    masks = _unify_masks([_build_part_mask(part) for part in parts])
    blocked = False if masks[0].dtype == torch.bool else -torch.inf
    batch_size = max(len(mask) for mask in masks)
    merged = masks[0].new_full((batch_size, masks[0].shape[1], starts[-1], num_keys), blocked)
    for mask, part, start in zip(masks, parts, starts, strict=False):
        merged[:, :, start : start + part.num_queries, part.first_key : part.first_key + part.num_keys] = mask
    return merged


def _unify_masks(masks: list[Tensor]) -> list[Tensor]:
    """Return masks ``(B or 1, H or 1, Q, K)`` with equal numbers of heads, all boolean or all additive."""
    num_heads = max(mask.shape[1] for mask in masks)
    masks = [mask.expand(-1, num_heads, -1, -1) for mask in masks]
    float_dtype = next((mask.dtype for mask in masks if mask.dtype != torch.bool), None)
    if float_dtype is None:
        return masks
    return [torch.where(mask, 0.0, -torch.inf).to(float_dtype) if mask.dtype == torch.bool else mask for mask in masks]


def _build_part_mask(part: AttentionPart) -> Tensor:
    """Return the mask of one part, ``(B or 1, H or 1, Q, K)``, including its diagonal and window."""
    row_indices, col_indices = (torch.arange(n, device=part.query.device) for n in (part.num_queries, part.num_keys))
    visible = torch.ones(part.num_queries, part.num_keys, dtype=torch.bool, device=part.query.device)
    if part.diagonal is not None:
        visible = col_indices <= row_indices[:, None] + part.diagonal
        if part.window is not None:
            visible &= col_indices > row_indices[:, None] + part.diagonal - part.window
    if part.mask is None:
        return visible[None, None]
    mask = part.mask[(None,) * (4 - part.mask.dim())]
    return mask & visible if mask.dtype == torch.bool else mask.where(visible, -torch.inf)


# ------------------------------------------------------------------------- score mods and scores


def _merge_score_mods(parts: Sequence[AttentionPart], starts: Sequence[int]) -> ScoreMod | None:
    """Merge score mods along the queries."""
    if all(part.score_mod is None for part in parts):
        return None

    def modify_scores(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        out, positions = scores.clone(), q.reshape(-1)
        for part, start in zip(parts, starts, strict=False):
            selected = ((positions >= start) & (positions < start + part.num_queries)).nonzero()[:, 0]
            if part.score_mod is None or not len(selected):
                continue
            row = b if part.batch_rows is None else part.batch_rows.to(b.device)[b]
            column = (k - part.first_key).clamp(0, part.num_keys - 1)  # everything beyond is masked
            out[..., selected, :] = part.score_mod(
                scores[..., selected, :], row, h, (positions[selected] - start)[:, None], column
            )
        return out

    return modify_scores


def _merge_score_functions(parts: Sequence[AttentionPart], num_keys: int) -> tuple[Tensor, ScoreFunction | None]:
    """Return queries and score of all parts. If scores differ, queries carry the index of their part."""
    query = torch.cat([part.pad_queries(num_keys) for part in parts], dim=2)
    if all(part.score_function == parts[0].score_function for part in parts):
        return query, parts[0].score_function
    part_index = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([part.num_queries for part in parts]))
    part_index = part_index.to(query.device, torch.float32)[:, None].expand(*query.shape[:3], 1)

    def compute_scores(rows: Tensor, keys: Tensor) -> Tensor:
        rows, part_index = rows[..., :-1], rows[0, 0, :, -1].long()
        scores = rows.new_empty(*rows.shape[:3], keys.shape[2])
        for index in part_index.unique().tolist():
            selected, score_function = part_index == index, parts[index].score_function
            assert score_function is not None
            scores[:, :, selected] = score_function(rows[:, :, selected], keys).to(scores.dtype)
        return scores

    return torch.cat([query.float(), part_index], dim=-1), compute_scores
