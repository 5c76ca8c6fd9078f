"""Products of two tensors that a model computes, which attention scores come from.

A softmax of such a product weights one set of positions for each element of another. A softmax of anything
else may belong to a classifier or a router, or be over features.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from jumok.look.capture.adapters.call_site import OBSERVERS
from jumok.look.capture.adapters.patching import Function, WrapperFactory, patch_attribute
from jumok.look.capture.adapters.weight_tracker import get_tracker

PRODUCT_METHODS = ("__matmul__", "matmul", "mm", "bmm", "baddbmm", "mv", "inner")  # of tensors
PRODUCT_FUNCTIONS = (torch.matmul, torch.mm, torch.mv, torch.einsum, torch.tensordot, torch.inner)


def get_wrappers() -> dict[Function, WrapperFactory]:
    """Return wrappers of the functions. That of ``torch.bmm`` is in :mod:`torch_nn`."""
    return dict.fromkeys(PRODUCT_FUNCTIONS, _wrap_product)


@contextmanager
def install_patches() -> Iterator[None]:
    """Record products of tensors."""
    with ExitStack() as stack:
        for name in PRODUCT_METHODS:
            stack.enter_context(patch_attribute(torch.Tensor, name, _wrap_product))
        yield


def _wrap_product(multiply: Function) -> Function:
    def watched_product(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or not OBSERVERS.get():
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
    if torch.compiler.is_compiling() or not OBSERVERS.get() or not isinstance(out, Tensor):
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
