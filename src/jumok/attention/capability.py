"""What a GPU can do. Every choice of a kernel by the generation of the GPU is made here.

=============================================  =======================================================
our Triton kernels (``why_no_kernel``)         NVIDIA, compute capability 7.5; 8.0 for bfloat16
those with matrix products (``products=``)     8.0: below it, Triton has no tensor cores
FlashAttention and ours over packed sequences  8.0
bfloat16 by default (``has_bfloat16``)         8.0, or ROCm
``torch.compile`` by default (``compiles``)    7.0, or ROCm, with Triton installed
=============================================  =======================================================

A kernel that keeps much in shared memory also asks :func:`shared_memory`. The table in ``docs/hardware.md``
says what follows for each generation. Tests replace :func:`gpu_of` to choose as another GPU would.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GPU", "compiles", "gpu_of", "has_bfloat16", "has_triton", "shared_memory", "why_no_kernel",
           "why_no_packed"]  # fmt: skip

TURING, AMPERE, VOLTA = (7, 5), (8, 0), (7, 0)


class GPU(NamedTuple):
    """A device of type "cuda"."""

    capability: tuple[int, int]  # the compute capability; (9, 0) is Hopper
    shared_memory: int  # bytes that one program (thread block) may use
    rocm: bool = False


@functools.cache
def gpu_of(device: torch.device) -> GPU | None:
    """The GPU behind a device; None for a CPU and for other accelerators, whose kernels are PyTorch's own."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no larger block to opt in to.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GPU((properties.major, properties.minor), shared, torch.version.hip is not None)


def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program may use; without bound where Triton's interpreter runs it."""
    gpu = gpu_of(device)
    return sys.maxsize if gpu is None else gpu.shared_memory


def why_no_kernel(x: Tensor, products: bool = False) -> str | None:
    """Why our Triton kernels cannot serve a tensor such as ``x``; None when they can.

    ``products``: the kernel multiplies matrices.
    """
    gpu = gpu_of(x.device)
    if gpu is None:
        return f"the Triton kernels run on CUDA, and the tensors are on {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the Triton kernels take bfloat16, float16 and float32, not {x.dtype}"
    needed = AMPERE if products or x.dtype == torch.bfloat16 else TURING
    reason = _too_old(gpu, needed, "this Triton kernel")
    return reason or (None if has_triton() else "Triton is not installed")


def why_no_packed(device: torch.device) -> str | None:
    """Why no kernel for packed sequences, FlashAttention or ours, runs on a device; None when they do."""
    gpu = gpu_of(device)
    if gpu is None:
        return f"it runs on CUDA, and the tensors are on {device.type}"
    return _too_old(gpu, AMPERE, "attention over packed sequences")


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU multiplies bfloat16 in hardware. (An older one emulates it, slower than float32.)"""
    gpu = gpu_of(device)
    return gpu is not None and (gpu.rocm or gpu.capability >= AMPERE)


def compiles(device: torch.device) -> bool:
    """Whether ``torch.compile`` has a compiler for a GPU."""
    gpu = gpu_of(device)
    return gpu is not None and (gpu.rocm or gpu.capability >= VOLTA) and has_triton()


def _too_old(gpu: GPU, needed: tuple[int, int], kernel: str) -> str | None:
    if not gpu.rocm and gpu.capability >= needed:
        return None
    least, has = (".".join(map(str, capability)) for capability in (needed, gpu.capability))
    this = "is AMD's" if gpu.rocm else f"has {has}"
    return f"{kernel} needs an NVIDIA GPU of compute capability {least} or newer, and this one {this}"


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
