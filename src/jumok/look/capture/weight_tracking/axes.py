"""Identities for the axes of attention weights, which persist through views and copies.

>>> x = torch.empty(2, 3, 5, 7)
>>> (b, h, q, k), labels = create_axes(x.shape, key_dim=3)
>>> derive_view_labels(labels, x, x.transpose(1, 2)) == ((b,), (q,), (h,), (k,))
True
>>> derive_view_labels(labels, x, x.view(6, 5, 7)) == ((b, h), (q,), (k,))
True
"""

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
        """Return the axis, or the axes that it was split into, outer first."""
        if self.split_axes is None:
            return [self]
        return [leaf for axis in self.split_axes for leaf in axis.list_leaves()]

    def split(self, inner_size: int) -> tuple[WeightAxis, WeightAxis]:
        self.split_axes = (
            WeightAxis(self.size // inner_size, self.is_key),
            WeightAxis(inner_size, self.is_key),
        )
        return self.split_axes


REPEATED_AXIS = WeightAxis(0)  # weights are repeated along it
# The axes that one dimension iterates over, outer first; empty if its size is one.
DimensionLabel = tuple[WeightAxis, ...]
DimensionLabels = tuple[DimensionLabel, ...]


def list_leaf_axes(label: Iterable[WeightAxis]) -> list[WeightAxis]:
    """Return the axes of a label as they are split now."""
    return [leaf for axis in label for leaf in axis.list_leaves()]


def create_axes(shape: Sequence[int], key_dim: int) -> tuple[list[WeightAxis], DimensionLabels]:
    """Create axes for a tensor of this shape whose dimension ``key_dim`` is that of the keys."""
    axes = [WeightAxis(size, is_key=dim == key_dim) for dim, size in enumerate(shape)]
    return axes, tuple((axis,) if axis.size > 1 else () for axis in axes)


def derive_axes(labels: DimensionLabels, shape: Sequence[int]) -> tuple[list[WeightAxis], DimensionLabels] | None:
    """Create new axes for a tensor with these labels, whose sizes may differ; None if they are ambiguous."""
    axes: list[WeightAxis] = []
    new_labels: list[DimensionLabel] = []
    for label, size in zip(labels, shape, strict=True):
        leaves = list_leaf_axes(label)
        if len(leaves) == 1:
            new_label: DimensionLabel = (WeightAxis(size, leaves[0].is_key),)
        elif math.prod(axis.size for axis in leaves) == size:
            new_label = tuple(WeightAxis(axis.size, axis.is_key) for axis in leaves)
        else:
            return None
        axes += new_label or (WeightAxis(1),)
        new_labels.append(new_label)
    if not any(axis.is_key for axis in axes):  # there is one key
        axes.append(WeightAxis(1, is_key=True))
    return axes, tuple(new_labels)


def derive_view_labels(labels: DimensionLabels, tensor: Tensor, view: Tensor) -> DimensionLabels | None:
    """Return the labels of a view of ``tensor``; None if they do not follow from its strides.

    Two dimensions that step through memory alike run along the same axis. A view that has all elements of the
    tensor may also merge axes or split one.
    """
    is_whole = count_unique_elements(view) == count_unique_elements(tensor)
    view_labels = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        label = () if size == 1 else _match_label(_list_axis_strides(labels, tensor), size, stride, is_whole)
        if label is None:
            return None
        view_labels.append(label)
    return tuple(view_labels)


def count_unique_elements(x: Tensor) -> int:
    """Return the number of elements, where repetitions count once."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size < 2)


def _list_axis_strides(labels: DimensionLabels, tensor: Tensor) -> list[tuple[WeightAxis, int, int]]:
    """Return the axes of a tensor, with their sizes and strides, the innermost of a dimension first."""
    strides = []
    for label, size, stride in zip(labels, tensor.shape, tensor.stride(), strict=True):
        leaves = list_leaf_axes(label)
        if len(leaves) == 1:
            strides.append((leaves[0], size, stride))
        else:
            for axis in reversed(leaves):
                strides.append((axis, axis.size, stride))
                stride *= axis.size
    return [entry for entry in strides if entry[0] is not REPEATED_AXIS]


def _match_label(
    axis_strides: list[tuple[WeightAxis, int, int]], size: int, stride: int, is_whole: bool
) -> DimensionLabel | None:
    """Return the axes along which a dimension runs, outer first; None if that is unknown."""
    if stride == 0:
        return (REPEATED_AXIS,)
    for axis, length, axis_stride in axis_strides:
        if stride == axis_stride and size == length:
            return (axis,)
        if stride == axis_stride and size > length:  # it continues along the axis around this one
            is_multiple = size % length == 0
            outer = _match_label(axis_strides, size // length, stride * length, is_whole) if is_multiple else None
            return None if outer is None else (*outer, axis)
        if stride == axis_stride and not is_whole:  # a slice of the axis
            return (axis,)
        if stride == axis_stride:  # the inner part of the axis
            return (axis.split(size)[1],) if length % size == 0 else None
        inner_size = length // size
        if is_whole and 1 < inner_size < length and stride == axis_stride * inner_size:  # the outer part
            return (axis.split(inner_size)[0],)
    return None
