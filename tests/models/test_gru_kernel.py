"""The kernels of the GRU against PyTorch's own in float64, alone and in their place.

As with the other kernels, the tests run on a GPU where there is one, and everywhere in Triton's interpreter,
in a process of its own.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
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

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton.runtime.interpreter as interpreter

    # Its bfloat16 is float32 cut off, which errs twice as much as the rounding of a GPU, and to one side.
    convert = interpreter._convert_float

    def rounded(x, given, wanted, mode):
        if (str(given), str(wanted)) == ("fp32", "bf16"):
            return torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return convert(x, given, wanted, mode)

    interpreter._convert_float = rounded

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from jumok.batches.text import DocumentBatch  # noqa: E402
from jumok.batches.tokens import Tokens  # noqa: E402
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig  # noqa: E402
from jumok.models.kernels import gru  # noqa: E402
from jumok.models.layers import recurrent as room  # noqa: E402
from jumok.models.layers.ragged_layout import PackedSteps, RaggedLayout  # noqa: E402
from jumok.models.layers.recurrent import build_rnn, run_packed_rnn  # noqa: E402

ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"
# NumPy warns of what tests of NaN and sure gates are about.
runs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else pytest.mark.gpu
INPUTS = 3
MANY = [4, 4, 4, *[2] * 15, 1, 1, 1]  # more than a program has


def kernel_serves(x: Tensor, uses_matmul: bool) -> str | None:
    return "float64" if x.dtype == torch.float64 else None


@pytest.fixture(autouse=True)
def _by_kernel_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # Float32 is to be that on the plain side, too. By default cuDNN rounds it to TF32, of 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if INTERPRETED:
        monkeypatch.setattr(room, "triton_unsupported_reason", kernel_serves)


@contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "triton_unsupported_reason", lambda x, uses_matmul: "not now")
        yield


def packed(lengths: list[int]) -> PackedSteps:
    """Sequences of these lengths, which fall."""
    steps = range(max(lengths, default=0))
    return PackedSteps.from_batch_sizes(
        torch.tensor([sum(length > step for length in lengths) for step in steps]), DEVICE
    )


def some_gru(width: int, both: bool, inputs: int = INPUTS) -> nn.GRU:
    rnn = build_rnn("gru", inputs, width, bidirectional=both).to(DEVICE)
    for name, parameter in rnn.named_parameters():
        if name.startswith("bias"):  # they begin as zeros, which would not show whether they are there
            nn.init.normal_(parameter, std=0.5)
    assert isinstance(rnn, nn.GRU)
    return rnn


def toward(states: Tensor) -> Tensor:
    """Some gradient of the states."""
    return torch.arange(states.numel(), device=states.device).view_as(states).sin().to(states.dtype)


def states_and_slopes(rnn: nn.GRU, x: Tensor, packing: PackedSteps) -> list[Tensor]:
    x = x.clone().requires_grad_()
    states = run_packed_rnn(rnn, x, packing)
    return [states.detach(), *torch.autograd.grad(states, [x, *rnn.parameters()], toward(states))]


def exactly(rnn: nn.GRU, x: Tensor, packing: PackedSteps) -> list[Tensor]:
    """The same by PyTorch's own GRU in float64, on the host."""
    rnn, x = copy.deepcopy(rnn).cpu().double(), x.cpu().double().requires_grad_()
    states = rnn(PackedSequence(x, packing.batch_sizes))[0].data
    found = [states.detach(), *torch.autograd.grad(states, [x, *rnn.parameters()], toward(states))]
    return [each.to(DEVICE) for each in found]


def agree(ours: list[Tensor], plain: list[list[Tensor]], exact: list[Tensor], dtype: torch.dtype) -> None:
    slack = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 8
    for at, (found, truth, *others) in enumerate(zip(ours, exact, *plain, strict=True)):
        assert all(found.dtype == other.dtype for other in others)
        scale = truth.norm() or 1.0  # zero: of a sequence of one word, no state is multiplied by a weight
        error, *allowed = (((x.double() - truth).norm() / scale).item() for x in (found, *others))
        told = ", ".join(f"{each:.1e}" for each in allowed)
        assert error <= 2 * max(allowed) + slack, f"result {at}: {error:.1e}, plain PyTorch {told}"


