"""Attention written out by hand: a softmax whose output multiplies values.

Every softmax is followed to its use, and shown if that is an attention: see :mod:`follow` and :mod:`maps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from jumok.look.adapters.candidates import Candidate
from jumok.look.adapters.follow import follower
from jumok.look.adapters.maps import as_given, kept_scores
from jumok.look.adapters.patches import Function, Make, attribute
from jumok.look.adapters.site import LISTENERS, Site, here, is_told
from jumok.look.adapters.trail import Frame, heads_of, looks_like_attention

__all__ = ["as_given", "caught", "kept_scores", "stand_ins", "watched"]

_CAUGHT: ContextVar[list[Tensor] | None] = ContextVar("jumok.look.caught", default=None)
FUNCTIONS = (torch.softmax, torch.special.softmax, torch.log_softmax, torch.special.log_softmax)
LOGARITHMIC = {"log_softmax", "special_log_softmax"}
IN_MODE = "its softmax ran inside a dispatch mode of the model, such as that of a selective checkpoint"


def stand_ins() -> dict[Function, Make]:
    """For the functions, wherever they are held."""
    return dict.fromkeys(FUNCTIONS, _softmax)


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, softmaxes are looked at."""
    with ExitStack() as stack:
        for name in ("softmax", "log_softmax"):  # F.softmax and nn.Softmax call the tensor's own
            stack.enter_context(attribute(torch.Tensor, name, _softmax))
        yield


def _softmax(softmax: Function) -> Function:
    logarithmic = softmax.__name__ in LOGARITHMIC

    def watched_softmax(scores: Any, *args: Any, **options: Any) -> Any:
        site = None if torch.compiler.is_compiling() or not LISTENERS.get() else here()
        dim = None if site is None else _dim(scores, *args, **options)
        if site is None or dim is None:
            return softmax(scores, *args, **options)
        if (catch := _CAUGHT.get()) is not None:
            return _caught(site, catch, softmax, scores, args, options)
        candidate = Candidate(scores)
        weights = None
        if site.changes:
            weights = _changed(site, softmax, scores, args, options)
            four = _four(scores, heads_of(site.module))
            candidate.changed_as = None if four is None else tuple(four.shape)
        if weights is None:
            weights = softmax(scores, *args, **options)
        if isinstance(weights, Tensor) and not is_told():
            if site.is_in_mode:  # it may end before ours, and modes can only end in order
                candidate.stop(IN_MODE)
            else:
                follower().follow(candidate, weights, dim, unchanged=not logarithmic)
            site.may_attend(candidate, _is_of_product(site.frames[0], scores, dim))
        return weights

    return watched_softmax


def _changed(site: Site, softmax: Function, scores: Tensor, args: Any, options: Any) -> Tensor | None:
    """The weights after changes to scores ``(B, H, Q, K)``; None if these cannot be told to be that."""
    four = _four(scores, heads_of(site.module))
    if four is None:
        return None
    changed = site.scores(four)
    weights: Tensor = softmax(scores if changed is four else changed.reshape(scores.shape), *args, **options)
    four = weights.reshape(four.shape)
    changed = site.weights(four)
    return weights if changed is four else changed.reshape(scores.shape)


def _caught(
    site: Site, catch: list[Tensor], softmax: Function, scores: Tensor, args: Any, options: Any
) -> Any:
    """A softmax inside of an attention that somebody further out tells of."""
    dim = args[0] if args else options.get("dim")
    if not looks_like_attention(site.module) or scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
        return softmax(scores, *args, **options)
    four = _four(scores, heads_of(site.module))
    catch.append(scores if four is None else four)
    weights = _changed(site, softmax, scores, args, options)
    return softmax(scores, *args, **options) if weights is None else weights


@contextmanager
def caught() -> Iterator[list[Tensor]]:
    """The scores of the softmaxes that are called meanwhile. They are not followed: they are told of."""
    catch: list[Tensor] = []
    token = _CAUGHT.set(catch)
    try:
        yield catch
    finally:
        _CAUGHT.reset(token)


def _dim(scores: Any, dim: Any = None, *args: Any, **options: Any) -> int | None:
    """The axis of a softmax that can be followed."""
    is_plain = isinstance(scores, Tensor) and not scores.is_nested and scores.is_floating_point()
    if not is_plain or type(dim) is not int or not -scores.dim() <= dim < scores.dim():
        return None
    return dim % scores.dim() if scores.dim() > 1 and scores.numel() else None


def _is_of_product(frame: Frame, scores: Tensor, dim: int) -> bool:
    """Whether a product of two tensors in this module may have given these scores.

    It has as many rows, and as many keys, or fewer: some models put more behind them.
    """
    keys = scores.shape[dim]
    rows = scores.numel() // keys
    for shape, _ in frame.products:
        count = torch.Size(shape).numel()
        if count == scores.numel() and (keys in shape or keys == 1):
            return True
        if shape and 0 < shape[-1] < keys and count // shape[-1] == rows:
            return True
    return False


def _four(scores: Tensor, heads: int | None) -> Tensor | None:
    """The scores as ``(B, H, Q, K)``; None if it cannot be told what is what."""
    if scores.dim() == 4:
        return scores if heads in (None, scores.shape[1]) else None
    if scores.dim() == 3:
        if heads is None:
            return scores[:, None]
        return scores.unflatten(0, (-1, heads)) if len(scores) % heads == 0 else None
    return None
