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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

Function = Callable[..., Any]
WrapperFactory = Callable[[Function], Function]  # from a function to its wrapper
Namespace = dict[str, Any]

ABSENT = object()
UNPATCHED_MODULES = ("torch._", "jumok.look.capture")  # these need the original functions


class FunctionPatch(NamedTuple):
    """Replaces a function wherever it is held, and functions that were compiled from it."""

    function: Function
    wrap: WrapperFactory


class AttributePatch(NamedTuple):
    """Replaces an attribute of an object or a class, which may inherit it."""

    owner: Any
    name: str
    wrap: WrapperFactory


class _Targets:
    """The functions to replace, and functions that were compiled from them."""

    def __init__(self, patches: list[FunctionPatch]) -> None:
        self.patches = {id(patch.function): patch for patch in patches}
        self.types = {types.FunctionType, *(type(patch.function) for patch in patches)}

    def find(self, value: Any) -> FunctionPatch | None:
        """Return the patch for a value, or None."""
        if type(value) not in self.types:
            return None
        patch = self.patches.get(id(value))
        if patch is None and type(value) is types.FunctionType:
            source = getattr(value, "_torchdynamo_orig_callable", None)
            patch = self.patches.get(id(source)) or self.patches.get(id(getattr(source, "__wrapped__", None)))
        return patch

    def list_items(self, names: Namespace) -> list[tuple[str, Any]]:
        """Return the names and values of a namespace that hold one of the functions."""
        candidates = [item for item in list(names.items()) if type(item[1]) in self.types]
        return [item for item in candidates if self.find(item[1]) is not None]


@dataclass
class _Slot:
    """A place that holds a function: a name in a namespace, in a class, or in an enclosing function."""

    owner: Any  # a reference, so that its id stays unique while the slot is patched
    name: str
    original: Any  # the value before; ABSENT: none of its own
    assign: Callable[[Any], None]
    num_users: int = 1
    wrapper: Any = None

    def patch(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.assign(wrapper)

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name


@dataclass
class _ModuleScan:
    """Which namespaces of modules hold one of the functions, found while these were their reference counts."""

    reference_counts: dict[int, int]
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by module: id and size of its namespace
    namespaces: dict[int, Namespace] = field(default_factory=dict)


_PATCHED_SLOTS: dict[tuple[int, str], _Slot] = {}  # slots that hold a wrapper now
_LOCK = threading.RLock()
_last_scan = _ModuleScan({})


@contextmanager
def apply_patches(patches: Iterable[FunctionPatch | AttributePatch], model: nn.Module) -> Iterator[None]:
    """Apply patches; those of functions in all loaded modules and in what ``model`` refers to."""
    patches = list(patches)
    attributes = [patch for patch in patches if isinstance(patch, AttributePatch)]
    functions = [patch for patch in patches if isinstance(patch, FunctionPatch)]

    keys: list[tuple[int, str]] = []
    try:
        with _LOCK:
            targets = _Targets(functions)
            namespaces = _find_namespaces(targets)
            for slot in _PATCHED_SLOTS.values():  # patched for other observers: share them
                slot.num_users += 1
            keys += _PATCHED_SLOTS
            for slot in _find_slots(model, namespaces, targets):
                is_static = type(slot.original) is staticmethod
                function = slot.original.__func__ if is_static else slot.original
                patch = targets.find(function)
                if slot.key not in _PATCHED_SLOTS and patch is not None:
                    wrapper = _wrap(function, patch.wrap)
                    slot.patch(staticmethod(wrapper) if is_static else wrapper)
                    _PATCHED_SLOTS[slot.key] = slot
                    keys.append(slot.key)
            for owner, name, wrap in attributes:
                slot = _Slot(owner, name, vars(owner).get(name, ABSENT), functools.partial(_set_attribute, owner, name))
                if slot.key not in _PATCHED_SLOTS:
                    slot.patch(_wrap(getattr(owner, name), wrap))
                    _PATCHED_SLOTS[slot.key] = slot
                    keys.append(slot.key)
        yield
    finally:
        with _LOCK:
            for key in keys:
                slot = _PATCHED_SLOTS[key]
                slot.num_users -= 1
                if slot.num_users == 0:
                    slot.assign(_PATCHED_SLOTS.pop(key).original)


@contextmanager
def suspend_patches() -> Iterator[None]:
    """Run code with the original functions in all slots."""
    with _LOCK:
        slots = list(_PATCHED_SLOTS.values())
        for slot in reversed(slots):
            slot.assign(slot.original)
    try:
        yield
    finally:
        with _LOCK:
            for slot in slots:
                if _PATCHED_SLOTS.get(slot.key) is slot:  # it may have been restored meanwhile
                    slot.assign(slot.wrapper)


def wrap_compile(compile_: Function) -> Function:
    """Wrap ``torch.compile`` so that it compiles the original function: the result outlives the wrapper."""

    def compile(model: Any = None, *args: Any, **options: Any) -> Any:
        return compile_(getattr(model, "__jumok_original__", model), *args, **options)

    return compile


def _wrap(function: Function, wrap: WrapperFactory) -> Function:
    """Return the wrapper, with the name and documentation of ``function`` and a reference to it."""
    wrapper = functools.update_wrapper(wrap(function), function, updated=())
    wrapper.__jumok_original__ = function  # type: ignore[attr-defined]
    return wrapper


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _find_namespaces(targets: _Targets) -> dict[int, Namespace]:
    """Return the namespaces of the loaded modules that hold one of the functions.

    There are about 100,000 names. Modules that have been scanned are skipped while the reference counts of the
    functions and the sizes of the modules show that no other name can refer to one of them.
    """
    global _last_scan
    reference_counts = {key: sys.getrefcount(patch.function) for key, patch in targets.patches.items()}
    has_exact_counts = getattr(sys, "_is_gil_enabled", lambda: True)()  # free-threaded Python defers the counting
    if _PATCHED_SLOTS or reference_counts != _last_scan.reference_counts or not has_exact_counts:
        _last_scan = _ModuleScan({} if _PATCHED_SLOTS else reference_counts)
    scan = _last_scan
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if type(names) is not dict or scan.sizes.get(module_name) == (id(names), len(names)):
            continue
        scan.sizes[module_name] = id(names), len(names)
        if not str(names.get("__name__")).startswith(UNPATCHED_MODULES) and targets.list_items(names):
            scan.namespaces[id(names)] = names
    return scan.namespaces


def _find_slots(model: nn.Module, namespaces: dict[int, Namespace], targets: _Targets) -> Iterator[_Slot]:
    """Iterate over the slots with a target in these namespaces and in those that the model can reach."""
    namespaces = dict(namespaces)
    classes: set[type] = set()
    cells: dict[int, Any] = {}
    for submodule in model.modules():
        namespaces[id(vars(submodule))] = vars(submodule)
        classes.update(type(submodule).__mro__)
    for cls in classes - {nn.Module, object}:
        for name, value in list(vars(cls).items()):
            if targets.find(value.__func__ if type(value) is staticmethod else value) is not None:
                yield _Slot(cls, name, value, functools.partial(setattr, cls, name))
            elif isinstance(value, types.FunctionType):
                namespaces[id(value.__globals__)] = value.__globals__
                cells.update((id(cell), cell) for cell in value.__closure__ or ())
    for names in namespaces.values():
        for name, value in targets.list_items(names):
            yield _Slot(names, name, value, functools.partial(names.__setitem__, name))
    for cell in cells.values():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if targets.find(value) is not None:
            yield _Slot(cell, "", value, functools.partial(setattr, cell, "cell_contents"))
