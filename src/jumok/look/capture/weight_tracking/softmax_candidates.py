"""Softmaxes that may be attention, and the products with values that show it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jumok.look.capture.weight_tracking.axes import WeightAxis


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
        self.modified_shape: tuple[int, ...] | None = ()  # (B, H, Q, K), the shape of modified scores
        self.cached_result: list[Any] = []  # the result of the analysis, once it is known

    def stop(self, reason: str | None = None) -> None:
        """Stop tracking this softmax."""
        self.is_live, self.reason = False, self.reason or reason

    @property
    def has_scores(self) -> bool:
        """Whether the scores are still those that went into the softmax."""
        return not self.is_overwritten and get_version(self.scores) == self.version
