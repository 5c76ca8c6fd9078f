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

from jumok.batch import BOS, EOS, IGNORE, Pairs, Tokens

__all__ = ["Captions", "Known", "source_of"]


class Known:
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

    def __init__(self, places: Tensor) -> None:
        self._places = places

    def places(self, numbers: Tensor) -> Tensor:
        """Those of the pictures of these numbers ``(B,)``: ``(B, P, F)``."""
        if self._places.device != numbers.device:
            self._places = self._places.to(numbers.device)
        return self._places.index_select(0, numbers)


@dataclass(frozen=True, eq=False)
class Captions:
    """Pictures, and a caption of each. A picture with several captions comes once for each.

    ``told`` is what a decoder is given, ``labels`` (like the ids) what it should say at each step::

        told     <s>  v1 … vm
        labels    v1 … vm </s>       IGNORE where told is padding

    Before an encoder has looked at a picture, its pixels ``(B, 3, height, width)`` stand for its places, and
    the grid is that of the pixels. Where the places of all pictures are ``known``, the numbers of pictures
    ``(B,)`` stand for their places.
    """

    places: Tensor  # (B, P, F)
    grid: tuple[int, int]  # height · width = P
    told: Tokens
    labels: Tensor
    count: int  # labels that count
    index: tuple[int, ...] = ()  # the numbers of the examples in their data set
    known: Known | None = None

    def __post_init__(self) -> None:
        if (self.known is None) != (self.places.dim() > 1):
            raise ValueError(
                f"places of shape {tuple(self.places.shape)} came; expected (pictures, places, features), or "
                "pixels, or the numbers of pictures along with what is known"
            )
        places = self.grid[0] * self.grid[1]
        if self.known is None:
            rows, columns = self.places.shape[-2:]
            places = rows * columns if self.is_unseen else rows
        if self.grid[0] * self.grid[1] != places:
            raise ValueError(
                f"places of shape {tuple(self.places.shape)} came with a grid of {self.grid[0]} × "
                f"{self.grid[1]}; a grid has as many cells as there are places, {places} here"
            )
        if len(self.places) != len(self.told.lengths):
            raise ValueError(
                f"{len(self.places)} pictures came with {len(self.told.lengths)} captions; one of each is "
                "expected: a picture with several captions is repeated"
            )

    @classmethod
    def of(
        cls,
        places: Tensor,
        grid: tuple[int, int],
        captions: Sequence[Sequence[int]],
        index: Sequence[int] = (),
        *,
        to: int = 0,
    ) -> Captions:
        """From plain token ids, without special tokens; ``to`` as in ``Tokens.padded``.

        >>> batch = Captions.of(torch.zeros(2, 6, 5), (2, 3), [[7, 8], [9]])
        >>> batch.told.ids, batch.labels, batch.count
        (tensor([[2, 7, 8],
                [2, 9, 0]]), tensor([[   7,    8,    3],
                [   9,    3, -100]]), 5)
        """
        labels = Tokens.padded([[*caption, EOS] for caption in captions], to, fill=IGNORE).ids
        told = Tokens.padded([[BOS, *caption] for caption in captions], to)
        return cls(places, grid, told, labels, sum(told.lengths), tuple(index))

    @property
    def is_unseen(self) -> bool:
        """Whether these are pixels, which an encoder has yet to look at."""
        return self.places.dim() == 4

    @property
    def source(self) -> Tokens:
        """The places as a search and the Transformer take them: see :func:`source_of`."""
        return source_of(self.places)

    @property
    def pairs(self) -> Pairs:
        """The same as source and target."""
        return Pairs(self.source, self.told, self.labels, self.count, self.index)

    @property
    def form(self) -> Hashable | None:
        """As that of :class:`~jumok.batch.Tokens`, together with the shape of the places."""
        told = self.told.form
        return None if told is None else (self.places.shape, self.grid, told)

    def alike(self) -> Captions:
        """The same batch with a :attr:`form`."""
        return replace(self, told=self.told.alike())

    def to(self, device: torch.device | str) -> Captions:
        on_gpu = torch.device(device).type == "cuda"
        places, labels = (x.to(device, non_blocking=on_gpu) for x in (self.places, self.labels))
        return replace(self, places=places, told=self.told.to(device), labels=labels)


def source_of(places: Tensor) -> Tokens:
    """Pictures as the source of a search: "sequences" whose ids are the vectors of places ``(B, P, F)``.

    >>> from jumok.decoding.greedy import greedy
    >>> greedy(model, source_of(places))  # doctest: +SKIP
    """
    return Tokens(places, (places.shape[1],) * len(places))