def compared(rnn: nn.GRU, lengths: list[int], dtype: torch.dtype) -> None:
    """Against PyTorch's operations step by step in the same precision, and in float32 against cuDNN too.

    What counts is the larger of their errors. In low precision cuDNN is no measure: within, it keeps in
    float32 what a step hands to the next, and to backward, which PyTorch's own operations round.
    """
    x, packing = torch.randn(sum(lengths), rnn.input_size, device=DEVICE), packed(lengths)
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        ours = states_and_slopes(rnn, x, packing)
        with without_kernels():
            plain = [states_and_slopes(rnn.eval(), x, packing)]  # at rest, it goes step by step
            if ON_GPU and dtype == torch.float32:
                plain.append(states_and_slopes(rnn.train(), x, packing))
    assert ours[0].dtype == dtype
    agree(ours, plain, exactly(rnn, x, packing), dtype)


# --- the numbers --------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "both", "lengths"),
    [
        (5, True, [7, 3, 1]),
        (17, True, MANY),
        (17, False, MANY),
        (31, True, [1]),
        (37, False, [5, 5]),
        (67, True, [3, 1]),
        (100, True, [4, 3]),
        (128, False, [2, 1]),
    ],
)
def test_at_most_twice_the_error_of_plain_torch(width: int, both: bool, lengths: list[int], dtype: torch.dtype) -> None:
    compared(some_gru(width, both), lengths, dtype)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "lengths"), [(17, MANY), (64, [4, 3]), (100, [3, 1])])
