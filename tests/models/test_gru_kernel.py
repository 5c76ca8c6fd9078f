"""The kernels of the GRU against PyTorch's own GRU in float64, alone and inside a model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

pytest.importorskip("triton", reason="the kernels need Triton")
pytest.importorskip("hypothesis", reason="lengths are drawn by hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from triton_testing import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    assert_as_accurate,
    compile_for_hopper,
    compiles_kernels,
    count_stack_bytes,
    runs_kernels,
)

from jumok.batches.text import DocumentBatch
from jumok.batches.tokens import Tokens
from jumok.models import hierarchical
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.kernels import gru
from jumok.models.layers import recurrent
from jumok.models.layers.ragged_layout import PackedSteps, RaggedLayout
from jumok.models.layers.recurrent import build_rnn, run_packed_rnn

pytestmark = pytest.mark.long


INPUTS = 3
MANY = [4, 4, 4, *[2] * 15, 1, 1, 1]  # more than a program processes


def unsupported_reason(x: Tensor, uses_matmul: bool = False) -> str | None:
    return "float64" if x.dtype == torch.float64 else None


@pytest.fixture(autouse=True)
def _use_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # By default cuDNN rounds float32 to TF32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if INTERPRETED:
        for module in (recurrent, hierarchical):
            monkeypatch.setattr(module, "triton_unsupported_reason", unsupported_reason)


@contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (recurrent, hierarchical):
            patch.setattr(module, "triton_unsupported_reason", lambda x, uses_matmul=False: "not now")
        yield


def packed(lengths: list[int]) -> PackedSteps:
    """Sequences of these lengths, the longest first."""
    steps = range(max(lengths, default=0))
    return PackedSteps.from_batch_sizes(
        torch.tensor([sum(length > step for length in lengths) for step in steps]), DEVICE
    )


def random_gru(width: int, bidirectional: bool, inputs: int = INPUTS) -> nn.GRU:
    rnn = build_rnn("gru", inputs, width, bidirectional=bidirectional).to(DEVICE)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):  # initialized to zeros, which would not show whether they are used
            nn.init.normal_(parameter, std=0.5)
    assert isinstance(rnn, nn.GRU)
    return rnn


def output_gradient(states: Tensor) -> Tensor:
    return torch.arange(states.numel(), device=states.device).view_as(states).sin().to(states.dtype)


def states_and_gradients(rnn: nn.GRU, x: Tensor, packing: PackedSteps) -> list[Tensor]:
    x = x.clone().requires_grad_()
    states = run_packed_rnn(rnn, x, packing)
    return [states.detach(), *torch.autograd.grad(states, [x, *rnn.parameters()], output_gradient(states))]


def exact_states_and_gradients(rnn: nn.GRU, x: Tensor, packing: PackedSteps) -> list[Tensor]:
    """The same, computed by PyTorch's own GRU in float64 on the CPU."""
    rnn, x = copy.deepcopy(rnn).cpu().double(), x.cpu().double().requires_grad_()
    states = rnn(PackedSequence(x, packing.batch_sizes))[0].data
    gradients = torch.autograd.grad(states, [x, *rnn.parameters()], output_gradient(states))
    return [result.to(DEVICE) for result in (states.detach(), *gradients)]


def check(rnn: nn.GRU, lengths: list[int], dtype: torch.dtype) -> None:
    """Compare with PyTorch's operations step by step in the same precision, and in float32 with cuDNN too.

    The larger of their errors counts. In low precision cuDNN is not comparable: it keeps in float32 what one
    step passes to the next and to backward, which PyTorch's operations round.
    """
    x, packing = torch.randn(sum(lengths), rnn.input_size, device=DEVICE), packed(lengths)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        ours = states_and_gradients(rnn, x, packing)
        with without_kernels():
            plain = [states_and_gradients(rnn.eval(), x, packing)]  # in eval mode it runs step by step
            if ON_GPU and dtype == torch.float32:
                plain.append(states_and_gradients(rnn.train(), x, packing))
    assert ours[0].dtype == dtype
    assert all([x.dtype for x in results] == [x.dtype for x in ours] for results in plain)
    assert_as_accurate(ours, exact_states_and_gradients(rnn, x, packing), *plain, dtype=dtype)


