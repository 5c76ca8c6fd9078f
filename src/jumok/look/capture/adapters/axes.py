"""Names for the axes of attention weights, which stay with them through views and copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class WeightAxis:
    """One axis of a tensor of weights. A view may split it into an outer and an inner axis."""

    size: int
    is_key: bool = False
    split_axes: tuple[WeightAxis, WeightAxis] | None = None

    def list_leaves(self) -> list[WeightAxis]:
        """The axis, or those that it was split into, outer first."""
        return (
            [self]
            if self.split_axes is None
            else [leaf for part in self.split_axes for leaf in part.list_leaves()]
        )

    def split(self, inner_size: int) -> tuple[WeightAxis, WeightAxis]:
        self.split_axes = (
            WeightAxis(self.size // inner_size, self.is_key),
            WeightAxis(inner_size, self.is_key),
        )
        return self.split_axes


REPEATED_AXIS = WeightAxis(0)  # weights are repeated along it
DimensionLabel = tuple[
    WeightAxis, ...
]  # the axes that one dimension goes through, outer first; none if its size is one
DimensionLabels = tuple[DimensionLabel, ...]


def list_leaf_axes(label: Iterable[WeightAxis]) -> list[WeightAxis]:
    """The axes of a label as they are split now."""
    return [leaf for axis in label for leaf in axis.list_leaves()]


def create_axes(shape: Sequence[int], key_dim: int) -> tuple[list[WeightAxis], DimensionLabels]:
    """Axes for a tensor of this shape whose dimension ``key_dim`` is that of the keys."""
    axes = [WeightAxis(size, is_key=at == key_dim) for at, size in enumerate(shape)]
    return axes, tuple((axis,) if axis.size > 1 else () for axis in axes)


def derive_axes(
    labels: DimensionLabels, shape: Sequence[int]
) -> tuple[list[WeightAxis], DimensionLabels] | None:
    """New axes for a tensor with these labels, whose sizes may differ; None if they cannot be told."""
    axes: list[WeightAxis] = []
    new: list[DimensionLabel] = []
    for label, size in zip(labels, shape, strict=True):
        old = list_leaf_axes(label)
        if len(old) == 1:
            some: DimensionLabel = (WeightAxis(size, old[0].is_key),)
        elif math.prod(axis.size for axis in old) == size:
            some = tuple(WeightAxis(axis.size, axis.is_key) for axis in old)
        else:
            return None
        axes += some or (WeightAxis(1),)
        new.append(some)
    if not any(axis.is_key for axis in axes):  # there is one key
        axes.append(WeightAxis(1, is_key=True))
    return axes, tuple(new)


def derive_view_labels(labels: DimensionLabels, tensor: Tensor, view: Tensor) -> DimensionLabels | None:
    """The labels of a view of ``tensor``: its strides show which axis went where. None: they do not."""
    whole = count_unique_elements(view) == count_unique_elements(tensor)
    found = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        label = () if size == 1 else _match_label(_list_axis_strides(labels, tensor), size, stride, whole)
        if label is None:
            return None
        found.append(label)
    return tuple(found)


def count_unique_elements(x: Tensor) -> int:
    """The number of elements, of which repetitions count once."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size < 2)


def _list_axis_strides(labels: DimensionLabels, tensor: Tensor) -> list[tuple[WeightAxis, int, int]]:
    """The axes in a tensor, with their sizes and strides there."""
    steps = []
    for label, size, stride in zip(labels, tensor.shape, tensor.stride(), strict=True):
        some = list_leaf_axes(label)
        if len(some) == 1:
            steps.append((some[0], size, stride))
        else:
            for axis in reversed(some):
                steps.append((axis, axis.size, stride))
                stride *= axis.size
    return [step for step in steps if step[0] is not REPEATED_AXIS]


def _match_label(
    axis_strides: list[tuple[WeightAxis, int, int]], size: int, stride: int, is_whole: bool
) -> DimensionLabel | None:
    if stride == 0:
        return (REPEATED_AXIS,)
    for axis, length, step in axis_strides:
        if step == stride:
            if length == size:
                return (axis,)
            if length < size:  # joined with the axis around it
                outer = (
                    _match_label(axis_strides, size // length, stride * length, is_whole)
                    if size % length == 0
                    else None
                )
                return None if outer is None else (*outer, axis)
            if not is_whole:  # a slice
                return (axis,)
            return (axis.split(size)[1],) if length % size == 0 else None
        if is_whole and step < stride < step * length and stride == step * (length // size):
            return (axis.split(length // size)[0],)
    return None
