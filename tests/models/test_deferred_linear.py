"""A deferred product is F.linear, in value and in every gradient, whatever autograd is asked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from jumok.models.layers.deferred_linear import DeferredLinear

ROWS, INPUTS, OUTPUTS, STEPS = 2, 3, 5, 7
EXACT = {"rtol": 0, "atol": 1e-12}
Product = Callable[..., Tensor]


def plain(weight: Tensor, bias: Tensor | None = None) -> Product:
    return lambda x, addend=None: F.linear(x, weight, bias) + (0 if addend is None else addend)


def leaves(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    sizes = {
        "into": (INPUTS, OUTPUTS),
        "bias": (INPUTS,),
        "weight": (OUTPUTS, INPUTS),
        "start": (ROWS, OUTPUTS),
        "given": (STEPS, ROWS, OUTPUTS),
    }
    return {name: torch.randn(size, dtype=dtype, requires_grad=True) for name, size in sizes.items()}


def loop(make: Callable[..., Product], x: dict[str, Tensor]) -> list[Tensor]:
    """A recurrent loop through two products, one with a bias and one with something added."""
    first, second = make(x["into"], x["bias"]), make(x["weight"])
    states = [x["start"]]
    for given in x["given"].unbind(0):
        states.append(second(first(states[-1]).tanh(), addend=given).tanh())
    return states[1:]


def grads(loss: Tensor, of: dict[str, Tensor], **more: bool) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(of.values()), allow_unused=True, **more))


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_two_rows_by_hand() -> None:
    # dW = Σ g xᵀ = [1 2]·1 + [3 4]·10, db = 1 + 10, and x gets g W.
    weight, bias = torch.tensor([[5.0, 6.0]], requires_grad=True), torch.zeros(1, requires_grad=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    product = DeferredLinear(weight, bias)
    y = torch.cat([product(x[:1]), product(x[1:])])
    assert y.tolist() == [[17.0], [39.0]]
    y.backward(torch.tensor([[1.0], [10.0]]))
    assert weight.grad is not None
    assert bias.grad is not None
    assert x.grad is not None
    assert weight.grad.tolist() == [[31.0, 42.0]]
    assert bias.grad.tolist() == [11.0]
    assert x.grad.tolist() == [[5.0, 6.0], [50.0, 60.0]]


def test_values_and_gradients_equal_plain_products() -> None:
    x = leaves()
    ours, theirs = (torch.stack(loop(make, x)) for make in (DeferredLinear, plain))
    torch.testing.assert_close(ours, theirs, **EXACT)
    slope = torch.randn_like(ours)
    assert_same(grads((ours * slope).sum(), x), grads((theirs * slope).sum(), x))


class Products(TorchDispatchMode):
    """Counts the products whose result has some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += func is torch.ops.aten.mm.default and set(out.shape) == set(self.shape)
        return out


@pytest.mark.parametrize(("make", "times"), [(DeferredLinear, 1), (plain, STEPS)])
def test_weight_gradients_take_one_product(make: Callable[..., Product], times: int) -> None:
    x = leaves()
    loss = torch.stack(loop(make, x)).sum()
    with Products((OUTPUTS, INPUTS)) as products:
        grads(loss, {"weight": x["weight"]})
    assert products.count == times


