"""The Triton kernels of additive attention against float64: at most twice the error of plain PyTorch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Module

pytest.importorskip("triton", reason="the kernels need Triton")

from triton_testing import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    assert_as_accurate,
    compile_for_hopper,
    compiles_kernels,
    record_cuda_graph,
    runs_kernels,
)

from jumok.attention.additive_steps import FusedAdditiveSteps
from jumok.attention.kernels import additive_step_kernels
from jumok.attention.kernels.additive import fused_additive_scores
from jumok.attention.kernels.additive_step import (
    AdditiveStepBlockSizes,
    AdditiveStepLoop,
    choose_step_blocks,
    plan_launch,
)
from jumok.attention.kernels.common import launch_options

pytestmark = pytest.mark.long


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# On a GPU nearly all of the time goes into compiling, once for each dtype, size and block sizes. So the lists
# below have each value with some of the others.

SMALL = AdditiveStepBlockSizes(columns_per_lane=1, keys_per_lane=1, num_warps=2)  # several tiles at prime sizes
ForwardAndBackward = tuple[AdditiveStepBlockSizes, AdditiveStepBlockSizes]
WHOLE, SPLIT = (
    (SMALL._replace(target_programs=1),) * 2,
    (SMALL._replace(target_programs=7), SMALL._replace(target_programs=12)),
)
STAGED = (SPLIT[0]._replace(num_stages=3), SPLIT[1]._replace(num_stages=2))


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(DEVICE)


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


SCORES = [(torch.float32, (1, 19, 131, 37)), (torch.float16, (2, 5, 7, 11)), (torch.bfloat16, (1, 5, 67, 37))]
if ON_GPU:
    SCORES += [
        (torch.float32, (1, 300, 64, 96)),
        (torch.float16, (3, 67, 257, 1000)),
        (torch.bfloat16, (3, 67, 257, 1000)),
        (torch.bfloat16, (2, 1, 50, 512)),
    ]


@runs_kernels
@pytest.mark.parametrize("scale", [1, 30])  # 30: out of the range of the paired reciprocals
@pytest.mark.parametrize(("dtype", "size"), SCORES)
def test_scores_and_gradients(dtype: torch.dtype, size: tuple[int, int, int, int], scale: float) -> None:
    torch.manual_seed(1)
    B, Q, K, H = size
    inputs = [random(B, Q, H, dtype=dtype, scale=scale), random(B, K, H, dtype=dtype), random(H, dtype=dtype)]
    grad = [random(B, Q, K)]
    ours = with_gradients(lambda *x: [fused_additive_scores(*x)], inputs, grad, dtype)
    plain = with_gradients(lambda *x: [plain_scores(*x)], inputs, grad, dtype)
    exact = with_gradients(lambda *x: [plain_scores(*x)], inputs, grad, torch.float64)
    assert ours[0].dtype == torch.float32
    assert_as_accurate(ours, exact, plain, dtype=dtype)


@runs_kernels
def test_scores_of_strided_inputs_and_a_float32_v() -> None:
    torch.manual_seed(2)
    q = random(11, 2, 5, dtype=torch.float16).permute(1, 2, 0)
    k = random(7, 2, 22, dtype=torch.float16).transpose(0, 1)[..., ::2]
    v = random(11)
    exact = plain_scores(q.double(), k.double(), v.double())
    torch.testing.assert_close(fused_additive_scores(q, k, v).double(), exact, rtol=1e-4, atol=1e-4)


@runs_kernels
def test_only_requested_gradients() -> None:
    q, k, v = random(2, 3, 5), random(2, 7, 5), random(5)
    for indices in ([0], [1], [2], [0, 2], [1, 2], [0, 1]):
        leaves = [x.clone().requires_grad_(index in indices) for index, x in enumerate((q, k, v))]
        wanted = [leaves[index] for index in indices]
        ours = torch.autograd.grad(fused_additive_scores(*leaves).sin().sum(), wanted)
        torch.testing.assert_close(ours, torch.autograd.grad(plain_scores(*leaves).sin().sum(), wanted))


@runs_kernels
@pytest.mark.parametrize("size", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)])
def test_scores_of_empty_inputs(size: tuple[int, int, int, int]) -> None:
    B, Q, K, H = size
    leaves = [random(B, Q, H).requires_grad_(), random(B, K, H).requires_grad_(), random(H).requires_grad_()]
    scores = fused_additive_scores(*leaves)
    assert scores.shape == (B, Q, K)
    assert not scores.any()
    scores.sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


@runs_kernels
def test_second_derivatives_raise() -> None:
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


def our_steps(
    *inputs: Tensor, allowed: Tensor | None = None, blocks: ForwardAndBackward | None = SPLIT
) -> list[Tensor]:
    loop = AdditiveStepLoop(*inputs[:4], blocks=blocks)
    return [loop.compute_context(query, allowed) for query in inputs[4:]]


# Any two of dtype, block sizes and mask in every combination.
STEPS = [
    (torch.float32, WHOLE, False),
    (torch.float32, SPLIT, True),
    (torch.float16, WHOLE, True),
    (torch.float16, SPLIT, False),
    (torch.bfloat16, WHOLE, False),
    (torch.bfloat16, SPLIT, True),
]


@runs_kernels
@pytest.mark.parametrize(("dtype", "blocks", "masked"), STEPS)
def test_steps_and_gradients(dtype: torch.dtype, blocks: ForwardAndBackward, masked: bool) -> None:
    torch.manual_seed(3)
    inputs = shared_inputs(dtype) + [random(B, DQ, dtype=dtype) for _ in range(T)]
    grads = [random(B, DV) for _ in range(T)]
    allowed = None
    if masked:
        allowed = torch.rand(B, K, device=DEVICE) < 0.6
        allowed[1] = False  # a row without any key
    ours = with_gradients(lambda *x: our_steps(*x, allowed=allowed, blocks=blocks), inputs, grads, dtype)
    plain = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, dtype)
    exact = with_gradients(lambda *x: plain_steps(*x, allowed=allowed), inputs, grads, torch.float64)
    assert ours[0].dtype == dtype
    assert_as_accurate(ours, exact, plain, dtype=dtype)
    if masked:
        contexts, (_, d_keys, _, d_value, *d_queries) = ours[:T], ours[T:]
        assert not any(x[1].any() for x in (*contexts, d_keys, d_value, *d_queries))


@runs_kernels
@pytest.mark.parametrize("blocks", [WHOLE, SPLIT])
def test_masked_keys_and_values_may_be_nan(blocks: ForwardAndBackward) -> None:
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
    """weight, keys, v, value, query: of even widths, so that two 16-bit numbers are loaded at once."""
    shapes = ((12, DQ), (B, K, 12), (12,), (B, K, 22), (B, DQ))
    scales = (1.0, 1.0, v_scale, 1.0, 1.0)
    return [random(*shape, dtype=dtype, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]


PAIRS = [
    (torch.float16, SPLIT),
    (torch.float16, STAGED),
    (torch.bfloat16, None),
    (torch.bfloat16, STAGED),
]


@runs_kernels
@pytest.mark.parametrize(("dtype", "blocks"), PAIRS)
def test_steps_that_load_pairs(dtype: torch.dtype, blocks: ForwardAndBackward | None) -> None:
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
    assert_as_accurate(ours, exact, plain, dtype=dtype)


@runs_kernels
@pytest.mark.parametrize("blocks", [WHOLE, SPLIT])
def test_scores_whose_exponentials_overflow(blocks: ForwardAndBackward) -> None:
    torch.manual_seed(10)
    inputs, grads = even_inputs(torch.float32, v_scale=100), [random(B, 22)]
    inputs[1][0] = -30.0  # scores far below zero, or far above
    ours = with_gradients(lambda *x: our_steps(*x, blocks=blocks), inputs, grads, torch.float32)
    plain = with_gradients(plain_steps, inputs, grads, torch.float32)
    exact = with_gradients(plain_steps, inputs, grads, torch.float64)
    assert all(x.isfinite().all() for x in ours)
    assert_as_accurate(ours, exact, plain, dtype=torch.float32)


@runs_kernels
def test_backward_twice_and_for_some_steps_or_inputs() -> None:
    torch.manual_seed(5)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), *(random(B, DQ) for _ in range(2)))]
    ours, plain = our_steps(*leaves, blocks=WHOLE), plain_steps(*leaves)

    def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.sin().sum() for x in outputs), inputs, retain_graph=True, allow_unused=True)

    close = {"rtol": 1e-4, "atol": 1e-5}
    for _ in range(2):
        torch.testing.assert_close(gradients(ours, leaves), gradients(plain, leaves), **close)
    torch.testing.assert_close(gradients(ours, leaves[4:]), gradients(plain, leaves[4:]), **close)  # queries only
    torch.testing.assert_close(gradients(ours[1:], leaves[:4]), gradients(plain[1:], leaves[:4]), **close)
    torch.testing.assert_close(gradients(ours[:1], leaves[:4]), gradients(plain[:1], leaves[:4]), **close)
    for leaf in leaves[:4]:
        torch.testing.assert_close(gradients(ours, [leaf]), gradients(plain, [leaf]), **close)


@runs_kernels
@pytest.mark.parametrize(("dtype", "masked"), [(DTYPES[0], True), (DTYPES[1], False), (DTYPES[2], True)])
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
def test_a_step_over_zero_keys() -> None:
    leaves = [random(*shape).requires_grad_() for shape in ((H, DQ), (B, 0, H), (H,), (B, 0, DV), (B, DQ))]
    context = AdditiveStepLoop(*leaves[:4]).compute_context(leaves[4])
    assert context.shape == (B, DV)
    assert not context.any()
    context.sum().backward()
    assert leaves[4].grad is not None
    assert not leaves[4].grad.any()


@runs_kernels
def test_contexts_may_feed_the_next_query() -> None:
    torch.manual_seed(6)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), random(DV, DQ), random(B, DQ))]

    def loss(step: Callable[[Tensor], Tensor]) -> Tensor:
        query = leaves[5]
        for _ in range(3):
            query = torch.tanh(step(query) @ leaves[4])
        return query.sum()

    loop = AdditiveStepLoop(*leaves[:4], blocks=WHOLE)
    ours = torch.autograd.grad(loss(loop.compute_context), leaves)
    plain = torch.autograd.grad(loss(lambda query: plain_steps(*leaves[:4], query)[0]), leaves)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("use", ["no_grad", "no backward", "backward", "query gradient"])
def test_buffers_are_freed_without_garbage_collection(use: str) -> None:
    gc.disable()
    try:
        leaves = [x.requires_grad_(use != "no_grad") for x in (*shared_inputs(torch.float32), random(B, DQ))]
        loop = AdditiveStepLoop(*leaves[:4], blocks=WHOLE)
        with torch.set_grad_enabled(use != "no_grad"):
            context = loop.compute_context(leaves[4])
            context = loop.compute_context(leaves[4] + context.sum())
        assert context.requires_grad == (use != "no_grad")
        if use == "backward":
            context.sum().backward()
        if use == "query gradient":
            torch.autograd.grad(context.sum(), leaves[4])
        references = [weakref.ref(x) for x in (loop, loop.gradient_buffer, context, leaves[1])]
        del loop, context, leaves
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.gpu
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
    assert_as_accurate(ours, exact, plain, dtype=dtype)


@pytest.mark.gpu
def test_steps_in_a_cuda_graph() -> None:
    torch.manual_seed(8)
    leaves = [x.requires_grad_() for x in (*shared_inputs(torch.float32), random(B, DQ), random(B, DQ))]

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.sin().sum() for x in our_steps(*leaves)), leaves)

    graph, captured = record_cuda_graph(run)
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.testing.assert_close(captured, run())


# --- through attend -----------------------------------------------------------------------------------------


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attend` uses the kernels in the interpreter too."""
    from jumok.attention.paths import additive

    if INTERPRETED:
        monkeypatch.setattr(additive, "triton_unsupported_reason", lambda x: None)


