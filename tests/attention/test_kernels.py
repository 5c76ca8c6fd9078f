"""The Triton kernels against float64 PyTorch: at most twice the error of plain PyTorch in the same precision.

The same tests run twice: on a GPU where there is one, and everywhere in Triton's interpreter. That has to be
chosen before Triton is imported, so `test_in_the_interpreter` starts this file again in a process of its own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
from jumok.attention.additive_steps import FusedAdditiveSteps  # noqa: E402
from jumok.attention.kernels.additive import fused_additive_scores  # noqa: E402
from jumok.attention.kernels.additive_step import (  # noqa: E402
    AdditiveStepBlockSizes,
    AdditiveStepLoop,
    choose_step_blocks,
    plan_launch,
)

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.gpu  # skipped where there is none
runs_kernels = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning") if INTERPRETED else pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# On a GPU nearly all of the time goes into compiling, once for each type, size and way to cut the work. So
# there the lists below have each of these with some of the others; the interpreter has the whole of them.

SMALL = AdditiveStepBlockSizes(columns_per_lane=1, keys_per_lane=1, num_warps=2)  # several tiles at prime sizes
Both = tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]  # forward, backward
WHOLE, SPLIT = (
    (SMALL._replace(target_programs=1),) * 2,
    (SMALL._replace(target_programs=7), SMALL._replace(target_programs=12)),
)
STAGED = (SPLIT[0]._replace(num_stages=3), SPLIT[1]._replace(num_stages=2))


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


def agree(ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype) -> None:
    slack = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    for at, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        size = truth.norm() + 1e-30
        error, allowed = (
            ((a.double() - truth).norm() / size).item(),
            ((b.double() - truth).norm() / size).item(),
        )
        assert error <= 2 * allowed + slack, f"result {at}: {error:.1e}, plain PyTorch {allowed:.1e}"


def with_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Outputs, then the gradients of Σ weight · output."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    torch.autograd.backward(outputs, [w.to(x.dtype) for x, w in zip(outputs, weights, strict=True)])
    return [*(x.detach() for x in outputs), *(x.grad for x in leaves if x.grad is not None)]


# --- many queries -------------------------------------------------------------------------------------------


def plain_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q[:, :, None] + k[:, None]) * v).sum(-1)


SCORED = [(dtype, size) for dtype in DTYPES for size in ((2, 5, 7, 11), (1, 19, 131, 37))]
if ON_GPU:
    SCORED = [
        (torch.float32, (1, 19, 131, 37)),
        (torch.float32, (1, 300, 64, 96)),
        (torch.float16, (2, 5, 7, 11)),
        (torch.float16, (3, 67, 257, 1000)),
        (torch.bfloat16, (1, 19, 131, 37)),
        (torch.bfloat16, (3, 67, 257, 1000)),
        (torch.bfloat16, (2, 1, 50, 512)),
    ]


@runs_kernels
@pytest.mark.parametrize("scale", [1, 30])  # 30: beyond what the paired reciprocals can take
@pytest.mark.parametrize(("dtype", "size"), SCORED)
def test_scores_and_gradients(dtype: torch.dtype, size: tuple[int, int, int, int], scale: float) -> None:
    torch.manual_seed(1)
    B, Q, K, H = size
    inputs = [random(B, Q, H, dtype=dtype, scale=scale), random(B, K, H, dtype=dtype), random(H, dtype=dtype)]
    grad = [random(B, Q, K)]
    ours = with_gradients(lambda *x: [fused_additive_scores(*x)], inputs, grad, dtype)
    plain = with_gradients(lambda *x: [plain_scores(*x)], inputs, grad, dtype)
    exact = with_gradients(lambda *x: [plain_scores(*x)], inputs, grad, torch.float64)
    assert ours[0].dtype == torch.float32
    agree(ours, plain, exact, dtype)


@runs_kernels
def test_scores_of_any_strides_and_a_float32_v() -> None:
    torch.manual_seed(2)
    q = random(11, 2, 5, dtype=torch.float16).permute(1, 2, 0)
    k = random(7, 2, 22, dtype=torch.float16).transpose(0, 1)[..., ::2]
    v = random(11)
    exact = plain_scores(q.double(), k.double(), v.double())
    torch.testing.assert_close(fused_additive_scores(q, k, v).double(), exact, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_only_the_gradients_that_are_asked_for() -> None:
    q, k, v = random(2, 3, 5), random(2, 7, 5), random(5)
    for some in ([0], [1], [2], [0, 2], [1, 2], [0, 1]):
        leaves = [x.clone().requires_grad_(at in some) for at, x in enumerate((q, k, v))]
        wanted = [leaves[at] for at in some]
        ours = torch.autograd.grad(fused_additive_scores(*leaves).sin().sum(), wanted)
        torch.testing.assert_close(ours, torch.autograd.grad(plain_scores(*leaves).sin().sum(), wanted))


@runs_kernels
@pytest.mark.parametrize("size", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)])
def test_scores_of_nothing(size: tuple[int, int, int, int]) -> None:
    B, Q, K, H = size
    leaves = [random(B, Q, H).requires_grad_(), random(B, K, H).requires_grad_(), random(H).requires_grad_()]
    scores = fused_additive_scores(*leaves)
    assert scores.shape == (B, Q, K)
    assert not scores.any()
    scores.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@runs_kernels
def test_second_derivatives_are_refused() -> None:
    q = random(2, 3, 5).requires_grad_()
    loop = AdditiveStepLoop(*(x.requires_grad_() for x in shared_inputs(torch.float32)))
    context = loop.compute_context(random(B, DQ))
    for output in (fused_additive_scores(q, random(2, 7, 5), random(5)), context):
        with pytest.raises(RuntimeError, match="differentiable once"):
            output.sum().backward(create_graph=True)


# --- steps --------------------------------------------------------------------------------------------------

B, K, H, DQ, DV, T = 3, 23, 11, 5, 13, 2


def shared_inputs(dtype: torch.dtype) -> list[Tensor]:
    """weight, keys, v, value"""
    return [random(*shape, dtype=dtype) for shape in ((H, DQ), (B, K, H), (H,), (B, K, DV))]


def plain_steps(
    weight: Tensor, keys: Tensor, v: Tensor, value: Tensor, *queries: Tensor, allowed: Tensor | None = None
) -> list[Tensor]:
    """The context of every step."""
    outputs = []
    for query in queries:
        score = (torch.tanh((query @ weight.T)[:, None] + keys) * v).sum(-1)
        score = score if score.dtype == torch.float64 else score.float()
        if allowed is not None:
            score = score.masked_fill(~allowed, -1e30)
        weights = score.softmax(-1)
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0)
        outputs.append((weights.to(value.dtype)[:, None] @ value)[:, 0])
    return outputs


def our_steps(*inputs: Tensor, allowed: Tensor | None = None, blocks: Both | None = SPLIT) -> list[Tensor]:
    loop = AdditiveStepLoop(*inputs[:4], blocks=blocks)
    return [loop.compute_context(query, allowed) for query in inputs[4:]]


STEPS = [(dtype, blocks, masked) for dtype in DTYPES for blocks in (WHOLE, SPLIT) for masked in (False, True)]
if ON_GPU:  # any two of them in every combination
    STEPS = [STEPS[at] for at in (0, 3, 5, 6, 8, 11)]


@runs_kernels
@pytest.mark.parametrize(("dtype", "blocks", "masked"), STEPS)
def test_steps_and_gradients(dtype: torch.dtype, blocks: Both, masked: bool) -> None:
    torch.manual_seed(3)
    inputs = shared_inputs(dtype) + [random(B, DQ, dtype=dtype) for _ in range(T)]
    grads = [random(B, DV) for _ in range(T)]
    allowed = None
    if masked:
        allowed = torch.rand(B, K, device=DEVICE) < 0.6
        allowed[1] = False  # a row with nothing to attend to
    ours = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=blocks), inputs, grads, dtype)
    plain = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, dtype)
    exact = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, torch.float64)
    assert ours[0].dtype == dtype
    agree(ours, plain, exact, dtype)
    if masked:
        contexts, (_, d_keys, _, d_value, *d_queries) = ours[:T], ours[T:]
        assert not any(x[1].any() for x in (*contexts, d_keys, d_value, *d_queries))


@runs_kernels
@pytest.mark.parametrize("blocks", [WHOLE, SPLIT])
def test_what_is_not_allowed_never_arrives(blocks: Both) -> None:
    torch.manual_seed(4)
    allowed = torch.rand(B, K, device=DEVICE) < 0.5
    allowed[2] = False
    inputs = [*shared_inputs(torch.float32), random(B, DQ)]
    grads = [random(B, DV)]
    clean = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=blocks), inputs, grads, torch.float32)
    for tensor in (inputs[1], inputs[3]):
        tensor[~allowed] = float("nan")
    dirty = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=blocks), inputs, grads, torch.float32)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)


def even_inputs(dtype: torch.dtype, v_scale: float = 1.0) -> list[Tensor]:
    """weight, keys, v, value, query: of even widths, so that two numbers of 16 bits are loaded as one."""
    shapes = ((12, DQ), (B, K, 12), (12,), (B, K, 22), (B, DQ))
    scales = (1.0, 1.0, v_scale, 1.0, 1.0)
    return [random(*shape, dtype=dtype, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]


PAIRS = [(dtype, blocks) for dtype in (torch.float16, torch.bfloat16) for blocks in (None, SPLIT, STAGED)]
if ON_GPU:
    PAIRS = [PAIRS[at] for at in (1, 2, 3, 5)]


@runs_kernels
@pytest.mark.parametrize(("dtype", "blocks"), PAIRS)
def test_pairs_of_numbers(dtype: torch.dtype, blocks: Both | None) -> None:
    torch.manual_seed(9)
    inputs, grads = even_inputs(dtype), [random(B, 22)]
    allowed = torch.rand(B, K, device=DEVICE) < 0.5
    allowed[1] = False
    for tensor in (inputs[1], inputs[3]):
        tensor[~allowed] = float("nan")
    clean = [x.nan_to_num() for x in inputs]
    ours = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=blocks), inputs, grads, dtype)
    plain = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), clean, grads, dtype)
    exact = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), clean, grads, torch.float64)
    agree(ours, plain, exact, dtype)


@runs_kernels
@pytest.mark.parametrize("blocks", [WHOLE, SPLIT])
def test_scores_whose_exponentials_leave_float32(blocks: Both) -> None:
    torch.manual_seed(10)
    inputs, grads = even_inputs(torch.float32, v_scale=100), [random(B, 22)]
    inputs[1][0] = -30.0  # a row whose scores are all far below zero, or all far above
    ours = with_gradients(lambda *x: our_steps(*x, blocks=blocks), inputs, grads, torch.float32)
    plain = with_gradients(plain_steps, inputs, grads, torch.float32)
    exact = with_gradients(plain_steps, inputs, grads, torch.float64)
    assert all(x.isfinite().all() for x in ours)
    agree(ours, plain, exact, torch.float32)


@runs_kernels
def test_backward_twice_in_part_and_for_the_query_only() -> None:
    torch.manual_seed(5)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), *(random(B, DQ) for _ in range(2)))]
    ours, plain = our_steps(*leaves), plain_steps(*leaves)

    def gradients(outputs: Sequence[Tensor], of: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.sin().sum() for x in outputs), of, retain_graph=True, allow_unused=True)

    close = {"rtol": 1e-4, "atol": 1e-5}
    for _ in range(2):
        torch.testing.assert_close(gradients(ours, leaves), gradients(plain, leaves), **close)
    torch.testing.assert_close(gradients(ours, leaves[4:]), gradients(plain, leaves[4:]), **close)  # queries only
    torch.testing.assert_close(gradients(ours[1:], leaves[:4]), gradients(plain[1:], leaves[:4]), **close)
    torch.testing.assert_close(gradients(ours[:1], leaves[:4]), gradients(plain[:1], leaves[:4]), **close)
    for some in ([0], [1], [2], [3]):
        of = [leaves[at] for at in some]
        torch.testing.assert_close(gradients(ours, of), gradients(plain, of), **close)


@runs_kernels
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_without_autograd_are_equal(dtype: torch.dtype, masked: bool) -> None:
    weight, keys, v, value = (x.requires_grad_() for x in shared_inputs(dtype))
    queries = [random(B, DQ, dtype=dtype).requires_grad_() for _ in range(T)]
    d_contexts = [random(B, DV, dtype=dtype) for _ in range(T)]
    allowed = torch.rand(B, K, device=DEVICE) < 0.6 if masked else None
    contexts = our_steps(weight, keys, v, value, *queries, allowed=allowed, blocks=None)
    expected = torch.autograd.grad(contexts, (*queries, keys, v, value), d_contexts)

    with torch.no_grad():
        forward_steps, backward_steps = (FusedAdditiveSteps(keys, v, value, allowed) for _ in range(2))
        results = [forward_steps.forward(query @ weight.t()) for query in queries]
        d_queries = [
            (backward_steps.backward(d_context, saved) @ weight)
            for d_context, (_, saved) in reversed(list(zip(d_contexts, results, strict=True)))
        ]
        shared_gradients = backward_steps.compute_shared_gradients()
    torch.testing.assert_close([context for context, _ in results], contexts)
    torch.testing.assert_close([*d_queries[::-1], *shared_gradients], [*expected])


@runs_kernels
def test_a_step_over_no_keys() -> None:
    leaves = [random(*shape).requires_grad_() for shape in ((H, DQ), (B, 0, H), (H,), (B, 0, DV), (B, DQ))]
    context = AdditiveStepLoop(*leaves[:4]).compute_context(leaves[4])
    assert context.shape == (B, DV)
    assert not context.any()
    context.sum().backward()
    assert leaves[4].grad is not None
    assert not leaves[4].grad.any()


@runs_kernels
def test_a_loop_that_feeds_back() -> None:
    torch.manual_seed(6)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), random(DV, DQ), random(B, DQ))]

    def loss(step: Callable[[Tensor], Tensor]) -> Tensor:
        query = leaves[5]
        for _ in range(3):
            query = torch.tanh(step(query) @ leaves[4])
        return query.sum()

    loop = AdditiveStepLoop(*leaves[:4], blocks=SPLIT)
    ours = torch.autograd.grad(loss(loop.compute_context), leaves)
    plain = torch.autograd.grad(loss(lambda query: plain_steps(*leaves[:4], query)[0]), leaves)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@runs_kernels
def test_nothing_is_kept() -> None:
    gc.disable()  # a cycle would be found out only by the collector: it must not be needed
    try:
        for way in ("no_grad", "dropped", "backward", "query"):
            leaves = [x.requires_grad_(way != "no_grad") for x in (*shared_inputs(torch.float32), random(B, DQ))]
            loop = AdditiveStepLoop(*leaves[:4], blocks=SPLIT)
            with torch.set_grad_enabled(way != "no_grad"):
                context = loop.compute_context(leaves[4])
                context = loop.compute_context(leaves[4] + context.sum())
            assert context.requires_grad == (way != "no_grad")
            if way == "backward":
                context.sum().backward()
            if way == "query":
                torch.autograd.grad(context.sum(), leaves[4])
            watched = [
                weakref.ref(loop),
                weakref.ref(loop.gradient_buffer),
                weakref.ref(context),
                weakref.ref(leaves[1]),
            ]
            del loop, context, leaves
            assert [ref() for ref in watched] == [None] * 4, way
    finally:
        gc.enable()


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, (80, 50, 1000, 600, 2000)),
        (torch.bfloat16, (80, 50, 1000, 600, 2000)),
        (torch.float32, (32, 400, 256, 256, 512)),
        (torch.bfloat16, (32, 400, 256, 256, 512)),
        (torch.float16, (1, 3001, 2048, 64, 40)),
    ],
)
def test_steps_at_real_sizes(dtype: torch.dtype, size: tuple[int, int, int, int, int]) -> None:
    torch.manual_seed(7)
    B, K, H, DQ, DV = size
    shapes = ((H, DQ), (B, K, H), (H,), (B, K, DV), (B, DQ), (B, DQ))
    scales = (DQ**-0.5, 1.0, 3 * H**-0.5, 1.0, 1.0, 1.0)
    inputs = [random(*shape, dtype=dtype, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]
    allowed = torch.arange(K, device=DEVICE) < torch.randint(K // 2, K, (B, 1), device=DEVICE)
    grads = [random(B, DV) for _ in range(2)]
    ours = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=None), inputs, grads, dtype)
    plain = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, dtype)
    exact = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, torch.float64)
    agree(ours, plain, exact, dtype)


@needs_gpu
def test_steps_in_a_cuda_graph() -> None:
    torch.manual_seed(8)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), random(B, DQ), random(B, DQ))]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.sin().sum() for x in our_steps(*leaves)), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.testing.assert_close(captured, run())


# --- through attend -----------------------------------------------------------------------------------------


@pytest.fixture
def stepping(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attend` takes the step kernel, in the interpreter too."""
    from jumok.attention.paths import additive_step

    if INTERPRETED:
        monkeypatch.setattr(additive_step, "triton_unsupported_reason", lambda x: None)


