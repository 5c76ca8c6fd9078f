"""Positions: the vectors that tell a model where each token stands.

All are called alike: ``position(x)`` gives the vectors to add to ``x``, in its dtype and on its device:
``(T, D)`` where all rows of the batch stand at the same positions, ``(B, T, D)`` where they differ. ::

    x = x + position(x)                                     # 0 … T−1
    x = x + position(x, offset=cache.offset)                # the next tokens behind a cache, ragged or not
    x = x + position(x, positions=within_documents(ids))    # packed documents: each begins at 0

Shapes: ``B`` batch, ``T`` tokens, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jumok.errors import InputError

__all__ = ["LearnedPositions", "PositionEmbedding", "SinusoidalPositions", "within_documents"]

Offset = int | Sequence[int] | Tensor


class PositionEmbedding(nn.Module):
    """A vector for every position; ``embed`` says which."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 1:
            raise InputError(f"{type(self).__name__}(width={width}): a width of 1 or more is expected")
        self.width = width

    def forward(self, x: Tensor, *, offset: Offset = 0, positions: Tensor | None = None) -> Tensor:
        """The vectors to add to ``x``, ``(T, D)`` or ``(B, T, D)``.

        Args:
            x: ``(T, D)`` or ``(B, T, D)``; only its shape, dtype and device are looked at.
            offset: the position of the first token, one number or one for each row.
            positions: the position of every token, ``(T,)`` or ``(B, T)``, instead of an offset.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.width:
            raise InputError(
                f"{type(self).__name__}: x of shape {tuple(x.shape)} came; expected "
                f"(tokens, {self.width}) or (batch, tokens, {self.width})"
            )
        if positions is None:
            positions = self._build_positions(x, offset)
        else:
            _check_positions_argument(x, offset, positions)
            self._check_positions(positions)
        positions = positions.to(x.device, non_blocking=x.device.type == "cuda")
        return self.embed(positions).to(x.dtype)

    def embed(self, positions: Tensor) -> Tensor:
        """The vector of each position: ``(…)`` gives ``(…, D)``."""
        raise NotImplementedError

    def check_range(self, lowest: int, highest: int) -> None:
        """Raise if there is no vector for some position from ``lowest`` to ``highest``."""

    def _check_positions(self, positions: Tensor) -> None:
        # Numbers that are already on a GPU are left to the GPU's own check, rather than waited for.
        if positions.device.type == "cpu" and positions.numel():
            lowest, highest = torch.aminmax(positions)
            self.check_range(int(lowest), int(highest))

    def _build_positions(self, x: Tensor, offset: Offset) -> Tensor:
        """The positions of the tokens of ``x``: ``(T,)``, or ``(B, T)`` for an offset a row."""
        tokens = x.shape[-2]
        if isinstance(offset, int):
            self.check_range(offset, offset + tokens - 1)
            return torch.arange(offset, offset + tokens, device=x.device)
        first = torch.as_tensor(offset)
        one_a_row = x.dim() == 3 and first.shape == x.shape[:1]
        if first.is_floating_point() or not (first.dim() == 0 or one_a_row):
            raise InputError(
                f"offset={offset!r} came for x of shape {tuple(x.shape)}; expected a whole number, "
                "or one for each row of the batch"
            )
        positions = first[..., None] + torch.arange(tokens, device=first.device)
        self._check_positions(positions)
        return positions


class SinusoidalPositions(PositionEmbedding):
    """Waves of lengths from 2π to 10000 · 2π (Vaswani 2017): any number of positions, nothing to learn.

    ::

        vector[2i]     = sin(position / 10000^(2i / D))
        vector[2i + 1] = cos(position / 10000^(2i / D))

    >>> Sinusoid(4)(torch.zeros(3, 4))
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    """

    def embed(self, positions: Tensor) -> Tensor:
        # Computed anew at each call: that is little beside a model, and a kept table would be hidden state.
        # In float64, since the rounding of an angle in float32 grows with the position.
        real = torch.float32 if positions.device.type == "mps" else torch.float64
        even = torch.arange(0, self.width, 2, dtype=real, device=positions.device)
        angles = positions[..., None] * 10000.0 ** (-even / self.width)  # (…, ⌈D/2⌉)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self.width]


class LearnedPositions(PositionEmbedding):
    """A vector for each of the positions 0 … ``max_positions`` − 1, learned.

    >>> Learned(maximum=512, width=4)(torch.zeros(2, 3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(self, max_positions: int, width: int) -> None:
        super().__init__(width)
        if max_positions < 1:
            raise InputError(f"Learned(maximum={max_positions}): at least one position is expected")
        self.table = nn.Embedding(max_positions, width)
        nn.init.normal_(self.table.weight, std=0.02)

    def check_range(self, lowest: int, highest: int) -> None:
        maximum = self.table.num_embeddings
        if lowest < 0 or highest >= maximum:
            raise InputError(
                f"Learned: there is no vector for position {lowest if lowest < 0 else highest}, only for "
                f"0 … {maximum - 1}; shorten the input or cut it into windows, make the model with a larger "
                "maximum, or use Sinusoid, which has none"
            )

    def embed(self, positions: Tensor) -> Tensor:
        found: Tensor = self.table(positions)
        return found


def within_documents(ids: Tensor) -> Tensor:
    """The position of each token in its own document; ``ids`` ``(…, T)`` as in ``masks.documents``.

    Each document must be in one piece.

    >>> within_documents(torch.tensor([7, 7, 8, 8, 8]))
    tensor([0, 1, 0, 1, 2])
    """
    here = torch.arange(ids.shape[-1], device=ids.device).expand(ids.shape)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return here - here.where(first, 0).cummax(-1).values


def _check_positions_argument(x: Tensor, offset: Offset, positions: Tensor) -> None:
    if not (isinstance(offset, int) and offset == 0):
        raise InputError("offset and positions say the same thing in two ways; give only one of them")
    if positions.is_floating_point() or positions.shape not in (x.shape[-2:-1], x.shape[:-1]):
        raise InputError(
            f"positions of {positions.dtype} and shape {tuple(positions.shape)} came for x of shape "
            f"{tuple(x.shape)}; expected a whole number for each token, (tokens,) or (batch, tokens)"
        )
