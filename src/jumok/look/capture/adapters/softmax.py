"""Attention written out by hand: a softmax whose output multiplies values.

Every softmax is tracked to its use and shown if that is an attention: see :mod:`weight_tracker` and
:mod:`softmax_analysis`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from jumok.look.capture.adapters.call_site import OBSERVERS, CallSite, are_reports_suppressed, get_call_site
from jumok.look.capture.adapters.module_stack import ModuleFrame, get_num_heads, looks_like_attention
from jumok.look.capture.adapters.patching import Function, WrapperFactory, patch_attribute
from jumok.look.capture.adapters.softmax_candidates import SoftmaxCandidate
from jumok.look.capture.adapters.weight_tracker import get_tracker

_CAUGHT_SCORES: ContextVar[list[Tensor] | None] = ContextVar("jumok.look.caught_scores", default=None)
SOFTMAX_FUNCTIONS = (torch.softmax, torch.special.softmax, torch.log_softmax, torch.special.log_softmax)
LOG_SOFTMAX_NAMES = {"log_softmax", "special_log_softmax"}
DISPATCH_MODE_REASON = "its softmax ran inside a dispatch mode of the model, such as that of a selective checkpoint"


def get_wrappers() -> dict[Function, WrapperFactory]:
    """Return wrappers of the functions."""
    return dict.fromkeys(SOFTMAX_FUNCTIONS, _wrap_softmax)


@contextmanager
def install_patches() -> Iterator[None]:
    """Track softmaxes."""
    with ExitStack() as stack:
        for name in ("softmax", "log_softmax"):  # F.softmax and nn.Softmax call the tensor's method
            stack.enter_context(patch_attribute(torch.Tensor, name, _wrap_softmax))
        yield


def _wrap_softmax(softmax: Function) -> Function:
    is_logarithmic = softmax.__name__ in LOG_SOFTMAX_NAMES

    def watched_softmax(scores: Any, *args: Any, **options: Any) -> Any:
        site = None if torch.compiler.is_compiling() or not OBSERVERS.get() else get_call_site()
        dim = None if site is None else _get_softmax_dim(scores, *args, **options)
        if site is None or dim is None:
            return softmax(scores, *args, **options)
        if (caught_scores := _CAUGHT_SCORES.get()) is not None:
            return _run_inner_softmax(site, caught_scores, softmax, scores, args, options)
        candidate = SoftmaxCandidate(scores)
        weights = None
        if site.is_modified:
            weights = _run_modified_softmax(site, softmax, scores, args, options)
            scores_4d = _to_bhqk(scores, get_num_heads(site.module))
            candidate.modified_shape = None if scores_4d is None else tuple(scores_4d.shape)
        if weights is None:
            weights = softmax(scores, *args, **options)
        if isinstance(weights, Tensor) and not are_reports_suppressed():
            if site.is_in_dispatch_mode:  # it may end before ours, and modes must end in order
                candidate.stop(DISPATCH_MODE_REASON)
            else:
                get_tracker().track(candidate, weights, dim, is_unchanged=not is_logarithmic)
            site.report_softmax(candidate, _may_come_from_product(site.frames[0], scores, dim))
        return weights

    return watched_softmax


def _run_modified_softmax(site: CallSite, softmax: Function, scores: Tensor, args: Any, options: Any) -> Tensor | None:
    """Return the weights of modified scores ``(B, H, Q, K)``; None if the axes are ambiguous."""
    scores_4d = _to_bhqk(scores, get_num_heads(site.module))
    if scores_4d is None:
        return None
    modified = site.modify_scores(scores_4d)
    weights: Tensor = softmax(scores if modified is scores_4d else modified.reshape(scores.shape), *args, **options)
    weights_4d = weights.reshape(scores_4d.shape)
    modified = site.modify_weights(weights_4d)
    return weights if modified is weights_4d else modified.reshape(scores.shape)


def _run_inner_softmax(
    site: CallSite, caught_scores: list[Tensor], softmax: Function, scores: Tensor, args: Any, options: Any
) -> Any:
    """Run a softmax inside an attention that an outer adapter reports."""
    dim = args[0] if args else options.get("dim")
    if not looks_like_attention(site.module) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
        return softmax(scores, *args, **options)
    scores_4d = _to_bhqk(scores, get_num_heads(site.module))
    caught_scores.append(scores if scores_4d is None else scores_4d)
    weights = _run_modified_softmax(site, softmax, scores, args, options)
    return softmax(scores, *args, **options) if weights is None else weights


@contextmanager
def catch_scores() -> Iterator[list[Tensor]]:
    """Collect the scores of the softmaxes that are called meanwhile. They are not tracked."""
    caught_scores: list[Tensor] = []
    token = _CAUGHT_SCORES.set(caught_scores)
    try:
        yield caught_scores
    finally:
        _CAUGHT_SCORES.reset(token)


def _get_softmax_dim(scores: Any, dim: Any = None, *args: Any, **options: Any) -> int | None:
    """Return the dimension of a softmax that can be tracked, or None."""
    is_plain = isinstance(scores, Tensor) and not scores.is_nested and scores.is_floating_point()
    if not is_plain or type(dim) is not int or not -scores.dim() <= dim < scores.dim():
        return None
    return dim % scores.dim() if scores.dim() > 1 and scores.numel() else None


def _may_come_from_product(frame: ModuleFrame, scores: Tensor, dim: int) -> bool:
    """Return whether a product of two tensors in this module may have given these scores.

    It has as many rows, and as many keys or fewer: some models append keys.
    """
    num_keys = scores.shape[dim]
    num_rows = scores.numel() // num_keys
    for shape, _ in frame.products:
        num_elements = torch.Size(shape).numel()
        if num_elements == scores.numel() and (num_keys in shape or num_keys == 1):
            return True
        if shape and 0 < shape[-1] < num_keys and num_elements // shape[-1] == num_rows:
            return True
    return False


def _to_bhqk(scores: Tensor, num_heads: int | None) -> Tensor | None:
    """Return the scores as ``(B, H, Q, K)``; None if the axes are ambiguous."""
    if scores.dim() == 4:
        return scores if num_heads in (None, scores.shape[1]) else None
    if scores.dim() == 3:
        if num_heads is None:
            return scores[:, None]
        return scores.unflatten(0, (-1, num_heads)) if len(scores) % num_heads == 0 else None
    return None
