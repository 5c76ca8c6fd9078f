"""Softmaxes that may be attention, and the products with values that show it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jumok.look.capture.weight_tracking.axes import DimensionLabels, WeightAxis, list_leaf_axes


def get_version(x: Tensor) -> int | None:
    """Return how often the tensor was written to; None for an inference tensor, which has no counter."""
    return None if x.is_inference() else x._version


def get_storage_id(x: Tensor) -> int:
    """Return a number that is equal for tensors that share memory."""
    try:
        return int(x.untyped_storage()._cdata)
    except RuntimeError:  # sparse tensors have no single storage
        return id(x)


@dataclass(frozen=True, eq=False)
class ValueProduct:
    """A product of weights with values."""

    weights: Tensor  # before dropout, in the order of ``axes``
    axes: list[WeightAxis]  # without axes along which the weights are a single index
    sizes: Sequence[int]  # of the weights along these axes
    all_axes: list[WeightAxis]  # all axes of the softmax, or of what was computed from it
    batch_axes: set[WeightAxis]  # the axes that the values share
    query_axes: set[WeightAxis]  # the axes that they do not have
    value: Tensor
    value_width: int  # width of the values
    is_unchanged: bool  # the weights are the output of the softmax
    is_partial: bool  # they are a part of it
    source: Tensor  # shares its memory with the weights …
    version: int | None  # … and this was its version
    weights_side: int  # 0 or 1: which factor of the product the weights are
    key_stride: int = 0  # of the values as passed by the model; 0: unknown


class SoftmaxCandidate:
    """One softmax that may be an attention."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.version = scores, get_version(scores)
        self.is_overwritten = False  # whether the scores were overwritten since the softmax
        self.num_scores, self.num_keys = scores.numel(), 0
        self.value_products: list[ValueProduct] = []
        self.reason: str | None = None  # why the weights could not be tracked
        self.is_merged = False  # the weights became part of those of another softmax
        self.is_live = True
        self.product_outputs: list[weakref.ref[Tensor]] = []  # outputs of the products with the weights
        self.is_output_multiplied = False  # such an output is a factor of another product
        self.flat_axis: WeightAxis | None = None  # of such an output: batch and heads together, if they share an axis
        self.head_axis: WeightAxis | None = None  # the part of it that the model merged with the values
        self.is_output_tracked = False  # the model may still divide that axis
        self.modified_shape: tuple[int, ...] | None = ()  # (B, H, Q, K), the shape of modified scores
        self.cached_result: list[Any] = []  # the result of the analysis, once it is known

    def stop(self, reason: str | None = None) -> None:
        """Stop tracking this softmax."""
        self.is_live, self.is_output_tracked, self.reason = False, False, self.reason or reason

    @property
    def has_scores(self) -> bool:
        """Whether the scores are still those that went into the softmax."""
        return not self.is_overwritten and get_version(self.scores) == self.version

    def has_heads_first(self, num_heads: int) -> bool:
        """Return whether the axis that batch and heads share iterates over the heads first."""
        leaves = [] if self.flat_axis is None else self.flat_axis.list_leaves()
        if len(leaves) != 2:
            return False
        outer, inner = leaves
        return self.head_axis is outer if outer.size == inner.size else outer.size == num_heads


@dataclass(frozen=True, eq=False)
class TrackedOutput:
    """The output of a product, or a tensor derived from it, whose batch and heads share an axis."""

    tensor: Tensor
    labels: DimensionLabels
    value_axis: WeightAxis  # the width of the values
    candidate: SoftmaxCandidate

    def find_head_axis(self) -> WeightAxis | None:
        """Return the axis that is merged with the width of the values."""
        for label in self.labels:
            leaves = list_leaf_axes(label)
            if self.value_axis in leaves[1:]:
                return leaves[leaves.index(self.value_axis) - 1]
        return None
