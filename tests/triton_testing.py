"""Tests of Triton kernels run on a GPU if there is one, and in Triton's interpreter on any machine.

The interpreter must be chosen before Triton is imported. So ``test_triton_interpreter.py`` runs the kernel tests
again in other processes; ``TRITON_INTERPRET=1 pytest FILE`` runs those of one file.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
# NumPy warns of infinity and NaN, and computes them also beyond the end of a row.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
compiles_kernels = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

if INTERPRETED:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    # NumPy 2.4 no longer converts an array of one element to an int, which Triton 3.6's interpreter relies on.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index

    # The interpreter truncates float32 to bfloat16; a GPU rounds, which halves the error.
    convert_float = interpreter._convert_float

    def convert_rounding(x: Any, input_type: Any, output_type: Any, mode: Any) -> Any:
        if (str(input_type), str(output_type)) == ("fp32", "bf16"):
            return torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert_float(x, input_type, output_type, mode)

    interpreter._convert_float = convert_rounding

    # Each function that a kernel calls patches triton.language again, which takes longer than the function itself.
    patch_language = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if languages and not any(tl.core.is_builtin(language.arange) for language in languages):
            return interpreter._LangPatchScope()
        return patch_language(function)

    interpreter._patch_lang = patch_once


def assert_as_accurate(
    ours: Sequence[Tensor], exact: Sequence[Tensor], *plain: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """The error against float64 is at most twice that of plain PyTorch in the same precision."""
    slack = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    for index, (truth, *results) in enumerate(zip(exact, ours, *plain, strict=True)):
        error, *allowed = (((x.double() - truth).norm() / (truth.norm() + 1e-30)).item() for x in results)
        errors = ", ".join(f"{x:.1e}" for x in allowed)
        assert error <= 2 * max(allowed) + slack, f"result {index}: error {error:.1e}, plain PyTorch {errors}"


def record_cuda_graph(run: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """Record ``run`` after one run on a side stream. Returns the graph, and the tensors that its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return graph, captured


def compile_for_hopper(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    options: Mapping[str, Any],
    aligned: Collection[str] = (),
) -> Any:
    """Compile a kernel for an H100 without a GPU: the compiler rejects code that the interpreter accepts.

    Pointers without a type are ``*fp32``, other arguments ``i32``. Pointers, and the arguments named in
    ``aligned``, are multiples of 16. Constants and types of other kernels' arguments are ignored.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    divisible = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and (name.endswith("_ptr") or name in aligned)
    }
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))


def count_stack_bytes(compiled: Any, folder: Path) -> int:
    """Bytes of stack per thread of a compiled kernel, where spilled registers are."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[0])
