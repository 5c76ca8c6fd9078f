"""One attention from the parts in which a model computed it: steps of decoding, chunks of the queries.

::

    prompt     ■ · · · · ·         each part has its own queries (rows) and sees some of
               ■ ■ · · · ·         the keys, from ``first`` on; together they are one map
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
from jumok.look.adapters.softmax import as_given
from jumok.look.kept import Change, Kept, Scoring

Memo = dict[Any, tuple[Tensor, Any]]  # masks that several layers share; with what their keys are the ids of


@dataclass(frozen=True, eq=False)
class Part:
    """Some queries of an attention, and what they saw of the keys ``first … first + keys``."""

    query: Tensor  # (B, H, Q, D)
    keys: int
    first: int = 0
    mask: Tensor | None = None
    diagonal: int | None = None
    window: int | None = None
    change: Change | None = None
    score: Scoring | None = None
    rows: Tensor | None = None  # (B,): of ``change``'s batch, the rows these are

    @classmethod
    def of(cls, kept: Kept) -> Part:
        fields = ("query", "mask", "diagonal", "window", "change", "score")
        return cls(keys=kept.shape[3], **{name: getattr(kept, name) for name in fields})

    @property
    def count(self) -> int:
        return self.query.shape[2]

    def chosen(self, rows: Tensor) -> Part:
        """The same of some rows of the batch, in that order."""
        mask = self.mask
        if mask is not None and mask.dim() == 4 and len(mask) > 1:
            mask = mask[rows.to(mask.device)]
        before = self.rows if self.rows is not None else torch.arange(len(self.query))
        return replace(self, query=self.query[rows.to(self.query.device)], mask=mask, rows=before[rows.cpu()])

    def cut(self, count: int, keys: int) -> Part:
        """The first so many of its queries and keys."""
        mask = self.mask
        if mask is not None:
            mask = mask[..., :count, :] if mask.shape[-2] > 1 else mask
            mask = mask[..., :keys] if mask.shape[-1] > 1 else mask
        return replace(self, query=self.query[:, :, :count], mask=mask, keys=keys)

    def query_among(self, keys: int) -> Tensor:
        """The queries; if they are scores themselves, at their places among so many keys."""
        if self.score is not as_given:
            return self.query
        behind = keys - self.first - self.keys
        return F.pad(self.query[..., : self.keys], (self.first, behind), value=-torch.inf)


def stitched(
    parts: Sequence[Part], key: Tensor, scale: float, softcap: float | None, memo: Memo | None = None
) -> Kept:
    """The attention of all parts, from top to bottom, to ``key`` ``(B, G, K, D)``."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part.count)
    mask, diagonal, window = _visible(parts, starts, key.shape[2], {} if memo is None else memo)
    query, score = _scoring(parts, key.shape[2])
    return Kept(query, key, scale, softcap, mask, diagonal, window, _change(parts, starts), score)


def side_by_side(some: Sequence[Kept]) -> Kept:
    """Attentions of different lengths as one batch. What is beyond a shorter one's end attends to nothing."""
    queries, keys = (max(kept.shape[axis] for kept in some) for axis in (2, 3))
    if any(kept.score not in (None, as_given) for kept in some):
        raise InputError(
            "beams of a score that is no dot product cannot be joined; each step is in seen.calls"
        )
    wide = [Part.of(kept).query_among(keys) for kept in some]
    query = torch.cat([F.pad(one, (0, 0, 0, queries - one.shape[2])) for one in wide])
    key = torch.cat([F.pad(kept.key, (0, 0, 0, keys - kept.shape[3])) for kept in some])
    first = some[0]
    alike = len({(kept.shape[2:], kept.diagonal, kept.window) for kept in some}) == 1
    mask, diagonal, window = None, first.diagonal, first.window
    if not alike or any(kept.mask is not None for kept in some):
        pieces = _of_one_kind([_piece(Part.of(kept)) for kept in some])
        beyond = False if pieces[0].dtype == torch.bool else -torch.inf
        mask = torch.cat(
            [
                F.pad(
                    piece.expand(kept.shape[0], -1, -1, -1),
                    (0, keys - kept.shape[3], 0, queries - kept.shape[2]),
                    value=beyond,
                )
                for piece, kept in zip(pieces, some, strict=True)
            ]
        )
        diagonal = window = None
    change = _change_of_each(some)
    return Kept(query, key, first.scale, first.softcap, mask, diagonal, window, change, first.score)


def _change_of_each(some: Sequence[Kept]) -> Change | None:
    """The rules of attentions that stand side by side, each asked for its own rows of the batch."""
    if all(kept.change is None for kept in some):
        return None
    owner = [(kept, row) for kept in some for row in range(kept.shape[0])]

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kept, row = owner[int(b)]
        if kept.change is None:
            return scores
        _, _, queries, keys = kept.shape  # beyond these, all is masked
        at = torch.full_like(b, row), h, q.clamp(max=queries - 1), k.clamp(max=keys - 1)
        return kept.change(scores, *at)

    return change


