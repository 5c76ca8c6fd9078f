"""The kernel of the output layer's loss against plain PyTorch in float64, alone and in its place.

As with the other kernels, the tests run on a GPU where there is one, and everywhere in Triton's interpreter,
in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="the kernels need Triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
from jumok.batches.tokens import IGNORE  # noqa: E402
from jumok.models.kernels import cross_entropy  # noqa: E402
from jumok.models.kernels.cross_entropy import CrossEntropyBlockSizes, allocate_logits, cross_entropy_  # noqa: E402
from jumok.models.layers import output_loss  # noqa: E402
from jumok.models.layers.output_loss import linear_cross_entropy  # noqa: E402
from jumok.models.transformer import TransformerOutputLayer  # noqa: E402

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
# NumPy warns of what tests of NaN and infinity are about.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = CrossEntropyBlockSizes(warps=1, unroll=2)  # steps of 256 or 512 words
D = 13


@pytest.fixture(autouse=True)
def _by_kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
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


def some_labels(rows: int, words: int) -> Tensor:
    """Each third does not count; the first word and the last are among them."""
    labels = torch.randint(words, (rows,), device=DEVICE)
    labels[:2] = torch.tensor([words - 1, 0], device=DEVICE)[:rows]
    labels[2::3] = IGNORE
    return labels


# --- the kernel ---------------------------------------------------------------------------------------------


def kernel(
    logits: Tensor, labels: Tensor, smoothing: float, bias: Tensor | None, learning: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The smoothed losses, the plain ones, and what is then in the place of the logits."""
    rows, words = logits.shape
    room = allocate_logits(rows, words, logits).fill_(torch.nan)  # whatever is beyond the last word
    room[:, :words] = logits
    smoothed, plain = torch.full((2, rows), torch.nan, device=DEVICE)
    cross_entropy_(
        room,
        words,
        labels,
        smoothed,
        plain,
        smoothing=smoothing,
        bias=bias,
        needs_gradient=learning,
        blocks=SMALL,
    )
    return smoothed, plain, room[:, :words]


def reference(logits: Tensor, labels: Tensor, smoothing: float, bias: Tensor | None) -> tuple[Tensor, ...]:
    x = logits.double() if bias is None else logits.double() + bias.double()
    x.requires_grad_()
    smoothed = F.cross_entropy(x, labels, label_smoothing=smoothing, reduction="none")
    (slope,) = torch.autograd.grad(smoothed.sum(), x)
    return smoothed.detach(), F.cross_entropy(x.detach(), labels, reduction="none"), slope


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("words", [1, 7, 512, 1031])  # less than a step, whole steps, and more
def test_losses_and_slopes(words: int, smoothing: float, with_bias: bool, dtype: torch.dtype) -> None:
    rows = 5
    logits = (3 * torch.randn(rows, words, device=DEVICE)).to(dtype)
    bias = torch.randn(words, device=DEVICE) if with_bias else None
    labels = some_labels(rows, words)
    smoothed, plain, slope = kernel(logits, labels, smoothing, bias)
    right = reference(logits, labels, smoothing, bias)
    for got, want in zip((smoothed, plain), right, strict=False):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-6)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2e-6
    if INTERPRETED and dtype == torch.bfloat16:
        rounding *= 2  # the interpreter cuts off
    smallest = 1e-7 if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(slope.double(), right[2], rtol=1.01 * rounding, atol=smallest)
    assert not slope[labels == IGNORE].any()
    assert not smoothed[labels == IGNORE].any()


@runs_kernels
def test_when_nothing_is_learnt_the_logits_stay() -> None:
    logits, labels = torch.randn(3, 300, device=DEVICE), some_labels(3, 300)
    *losses, same = kernel(logits, labels, 0.1, None, learning=False)
    assert torch.equal(same, logits)
    torch.testing.assert_close(losses, [*kernel(logits, labels, 0.1, None)[:2]], rtol=1e-6, atol=1e-6)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_label_may_hold_anything(value: float, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(4, 301, device=DEVICE).to(dtype), some_labels(4, 301)
    clean = kernel(logits, labels, 0.1, None)
    logits[labels == IGNORE] = value
    for dirty, expected in zip(kernel(logits, labels, 0.1, None), clean, strict=True):
        assert torch.equal(dirty, expected)


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 600])
def test_what_is_not_finite_where_it_counts_is_not_hidden(place: int, value: float) -> None:
    logits = torch.randn(2, 601, device=DEVICE)
    logits[0, place] = value
    smoothed, plain, slope = kernel(logits, torch.tensor([3, 3], device=DEVICE), 0.1, None)
    assert smoothed.isfinite().tolist() == plain.isfinite().tolist() == [False, True]
    assert slope.isfinite().all(-1).tolist() == [False, True]


