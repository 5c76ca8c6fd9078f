"""How the loss of an output layer is cut best on this GPU: milliseconds of forward and backward, in bfloat16.

    python bench/tune_output.py

For whoever changes `models/layers/output_loss.py` or its kernel. Compares plain PyTorch, several chunk sizes
(the constant MAX_LOGITS_BY_KERNEL), and several block sizes of the kernel.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jumok.models.kernels import cross_entropy
from jumok.models.kernels.cross_entropy import DEFAULT_BLOCKS, CrossEntropyBlockSizes, cross_entropy_
from jumok.models.layers import output_loss

SIZES = [(14500, 512, 32000), (4000, 768, 30522)]  # places, width, words
PIECES = [24, 25, 26, 27, 28, 29]  # logits at a time, as a power of 2
WAYS = [CrossEntropyBlockSizes(warps, unroll) for warps in (4, 8, 16, 32) for unroll in (1, 2, 4)]
RUNS = 12


def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        total, _ = output_loss.linear_cross_entropy(hidden, weight, labels, 0.1)
    torch.autograd.grad(total, (hidden, weight))


def milliseconds(*inputs: Tensor) -> tuple[float, float]:
    """Of a step, and within it of the kernel; the first steps compile and warm up."""
    for _ in range(3):
        step(*inputs)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(*inputs)
        mark.record()
    torch.cuda.synchronize()
    whole = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step(*inputs)
        torch.cuda.synchronize()
    kernel = sum(event.device_time_total for event in seen.key_averages() if "softmax_loss" in event.key)
    return whole, kernel / 1000


def row(name: str, times: tuple[float, float]) -> None:
    gigabytes = torch.cuda.max_memory_allocated() / 1e9
    print(f"  {name:34} {times[0]:8.3f} {times[1]:8.3f} {gigabytes:8.2f}", flush=True)
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_output.py measures a kernel on a CUDA GPU, and there is none")
    added = output_loss._supports_float32_output(torch.bfloat16, torch.device("cuda", 0))
    print(f"products are added in float32: {added}")
    for places, width, words in SIZES:
        print(f"\n{places} places, width {width}, {words} words\n{'':36} {'ms':>8} {'kernel':>8} {'GB':>8}")
        hidden = torch.randn(places, width, device="cuda", requires_grad=True)
        weight = torch.randn(words, width, device="cuda").mul_(width**-0.5).requires_grad_()
        inputs = (hidden, weight, torch.randint(words, (places,), device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        with mock.patch.object(output_loss, "triton_unsupported_reason", return_value="not now"):
            row("plain PyTorch", milliseconds(*inputs))
        row("as it is", milliseconds(*inputs))
        for power in PIECES:
            with mock.patch.object(output_loss, "MAX_LOGITS_BY_KERNEL", 1 << power):
                row(f"pieces of 2^{power} logits", milliseconds(*inputs))
        for blocks in WAYS:
            cut = functools.partial(cross_entropy_, blocks=blocks)
            with mock.patch.object(cross_entropy, "cross_entropy_", cut):
                row(str(blocks) + " *" * (blocks == DEFAULT_BLOCKS), milliseconds(*inputs))


if __name__ == "__main__":
    main()
