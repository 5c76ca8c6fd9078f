"""Kernels that start before the one in front of them has ended read and write nothing too early."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the kernels need Triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402

from jumok.attention.kernels import products, step  # noqa: E402
from jumok.attention.kernels.additive import launched  # noqa: E402
from jumok.attention.kernels.chain import can_chain, linked  # noqa: E402
from jumok.attention.kernels.step import Shared  # noqa: E402

STEPS, REPEATS = 50, 200
OLD = {"k_ptr", "v_ptr", "value_ptr"}  # what the steps of a loop share


# --- what the compiler made of it, without a GPU ------------------------------------------------------------


def compiled_for_hopper(function, kind: str, **constants: object):
    from triton.backends.compiler import GPUTarget

    usual = {"UNIT": 8, "SPLITS": 8, "LANES": 8, "EXACT": kind == "fp32", "MASKED": True, "PRECISE": True}
    usual |= {"WITH_D_WEIGHTS": True, "HL": 2, "HW": 256, "DL": 1, "DW": 128, "CW": 512, "PW": 256}
    usual |= {"ROWS": 16, "COLUMNS": 16, "DEPTH": 64}
    how = launched(1) | linked(True)
    constants = {
        name: value for name, value in (usual | constants | how).items() if name in function.arg_names
    }
    options = {name: value for name, value in how.items() if name not in function.arg_names}
    types = {name: "*fp32" for name in function.arg_names if name.endswith("_ptr")}
    given = ("q", "k", "v", "value", "context", "d_context", "dq", "left", "weight", "out")
    types |= {f"{name}_ptr": f"*{kind}" for name in given} | {"allowed_ptr": "*i1", "counter_ptr": "*i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names
    }
    source = triton.compiler.ASTSource(function, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], [name for name in function.arg_names if name not in constants]


def pointers_read(ptx: str, names: list[str]) -> set[str]:
    """The parameters that a piece of straight code loads from, found by following its registers."""
    held: dict[str, set[str]] = {}  # register → the pointers in what it holds
    read: set[str] = set()
    for line in ptx.splitlines():
        line = line.split("//")[0].strip()
        registers = re.findall(r"%\w+", line)
        if (parameter := re.match(r"ld\.param\.\w+\s+(%\w+), \[\w+_param_(\d+)\]", line)) is not None:
            name = names[int(parameter[2])] if int(parameter[2]) < len(names) else "scratch"
            held[parameter[1]] = {name} if name.endswith("_ptr") or name == "scratch" else set()
        elif re.search(r"\bld\.", line):
            address = re.findall(r"%\w+", line[line.index("[") :])
            assert all(held.get(register) for register in address), f"from where does this load? {line}"
            read |= set().union(*(held[register] for register in address))
        elif registers:
            held[registers[0]] = set().union(*(held.get(register, set()) for register in registers[1:]))
    return read


@pytest.mark.skipif(not hasattr(tl.extra.cuda, "gdc_wait"), reason="this Triton has no chains")
@pytest.mark.parametrize(
    ("function", "kind", "constants", "may_read"),
    [
        (step._forward_kernel, "bf16", {"ROWS": 2, "EARLY": True}, OLD),
        (step._forward_kernel, "bf16", {"ROWS": 2, "EARLY": True, "SPLITS": 1}, OLD),
        (step._forward_kernel, "fp32", {"ROWS": 2, "EARLY": False}, set()),
        (step._backward_kernel, "bf16", {"ROWS": 2}, OLD),
        (step._backward_kernel, "fp32", {"ROWS": 2}, OLD),
        (products._product_kernel, "bf16", {"TRANSPOSED": True}, set()),
        (products._product_kernel, "fp16", {"TRANSPOSED": False}, set()),
    ],
)
def test_nothing_new_is_read_and_nothing_written_before_the_wait(
    function, kind: str, constants: dict[str, object], may_read: set[str]
) -> None:
    ptx, names = compiled_for_hopper(function, kind, **constants)
    ptx = ptx[ptx.index(".entry") :]
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == 1
    before, after = ptx.split("griddepcontrol.wait")  # each program gets there: no way leads around it
    assert not re.search(r"\b(st|atom|red|cp|bra|ret|exit|call)\b", re.sub(r"//.*|\.loc.*", "", before))
    assert pointers_read(before[before.index("{") :], names) == may_read
    assert "griddepcontrol.launch_dependents" in after


def test_cpus_have_no_chain() -> None:
    assert not can_chain(torch.device("cpu"))
    weight, keys, v, value = torch.ones(3, 2), torch.ones(5, 7, 3), torch.ones(3), torch.ones(5, 7, 11)
    assert not Shared(weight, keys, v, value).chained


# --- on a GPU -----------------------------------------------------------------------------------------------

needs_chain = pytest.mark.skipif(
    not (torch.cuda.is_available() and can_chain(torch.device("cuda"))), reason="needs Hopper or later"
)


class Decoder:
    """A loop of steps; with a GRU cell between them kernels of others stand between ours, else none."""

    def __init__(self, size: tuple[int, int, int, int, int], dtype: torch.dtype, cell: bool = True) -> None:
        B, K, H, DQ, DV = size
        shapes = ((H, DQ), (B, K, H), (H,), (B, K, DV), (STEPS, B, DQ))
        self.cell = torch.nn.GRUCell(DV, DQ).to("cuda", dtype) if cell else None
        self.leaves = [torch.zeros(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
        self.allowed = torch.arange(K, device="cuda") < torch.randint(K // 2, K, (B, 1), device="cuda")
        self.refill()

    @torch.no_grad()
    def refill(self) -> None:
        for leaf in self.leaves:
            leaf.normal_().mul_(1.0 if leaf.dim() == 3 else leaf.shape[-1] ** -0.5)

    def run(self, chained: bool, own_products: bool | None = None) -> list[Tensor]:
        """Contexts, weights and all gradients. The keys are made by a kernel right before the first step."""
        weight, keys, v, value, queries = self.leaves
        loop = Shared(weight, keys * 1.5, v * 1.5, value * 0.5, chained=chained)
        if own_products is not None:
            loop.own_products = own_products
        kept: list[tuple[Tensor, Tensor]] = []
        for query in queries.unbind():
            if self.cell is not None and kept:
                query = self.cell(kept[-1][0], query)
            kept.append(loop.step(query, self.allowed))
        contexts, weights = (torch.stack(same) for same in zip(*kept, strict=True))
        leaves = [*self.leaves, *(() if self.cell is None else self.cell.parameters())]
        gradients = torch.autograd.grad(contexts.float().square().sum() + weights.square().sum(), leaves)
        return [contexts.detach(), weights.detach(), *gradients]


def captured(run) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = run()
    return graph, written


SIZES = [(32, 400, 256, 256, 256), (80, 50, 1000, 600, 200), (3, 29, 41, 37, 13)]


@pytest.mark.gpu
@needs_chain
@pytest.mark.parametrize("cell", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", SIZES)
def test_a_chain_gives_the_same_bits_every_time(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, cell: bool
) -> None:
    """Against the same kernels one after the other; new numbers each time, so that what is old is wrong."""
    torch.manual_seed(0)
    decoder, half = Decoder(size, dtype, cell), dtype != torch.float32
    chain, ours = captured(lambda: decoder.run(True))
    one_by_one, expected = captured(lambda: decoder.run(False, own_products=half))
    wrong = torch.zeros(len(ours), device="cuda", dtype=torch.int64)
    for _ in range(REPEATS):
        decoder.refill()
        chain.replay()
        one_by_one.replay()
        wrong += torch.stack([(a != b).any() for a, b in zip(ours, expected, strict=True)])
    assert all(x.isfinite().all() for x in ours)
    assert wrong.tolist() == [0] * len(ours)


@pytest.mark.gpu
@needs_chain
def test_a_chain_without_a_graph_and_against_cublas() -> None:
    torch.manual_seed(1)
    decoder = Decoder(SIZES[0], torch.bfloat16)
    for _ in range(20):
        decoder.refill()
        chained, one_by_one = decoder.run(True), decoder.run(False, own_products=True)
        assert all(torch.equal(a, b) for a, b in zip(chained, one_by_one, strict=True))
    plain = decoder.run(False)
    for a, b in zip(chained, plain, strict=True):
        assert (a.float() - b.float()).norm() <= 0.1 * b.float().norm()


@pytest.mark.gpu
@needs_chain
def test_a_chain_under_autocast() -> None:
    torch.manual_seed(2)
    decoder = Decoder(SIZES[2], torch.bfloat16)
    query = torch.randn_like(decoder.leaves[4][0], dtype=torch.float32).requires_grad_()

    def run(chained: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            context, _ = Shared(*decoder.leaves[:4], chained=chained).step(query)
        return context, torch.autograd.grad(context.float().square().sum(), query)[0]

    for a, b in zip(run(True), run(False), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)
