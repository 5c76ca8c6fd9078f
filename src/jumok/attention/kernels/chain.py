"""Kernels that start before the one in front of them has ended: programmatic dependent launch (Hopper on).

Of a short kernel, most of the time is getting started. In a chain, a kernel is brought onto the GPU while the
one before it still runs, loads what is surely there, and then waits until that one is done.

What may be touched when (PTX: `griddepcontrol`):

1. A kernel of a chain waits in every program: before its first store, and before it reads anything that a
   kernel shortly before it may have written. The wait is over when the kernel before has ended, which had
   waited as well: so all earlier kernels of the stream have ended, and their writes are seen. Memory that the
   allocator hands on from a freed tensor is therefore safe too.
2. Only after its own wait does a kernel let the next one start. So whatever starts behind a kernel of a chain
   (at once or much later: nothing starts before the one in front of it has) finds all that was there before
   that kernel, without any waiting. Kernels of others may let the next one start when they like: what comes
   directly behind them can rely on nothing before it has waited.

Kernels launched in the usual way start when the one before has ended, and need not know of any of this.
A CUDA graph keeps the chain.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_earlier(CHAINED: tl.constexpr):
    """Until all earlier kernels have ended. From here on the next one may start, and load what is old.

    It must not stand in a loop: Triton's pipelining takes loads out of a loop to the front of it.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def can_chain(device: torch.device) -> bool:
    """Whether kernels on this device can be chained. Not in the interpreter, nor on AMD's GPUs."""
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    cuda = getattr(getattr(tl, "extra", None), "cuda", None)
    return hasattr(cuda, "gdc_wait") and torch.cuda.get_device_capability(device) >= (9, 0)


def linked(chained: bool) -> dict[str, Any]:
    """What to launch a kernel with that calls `wait_for_earlier`."""
    return {"CHAINED": True, "launch_pdl": True} if chained else {"CHAINED": False}
