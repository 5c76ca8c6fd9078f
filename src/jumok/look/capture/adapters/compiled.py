"""Modules that were compiled by ``torch.compile``, which run without Python.

A compiled module runs twice while it is watched. First its original runs, on copies of the inputs, and its
attention is captured; what this run changes in the model and in the random state is restored. Then the compiled
code runs and returns the output. It finds the functions and hooks of PyTorch as they were when it was compiled:
otherwise it would be compiled again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from jumok.look.capture.call_site import set_variable
from jumok.look.capture.forward_state import copy_inputs, preserve_state
from jumok.look.capture.module_stack import suspend_hooks
from jumok.look.capture.module_wrappers import find_compiled_attribute, get_dynamo, is_forced_eager
from jumok.look.capture.observer import OBSERVERS, Observer
from jumok.look.capture.patching import AttributePatch, Function, suspend_patches
from jumok.look.capture.weight_tracking.weight_tracker import get_tracker


def list_patches(model: nn.Module) -> Iterator[AttributePatch]:
    """List the patches of the compiled code of modules, and of the wrapper that ``torch.compile`` returns."""
    yield AttributePatch(get_dynamo().OptimizedModule, "__call__", _wrap_wrapper_call)
    for module in model.modules():
        attribute = find_compiled_attribute(module)
        if attribute is not None:
            yield AttributePatch(module, attribute, functools.partial(_wrap_compiled_call, module))


def _wrap_wrapper_call(call: Function) -> Function:
    def watched_call(self: Any, *args: Any, **options: Any) -> Any:
        original = self._orig_mod
        return _run_twice(original, lambda: call(self, *args, **options), original, args, options)

    return watched_call


def _wrap_compiled_call(module: nn.Module, compiled: Function) -> Function:
    def watched_call(*args: Any, **options: Any) -> Any:
        # While everything is forced to run eagerly, compiled code is the original function.
        return _run_twice(module, lambda: compiled(*args, **options), compiled, args, options)

    return watched_call


def _run_twice(module: nn.Module, run_compiled: Function, original: Function, args: Any, options: Any) -> Any:
    observers = [observer for observer in OBSERVERS.get() if id(module) in observer.module_stack.names]
    if torch.compiler.is_compiling() or not observers:
        return run_compiled()
    if is_forced_eager():
        return original(*args, **options)
    for observer in observers:
        observer.on_compiled_call(observer.module_stack.names[id(module)])
    args_copy, options_copy = copy_inputs((args, options))
    with preserve_state(module), torch.compiler.set_stance("force_eager"):
        original(*args_copy, **options_copy)
    with suspend_observation(OBSERVERS.get()):
        return run_compiled()


@contextmanager
def suspend_observation(observers: tuple[Observer, ...]) -> Iterator[None]:
    """Run code as if nothing observed it."""
    contexts: list[AbstractContextManager[Any]] = [
        get_tracker().suspend(),
        suspend_hooks([observer.module_stack for observer in observers]),
        suspend_patches(),
        set_variable(OBSERVERS, ()),
    ]
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
