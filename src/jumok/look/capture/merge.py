"""One attention from the parts in which a model computed it: steps of decoding, chunks of the queries.

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
from jumok.look.capture.adapters.softmax import return_scores
from jumok.look.capture.captured_attention import CapturedAttention, ScoreFunction, ScoreMod

MaskCache = dict[
    Any, tuple[Tensor, Any]
]  # masks that several layers share; with what their keys are the ids of


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Some queries of an attention, and what they saw of the keys ``first_key … first_key + num_keys``."""

    query: Tensor  # (B, H, Q, D)
    num_keys: int
    first_key: int = 0
    mask: Tensor | None = None
    diagonal: int | None = None
    window: int | None = None
    score_mod: ScoreMod | None = None
    score_function: ScoreFunction | None = None
    batch_rows: Tensor | None = None  # (B,): of ``score_mod``'s batch, the rows these are

    @classmethod
    def from_attention(cls, attention: CapturedAttention) -> AttentionPart:
        fields = ("query", "mask", "diagonal", "window", "change", "score")
        return cls(num_keys=attention.shape[3], **{name: getattr(attention, name) for name in fields})

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    def select_rows(self, rows: Tensor) -> AttentionPart:
        """The same of some rows of the batch, in that order."""
        mask = self.mask
        if mask is not None and mask.dim() == 4 and len(mask) > 1:
            mask = mask[rows.to(mask.device)]
        before = self.batch_rows if self.batch_rows is not None else torch.arange(len(self.query))
        return replace(
            self, query=self.query[rows.to(self.query.device)], mask=mask, batch_rows=before[rows.cpu()]
        )

    def truncate(self, num_queries: int, num_keys: int) -> AttentionPart:
        """The first so many of its queries and keys."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., :num_queries, :] if mask.shape[-2] > 1 else mask
            mask = mask[..., :num_keys] if mask.shape[-1] > 1 else mask
        return replace(self, query=self.query[:, :, :num_queries], mask=mask, num_keys=num_keys)

    def pad_queries(self, num_keys: int) -> Tensor:
        """The queries; if they are scores themselves, at their places among so many keys."""
        if self.score_function is not return_scores:
            return self.query
        behind = num_keys - self.first_key - self.num_keys
        return F.pad(self.query[..., : self.num_keys], (self.first_key, behind), value=-torch.inf)


def merge_parts(
    parts: Sequence[AttentionPart],
    key: Tensor,
    scale: float,
    softcap: float | None,
    mask_cache: MaskCache | None = None,
) -> CapturedAttention:
    """The attention of all parts, from top to bottom, to ``key`` ``(B, G, K, D)``."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.num_queries)
    mask, diagonal, window = _merge_masks(
        parts, starts, key.shape[2], {} if mask_cache is None else mask_cache
    )
    query, score = _merge_score_functions(parts, key.shape[2])
    return CapturedAttention(
        query, key, scale, softcap, mask, diagonal, window, _merge_score_mods(parts, starts), score
    )


def merge_batch(attentions: Sequence[CapturedAttention]) -> CapturedAttention:
    """Attentions of different lengths as one batch. What is beyond a shorter one's end attends to nothing."""
    queries, keys = (max(kept.shape[axis] for kept in attentions) for axis in (2, 3))
    if any(kept.score_function not in (None, return_scores) for kept in attentions):
        raise InputError(
            "beams of a score that is no dot product cannot be joined; each step is in seen.calls"
        )
    wide = [AttentionPart.from_attention(kept).pad_queries(keys) for kept in attentions]
    query = torch.cat([F.pad(one, (0, 0, 0, queries - one.shape[2])) for one in wide])
    key = torch.cat([F.pad(kept.key, (0, 0, 0, keys - kept.shape[3])) for kept in attentions])
    first = attentions[0]
    alike = len({(kept.shape[2:], kept.diagonal, kept.window) for kept in attentions}) == 1
    mask, diagonal, window = None, first.diagonal, first.window
    if not alike or any(kept.mask is not None for kept in attentions):
        pieces = _unify_masks([_build_part_mask(AttentionPart.from_attention(kept)) for kept in attentions])
        beyond = False if pieces[0].dtype == torch.bool else -torch.inf
        mask = torch.cat(
            [
                F.pad(
                    piece.expand(kept.shape[0], -1, -1, -1),
                    (0, keys - kept.shape[3], 0, queries - kept.shape[2]),
                    value=beyond,
                )
                for piece, kept in zip(pieces, attentions, strict=True)
            ]
        )
        diagonal = window = None
    change = _merge_batch_score_mods(attentions)
    return CapturedAttention(
        query, key, first.scale, first.softcap, mask, diagonal, window, change, first.score_function
    )


def _merge_batch_score_mods(attentions: Sequence[CapturedAttention]) -> ScoreMod | None:
    """The rules of attentions that stand side by side, each asked for its own rows of the batch."""
    if all(kept.score_mod is None for kept in attentions):
        return None
    owner = [(kept, row) for kept in attentions for row in range(kept.shape[0])]

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kept, row = owner[int(b)]
        if kept.score_mod is None:
            return scores
        _, _, queries, keys = kept.shape  # beyond these, all is masked
        at = torch.full_like(b, row), h, q.clamp(max=queries - 1), k.clamp(max=keys - 1)
        return kept.score_mod(scores, *at)

    return change


# ------------------------------------------------------------------------------- who sees what


