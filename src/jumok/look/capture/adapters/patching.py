"""Functions that stand in for others while somebody looks, in every place that holds the others.

Models call attention by many roads: ``F.scaled_dot_product_attention``, a name imported into a file, an
attribute of a module, a variable of an enclosing function, a compiled copy. So every place within reach that
holds a function is found, and gets the stand-in. Places are counted: two who look at the same time share the
stand-ins, and when the last one leaves, in whatever order, each place holds again what it held.
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
WrapperFactory = Callable[[Function], Function]  # from a function to what stands in for it
SlotKey = tuple[int, str]

ABSENT = object()
UNPATCHED_MODULES = ("torch._", "jumok.look.capture.adapters")  # where the functions themselves are needed


@dataclass
class _PatchedSlot:
    """Where a function is held: a name in a namespace, in a class, or in an enclosing function."""

    owner: Any  # kept alive, so that its id stays its own
    original: Any  # what was there before; ABSENT: nothing of its own
    assign: Callable[[Any], None]
    num_users: int = 1


_PATCHED_SLOTS: dict[SlotKey, _PatchedSlot] = {}  # those that hold a stand-in now
_LOCK = threading.RLock()


@contextmanager
def patch_functions(wrappers: dict[Function, WrapperFactory], model: nn.Module) -> Iterator[None]:
    """While it lasts, each function has its stand-in, in all loaded modules and in what ``model`` holds."""
    makes = {id(function): make for function, make in wrappers.items()}

    def make_for(value: Any) -> WrapperFactory | None:
        """What makes the stand-in of this value, if it is one of the functions or was compiled from one."""
        if (make := makes.get(id(value))) is not None or type(value) is not types.FunctionType:
            return make
        source = getattr(value, "_torchdynamo_orig_callable", None)
        return makes.get(id(source)) or makes.get(id(getattr(source, "__wrapped__", None)))

    mine: list[SlotKey] = []
    try:
        with _LOCK:
            for place in _PATCHED_SLOTS.values():  # taken by others who look: from now on held for both
                place.num_users += 1
            mine += _PATCHED_SLOTS
            for owner, name, value, put in _find_slots(model, make_for):
                key = (id(owner), name)
                if key in _PATCHED_SLOTS:
                    continue
                is_static = type(value) is staticmethod
                held = value.__func__ if is_static else value
                make = make_for(held)
                assert make is not None
                made = attach_original(held, make(held))
                put(staticmethod(made) if is_static else made)
                _PATCHED_SLOTS[key] = _PatchedSlot(owner, value, put)
                mine.append(key)
        yield
    finally:
        _release_slots(mine)


@contextmanager
def patch_attribute(owner: Any, name: str, wrap: WrapperFactory) -> Iterator[None]:
    """While it lasts, the attribute is what ``wrap`` makes of it. It may be one that ``owner`` inherits."""

    def put(value: Any) -> None:
        if value is ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)

    key = (id(owner), name)
    with _LOCK:
        if key in _PATCHED_SLOTS:
            _PATCHED_SLOTS[key].num_users += 1
        else:
            held = getattr(owner, name)
            _PATCHED_SLOTS[key] = _PatchedSlot(owner, vars(owner).get(name, ABSENT), put)
            put(attach_original(held, wrap(held)))
    try:
        yield
    finally:
        _release_slots([key])


def attach_original(function: Function, wrapper: Function) -> Function:
    """``wrapper``, with the name and the documentation of ``function``, which it remembers."""
    functools.update_wrapper(wrapper, function, updated=())
    wrapper.__jumok_original__ = function  # type: ignore[attr-defined]
    return wrapper


def wrap_compile(compile_: Function) -> Function:
    """``torch.compile`` that never compiles a stand-in: the result would outlive the looking."""

    def compile(model: Any = None, *args: Any, **options: Any) -> Any:
        return compile_(getattr(model, "__jumok_original__", model), *args, **options)

    return compile


def _release_slots(keys: Iterable[SlotKey]) -> None:
    with _LOCK:
        for key in keys:
            place = _PATCHED_SLOTS[key]
            place.num_users -= 1
            if place.num_users == 0:
                place.assign(_PATCHED_SLOTS.pop(key).original)


def _find_slots(
    model: nn.Module, is_target: Callable[[Any], object]
) -> Iterator[tuple[Any, str, Any, Callable[[Any], None]]]:
    """The places within reach that hold what is ``is_target``: owner, name, value, and how to put another."""
    namespaces: dict[int, dict[str, Any]] = {}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict and not str(names.get("__name__")).startswith(UNPATCHED_MODULES):
            namespaces[id(names)] = names
    classes: set[type] = set()
    for part in model.modules():
        namespaces[id(vars(part))] = vars(part)
        classes.update(type(part).__mro__)
    cells: dict[int, Any] = {}
    for kind in classes - {nn.Module, object}:
        for name, value in list(vars(kind).items()):
            if is_target(value.__func__ if type(value) is staticmethod else value):
                yield kind, name, value, functools.partial(setattr, kind, name)
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