def plain_attention(
    score: Module, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, prepared: bool
) -> Tensor:
    q, k = query @ score.query_weight.T, key if prepared else key @ score.key_weight.T
    scores = (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) * score.v).sum(-1)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).to(value.dtype) @ value


ATTENTION = [
    ("Additive", torch.float32, "none", (2,), False),
    ("Additive", torch.bfloat16, "padding", (3,), False),
    ("Concat", torch.float16, "none", (3,), False),
    ("Additive", torch.float32, "padding", (3,), True),
    ("Additive", torch.float32, "causal", (2, 2), False),
    ("Concat", torch.float32, "none", (), True),
]


@runs_kernels
@pytest.mark.usefixtures("use_kernels")
@pytest.mark.parametrize(("name", "dtype", "masking", "leading", "prepared"), ATTENTION)
def test_attention_of_many_queries(
    name: str, dtype: torch.dtype, masking: str, leading: tuple[int, ...], prepared: bool
) -> None:
    import jumok

    torch.manual_seed(11)
    score = getattr(jumok.scores, name)(3, 5, 7).to(DEVICE, dtype)
    key_width = 7 if prepared else 5
    inputs = [random(*leading, n, width, dtype=dtype) for n, width in ((4, 3), (9, key_width), (9, 6))]
    mask = allowed = None
    if masking == "padding":
        mask, allowed = jumok.masks.padding([9, 4, 1]), torch.arange(9) < torch.tensor([9, 4, 1])[:, None, None]
    elif masking == "causal":
        mask, allowed = jumok.masks.causal(), torch.ones(4, 9).tril(5).bool()
    allowed = None if allowed is None else allowed.to(DEVICE)
    grad = [random(*leading, 4, 6)]

    def ours(query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> list[Tensor]:
        keys = jumok.scores.PreparedKeys(key, name, score) if prepared else key
        assert jumok.explain(query, keys, value, score=score, mask=mask).name == "additive"
        return [jumok.attend(query, keys, value, score=score, mask=mask)]

    def results(function: Callable[..., list[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        score.to(dtype).zero_grad()
        found = with_gradients(function, inputs, grad, dtype)
        parameters = [x.grad.clone() for x in score.parameters() if x.grad is not None]
        return [*found, *parameters]

    def plain(*inputs: Tensor) -> list[Tensor]:
        return [plain_attention(score, *inputs, allowed, prepared)]

    fast = results(ours, dtype)
    assert [x.dtype for x in fast] == [dtype] * len(fast)
    assert_as_accurate(fast, results(plain, torch.float64), results(plain, dtype), dtype=dtype)
    if masking == "padding":  # hidden keys and values may be anything
        for x in inputs[1:]:
            x.masked_fill_(~allowed[:, 0, :, None], torch.nan)
        torch.testing.assert_close(results(ours, dtype)[0], fast[0], rtol=0, atol=0)


@runs_kernels
@pytest.mark.usefixtures("use_kernels")
def test_attention_of_many_queries_computes_only_requested_gradients() -> None:
    import jumok

    torch.manual_seed(12)
    score = jumok.scores.Additive(3, 5, 7).to(DEVICE)
    leaves = [x.requires_grad_() for x in (random(2, 4, 3), random(2, 9, 5), random(2, 9, 6))]
    everything = [*leaves, *score.parameters()]
    expected = torch.autograd.grad(jumok.attend(*leaves, score=score).sin().sum(), everything)
    for wanted in everything:
        for x in everything:
            x.requires_grad_(x is wanted)
        (gradient,) = torch.autograd.grad(jumok.attend(*leaves, score=score).sin().sum(), [wanted])
        torch.testing.assert_close(gradient, expected[[x is wanted for x in everything].index(True)])


@runs_kernels
@pytest.mark.usefixtures("use_kernels")
def test_a_loop_uses_the_current_parameters() -> None:
    import jumok

    score = jumok.scores.Additive(3, 5, 7).to(DEVICE)
    query, value = random(2, 1, 3), random(2, 11, 5)
    keys, mask = score.prepare(value), jumok.masks.padding([4, 11])

    def both() -> tuple[Tensor, Tensor]:
        fast = jumok.attend(query, keys, value, score=score, mask=mask)
        return fast, jumok.mix(jumok.weights(query, keys, score=score, mask=mask), value)

    assert jumok.explain(query, keys, value, score=score, mask=mask).name == "additive-step"
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    score.v = torch.nn.Parameter(random(7))  # a new parameter
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        score.v.mul_(3)  # changed in place
    torch.testing.assert_close(*both(), rtol=1e-4, atol=1e-4)
    score.requires_grad_(False)
    assert not jumok.attend(
        query, keys.__class__(keys.keys.detach(), keys.score_name, score), value, score=score
    ).requires_grad
    score.requires_grad_()
    assert jumok.attend(query, keys, value, score=score).requires_grad


@runs_kernels
@pytest.mark.usefixtures("use_kernels")
def test_a_backward_pass_or_a_checkpoint_for_each_step() -> None:
    from torch.utils.checkpoint import checkpoint

    import jumok

    score = jumok.scores.Additive(5, 5, 7).to(DEVICE)
    value = random(2, 11, 5)
    keys = score.prepare(value).keys.detach()
    frozen = jumok.scores.PreparedKeys(keys, "Additive", score)
    for _ in range(2):  # truncated backpropagation: each step has its own graph
        jumok.attend(random(2, 1, 5), frozen, value, score=score).sum().backward()

    def run(recompute: bool) -> Tensor:
        h, prepared = torch.ones(2, 1, 5, device=DEVICE), score.prepare(value)
        for _ in range(2):
            step = lambda h: h + jumok.attend(h, prepared, value, score=score)  # noqa: E731
            h = checkpoint(step, h, use_reentrant=False) if recompute else step(h)
        return torch.autograd.grad(h.sum(), score.v)[0]

    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-4)


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 50, 1000, 2000), (32, 400, 256, 256), (2, 3001, 37, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_cover_every_key_and_column(dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    batch, num_keys, hidden, width = size
    keys, value = (torch.empty(batch, num_keys, w, dtype=dtype, device="meta") for w in (hidden, width))
    for blocks, part in zip(choose_step_blocks(batch, max(hidden, width)), (width, hidden), strict=True):
        plan = plan_launch(blocks, keys, value, part)
        assert (plan.num_splits - 1) * plan.keys_per_split < num_keys <= plan.num_splits * plan.keys_per_split
        assert plan.num_splits <= min(plan.constants["PARTS"], blocks.max_splits)
        assert hidden <= plan.constants["HL"] * plan.constants["WIDTH"]
        assert width <= plan.constants["DL"] * plan.constants["WIDTH"]


@compiles_kernels
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize(("dtype", "splits", "stages"), [("bf16", 1, 1), ("fp16", 8, 1), ("fp32", 8, 3)])
def test_the_step_kernels_compile_for_hopper(kernel: str, splits: int, stages: int, dtype: str) -> None:
    constants = {"UNIT": 8, "SPLITS": splits, "PARTS": splits, "EXACT": dtype == "fp32", "MASKED": True}
    constants |= {"PRECISE": True, "ROWS": 16, "HL": 2, "DL": 1, "WIDTH": 128}
    constants |= {"PAIRS": dtype != "fp32", "STAGES": stages, "PW": 128, "VECTOR": 1}
    inputs = ("q_ptr", "k_ptr", "v_ptr", "value_ptr", "context_ptr", "d_context_ptr", "dq_ptr")
    types = dict.fromkeys(inputs, f"*{dtype}") | {"allowed_ptr": "*i1", "counter_ptr": "*i32"}
    compiled = compile_for_hopper(getattr(additive_step_kernels, kernel), constants, types, launch_options(4))
    assert "tanh.approx" in compiled.asm["ptx"] or dtype == "fp32"
