"""Microseconds of the GRU kernels on this GPU, for several block sizes.

    python bench/tune_gru.py

For changes of `jumok.models.kernels.gru`. The first line is cuDNN. Each further line has the same block sizes for the
forward and the backward kernel: the time of both passes, launched by Python; the time of each kernel, by PyTorch's
profiler; and the largest relative difference of states and gradients from cuDNN's. The last line combines the fastest
forward with the fastest backward kernel. Sizes are those of `bench/classify.py`: the words of a batch, its sentences,
four times the words, and the widths of the recipes, in bfloat16 and float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import ProfilerActivity, profile

from jumok.attention.gpu_support import get_max_shared_memory
from jumok.models.kernels import gru
from jumok.models.kernels.gru import GruKernelBlockSizes, choose_gru_blocks
from jumok.models.layers.ragged_layout import PackedSteps
from jumok.models.layers.recurrent import build_rnn

TIME_LIMIT = 90  # seconds, mostly for compiling
REPEATS = 15
BlockSizes = tuple[GruKernelBlockSizes, GruKernelBlockSizes]
Loop = Callable[[], list[Tensor]]


class Size(NamedTuple):
    words: int
    mean: int  # approximate number of words of a sequence
    longest: int
    inputs: int
    width: int
    dtype: torch.dtype

    def lengths(self) -> list[int]:
        """Return lengths in descending order, distributed like those of sentences of reviews."""
        lengths = np.random.default_rng(0).lognormal(np.log(self.mean) - 0.25, 0.7, self.words)
        lengths = np.clip(lengths, 1, self.longest).astype(int)
        lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), self.words)) + 1]
        return sorted(lengths.tolist(), reverse=True)


SIZES = [
    Size(17_000, 20, 90, 200, 64, torch.bfloat16),  # the words of a batch
    Size(850, 13, 40, 128, 64, torch.bfloat16),  # its sentences
    Size(68_000, 20, 90, 200, 64, torch.bfloat16),
    Size(17_000, 20, 90, 200, 64, torch.float32),
    Size(17_000, 20, 90, 200, 100, torch.float32),
    Size(17_000, 20, 90, 200, 100, torch.bfloat16),
    Size(17_000, 20, 90, 200, 32, torch.bfloat16),
]


def list_candidates(size: Size) -> list[GruKernelBlockSizes]:
    """List block sizes, the defaults first."""
    default = choose_gru_blocks(size.width, size.dtype)
    candidates = [
        default,
        default._replace(warps=default.warps // 2),
        default._replace(rows=32),
        default._replace(warps=8),
    ]
    candidates += [GruKernelBlockSizes(32, 8), GruKernelBlockSizes(64, 8), GruKernelBlockSizes(64, 4)]
    if not gru.fits_weight_in_shared_memory(size.width, size.dtype, get_max_shared_memory(torch.device("cuda", 0))):
        candidates += [
            default._replace(stages=2),
            default._replace(stages=3),
            GruKernelBlockSizes(16, 16),
            GruKernelBlockSizes(16, 16, 2),
        ]
    return list(dict.fromkeys(candidates))


def build_loop(rnn: nn.GRU, x: Tensor, packing: PackedSteps, dtype: torch.dtype, blocks: BlockSizes | None) -> Loop:
    """Build a function that computes states and gradients with these block sizes, or with cuDNN (None)."""
    parameters = [*rnn.parameters()]
    directions = [tuple(parameters[:4]), tuple(parameters[4:])]

    def loop() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.float32):
            if blocks is None:
                states = rnn(PackedSequence(x, packing.batch_sizes))[0].data
            else:
                states = gru.run_fused_gru(x, directions, packing, blocks)  # type: ignore[arg-type]
        return [states.detach(), *torch.autograd.grad(states, [x, *parameters], states.detach())]

    return loop


def measure_launched(loop: Loop) -> float:
    """Return the microseconds of a loop launched by Python. The first runs compile and warm up."""
    times = []
    for run in range(REPEATS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop()
        torch.cuda.synchronize()
        if run >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def measure_kernels(loop: Loop) -> tuple[float, float]:
    """Return the microseconds of the forward and of the backward kernel."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(REPEATS):
            loop()
        torch.cuda.synchronize()
    totals = {event.key: event.device_time_total / REPEATS for event in profiler.key_averages()}
    forward, backward = (
        sum(total for name, total in totals.items() if name.startswith(kernel))
        for kernel in ("forward_kernel", "backward_kernel")
    )
    return forward, backward


def compute_error(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of the results."""
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(results, expected, strict=True)]
    return max(float(error) for error in errors)


def format_blocks(blocks: BlockSizes) -> str:
    forward, backward = (" ".join(f"{name[0]}{x}" for name, x in b._asdict().items()) for b in blocks)
    return forward if forward == backward else f"{forward} | {backward}"


def print_line(loop: Loop, expected: list[Tensor], name: str) -> tuple[float, float]:
    """Measure a loop and print a line; return the microseconds of the forward and of the backward kernel."""
    launched, (forward, backward) = measure_launched(loop), measure_kernels(loop)
    error = compute_error(loop(), expected)
    print(f"  {name:28} {launched:9.0f} {forward:9.1f} {backward:9.1f} {error:10.1e}", flush=True)
    return forward, backward


def tune(size: Size, end: float) -> None:
    lengths = size.lengths()
    rnn = build_rnn("gru", size.inputs, size.width, bidirectional=True).cuda()
    assert isinstance(rnn, nn.GRU)
    x = torch.randn(sum(lengths), size.inputs, device="cuda", requires_grad=True)
    counts = np.searchsorted(-np.array(lengths), -np.arange(lengths[0]), side="left")
    packing = PackedSteps.from_batch_sizes(torch.from_numpy(counts), "cuda")
    print(
        f"\n{len(x)} words, {len(lengths)} sequences, {len(counts)} steps, {size.inputs} inputs, width "
        f"{size.width}, {size.dtype}\n  {'':28} {'launched':>9} {'forward':>9} {'backward':>9} {'error':>10}"
    )
    cudnn = build_loop(rnn, x, packing, size.dtype, None)
    expected = cudnn()
    print(f"  {'cuDNN':28} {measure_launched(cudnn):9.0f}", flush=True)
    times: dict[GruKernelBlockSizes, tuple[float, float]] = {}
    for blocks in list_candidates(size):
        if time.monotonic() > end:
            print("  the time limit was reached; the remaining block sizes are skipped")
            break
        try:
            loop = build_loop(rnn, x, packing, size.dtype, (blocks, blocks))
            times[blocks] = print_line(loop, expected, format_blocks((blocks, blocks)))
        except Exception as error:  # such as too much shared memory
            print(f"  {format_blocks((blocks, blocks)):28} {type(error).__name__}: {str(error)[:60]}")
    if times:
        best = min(times, key=lambda b: times[b][0]), min(times, key=lambda b: times[b][1])
        print_line(build_loop(rnn, x, packing, size.dtype, best), expected, format_blocks(best))


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_gru.py needs a CUDA GPU")
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # exact float32 in cuDNN too
    start = time.monotonic()
    print("blocks: " + ", ".join(f"{name[0]} {name}" for name in GruKernelBlockSizes._fields))
    for number, size in enumerate(SIZES, 1):
        tune(size, start + TIME_LIMIT / len(SIZES) * number)


if __name__ == "__main__":
    main()
