"""Products of two tensors that a model computes: where scores come from.

A softmax of such a product weighs one set of positions for each of another. A softmax of anything else may be
a classifier's, a router's, or one over features.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jumok.look.adapters.follow import follower
from jumok.look.adapters.patches import Function, Make, attribute
from jumok.look.adapters.site import LISTENERS

METHODS = ("__matmul__", "matmul", "mm", "bmm", "baddbmm", "mv", "inner")  # of tensors
FUNCTIONS = (torch.matmul, torch.mm, torch.mv, torch.einsum, torch.tensordot, torch.inner)


def stand_ins() -> dict[Function, Make]:
    """For the functions, wherever they are held. That of ``torch.bmm`` is in :mod:`torch_nn`."""
    return dict.fromkeys(FUNCTIONS, _product)


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts, products of tensors are recorded."""
    with ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(attribute(torch.Tensor, name, _product))
        yield


def _product(multiply: Function) -> Function:
    def watched_product(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not LISTENERS.get():
            return multiply(*args, **options)
        factors = _factors(args, options)
        if follower().pushed and factors:
            follower().note_autocast(factors[0].device.type)
        out = multiply(*args, **options)
        note(out, *factors)
        return out

    return watched_product


def note(out: Any, *factors: Tensor) -> None:
    """Record a product: it may have used weights, and it may be the scores of a later softmax."""
    if torch.compiler.is_compiling() or not LISTENERS.get() or not isinstance(out, Tensor):
        return
    if follower().pushed:
        follower().explain(out, *factors)
        follower().rest()
    if out.is_nested or any(map(_is_parameter, factors)) or len(factors) < 2:
        return
    for listener in LISTENERS.get():
        if (frame := listener.trail.frame) is not None:
            frame.products.append((tuple(out.shape), weakref.ref(out)))
            for part in frame.parts:
                part.note_factors(factors)


def _factors(args: Any, options: dict[str, Any]) -> list[Tensor]:
    """The two factors among the arguments: the last two tensors. A third one, before them, is the addend."""
    given = [*args, *(x for name, x in options.items() if name != "out")]
    some = [x for one in given for x in (one if isinstance(one, list | tuple) else (one,))]
    return [x for x in some if isinstance(x, Tensor)][-2:]


def _is_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
