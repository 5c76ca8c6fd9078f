"""Capture of attention: one small adapter for each way in which models call it.

No single mode of PyTorch is sufficient. A function mode disables the fast path of ``nn.MultiheadAttention``.
A dispatch mode breaks compiled FlexAttention and misses calls that PyTorch decomposes into products and a
softmax. While an observer is attached, the functions that models call are therefore replaced by wrappers
that run them and report the call. A dispatch mode tracks the weights only between a softmax and the product
with the values.
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
    """Report every attention call of the observer's model to it. Everything is restored at exit."""
    # Dynamo looks functions up by name when it is imported: import it before they are wrapped.
    importlib.import_module("torch._dynamo")

    functions: dict[Function, WrapperFactory] = {}
    for adapter in (sdpa, flex, jumok_attention, huggingface, flash, softmax, matrix_products):
        functions |= adapter.get_wrappers()
    module_stack = observer.module_stack

    def is_attached() -> bool:
        return observer in OBSERVERS.get()

    with ExitStack() as stack:
        stack.enter_context(patch_attribute(torch, "compile", wrap_compile))
        for other in (torch_nn, softmax, matrix_products, jumok_attention, huggingface):
            stack.enter_context(other.install_patches())
        stack.enter_context(generate.install_patches(module_stack.model))
        stack.enter_context(patch_functions(functions, module_stack.model))
        stack.enter_context(module_stack.track_calls(is_attached, observer.on_module_enter, observer.on_module_exit))
        OBSERVERS.set((*OBSERVERS.get(), observer))
        try:
            yield
        finally:
            OBSERVERS.set(tuple(attached for attached in OBSERVERS.get() if attached is not observer))
            if not OBSERVERS.get():
                get_tracker().stop()
