"""Softmaxes that may be attention, and the products with values that show it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jumok.look.adapters.axes import Axis


def version(x: Tensor) -> int | None:
    """How often the tensor was written to; None for an inference tensor, which has no counter."""
    return None if x.is_inference() else x._version


def memory(x: Tensor) -> int:
    """A number that tensors have in common if they share their memory."""
    try:
        return int(x.untyped_storage()._cdata)
    except RuntimeError:  # a sparse tensor has no single one
        return id(x)


@dataclass(frozen=True, eq=False)
class Use:
    """A product of weights with values."""

    weights: Tensor  # before dropout, in the order of ``axes``
    axes: list[Axis]  # without those of which the weights have one place
    sizes: Sequence[int]  # of the weights along them
    every: list[Axis]  # all axes of the softmax, or of what was computed from it
    batch: set[Axis]  # the axes that the values have, too
    rows: set[Axis]  # those that they do not have
    value: Tensor
    columns: int  # width of the values
    unchanged: bool  # the weights are those that the softmax gave
    part: bool  # they are some of them
    source: Tensor  # shares its memory with the weights …
    version: int | None  # … and this was its version
    side: int  # of the weights in the product
    key_stride: int = 0  # of the values as the model gave them; 0: not known


class Candidate:
    """One softmax that may be an attention."""

    def __init__(self, scores: Tensor) -> None:
        self.scores, self.version = scores, version(scores)
        self.overwritten = False  # the scores, since the softmax
        self.size, self.keys = scores.numel(), 0
        self.uses: list[Use] = []
        self.reason: str | None = None  # why the weights could not be followed
        self.joined = False  # the weights became part of those of another softmax
        self.live = True
        self.outputs: list[weakref.ref[Tensor]] = []  # of the products with the weights
        self.multiplied = False  # such an output is a factor of another product
        self.changed_as: tuple[int, ...] | None = ()  # (B, H, Q, K) as which somebody changed the scores
        self.verdict: list[Any] = []  # what it turned out to be, once that is known

    def stop(self, reason: str | None = None) -> None:
        """It need not be followed any longer."""
        self.live, self.reason = False, self.reason or reason

    @property
    def has_scores(self) -> bool:
        """Whether the scores are still those that went into the softmax."""
        return not self.overwritten and version(self.scores) == self.version