def test_steps_without_a_gradient_are_skipped() -> None:
    x = leaves()
    ours, theirs = (loop(make, x)[2].sum() for make in (DeferredLinear, plain))  # the steps after the third are unused
    for mine, other in zip(grads(ours, x), grads(theirs, x), strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


@pytest.mark.parametrize("wanted", ["into", "bias", "weight", "start", "given"])
def test_partial_gradients_then_all(wanted: str) -> None:
    x = leaves()
    ours, theirs = (torch.stack(loop(make, x)).sum() for make in (DeferredLinear, plain))
    some = {wanted: x[wanted]}
    assert_same(grads(ours, some, retain_graph=True), grads(theirs, some, retain_graph=True))
    assert_same(grads(ours, x), grads(theirs, x))  # nothing is left over from the pass before


class Silent(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


def test_a_pass_without_rows_uses_no_rows_of_another() -> None:
    x = leaves()
    states = loop(DeferredLinear, x)
    torch.autograd.grad(torch.stack(states).sum(), x["start"], retain_graph=True)  # leaves rows behind
    assert grads(Silent.apply(states[-1]).sum(), {"weight": x["weight"]}) == [None]


def test_a_second_backward_pass_is_equal() -> None:
    x = leaves()
    loss = torch.stack(loop(DeferredLinear, x)).sum()
    assert_same(grads(loss, x, retain_graph=True), grads(loss, x))


def test_gradients_of_losses_that_share_steps_add_up() -> None:
    x = leaves()
    for make in (DeferredLinear, plain):
        states = loop(make, x)
        states[1].sum().backward(retain_graph=True)
        states[4].square().sum().backward()
    twice = [p.grad for p in x.values()]
    for p in x.values():
        p.grad = None
    states = loop(plain, x)
    (2 * (states[1].sum() + states[4].square().sum())).backward()
    for a, p in zip(twice, x.values(), strict=True):
        torch.testing.assert_close(a, p.grad, **EXACT)


def test_a_weight_in_two_loops_and_outside_of_them() -> None:
    x = leaves()

    def total(make: Callable[..., Product]) -> Tensor:
        return torch.stack(loop(make, x)).sum() + torch.stack(loop(make, x)).prod() + x["weight"].square().sum()

    assert_same(grads(total(DeferredLinear), x), grads(total(plain), x))


def test_a_slice_of_a_weight_and_any_number_of_dimensions() -> None:
    weight = torch.randn(OUTPUTS, 2 * INPUTS, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 4, INPUTS, dtype=torch.float64, requires_grad=True)
    addend = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)  # broadcasts
    of = {"weight": weight, "x": x, "addend": addend}
    ours, theirs = (make(weight[:, INPUTS:])(x, addend).square().sum() for make in (DeferredLinear, plain))
    assert_same(grads(ours, of), grads(theirs, of))


def test_without_autograd_it_is_a_plain_product() -> None:
    x = leaves()
    with torch.no_grad():
        product = DeferredLinear(x["weight"])
        assert not product(torch.ones(ROWS, INPUTS, dtype=torch.float64)).requires_grad
    # One that was made without gradients is plain, and still right, where gradients are wanted.
    product(torch.ones(ROWS, INPUTS, dtype=torch.float64)).sum().backward()
    assert x["weight"].grad is not None
    torch.testing.assert_close(x["weight"].grad, torch.full_like(x["weight"], ROWS), **EXACT)


def test_a_frozen_weight_lets_gradients_through() -> None:
    x = leaves()
    x["weight"].requires_grad_(False)
    of = {name: p for name, p in x.items() if p.requires_grad}
    ours, theirs = (torch.stack(loop(make, x)).sum() for make in (DeferredLinear, plain))
    assert_same(grads(ours, of), grads(theirs, of))


def test_autocast_converts_once_and_accumulates_in_one_product() -> None:
    x = leaves(torch.float32)

    def run(make: Callable[..., Product]) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            states = torch.stack(loop(make, x))
        return states, grads(states.float().sum(), x)

    (ours, our_grads), (theirs, their_grads) = run(DeferredLinear), run(plain)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.02)
    truth = {name: p.detach().double().requires_grad_() for name, p in x.items()}
    exact = grads(torch.stack(loop(plain, truth)).sum(), truth)
    for mine, other, right in zip(our_grads, their_grads, exact, strict=True):
        assert mine.dtype == torch.float32
        size = right.abs().max().item()
        error, their_error = ((g - right).abs().max().item() for g in (mine, other))
        assert error <= max(2 * their_error, 0.01 * size)


def test_second_derivatives_raise() -> None:
    x = leaves()
    loss = torch.stack(loop(DeferredLinear, x)).sum()
    with pytest.raises(RuntimeError, match="differentiable once"):
        grads(loss, x, create_graph=True)


def test_changing_a_weight_before_backward_raises() -> None:
    x = leaves()
    loss = torch.stack(loop(DeferredLinear, x)).sum()
    with torch.no_grad():
        x["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    x = leaves()

    def total(make: Callable[..., Product]) -> Tensor:
        product = make(x["weight"])
        y = x["start"]
        for given in x["given"].unbind(0):
            y = checkpoint(lambda y, given: product(y[:, :INPUTS].tanh(), given), y, given, use_reentrant=reentrant)
        return y.sum()

    def gradients(make: Callable[..., Product]) -> list[Tensor | None]:
        for p in x.values():
            p.grad = None
        total(make).backward()
        return [x[name].grad for name in ("weight", "start", "given")]

    for mine, other in zip(gradients(DeferredLinear), gradients(plain), strict=True):
        torch.testing.assert_close(mine, other, **EXACT)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_torch_compile_does_not_change_results() -> None:
    x = leaves()

    def double(given: Tensor) -> Tensor:
        product = DeferredLinear(x["weight"])
        return 2 * product(product(given[0][:, :INPUTS])[:, :INPUTS]).sum()

    compiled = torch.compile(double, backend="eager")
    of = {"weight": x["weight"]}
    assert_same(grads(compiled(x["given"]), of), grads(double(x["given"]), of))


@pytest.mark.gpu
def test_a_loop_captured_in_a_cuda_graph() -> None:
    x = {name: p.detach().cuda().requires_grad_() for name, p in leaves(torch.float32).items()}

    def step() -> list[Tensor]:
        return grads(torch.stack(loop(DeferredLinear, x)).sum(), x)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for p in x.values():
            p.normal_()
    graph.replay()
    for mine, other in zip(captured, grads(torch.stack(loop(plain, x)).sum(), x), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
