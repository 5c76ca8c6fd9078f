"""Tensors that hold attention weights: which dimension is which axis of the softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from jumok.look.adapters.axes import REPEATED, Axis, Labels, leaves, places, view_labels
from jumok.look.adapters.candidates import Candidate


@dataclass(frozen=True, eq=False)
class Weights:
    """A tensor that holds weights."""

    tensor: Tensor
    labels: Labels
    axes: list[Axis]
    owners: tuple[Candidate, ...]
    unchanged: bool = True
    part: bool = False
    clean: Tensor | None = None  # the same before dropout, if there was dropout
    values: Tensor | None = None  # the tensor holds weights · values, to be summed over the keys …
    factor: Weights | None = None  # … and these are the weights
    lost: str | None = None  # why it cannot be told what is where

    @property
    def live(self) -> bool:
        return any(owner.live for owner in self.owners)

    @property
    def keys(self) -> list[Axis]:
        return [leaf for leaf in leaves(axis for axis in self.axes if axis.is_key) if leaf.size > 1]

    def arranged(self) -> tuple[Tensor, list[Axis]]:
        """The weights with one dimension for each of their axes, in order, and these axes."""
        x = self.tensor if self.clean is None else self.clean
        own: list[Axis] = []
        for label in self.labels:
            some, at = leaves(label), len(own)
            if not some:
                x = x.squeeze(at)
            elif some == [REPEATED]:
                x = x.select(at, 0)
            elif len(some) > 1:
                x = x.unflatten(at, [axis.size for axis in some])
                own += some
            else:
                own += some
        axes = [axis for axis in leaves(self.axes) if axis in own or axis.size == 1]
        x = x.permute([own.index(axis) for axis in axes if axis.size > 1])
        for at, axis in enumerate(axes):
            if axis.size == 1:
                x = x.unsqueeze(at)
        return x, axes

    def view(self, out: Tensor) -> Weights:
        """These weights seen as ``out``, which shares their memory."""
        labels = view_labels(self.labels, self.tensor, out)
        if labels is None:
            return replace(self, tensor=out, lost="its weights are cut into pieces that are not followed")
        part = self.part or places(out) < places(self.tensor)
        return replace(self, tensor=out, labels=labels, part=part)
