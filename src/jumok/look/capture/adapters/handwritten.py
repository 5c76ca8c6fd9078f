"""Attention written by hand: a softmax whose output multiplies values.

Every softmax is tracked to its use, and captured if that is an attention: see :mod:`..weight_tracking`. Products
of two tensors that a model computes are recorded too: attention scores come from them. A softmax of anything
else may belong to a classifier or a router, or be over features.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from jumok.look.capture.call_site import CallSite, are_reports_suppressed, get_call_site, is_observing, set_variable
from jumok.look.capture.module_stack import ModuleFrame, get_num_heads, looks_like_attention
from jumok.look.capture.observer import OBSERVERS
from jumok.look.capture.patching import AttributePatch, Function, FunctionPatch
from jumok.look.capture.weight_tracking.softmax_candidates import SoftmaxCandidate
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker

SOFTMAX_FUNCTIONS = (torch.softmax, torch.special.softmax, torch.log_softmax, torch.special.log_softmax)
SOFTMAX_METHODS = ("softmax", "log_softmax")  # F.softmax and nn.Softmax call the tensor's method
LOG_SOFTMAX_NAMES = {"log_softmax", "special_log_softmax"}
# torch.bmm and torch.baddbmm are patched in torch_nn.
PRODUCT_FUNCTIONS = (torch.matmul, torch.mm, torch.mv, torch.einsum, torch.tensordot, torch.inner)
PRODUCT_METHODS = ("__matmul__", "matmul", "mm", "bmm", "baddbmm", "mv", "inner")
DISPATCH_MODE_REASON = "its softmax ran inside a dispatch mode of the model, such as that of a selective checkpoint"

_CAUGHT_SCORES: ContextVar[list[Tensor] | None] = ContextVar("jumok.look.caught_scores", default=None)


def list_patches(model: nn.Module) -> Iterator[FunctionPatch | AttributePatch]:
    """List the patches of softmaxes and products."""
    for functions, methods, wrap in (
        (SOFTMAX_FUNCTIONS, SOFTMAX_METHODS, _wrap_softmax),
        (PRODUCT_FUNCTIONS, PRODUCT_METHODS, _wrap_product),
    ):
        yield from (FunctionPatch(function, wrap) for function in functions)
        yield from (AttributePatch(Tensor, name, wrap) for name in methods)


# ------------------------------------------------------------------------------------- products


def _wrap_product(multiply: Function) -> Function:
    def watched_product(*args: Any, **options: Any) -> Any:
        if not is_observing():
            return multiply(*args, **options)
        factors = _find_factors(args, options)
        if get_tracker().is_active and factors:
            get_tracker().record_autocast(factors[0].device.type)
        out = multiply(*args, **options)
        record_product(out, *factors)
        return out

    return watched_product


def record_product(out: Any, *factors: Tensor) -> None:
    """Record a product: it may have used weights, and it may be the scores of a later softmax."""
    if not is_observing() or not isinstance(out, Tensor):
        return
    if get_tracker().is_active:
        get_tracker().record_factors(out, *factors)
        get_tracker().exit_if_idle()
    if out.is_nested or any(map(_is_parameter, factors)) or len(factors) < 2:
        return
    for observer in OBSERVERS.get():
        if (frame := observer.module_stack.current_frame) is not None:
            frame.products.append((tuple(out.shape), weakref.ref(out)))
            for softmax in frame.softmaxes:
                softmax.record_factors(factors)


def _find_factors(args: Any, options: dict[str, Any]) -> list[Tensor]:
    """Return the two factors among the arguments: the last two tensors. A tensor before them is an addend."""
    arguments = [*args, *(x for name, x in options.items() if name != "out")]
    values = [x for argument in arguments for x in (argument if isinstance(argument, list | tuple) else (argument,))]
    return [x for x in values if isinstance(x, Tensor)][-2:]


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


# ------------------------------------------------------------------------------------ softmaxes


def _wrap_softmax(softmax: Function) -> Function:
    is_logarithmic = softmax.__name__ in LOG_SOFTMAX_NAMES

    def watched_softmax(scores: Any, *args: Any, **options: Any) -> Any:
        site = get_call_site()
        dim = None if site is None else _get_softmax_dim(scores, *args, **options)
        if site is None or dim is None:
            return softmax(scores, *args, **options)
        if (caught_scores := _CAUGHT_SCORES.get()) is not None:
            return _run_inner_softmax(site, caught_scores, softmax, scores, args, options)
        candidate, weights = SoftmaxCandidate(scores), None
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

    def run(x: Tensor) -> Tensor:
        weights: Tensor = softmax(x.reshape(scores.shape), *args, **options)
        return weights.reshape(x.shape)

    return site.run_softmax(run, scores_4d).reshape(scores.shape)


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
    with set_variable(_CAUGHT_SCORES, caught_scores):
        yield caught_scores


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
