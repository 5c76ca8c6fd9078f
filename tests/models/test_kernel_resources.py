"""Which kernels run on which GPU, and whether they fit: compiled here for each generation, without the GPU.

A test pretends a GPU by replacing ``gpu_support.get_gpu_properties``, runs the code that launches kernels on CPU
tensors, records the launches in place of running them, and compiles each one for that GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import jumok
from jumok.attention import gpu_support
from jumok.attention.additive import compute_additive_scores
from jumok.attention.gpu_support import GPUProperties
from jumok.attention.paths import varlen
from jumok.batches.tokens import IGNORE
from jumok.models.layers.output_loss import linear_cross_entropy
from jumok.models.layers.ragged_layout import PackedSteps
from jumok.models.layers.recurrent import run_packed_rnn
from jumok.models.tacotron_decoder import forward_attention

triton = pytest.importorskip("triton", reason="the kernels need Triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

# Compute capability and shared memory that a thread block may opt in to (CUDA C++ Programming Guide, table
# "Technical Specifications per Compute Capability").
GPUS = {
    "sm_75": GPUProperties((7, 5), 65_536),  # T4, RTX 20
    "sm_80": GPUProperties((8, 0), 166_912),  # A100
    "sm_86": GPUProperties((8, 6), 101_376),  # RTX 30, A10, A40
    "sm_89": GPUProperties((8, 9), 101_376),  # RTX 40, L4, L40S
    "sm_90": GPUProperties((9, 0), 232_448),  # H100, H200
    "sm_100": GPUProperties((10, 0), 232_448),  # B200
    "sm_120": GPUProperties((12, 0), 101_376),  # RTX 50
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Pretended(NamedTuple):
    """A GPU, and the launches of kernels since it is pretended."""

    name: str
    gpu: GPUProperties
    launches: list[Launch]

    @property
    def architecture(self) -> int:
        return 10 * self.gpu.compute_capability[0] + self.gpu.compute_capability[1]

    def compile_all(self) -> list[Any]:
        """Compile the launches for the GPU; each must fit."""
        kernels = []
        for launch in self.launches:
            kernel = compiled(launch, self.architecture)
            shared = kernel.metadata.shared
            name = launch.function.fn.__name__
            assert shared <= self.gpu.max_shared_memory, f"{name}: {shared} of {self.gpu.max_shared_memory} bytes"
            kernels.append(kernel)
        return kernels


def compiled(launch: Launch, architecture: int) -> Any:
    """What Triton makes of a launch, with the types and alignments that it would find."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(launch.function.params):
        value, name = launch.arguments[parameter.name], parameter.name
        specialized = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialized and type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
        aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
        if specialized and aligned:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(launch.function, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch.options)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Pretended]:
    launches: list[Launch] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: kwargs.pop(name) for name in list(kwargs) if name in self.arg_names}
        launches.append(Launch(self, arguments, kwargs))

    def begin(name: str) -> Pretended:
        launches.clear()
        monkeypatch.setattr(JITFunction, "run", record)
        monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device: GPUS[name])
        return Pretended(name, GPUS[name], launches)

    return begin


def low(kind: str) -> torch.autocast:
    return torch.autocast("cpu", DTYPES[kind], enabled=kind != "fp32")


# --- the GRU ------------------------------------------------------------------------------------------------


def run_gru(width: int, kind: str, both: bool = True, learning: bool = True) -> None:
    rnn = nn.GRU(3, width, bidirectional=both).requires_grad_(learning)
    with low(kind):
        states = run_packed_rnn(rnn, torch.zeros(3, 3), PackedSteps.from_batch_sizes(torch.tensor([2, 1]), "cpu"))
        if learning:
            states.sum().backward()


def is_held(on: Pretended) -> bool | None:
    """Whether the weight is held in shared memory; None: cuDNN runs."""
    held = {launch.arguments["HOLD_WEIGHT"] for launch in on.launches}
    return held.pop() if held else None


@pytest.mark.parametrize(
    ("name", "kind", "width", "held"),
    [
        ("sm_75", "fp16", 64, None),
        ("sm_80", "bf16", 100, True),
        ("sm_86", "bf16", 100, False),
        ("sm_86", "bf16", 64, True),
        ("sm_89", "fp32", 64, False),
        ("sm_89", "fp32", 32, True),
        ("sm_90", "bf16", 128, True),
        ("sm_90", "fp32", 64, True),
        ("sm_90", "fp32", 100, False),
        ("sm_100", "fp16", 128, True),
        ("sm_120", "bf16", 128, False),
    ],
)
def test_the_gru_weight_is_held_in_shared_memory_if_it_fits(
    pretend: Callable[[str], Pretended], name: str, kind: str, width: int, held: bool | None
) -> None:
    on = pretend(name)
    run_gru(width, kind)
    assert is_held(on) is held