# ------------------------------------------------------------------------------- who sees what


def _visible(
    parts: Sequence[Part], starts: Sequence[int], keys: int, memo: Memo
) -> tuple[Tensor | None, int | None, int | None]:
    """Mask, diagonal and window of the whole: no mask if a diagonal can say it."""
    everything = all(
        part.mask is None and part.diagonal is None and part.first == 0 and part.keys == keys
        for part in parts
    )
    if everything:
        return None, None, None
    bands = {_band(part, start) for part, start in zip(parts, starts, strict=False)}
    if len(bands) == 1 and (band := bands.pop()) is not None:
        return None, *band
    if len(parts) == 1:
        return parts[0].mask, parts[0].diagonal, parts[0].window
    of = tuple(part.mask for part in parts)
    rows = [None if part.rows is None else tuple(part.rows.tolist()) for part in parts[-1:]]
    shapes = tuple((id(p.mask), p.count, p.keys, p.first, p.diagonal, p.window) for p in parts)
    at = (keys, *rows, shapes)
    if at not in memo:
        memo[at] = (_canvas(parts, starts, keys), of)
    return memo[at][0], None, None


def _band(part: Part, start: int) -> tuple[int, int | None] | None:
    """Diagonal and window of a part, counted in the whole; None if it takes a mask."""
    if part.mask is not None or part.first > 0:
        return None
    if part.diagonal is not None:
        return part.diagonal - start, part.window
    return (part.keys - 1 - start, None) if part.count == 1 else None


def _canvas(parts: Sequence[Part], starts: Sequence[int], keys: int) -> Tensor:
    """The masks of all parts in one, ``(B or 1, H or 1, Q, K)``."""
    pieces = _of_one_kind([_piece(part) for part in parts])
    nothing = False if pieces[0].dtype == torch.bool else -torch.inf
    batch = max(len(piece) for piece in pieces)
    canvas = pieces[0].new_full((batch, pieces[0].shape[1], starts[-1], keys), nothing)
    for piece, part, start in zip(pieces, parts, starts, strict=False):
        canvas[:, :, start : start + part.count, part.first : part.first + part.keys] = piece
    return canvas


def _of_one_kind(masks: list[Tensor]) -> list[Tensor]:
    """Masks ``(B or 1, H or 1, Q, K)`` with as many heads each, all of them boolean or all to be added."""
    heads = max(mask.shape[1] for mask in masks)
    masks = [mask.expand(-1, heads, -1, -1) for mask in masks]
    added = next((mask.dtype for mask in masks if mask.dtype != torch.bool), None)
    if added is None:
        return masks
    return [
        torch.where(mask, 0.0, -torch.inf).to(added) if mask.dtype == torch.bool else mask for mask in masks
    ]


def _piece(part: Part) -> Tensor:
    """The mask of one part, ``(B or 1, H or 1, Q, K)``, with its diagonal and window."""
    down, along = (torch.arange(n, device=part.query.device) for n in (part.count, part.keys))
    seen = torch.ones(part.count, part.keys, dtype=torch.bool, device=part.query.device)
    if part.diagonal is not None:
        seen = along <= down[:, None] + part.diagonal
        if part.window is not None:
            seen &= along > down[:, None] + part.diagonal - part.window
    if part.mask is None:
        return seen[None, None]
    mask = part.mask[(None,) * (4 - part.mask.dim())]
    return mask & seen if mask.dtype == torch.bool else mask.where(seen, -torch.inf)


# ---------------------------------------------------------------------- rules and scores of parts


def _change(parts: Sequence[Part], starts: Sequence[int]) -> Change | None:
    """The rules of the parts, each asked for its own rows."""
    if all(part.change is None for part in parts):
        return None

    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        out, at = scores.clone(), q.reshape(-1)
        for part, start in zip(parts, starts, strict=False):
            mine = ((at >= start) & (at < start + part.count)).nonzero()[:, 0]
            if part.change is None or not len(mine):
                continue
            row = b if part.rows is None else part.rows.to(b.device)[b]
            column = (k - part.first).clamp(0, part.keys - 1)  # beyond, all is masked
            out[..., mine, :] = part.change(scores[..., mine, :], row, h, (at[mine] - start)[:, None], column)
        return out

    return change


def _scoring(parts: Sequence[Part], keys: int) -> tuple[Tensor, Scoring | None]:
    """The queries of all parts, and their score. If that differs, queries carry the number of their part."""
    query = torch.cat([part.query_among(keys) for part in parts], dim=2)
    if all(part.score == parts[0].score for part in parts):
        return query, parts[0].score
    number = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([part.count for part in parts]))
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
