"""jumok's own attention: ``attend``, ``weights`` and ``mix``, with every score and every mask.

A model that calls ``weights`` may do something to them before it calls ``mix``: then these are its weights.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jumok.attention import blocks, core
from jumok.attention.call import Call
from jumok.attention.heads import MultiHead
from jumok.attention.kinds import At, Mask, Window
from jumok.attention.prepared import Prepared
from jumok.attention.scores import LocationSensitive, Score, _Located
from jumok.look.adapters.patches import Function, Make, attribute
from jumok.look.adapters.site import Found, Site, here, told
from jumok.look.adapters.softmax import kept_scores
from jumok.look.kept import Change, Kept


def stand_ins() -> dict[Function, Make]:
    """For ``mix``, wherever it is held."""
    return {core.mix: _mix}


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, every checked call is told of."""
    with attribute(core, "_attended", _attended), attribute(core, "_weighed", _weighed):
        yield


def _attended(attended: Function) -> Function:
    def watched_attend(call: Call) -> Any:
        site = here()
        if site is None:
            return attended(call)
        with told(entirely=True):
            out = attended(call)
        kept = site.made(lambda: _kept(call))
        if kept is None:
            return out
        four = _four(out, call.leading)
        changed = site.output(kept, None if call.value is None else _per_key_head(call.value, call), four)
        site.saw(kept, kind=_kind(site, call), uses=_parameters(call))
        return out if changed is four else changed.reshape(out.shape)

    return watched_attend


def _weighed(weighed: Function) -> Function:
    def watched_weights(call: Call) -> Any:
        site = here()
        if site is None:
            return weighed(call)
        with told(entirely=True):
            out = weighed(call)
        kept = site.made(lambda: _kept(call))
        if kept is None:
            return out
        four = _four(out, call.leading)
        changed = site.output(kept, None, four)
        out = out if changed is four else changed.reshape(out.shape)
        site.weighed(Found(kept, _kind(site, call), uses=_parameters(call)), out)
        return out

    return watched_weights


def _mix(mix: Function) -> Function:
    def watched_mix(weights: Tensor, value: Tensor, *, finite: bool = False) -> Any:
        site = here()
        if site is not None and not site.mixed(weights):
            four = _four(weights.detach(), weights.shape[:-2]).float()
            site.saw(kept_scores(four.log(), lse=four.new_zeros(four.shape[:3])))
        return mix(weights, value, finite=finite)

    return watched_mix


def _kind(site: Site, call: Call) -> str | None:
    """Whether it is self- or cross-attention, if the call or the module that makes it says so."""
    if isinstance(site.owner, MultiHead):
        return "self" if site.owner.key_width is None else "cross"
    return "cross" if isinstance(call.key, Prepared) else None


# ------------------------------------------------------------------------ from a call to what is kept


@torch.no_grad()
def _kept(call: Call) -> Kept:
    query = _four(call.query.expand(*call.leading, *call.query.shape[-2:]), call.leading)
    keys = _per_key_head(call.score.prepared(call.key), call)
    mask, diagonal, window, change = _masks(call)
    score = None
    if call.dot is None:
        score = _Scoring(call.score, call.leading, call.group, 1.0 if call.scale is None else call.scale)
    scale = 1.0 if call.dot is None else call.dot_scale()
    return Kept(query, keys, scale, call.softcap, mask, diagonal, window, change, score)


def _four(x: Tensor, leading: torch.Size) -> Tensor:
    """``(*leading, length, width)`` as (batch, heads, length, width); what else is in front: batch."""
    match len(leading):
        case 0:
            return x[None, None]
        case 1:
            return x[:, None]
        case n:
            return x.flatten(0, n - 2)


def _per_key_head(x: Tensor, call: Call) -> Tensor:
    """Keys or values ``(…, K, width)`` as (batch, their heads, K, width)."""
    if call.group > 1:
        return x.expand(call.leading[0], *x.shape[1:])
    return _four(x.expand(*call.leading, *x.shape[-2:]), call.leading)


def _parameters(call: Call) -> tuple[Tensor, ...]:
    """What the score will be computed with again, if it is asked for."""
    if call.dot is not None:
        return ()
    return tuple(_parts(call.score)[0].parameters())


@dataclass(frozen=True)
class _Scoring:
    """A score as a function of (batch, heads, some queries, width) and (batch, key heads, keys, width)."""

    score: Score
    leading: torch.Size
    group: int
    factor: float

    def __call__(self, rows: Tensor, keys: Tensor) -> Tensor:
        score = _moved(self.score, rows.device)
        like = _parts(score)[0].a_parameter
        if like is not None:
            rows, keys = rows.to(like.dtype), keys.to(like.dtype)
        keys = keys.repeat_interleave(self.group, 1)
        rows, keys = (x.reshape(*self.leading, *x.shape[-2:]) for x in (rows, keys))
        return _four(score(rows, Prepared(keys, score.name)) * self.factor, self.leading)


def _parts(score: Score) -> tuple[Score, Tensor | None]:
    """The score with the parameters, and the weights before it, if it looks at those."""
    if isinstance(score, _Located):
        return score.score, score.previous  # type: ignore[return-value]
    return score, None


def _moved(score: Score, device: torch.device) -> Score:
    inner, previous = _parts(score)
    if inner.a_parameter is not None and inner.a_parameter.device != device:
        inner = copy.deepcopy(inner).to(device)
    if previous is None:
        return inner
    assert isinstance(inner, LocationSensitive)
    return inner.after(previous.to(device))


def _masks(call: Call) -> tuple[Tensor | None, int | None, int | None, Change | None]:
    """Mask and bias as tensor, diagonal, window, and a rule for what would fill Q×K as a tensor."""
    at, leading = call.at, call.leading
    parts = [] if call.mask is None else list(call.mask.parts())
    diagonal, window = None, None
    bands = [part for part in parts if isinstance(part, Window) and _is_diagonal(part)]
    if bands:
        band = bands[0]
        parts.remove(band)
        offset = at.keys - at.queries if band.offset is None else int(band.offset)
        diagonal = offset + (band.right or 0)
        window = None if band.left is None else band.left + (band.right or 0) + 1
    change, tensor = None, None
    small = [part for part in parts if part.same_for_all_queries()]
    large = [part for part in parts if not part.same_for_all_queries()]
    if large:
        mask: Mask = functools.reduce(operator.and_, large)
        if blocks.is_structured(mask) and len(leading) <= 2:
            change = _ruled(blocks.rule(mask, At(2, at.queries, at.keys, at.device)))
        else:
            tensor = mask.block(at, slice(0, at.queries))
    for part in small:
        row = part.block(at, slice(0, 1))
        tensor = row if tensor is None else tensor & row
    if call.bias is not None:
        bias = call.bias.detach()
        bias = bias.reshape(*[1] * (len(leading) + 2 - bias.dim()), *bias.shape)
        tensor = bias if tensor is None else torch.where(tensor, bias, -torch.inf)
    if tensor is not None and len(leading) > 2:
        tensor = tensor.expand(*leading, *tensor.shape[-2:])
    return None if tensor is None else _four(tensor, leading), diagonal, window, change


def _is_diagonal(part: Window) -> bool:
    """Causal, or a window that ends at some diagonal, the same in all rows."""
    return part.right is not None and (part.offset is None or part.offset.dim() == 0)


def _ruled(allowed: blocks.Rule) -> Change:
    def change(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scores.masked_fill(~allowed(b, h, q, k), -torch.inf)

    return change
