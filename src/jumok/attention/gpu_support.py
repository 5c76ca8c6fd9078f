"""What a GPU supports. Every choice of a kernel that depends on the GPU generation is made here.

===================================================  =================================================
Triton kernels (``triton_unsupported_reason``)       NVIDIA, compute capability 7.5; 8.0 for bfloat16
Triton kernels with matrix products                  8.0: below it, Triton uses no tensor cores
FlashAttention and our kernel for packed sequences   8.0
bfloat16 by default (``supports_bfloat16``)          8.0, or ROCm
``torch.compile`` by default (``supports_compile``)  7.0, or ROCm, with Triton installed
===================================================  =================================================

A kernel that needs much shared memory also checks :func:`get_max_shared_memory`. ``docs/hardware.md`` lists
the consequences for each GPU generation. Tests replace :func:`get_gpu_properties` to simulate other GPUs.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import NamedTuple

import torch
from torch import Tensor

TURING, AMPERE, VOLTA = (7, 5), (8, 0), (7, 0)
HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_WIDTH = 256  # the largest head width of FlashAttention


class GPUProperties(NamedTuple):
    """The properties of a device of type "cuda"."""

    compute_capability: tuple[int, int]  # (9, 0) is Hopper
    max_shared_memory: int  # bytes that one program (thread block) may use
    is_rocm: bool = False


@functools.cache
def get_gpu_properties(device: torch.device) -> GPUProperties | None:
    """Return the properties of a GPU, or None for a CPU and for accelerators of other types."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no larger opt-in size.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GPUProperties((properties.major, properties.minor), shared, torch.version.hip is not None)


def get_max_shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use. Triton's interpreter has no limit."""
    gpu = get_gpu_properties(device)
    return sys.maxsize if gpu is None else gpu.max_shared_memory


def triton_unsupported_reason(x: Tensor, uses_matmul: bool = False) -> str | None:
    """Return why our Triton kernels do not support a tensor such as ``x``, or None if they do.

    ``uses_matmul`` says that the kernel multiplies matrices.
    """
    gpu = get_gpu_properties(x.device)
    if gpu is None:
        return f"the Triton kernels run on CUDA, and the tensors are on {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels support bfloat16, float16 and float32, not {x.dtype}"
    min_capability = AMPERE if uses_matmul or x.dtype == torch.bfloat16 else TURING
    reason = _capability_unsupported_reason(gpu, min_capability, "this Triton kernel")
    return reason or (None if has_triton() else "Triton is not installed")


def packed_unsupported_reason(device: torch.device) -> str | None:
    """Return why no kernel for packed sequences, FlashAttention or ours, runs on a device, or None."""
    gpu = get_gpu_properties(device)
    if gpu is None:
        return f"it runs on CUDA, and the tensors are on {device.type}"
    return _capability_unsupported_reason(gpu, AMPERE, "attention over packed sequences")


def supports_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU has bfloat16 arithmetic. (Older ones emulate it, slower than float32.)"""
    gpu = get_gpu_properties(device)
    return gpu is not None and (gpu.is_rocm or gpu.compute_capability >= AMPERE)


def supports_compile(device: torch.device) -> bool:
    """Return whether ``torch.compile`` supports a GPU."""
    gpu = get_gpu_properties(device)
    return gpu is not None and (gpu.is_rocm or gpu.compute_capability >= VOLTA) and has_triton()


def _capability_unsupported_reason(gpu: GPUProperties, min_capability: tuple[int, int], kernel_name: str) -> str | None:
    if not gpu.is_rocm and gpu.compute_capability >= min_capability:
        return None
    required, actual = (".".join(map(str, version)) for version in (min_capability, gpu.compute_capability))
    this_gpu = "is AMD's" if gpu.is_rocm else f"has {actual}"
    needed = f"an NVIDIA GPU of compute capability {required} or newer"
    return f"{kernel_name} needs {needed}, and this one {this_gpu}"


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
