"""Milliseconds of the loss of an output layer on this GPU, forward and backward, for several chunk and block sizes.

    python bench/tune_output.py

For changes of `models/layers/output_loss.py` or its kernel. Compares, in bfloat16, plain PyTorch, several chunk sizes
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

SIZES = [(14500, 512, 32000), (4000, 768, 30522)]  # tokens, width, vocabulary
CHUNK_POWERS = [24, 25, 26, 27, 28, 29]  # logits of a chunk, as a power of 2
BLOCK_SIZES = [CrossEntropyBlockSizes(warps, unroll) for warps in (4, 8, 16, 32) for unroll in (1, 2, 4)]
REPEATS = 12


def step(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        total, _ = output_loss.linear_cross_entropy(hidden, weight, labels, 0.1)
    torch.autograd.grad(total, (hidden, weight))


def measure(*inputs: Tensor) -> tuple[float, float]:
    """Return the milliseconds of a step and of its kernel. The first steps compile and warm up."""
    for _ in range(3):
        step(*inputs)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(*inputs)
        mark.record()
    torch.cuda.synchronize()
    whole = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step(*inputs)
        torch.cuda.synchronize()
    kernel = sum(event.device_time_total for event in profiler.key_averages() if "softmax_loss" in event.key)
    return whole, kernel / 1000


def print_line(name: str, times: tuple[float, float]) -> None:
    gigabytes = torch.cuda.max_memory_allocated() / 1e9
    print(f"  {name:34} {times[0]:8.3f} {times[1]:8.3f} {gigabytes:8.2f}", flush=True)
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_output.py needs a CUDA GPU")
    accumulates = output_loss._supports_float32_output(torch.bfloat16, torch.device("cuda", 0))
    print(f"products are accumulated in float32: {accumulates}")
    for tokens, width, vocab_size in SIZES:
        print(f"\n{tokens} tokens, width {width}, vocabulary {vocab_size}\n{'':36} {'ms':>8} {'kernel':>8} {'GB':>8}")
        hidden = torch.randn(tokens, width, device="cuda", requires_grad=True)
        weight = torch.randn(vocab_size, width, device="cuda").mul_(width**-0.5).requires_grad_()
        inputs = (hidden, weight, torch.randint(vocab_size, (tokens,), device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        with mock.patch.object(output_loss, "triton_unsupported_reason", return_value="disabled"):
            print_line("plain PyTorch", measure(*inputs))
        print_line("default", measure(*inputs))
        for power in CHUNK_POWERS:
            with mock.patch.object(output_loss, "MAX_LOGITS_BY_KERNEL", 1 << power):
                print_line(f"chunks of 2^{power} logits", measure(*inputs))
        for blocks in BLOCK_SIZES:
            kernel = functools.partial(cross_entropy_, blocks=blocks)
            with mock.patch.object(cross_entropy, "cross_entropy_", kernel):
                print_line(str(blocks) + " *" * (blocks == DEFAULT_BLOCKS), measure(*inputs))


if __name__ == "__main__":
    main()
