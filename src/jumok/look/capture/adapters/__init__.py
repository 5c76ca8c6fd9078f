"""Capture of attention: one adapter for each way in which models compute it.

No single mode of PyTorch suffices. A function mode disables the fast path of ``nn.MultiheadAttention``. A
dispatch mode breaks compiled FlexAttention and misses calls that PyTorch decomposes into products and a
softmax. While an observer is attached, the functions that models call are therefore replaced by wrappers.

1. An adapter lists the functions to replace (:mod:`..patching`).
2. When the model calls one, its wrapper asks for the call site (:mod:`..call_site`): the module that is
   running (:mod:`..module_stack`) and its observers. Without a site it only runs the function.
3. Otherwise it runs the function, reads the arguments as an ``ObservedCall``, and reports it. If the arguments
   have a form that it does not know for certain, it reports the reason, and the layer is listed as missed.
4. The observers (:mod:`..observer`) store the call (``watch``) or modify the output (``knock_out``).

To add an adapter for a kernel, write one file with the kernel's signature, and add it to ``ADAPTERS``::

    def list_patches(model: nn.Module) -> Iterator[FunctionPatch]:
        package = sys.modules.get("fast_kernels")  # never import it
        if package is not None:
            yield FunctionPatch(package.attend, lambda kernel: wrap_kernel(kernel, _read_call))

    def _read_call(result: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sinks: Any = None):
        if sinks is not None:
            raise UnsupportedCallError("fast_kernels.attend with sinks; give None")
        diagonal = k.shape[2] - q.shape[2] if causal else None  # (B, H, length, width), aligned at the end
        return ObservedCall(CapturedAttention(q, k, scale=q.shape[-1] ** -0.5, diagonal=diagonal), value=v)

Test that the output is equal to the bit with and without ``watch``, and that the weights are those of a plain
softmax, for every argument. An adapter that does more than wrap one kernel uses the parts of ``wrap_kernel``.
``kernel_arguments`` reads kernels whose signatures differ from version to version; :mod:`..packing` turns
sequences of different lengths into a batch.

``handwritten`` is different: attention written by hand has no arguments to read. A dispatch mode
(:mod:`..weight_tracking`) tracks the weights from the softmax to the product with the values. Weights that are
never laid out as queries × keys, in chunks or samples, are measured: see ``value_probing``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from jumok.look.capture.adapters import (
    compiled,
    exported,
    flash,
    flex,
    generate,
    handwritten,
    huggingface,
    jumok_attention,
    paged_attention,
    sage,
    sdpa,
    torch_nn,
    value_probing,
    xformers,
)
from jumok.look.capture.observer import OBSERVERS, Observer
from jumok.look.capture.patching import AttributePatch, FunctionPatch, apply_patches, wrap_compile
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker


class Adapter(Protocol):
    """A module of this package."""

    def list_patches(self, model: nn.Module, /) -> Iterable[FunctionPatch | AttributePatch]:
        """List the functions to replace by wrappers while ``model`` is observed."""


ADAPTERS: tuple[Adapter, ...] = (
    sdpa,
    flex,
    flash,
    xformers,
    sage,
    torch_nn,
    huggingface,
    paged_attention,
    jumok_attention,
    handwritten,
    value_probing,
    generate,
    exported,
    compiled,
)


@contextmanager
def attach_observer(observer: Observer) -> Iterator[None]:
    """Report every attention call of the observer's model to it. Everything is restored at exit."""
    # Dynamo looks functions up by name when it is imported: import it before they are wrapped.
    importlib.import_module("torch._dynamo")
    module_stack = observer.module_stack
    patches: list[FunctionPatch | AttributePatch] = [AttributePatch(torch, "compile", wrap_compile)]
    patches += (patch for adapter in ADAPTERS for patch in adapter.list_patches(module_stack.model))

    def is_attached() -> bool:
        return observer in OBSERVERS.get()

    with (
        apply_patches(patches, module_stack.model),
        module_stack.track_calls(is_attached, observer.on_module_enter, observer.on_module_exit),
    ):
        OBSERVERS.set((*OBSERVERS.get(), observer))
        try:
            yield
        finally:
            OBSERVERS.set(tuple(attached for attached in OBSERVERS.get() if attached is not observer))
            if not OBSERVERS.get():
                get_tracker().stop()
