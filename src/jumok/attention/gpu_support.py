"""What a GPU can do. Every choice of a kernel by the generation of the GPU is made here.

=============================================  =======================================================
our Triton kernels (``triton_unsupported_reason``)         NVIDIA, compute capability 7.5; 8.0 for bfloat16
those with matrix products (``uses_matmul=``)     8.0: below it, Triton has no tensor cores
FlashAttention and ours over packed sequences  8.0
bfloat16 by default (``supports_bfloat16``)         8.0, or ROCm
``torch.compile`` by default (``supports_compile``)    7.0, or ROCm, with Triton installed
=============================================  =======================================================

A kernel that keeps much in shared memory also asks :func:`get_max_shared_memory`. The table in ``docs/hardware.md``
says what follows for each generation. Tests replace :func:`get_gpu_properties` to choose as another GPU would.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "GPUProperties",
    "get_gpu_properties",
    "get_max_shared_memory",
    "has_triton",
    "packed_unsupported_reason",
    "supports_bfloat16",
    "supports_compile",
    "triton_unsupported_reason",
]  # fmt: skip

TURING, AMPERE, VOLTA = (7, 5), (8, 0), (7, 0)


class GPUProperties(NamedTuple):
    """A device of type "cuda"."""

    compute_capability: tuple[int, int]  # the compute capability; (9, 0) is Hopper
    max_shared_memory: int  # bytes that one program (thread block) may use
    is_rocm: bool = False


@functools.cache
def get_gpu_properties(device: torch.device) -> GPUProperties | None:
    """The GPU behind a device; None for a CPU and for other accelerators, whose kernels are PyTorch's own."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no larger block to opt in to.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GPUProperties((properties.major, properties.minor), shared, torch.version.hip is not None)


def get_max_shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may use; without bound where Triton's interpreter runs it."""
    gpu = get_gpu_properties(device)
    return sys.maxsize if gpu is None else gpu.max_shared_memory


def triton_unsupported_reason(x: Tensor, uses_matmul: bool = False) -> str | None:
    """Why our Triton kernels cannot serve a tensor such as ``x``; None when they can.

    ``uses_matmul``: the kernel multiplies matrices.
    """
    gpu = get_gpu_properties(x.device)
    if gpu is None:
        return f"the Triton kernels run on CUDA, and the tensors are on {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels take bfloat16, float16 and float32, not {x.dtype}"
    needed = AMPERE if uses_matmul or x.dtype == torch.bfloat16 else TURING
    reason = _capability_unsupported_reason(gpu, needed, "this Triton kernel")
    return reason or (None if has_triton() else "Triton is not installed")


def packed_unsupported_reason(device: torch.device) -> str | None:
    """Why no kernel for packed sequences, FlashAttention or ours, runs on a device; None when they do."""
    gpu = get_gpu_properties(device)
    if gpu is None:
        return f"it runs on CUDA, and the tensors are on {device.type}"
    return _capability_unsupported_reason(gpu, AMPERE, "attention over packed sequences")


def supports_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 in hardware. (An older one emulates it, slower than float32.)"""
    gpu = get_gpu_properties(device)
    return gpu is not None and (gpu.is_rocm or gpu.compute_capability >= AMPERE)


def supports_compile(device: torch.device) -> bool:
    """Whether ``torch.compile`` has a compiler for a GPU."""
    gpu = get_gpu_properties(device)
    return gpu is not None and (gpu.is_rocm or gpu.compute_capability >= VOLTA) and has_triton()


def _capability_unsupported_reason(
    gpu: GPUProperties, min_capability: tuple[int, int], kernel_name: str
) -> str | None:
    if not gpu.is_rocm and gpu.compute_capability >= min_capability:
        return None
    least, has = (".".join(map(str, capability)) for capability in (min_capability, gpu.compute_capability))
    this = "is AMD's" if gpu.is_rocm else f"has {has}"
    return f"{kernel_name} needs an NVIDIA GPU of compute capability {least} or newer, and this one {this}"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