@pytest.mark.parametrize(("name", "kind", "width"), [("sm_89", "bf16", 100), ("sm_120", "fp32", 64)])
def test_the_gru_fits(pretend: Callable[[str], Pretended], name: str, kind: str, width: int) -> None:
    """Held, it took 106,496 bytes of 101,376 at these widths."""
    on = pretend(name)
    run_gru(width, kind)
    assert len(on.compile_all()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(
    ("kind", "width"),
    [*[("bf16", width) for width in (17, 64, 100, 128)], ("fp16", 128)]
    + [("fp32", width) for width in (17, 33, 64, 128)],
)
def test_the_gru_fits_at_any_width(pretend: Callable[[str], Pretended], name: str, kind: str, width: int) -> None:
    on = pretend(name)
    run_gru(width, kind)
    run_gru(width, kind, both=False, learning=False)
    on.compile_all()
    if name in ("sm_80", "sm_90", "sm_100"):  # where there is room for all that the registers take
        padded = max(16, 1 << (width - 1).bit_length())
        assert is_held(on) is (padded * DTYPES[kind].itemsize <= 256)


# --- packed sequences ---------------------------------------------------------------------------------------


def packed_path(length: int, width: int, dropout: float, kind: str, learning: bool = True) -> str:
    """The path of attention over packed sequences; run, if it is our kernel."""
    x = torch.zeros(1, 2, 2 * length, width, dtype=DTYPES[kind], requires_grad=learning)
    ids = torch.arange(2).repeat_interleave(length)
    how: dict[str, Any] = {"mask": jumok.masks.documents(ids), "dropout": dropout}
    path = jumok.explain(x, x, x, **how).name
    if path == "packed-short":
        out = jumok.attend(x, x, x, **how)
        if learning:
            out.sum().backward()
    assert varlen.has_fast_varlen_path(x.device, length, width, dropout) is (path in ("packed-short", "varlen"))
    return path


@pytest.mark.parametrize(
    ("name", "length", "width", "taken"),
    [
        ("sm_75", 128, 32, False),
        ("sm_80", 128, 128, True),
        ("sm_86", 128, 64, True),
        ("sm_89", 128, 128, False),
        ("sm_90", 128, 128, True),
        ("sm_100", 128, 128, True),
        ("sm_120", 64, 128, True),
    ],
)
def test_the_short_kernel_is_used_if_it_fits(
    pretend: Callable[[str], Pretended], name: str, length: int, width: int, taken: bool
) -> None:
    pretend(name)
    assert (packed_path(length, width, 0.1, "bf16") == "packed-short") is taken


@pytest.mark.parametrize("name", ["sm_120"])
def test_attention_over_short_packed_sequences_fits(pretend: Callable[[str], Pretended], name: str) -> None:
    on = pretend(name)
    assert packed_path(16, 16, 0.1, "bf16") == "packed-short"
    on.compile_all()


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("length", "width"), [(32, 32), (64, 128), (128, 64), (128, 128)])
def test_attention_over_packed_sequences_fits_at_any_size(
    pretend: Callable[[str], Pretended], name: str, length: int, width: int
) -> None:
    on = pretend(name)
    path = packed_path(length, width, 0.1, "bf16")
    if name in ("sm_80", "sm_90", "sm_100"):
        assert path == "packed-short"
    on.compile_all()


def test_flash_attention_is_for_ampere_and_newer(pretend: Callable[[str], Pretended]) -> None:
    for name in GPUS:
        pretend(name)
        assert (packed_path(129, 64, 0.0, "fp16") == "varlen") is (name != "sm_75")


# --- kernels without matrix products ------------------------------------------------------------------------


def run_elementwise_kernels(kind: str, width: int) -> None:
    """Additive scores, an additive step, the loss over a vocabulary, and a step of forward attention."""
    dtype = DTYPES[kind]
    score = jumok.scores.Additive(7, 5, width).to(dtype)
    query, value = torch.zeros(2, 1, 7, dtype=dtype), torch.zeros(2, 11, 5, dtype=dtype)
    jumok.attend(query, score.prepare(value), value, score=score).sum().backward()
    keys = torch.zeros(2, 11, width, dtype=dtype, requires_grad=True)
    compute_additive_scores(keys, keys, score.v).sum().backward()
    weight = torch.zeros(101, 7, dtype=dtype, requires_grad=True)
    labels = torch.tensor([3, IGNORE])
    linear_cross_entropy(torch.zeros(2, 7, dtype=dtype), weight, labels, 0.1)[0].backward()
    weights = torch.ones(2, width, dtype=dtype, requires_grad=True)
    forward_attention(weights, torch.ones(2, width)).sum().backward()


