"""A linear layer for the steps of a loop, with its weight gradient computed once after all steps.

A recurrent loop multiplies by the same weight at each of its T steps. By default autograd computes a gradient
of the whole weight T times, from a few rows each, and adds them up. On a GPU most of that time goes into
reading and writing gradients. But their sum is one product over the rows of all steps::

    dW  =  Σ_t g_tᵀ x_t  =  [g_1; …; g_T]ᵀ [x_1; …; x_T]           g_t the gradient of y_t = W x_t + b

So the backward of a step only stores x_t and g_t, and the weight's own node, which autograd reaches after all
steps, computes the product. To enforce this order, every step takes a *token* that was computed from the
weight. No gradient flows through it::

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

from jumok.models.layers.precision import to_autocast_dtype

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def disable_compile(function: FunctionT) -> FunctionT:
    """Exclude a function from ``torch.compile``, which does not keep the order of autograd's nodes."""
    return cast(FunctionT, torch.compiler.disable(function))


class DeferredLinear:
    """``x Wᵀ + b`` for the steps of one loop. Build it before the loop, and call it at each step.

    ``weight`` is ``(out, in)``, ``bias`` is ``(out,)`` or None. It is differentiable once. If neither needs a
    gradient, it is ``F.linear``. Under autocast the weight is converted once, not at every step.

    >>> weight = torch.ones(2, 3, requires_grad=True)
    >>> linear = DeferredLinear(weight)
    >>> y = linear(torch.ones(5, 3)) + linear(torch.ones(5, 3))
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
        needs_gradient = weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and needs_gradient:
            weight, bias = to_autocast_dtype(weight), None if bias is None else to_autocast_dtype(bias)
            rows = self.gradient_rows
            token = _DeferredLinearWeightFunction.apply(weight, bias, rows)  # type: ignore[no-untyped-call]
            self.order_token = cast(Tensor, token)
            self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    @disable_compile
    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """``(…, in)`` to ``(…, out)``, plus ``addend``, which may broadcast."""
        x, addend = to_autocast_dtype(x), None if addend is None else to_autocast_dtype(addend)
        if self.order_token is None or not torch.is_grad_enabled():
            return _linear_add(x, self.weight, self.bias, addend)
        return cast(Tensor, _DeferredLinearStepFunction.apply(x, addend, self.order_token, self))  # type: ignore[no-untyped-call]


def _linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    if addend is None:
        return F.linear(x, weight, bias)
    if bias is None and x.dim() == 2:
        return torch.addmm(addend, x, weight.t())  # one kernel for product and sum
    return F.linear(x, weight, bias) + addend


class _DeferredLinearRows:
    """The rows ``(x, g)`` that the steps of one backward pass have stored.

    A pass that computes only other gradients stores rows too, but does not use them. Each pass has an id, and
    rows of another pass are dropped.
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
    """(weight, bias) → token. Its backward runs after those of all steps, which took the token."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, gradient_rows: _DeferredLinearRows) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient_rows = gradient_rows
        return weight.new_empty(1)  # its value is not used

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, Tensor | None, None]:
        forbid_double_backward("DeferredLinear")
        rows = ctx.gradient_rows.pop_all()
        if not rows:
            return None, None, None
        x, g = (torch.cat(parts) for parts in zip(*rows, strict=True))  # (T·B, in), (T·B, out)
        for_weight, for_bias, _ = ctx.needs_input_grad
        return g.t() @ x if for_weight else None, g.sum(0) if for_bias else None, None


class _DeferredLinearStepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, order_token: Tensor, linear: DeferredLinear) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, linear.weight)
        ctx.gradient_rows = linear.gradient_rows
        return _linear_add(x, linear.weight, linear.bias, addend)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        forbid_double_backward("DeferredLinear")
        x, weight = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None
        ctx.gradient_rows.add(x.detach(), gradient)
        for_x, for_addend, *_ = ctx.needs_input_grad
        # Autograd sums the addend's gradient if it was broadcast.
        return gradient @ weight if for_x else None, gradient if for_addend else None, None, None


def forbid_double_backward(name: str) -> None:
    """Raise if the calling backward pass is itself differentiated: it would be treated as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} is differentiable once only, but create_graph=True asks for second derivatives: leave it out"
        )
