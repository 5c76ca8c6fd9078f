"""Replacement of functions by wrappers, in every slot that holds them.

Models reach attention in many ways: ``F.scaled_dot_product_attention``, a name imported into a file, an
attribute of a module, a variable of an enclosing function, a compiled copy. Every reachable slot that holds a
function is therefore found and gets the wrapper. Slots count their users: simultaneous observers share the
wrappers, and when the last one detaches, in whatever order, each slot gets its original value back.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

Function = Callable[..., Any]
WrapperFactory = Callable[[Function], Function]  # from a function to its wrapper
SlotKey = tuple[int, str]

ABSENT = object()
UNPATCHED_MODULES = ("torch._", "jumok.look.capture.adapters")  # these need the original functions


@dataclass
class _PatchedSlot:
    """A slot that holds a function: a name in a namespace, in a class, or in an enclosing function."""

    owner: Any  # a reference, so that its id stays unique
    original: Any  # the value before; ABSENT: none of its own
    assign: Callable[[Any], None]
    num_users: int = 1


_PATCHED_SLOTS: dict[SlotKey, _PatchedSlot] = {}  # slots that hold a wrapper now
_LOCK = threading.RLock()


@contextmanager
def patch_functions(wrappers: dict[Function, WrapperFactory], model: nn.Module) -> Iterator[None]:
    """Replace functions by their wrappers, in all loaded modules and in what ``model`` refers to."""
    factories = {id(function): factory for function, factory in wrappers.items()}

    def find_factory(value: Any) -> WrapperFactory | None:
        """Return the factory for a value that is one of the functions or was compiled from one."""
        if (factory := factories.get(id(value))) is not None or type(value) is not types.FunctionType:
            return factory
        source = getattr(value, "_torchdynamo_orig_callable", None)
        return factories.get(id(source)) or factories.get(id(getattr(source, "__wrapped__", None)))

    patched: list[SlotKey] = []
    try:
        with _LOCK:
            for slot in _PATCHED_SLOTS.values():  # patched for other observers: share them
                slot.num_users += 1
            patched += _PATCHED_SLOTS
            for owner, name, value, assign in _find_slots(model, find_factory):
                key = (id(owner), name)
                if key in _PATCHED_SLOTS:
                    continue
                is_static = type(value) is staticmethod
                original = value.__func__ if is_static else value
                factory = find_factory(original)
                assert factory is not None
                wrapper = attach_original(original, factory(original))
                assign(staticmethod(wrapper) if is_static else wrapper)
                _PATCHED_SLOTS[key] = _PatchedSlot(owner, value, assign)
                patched.append(key)
        yield
    finally:
        _release_slots(patched)


@contextmanager
def patch_attribute(owner: Any, name: str, wrap: WrapperFactory) -> Iterator[None]:
    """Replace an attribute by ``wrap`` of it. ``owner`` may inherit the attribute."""

    def assign(value: Any) -> None:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    key = (id(owner), name)
    with _LOCK:
        if key in _PATCHED_SLOTS:
            _PATCHED_SLOTS[key].num_users += 1
        else:
            original = getattr(owner, name)
            _PATCHED_SLOTS[key] = _PatchedSlot(owner, vars(owner).get(name, ABSENT), assign)
            assign(attach_original(original, wrap(original)))
    try:
        yield
    finally:
        _release_slots([key])


def attach_original(function: Function, wrapper: Function) -> Function:
    """Return ``wrapper`` with the name and documentation of ``function`` and a reference to it."""
    functools.update_wrapper(wrapper, function, updated=())
    wrapper.__jumok_original__ = function  # type: ignore[attr-defined]
    return wrapper


def wrap_compile(compile_: Function) -> Function:
    """Wrap ``torch.compile`` so that it compiles the original function: the result outlives the wrapper."""

    def compile(model: Any = None, *args: Any, **options: Any) -> Any:
        return compile_(getattr(model, "__jumok_original__", model), *args, **options)

    return compile


def _release_slots(keys: Iterable[SlotKey]) -> None:
    with _LOCK:
        for key in keys:
            slot = _PATCHED_SLOTS[key]
            slot.num_users -= 1
            if slot.num_users == 0:
                slot.assign(_PATCHED_SLOTS.pop(key).original)


def _find_slots(
    model: nn.Module, is_target: Callable[[Any], object]
) -> Iterator[tuple[Any, str, Any, Callable[[Any], None]]]:
    """Iterate over reachable slots with a target: owner, name, value, and a function that assigns another."""
    namespaces: dict[int, dict[str, Any]] = {}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and not str(names.get("__name__")).startswith(UNPATCHED_MODULES):
            namespaces[id(names)] = names
    classes: set[type] = set()
    for submodule in model.modules():
        namespaces[id(vars(submodule))] = vars(submodule)
        classes.update(type(submodule).__mro__)
    cells: dict[int, Any] = {}
    for cls in classes - {nn.Module, object}:
        for name, value in list(vars(cls).items()):
            if is_target(value.__func__ if type(value) is staticmethod else value):
                yield cls, name, value, functools.partial(setattr, cls, name)
            elif isinstance(value, types.FunctionType):
                namespaces[id(value.__globals__)] = value.__globals__
                cells.update((id(cell), cell) for cell in value.__closure__ or ())
    for names in namespaces.values():
        for name, value in list(names.items()):
            if is_target(value):
                yield names, name, value, functools.partial(names.__setitem__, name)
    for cell in cells.values():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if is_target(value):
            yield cell, "", value, functools.partial(setattr, cell, "cell_contents")