def _merge_masks(
    parts: Sequence[AttentionPart], starts: Sequence[int], num_keys: int, mask_cache: MaskCache
) -> tuple[Tensor | None, int | None, int | None]:
    """Mask, diagonal and window of the whole: no mask if a diagonal can say it."""
    everything = all(
        part.mask is None and part.diagonal is None and part.first_key == 0 and part.num_keys == num_keys
        for part in parts
    )
    if everything:
        return None, None, None
    bands = {_shift_band(part, start) for part, start in zip(parts, starts, strict=False)}
    if len(bands) == 1 and (band := bands.pop()) is not None:
        return None, *band
    if len(parts) == 1:
        return parts[0].mask, parts[0].diagonal, parts[0].window
    of = tuple(part.mask for part in parts)
    rows = [None if part.batch_rows is None else tuple(part.batch_rows.tolist()) for part in parts[-1:]]
    shapes = tuple((id(p.mask), p.num_queries, p.num_keys, p.first_key, p.diagonal, p.window) for p in parts)
    at = (num_keys, *rows, shapes)
    if at not in mask_cache:
        mask_cache[at] = (_build_merged_mask(parts, starts, num_keys), of)
    return mask_cache[at][0], None, None


def _shift_band(part: AttentionPart, start: int) -> tuple[int, int | None] | None:
    """Diagonal and window of a part, counted in the whole; None if it takes a mask."""
    if part.mask is not None or part.first_key > 0:
        return None
    if part.diagonal is not None:
        return part.diagonal - start, part.window
    return (part.num_keys - 1 - start, None) if part.num_queries == 1 else None


def _build_merged_mask(parts: Sequence[AttentionPart], starts: Sequence[int], num_keys: int) -> Tensor:
    """The masks of all parts in one, ``(B or 1, H or 1, Q, K)``."""
    pieces = _unify_masks([_build_part_mask(part) for part in parts])
    nothing = False if pieces[0].dtype == torch.bool else -torch.inf
    batch = max(len(piece) for piece in pieces)
    canvas = pieces[0].new_full((batch, pieces[0].shape[1], starts[-1], num_keys), nothing)
    for piece, part, start in zip(pieces, parts, starts, strict=False):
        canvas[:, :, start : start + part.num_queries, part.first_key : part.first_key + part.num_keys] = (
            piece
        )
    return canvas


def _unify_masks(masks: list[Tensor]) -> list[Tensor]:
    """Masks ``(B or 1, H or 1, Q, K)`` with as many heads each, all of them boolean or all to be added."""
    heads = max(mask.shape[1] for mask in masks)
    masks = [mask.expand(-1, heads, -1, -1) for mask in masks]
    added = next((mask.dtype for mask in masks if mask.dtype != torch.bool), None)
    if added is None:
        return masks
    return [
        torch.where(mask, 0.0, -torch.inf).to(added) if mask.dtype == torch.bool else mask for mask in masks
    ]


def _build_part_mask(part: AttentionPart) -> Tensor:
    """The mask of one part, ``(B or 1, H or 1, Q, K)``, with its diagonal and window."""
    down, along = (torch.arange(n, device=part.query.device) for n in (part.num_queries, part.num_keys))
    seen = torch.ones(part.num_queries, part.num_keys, dtype=torch.bool, device=part.query.device)
    if part.diagonal is not None:
        seen = along <= down[:, None] + part.diagonal
        if part.window is not None:
            seen &= along > down[:, None] + part.diagonal - part.window
    if part.mask is None:
        return seen[None, None]
    mask = part.mask[(None,) * (4 - part.mask.dim())]
    return mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf)


# ---------------------------------------------------------------------- rules and scores of parts


def _merge_score_mods(parts: Sequence[AttentionPart], starts: Sequence[int]) -> ScoreMod | None:
    """The rules of the parts, each asked for its own rows."""
    if all(part.score_mod is None for part in parts):
        return None

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        out, at = scores.clone(), q.reshape(-1)
        for part, start in zip(parts, starts, strict=False):
            mine = ((at >= start) & (at < start + part.num_queries)).nonzero()[:, 0]
            if part.score_mod is None or not len(mine):
                continue
            row = b if part.batch_rows is None else part.batch_rows.to(b.device)[b]
            column = (k - part.first_key).clamp(0, part.num_keys - 1)  # beyond, all is masked
            out[..., mine, :] = part.score_mod(
                scores[..., mine, :], row, h, (at[mine] - start)[:, None], column
            )
        return out

    return change


def _merge_score_functions(
    parts: Sequence[AttentionPart], num_keys: int
) -> tuple[Tensor, ScoreFunction | None]:
    """The queries of all parts, and their score. If that differs, queries carry the number of their part."""
    query = torch.cat([part.pad_queries(num_keys) for part in parts], dim=2)
    if all(part.score_function == parts[0].score_function for part in parts):
        return query, parts[0].score_function
    number = torch.repeat_interleave(
        torch.arange(len(parts)), torch.tensor([part.num_queries for part in parts])
    )
    number = number.to(query.device, torch.float32)[:, None].expand(*query.shape[:3], 1)

    def score(rows: Tensor, keys: Tensor) -> Tensor:
        rows, number = rows[..., :-1], rows[0, 0, :, -1].long()
        found = rows.new_empty(*rows.shape[:3], keys.shape[2])
        for one in number.unique().tolist():
            mine, scoring = number == one, parts[one].score
            assert scoring is not None
            found[:, :, mine] = scoring(rows[:, :, mine], keys).to(found.dtype)
        return found

    return torch.cat([query.float(), number], dim=-1), score
