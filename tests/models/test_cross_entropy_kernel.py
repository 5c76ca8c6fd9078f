"""The kernel of the output layer's loss against plain PyTorch in float64, alone and inside the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need Triton")

import triton
from triton_testing import (
    DEVICE,
    INTERPRETED,
    assert_as_accurate,
    compile_for_hopper,
    compiles_kernels,
    runs_kernels,
)

from jumok.batches.tokens import IGNORE
from jumok.models.kernels import cross_entropy
from jumok.models.kernels.cross_entropy import CrossEntropyBlockSizes, allocate_logits, cross_entropy_
from jumok.models.layers import output_loss
from jumok.models.layers.output_loss import linear_cross_entropy
from jumok.models.transformer import TransformerOutputLayer

pytestmark = pytest.mark.long


DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = CrossEntropyBlockSizes(warps=1, unroll=2)  # steps of 256 or 512 words
D = 13


@pytest.fixture(autouse=True)
def _use_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(
            output_loss,
            "triton_unsupported_reason",
            lambda x: "float64" if x.dtype == torch.float64 else None,
        )
        monkeypatch.setattr(output_loss, "KERNEL_DEVICES", ("cuda", "cpu"))


@contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_loss, "triton_unsupported_reason", lambda x: "not now")
        yield


def random_labels(rows: int, words: int) -> Tensor:
    """Every third label is ignored; the first and the last word are among the others."""
    labels = torch.randint(words, (rows,), device=DEVICE)
    labels[:2] = torch.tensor([words - 1, 0], device=DEVICE)[:rows]
    labels[2::3] = IGNORE
    return labels


# --- the kernel ---------------------------------------------------------------------------------------------


def run_kernel(
    logits: Tensor, labels: Tensor, smoothing: float, bias: Tensor | None, needs_gradient: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The smoothed losses, the losses without smoothing, and the gradients, which replace the logits."""
    rows, words = logits.shape
    buffer = allocate_logits(rows, words, logits).fill_(torch.nan)  # values beyond the last word do not matter
    buffer[:, :words] = logits
    smoothed, plain = torch.full((2, rows), torch.nan, device=DEVICE)
    cross_entropy_(
        buffer,
        words,
        labels,
        smoothed,
        plain,
        smoothing=smoothing,
        bias=bias,
        needs_gradient=needs_gradient,
        blocks=SMALL,
    )
    return smoothed, plain, buffer[:, :words]


def reference(logits: Tensor, labels: Tensor, smoothing: float, bias: Tensor | None) -> tuple[Tensor, ...]:
    x = logits.double() if bias is None else logits.double() + bias.double()
    x.requires_grad_()
    smoothed = F.cross_entropy(x, labels, label_smoothing=smoothing, reduction="none")
    (gradient,) = torch.autograd.grad(smoothed.sum(), x)
    return smoothed.detach(), F.cross_entropy(x.detach(), labels, reduction="none"), gradient


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("words", "smoothing", "with_bias"),
    [(1, 0.1, True), (7, 0.0, True), (512, 0.1, False), (1031, 0.0, False), (1031, 0.1, True)],
)
def test_losses_and_gradients(words: int, smoothing: float, with_bias: bool, dtype: torch.dtype) -> None:
    """Fewer words than a step of the kernel, whole steps, and more."""
    rows = 5
    logits = (3 * torch.randn(rows, words, device=DEVICE)).to(dtype)
    bias = torch.randn(words, device=DEVICE) if with_bias else None
    labels = random_labels(rows, words)
    smoothed, plain, gradient = run_kernel(logits, labels, smoothing, bias)
    expected = reference(logits, labels, smoothing, bias)
    for losses, expected_losses in zip((smoothed, plain), expected, strict=False):
        torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=2e-6)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2e-6
    smallest = 1e-7 if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(gradient.double(), expected[2], rtol=1.01 * rounding, atol=smallest)
    assert not gradient[labels == IGNORE].any()
    assert not smoothed[labels == IGNORE].any()


