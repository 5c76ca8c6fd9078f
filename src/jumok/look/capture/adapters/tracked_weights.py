"""Tensors that hold attention weights: which dimension is which axis of the softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from jumok.look.capture.adapters.axes import (
    REPEATED_AXIS,
    DimensionLabels,
    WeightAxis,
    count_unique_elements,
    derive_view_labels,
    list_leaf_axes,
)
from jumok.look.capture.adapters.softmax_candidates import SoftmaxCandidate


@dataclass(frozen=True, eq=False)
class TrackedWeights:
    """A tensor that holds weights."""

    tensor: Tensor
    labels: DimensionLabels
    axes: list[WeightAxis]
    owners: tuple[SoftmaxCandidate, ...]
    is_unchanged: bool = True
    is_partial: bool = False
    before_dropout: Tensor | None = None  # the same before dropout, if there was dropout
    values: Tensor | None = None  # the tensor holds weights · values, to be summed over the keys …
    factor: TrackedWeights | None = None  # … and these are the weights
    lost_reason: str | None = None  # why it cannot be told what is where

    @property
    def is_live(self) -> bool:
        return any(owner.is_live for owner in self.owners)

    @property
    def key_axes(self) -> list[WeightAxis]:
        return [leaf for leaf in list_leaf_axes(axis for axis in self.axes if axis.is_key) if leaf.size > 1]

    def arrange_axes(self) -> tuple[Tensor, list[WeightAxis]]:
        """The weights with one dimension for each of their axes, in order, and these axes."""
        x = self.tensor if self.before_dropout is None else self.before_dropout
        own: list[WeightAxis] = []
        for label in self.labels:
            some, at = list_leaf_axes(label), len(own)
            if not some:
                x = x.squeeze(at)
            elif some == [REPEATED_AXIS]:
                x = x.select(at, 0)
            elif len(some) > 1:
                x = x.unflatten(at, [axis.size for axis in some])
                own += some
            else:
                own += some
        axes = [axis for axis in list_leaf_axes(self.axes) if axis in own or axis.size == 1]
        x = x.permute([own.index(axis) for axis in axes if axis.size > 1])
        for at, axis in enumerate(axes):
            if axis.size == 1:
                x = x.unsqueeze(at)
        return x, axes

    def track_view(self, out: Tensor) -> TrackedWeights:
        """These weights seen as ``out``, which shares their memory."""
        labels = derive_view_labels(self.labels, self.tensor, out)
        if labels is None:
            return replace(
                self, tensor=out, lost_reason="its weights are cut into pieces that are not followed"
            )
        part = self.is_partial or count_unique_elements(out) < count_unique_elements(self.tensor)
        return replace(self, tensor=out, labels=labels, is_partial=part)
