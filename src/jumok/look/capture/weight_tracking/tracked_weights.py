"""Tensors that hold attention weights, with the axis of the softmax for each dimension."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from jumok.look.capture.weight_tracking.axes import (
    REPEATED_AXIS,
    DimensionLabels,
    WeightAxis,
    count_unique_elements,
    derive_view_labels,
    list_leaf_axes,
)
from jumok.look.capture.weight_tracking.softmax_candidates import SoftmaxCandidate


@dataclass(frozen=True, eq=False)
class TrackedWeights:
    """A tensor that holds weights."""

    tensor: Tensor
    labels: DimensionLabels
    axes: list[WeightAxis]
    owners: tuple[SoftmaxCandidate, ...]
    is_unchanged: bool = True
    is_partial: bool = False
    before_dropout: Tensor | None = None  # the same weights before dropout, if there was dropout
    values: Tensor | None = None  # the tensor holds weights · values, to be summed over the keys …
    factor: TrackedWeights | None = None  # … and these are the weights
    lost_reason: str | None = None  # why the axes of its dimensions are unknown

    @property
    def is_live(self) -> bool:
        return any(owner.is_live for owner in self.owners)

    @property
    def key_axes(self) -> list[WeightAxis]:
        return [leaf for leaf in list_leaf_axes(axis for axis in self.axes if axis.is_key) if leaf.size > 1]

    def arrange_axes(self) -> tuple[Tensor, list[WeightAxis]]:
        """Return the weights with one dimension for each of their axes, in order, and these axes."""
        x = self.tensor if self.before_dropout is None else self.before_dropout
        present_axes: list[WeightAxis] = []
        for label in self.labels:
            leaves, dim = list_leaf_axes(label), len(present_axes)
            if not leaves:
                x = x.squeeze(dim)
            elif leaves == [REPEATED_AXIS]:
                x = x.select(dim, 0)
            elif len(leaves) > 1:
                x = x.unflatten(dim, [axis.size for axis in leaves])
                present_axes += leaves
            else:
                present_axes += leaves
        axes = [axis for axis in list_leaf_axes(self.axes) if axis in present_axes or axis.size == 1]
        x = x.permute([present_axes.index(axis) for axis in axes if axis.size > 1])
        for dim, axis in enumerate(axes):
            if axis.size == 1:
                x = x.unsqueeze(dim)
        return x, axes

    def track_view(self, out: Tensor) -> TrackedWeights:
        """Track ``out``, a view of these weights."""
        labels = derive_view_labels(self.labels, self.tensor, out)
        if labels is None:
            return replace(self, tensor=out, lost_reason="its weights are cut into pieces that are not tracked")
        is_partial = self.is_partial or count_unique_elements(out) < count_unique_elements(self.tensor)
        return replace(self, tensor=out, labels=labels, is_partial=is_partial)
