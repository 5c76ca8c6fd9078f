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

from jumok.look.adapters import flash, flex, generate, huggingface, own, products, sdpa, softmax, torch_nn
from jumok.look.adapters.follow import follower
from jumok.look.adapters.patches import Function, Make, attribute, compile_originals, everywhere
from jumok.look.adapters.site import LISTENERS, Listener

__all__ = ["Listener", "listening"]


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """While it lasts, the listener is told of every attention call of its model. Nothing is left behind."""
    # Dynamo looks functions up by their names when it is imported: now, before some have stand-ins.
    importlib.import_module("torch._dynamo")

    functions: dict[Function, Make] = {}
    for adapter in (sdpa, flex, own, huggingface, flash, softmax, products):
        functions |= adapter.stand_ins()
    trail = listener.trail

    def is_here() -> bool:
        return listener in LISTENERS.get()

    with ExitStack() as stack:
        stack.enter_context(attribute(torch, "compile", compile_originals))
        for other in (torch_nn, softmax, products, own, huggingface):
            stack.enter_context(other.watched())
        stack.enter_context(generate.watched(trail.model))
        stack.enter_context(everywhere(functions, trail.model))
        stack.enter_context(trail.followed(is_here, listener.enter, listener.leave))
        LISTENERS.set((*LISTENERS.get(), listener))
        try:
            yield
        finally:
            LISTENERS.set(tuple(one for one in LISTENERS.get() if one is not listener))
            if not LISTENERS.get():
                follower().give_up()
