"""How attention is seen: one small adapter for each way of calling it.

No single mode of PyTorch can do it. A function mode switches off the fast path of ``nn.MultiheadAttention``.
A dispatch mode breaks compiled FlexAttention, and does not see a call that PyTorch takes apart into products
and a softmax. So the functions that models call have stand-ins while somebody looks, which run them and tell.
Only between a softmax and the product with the values, a dispatch mode follows the weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from jumok.look.capture.adapters import (
    flash,
    flex,
    generate,
    huggingface,
    jumok_attention,
    matrix_products,
    sdpa,
    softmax,
    torch_nn,
)
from jumok.look.capture.adapters.call_site import OBSERVERS, Observer
from jumok.look.capture.adapters.patching import (
    Function,
    WrapperFactory,
    patch_attribute,
    patch_functions,
    wrap_compile,
)
from jumok.look.capture.adapters.weight_tracker import get_tracker

__all__ = ["Observer", "attach_observer"]


@contextmanager
def attach_observer(observer: Observer) -> Iterator[None]:
    """While it lasts, the listener is told of every attention call of its model. Nothing is left behind."""
    # Dynamo looks functions up by their names when it is imported: now, before some have stand-ins.
    importlib.import_module("torch._dynamo")

    functions: dict[Function, WrapperFactory] = {}
    for adapter in (sdpa, flex, jumok_attention, huggingface, flash, softmax, matrix_products):
        functions |= adapter.stand_ins()
    trail = observer.module_stack

    def is_here() -> bool:
        return observer in OBSERVERS.get()

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(torch, "compile", wrap_compile))
        for other in (torch_nn, softmax, matrix_products, jumok_attention, huggingface):
            stack.enter_context(other.watched())
        stack.enter_context(generate.install_patches(trail.model))
        stack.enter_context(patch_functions(functions, trail.model))
        stack.enter_context(trail.track_calls(is_here, observer.on_module_enter, observer.on_module_exit))
        OBSERVERS.set((*OBSERVERS.get(), observer))
        try:
            yield
        finally:
            OBSERVERS.set(tuple(one for one in OBSERVERS.get() if one is not observer))
            if not OBSERVERS.get():
                get_tracker().stop()