@runs_kernels
def test_words_that_cannot_be_said_and_scores_far_apart() -> None:
    logits = torch.zeros(3, 700, device=DEVICE)
    logits[0, 5:690] = -torch.inf  # all but 15 words
    logits[1] = -1e30
    logits[2, 9], logits[2, 699] = 3e4, -3e4
    _, plain, slope = kernel(logits, torch.tensor([2, 2, 699], device=DEVICE), 0.0, None)
    torch.testing.assert_close(plain.cpu(), torch.tensor([15.0, 700.0, 0.0]).log().where(
        torch.tensor([True, True, False]), 6e4))  # fmt: skip
    assert not slope[0, 5:690].any()
    assert slope[2].nonzero()[:, 0].tolist() == [9, 699]


@runs_kernels
@pytest.mark.parametrize("label", [-1, 300, 2**31 - 1])
def test_a_label_that_is_no_word_gives_nan(label: int) -> None:
    _, plain, _ = kernel(torch.randn(2, 300, device=DEVICE), torch.tensor([label, 5], device=DEVICE), 0.1, None)
    assert plain.isnan().tolist() == [True, False]


# --- in its place -------------------------------------------------------------------------------------------


def losses_and_gradients(inputs: list[Tensor], labels: Tensor, smoothing: float) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    hidden, weight, *bias = leaves
    total, plain = linear_cross_entropy(hidden, weight, labels, smoothing, *bias)
    (total / 3).backward()
    found = [total.detach(), plain, *(x.grad for x in leaves if x.grad is not None)]
    assert len(found) == 2 + len(inputs)
    return found