# --- the numbers --------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(
    ("width", "bidirectional", "lengths", "dtype"),
    [
        (5, True, [7, 3, 1], torch.float32),
        (17, True, MANY, torch.float32),
        (17, True, MANY, torch.bfloat16),
        (17, False, MANY, torch.float16),
        (31, True, [1], torch.float16),
        (37, False, [5, 5], torch.bfloat16),
        (67, True, [3, 1], torch.float16),
        (67, False, [3, 1], torch.float32),
        (100, True, [4, 3], torch.bfloat16),
        (128, False, [2, 1], torch.float32),
        (128, False, [2, 1], torch.bfloat16),
    ],
)
def test_at_most_twice_the_error_of_plain_torch(
    width: int, bidirectional: bool, lengths: list[int], dtype: torch.dtype
) -> None:
    check(random_gru(width, bidirectional), lengths, dtype)


@runs_kernels
@pytest.mark.parametrize(
    ("width", "lengths", "dtype"),
    [(17, MANY, torch.bfloat16), (64, [4, 3], torch.float32), (100, [3, 1], torch.float16)],
)
def test_weights_larger_than_shared_memory_are_read_at_each_step(
    width: int, lengths: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with little shared memory: an H200 has room for these widths."""
    monkeypatch.setattr(gru, "get_max_shared_memory", lambda device: 1 << 10)
    assert not gru._get_kernel_constants(width, dtype, gru.get_max_shared_memory(DEVICE))["HOLD_WEIGHT"]
    check(random_gru(width, bidirectional=True), lengths, dtype)


@runs_kernels
@settings(max_examples=7)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=17),
    width=st.sampled_from([1, 7, 19]),
    bidirectional=st.booleans(),
)
def test_random_lengths(lengths: list[int], width: int, bidirectional: bool) -> None:
    torch.manual_seed(0)
    lengths = sorted(lengths, reverse=True)
    rnn, packing = random_gru(width, bidirectional), packed(lengths)
    x = torch.randn(sum(lengths), INPUTS, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(recurrent, "triton_unsupported_reason", unsupported_reason)
        ours = states_and_gradients(rnn, x, packing)
    for result, expected in zip(ours, exact_states_and_gradients(rnn, x, packing), strict=True):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(result.double() / scale, expected / scale, rtol=1e-5, atol=2e-6)


@runs_kernels
def test_a_step_by_hand() -> None:
    """Width 1, sequences of two words and of one: h = (1 - z) n + z h, with z = 1/4, r = 1/2."""
    rnn = build_rnn("gru", 1, 1).to(DEVICE)
    quarter = -float(np.log(3))  # σ(−log 3) = 1/4
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.zero_()
        rnn.weight_ih_l0[2] = 1.0  # n = tanh(x + ½ (2 h + 4))
        rnn.weight_hh_l0[2] = 2.0
        rnn.bias_hh_l0.copy_(torch.tensor([0.0, quarter, 4.0]))
    x = torch.tensor([[-2.0], [-3.0], [-2.0]], device=DEVICE)  # two first words, one second word
    second = float(0.75 * np.tanh(-1))
    states = run_packed_rnn(rnn, x, packed([2, 1]))
    torch.testing.assert_close(states.cpu(), torch.tensor([[0.0], [second], [0.0]]), rtol=1e-6, atol=1e-7)


@runs_kernels
def test_saturated_gates() -> None:
    rnn, packing = random_gru(5, bidirectional=True), packed([3, 2])
    x = 1e4 * torch.randn(5, INPUTS, device=DEVICE)
    ours = states_and_gradients(rnn, x, packing)
    assert all(result.isfinite().all() for result in ours)
    torch.testing.assert_close(ours[0].double(), exact_states_and_gradients(rnn, x, packing)[0], rtol=1e-5, atol=1e-6)


@runs_kernels
def test_nan_stays_in_its_sequence() -> None:
    rnn, lengths = random_gru(7, bidirectional=True), [3, 2, 2]
    x = torch.randn(7, INPUTS, device=DEVICE)
    clean = run_packed_rnn(rnn, x, packed(lengths))
    x[4] = torch.nan  # the second word of the second sequence
    dirty = run_packed_rnn(rnn, x, packed(lengths))
    others = [0, 2, 3, 5, 6]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[1, :7], clean[1, :7])  # the forward direction has not read the second word yet
    assert dirty[1, 7:].isnan().all()


# --- autograd -----------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("bidirectional", [False, True])
def test_empty_batches(bidirectional: bool) -> None:
    states, d_x, *d_parameters = states_and_gradients(
        random_gru(5, bidirectional), torch.zeros(0, INPUTS, device=DEVICE), packed([])
    )
    assert states.shape == (0, 5 * (1 + bidirectional))
    assert d_x.shape == (0, INPUTS)
    assert not any(gradient.any() for gradient in d_parameters)


@runs_kernels
def test_gradients_twice_and_for_some_inputs_only() -> None:
    rnn, packing = random_gru(5, bidirectional=True), packed([3, 2, 1])
    x = torch.randn(INPUTS, 6, device=DEVICE).t().requires_grad_()  # strided
    states = run_packed_rnn(rnn, x, packing)
    (first,) = torch.autograd.grad(states.sum(), x, retain_graph=True)  # a gradient of stride 0
    second = torch.autograd.grad(states.sum(), [x, *rnn.parameters()])
    assert torch.equal(first, second[0])
    rnn.requires_grad_(False)
    (only_x,) = torch.autograd.grad(run_packed_rnn(rnn, x, packing).sum(), x)
    assert torch.equal(first, only_x)
    rnn.weight_hh_l0.requires_grad_()
    (only_weight,) = torch.autograd.grad(run_packed_rnn(rnn, x.detach(), packing).sum(), rnn.weight_hh_l0)
    assert torch.equal(only_weight, second[2])


@runs_kernels
def test_no_second_derivative() -> None:
    x = torch.randn(3, INPUTS, device=DEVICE, requires_grad=True)
    states = run_packed_rnn(random_gru(5, bidirectional=False), x, packed([2, 1]))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(states.square().sum(), x, create_graph=True)


@runs_kernels
def test_no_gradient_buffers_without_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x, packing = random_gru(5, bidirectional=True), torch.randn(6, INPUTS, device=DEVICE), packed([3, 2, 1])
    with_autograd = run_packed_rnn(rnn, x, packing)
    launch, needs_gradient = gru._launch, []

    def record(*arguments: object, **constants: object) -> None:
        needs_gradient.append(constants["NEEDS_GRADIENT"])
        launch(*arguments, **constants)

    monkeypatch.setattr(gru, "_launch", record)
    with torch.no_grad():
        without = run_packed_rnn(rnn, x, packing)
    with torch.inference_mode():
        assert torch.equal(run_packed_rnn(rnn, x, packing), without)
    assert needs_gradient == [False, False]
    assert with_autograd.requires_grad
    assert not without.requires_grad
    assert torch.equal(without, with_autograd)


def documents() -> DocumentBatch:
    rows = [[7, 8, 9, 3], [5], [4, 6], [9, 9, 2]]
    return DocumentBatch.from_sequences(rows, sentence_indices=[[0, 1, 3], [2]], labels=[2, 0])


@runs_kernels
def test_adversarial_training_of_a_network() -> None:
    """It runs forward twice, with a gradient in between."""
    torch.manual_seed(1)
    config = HierarchicalConfig(embedding_width=7, width=5, attention_width=11, dropout=0.0, adversarial_epsilon=0.5)
    model, batch = (
        HierarchicalAttentionNetwork(config, vocab_size=11, num_classes=3).to(DEVICE).train(),
        documents().to(DEVICE),
    )

    def losses_and_gradients() -> list[Tensor]:
        loss = model.loss(batch)
        gradients = torch.autograd.grad(loss.total, [*model.parameters()])
        return [loss.total.detach(), loss.parts["adversarial"], *gradients]

    ours = losses_and_gradients()
    with without_kernels():
        plain = losses_and_gradients()  # float32, on a GPU by cuDNN: both have errors of about 1e-6
    assert ours[1] > ours[0]  # the perturbation increases the loss
    for result, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


@runs_kernels
def test_the_layout_of_a_batch_has_the_packed_steps() -> None:
    """Equal to those of the batch sizes, and aligned for the kernels."""
    layout = RaggedLayout.from_tokens(Tokens.pack([[5], [7, 8, 9], [], [4, 6]]).to(DEVICE))
    expected = packed([3, 2, 1])
    assert layout.packed_steps.num_sequences == expected.num_sequences == 3
    assert (
        layout.packed_steps.offsets_and_lengths.tolist() == expected.offsets_and_lengths.tolist() == [0, 3, 5, 3, 2, 1]
    )
    assert layout.packed_steps.batch_sizes.tolist() == expected.batch_sizes.tolist() == [3, 2, 1]
    assert layout.packed_steps.offsets_and_lengths.data_ptr() % 16 == 0  # else Triton compiles another kernel


# --- dispatch -----------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("kind", ["lstm", "layers", "wide", "float64", "no bias"])
def test_unsupported_rnns_run_in_pytorch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    monkeypatch.setattr(gru, "run_fused_gru", lambda x, *_: calls.append(x) or x)
    run_packed_rnn(random_gru(5, bidirectional=False), torch.zeros(1, INPUTS, device=DEVICE), packed([1]))
    assert len(calls) == 1
    rnn: nn.GRU | nn.LSTM = {
        "lstm": lambda: nn.LSTM(INPUTS, 5),
        "layers": lambda: nn.GRU(INPUTS, 5, num_layers=2),
        "wide": lambda: nn.GRU(INPUTS, 129),
        "float64": lambda: nn.GRU(INPUTS, 5).double(),
        "no bias": lambda: nn.GRU(INPUTS, 5, bias=False),
    }[kind]()
    rnn.to(DEVICE)
    x = torch.zeros(3, INPUTS, device=DEVICE, dtype=rnn.weight_ih_l0.dtype)
    with torch.no_grad():
        assert run_packed_rnn(rnn, x, packed([2, 1])).shape == (3, rnn.hidden_size)
    assert len(calls) == 1


# --- on a GPU -----------------------------------------------------------------------------------------------


def review_lengths(words: int, longest: int) -> list[int]:
    """Sentence lengths distributed as in reviews, about ``words`` words in all."""
    lengths = np.random.default_rng(0).lognormal(2.8, 0.7, words)
    lengths = np.clip(lengths, 1, longest).astype(int)
    return sorted(lengths[: int(np.searchsorted(np.cumsum(lengths), words)) + 1].tolist(), reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inputs"), [(64, 200), (64, 128), (100, 200), (50, 200), (128, 300)])
def test_at_real_sizes(width: int, inputs: int, dtype: torch.dtype) -> None:
    check(random_gru(width, True, inputs), review_lengths(17_000, 90), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_deterministic(width: int, dtype: torch.dtype) -> None:
    rnn, lengths = random_gru(width, bidirectional=True), review_lengths(17_000, 90)
    x, packing = torch.randn(sum(lengths), INPUTS, device=DEVICE), packed(lengths)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        first, second = (states_and_gradients(rnn, x, packing) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it is a prototype
def test_no_synchronization_with_the_gpu() -> None:
    rnn, lengths = random_gru(64, bidirectional=True), review_lengths(40_000, 90)
    x, packing = torch.randn(sum(lengths), INPUTS, device=DEVICE), packed(lengths)
    states_and_gradients(rnn, x, packing)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        states_and_gradients(rnn, x, packing)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- without a GPU ------------------------------------------------------------------------------------------


@compiles_kernels
@pytest.mark.parametrize("name", ["gru_forward_kernel", "gru_backward_kernel"])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 100), (torch.float32, 100)], ids=["bf16", "fp32"])
def test_the_kernels_compile_for_hopper_and_hardly_spill(
    dtype: torch.dtype, width: int, name: str, tmp_path: Path
) -> None:
    kernel, blocks = getattr(gru, name), gru.choose_gru_blocks(width, dtype)
    constants = {"DIRECTIONS": 2, "ROWS": blocks.rows, "NEEDS_GRADIENT": True}
    constants |= gru._get_kernel_constants(width, dtype, 227 << 10)
    assert constants["HOLD_WEIGHT"] == (dtype == torch.bfloat16)
    types = {name: "*bf16" if dtype == torch.bfloat16 else "*fp32" for name in kernel.arg_names if "_ptr" in name}
    types |= {name: "*fp32" for name in types if "weight" in name or "bias" in name} | {"packing_ptr": "*i32"}
    options = gru.launch_options(blocks.warps) | {"num_stages": blocks.stages}
    compiled = compile_for_hopper(kernel, constants, types, options)
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10
    assert count_stack_bytes(compiled, tmp_path) <= (64 if constants["HOLD_WEIGHT"] else 256)
