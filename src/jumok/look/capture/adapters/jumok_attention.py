"""jumok's own attention: ``attend``, ``weights`` and ``mix``, with every score and every mask.

A model that calls ``weights`` may modify them before it calls ``mix``. In that case, the modified weights are
captured.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jumok.attention import core
from jumok.attention.arguments import AttentionCall
from jumok.attention.heads import MultiHead
from jumok.attention.mask_types import AttentionShape, Mask, WindowMask
from jumok.attention.paths import flex
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import LocationSensitive, Score, _LocationSensitiveStep
from jumok.look.capture.call_site import CallSite, get_call_site, suppress_reports
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod
from jumok.look.capture.layouts import to_4d
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import AttributePatch, Function, FunctionPatch


def list_patches(model: nn.Module) -> Iterator[FunctionPatch | AttributePatch]:
    """List the patches of every checked call, and of ``mix``."""
    yield AttributePatch(core, "_compute_output", functools.partial(_wrap_computation, returns_weights=False))
    yield AttributePatch(core, "_compute_weights", functools.partial(_wrap_computation, returns_weights=True))
    yield FunctionPatch(core.mix, _wrap_mix)


def _wrap_computation(compute: Function, returns_weights: bool) -> Function:
    def watched_computation(call: AttentionCall) -> Any:
        site = get_call_site()
        if site is None:
            return compute(call)
        with suppress_reports(entirely=True):
            out = compute(call)
        observed = site.read_call(lambda: _read_call(site, call))
        if observed is None:
            return out
        out = site.modify_result(observed, out)
        if returns_weights:
            site.report_weights(observed, out)
        else:
            site.report(observed)
        return out

    return watched_computation


def _wrap_mix(mix: Function) -> Function:
    def watched_mix(weights: Tensor, value: Tensor, *, assume_finite: bool = False) -> Any:
        site = get_call_site()
        if site is not None and not site.report_mix(weights):
            site.report(ObservedCall(CapturedAttention.from_weights(to_4d(weights.detach()).float())))
        return mix(weights, value, assume_finite=assume_finite)

    return watched_mix


# ----------------------------------------------------------------------- conversion of a call


@torch.no_grad()
def _read_call(site: CallSite, call: AttentionCall) -> ObservedCall:
    query = to_4d(call.query.expand(*call.leading_shape, *call.query.shape[-2:]))
    key = _to_key_heads(call.score.resolve_keys(call.key), call)
    value = None if call.value is None else _to_key_heads(call.value, call)
    mask, diagonal, window, score_mod = _convert_masks(call)
    scale, score = 1.0, None
    score_tensors: tuple[Tensor, ...] = ()
    if call.dot_score is not None:
        scale = call.dot_scale()
    else:
        factor = 1.0 if call.scale is None else call.scale
        score = _CapturedScore(call.score, call.leading_shape, call.group_size, factor)
        score_tensors = tuple(_split_score(call.score)[0].parameters())
    attention = CapturedAttention(query, key, scale, call.softcap, mask, diagonal, window, score_mod, score)
    return ObservedCall(attention, value, _infer_kind(site, call), score_tensors=score_tensors)


def _infer_kind(site: CallSite, call: AttentionCall) -> str | None:
    """Return whether it is self- or cross-attention, if the call or the calling module determines it."""
    if isinstance(site.owner, MultiHead):
        return "self" if site.owner.key_width is None else "cross"
    return "cross" if isinstance(call.key, PreparedKeys) else None


def _to_key_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """Return keys or values ``(…, K, width)`` as (batch, key heads, K, width)."""
    if call.group_size > 1:
        return x.expand(call.leading_shape[0], *x.shape[1:])
    return to_4d(x.expand(*call.leading_shape, *x.shape[-2:]))


@dataclass(frozen=True)
class _CapturedScore:
    """A score as a function of (batch, heads, queries, width) and (batch, key heads, keys, width)."""

    score: Score
    leading: torch.Size
    group: int
    factor: float

    def __call__(self, rows: Tensor, keys: Tensor) -> Tensor:
        score = _move_score(self.score, rows.device)
        parameter = _split_score(score)[0].representative_parameter
        if parameter is not None:
            rows, keys = rows.to(parameter.dtype), keys.to(parameter.dtype)
        keys = keys.repeat_interleave(self.group, 1)
        rows, keys = (x.reshape(*self.leading, *x.shape[-2:]) for x in (rows, keys))
        return to_4d(score(rows, PreparedKeys(keys, score.name)) * self.factor)


def _split_score(score: Score) -> tuple[Score, Tensor | None]:
    """Return the score with the parameters and, if it is location sensitive, the previous weights."""
    if isinstance(score, _LocationSensitiveStep):
        return score.score, score.previous_weights
    return score, None


def _move_score(score: Score, device: torch.device) -> Score:
    inner, previous = _split_score(score)
    if inner.representative_parameter is not None and inner.representative_parameter.device != device:
        inner = copy.deepcopy(inner).to(device)
    if previous is None:
        return inner
    assert isinstance(inner, LocationSensitive)
    return inner.with_previous(previous.to(device))


def _convert_masks(call: AttentionCall) -> tuple[Tensor | None, int | None, int | None, ScoreMod | None]:
    """Return mask and bias as a tensor, diagonal, window, and a score mod for what would fill Q×K."""
    shape, leading = call.shape, call.leading_shape
    parts = [] if call.mask is None else list(call.mask.conjuncts())
    diagonal, window = None, None
    bands = [part for part in parts if isinstance(part, WindowMask) and _is_diagonal_window(part)]
    if bands:
        band = bands[0]
        parts.remove(band)
        offset = shape.num_keys - shape.num_queries if band.offset is None else int(band.offset)
        diagonal = offset + (band.right or 0)
        window = None if band.left is None else band.left + (band.right or 0) + 1
    score_mod, tensor = None, None
    key_masks = [part for part in parts if part.is_query_independent()]
    full_masks = [part for part in parts if not part.is_query_independent()]
    if full_masks:
        mask: Mask = functools.reduce(operator.and_, full_masks)
        if flex.is_structured(mask) and len(leading) <= 2:
            score_mod = _build_score_mod(
                flex.build_mask_mod(mask, AttentionShape(2, shape.num_queries, shape.num_keys, shape.device))
            )
        else:
            tensor = mask.to_dense_rows(shape, slice(0, shape.num_queries))
    for part in key_masks:
        row = part.to_dense_rows(shape, slice(0, 1))
        tensor = row if tensor is None else tensor & row
    if call.bias is not None:
        bias = call.bias.detach()
        bias = bias.reshape(*[1] * (len(leading) + 2 - bias.dim()), *bias.shape)
        tensor = bias if tensor is None else torch.where(tensor, bias, -torch.inf)
    if tensor is not None and len(leading) != 2:
        tensor = to_4d(tensor.expand(*leading, *tensor.shape[-2:]))
    return tensor, diagonal, window, score_mod


def _is_diagonal_window(window: WindowMask) -> bool:
    """Return whether it is causal or a window that ends at a diagonal, the same in all rows."""
    return window.right is not None and (window.offset is None or window.offset.dim() == 0)


def _build_score_mod(mask_mod: flex.MaskMod) -> ScoreMod:
    def score_mod(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scores.masked_fill(~mask_mod(b, h, q, k), -torch.inf)

    return score_mod
