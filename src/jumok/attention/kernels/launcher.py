"""Launches of Triton kernels that take less of the host's time.

``kernel[grid](…)`` examines every argument to find the compiled variant of the kernel (for dtypes, sizes and
alignment), and asks the driver about every pointer. :func:`launch` remembers the variant, and passes pointers
as numbers.

Whatever is unusual takes Triton's own way: the first launch of a variant, the interpreter, tensors that are not
all on the current GPU, numbers that are negative or exceed 32 bits, and hooks of profilers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

Argument = Tensor | int | float | None

# Compiled variants, and what is passed for their constants, which are part of the code.
_variants: dict[Hashable, tuple[CompiledKernel, tuple[None, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Argument, **constants: Any) -> None:
    """Compute ``kernel[grid](*arguments, **constants)`` on the device of the first argument.

    Args:
        kernel: a function with ``@triton.jit``. Its ``tl.constexpr`` parameters come last.
        grid: the numbers of programs.
        arguments: all parameters that are not ``tl.constexpr``. The first is a tensor.
        constants: the others, and options of the compiler. Each has the same type in all launches.
    """
    device: int = arguments[0].get_device()  # type: ignore[union-attr]
    specialized = None
    if type(kernel) is JITFunction and device >= 0 and device == torch._C._cuda_getDevice() and not _has_hooks(kernel):
        specialized = _specialize(arguments, device)
    if specialized is None:
        _launch_by_triton(kernel, grid, arguments, constants)
        return
    argument_key, values = specialized
    key = kernel.fn, device, *constants, *constants.values(), *argument_key
    variant = _variants.get(key)
    if variant is None:
        compiled = _launch_by_triton(kernel, grid, arguments, constants)
        num_constants = len(kernel.params) - len(arguments)
        if isinstance(compiled, CompiledKernel) and len(kernel.constexprs) == num_constants:
            _variants[key] = compiled, (None,) * num_constants
        return
    compiled, padding = variant
    width, height, depth = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        width, height, depth, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *padding
    )


def _specialize(arguments: tuple[Argument, ...], device: int) -> tuple[list[Any], list[Any]] | None:
    """Return all about the arguments that Triton compiles a variant for, and the values to pass.

    None if Triton must launch the kernel.
    """
    key: list[Any] = []
    values: list[Any] = []
    for x in arguments:
        if type(x) is int:
            if x >> 31:
                return None
            key.append("one" if x == 1 else x & 15 == 0)
            values.append(x)
        elif isinstance(x, Tensor):
            pointer = x.data_ptr()
            if x.get_device() != device:
                return None
            key.append((x.dtype,) if pointer & 15 else x.dtype)
            values.append(pointer)
        elif x is None or type(x) is float:
            key.append(type(x))
            values.append(x)
        else:
            return None
    return key, values


def _has_hooks(kernel: Any) -> bool:
    runtime = triton.knobs.runtime
    return bool(kernel.pre_run_hooks) or _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))  # a chain of hooks, or a function


def _launch_by_triton(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Argument, ...], constants: dict[str, Any]
) -> Any:
    with torch.cuda.device_of(arguments[0]):
        return kernel[grid](*arguments, **constants)
