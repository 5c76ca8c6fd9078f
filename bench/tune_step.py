"""Which blocks serve the step kernels best on this GPU: microseconds of each kernel, for several of them.

    python bench/tune_step.py

For whoever changes `jumok.attention.kernels.step`. The times are PyTorch's profiler's, without launches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jumok.attention.kernels.step import BLOCKS, Blocks, Shared

SIZES = [(80, 50, 1000, 2000), (32, 400, 256, 512), (32, 400, 256, 256)]  # B, K, hidden, value width
STEPS = 50
WAYS = [
    BLOCKS,
    *(BLOCKS._replace(keys=keys) for keys in (2, 8)),
    *(BLOCKS._replace(programs=programs) for programs in (256, 384, 1024)),
    BLOCKS._replace(warps=2, programs=256),
]


def loop(queries: Tensor, shared: list[Tensor], blocks: Blocks) -> None:
    steps = Shared(*shared, blocks=blocks)
    contexts = [steps.step(query)[0] for query in queries.unbind()]
    torch.stack(contexts).float().square().sum().backward()


def kernel_times(queries: Tensor, shared: list[Tensor], blocks: Blocks) -> dict[str, float]:
    """Microseconds a call, by kernel; the first run compiles."""
    loop(queries, shared, blocks)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        loop(queries, shared, blocks)
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / event.count for event in seen.key_averages() if event.count}


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_step.py measures kernels on a CUDA GPU, and there is none")
    print(f"{'B, K, hidden, values':24} {'keys elements warps programs splits':38} forward  backward  µs")
    for batch, keys, hidden, width in SIZES:
        made = (torch.randn(s, device="cuda") for s in ((hidden, hidden), (batch, keys, hidden), (hidden,)))
        shared = [x.mul(x.shape[-1] ** -0.5).bfloat16() for x in made]
        shared += [torch.randn(batch, keys, width, device="cuda").bfloat16()]
        leaves = [x.requires_grad_() for x in shared]
        queries = torch.randn(STEPS, batch, hidden, device="cuda").bfloat16().requires_grad_()
        for blocks in WAYS:
            times = kernel_times(queries, leaves, blocks)
            took = [
                next(v for k, v in times.items() if name in k)
                for name in ("_forward_kernel", "_backward_kernel")
            ]
            print(f"{(batch, keys, hidden, width)!s:24} {tuple(blocks)!s:38} {took[0]:7.1f}  {took[1]:8.1f}")


if __name__ == "__main__":
    main()
