"""A product with the same weight at many steps, whose gradient is computed once, after all of them.

A recurrent loop multiplies by the same weight at each of its T steps. Left alone, autograd computes a
gradient of the whole weight T times, from a few rows each, and adds them up: on a GPU most of that time goes
into reading and writing gradients. But their sum is one product over the rows of all steps::

    dW  =  Σ_t g_tᵀ x_t  =  [g_1; …; g_T]ᵀ [x_1; …; x_T]           g_t the gradient of y_t = W x_t + b

So a step's backward only writes x_t and g_t into a ledger, and the weight's own node, which autograd reaches
when all steps are through, does the product. For autograd to keep to this order, every step takes a *token*
that was made from the weight; no gradient flows through it::

    weight ──► token ──┬──► step 1 ──► y_1
                       ├──► step 2 ──► y_2
                       └──► step 3 ──► y_3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["DeferredLinear"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def disable_compile(function: FunctionT) -> FunctionT:
    """Keep torch.compile out: this is about the order of autograd's nodes, and a compiler has its own."""
    return cast(FunctionT, torch.compiler.disable(function))


class DeferredLinear:
    """``x Wᵀ + b`` for the steps of one loop: make it before the loop, call it at each step.

    ``weight`` is ``(out, in)``, ``bias`` ``(out,)`` or None. Differentiable once. Where no gradient of them
    is wanted, it is ``F.linear``. Under autocast the weight is converted once, not at every step.

    >>> weight = torch.ones(2, 3, requires_grad=True)
    >>> product = Deferred(weight)
    >>> y = product(torch.ones(5, 3)) + product(torch.ones(5, 3))
    >>> y.sum().backward()
    >>> weight.grad
    tensor([[10., 10., 10.],
            [10., 10., 10.]])
    """

    @disable_compile
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.gradient_rows = _DeferredLinearRows()
        self.order_token: Tensor | None = None
        learned = weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and learned:
            weight, bias = _to_autocast_dtype(weight), None if bias is None else _to_autocast_dtype(bias)
            rows = self.gradient_rows
            token = _DeferredLinearWeightFunction.apply(weight, bias, rows)  # type: ignore[no-untyped-call]
            self.order_token = cast(Tensor, token)
            self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    @disable_compile
    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """``(…, in)`` to ``(…, out)``, with ``addend`` (which broadcasts) added."""
        x, addend = _to_autocast_dtype(x), None if addend is None else _to_autocast_dtype(addend)
        if self.order_token is None or not torch.is_grad_enabled():
            return _linear_add(x, self.weight, self.bias, addend)
        return cast(Tensor, _DeferredLinearStepFunction.apply(x, addend, self.order_token, self))  # type: ignore[no-untyped-call]


def _to_autocast_dtype(x: Tensor) -> Tensor:
    """As autocast would convert it."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    if addend is None:
        return F.linear(x, weight, bias)
    if bias is None and x.dim() == 2:
        return torch.addmm(addend, x, weight.t())  # added by the product itself
    return F.linear(x, weight, bias) + addend


class _DeferredLinearRows:
    """The rows ``(x, g)`` that the steps of one backward pass left.

    A pass that asks for other gradients only leaves rows too, which nobody takes. Each pass has a number, and
    rows of another one are dropped.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._graph_task_id = -1

    def add(self, x: Tensor, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task_id:
            self._rows, self._graph_task_id = [], task
        self._rows.append((x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])))

    def pop_all(self) -> list[tuple[Tensor, Tensor]]:
        rows, self._rows = self._rows, []
        return rows if self._graph_task_id == torch._C._current_graph_task_id() else []


class _DeferredLinearWeightFunction(torch.autograd.Function):
    """(weight, bias) → token. Its backward comes after that of all steps, for each of them took the token."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, gradient_rows: _DeferredLinearRows) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.ledger = gradient_rows
        return weight.new_empty(1)  # nobody looks at what it holds

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
        _forbid_double_backward()
        rows = ctx.ledger.take()
        if not rows:
            return None, None, None
        x, g = (torch.cat(same) for same in zip(*rows, strict=True))  # (T·B, in), (T·B, out)
        for_weight, for_bias, _ledger = ctx.needs_input_grad
        return g.t() @ x if for_weight else None, g.sum(0) if for_bias else None, None


class _DeferredLinearStepFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, addend: Tensor | None, order_token: Tensor, linear: DeferredLinear
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, linear.weight)
        ctx.ledger = linear.gradient_rows
        return _linear_add(x, linear.weight, linear.bias, addend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        _forbid_double_backward()
        x, weight = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None
        ctx.ledger.add(x.detach(), gradient)
        for_x, for_plus, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if for_x else None,
            gradient if for_plus else None,
            None,
            None,
        )  # autograd undoes broadcasts


def _forbid_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a deferred product is differentiable once, and create_graph=True asks for more: leave that out"
        )