def agree(ours: list[Tensor], plain: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> None:
    slack = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    for at, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.dtype == b.dtype
        error, allowed = (((x.double() - truth).norm() / truth.norm()).item() for x in (a, b))
        assert error <= 2 * allowed + slack, f"result {at}: {error:.1e}, plain PyTorch {allowed:.1e}"


@runs_kernels
@pytest.mark.parametrize(("dtype", "cast"), [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("pieces", [1, 3])
def test_at_most_twice_the_error_of_plain_torch(
    pieces: int,
    smoothing: float,
    with_bias: bool,
    dtype: torch.dtype,
    cast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, words = (40, 331) if INTERPRETED else (1000, 4099)
    monkeypatch.setattr(output_loss, "ROW_MULTIPLE", 1)
    monkeypatch.setattr(output_loss, "MAX_LOGITS_BY_KERNEL", rows * words // pieces + words)
    shapes = [(rows, D), (words, D), (words,)][: 3 if with_bias else 2]
    held = torch.float32 if cast else dtype
    inputs = [torch.randn(*shape, device=DEVICE).to(dtype).to(held) for shape in shapes]
    labels = some_labels(rows, words)
    exact = losses_and_gradients([x.double() for x in inputs], labels, smoothing)
    with torch.autocast(DEVICE, dtype, enabled=cast):
        ours = losses_and_gradients(inputs, labels, smoothing)
        with without_kernels():
            plain = losses_and_gradients(inputs, labels, smoothing)
    agree(ours, plain, exact, dtype)
    assert not ours[2][labels == IGNORE].any()


@runs_kernels
def test_one_place_and_none() -> None:
    for rows in (1, 0):
        inputs = [torch.randn(*shape, device=DEVICE) for shape in ((rows, D), (29, D), (29,))]
        labels = torch.full((rows,), 28, device=DEVICE)
        ours = losses_and_gradients(inputs, labels, 0.1)
        exact = losses_and_gradients([x.double() for x in inputs], labels, 0.1)
        for got, want in zip(ours, exact, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_hidden_states_without_a_label_reach_no_gradient(value: float) -> None:
    inputs = [torch.randn(*shape, device=DEVICE) for shape in ((7, D), (29, D), (29,))]
    labels = some_labels(7, 29)
    clean = losses_and_gradients(inputs, labels, 0.1)
    inputs[0][labels == IGNORE] = value
    for dirty, expected in zip(losses_and_gradients(inputs, labels, 0.1), clean, strict=True):
        assert torch.equal(dirty, expected)
    labels.fill_(IGNORE)
    assert not any(x.any() for x in losses_and_gradients(inputs, labels, 0.1))


@runs_kernels
def test_without_gradients_nothing_is_worked_out_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(7, D, device=DEVICE), torch.randn(29, D, device=DEVICE, requires_grad=True)
    labels = some_labels(7, 29)
    learning = linear_cross_entropy(hidden, weight, labels, 0.1)
    monkeypatch.setattr(output_loss, "_matmul_into", None)
    with torch.no_grad():
        looking = linear_cross_entropy(hidden, weight, labels, 0.1)
    assert learning[0].requires_grad
    assert not looking[0].requires_grad
    torch.testing.assert_close(looking, tuple(x.detach() for x in learning), rtol=1e-6, atol=1e-6)


@runs_kernels
def test_float64_stays_with_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "cross_entropy_", None)
    inputs = [torch.randn(*shape, device=DEVICE).double() for shape in ((7, D), (29, D))]
    assert all(x.dtype == torch.float64 for x in losses_and_gradients(inputs, some_labels(7, 29), 0.1))


@runs_kernels
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_compiled_output_layer_is_compiled_for_the_first_batches_only(smoothing: float) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = TransformerOutputLayer(torch.nn.Parameter(torch.randn(29, D, device=DEVICE))).train()
    plain = TransformerOutputLayer(layer.weight).train()
    layer.compile(backend="eager")
    frames = []
    for rows in (5, 7, 11, 13):
        hidden, labels = torch.randn(rows, D, device=DEVICE, requires_grad=True), some_labels(rows, 29)
        found, expected = (one(hidden, labels, smoothing) for one in (layer, plain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        (slope,), (right,) = (torch.autograd.grad(total, hidden) for total, _ in (found, expected))
        torch.testing.assert_close(slope, right, rtol=0, atol=0)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[-1] == frames[1] <= 4  # what calls the kernel, once for a size and once for any


# --- on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("words", [32000, 30522, 50257])
def test_at_real_sizes(words: int) -> None:
    inputs = [torch.randn(900, 512, device=DEVICE), torch.randn(words, 512, device=DEVICE) / 16]
    inputs += [torch.randn(words, device=DEVICE)]
    labels = some_labels(900, words)
    exact = losses_and_gradients([x.double() for x in inputs], labels, 0.1)
    with torch.autocast("cuda", torch.bfloat16):
        ours = losses_and_gradients(inputs, labels, 0.1)
        with without_kernels():
            plain = losses_and_gradients(inputs, labels, 0.1)
    agree(ours, plain, exact, torch.bfloat16)


@pytest.mark.gpu
def test_products_are_added_in_float32() -> None:
    assert output_loss._supports_float32_output(torch.bfloat16, torch.device("cuda", 0))
    a, b = torch.randn(40, 24, device="cuda").bfloat16(), torch.randn(24, 16, device="cuda").bfloat16()
    out = torch.full((40, 16), torch.nan, device="cuda")
    output_loss._matmul_into(a, b, out=out)  # what was there does not matter
    output_loss._matmul_into(a, b, out=out, add=True)
    torch.testing.assert_close(out.double(), 2 * (a.double() @ b.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
@pytest.mark.parametrize("compiled", [False, True])
def test_it_can_be_recorded_and_waits_for_nothing(compiled: bool) -> None:
    torch._dynamo.reset()
    layer = TransformerOutputLayer(torch.nn.Parameter(torch.randn(1031, 64, device="cuda"))).train()
    if compiled:
        layer.compile()
    hidden, labels = torch.randn(300, 64, device="cuda", requires_grad=True), some_labels(300, 1031)

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
        found = run()
    with torch.no_grad():
        hidden.normal_()
        labels.copy_(some_labels(300, 1031).roll(1))
    graph.replay()
    for got, want in zip(found, run(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_the_kernel_compiles_for_hopper(biased: bool, even: bool, kind: str) -> None:
    """The interpreter lets pass what the compiler does not, and the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    function, blocks = cross_entropy._cross_entropy_kernel, cross_entropy.DEFAULT_BLOCKS
    constants = {"U": blocks.unroll, "LANES": 32 * blocks.warps, "E": 4 if kind == "fp32" else 8}
    constants |= {"BIASED": biased, "SMOOTHED": True, "NEEDS_GRADIENT": True}
    types = {"logits_ptr": f"*{kind}", "labels_ptr": "*i64", "V": "i32", "width": "i32", "smoothing": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in function.arg_names}
    aligned = [
        at
        for at, name in enumerate(function.arg_names)
        if name.endswith("_ptr") or name == "width" or (name == "V" and even)
    ]
    source = triton.compiler.ASTSource(
        function, signature, constexprs=constants, attrs={(at,): [["tt.divisibility", 16]] for at in aligned}
    )
    options = cross_entropy.launch_options(blocks.warps)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if triton.__version__.startswith("3.6."):  # others lay a warp out in another way
        assert "threadsPerWarp = [32, 1, 1]" in compiled.asm["ttgir"]  # a thread's lane is its own
    loads = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line and "b16" in line]
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert len(loads) == (kind != "fp32")  # the label's logit; all others come in whole words


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
