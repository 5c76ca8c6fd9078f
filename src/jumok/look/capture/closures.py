"""The tensors that a function reads beside its arguments, and will read again if it is called again."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

Names = frozenset[str]
CALL_METHODS = frozenset(["forward", "__call__"])


def collect_tensors(*functions: Any) -> tuple[Tensor, ...]:
    """Collect the tensors in closures, in globals that functions name, and in attributes that they name."""
    tensors: dict[int, Tensor] = {}
    visited: dict[tuple[int, Names], Any] = {}  # references, so that ids stay unique

    def visit(value: Any, names: Names) -> None:
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif (id(value), names) not in visited:
            visited[id(value), names] = value
            for inner, inner_names in _iterate_references(value, names):
                visit(inner, inner_names)

    for function in functions:
        visit(function, CALL_METHODS)
    return tuple(tensors.values())


def _iterate_references(value: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """Iterate over the references of a value, with the names by which attributes of them are read."""
    match value:
        case types.FunctionType() if not _is_library_function(value):
            own_names = CALL_METHODS.union(_iterate_names(value.__code__))
            for cell in value.__closure__ or ():
                if cell != types.CellType():  # it is not empty
                    yield cell.cell_contents, own_names
            for name in own_names & value.__globals__.keys():
                yield value.__globals__[name], own_names
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                yield default, own_names
        case types.MethodType() if not _is_library_function(value.__func__):
            yield value.__func__, names
            yield value.__self__, frozenset(_iterate_names(value.__func__.__code__))
        case functools.partial():
            yield from ((item, names) for item in (value.func, *value.args, *value.keywords.values()))
        case list() | tuple():
            yield from ((item, names) for item in value)
        case dict():
            yield from ((item, names) for item in value.values())
        case types.FunctionType() | types.MethodType() | types.ModuleType() | type():
            return
        case _:
            attributes: dict[str, Any] = dict(getattr(value, "__dict__", {}))
            if isinstance(value, nn.Module):
                attributes |= value._parameters | value._buffers | value._modules
            for name in names:
                method = getattr(type(value), name, None)
                if name in attributes:
                    yield attributes[name], names
                elif isinstance(method, types.FunctionType):
                    yield types.MethodType(method, value), names


def _is_library_function(function: Any) -> bool:
    """Return whether it is a function of PyTorch or of jumok.look, whose references are not followed."""
    if not isinstance(function, types.FunctionType):
        return True
    return f"{function.__module__}.".startswith(("torch.", "jumok.look."))


def _iterate_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iterate_names(constant)
