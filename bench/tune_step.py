"""Which blocks serve the step kernels best on this GPU, and what the chain gains: microseconds a step.

    python bench/tune_step.py

For whoever changes `jumok.attention.kernels.step`. One line for each way: a step of the whole loop, forward
and backward, replayed as a CUDA graph, and launched by Python; then what each kernel takes of a step, by
PyTorch's profiler. In a chain that counts the time in which a kernel waits for the one before it: these add
up to more than the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jumok.attention.kernels.products import TILE
from jumok.attention.kernels.step import BLOCKS, Blocks, Shared

SIZES = [(32, 400, 256, 256), (80, 50, 1000, 2000)]  # B, K, hidden, value width
STEPS = 50
REPLAYS = 20
SECONDS = 60  # most of them go into compiling
WAYS = [
    BLOCKS,
    BLOCKS._replace(product=TILE._replace(programs=1)),
    BLOCKS._replace(product=TILE._replace(programs=1000)),
    BLOCKS._replace(product=TILE._replace(depth=256, stages=2)),
    BLOCKS._replace(product=TILE._replace(warps=2)),
    *(BLOCKS._replace(programs=programs) for programs in (256, 384, 1024)),
    *(BLOCKS._replace(keys=keys) for keys in (2, 8)),
    BLOCKS._replace(warps=2, programs=256),
]
Loop = Callable[[], tuple[Tensor, ...]]


def inputs(size: tuple[int, int, int, int]) -> list[Tensor]:
    """weight, keys, v, value, queries"""
    batch, keys, hidden, width = size
    made = [torch.randn(s, device="cuda") for s in ((hidden, hidden), (batch, keys, hidden), (hidden,))]
    made = [x.mul(x.shape[-1] ** -0.5) for x in made]
    made += [torch.randn(s, device="cuda") for s in ((batch, keys, width), (STEPS, batch, hidden))]
    return [x.bfloat16().requires_grad_() for x in made]


def loop_of(leaves: list[Tensor], blocks: Blocks, chained: bool) -> Loop:
    def loop() -> tuple[Tensor, ...]:
        steps = Shared(*leaves[:4], blocks=blocks, chained=chained)
        contexts = torch.stack([steps.step(query)[0] for query in leaves[4].unbind()])
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


def told(blocks: Blocks) -> str:
    """What is not as usual."""
    usual = BLOCKS._asdict() | {f"product.{name}": value for name, value in TILE._asdict().items()}
    here = blocks._asdict() | {f"product.{name}": value for name, value in blocks.product._asdict().items()}
    del here["product"]
    return (
        " ".join(f"{name}={value}" for name, value in here.items() if value != usual[name]) or "as they are"
    )


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_step.py measures kernels on a CUDA GPU, and there is none")
    began = time.monotonic()
    print(
        f"{'B, K, hidden, values':22} {'chained':7} {'blocks':34} {'graph':>5} {'launched':>8}  kernels, µs"
    )
    for size in SIZES:
        leaves = inputs(size)
        for blocks, chained in [(BLOCKS, False), *((blocks, True) for blocks in WAYS)]:
            if time.monotonic() - began > SECONDS / len(SIZES) * (1 + SIZES.index(size)):
                print(f"{size!s:22} the other ways are left out: the time is up")
                break
            loop = loop_of(leaves, blocks, chained)
            graph, launched, kernels = graph_time(loop), launched_time(loop), kernel_times(loop)
            parts = ", ".join(f"{name[:20]} {took:.1f}" for name, took in kernels.items())
            way = f"{size!s:22} {chained!s:7} {told(blocks):34}"
            print(f"{way} {graph:5.1f} {launched:8.1f}  {parts}", flush=True)


if __name__ == "__main__":
    main()
