"""Positions: vectors that encode the position of each token.

``position(x)`` returns the vectors to add to ``x``, in its dtype and on its device: ``(T, D)`` if all rows of
the batch have the same positions, else ``(B, T, D)``. ::

    x = x + position(x)                                     # 0 … T−1
    x = x + position(x, offset=cache.offset)                # the next tokens after a cache, ragged or not
    x = x + position(x, positions=within_documents(ids))    # packed documents: each starts at 0

Shapes: ``B`` batch, ``T`` tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jumok.attention.mask_types import move_to_device
from jumok.attention.packed_masks import find_run_starts
from jumok.errors import InputError

__all__ = ["LearnedPositions", "PositionEmbedding", "SinusoidalPositions", "within_documents"]

Offset = int | Sequence[int] | Tensor


class PositionEmbedding(nn.Module):
    """A vector for every position. Subclasses implement ``embed``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 1:
            raise InputError(f"{type(self).__name__}(width={width}): expected a width of 1 or more")
        self.width = width

    def forward(self, x: Tensor, *, offset: Offset = 0, positions: Tensor | None = None) -> Tensor:
        """Return the vectors to add to ``x``, ``(T, D)`` or ``(B, T, D)``.

        Args:
            x: ``(T, D)`` or ``(B, T, D)``. Only its shape, dtype and device matter.
            offset: the position of the first token, one number or one for each row.
            positions: the position of every token, ``(T,)`` or ``(B, T)``, instead of an offset.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.width:
            raise InputError(
                f"{type(self).__name__}: x has shape {tuple(x.shape)}; expected "
                f"(tokens, {self.width}) or (batch, tokens, {self.width})"
            )
        if positions is None:
            positions = self._build_positions(x, offset)
        else:
            _check_positions_argument(x, offset, positions)
            self._check_positions(positions)
        return self.embed(move_to_device(positions, x.device)).to(x.dtype)

    def embed(self, positions: Tensor) -> Tensor:
        """Return the vector of each position: ``(…)`` gives ``(…, D)``."""
        raise NotImplementedError

    def check_range(self, lowest: int, highest: int) -> None:
        """Raise if any position from ``lowest`` to ``highest`` has no vector."""

    def _check_positions(self, positions: Tensor) -> None:
        # Positions on a GPU are left to the GPU's own check, so that the host does not wait for them.
        if positions.device.type == "cpu" and positions.numel():
            lowest, highest = torch.aminmax(positions)
            self.check_range(int(lowest), int(highest))

    def _build_positions(self, x: Tensor, offset: Offset) -> Tensor:
        """Return the positions of the tokens of ``x``: ``(T,)``, or ``(B, T)`` for an offset per row."""
        num_tokens = x.shape[-2]
        if isinstance(offset, int):
            self.check_range(offset, offset + num_tokens - 1)
            return torch.arange(offset, offset + num_tokens, device=x.device)
        first = torch.as_tensor(offset)
        is_per_row = x.dim() == 3 and first.shape == x.shape[:1]
        if first.is_floating_point() or not (first.dim() == 0 or is_per_row):
            raise InputError(
                f"offset={offset!r} does not fit x of shape {tuple(x.shape)}; expected an integer, "
                "or one for each row of the batch"
            )
        positions = first[..., None] + torch.arange(num_tokens, device=first.device)
        self._check_positions(positions)
        return positions


class SinusoidalPositions(PositionEmbedding):
    """Sine waves of wavelengths from 2π to 10000 · 2π (Vaswani 2017), for any number of positions.

    ::

        vector[2i]     = sin(position / 10000^(2i / D))
        vector[2i + 1] = cos(position / 10000^(2i / D))

    >>> SinusoidalPositions(4)(torch.zeros(3, 4))
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    """

    def embed(self, positions: Tensor) -> Tensor:
        # Computed at each call: this is cheap compared to a model, and a cached table would be hidden state.
        # In float64, since the rounding error of an angle in float32 grows with the position.
        dtype = torch.float32 if positions.device.type == "mps" else torch.float64
        even = torch.arange(0, self.width, 2, dtype=dtype, device=positions.device)
        angles = positions[..., None] * 10000.0 ** (-even / self.width)  # (…, ⌈D/2⌉)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self.width]


class LearnedPositions(PositionEmbedding):
    """A learned vector for each of the positions 0 … ``max_positions`` − 1.

    >>> LearnedPositions(max_positions=512, width=4)(torch.zeros(2, 3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, max_positions: int, width: int) -> None:
        super().__init__(width)
        if max_positions < 1:
            raise InputError(f"LearnedPositions(max_positions={max_positions}): expected 1 or more")
        self.table = nn.Embedding(max_positions, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def check_range(self, lowest: int, highest: int) -> None:
        max_positions = self.table.num_embeddings
        if lowest < 0 or highest >= max_positions:
            missing = lowest if lowest < 0 else highest
            raise InputError(
                f"LearnedPositions: there is no vector for position {missing}, only for "
                f"0 … {max_positions - 1}; shorten the input or split it into windows, create the model "
                "with larger max_positions, or use SinusoidalPositions, which has no limit"
            )

    def embed(self, positions: Tensor) -> Tensor:
        vectors: Tensor = self.table(positions)
        return vectors


def within_documents(ids: Tensor) -> Tensor:
    """Return the position of each token in its own document, for ids ``(…, T)`` as in ``masks.documents``.

    Each document must be contiguous.

    >>> within_documents(torch.tensor([7, 7, 8, 8, 8]))
    tensor([0, 1, 0, 1, 2])
    """
    return torch.arange(ids.shape[-1], device=ids.device) - find_run_starts(ids)


def _check_positions_argument(x: Tensor, offset: Offset, positions: Tensor) -> None:
    if not (isinstance(offset, int) and offset == 0):
        raise InputError("offset and positions exclude each other; give only one of them")
    if positions.is_floating_point() or positions.shape not in (x.shape[-2:-1], x.shape[:-1]):
        raise InputError(
            f"positions of {positions.dtype} and shape {tuple(positions.shape)} do not fit x of shape "
            f"{tuple(x.shape)}; expected an integer for each token, (tokens,) or (batch, tokens)"
        )
