"""Which blocks serve the kernels of the GRU best on this GPU: microseconds, for several of them.

    python bench/tune_gru.py

For whoever changes `jumok.models.kernels.gru`. First cuDNN, then a line for each way, with the same blocks
forward and backward: all of forward and backward, launched by Python; then each of the two kernels, by
PyTorch's profiler; and how far states and gradients are from those of cuDNN. The last line of a size has the
best of the forward and the best of the backward. Sizes are those of `bench/classify.py`: the words of a
batch, its sentences, four times the words, and the widths of the recipes, in bfloat16 and float32.
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

SECONDS = 90  # most of them go into compiling
RUNS = 15
Both = tuple[GruKernelBlockSizes, GruKernelBlockSizes]
Loop = Callable[[], list[Tensor]]


class Size(NamedTuple):
    words: int
    mean: int  # words of a sequence, about
    longest: int
    inputs: int
    width: int
    dtype: torch.dtype

    def lengths(self) -> list[int]:
        """Falling, about as unlike as the sentences of reviews are."""
        drawn = np.random.default_rng(0).lognormal(np.log(self.mean) - 0.25, 0.7, self.words)
        drawn = np.clip(drawn, 1, self.longest).astype(int)
        kept = drawn[: int(np.searchsorted(np.cumsum(drawn), self.words)) + 1]
        return sorted(kept.tolist(), reverse=True)


SIZES = [
    Size(17_000, 20, 90, 200, 64, torch.bfloat16),  # the words of a batch
    Size(850, 13, 40, 128, 64, torch.bfloat16),  # its sentences
    Size(68_000, 20, 90, 200, 64, torch.bfloat16),
    Size(17_000, 20, 90, 200, 64, torch.float32),
    Size(17_000, 20, 90, 200, 100, torch.float32),
    Size(17_000, 20, 90, 200, 100, torch.bfloat16),
    Size(17_000, 20, 90, 200, 32, torch.bfloat16),
]


def ways(size: Size) -> list[GruKernelBlockSizes]:
    """The usual blocks first."""
    usual = choose_gru_blocks(size.width, size.dtype)
    found = [usual, usual._replace(warps=usual.warps // 2), usual._replace(rows=32), usual._replace(warps=8)]
    found += [GruKernelBlockSizes(32, 8), GruKernelBlockSizes(64, 8), GruKernelBlockSizes(64, 4)]
    if not gru.fits_weight_in_shared_memory(size.width, size.dtype, get_max_shared_memory(torch.device("cuda", 0))):
        found += [
            usual._replace(stages=2),
            usual._replace(stages=3),
            GruKernelBlockSizes(16, 16),
            GruKernelBlockSizes(16, 16, 2),
        ]
    return list(dict.fromkeys(found))


def loop_of(rnn: nn.GRU, x: Tensor, packing: PackedSteps, dtype: torch.dtype, blocks: Both | None) -> Loop:
    """States and gradients, with these blocks; None: by cuDNN."""
    parameters = [*rnn.parameters()]
    ways = [tuple(parameters[:4]), tuple(parameters[4:])]

    def loop() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype != torch.float32):
            if blocks is None:
                states = rnn(PackedSequence(x, packing.batch_sizes))[0].data
            else:
                states = gru.run_fused_gru(x, ways, packing, blocks)  # type: ignore[arg-type]
        return [states.detach(), *torch.autograd.grad(states, [x, *parameters], states.detach())]

    return loop


def launched_time(loop: Loop) -> float:
    """Microseconds of all of it, launched by Python. The first runs compile and warm up."""
    took = []
    for run in range(RUNS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop()
        torch.cuda.synchronize()
        if run >= 3:
            took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e6


def kernel_times(loop: Loop) -> tuple[float, float]:
    """Microseconds of the forward and of the backward kernel."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(RUNS):
            loop()
        torch.cuda.synchronize()
    each = {event.key: event.device_time_total / RUNS for event in seen.key_averages()}
    forward, backward = (
        sum(took for name, took in each.items() if name.startswith(kernel))
        for kernel in ("forward_kernel", "backward_kernel")
    )
    return forward, backward


def apart(found: list[Tensor], right: list[Tensor]) -> float:
    """The largest error of a result, relative to its length."""
    errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(found, right, strict=True)]
    return max(float(error) for error in errors)


def told(blocks: Both) -> str:
    forward, backward = (" ".join(f"{name[0]}{x}" for name, x in b._asdict().items()) for b in blocks)
    return forward if forward == backward else f"{forward} | {backward}"


def measured(loop: Loop, right: list[Tensor], name: str) -> tuple[float, float]:
    """Print a line; microseconds of the forward and of the backward kernel."""
    took, (forward, backward), error = launched_time(loop), kernel_times(loop), apart(loop(), right)
    print(f"  {name:28} {took:9.0f} {forward:9.1f} {backward:9.1f} {error:10.1e}", flush=True)
    return forward, backward


def tune(size: Size, until: float) -> None:
    lengths = size.lengths()
    rnn = build_rnn("gru", size.inputs, size.width, bidirectional=True).cuda()
    assert isinstance(rnn, nn.GRU)
    x = torch.randn(sum(lengths), size.inputs, device="cuda", requires_grad=True)
    counts = np.searchsorted(-np.array(lengths), -np.arange(lengths[0]), side="left")
    packing = PackedSteps.from_batch_sizes(torch.from_numpy(counts), "cuda")
    print(
        f"\n{len(x)} words, {len(lengths)} sequences, {len(counts)} steps, {size.inputs} inputs, width "
        f"{size.width}, {size.dtype}\n  {'':28} {'launched':>9} {'forward':>9} {'backward':>9} {'apart':>10}"
    )
    cudnn = loop_of(rnn, x, packing, size.dtype, None)
    right = cudnn()
    print(f"  {'cuDNN':28} {launched_time(cudnn):9.0f}", flush=True)
    took: dict[GruKernelBlockSizes, tuple[float, float]] = {}
    for blocks in ways(size):
        if time.monotonic() > until:
            print("  the other ways are left out: the time is up")
            break
        try:
            loop = loop_of(rnn, x, packing, size.dtype, (blocks, blocks))
            took[blocks] = measured(loop, right, told((blocks, blocks)))
        except Exception as error:  # too much shared memory, say
            print(f"  {told((blocks, blocks)):28} {type(error).__name__}: {str(error)[:60]}")
    if took:
        best = min(took, key=lambda b: took[b][0]), min(took, key=lambda b: took[b][1])
        measured(loop_of(rnn, x, packing, size.dtype, best), right, told(best))


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_gru.py measures kernels on a CUDA GPU, and there is none")
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # cuDNN's float32 is to be that, too
    began = time.monotonic()
    print("blocks: " + ", ".join(f"{name[0]} {name}" for name in GruKernelBlockSizes._fields))
    for at, size in enumerate(SIZES, 1):
        tune(size, began + SECONDS / len(SIZES) * at)


if __name__ == "__main__":
    main()
