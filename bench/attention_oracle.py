"""An oracle of attention weights that shares no code with jumok: what a model computed, and how to compare maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

TOLERANCE = 2e-5  # largest difference between a weight and the oracle's, both in float32


@dataclass(eq=False)
class Reference:
    """Weights that the model computed."""

    weights: Tensor  # a copy, keys last
    source: Tensor  # the tensor itself: kept, so that its memory is not reused
    is_used: bool = False  # whether values were multiplied with it


class AttentionOracle(TorchFunctionMode):
    """Records everything that may be the weights of an attention, by interception of functions of PyTorch.

    These are the output of each softmax; the weights of fused functions, computed again from their arguments in
    the plainest way; and nonnegative factors of products, which are weights that were modified after their softmax.
    A softmax with two axes is recorded, but does not count as an attention by itself: it may route to experts.
    """

    SOFTMAXES = ("softmax", "_softmax", "special_softmax")
    PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum")

    def __init__(self) -> None:
        super().__init__()
        self.references: list[Reference] = []
        self._last_lse: Tensor | None = None
        self._output_scale: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self.PRODUCTS:
            self._record_factors(args)  # before the product, which may overwrite them
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self._add(compute_sdpa_weights(*args, **kwargs), is_used=True)
        elif func is F.multi_head_attention_forward:
            options = {**kwargs, "need_weights": True, "average_attn_weights": False}
            self._add(func(*args, **options)[1], is_used=True)
        elif name in self.SOFTMAXES and isinstance(out, Tensor) and out.dim() >= 2:
            self._record_softmax(out, kwargs["dim"] if "dim" in kwargs else args[1])
        elif name == "logsumexp":
            self._last_lse = out
        elif name == "sigmoid" and self._last_lse is not None and out.shape == self._last_lse.shape:
            self._output_scale = out
        return out

    def _record_softmax(self, out: Tensor, dim: int) -> None:
        weights = out.movedim(dim, -1)
        scale, self._output_scale = self._output_scale, None
        if scale is not None and scale.shape == weights.shape[:-1]:
            weights = weights * scale[..., None]  # a sink as a factor of the output: sigmoid(logsumexp(scores) - sink)
        self._add(weights, source=out)

    def _record_factors(self, args: Any) -> None:
        flat = itertools.chain.from_iterable(x if isinstance(x, list | tuple) else (x,) for x in args)
        factors = [x for x in flat if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 3]
        for side, factor in enumerate(factors[-2:]):
            owners = [x for x in self.references if x.source.data_ptr() == factor.data_ptr()]
            for owner in owners:
                owner.is_used = True
            if not owners and factor.numel() and bool((factor >= 0).all()):
                self._add(factor.mT if side else factor)

    def _add(self, weights: Tensor, source: Tensor | None = None, is_used: bool = False) -> None:
        weights = weights.detach().float().clone()
        self.references.append(Reference(weights, weights if source is None else source, is_used))


def compute_sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the weights of ``F.scaled_dot_product_attention``, as its documentation defines them."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_boolean else scores + attn_mask
    return scores.softmax(-1)


def match_call(weights: Tensor, references: list[Reference]) -> tuple[float | None, Reference | None]:
    """Return the smallest difference from any reference, and the reference if it is small enough."""
    smallest = None
    for reference in references:
        for expected in list_layouts(reference.weights, weights.shape):
            difference = compute_difference(weights, expected)
            if difference <= TOLERANCE:
                return difference, reference
            smallest = difference if smallest is None else min(smallest, difference)
    return smallest, None


def list_layouts(reference: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """List the ways to read a reference as weights ``(B, H, Q, K)``."""
    *_, num_queries, num_keys = shape
    if reference.shape[-1] == num_keys + 1:  # the last column is a sink
        reference = reference[..., :-1]
    if reference.numel() != math.prod(shape) or reference.shape[-1] != num_keys:
        return
    if reference.shape[-2] == num_queries or num_queries == 1:
        yield reference.reshape(shape)
    if reference.dim() > 4:  # windows are a part of the batch
        for order in itertools.permutations(range(reference.dim() - 2)):
            yield reference.permute(*order, -2, -1).reshape(shape)


def compute_difference(weights: Tensor, expected: Tensor) -> float:
    """Return the largest difference, without rows that have no visible key: softmaxes differ in these."""
    rows = (weights.sum(-1) > 0) & ~expected.isnan().any(-1)
    difference = float((weights - expected)[rows].abs().max()) if rows.any() else 0.0
    return math.inf if math.isnan(difference) else difference
