"""Microseconds per step of the kernels of additive attention on this GPU, for several block sizes.

    python bench/tune_step.py

For changes of `jumok.attention.kernels.additive_step`. Each line has the same block sizes for the forward and the
backward kernel: the time per step of the whole loop, forward and backward, in a CUDA graph and launched by Python;
and the time of each kernel per step, by PyTorch's profiler. The last line of a size combines the fastest forward with
the fastest backward kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jumok.attention.kernels.additive_step import (
    NARROW_BLOCKS,
    WIDE_BLOCKS,
    AdditiveStepBlockSizes,
    AdditiveStepLoop,
    choose_step_blocks,
)

SIZES = [(32, 400, 256, 256), (80, 50, 1000, 2000)]  # B, K, hidden, value width
STEPS = 50
REPLAYS = 20
TIME_LIMIT = 60  # seconds, mostly for compiling
NARROW_CANDIDATES = [
    NARROW_BLOCKS,
    NARROW_BLOCKS._replace(merge_elements_per_lane=128),
    NARROW_BLOCKS._replace(merge_elements_per_lane=32),
    NARROW_BLOCKS._replace(target_programs=1600, max_splits=64, merge_elements_per_lane=128),
    NARROW_BLOCKS._replace(target_programs=1600, max_splits=64),
    NARROW_BLOCKS._replace(keys_per_lane=4, target_programs=512, max_splits=16),
    NARROW_BLOCKS._replace(keys_per_lane=4, target_programs=512, max_splits=16, merge_elements_per_lane=128),
    NARROW_BLOCKS._replace(columns_per_lane=32, keys_per_lane=1),
    NARROW_BLOCKS._replace(columns_per_lane=8, keys_per_lane=4),
    NARROW_BLOCKS._replace(target_programs=512, max_splits=16, merge_elements_per_lane=128),
    NARROW_BLOCKS._replace(num_warps=2, target_programs=512, max_splits=16),
    NARROW_BLOCKS._replace(num_warps=2, target_programs=512, max_splits=16, merge_elements_per_lane=128),
]
WIDE_CANDIDATES = [
    WIDE_BLOCKS,
    WIDE_BLOCKS._replace(num_stages=3),
    WIDE_BLOCKS._replace(num_stages=4),
    WIDE_BLOCKS._replace(num_stages=3, target_programs=1024),
    WIDE_BLOCKS._replace(target_programs=1024),
    WIDE_BLOCKS._replace(target_programs=384),
    WIDE_BLOCKS._replace(num_warps=2, target_programs=256),
    WIDE_BLOCKS._replace(num_warps=4, target_programs=128),
    WIDE_BLOCKS._replace(num_warps=4, target_programs=256),
]
ABBREVIATIONS = {
    "columns_per_lane": "c",
    "keys_per_lane": "k",
    "num_warps": "w",
    "target_programs": "p",
    "num_stages": "s",
    "merge_elements_per_lane": "m",
}
BlockSizes = tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]
Loop = Callable[[], tuple[Tensor, ...]]


def draw_inputs(size: tuple[int, int, int, int]) -> list[Tensor]:
    """Return weight, keys, v, value, queries."""
    batch, keys, hidden, width = size
    tensors = [torch.randn(s, device="cuda") for s in ((hidden, hidden), (batch, keys, hidden), (hidden,))]
    tensors = [x.mul(x.shape[-1] ** -0.5) for x in tensors]
    tensors += [torch.randn(s, device="cuda") for s in ((batch, keys, width), (STEPS, batch, hidden))]
    return [x.bfloat16().requires_grad_() for x in tensors]


def build_loop(leaves: list[Tensor], blocks: BlockSizes) -> Loop:
    def loop() -> tuple[Tensor, ...]:
        steps = AdditiveStepLoop(*leaves[:4], blocks=blocks)
        contexts = torch.stack([steps.compute_context(query) for query in leaves[4].unbind()])
        return torch.autograd.grad(contexts, leaves, contexts.detach())

    return loop


def measure_graph(loop: Loop) -> float:
    """Return the microseconds per step of a CUDA graph. The first run compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loop()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = loop()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    del outputs
    return statistics.median(times) * 1000 / STEPS


def measure_launched(loop: Loop) -> float:
    """Return the microseconds per step of a loop launched by Python."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6 / STEPS


def measure_kernels(loop: Loop) -> dict[str, float]:
    """Return the microseconds per step of each kernel that runs in every step, by name."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        loop()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.count >= STEPS]
    return {event.key: event.device_time_total / STEPS for event in events}


def format_blocks(blocks: BlockSizes) -> str:
    forward, backward = (
        " ".join(f"{short}{getattr(b, name)}" for name, short in ABBREVIATIONS.items()) for b in blocks
    )
    return forward if forward == backward else f"{forward} | {backward}"


def print_line(size: tuple[int, int, int, int], leaves: list[Tensor], blocks: BlockSizes) -> tuple[float, float]:
    """Measure block sizes and print a line; return the microseconds of the forward and of the backward kernel."""
    loop = build_loop(leaves, blocks)
    graph, launched, kernels = measure_graph(loop), measure_launched(loop), measure_kernels(loop)
    parts = ", ".join(f"{name[:20]} {us:.1f}" for name, us in kernels.items())
    print(f"{size!s:22} {format_blocks(blocks):26} {graph:5.1f} {launched:8.1f}  {parts}", flush=True)
    forward, backward = (
        next(us for name, us in kernels.items() if name.startswith(kernel))
        for kernel in ("forward_kernel", "backward_kernel")
    )
    return forward, backward


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_step.py needs a CUDA GPU")
    start = time.monotonic()
    print("blocks: " + ", ".join(f"{short} {name}" for name, short in ABBREVIATIONS.items()))
    print(f"{'B, K, hidden, values':22} {'blocks':26} {'graph':>5} {'launched':>8}  kernels, µs")
    for number, size in enumerate(SIZES, 1):
        leaves = draw_inputs(size)
        default = choose_step_blocks(size[0], max(size[2:]))
        candidates = NARROW_CANDIDATES if default[0] == NARROW_BLOCKS else WIDE_CANDIDATES
        times = {}
        for blocks in candidates:
            if time.monotonic() - start > TIME_LIMIT / len(SIZES) * number:
                print(f"{size!s:22} the time limit was reached; the remaining block sizes are skipped")
                break
            times[blocks] = print_line(size, leaves, (blocks, blocks))
        print_line(size, leaves, (min(times, key=lambda b: times[b][0]), min(times, key=lambda b: times[b][1])))


if __name__ == "__main__":
    main()
