"""Attention written out by hand: ``softmax(scores)`` in a module whose name says that it attends.

The scores are there as a tensor ``(B, H, Q, K)``, and are kept. A module that has several softmaxes, or one
of another form, is not guessed at.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from jumok.look.adapters.patches import Function, attribute
from jumok.look.adapters.site import LISTENERS, here
from jumok.look.adapters.trail import heads_of, looks_like_attention
from jumok.look.kept import Kept

_CAUGHT: ContextVar[list[Tensor] | None] = ContextVar("jumok.look.caught", default=None)


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, softmaxes are looked at."""
    # F.softmax and nn.Softmax call the tensor's own.
    with attribute(torch.Tensor, "softmax", _softmax), attribute(torch, "softmax", _softmax):
        yield


def _softmax(softmax: Function) -> Function:
    def watched_softmax(scores: Any, *args: Any, **options: Any) -> Any:
        site = None if torch.compiler.is_compiling() or not LISTENERS.get() else here()
        if site is None or not _attends(site.module, scores, *args, **options):
            return softmax(scores, *args, **options)
        four = _four(scores, heads_of(site.module))
        site.saw_part(None if four is None else functools.partial(kept_scores, four))
        if (catch := _CAUGHT.get()) is not None:
            catch.append(scores if four is None else four)
        if four is None:
            return softmax(scores, *args, **options)
        changed = site.scores(four)
        weights = softmax(scores if changed is four else changed.reshape(scores.shape), *args, **options)
        four = weights.reshape(four.shape)
        changed = site.weights(four)
        return weights if changed is four else changed.reshape(scores.shape)

    return watched_softmax


@contextmanager
def caught() -> Iterator[list[Tensor]]:
    """The scores of the softmaxes that are called meanwhile."""
    catch: list[Tensor] = []
    token = _CAUGHT.set(catch)
    try:
        yield catch
    finally:
        _CAUGHT.reset(token)


def kept_scores(scores: Tensor, lse: Tensor | None = None) -> Kept:
    """What is kept where scores ``(B, H, Q, K)`` are there as a whole: they, in the place of the queries."""
    nothing = scores.new_zeros(()).expand(scores.shape[0], 1, scores.shape[3], 1)
    return Kept(scores, nothing, score=as_given, lse=lse)


def as_given(rows: Tensor, keys: Tensor) -> Tensor:
    """The score where scores stand in the place of queries."""
    return rows


def _attends(module: nn.Module, scores: Any, dim: Any = None, *args: Any, **options: Any) -> bool:
    is_last = isinstance(scores, Tensor) and scores.dim() >= 3 and dim in (-1, scores.dim() - 1)
    return is_last and not scores.is_nested and scores.is_floating_point() and looks_like_attention(module)


def _four(scores: Tensor, heads: int | None) -> Tensor | None:
    """The scores as ``(B, H, Q, K)``; None if it cannot be told what is what."""
    if scores.dim() == 4:
        return scores if heads in (None, scores.shape[1]) else None
    if scores.dim() == 3:
        if heads is None:
            return scores[:, None]
        return scores.unflatten(0, (-1, heads)) if len(scores) % heads == 0 else None
    return None
