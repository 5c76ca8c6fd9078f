"""Names for the axes of attention weights, which stay with them through views and copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class Axis:
    """One axis of a tensor of weights. A view may split it into an outer and an inner axis."""

    size: int
    is_key: bool = False
    parts: tuple[Axis, Axis] | None = None

    def leaves(self) -> list[Axis]:
        """The axis, or those that it was split into, outer first."""
        return [self] if self.parts is None else [leaf for part in self.parts for leaf in part.leaves()]

    def split(self, inner: int) -> tuple[Axis, Axis]:
        self.parts = Axis(self.size // inner, self.is_key), Axis(inner, self.is_key)
        return self.parts


REPEATED = Axis(0)  # weights are repeated along it
Label = tuple[Axis, ...]  # the axes that one dimension goes through, outer first; none if its size is one
Labels = tuple[Label, ...]


def leaves(label: Iterable[Axis]) -> list[Axis]:
    """The axes of a label as they are split now."""
    return [leaf for axis in label for leaf in axis.leaves()]


def new_axes(shape: Sequence[int], keys: int) -> tuple[list[Axis], Labels]:
    """Axes for a tensor of this shape whose dimension ``keys`` is that of the keys."""
    axes = [Axis(size, is_key=at == keys) for at, size in enumerate(shape)]
    return axes, tuple((axis,) if axis.size > 1 else () for axis in axes)


def derived_axes(labels: Labels, shape: Sequence[int]) -> tuple[list[Axis], Labels] | None:
    """New axes for a tensor with these labels, whose sizes may differ; None if they cannot be told."""
    axes: list[Axis] = []
    new: list[Label] = []
    for label, size in zip(labels, shape, strict=True):
        old = leaves(label)
        if len(old) == 1:
            some: Label = (Axis(size, old[0].is_key),)
        elif math.prod(axis.size for axis in old) == size:
            some = tuple(Axis(axis.size, axis.is_key) for axis in old)
        else:
            return None
        axes += some or (Axis(1),)
        new.append(some)
    if not any(axis.is_key for axis in axes):  # there is one key
        axes.append(Axis(1, is_key=True))
    return axes, tuple(new)


def view_labels(labels: Labels, tensor: Tensor, view: Tensor) -> Labels | None:
    """The labels of a view of ``tensor``: its strides show which axis went where. None: they do not."""
    whole = places(view) == places(tensor)
    found = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        label = () if size == 1 else _label(_steps(labels, tensor), size, stride, whole)
        if label is None:
            return None
        found.append(label)
    return tuple(found)


def places(x: Tensor) -> int:
    """The number of elements, of which repetitions count once."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size < 2)


def _steps(labels: Labels, tensor: Tensor) -> list[tuple[Axis, int, int]]:
    """The axes in a tensor, with their sizes and strides there."""
    steps = []
    for label, size, stride in zip(labels, tensor.shape, tensor.stride(), strict=True):
        some = leaves(label)
        if len(some) == 1:
            steps.append((some[0], size, stride))
        else:
            for axis in reversed(some):
                steps.append((axis, axis.size, stride))
                stride *= axis.size
    return [step for step in steps if step[0] is not REPEATED]


def _label(steps: list[tuple[Axis, int, int]], size: int, stride: int, whole: bool) -> Label | None:
    if stride == 0:
        return (REPEATED,)
    for axis, length, step in steps:
        if step == stride:
            if length == size:
                return (axis,)
            if length < size:  # joined with the axis around it
                outer = _label(steps, size // length, stride * length, whole) if size % length == 0 else None
                return None if outer is None else (*outer, axis)
            if not whole:  # a slice
                return (axis,)
            return (axis.split(size)[1],) if length % size == 0 else None
        if whole and step < stride < step * length and stride == step * (length // size):
            return (axis.split(length // size)[0],)
    return None
