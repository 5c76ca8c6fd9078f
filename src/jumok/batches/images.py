"""Pictures with captions to learn from: the batch that models take that say what they see.

A picture is a grid of *places*, row by row, each with a vector that a convolutional net made of what is
there::

    grid (2, 3)      0 1 2       places    (B, 6, F)
                     3 4 5

Shapes: ``B`` pictures, ``P`` places of each, ``F`` features of a place, ``T`` words of the longest caption.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, Tokens

__all__ = ["CaptionBatch", "ImageFeatureTable", "features_as_tokens"]


class ImageFeatureTable:
    """The places of all pictures of a data set ``(N, P, F)``, to be told by number.

    They move to the device that first asks for some, and stay there: what a frozen encoder makes of a few
    thousand pictures fits on a GPU, and no step waits for any of it.

    >>> Known(torch.arange(12.0).reshape(3, 2, 2)).places(torch.tensor([2, 0]))
    tensor([[[ 8.,  9.],
             [10., 11.]],
    <BLANKLINE>
            [[ 0.,  1.],
             [ 2.,  3.]]])
    """

    def __init__(self, features: Tensor) -> None:
        self._features = features

    def select(self, indices: Tensor) -> Tensor:
        """Those of the pictures of these numbers ``(B,)``: ``(B, P, F)``."""
        if self._features.device != indices.device:
            self._features = self._features.to(indices.device)
        return self._features.index_select(0, indices)


@dataclass(frozen=True, eq=False)
class CaptionBatch:
    """Pictures, and a caption of each. A picture with several captions comes once for each.

    ``target`` is what a decoder is given, ``labels`` (like the ids) what it should say at each step::

        told     <s>  v1 … vm
        labels    v1 … vm </s>       IGNORE where told is padding

    Before an encoder has looked at a picture, its pixels ``(B, 3, height, width)`` stand for its places, and
    the grid is that of the pixels. Where the places of all pictures are ``feature_table``, the numbers of pictures
    ``(B,)`` stand for their places.
    """

    features: Tensor  # (B, P, F)
    grid: tuple[int, int]  # height · width = P
    target: Tokens
    labels: Tensor
    count: int  # labels that count
    example_indices: tuple[int, ...] = ()  # the numbers of the examples in their data set
    feature_table: ImageFeatureTable | None = None

    def __post_init__(self) -> None:
        if (self.feature_table is None) != (self.features.dim() > 1):
            raise ValueError(
                f"places of shape {tuple(self.features.shape)} came; expected (pictures, places, features), or "
                "pixels, or the numbers of pictures along with what is known"
            )
        places = self.grid[0] * self.grid[1]
        if self.feature_table is None:
            rows, columns = self.features.shape[-2:]
            places = rows * columns if self.has_pixels else rows
        if self.grid[0] * self.grid[1] != places:
            raise ValueError(
                f"places of shape {tuple(self.features.shape)} came with a grid of {self.grid[0]} × "
                f"{self.grid[1]}; a grid has as many cells as there are places, {places} here"
            )
        if len(self.features) != len(self.target.lengths):
            raise ValueError(
                f"{len(self.features)} pictures came with {len(self.target.lengths)} captions; one of each is "
                "expected: a picture with several captions is repeated"
            )

    @classmethod
    def from_sequences(
        cls,
        features: Tensor,
        grid: tuple[int, int],
        captions: Sequence[Sequence[int]],
        example_indices: Sequence[int] = (),
        *,
        min_length: int = 0,
    ) -> CaptionBatch:
        """From plain token ids, without special tokens; ``to`` as in ``Tokens.padded``.

        >>> batch = Captions.of(torch.zeros(2, 6, 5), (2, 3), [[7, 8], [9]])
        >>> batch.told.ids, batch.labels, batch.count
        (tensor([[2, 7, 8],
                [2, 9, 0]]), tensor([[   7,    8,    3],
                [   9,    3, -100]]), 5)
        """
        labels = Tokens.pad([[*caption, EOS] for caption in captions], min_length, fill=IGNORE).ids
        told = Tokens.pad([[BOS, *caption] for caption in captions], min_length)
        return cls(features, grid, told, labels, sum(told.lengths), tuple(example_indices))

    @property
    def has_pixels(self) -> bool:
        """Whether these are pixels, which an encoder has yet to look at."""
        return self.features.dim() == 4

    @property
    def source(self) -> Tokens:
        """The places as a search and the Transformer take them: see :func:`features_as_tokens`."""
        return features_as_tokens(self.features)

    @property
    def seq2seq_batch(self) -> Seq2SeqBatch:
        """The same as source and target."""
        return Seq2SeqBatch(self.source, self.target, self.labels, self.count, self.example_indices)

    @property
    def graph_key(self) -> Hashable | None:
        """As that of :class:`~jumok.batch.Tokens`, together with the shape of the places."""
        told = self.target.graph_key
        return None if told is None else (self.features.shape, self.grid, told)

    def with_static_shapes(self) -> CaptionBatch:
        """The same batch with a :attr:`graph_key`."""
        return replace(self, target=self.target.with_static_shapes())

    def to(self, device: torch.device | str) -> CaptionBatch:
        on_gpu = torch.device(device).type == "cuda"
        places, labels = (x.to(device, non_blocking=on_gpu) for x in (self.features, self.labels))
        return replace(self, features=places, target=self.target.to(device), labels=labels)


def features_as_tokens(features: Tensor) -> Tokens:
    """Pictures as the source of a search: "sequences" whose ids are the vectors of places ``(B, P, F)``.

    >>> from jumok.decoding.greedy import greedy
    >>> greedy(model, source_of(places))  # doctest: +SKIP
    """
    return Tokens(features, (features.shape[1],) * len(features))