def test_a_weight_that_has_no_room_is_read_at_each_step(
    width: int, lengths: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU with little shared memory: at these widths, an H200 holds it."""
    monkeypatch.setattr(gru, "get_max_shared_memory", lambda device: 1 << 10)
    assert not gru._get_kernel_constants(width, dtype, gru.get_max_shared_memory(DEVICE))["HOLD_WEIGHT"]
    compared(some_gru(width, both=True), lengths, dtype)


@runs_kernels
@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=19),
    width=st.sampled_from([1, 7, 19]),
    both=st.booleans(),
)
def test_whatever_the_lengths_are(lengths: list[int], width: int, both: bool) -> None:
    torch.manual_seed(0)
    lengths = sorted(lengths, reverse=True)
    rnn, packing = some_gru(width, both), packed(lengths)
    x = torch.randn(sum(lengths), INPUTS, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(room, "triton_unsupported_reason", kernel_serves)
        found = states_and_slopes(rnn, x, packing)
    for one, other in zip(found, exactly(rnn, x, packing), strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double() / scale, other / scale, rtol=1e-5, atol=2e-6)


@runs_kernels
def test_a_step_by_hand() -> None:
    """One number a state, one word, then two: h = (1 - z) n + z h, with z = 1/4, r = 1/2."""
    rnn = build_rnn("gru", 1, 1).to(DEVICE)
    quarter = -float(np.log(3))  # σ(−log 3) = 1/4
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.zero_()
        rnn.weight_ih_l0[2] = 1.0  # n = tanh(x + ½ (2 h + 4))
        rnn.weight_hh_l0[2] = 2.0
        rnn.bias_hh_l0.copy_(torch.tensor([0.0, quarter, 4.0]))
    x = torch.tensor([[-2.0], [-3.0], [-2.0]], device=DEVICE)  # two first words, one second word
    other = float(0.75 * np.tanh(-1))
    found = run_packed_rnn(rnn, x, packed([2, 1]))
    torch.testing.assert_close(found.cpu(), torch.tensor([[0.0], [other], [0.0]]), rtol=1e-6, atol=1e-7)


@runs_kernels
def test_gates_that_are_sure_and_slopes_that_vanish() -> None:
    rnn, packing = some_gru(5, both=True), packed([3, 2])
    x = 1e4 * torch.randn(5, INPUTS, device=DEVICE)
    found = states_and_slopes(rnn, x, packing)
    assert all(each.isfinite().all() for each in found)
    torch.testing.assert_close(found[0].double(), exactly(rnn, x, packing)[0], rtol=1e-5, atol=1e-6)


@runs_kernels
def test_what_is_not_finite_stays_in_its_sequence() -> None:
    rnn, lengths = some_gru(7, both=True), [3, 2, 2]
    x = torch.randn(7, INPUTS, device=DEVICE)
    clean = run_packed_rnn(rnn, x, packed(lengths))
    x[4] = torch.nan  # the second word of the second sequence
    dirty = run_packed_rnn(rnn, x, packed(lengths))
    others = [0, 2, 3, 5, 6]
    assert torch.equal(dirty[others], clean[others])
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[1, :7], clean[1, :7])  # read on, the first word does not know of the second
    assert dirty[1, 7:].isnan().all()


# --- in graphs of autograd ----------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("both", [False, True])
def test_nothing_to_read(both: bool) -> None:
    found = states_and_slopes(some_gru(5, both), torch.zeros(0, INPUTS, device=DEVICE), packed([]))
    assert found[0].shape == (0, 5 * (1 + both))
    assert found[1].shape == (0, INPUTS)
    assert not any(slope.any() for slope in found[1:])


@runs_kernels
def test_slopes_asked_for_twice_and_for_some_only() -> None:
    rnn, packing = some_gru(5, both=True), packed([3, 2, 1])
    wide = torch.randn(INPUTS, 6, device=DEVICE).t().requires_grad_()  # any strides
    states = run_packed_rnn(rnn, wide, packing)
    (first,) = torch.autograd.grad(states.sum(), wide, retain_graph=True)  # a gradient of stride 0
    again = torch.autograd.grad(states.sum(), [wide, *rnn.parameters()])
    assert torch.equal(first, again[0])
    rnn.requires_grad_(False)
    (alone,) = torch.autograd.grad(run_packed_rnn(rnn, wide, packing).sum(), wide)
    assert torch.equal(first, alone)
    rnn.weight_hh_l0.requires_grad_()
    (of_weight,) = torch.autograd.grad(run_packed_rnn(rnn, wide.detach(), packing).sum(), rnn.weight_hh_l0)
    assert torch.equal(of_weight, again[2])


@runs_kernels
def test_no_second_derivative() -> None:
    x = torch.randn(3, INPUTS, device=DEVICE, requires_grad=True)
    states = run_packed_rnn(some_gru(5, both=False), x, packed([2, 1]))
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(states.square().sum(), x, create_graph=True)


@runs_kernels
def test_without_gradients_nothing_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rnn, x, packing = some_gru(5, both=True), torch.randn(6, INPUTS, device=DEVICE), packed([3, 2, 1])
    learning = run_packed_rnn(rnn, x, packing)
    launch, asked = gru._launch, []

    def spied(*given, **constants):
        asked.append(constants["NEEDS_GRADIENT"])
        launch(*given, **constants)

    monkeypatch.setattr(gru, "_launch", spied)
    with torch.no_grad():
        looking = run_packed_rnn(rnn, x, packing)
    with torch.inference_mode():
        assert torch.equal(run_packed_rnn(rnn, x, packing), looking)
    assert asked == [False, False]
    assert learning.requires_grad
    assert not looking.requires_grad
    assert torch.equal(looking, learning)


def documents() -> DocumentBatch:
    rows = [[7, 8, 9, 3], [5], [4, 6], [9, 9, 2]]
    return DocumentBatch.from_sequences(rows, sentence_indices=[[0, 1, 3], [2]], labels=[2, 0])


@runs_kernels
def test_a_network_learns_adversarially() -> None:
    """It is read twice, and its gradient taken in between."""
    torch.manual_seed(1)
    config = HierarchicalConfig(embedding_width=7, width=5, attention_width=11, dropout=0.0, adversarial_epsilon=0.5)
    model, batch = (
        HierarchicalAttentionNetwork(config, vocab_size=11, num_classes=3).to(DEVICE).train(),
        documents().to(DEVICE),
    )

    def learnt() -> list[Tensor]:
        loss = model.loss(batch)
        slopes = torch.autograd.grad(loss.total, [*model.parameters()])
        return [loss.total.detach(), loss.parts["adversarial"], *slopes]

    ours = learnt()
    with without_kernels():
        plain = learnt()  # all float32, on a GPU by cuDNN: both err by some 1e-6, and neither is the truth
    assert ours[1] > ours[0]  # moved where it hurts
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@runs_kernels
def test_a_batch_brings_the_packing() -> None:
    """The same as from the sizes alone, and where the kernels want it."""
    laid = RaggedLayout.from_tokens(Tokens.pack([[5], [7, 8, 9], [], [4, 6]]).to(DEVICE))
    alone = packed([3, 2, 1])
    assert laid.packed_steps.num_sequences == alone.num_sequences == 3
    assert laid.packed_steps.offsets_and_lengths.tolist() == alone.offsets_and_lengths.tolist() == [0, 3, 5, 3, 2, 1]
    assert laid.packed_steps.batch_sizes.tolist() == alone.batch_sizes.tolist() == [3, 2, 1]
    assert laid.packed_steps.offsets_and_lengths.data_ptr() % 16 == 0  # else Triton compiles another kernel


# --- who takes them -----------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("other", ["lstm", "layers", "wide", "float64", "no bias"])
def test_what_the_kernels_cannot_do_pytorch_does(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []

    def taking(x: Tensor, *_: object) -> Tensor:
        taken.append(x)
        return x

    monkeypatch.setattr(gru, "run_fused_gru", taking)
    run_packed_rnn(some_gru(5, both=False), torch.zeros(1, INPUTS, device=DEVICE), packed([1]))
    assert len(taken) == 1  # as a rule
    rnn: nn.GRU | nn.LSTM = {
        "lstm": lambda: nn.LSTM(INPUTS, 5),
        "layers": lambda: nn.GRU(INPUTS, 5, num_layers=2),
        "wide": lambda: nn.GRU(INPUTS, 129),
        "float64": lambda: nn.GRU(INPUTS, 5).double(),
        "no bias": lambda: nn.GRU(INPUTS, 5, bias=False),
    }[other]()
    rnn.to(DEVICE)
    x = torch.zeros(3, INPUTS, device=DEVICE, dtype=rnn.weight_ih_l0.dtype)
    with torch.no_grad():
        assert run_packed_rnn(rnn, x, packed([2, 1])).shape == (3, rnn.hidden_size)
    assert len(taken) == 1


# --- on a GPU -----------------------------------------------------------------------------------------------


def lengths_of_reviews(words: int, longest: int) -> list[int]:
    """Sentences of about so many words in all, as long as those of reviews."""
    chance = np.random.default_rng(0)
    drawn = np.clip(chance.lognormal(2.8, 0.7, words), 1, longest).astype(int)
    kept = drawn[: int(np.searchsorted(np.cumsum(drawn), words)) + 1]
    return sorted(kept.tolist(), reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "inputs"), [(64, 200), (64, 128), (100, 200), (50, 200), (128, 300)])
def test_at_real_sizes(width: int, inputs: int, dtype: torch.dtype) -> None:
    compared(some_gru(width, True, inputs), lengths_of_reviews(17_000, 90), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time(width: int, dtype: torch.dtype) -> None:
    rnn, lengths = some_gru(width, both=True), lengths_of_reviews(17_000, 90)
    x, packing = torch.randn(sum(lengths), INPUTS, device=DEVICE), packed(lengths)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        first, second = (states_and_slopes(rnn, x, packing) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # that it is a prototype
def test_it_waits_for_nothing() -> None:
    rnn, lengths = some_gru(64, both=True), lengths_of_reviews(40_000, 90)
    x, packing = torch.randn(sum(lengths), INPUTS, device=DEVICE), packed(lengths)
    states_and_slopes(rnn, x, packing)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        states_and_slopes(rnn, x, packing)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- without a GPU ------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", ["gru_forward_kernel", "gru_backward_kernel"])
@pytest.mark.parametrize(("kind", "width"), [("bf16", 100), ("fp32", 100)])
def test_the_kernels_compile_for_hopper_and_hardly_spill(kind: str, width: int, name: str, tmp_path: Path) -> None:
    """The interpreter lets pass what the compiler does not, and the compiler needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(gru, name)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    blocks = gru.choose_gru_blocks(width, dtype)
    constants = {
        "DIRECTIONS": 2,
        "ROWS": blocks.rows,
        "NEEDS_GRADIENT": True,
        **gru._get_kernel_constants(width, dtype, 227 << 10),
    }
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    assert constants["HOLD_WEIGHT"] == ((kind, width) != ("fp32", 100))
    types = {name: f"*{kind}" for name in function.arg_names if name.endswith("_ptr")}
    types |= {name: "*fp32" for name in types if "weight" in name or "bias" in name}
    types["packing_ptr"] = "*i32"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    pointers = [at for at, name in enumerate(function.arg_names) if "*" in signature[name]]
    aligned = {(at,): [["tt.divisibility", 16]] for at in pointers}
    source = triton.compiler.ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = gru.launch_options(blocks.warps) | {"num_stages": blocks.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    used = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    assert int(re.findall(r"STACK:(\d+)", used)[0]) <= (64 if constants["HOLD_WEIGHT"] else 256), used


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_in_the_interpreter() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        [*command, __file__], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
