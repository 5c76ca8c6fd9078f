"""The tensors that a function reads beside its arguments: a rule that is asked again reads them again."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

Names = frozenset[str]
CALL_METHODS = frozenset(["forward", "__call__"])


def collect_tensors(*functions: Any) -> tuple[Tensor, ...]:
    """What functions enclose, what their names stand for, and what they take from objects by their names."""
    found: dict[int, Tensor] = {}
    asked: dict[tuple[int, Names], Any] = {}  # held, so that their ids stay their own

    def look(value: Any, names: Names) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif (id(value), names) not in asked:
            asked[id(value), names] = value
            for inner, more in _iterate_references(value, names):
                look(inner, more)

    for function in functions:
        look(function, CALL_METHODS)
    return tuple(found.values())


def _iterate_references(value: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """What a value holds, with the names by which more is taken from that."""
    match value:
        case types.FunctionType() if not _is_library_function(value):
            mine = CALL_METHODS.union(_iterate_names(value.__code__))
            for cell in value.__closure__ or ():
                if cell != types.CellType():  # it is filled
                    yield cell.cell_contents, mine
            for name in mine & value.__globals__.keys():
                yield value.__globals__[name], mine
            for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
                yield default, mine
        case types.MethodType() if not _is_library_function(value.__func__):
            yield value.__func__, names
            yield value.__self__, frozenset(_iterate_names(value.__func__.__code__))
        case functools.partial():
            yield from ((one, names) for one in (value.func, *value.args, *value.keywords.values()))
        case list() | tuple():
            yield from ((one, names) for one in value)
        case dict():
            yield from ((one, names) for one in value.values())
        case types.FunctionType() | types.MethodType() | types.ModuleType() | type():
            return
        case _:
            held: dict[str, Any] = dict(getattr(value, "__dict__", {}))
            if isinstance(value, nn.Module):
                held |= value._parameters | value._buffers | value._modules
            for name in names:
                method = getattr(type(value), name, None)
                if name in held:
                    yield held[name], names
                elif isinstance(method, types.FunctionType):
                    yield types.MethodType(method, value), names


def _is_library_function(function: Any) -> bool:
    """Whether it is PyTorch's or our watch's: what these hold has no end, and is no part of a rule."""
    if not isinstance(function, types.FunctionType):
        return True
    return f"{function.__module__}.".startswith(("torch.", "jumok.look."))


def _iterate_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _iterate_names(one)
