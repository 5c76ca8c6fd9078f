"""Speed of the kernels of short packed sequences on this GPU, compared with FlashAttention, and their block sizes.

    python bench/tune_short.py

For changes of `jumok.attention.kernels.short_sequences`. All times are milliseconds per call in a CUDA graph of many
calls, so without launches. The first table shows `attend` and all of `MultiHead`, the second one the kernels alone.
FlashAttention runs without dropout, also where ours has dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jumok import attend, masks
from jumok.attention import dispatch
from jumok.attention.heads import MultiHead
from jumok.attention.kernels import short_sequences
from jumok.attention.kernels.short_sequences import (
    ShortKernelBlockSizes,
    ShortKernelDropout,
    ShortSequenceLayout,
)

CALLS, ROUNDS = 10, 5


class Case(NamedTuple):
    name: str
    sequences: int
    shortest: int
    longest: int
    heads: int
    causal: bool = False
    cross: bool = False
    dropout: float = 0.0

    def draw_cu_seqlens(self) -> Tensor:
        lengths = torch.randint(self.shortest, self.longest + 1, (self.sequences,))
        lengths[0] = self.longest
        return torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().cuda()


CASES = [
    Case("400 of 8-64, 8×64, causal", 400, 8, 64, 8, causal=True),
    Case("400 of 8-64, 8×64, cross", 400, 8, 64, 8, cross=True),
    Case("400 of 8-40, 8×64, one of 128", 400, 8, 40, 8),
    Case("128 of 32-128, 12×64", 128, 32, 128, 12),
    Case("128 of 32-128, 12×64, dropout", 128, 32, 128, 12, dropout=0.1),
]
WIDTH = 64


def measure(call: Callable[[], Any]) -> float:
    """Return the least milliseconds of a call of a few rounds."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # the first calls compile
        call()
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / CALLS)
    return min(times)


def build_packing(case: Case) -> tuple[ShortSequenceLayout, masks.Mask]:
    keys = case.draw_cu_seqlens()
    queries = case.draw_cu_seqlens() if case.cross else keys
    longest = 128 if "one of 128" in case.name else case.longest  # the longest sequence slows down the others
    mask = masks.packed(keys, longest, **({"queries": queries, "longest_query": longest} if case.cross else {}))
    packing = ShortSequenceLayout(queries, keys, longest, longest, case.causal)
    return packing, mask & masks.causal() if case.causal else mask


def compare_with_flash(case: Case) -> None:
    packing, mask = build_packing(case)
    length, num_keys = (int(edges[-1]) for edges in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    width = case.heads * WIDTH
    parts = torch.randn(1, num_keys, 3, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 3).unbind(2)
    query = torch.randn(1, length, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 2)
    leaves = [x.requires_grad_() for x in ((query if case.cross else parts[0]), *parts[1:])]
    grad = torch.randn(1, length, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 2)
    module = MultiHead(width, case.heads, key_width=width if case.cross else None).cuda().bfloat16()
    x, source = (torch.randn(1, n, width, device="cuda").bfloat16().requires_grad_() for n in (length, num_keys))
    inputs = [x, source] if case.cross else [x]

    def forward_backward() -> None:
        torch.autograd.grad(attend(*leaves, mask=mask, dropout=module.dropout), leaves, grad)

    def multi_head() -> None:
        out = module(*inputs, mask=mask)
        torch.autograd.grad(out, [*inputs, *module.parameters()], torch.ones_like(out))

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves, mask=mask, dropout=module.dropout)

    paths, times = dispatch.PATHS, {}
    for name in ("packed-short", "varlen"):
        dispatch.PATHS = tuple(path for path in paths if path.name == name)  # type: ignore[misc]
        module.dropout = case.dropout if name == "packed-short" else 0.0
        times[name] = [measure(call) for call in (forward, forward_backward, multi_head)]
    dispatch.PATHS = paths  # type: ignore[misc]
    ours, flash = times.values()
    cells = "  ".join(f"{a:6.3f} {b:6.3f} {b / a:4.1f}×" for a, b in zip(ours, flash, strict=True))
    print(f"{case.name:32} {cells}", flush=True)


def list_forward_blocks(blocks: ShortKernelBlockSizes) -> list[ShortKernelBlockSizes]:
    largest = max(blocks.queries, blocks.keys)
    return [blocks, blocks._replace(max_registers=168), blocks._replace(min_tile_side=largest)]


def list_backward_blocks(launches: tuple[ShortKernelBlockSizes, ...]) -> list[tuple[ShortKernelBlockSizes, ...]]:
    *shorter, last = launches
    changes = [{"max_registers": 96}, {"max_registers": 168}, {"num_warps": 8}]
    single = []
    if shorter:
        changes = [{"max_registers": 128}]
        blocks = last._replace(min_tile_side=32, longer_than=0)  # all sequences in one launch
        single = [(blocks,), (blocks._replace(max_registers=128),)]
    return [launches, *((*shorter, last._replace(**change)) for change in changes), *single]


def tune_blocks(case: Case) -> None:
    packing, _ = build_packing(case)
    sizes = [
        int(edges[-1])
        for edges in (packing.cu_seqlens_q, packing.cu_seqlens_k, packing.cu_seqlens_k, packing.cu_seqlens_q)
    ]
    q, k, v, grad = (torch.randn(n, case.heads, WIDTH, device="cuda").bfloat16() for n in sizes)
    longest = packing.max_seqlen_q, packing.max_seqlen_k
    dropout = ShortKernelDropout.from_probability(case.dropout, q.device)

    def forward(blocks: ShortKernelBlockSizes) -> None:
        short_sequences.compute_short_forward(q, k, v, packing, 0.125, dropout, blocks)

    def backward(launches: tuple[ShortKernelBlockSizes, ...]) -> None:
        short_sequences.compute_short_backward(q, k, v, grad, packing, 0.125, dropout, launches)

    for blocks in list_forward_blocks(short_sequences.choose_forward_blocks(*longest, WIDTH)):
        ms = measure(lambda blocks=blocks: forward(blocks))
        print(f"{case.name:32} forward  {tuple(blocks)!s:24} {ms:6.3f}", flush=True)
    for launches in list_backward_blocks(short_sequences.choose_backward_blocks(*longest, WIDTH)):
        ms = measure(lambda launches=launches: backward(launches))
        text = " and ".join(str(tuple(blocks)) for blocks in launches)
        print(f"{case.name:32} backward {text:24} {ms:6.3f}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_short.py needs a CUDA GPU")
    torch.manual_seed(0)
    print(f"{'ours, FlashAttention, ms':32} {'forward':21} {'forward and backward':21} MultiHead, both passes")
    for case in CASES:
        compare_with_flash(case)
    print(f"\n{'':41} {'queries keys warps registers min_tile longer_than':24}  ms")
    for case in (CASES[0], *CASES[2:]):
        tune_blocks(case)


if __name__ == "__main__":
    main()
