"""`launch` runs the same compiled kernel with the same arguments as Triton's own launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the kernels need Triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton_testing import INTERPRETED, ON_GPU  # noqa: E402

from jumok.attention.kernels import launcher  # noqa: E402
from jumok.attention.kernels.common import launch_options  # noqa: E402
from jumok.attention.kernels.launcher import launch  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
LARGE = 1 << 31


@triton.jit(do_not_specialize=["shift"])
def affine_kernel(x_ptr, y_ptr, stride, size, shift, factor, BLOCK: tl.constexpr, REVERSED: tl.constexpr):
    """y[i] = factor · x[stride · i] + shift; REVERSED stores y backwards."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index * stride, mask=index < size, other=0.0).to(tl.float32)
    target = size - 1 - index if REVERSED else index
    tl.store(y_ptr + target, (factor * x + shift).to(y_ptr.dtype.element_ty), mask=index < size)


class RecordedLaunches:
    """A driver that compiles for an H100, and records launches instead of running them."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.stream = 5
        self.utils = self
        self._functions = itertools.count()

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        function = next(self._functions)
        return function, function, 0, 0, 1024

    def unload_module(self, *_: Any) -> None: ...

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def launcher_cls(self, *_: Any) -> Any:
        def run(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            arguments = rest[4:10]  # after the metadata and the hooks; without the constants
            pointers = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
            self.launches.append(((x, y, z), stream, function, *pointers, len(rest)))

        return run

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class TensorOnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    device_index = 0

    def get_device(self) -> int:
        return self.device_index


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedLaunches]:
    if torch.cuda.is_available():
        pytest.skip("with a GPU, kernels run")
    fake = RecordedLaunches()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: fake.stream, raising=False)
    monkeypatch.setattr(launcher, "_variants", {})
    affine_kernel.device_caches.clear()
    yield fake
    affine_kernel.device_caches.clear()


def pretend_on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(TensorOnGpu)


def count_launches_by_triton(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls = []
    launch_by_triton = launcher._launch_by_triton

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return launch_by_triton(*arguments)

    monkeypatch.setattr(launcher, "_launch_by_triton", count)
    return calls


def test_a_variant_is_compiled_for_the_same_arguments_as_by_triton(
    recorded: RecordedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = torch.zeros(256)
    x, y = pretend_on_gpu(memory), pretend_on_gpu(torch.zeros(256))
    unaligned = pretend_on_gpu(memory[1:])
    half = pretend_on_gpu(torch.zeros(256).half())
    arguments = [
        (x, y, 2, 64, 3, 0.5),
        (x, y, 1, 64, 3, 0.5),
        (x, y, 16, 64, 3, 0.5),
        (x, y, 2, 63, 3, 0.5),
        (unaligned, y, 2, 64, 3, 0.5),
        (x, unaligned, 2, 64, 3, 0.5),
        (half, y, 2, 64, 3, 0.5),
        (x, y, 2, 64, 1, 0.5),
        (x, y, 2, 64, 3, 1.0),
        (x, y, 0, 1, 0, 1.0),
        (x, y, 2, LARGE, 3, 0.5),
        (x, y, -2, 64, 3, 0.5),
    ]
    constants = [
        {"BLOCK": 64, "REVERSED": False, **launch_options(2)},
        {"BLOCK": 64, "REVERSED": True, **launch_options(2)},
        {"BLOCK": 64, "REVERSED": False, **launch_options(4)},
    ]
    cases = [(row, constants[0]) for row in arguments] + [(arguments[0], options) for options in constants[1:]]
    for row, options in cases:
        affine_kernel[(3, 2)](*row, **options)
    expected = list(recorded.launches)
    for _ in range(2):  # first to remember the variants
        calls = count_launches_by_triton(monkeypatch)
        recorded.launches.clear()
        for row, options in cases:
            launch(affine_kernel, (3, 2), *row, **options)
        assert recorded.launches == expected
    assert len(calls) == 2  # the numbers that do not fit
    assert len({launched[2] for launched in expected}) > 8  # of different variants


def test_launches_use_the_current_stream(recorded: RecordedLaunches) -> None:
    x = pretend_on_gpu(torch.zeros(64))
    for recorded.stream in (5, 6, 7):
        launch(affine_kernel, (1,), x, x, 1, 64, 0, 1.0, BLOCK=64, REVERSED=False, **launch_options(2))
    assert [launched[1] for launched in recorded.launches] == [5, 6, 7]


@pytest.mark.parametrize("reason", ["launch hook", "pre-run hook", "other device", "constant by position"])
def test_unusual_launches_are_those_of_triton(
    recorded: RecordedLaunches, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    x, y = pretend_on_gpu(torch.zeros(64)), pretend_on_gpu(torch.zeros(64))
    arguments: tuple[Any, ...] = (x, y, 1, 64, 0, 1.0)
    constants: dict[str, Any] = {"BLOCK": 64, "REVERSED": False, **launch_options(2)}
    if reason == "constant by position":
        arguments, constants = (*arguments, constants.pop("BLOCK")), constants
    launch(affine_kernel, (1,), *arguments, **constants)
    launch(affine_kernel, (1,), *arguments, **constants)
    calls = count_launches_by_triton(monkeypatch)
    if reason == "launch hook":
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    if reason == "pre-run hook":
        monkeypatch.setattr(affine_kernel, "pre_run_hooks", [lambda *args, **kwargs: None])
    if reason == "other device":
        monkeypatch.setattr(TensorOnGpu, "device_index", 1)
    if reason == "constant by position":
        arguments = (*arguments[:-1], 32)
    launch(affine_kernel, (1,), *arguments, **constants)
    assert len(calls) == 1
    assert len(recorded.launches) == 3


# --- on a GPU -----------------------------------------------------------------------------------------------


def compute_affine(x: Tensor, stride: int, size: int, shift: int, factor: float, **constants: Any) -> Tensor:
    y = torch.full((size,), 7.0, device=x.device)
    launch(
        affine_kernel,
        (triton.cdiv(size, 64),),
        x,
        y,
        stride,
        size,
        shift,
        factor,
        BLOCK=64,
        **constants,
        **launch_options(2),
    )
    return y


@pytest.mark.gpu
def test_results_on_a_gpu_with_every_specialization() -> None:
    memory = torch.arange(4096.0, device="cuda")
    for _ in range(3):
        for offset, stride, size, dtype, is_reversed in itertools.product(
            (0, 1, 4), (1, 3, 16), (1, 100, 128), (torch.float32, torch.float16), (False, True)
        ):
            x = memory.to(dtype)[offset:]
            y = compute_affine(x, stride, size, 2, 0.5, REVERSED=is_reversed)
            expected = 0.5 * x.float()[: stride * size : stride] + 2
            assert torch.equal(y, expected.flip(0) if is_reversed else expected)


@pytest.mark.gpu
def test_a_launch_runs_on_the_current_stream_of_a_gpu() -> None:
    x, side = torch.zeros(128, device="cuda"), torch.cuda.Stream()
    for _ in range(2):
        compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(1.0)  # later than a launch on another stream would read it
        y = compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    side.synchronize()
    assert torch.equal(y, torch.ones_like(y))


@pytest.mark.gpu
def test_a_launch_is_captured_in_a_cuda_graph() -> None:
    x = torch.zeros(128, device="cuda")
    for _ in range(2):
        compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(y, x)


@pytest.mark.gpu
def test_hooks_of_profilers_see_launches_on_a_gpu() -> None:
    x, names = torch.zeros(128, device="cuda"), []

    def hook(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    for _ in range(2):
        compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["affine_kernel"]


@pytest.mark.gpu
def test_a_tensor_on_the_cpu_is_an_error_on_a_gpu() -> None:
    x = torch.zeros(128, device="cuda")
    for _ in range(2):
        compute_affine(x, 1, 128, 0, 1.0, REVERSED=False)
    with pytest.raises(ValueError, match="cannot be accessed"):
        launch(affine_kernel, (2,), x, x.cpu(), 1, 128, 0, 1.0, BLOCK=64, REVERSED=False, **launch_options(2))


@pytest.mark.gpu
@pytest.mark.skipif(not (ON_GPU and torch.cuda.device_count() > 1), reason="needs two GPUs")
def test_a_launch_runs_on_the_device_of_its_tensors() -> None:
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            x = torch.ones(128, device=device)
            assert torch.equal(compute_affine(x, 1, 128, 0, 1.0, REVERSED=False), x)
