"""Which blocks serve the step kernels best on this GPU: microseconds a step, for several of them.

    python bench/tune_step.py

For whoever changes `jumok.attention.kernels.step`. One line for each way, with the same blocks forward and
backward: a step of the whole loop, forward and backward, replayed as a CUDA graph, and launched by Python;
then what each kernel takes of a step, by PyTorch's profiler. The last line of a size has the best of the
forward and the best of the backward.
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
SECONDS = 60  # most of them go into compiling
NARROW_WAYS = [
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
WIDE_WAYS = [
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
TOLD = ("columns", "keys", "warps", "programs", "stages", "together")
Both = tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]
Loop = Callable[[], tuple[Tensor, ...]]


def inputs(size: tuple[int, int, int, int]) -> list[Tensor]:
    """weight, keys, v, value, queries"""
    batch, keys, hidden, width = size
    made = [torch.randn(s, device="cuda") for s in ((hidden, hidden), (batch, keys, hidden), (hidden,))]
    made = [x.mul(x.shape[-1] ** -0.5) for x in made]
    made += [torch.randn(s, device="cuda") for s in ((batch, keys, width), (STEPS, batch, hidden))]
    return [x.bfloat16().requires_grad_() for x in made]


def loop_of(leaves: list[Tensor], blocks: Both) -> Loop:
    def loop() -> tuple[Tensor, ...]:
        steps = AdditiveStepLoop(*leaves[:4], blocks=blocks)
        contexts = torch.stack([steps.compute_context(query) for query in leaves[4].unbind()])
        return torch.autograd.grad(contexts, leaves, contexts.detach())

    return loop


def graph_time(loop: Loop) -> float:
    """Microseconds a step, replayed as a CUDA graph. The first run compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loop()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = loop()
    took = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    del kept
    return statistics.median(took) * 1000 / STEPS


def launched_time(loop: Loop) -> float:
    """Microseconds a step, launched by Python."""
    took = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6 / STEPS


def kernel_times(loop: Loop) -> dict[str, float]:
    """Microseconds a step of every kernel that runs at every step, by name."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        loop()
        torch.cuda.synchronize()
    each = [event for event in seen.key_averages() if event.count >= STEPS]
    return {event.key: event.device_time_total / STEPS for event in each}


def told(blocks: Both) -> str:
    forward, backward = (" ".join(f"{name[0]}{x}" for name, x in b._asdict().items() if name in TOLD) for b in blocks)
    return forward if forward == backward else f"{forward} | {backward}"


def measured(size: tuple[int, int, int, int], leaves: list[Tensor], blocks: Both) -> tuple[float, float]:
    """Print a line; microseconds of the forward and of the backward kernel."""
    loop = loop_of(leaves, blocks)
    graph, launched, kernels = graph_time(loop), launched_time(loop), kernel_times(loop)
    parts = ", ".join(f"{name[:20]} {took:.1f}" for name, took in kernels.items())
    print(f"{size!s:22} {told(blocks):26} {graph:5.1f} {launched:8.1f}  {parts}", flush=True)
    forward, backward = (
        next(took for name, took in kernels.items() if name.startswith(kernel))
        for kernel in ("forward_kernel", "backward_kernel")
    )
    return forward, backward


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_step.py measures kernels on a CUDA GPU, and there is none")
    began = time.monotonic()
    print("blocks: " + ", ".join(f"{name[0]} {name}" for name in TOLD))
    print(f"{'B, K, hidden, values':22} {'blocks':26} {'graph':>5} {'launched':>8}  kernels, µs")
    for at, size in enumerate(SIZES):
        leaves = inputs(size)
        usual = choose_step_blocks(size[0], max(size[2:]))
        ways = NARROW_WAYS if usual[0] == NARROW_BLOCKS else WIDE_WAYS
        took = {}
        for blocks in ways:
            if time.monotonic() - began > SECONDS / len(SIZES) * (1 + at):
                print(f"{size!s:22} the other ways are left out: the time is up")
                break
            took[blocks] = measured(size, leaves, (blocks, blocks))
        measured(size, leaves, (min(took, key=lambda b: took[b][0]), min(took, key=lambda b: took[b][1])))


if __name__ == "__main__":
    main()
