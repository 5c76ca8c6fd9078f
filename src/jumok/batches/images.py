"""Batches of images with captions: the input of captioning models.

An image is a grid of positions in row-major order, each with a feature vector from a convolutional network::

    grid (2, 3)      0 1 2       features    (B, 6, F)
                     3 4 5

Shapes: ``B`` images, ``P`` grid positions, ``F`` features of a position, ``T`` words of the longest caption.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor

from jumok.batches.tokens import BOS, EOS, IGNORE, Seq2SeqBatch, TensorGroup, Tokens


class ImageFeatureTable:
    """Features ``(N, P, F)`` of all images of a data set, selected by index.

    The table moves to the device of the first indices and stays there. A frozen encoder's features of a few
    thousand images fit on a GPU, so no training step waits for a copy.

    >>> ImageFeatureTable(torch.arange(12.0).reshape(3, 2, 2)).select(torch.tensor([2, 0]))
    tensor([[[ 8.,  9.],
             [10., 11.]],
    <BLANKLINE>
            [[ 0.,  1.],
             [ 2.,  3.]]])
    """

    def __init__(self, features: Tensor) -> None:
        self._features = features

    def select(self, indices: Tensor) -> Tensor:
        """Return the features ``(B, P, F)`` of the images with these indices ``(B,)``."""
        if self._features.device != indices.device:
            self._features = self._features.to(indices.device)
        return self._features.index_select(0, indices)


@dataclass(frozen=True, eq=False)
class CaptionBatch(TensorGroup):
    """Images with one caption each. An image with several captions is repeated.

    ``target`` is the decoder's input and ``labels``, of the same shape, its expected output::

        target   <s>  v1 … vm
        labels    v1 … vm </s>       IGNORE at padding

    ``features`` has one of three forms: feature vectors ``(B, P, F)``; pixels ``(B, 3, height, width)`` that
    an encoder has yet to read, with the grid of the pixels; or indices ``(B,)`` into ``feature_table``.
    """

    features: Tensor  # (B, P, F)
    grid: tuple[int, int]  # height · width = P
    target: Tokens
    labels: Tensor
    count: int  # number of labels that are not IGNORE
    example_indices: tuple[int, ...] = ()  # indices of the examples in their data set
    feature_table: ImageFeatureTable | None = None

    def __post_init__(self) -> None:
        if (self.feature_table is None) != (self.features.dim() > 1):
            raise ValueError(
                f"features have shape {tuple(self.features.shape)}; expected (images, positions, features), "
                "or pixels, or indices of images together with a feature_table"
            )
        positions = self.grid[0] * self.grid[1]
        if self.feature_table is None:
            rows, columns = self.features.shape[-2:]
            positions = rows * columns if self.has_pixels else rows
        if self.grid[0] * self.grid[1] != positions:
            raise ValueError(
                f"features have shape {tuple(self.features.shape)}, but the grid is {self.grid[0]} × "
                f"{self.grid[1]}; a grid has one cell for each of the {positions} positions"
            )
        if len(self.features) != len(self.target.lengths):
            raise ValueError(
                f"there are {len(self.features)} images but {len(self.target.lengths)} captions; expected "
                "one caption per image: repeat an image that has several"
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
        """Build a batch from captions without special tokens; ``min_length`` is that of :meth:`Tokens.pad`.

        >>> batch = CaptionBatch.from_sequences(torch.zeros(2, 6, 5), (2, 3), [[7, 8], [9]])
        >>> batch.target.ids, batch.labels, batch.count
        (tensor([[2, 7, 8],
                [2, 9, 0]]), tensor([[   7,    8,    3],
                [   9,    3, -100]]), 5)
        """
        labels = Tokens.pad([[*caption, EOS] for caption in captions], min_length, fill=IGNORE).ids
        target = Tokens.pad([[BOS, *caption] for caption in captions], min_length)
        return cls(features, grid, target, labels, sum(target.lengths), tuple(example_indices))

    @property
    def has_pixels(self) -> bool:
        """Whether ``features`` holds pixels, which an encoder has yet to read."""
        return self.features.dim() == 4

    @property
    def source(self) -> Tokens:
        """The features as the source of a search or a Transformer: see :func:`features_as_tokens`."""
        return features_as_tokens(self.features)

    @property
    def seq2seq_batch(self) -> Seq2SeqBatch:
        """The same batch with the features as its source."""
        return Seq2SeqBatch(self.source, self.target, self.labels, self.count, self.example_indices)

    @property
    def graph_key(self) -> Hashable | None:
        """The target's :attr:`~jumok.batches.tokens.Tokens.graph_key` and the shape of the features."""
        key = self.target.graph_key
        return None if key is None else (self.features.shape, self.grid, key)


def features_as_tokens(features: Tensor) -> Tokens:
    """Wrap image features ``(B, P, F)`` as the source of a search: sequences whose "ids" are vectors.

    >>> from jumok.decoding import greedy_search
    >>> greedy_search(model, features_as_tokens(features))  # doctest: +SKIP

    """
    return Tokens(features, (features.shape[1],) * len(features))