@runs_kernels
@pytest.mark.usefixtures("stepping")
def test_a_loop_follows_its_parameters() -> None:
    import jumok

    score = jumok.scores.Additive(3, 5, 7).to(DEVICE)
    query, value = random(2, 1, 3), random(2, 11, 5)
    keys, mask = score.prepare(value), jumok.masks.padding([4, 11])

    def both() -> tuple[Tensor, Tensor]:
        fast = jumok.attend(query, keys, value, score=score, mask=mask)
        return fast, jumok.mix(jumok.weights(query, keys, score=score, mask=mask), value)

    assert jumok.explain(query, keys, value, score=score, mask=mask).name == "additive-step"
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    score.v = torch.nn.Parameter(random(7))  # another parameter
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        score.v.mul_(3)  # the same one, changed
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    score.requires_grad_(False)
    assert not jumok.attend(
        query, keys.__class__(keys.keys.detach(), keys.score_name, score), value, score=score
    ).requires_grad
    score.requires_grad_()
    assert jumok.attend(query, keys, value, score=score).requires_grad


@runs_kernels
@pytest.mark.usefixtures("stepping")
def test_a_backward_a_step_and_a_checkpoint_a_step() -> None:
    from torch.utils.checkpoint import checkpoint

    import jumok

    score = jumok.scores.Additive(5, 5, 7).to(DEVICE)
    value = random(2, 11, 5)
    keys = score.prepare(value).keys.detach()
    frozen = jumok.scores.PreparedKeys(keys, "Additive", score)
    for _ in range(2):  # truncated: each step is a graph of its own
        jumok.attend(random(2, 1, 5), frozen, value, score=score).sum().backward()

    def run(again: bool) -> Tensor:
        h, prepared = torch.ones(2, 1, 5, device=DEVICE), score.prepare(value)
        for _ in range(2):
            step = lambda h: h + jumok.attend(h, prepared, value, score=score)  # noqa: E731
            h = checkpoint(step, h, use_reentrant=False) if again else step(h)
        return torch.autograd.grad(h.sum(), score.v)[0]

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-4)


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 50, 1000, 2000), (32, 400, 256, 256), (2, 3001, 37, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_key_and_column_has_its_place(dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    batch, many, hidden, width = size
    keys, value = (torch.empty(batch, many, w, dtype=dtype, device="meta") for w in (hidden, width))
    for blocks, part in zip(choose_step_blocks(batch, max(hidden, width)), (width, hidden), strict=True):
        found = plan_launch(blocks, keys, value, part)
        assert (found.num_splits - 1) * found.keys_per_split < many <= found.num_splits * found.keys_per_split
        assert found.num_splits <= min(found.constants["PARTS"], blocks.max_splits)
        assert hidden <= found.constants["HL"] * found.constants["WIDTH"]
        assert width <= found.constants["DL"] * found.constants["WIDTH"]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(("kind", "splits", "stages"), [("bf16", 1, 1), ("fp16", 8, 1), ("fp32", 8, 3)])
def test_the_step_kernels_compile_for_hopper(kernel: str, splits: int, stages: int, kind: str) -> None:
    """The interpreter lets pass what the compiler does not, and the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    from jumok.attention.kernels import additive_step_kernels
    from jumok.attention.kernels.common import launch_options

    function = getattr(additive_step_kernels, kernel)
    constants = {"UNIT": 8, "SPLITS": splits, "PARTS": splits, "EXACT": kind == "fp32", "MASKED": True}
    constants |= {"PRECISE": True, "ROWS": 16, "HL": 2, "DL": 1, "WIDTH": 128}
    constants |= {"PAIRS": kind != "fp32", "STAGES": stages, "PW": 128, "VECTOR": 1}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    given = ("q_ptr", "k_ptr", "v_ptr", "value_ptr", "context_ptr", "d_context_ptr", "dq_ptr")
    types = {name: f"*{kind}" if name in given else "*fp32" for name in function.arg_names if "_ptr" in name}
    types |= {"allowed_ptr": "*i1", "counter_ptr": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    source = triton.compiler.ASTSource(function, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch_options(4))
    assert "tanh.approx" in compiled.asm["ptx"] or kind == "fp32"


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
        __file__,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
