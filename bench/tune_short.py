"""Short packed sequences on this GPU: our kernels beside FlashAttention, and which blocks serve them best.

    python bench/tune_short.py

For whoever changes `jumok.attention.kernels.short_sequences`. All times are milliseconds a call, in a CUDA
graph of many calls, so without launches. The first table is `attend` and the whole of `MultiHead`, the second
the kernels alone. FlashAttention has no dropout here: beside ours with dropout it runs without.
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

    def edges(self) -> Tensor:
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


def milliseconds(call: Callable[[], Any]) -> float:
    """The best of a few rounds."""
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


def made(case: Case) -> tuple[ShortSequenceLayout, masks.Mask]:
    keys = case.edges()
    queries = case.edges() if case.cross else keys
    longest = 128 if "one of 128" in case.name else case.longest  # what the longest sequence costs the others
    mask = masks.packed(keys, longest, **({"queries": queries, "longest_query": longest} if case.cross else {}))
    packing = ShortSequenceLayout(queries, keys, longest, longest, case.causal)
    return packing, mask & masks.causal() if case.causal else mask


def beside_flash(case: Case) -> None:
    packing, mask = made(case)
    length, asked = (int(edges[-1]) for edges in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    width = case.heads * WIDTH
    parts = torch.randn(1, asked, 3, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 3).unbind(2)
    query = torch.randn(1, length, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 2)
    leaves = [x.requires_grad_() for x in ((query if case.cross else parts[0]), *parts[1:])]
    grad = torch.randn(1, length, case.heads, WIDTH, device="cuda").bfloat16().transpose(1, 2)
    module = MultiHead(width, case.heads, key_width=width if case.cross else None).cuda().bfloat16()
    x, source = (torch.randn(1, n, width, device="cuda").bfloat16().requires_grad_() for n in (length, asked))
    inputs = [x, source] if case.cross else [x]

    def both() -> None:
        torch.autograd.grad(attend(*leaves, mask=mask, dropout=module.dropout), leaves, grad)

    def whole() -> None:
        out = module(*inputs, mask=mask)
        torch.autograd.grad(out, [*inputs, *module.parameters()], torch.ones_like(out))

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves, mask=mask, dropout=module.dropout)

    every, took = dispatch.PATHS, {}
    for name in ("packed-short", "varlen"):
        dispatch.PATHS = tuple(path for path in every if path.name == name)  # type: ignore[misc]
        module.dropout = case.dropout if name == "packed-short" else 0.0
        took[name] = [milliseconds(call) for call in (forward, both, whole)]
    dispatch.PATHS = every  # type: ignore[misc]
    ours, flash = took.values()
    listed = "  ".join(f"{a:6.3f} {b:6.3f} {b / a:4.1f}×" for a, b in zip(ours, flash, strict=True))
    print(f"{case.name:32} {listed}", flush=True)


def forward_ways(blocks: ShortKernelBlockSizes) -> list[ShortKernelBlockSizes]:
    largest = max(blocks.queries, blocks.keys)
    return [blocks, blocks._replace(max_registers=168), blocks._replace(min_tile_side=largest)]


def backward_ways(launches: tuple[ShortKernelBlockSizes, ...]) -> list[tuple[ShortKernelBlockSizes, ...]]:
    *shorter, last = launches
    others = [{"registers": 96}, {"registers": 168}, {"warps": 8}]
    together = []
    if shorter:
        others = [{"registers": 128}]
        once = last._replace(min_tile_side=32, longer_than=0)  # all sequences in one launch
        together = [(once,), (once._replace(max_registers=128),)]
    return [launches, *((*shorter, last._replace(**other)) for other in others), *together]


def blocks_of(case: Case) -> None:
    packing, _ = made(case)
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

    for blocks in forward_ways(short_sequences.choose_forward_blocks(*longest, WIDTH)):
        took = milliseconds(lambda blocks=blocks: forward(blocks))
        print(f"{case.name:32} forward  {tuple(blocks)!s:24} {took:6.3f}", flush=True)
    for launches in backward_ways(short_sequences.choose_backward_blocks(*longest, WIDTH)):
        took = milliseconds(lambda launches=launches: backward(launches))
        listed = " and ".join(str(tuple(blocks)) for blocks in launches)
        print(f"{case.name:32} backward {listed:24} {took:6.3f}", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench/tune_short.py measures kernels on a CUDA GPU, and there is none")
    torch.manual_seed(0)
    print(f"{'ours, FlashAttention, ms':32} {'forward':21} {'forward and backward':21} MultiHead, both")
    for case in CASES:
        beside_flash(case)
    print(f"\n{'':41} {'queries keys warps registers least above':24}  ms")
    for case in (CASES[0], *CASES[2:]):
        blocks_of(case)


if __name__ == "__main__":
    main()