@pytest.mark.parametrize(("kind", "kernels"), [("fp16", 8), ("fp32", 7), ("bf16", 0)])
def test_kernels_without_products_run_on_turing(pretend: Callable[[str], Pretended], kind: str, kernels: int) -> None:
    on = pretend("sm_75")
    run_elementwise_kernels(kind, 64)
    assert len({launch.function for launch in on.launches}) == kernels


def test_additive_scores_fit(pretend: Callable[[str], Pretended]) -> None:
    on = pretend("sm_75")
    x = torch.zeros(2, 11, 16, dtype=torch.float16)
    compute_additive_scores(x, x, torch.zeros(16, dtype=torch.float16))
    assert any("tanh.approx" in kernel.asm["ptx"] for kernel in on.compile_all())


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("kind", ["fp16", "fp32"])
@pytest.mark.parametrize("width", [64, 4096])
def test_kernels_without_products_fit_at_any_width(
    pretend: Callable[[str], Pretended], name: str, kind: str, width: int
) -> None:
    on = pretend(name)
    run_elementwise_kernels(kind, width)
    on.compile_all()


# --- pooled maps --------------------------------------------------------------------------------------------


def run_pooling(kind: str, width: int, length: int) -> None:
    from jumok.attention.kernels.lse import compute_row_lse
    from jumok.attention.kernels.pooled_maps import compute_pooled_maps

    x = torch.zeros(1, length, width, dtype=DTYPES[kind])
    lse = compute_row_lse(x, x, scale=1.0)
    compute_pooled_maps(x, x, lse, scale=1.0, output_size=(32, 32))
    compute_pooled_maps(x, x, lse, scale=1.0, output_size=(32, 32), diagonal=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_pooled_maps_fit(pretend: Callable[[str], Pretended], name: str, kind: str, width: int) -> None:
    if width * DTYPES[kind].itemsize > 512:
        pytest.skip("wider than the kernel takes")
    from jumok.attention.kernels.lse import MAX_SHARED_MEMORY_BYTES

    on = pretend(name)
    run_pooling(kind, width, 8192)
    assert on.launches
    for kernel in on.compile_all():
        assert kernel.metadata.shared <= MAX_SHARED_MEMORY_BYTES  # what gpu_pooling.py asks for


# --- what else the generation decides -----------------------------------------------------------------------


ROCM = GPUProperties((9, 4), 65_536, is_rocm=True)


@pytest.fixture
def on_rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu_support, "get_gpu_properties", lambda device: ROCM)
    return


@pytest.mark.usefixtures("on_rocm")
def test_no_kernels_on_rocm() -> None:
    x = torch.zeros(1, dtype=torch.float16)
    assert "AMD" in (gpu_support.triton_unsupported_reason(x) or "")
    assert packed_path(64, 64, 0.0, "fp16") not in ("packed-short", "varlen")
    assert gpu_support.supports_bfloat16(x.device)
    assert gpu_support.supports_compile(x.device)


def test_the_reason_names_both_generations(pretend: Callable[[str], Pretended]) -> None:
    pretend("sm_75")
    x = torch.zeros(1, 1, 4, 8, dtype=torch.float16)
    told = str(jumok.explain(x, x, x, mask=jumok.masks.documents([0, 0, 1, 1])))
    assert "compute capability 8.0 or newer, and this one has 7.5" in told


def test_no_gpu_properties_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert gpu_support.get_gpu_properties(cpu) is None
    assert not gpu_support.supports_bfloat16(cpu)
    assert not gpu_support.supports_compile(cpu)
    assert "on cpu" in (gpu_support.packed_unsupported_reason(cpu) or "")


@pytest.mark.gpu
def test_shared_memory_equals_that_of_the_driver() -> None:
    """The same shared memory as Triton reads from the CUDA driver."""
    device = torch.device("cuda", 0)
    gpu = gpu_support.get_gpu_properties(device)
    assert gpu is not None
    assert gpu.compute_capability == torch.cuda.get_device_capability(device)
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert gpu.max_shared_memory == properties["max_shared_mem"]
