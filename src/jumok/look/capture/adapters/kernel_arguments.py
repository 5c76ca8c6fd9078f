"""The arguments of kernels of other packages, whose signatures differ from version to version."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from jumok.look.capture.call_site import UnsupportedCallError, wrap_kernel
from jumok.look.capture.observer import ObservedCall
from jumok.look.capture.patching import Function, FunctionPatch


def list_kernel_patches(
    packages: Collection[str], names: Collection[str], read_call: Callable[..., ObservedCall]
) -> Iterator[FunctionPatch]:
    """List the patches of these functions of the packages that are loaded.

    ``read_call`` gets the name of the function, the function, its result, and its arguments.
    """
    for package in packages:
        for name in names:
            function = getattr(sys.modules.get(package), name, None)
            if callable(function):
                bound = functools.partial(read_call, name, function)
                yield FunctionPatch(function, functools.partial(wrap_kernel, read_call=bound))


class KernelArguments:
    """The arguments of a call that differ from their defaults, by the names in the kernel's own signature.

    An adapter takes those that it knows. None of the others is ignored silently: see :meth:`require_known`.
    """

    def __init__(self, kernel_name: str, kernel: Function, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel_name = kernel_name
        try:
            signature = inspect.signature(kernel)
        except ValueError:
            raise UnsupportedCallError(f"it calls {kernel_name}, whose signature is unknown") from None
        self._values: dict[str, Any] = {}
        for name, value in signature.bind(*args, **options).arguments.items():
            parameter = signature.parameters[name]
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._values |= value
            elif not _is_default(value, parameter.default):
                self._values[name] = value

    def take(self, *names: str, default: Any = None) -> Any:
        """Return and remove the argument of one of these names; ``default`` if it was not given, or None."""
        values = [self._values.pop(name) for name in names if name in self._values]
        return next((value for value in values if value is not None), default)

    def require_known(self, ignored: Collection[str], remedy: str = "") -> None:
        """Raise an error unless all arguments that are left do not change the weights, or are not set."""
        unknown = [
            name
            for name, value in self._values.items()
            if name not in ignored and not (value is None or value is False)
        ]
        if unknown:
            raise UnsupportedCallError(f"{self.kernel_name} with {', '.join(unknown)} is not supported{remedy}")


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return type(value) is type(default) and not isinstance(value, Tensor) and bool(value == default)
