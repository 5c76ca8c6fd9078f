"""Additive attention of one query per row, step by step, with an explicit backward pass.

For loops that are a single autograd function. Autograd is off, and :class:`PlainAdditiveSteps` and
:class:`FusedAdditiveSteps` compute ::

    forward                                     backward
    score_k = v · tanh(q + key_k)               d_weights = d_context · value
    weights = softmax(score)                    d_score = weights ∘ (d_weights − Σ weights ∘ d_weights)
    context = Σ_k weights_k value_k             dq = Σ_k d_score_k v ∘ (1 − tanh²(q + key_k))

The gradients of what all steps share (keys, v and values) are computed after the backward pass of all steps.

Shapes: ``B`` rows, ``T`` steps, ``K`` keys of width ``H``, values of width ``D``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from jumok.attention.additive import is_autocast_enabled
from jumok.attention.gpu_support import triton_unsupported_reason

if TYPE_CHECKING:
    from jumok.attention.kernels.additive_step import AdditiveStepGradients

SavedTensors = tuple[Tensor, ...]
SharedGradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of keys, v and values


class AdditiveSteps(Protocol):
    """Built once for the forward pass, and once for the backward pass."""

    def __init__(self, keys: Tensor, v: Tensor, value: Tensor, allowed: Tensor | None) -> None:
        """Take keys ``(B, K, H)``, v ``(H,)``, values ``(B, K, D)`` and ``allowed`` ``(B, K)``.

        Each row of ``allowed`` has a key that may be attended to. None allows all.
        """

    def forward(self, q: Tensor) -> tuple[Tensor, SavedTensors]:
        """Return the context ``(B, D)`` of projected queries ``(B, H)``, and what backward needs."""

    def backward(self, d_context: Tensor, saved: SavedTensors) -> Tensor:
        """Return the gradient ``(B, H)`` of the projected queries of a step."""

    def compute_shared_gradients(self) -> SharedGradients:
        """Return the gradients of keys, v and values, after the backward pass of all steps."""


def choose_additive_steps(keys: Tensor, value: Tensor) -> type[AdditiveSteps] | None:
    """Return the class that computes additive steps over these keys and values. None if neither does."""
    if not keys.is_cuda:
        is_exact = keys.dtype in (torch.float32, torch.float64) and not is_autocast_enabled(keys.device)
        return PlainAdditiveSteps if is_exact else None
    if triton_unsupported_reason(keys) is not None:
        return None
    from jumok.attention.kernels.additive_step import MAX_WIDTH

    return FusedAdditiveSteps if max(keys.shape[-1], value.shape[-1]) <= MAX_WIDTH else None


class PlainAdditiveSteps:
    """Plain PyTorch, with the operations of the reference path."""

    def __init__(self, keys: Tensor, v: Tensor, value: Tensor, allowed: Tensor | None) -> None:
        self.keys, self.v, self.value = keys, v, value
        self.blocked = None if allowed is None else ~allowed
        self.d_keys: Tensor | None = None
        self.dv = torch.zeros_like(v)
        self.weights: list[Tensor] = []  # of the steps whose backward pass is done
        self.d_contexts: list[Tensor] = []

    def forward(self, q: Tensor) -> tuple[Tensor, SavedTensors]:
        pairs = torch.add(q.unsqueeze(1), self.keys).tanh_()  # (B, K, H)
        scores = torch.mv(pairs.flatten(0, 1), self.v).view(pairs.shape[:2])
        if self.blocked is not None:
            scores.masked_fill_(self.blocked, -torch.inf)
        weights = scores.softmax(-1)
        return torch.bmm(weights.unsqueeze(1), self.value).squeeze(1), (pairs, weights)

    def backward(self, d_context: Tensor, saved: SavedTensors) -> Tensor:
        pairs, weights = saved
        d_weights = torch.bmm(self.value, d_context.unsqueeze(2)).squeeze(2)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_pairs: Tensor = torch.ops.aten.tanh_backward(d_scores.unsqueeze(2) * self.v, pairs)
        self.dv.addmv_(pairs.flatten(0, 1).t(), d_scores.flatten())
        self.d_keys = d_pairs if self.d_keys is None else self.d_keys.add_(d_pairs)
        self.weights.append(weights)
        self.d_contexts.append(d_context)
        return d_pairs.sum(1)

    def compute_shared_gradients(self) -> SharedGradients:
        d_value = torch.bmm(torch.stack(self.weights, 2), torch.stack(self.d_contexts, 1))
        return self.d_keys, self.dv, d_value


class FusedAdditiveSteps:
    """One Triton kernel per step and direction."""

    def __init__(self, keys: Tensor, v: Tensor, value: Tensor, allowed: Tensor | None) -> None:
        from jumok.attention.kernels.additive_step import AdditiveStepKernels

        self.kernels = AdditiveStepKernels(keys, v, value)
        self.allowed = allowed
        self.gradients: list[AdditiveStepGradients] = []  # of the steps whose backward pass is done

    def forward(self, q: Tensor) -> tuple[Tensor, SavedTensors]:
        context, precise_context, scores, lse = self.kernels.launch_forward(q, self.allowed, keep_float32=True)
        return context, (q, scores, lse, precise_context)

    def backward(self, d_context: Tensor, saved: SavedTensors) -> Tensor:
        from jumok.attention.kernels.additive_step import AdditiveStepForwardResult, AdditiveStepGradients

        q, scores, lse, precise_context = saved
        is_masked = self.allowed is not None
        result = AdditiveStepForwardResult(q, scores, lse, precise_context, is_masked)
        ds, dq = self.kernels.launch_backward(result, d_context)
        self.gradients.append(AdditiveStepGradients(q, scores, lse, ds, d_context))
        return dq

    def compute_shared_gradients(self) -> SharedGradients:
        return self.kernels.compute_shared_gradients(self.gradients)