@runs_kernels
def test_without_gradients_the_logits_stay() -> None:
    logits, labels = torch.randn(3, 300, device=DEVICE), random_labels(3, 300)
    *losses, unchanged = run_kernel(logits, labels, 0.1, None, needs_gradient=False)
    assert torch.equal(unchanged, logits)
    torch.testing.assert_close(losses, [*run_kernel(logits, labels, 0.1, None)[:2]], rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize(("value", "dtype"), list(zip([torch.nan, torch.inf, -torch.inf], DTYPES, strict=True)))
def test_ignored_rows_may_hold_any_value(value: float, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(4, 301, device=DEVICE).to(dtype), random_labels(4, 301)
    clean = run_kernel(logits, labels, 0.1, None)
    logits[labels == IGNORE] = value
    for dirty, expected in zip(run_kernel(logits, labels, 0.1, None), clean, strict=True):
        assert torch.equal(dirty, expected)


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("index", [0, 600])
def test_non_finite_logits_give_non_finite_losses(index: int, value: float) -> None:
    logits = torch.randn(2, 601, device=DEVICE)
    logits[0, index] = value
    smoothed, plain, gradient = run_kernel(logits, torch.tensor([3, 3], device=DEVICE), 0.1, None)
    assert smoothed.isfinite().tolist() == plain.isfinite().tolist() == [False, True]
    assert gradient.isfinite().all(-1).tolist() == [False, True]


@runs_kernels
def test_masked_words_and_logits_far_apart() -> None:
    logits = torch.zeros(3, 700, device=DEVICE)
    logits[0, 5:690] = -torch.inf  # all but 15 words
    logits[1] = -1e30
    logits[2, 9], logits[2, 699] = 3e4, -3e4
    _, plain, gradient = run_kernel(logits, torch.tensor([2, 2, 699], device=DEVICE), 0.0, None)
    torch.testing.assert_close(plain.cpu(), torch.tensor([15.0, 700.0, 0.0]).log().where(
        torch.tensor([True, True, False]), 6e4))  # fmt: skip
    assert not gradient[0, 5:690].any()
    assert gradient[2].nonzero()[:, 0].tolist() == [9, 699]


@runs_kernels
@pytest.mark.parametrize("label", [-1, 300, 2**31 - 1])
def test_labels_outside_the_vocabulary_give_nan(label: int) -> None:
    _, plain, _ = run_kernel(torch.randn(2, 300, device=DEVICE), torch.tensor([label, 5], device=DEVICE), 0.1, None)
    assert plain.isnan().tolist() == [True, False]


# --- inside the output layer --------------------------------------------------------------------------------


def run_linear_cross_entropy(inputs: list[Tensor], labels: Tensor, smoothing: float) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    hidden, weight, *bias = leaves
    total, plain = linear_cross_entropy(hidden, weight, labels, smoothing, *bias)
    (total / 3).backward()
    return [total.detach(), plain, *(leaf.grad for leaf in leaves)]


@runs_kernels
@pytest.mark.parametrize(("dtype", "cast"), [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)])
@pytest.mark.parametrize(
    ("chunks", "smoothing", "with_bias"), [(1, 0.0, True), (1, 0.1, False), (3, 0.0, False), (3, 0.1, True)]
)
def test_at_most_twice_the_error_of_plain_torch(
    chunks: int,
    smoothing: float,
    with_bias: bool,
    dtype: torch.dtype,
    cast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, words = (17, 331) if INTERPRETED else (1000, 4099)
    monkeypatch.setattr(output_loss, "ROW_MULTIPLE", 1)
    monkeypatch.setattr(output_loss, "MAX_LOGITS_BY_KERNEL", rows * words // chunks + words)
    shapes = [(rows, D), (words, D), (words,)][: 3 if with_bias else 2]
    input_dtype = torch.float32 if cast else dtype
    inputs = [torch.randn(*shape, device=DEVICE).to(dtype).to(input_dtype) for shape in shapes]
    labels = random_labels(rows, words)
    exact = run_linear_cross_entropy([x.double() for x in inputs], labels, smoothing)
    with torch.autocast(DEVICE, dtype, enabled=cast):
        ours = run_linear_cross_entropy(inputs, labels, smoothing)
        with without_kernels():
            plain = run_linear_cross_entropy(inputs, labels, smoothing)
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert_as_accurate(ours, exact, plain, dtype=dtype)
    assert not ours[2][labels == IGNORE].any()


@runs_kernels
@pytest.mark.parametrize("rows", [1, 0])
def test_one_row_or_none(rows: int) -> None:
    inputs = [torch.randn(*shape, device=DEVICE) for shape in ((rows, D), (29, D), (29,))]
    labels = torch.full((rows,), 28, device=DEVICE)
    ours = run_linear_cross_entropy(inputs, labels, 0.1)
    exact = run_linear_cross_entropy([x.double() for x in inputs], labels, 0.1)
    for result, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hidden_states_of_ignored_labels_do_not_change_gradients(value: float) -> None:
    inputs = [torch.randn(*shape, device=DEVICE) for shape in ((7, D), (29, D), (29,))]
    labels = random_labels(7, 29)
    clean = run_linear_cross_entropy(inputs, labels, 0.1)
    inputs[0][labels == IGNORE] = value
    for dirty, expected in zip(run_linear_cross_entropy(inputs, labels, 0.1), clean, strict=True):
        assert torch.equal(dirty, expected)
    labels.fill_(IGNORE)
    assert not any(x.any() for x in run_linear_cross_entropy(inputs, labels, 0.1))


@runs_kernels
def test_no_gradients_are_computed_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(7, D, device=DEVICE), torch.randn(29, D, device=DEVICE, requires_grad=True)
    labels = random_labels(7, 29)
    with_autograd = linear_cross_entropy(hidden, weight, labels, 0.1)
    monkeypatch.setattr(output_loss, "_matmul_into", None)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels, 0.1)
    assert with_autograd[0].requires_grad
    assert not without[0].requires_grad
    torch.testing.assert_close(without, tuple(x.detach() for x in with_autograd), rtol=1e-6, atol=1e-6)


@runs_kernels
def test_float64_uses_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "cross_entropy_", None)
    inputs = [torch.randn(*shape, device=DEVICE).double() for shape in ((7, D), (29, D))]
    assert all(x.dtype == torch.float64 for x in run_linear_cross_entropy(inputs, random_labels(7, 29), 0.1))


@runs_kernels
def test_a_compiled_output_layer_is_compiled_for_the_first_batches_only() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = TransformerOutputLayer(torch.nn.Parameter(torch.randn(29, D, device=DEVICE))).train()
    plain = TransformerOutputLayer(layer.weight).train()
    layer.compile(backend="eager")
    frames = []
    for rows in (5, 7, 11, 13):
        hidden, labels = torch.randn(rows, D, device=DEVICE, requires_grad=True), random_labels(rows, 29)
        results, expected = (module(hidden, labels, 0.1) for module in (layer, plain))
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        gradients = [torch.autograd.grad(total, hidden) for total, _ in (results, expected)]
        torch.testing.assert_close(*gradients, rtol=0, atol=0)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[-1] == frames[1] <= 4  # the caller of the kernel: once for this size, once for any size


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("words", [32000, 30522, 50257])
def test_at_real_sizes(words: int) -> None:
    inputs = [torch.randn(900, 512, device=DEVICE), torch.randn(words, 512, device=DEVICE) / 16]
    inputs += [torch.randn(words, device=DEVICE)]
    labels = random_labels(900, words)
    exact = run_linear_cross_entropy([x.double() for x in inputs], labels, 0.1)
    with torch.autocast("cuda", torch.bfloat16):
        ours = run_linear_cross_entropy(inputs, labels, 0.1)
        with without_kernels():
            plain = run_linear_cross_entropy(inputs, labels, 0.1)
    assert [x.dtype for x in ours] == [x.dtype for x in plain]
    assert_as_accurate(ours, exact, plain, dtype=torch.bfloat16)


@pytest.mark.gpu
def test_products_accumulate_in_float32() -> None:
    assert output_loss._supports_float32_output(torch.bfloat16, torch.device("cuda", 0))
    a, b = torch.randn(40, 24, device="cuda").bfloat16(), torch.randn(24, 16, device="cuda").bfloat16()
    out = torch.full((40, 16), torch.nan, device="cuda")
    output_loss._matmul_into(a, b, out=out)  # previous values do not matter
    output_loss._matmul_into(a, b, out=out, add=True)
    torch.testing.assert_close(out.double(), 2 * (a.double() @ b.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is a prototype
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_and_no_synchronization(compiled: bool) -> None:
    torch._dynamo.reset()
    layer = TransformerOutputLayer(torch.nn.Parameter(torch.randn(1031, 64, device="cuda"))).train()
    if compiled:
        layer.compile()
    hidden, labels = torch.randn(300, 64, device="cuda", requires_grad=True), random_labels(300, 1031)

    def run() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            total, plain = layer(hidden, labels, 0.1)
        return total.detach(), plain, *torch.autograd.grad(total, (hidden, layer.weight))

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    with torch.no_grad():
        hidden.normal_()
        labels.copy_(random_labels(300, 1031).roll(1))
    graph.replay()
    for result, expected in zip(captured, run(), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


# --- without a GPU ------------------------------------------------------------------------------------------


@compiles_kernels
@pytest.mark.parametrize(
    ("dtype", "even", "biased"),
    [
        ("bf16", True, True),
        ("fp16", False, False),
        ("fp32", False, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("bf16", True, False),
                ("bf16", False, True),
                ("bf16", False, False),
                ("fp16", True, True),
                ("fp16", True, False),
                ("fp16", False, True),
                ("fp32", True, True),
                ("fp32", True, False),
                ("fp32", False, False),
            ]
        ),
    ],
)
def test_the_kernel_compiles_for_hopper(dtype: str, even: bool, biased: bool) -> None:
    blocks = cross_entropy.DEFAULT_BLOCKS
    constants = {"U": blocks.unroll, "LANES": 32 * blocks.warps, "E": 4 if dtype == "fp32" else 8}
    constants |= {"BIASED": biased, "SMOOTHED": True, "NEEDS_GRADIENT": True}
    types = {"logits_ptr": f"*{dtype}", "labels_ptr": "*i64", "smoothing": "fp32"}
    options, aligned = cross_entropy.launch_options(blocks.warps), ("width", "V") if even else ("width",)
    compiled = compile_for_hopper(cross_entropy._cross_entropy_kernel, constants, types, options, aligned)
    if triton.__version__.startswith("3.6."):  # other versions have another layout of a warp
        assert "threadsPerWarp = [32, 1, 1]" in compiled.asm["ttgir"]  # each thread has its own lane
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line and "b16" in line]
    assert len(loads) == (dtype != "fp32")  # the logit of the label; the others are loaded 16 bytes at a time
