"""Modules that torch.compile has compiled: the output is that of the compiled code, and nothing happens twice."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import SelfAttention
from torch import Tensor, nn
from torch.nn import functional as F

from jumok.errors import InputError
from jumok.look.capture.watch import watch
from jumok.look.views.ablation import knock_out

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:The .grad attribute")]  # of dynamo itself
X = torch.randn(2, 5, 6)


class PerturbingBackend:
    """Compiles to code whose floats are larger by 1, and counts the compilations."""

    def __init__(self) -> None:
        self.num_compilations = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Any:
        self.num_compilations += 1
        return lambda *args: [x + 1 if isinstance(x, Tensor) and x.is_floating_point() else x for x in graph(*args)]


class FusedAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Changes a buffer, a list, an attribute, its input and the random state."""

    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = SelfAttention(), FusedAttention(), nn.BatchNorm1d(5)
        self.register_buffer("num_calls", torch.zeros(()))
        self.last_mean: Tensor | None = None

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        self.num_calls += 1
        self.last_mean = x.mean()
        if state is not None:
            state += 1
        return self.norm(self.second(self.first(x))) + torch.rand(1)


def compile_whole(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def compile_in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def compile_forward(model: nn.Module, backend: Any) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
    return model


def compile_part(model: nn.Module, backend: Any) -> nn.Module:
    model.second = torch.compile(model.second, backend=backend)  # type: ignore[assignment]
    return model


def compile_part_in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.second.compile(backend=backend)  # type: ignore[operator, union-attr]
    return model


@pytest.mark.parametrize(
    ("build", "compiled_name"),
    [
        (compile_whole, "Model"),
        (compile_in_place, "Model"),
        (compile_forward, "Model"),
        (compile_part, "second"),
        (compile_part_in_place, "second"),
    ],
)
def test_output_is_that_of_the_compiled_code(build: Callable[..., nn.Module], compiled_name: str) -> None:
    torch.manual_seed(0)
    original, backend = Model(), PerturbingBackend()
    model = build(original, backend)
    model(X, torch.zeros(1))  # compiles
    outputs, states, tensors, num_compilations = [], [], [], []
    saved = {name: value.clone() for name, value in original.state_dict().items()}
    for is_watched in (False, True, False):
        original.load_state_dict({name.replace("second._orig_mod", "second"): x for name, x in saved.items()}, False)
        original.num_calls.zero_()
        torch.manual_seed(1)
        state = torch.zeros(1)
        with contextlib.ExitStack() as stack:
            if is_watched:
                stack.enter_context(pytest.warns(UserWarning, match=f"{compiled_name} is compiled by torch.compile"))
                captures = stack.enter_context(watch(model))
            outputs.append(model(X, state))
        states.append(state)
        tensors.append([*(x.clone() for x in original.buffers()), original.last_mean, torch.rand(3)])
        num_compilations.append(backend.num_compilations)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert len(set(num_compilations)) == 1  # nothing is compiled again
    assert states == [torch.ones(1)] * 3
    for plain, watched in zip(tensors[0], tensors[1], strict=True):
        torch.testing.assert_close(watched, plain, rtol=0, atol=0)
    assert captures.names == ["first", "second"]
    assert len(captures) == 2
    query, key, _ = original.first.project(X).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    scores = (query @ key.mT / 3**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(captures["first"].weights(), scores.softmax(-1))


def test_gradients_are_those_of_the_compiled_code() -> None:
    model = torch.compile(SelfAttention(nn.Softmax(-1)).eval(), backend="aot_eager")
    gradients = []
    for is_watched in (False, True):
        x = X.clone().requires_grad_()
        warning = pytest.warns(UserWarning, match="is compiled") if is_watched else contextlib.nullcontext()
        with warning, watch(model) if is_watched else contextlib.nullcontext():  # type: ignore[arg-type]
            model(x * 2).sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_wrapper_of_the_watched_model() -> None:
    model, backend = SelfAttention().eval(), PerturbingBackend()
    compiled = torch.compile(model, backend=backend)
    expected = compiled(X)
    with pytest.warns(UserWarning, match="SelfAttention is compiled"), watch(model) as captures:
        outputs = compiled(X), model(X)  # the original needs no second run
    assert torch.equal(outputs[0], expected)
    assert not torch.equal(outputs[1], expected)
    assert [layer.name for layer in captures] == ["SelfAttention"] * 2
    assert torch.equal(captures[0].weights(), captures[1].weights())
    assert backend.num_compilations == 1


def test_forced_eager_runs_once() -> None:
    model = torch.compile(SelfAttention().eval(), backend=PerturbingBackend())
    with torch.compiler.set_stance("force_eager"), watch(model) as captures:  # type: ignore[arg-type]
        out = model(X)
    assert torch.equal(out, model._orig_mod(X))
    assert captures.names == ["SelfAttention"]


def test_inputs_that_cannot_be_copied_are_an_error() -> None:
    class Open:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it is open")

    class Reading(SelfAttention):
        def forward(self, x: Tensor, file: Any) -> Tensor:
            return super().forward(x)

    model = torch.compile(Reading(), backend=PerturbingBackend())
    message = r"a Open cannot be copied \(it is open\); run the model uncompiled"
    with pytest.warns(UserWarning, match="compiled"), pytest.raises(InputError, match=message), watch(model):  # type: ignore[arg-type]
        model(X, Open())


@pytest.mark.parametrize("build", [compile_whole, compile_in_place, compile_forward, compile_part])
def test_knock_out_refuses_compiled_code(build: Callable[..., nn.Module]) -> None:
    model = build(Model(), PerturbingBackend())
    with pytest.raises(InputError, match=r"is compiled by torch\.compile.*knock_out does not reach it"):  # noqa: SIM117
        with knock_out(model, {"first": [0]}):
            pass
    inner = SelfAttention()
    compiled = torch.compile(inner, backend=PerturbingBackend())
    with (
        pytest.raises(InputError, match="SelfAttention was called as compiled"),
        knock_out(inner, {"SelfAttention": [0]}),
    ):
        compiled(X)
