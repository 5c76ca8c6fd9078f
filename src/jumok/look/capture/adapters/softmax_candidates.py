"""Softmaxes that may be attention, and the products with values that show it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jumok.look.capture.adapters.axes import WeightAxis


def get_version(x: Tensor) -> int | None:
    """How often the tensor was written to; None for an inference tensor, which has no counter."""
    return None if x.is_inference() else x._version


def get_storage_id(x: Tensor) -> int:
    """A number that tensors have in common if they share their memory."""
    try:
        return int(x.untyped_storage()._cdata)
    except RuntimeError:  # a sparse tensor has no single one
        return id(x)


@dataclass(frozen=True, eq=False)
class ValueProduct:
    """A product of weights with values."""

    weights: Tensor  # before dropout, in the order of ``axes``
    axes: list[WeightAxis]  # without those of which the weights have one place
    sizes: Sequence[int]  # of the weights along them
    all_axes: list[WeightAxis]  # all axes of the softmax, or of what was computed from it
    batch_axes: set[WeightAxis]  # the axes that the values have, too
    query_axes: set[WeightAxis]  # those that they do not have
    value: Tensor
    value_width: int  # width of the values
    is_unchanged: bool  # the weights are those that the softmax gave
    is_partial: bool  # they are some of them
    source: Tensor  # shares its memory with the weights …
    version: int | None  # … and this was its version
    weights_side: int  # of the weights in the product
    key_stride: int = 0  # of the values as the model gave them; 0: not known


class SoftmaxCandidate:
    """One softmax that may be an attention."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.version = scores, get_version(scores)
        self.is_overwritten = False  # the scores, since the softmax
        self.num_scores, self.num_keys = scores.numel(), 0
        self.value_products: list[ValueProduct] = []
        self.reason: str | None = None  # why the weights could not be followed
        self.is_merged = False  # the weights became part of those of another softmax
        self.is_live = True
        self.product_outputs: list[weakref.ref[Tensor]] = []  # of the products with the weights
        self.is_output_multiplied = False  # such an output is a factor of another product
        self.modified_shape: tuple[int, ...] | None = ()  # (B, H, Q, K) as which somebody changed the scores
        self.cached_result: list[Any] = []  # what it turned out to be, once that is known

    def stop(self, reason: str | None = None) -> None:
        """It need not be followed any longer."""
        self.is_live, self.reason = False, self.reason or reason

    @property
    def has_scores(self) -> bool:
        """Whether the scores are still those that went into the softmax."""
        return not self.is_overwritten and get_version(self.scores) == self.version
