"""jumok's own attention: ``attend``, ``weights`` and ``mix``, with every score and every mask.

A model that calls ``weights`` may modify them before it calls ``mix``. In that case, the modified weights are
captured.
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

from jumok.attention import core
from jumok.attention.arguments import AttentionCall
from jumok.attention.heads import MultiHead
from jumok.attention.mask_types import AttentionShape, Mask, WindowMask
from jumok.attention.paths import flex
from jumok.attention.prepared_keys import PreparedKeys
from jumok.attention.scores import LocationSensitive, Score, _LocationSensitiveStep
from jumok.look.capture.adapters.call_site import CallSite, ObservedCall, get_call_site, suppress_reports
from jumok.look.capture.adapters.patching import Function, WrapperFactory, patch_attribute
from jumok.look.capture.adapters.softmax_analysis import capture_scores
from jumok.look.capture.captured_attention import CapturedAttention, ScoreMod


def get_wrappers() -> dict[Function, WrapperFactory]:
    """Return the wrapper of ``mix``."""
    return {core.mix: _wrap_mix}


@contextmanager
def install_patches() -> Iterator[None]:
    """Report every checked call."""
    with (
        patch_attribute(core, "_compute_output", _wrap_attend),
        patch_attribute(core, "_compute_weights", _wrap_weights),
    ):
        yield


def _wrap_attend(attend: Function) -> Function:
    def watched_attend(call: AttentionCall) -> Any:
        site = get_call_site()
        if site is None:
            return attend(call)
        with suppress_reports(entirely=True):
            out = attend(call)
        attention = site.try_capture(lambda: _capture_call(call))
        if attention is None:
            return out
        out_4d = _to_4d(out, call.leading_shape)
        modified = site.modify_output(
            attention, None if call.value is None else _to_key_heads(call.value, call), out_4d
        )
        site.report(attention, kind=_infer_kind(site, call), score_tensors=_list_score_parameters(call))
        return out if modified is out_4d else modified.reshape(out.shape)

    return watched_attend


def _wrap_weights(compute_weights: Function) -> Function:
    def watched_weights(call: AttentionCall) -> Any:
        site = get_call_site()
        if site is None:
            return compute_weights(call)
        with suppress_reports(entirely=True):
            out = compute_weights(call)
        attention = site.try_capture(lambda: _capture_call(call))
        if attention is None:
            return out
        out_4d = _to_4d(out, call.leading_shape)
        modified = site.modify_output(attention, None, out_4d)
        out = out if modified is out_4d else modified.reshape(out.shape)
        site.report_weights(
            ObservedCall(attention, _infer_kind(site, call), score_tensors=_list_score_parameters(call)), out
        )
        return out

    return watched_weights


def _wrap_mix(mix: Function) -> Function:
    def watched_mix(weights: Tensor, value: Tensor, *, assume_finite: bool = False) -> Any:
        site = get_call_site()
        if site is not None and not site.report_mix(weights):
            weights_4d = _to_4d(weights.detach(), weights.shape[:-2]).float()
            site.report(capture_scores(weights_4d.log(), lse=weights_4d.new_zeros(weights_4d.shape[:3])))
        return mix(weights, value, assume_finite=assume_finite)

    return watched_mix


def _infer_kind(site: CallSite, call: AttentionCall) -> str | None:
    """Return whether it is self- or cross-attention, if the call or the calling module determines it."""
    if isinstance(site.owner, MultiHead):
        return "self" if site.owner.key_width is None else "cross"
    return "cross" if isinstance(call.key, PreparedKeys) else None


# ----------------------------------------------------------------------- conversion of a call


@torch.no_grad()
def _capture_call(call: AttentionCall) -> CapturedAttention:
    query = _to_4d(call.query.expand(*call.leading_shape, *call.query.shape[-2:]), call.leading_shape)
    keys = _to_key_heads(call.score.resolve_keys(call.key), call)
    mask, diagonal, window, score_mod = _convert_masks(call)
    score = None
    if call.dot_score is None:
        score = _CapturedScore(
            call.score, call.leading_shape, call.group_size, 1.0 if call.scale is None else call.scale
        )
    scale = 1.0 if call.dot_score is None else call.dot_scale()
    return CapturedAttention(query, keys, scale, call.softcap, mask, diagonal, window, score_mod, score)


def _to_4d(x: Tensor, leading: torch.Size) -> Tensor:
    """Return ``(*leading, length, width)`` as (batch, heads, length, width). Further axes are batch."""
    match len(leading):
        case 0:
            return x[None, None]
        case 1:
            return x[:, None]
        case n:
            return x.flatten(0, n - 2)


def _to_key_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """Return keys or values ``(…, K, width)`` as (batch, key heads, K, width)."""
    if call.group_size > 1:
        return x.expand(call.leading_shape[0], *x.shape[1:])
    return _to_4d(x.expand(*call.leading_shape, *x.shape[-2:]), call.leading_shape)


def _list_score_parameters(call: AttentionCall) -> tuple[Tensor, ...]:
    """Return the parameters that the score needs to be computed again."""
    if call.dot_score is not None:
        return ()
    return tuple(_split_score(call.score)[0].parameters())


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
        return _to_4d(score(rows, PreparedKeys(keys, score.name)) * self.factor, self.leading)


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
    if tensor is not None and len(leading) > 2:
        tensor = tensor.expand(*leading, *tensor.shape[-2:])
    return None if tensor is None else _to_4d(tensor, leading), diagonal, window, score_mod


def _is_diagonal_window(window: WindowMask) -> bool:
    """Return whether it is causal or a window that ends at a diagonal, the same in all rows."""
    return window.right is not None and (window.offset is None or window.offset.dim() == 0)


def _build_score_mod(mask_mod: flex.MaskMod) -> ScoreMod:
    def score_mod(scores: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return scores.masked_fill(~mask_mod(b, h, q, k), -torch.inf)

    return score_mod
