"""Rounded queries and keys of an attention layer, from which a saved file computes its weights in the browser.

A map of n × n weights is a softmax of the product of n queries and n keys, which are far fewer numbers. Scores
are rewritten before the queries and keys are rounded, so that the rounding does least harm and the weights stay
the same::

    query · key = (query − c)A · (key − d)A⁻ᵀ + c · (key − d) + query · d

- c and d are the means of queries and keys. The second term is a bias of the key; the third is the same for all
  keys of a row, so that it changes no weight (unless the scores have a softcap).
- A balances both sides: queries and keys then have the same covariance, which is diagonal. Channels that hardly
  change the scores become small, and their codes take few bits.

All channels of a layer's head are rounded to multiples of one step, chosen so that the root mean square error of
the scores is the same in all heads. That of the scores is the relative error of the weights.

The packed format is a header of 20 bytes (rows, channels, and the number of leading channels with two bytes a
code, as uint32; the steps of the first channel and of all others as float32, all little-endian). The codes follow,
one channel after another: the low bytes of all channels, then the high bytes of the leading ones. Both are signed, so
that most high bytes are 0: a code is low + 256 · high. The first channel is the bias, of a key or of a row.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jumok.look.capture.captured_attention import CapturedAttention
from jumok.look.viewer.tiles import FloatArray

HEADER = struct.Struct("<IIIff")
MAX_CODE = 32_000  # of two signed bytes
MIN_ERROR = 2e-4  # of scores; as exact as three digits
REGULARIZATION = 1e-10  # of the covariance of the keys, relative to its trace
MAX_LENGTH = 1 << 12  # queries or keys of a map that a browser computes as a whole


@dataclass(frozen=True, eq=False)
class BalancedSide:
    """The queries of a head or the keys of a group: ``(length, 1 + channels)``, of which the first is a bias."""

    values: Tensor
    score_deviation: float  # root mean square change of the scores by errors of 1 in all channels of both sides

    def pack(self, score_error: float) -> bytes:
        """Round the values so that both sides change the scores by ``score_error`` (root mean square)."""
        values = self.values.numpy()  # several threads pack at a time, each without threads of torch
        bias, channels = values[:, :1], values[:, 1:]
        bias_step = max(score_error / 2, float(np.abs(bias).max()) / MAX_CODE, 1e-30)
        step = max(score_error * 12**0.5 / self.score_deviation, float(np.abs(channels).max()) / MAX_CODE, 1e-30)
        steps = np.full(values.shape[1], step, np.float32)
        steps[0] = bias_step
        codes = np.rint(values / steps).astype(np.int16).T
        is_wide = np.abs(codes).max(1, initial=0) > 127
        num_wide = max(1, int(is_wide.nonzero()[0].max(initial=0)) + 1)
        low = codes.astype(np.int8)
        high = ((codes[:num_wide].astype(np.int32) - low[:num_wide]) >> 8).astype(np.int8)
        return HEADER.pack(codes.shape[1], codes.shape[0], num_wide, bias_step, step) + low.tobytes() + high.tobytes()


@dataclass(frozen=True, eq=False)
class ScoreFactors:
    """The balanced queries and keys of the heads of a layer."""

    queries: dict[int, BalancedSide]  # by head
    keys: dict[int, BalancedSide]  # by group of heads
    group_size: int  # head h uses the keys of group h // group_size
    visible: NDArray[np.bool_] | None  # (Q, K); None: every query sees every key
    softcap: float | None

    @property
    def num_codes(self) -> int:
        return sum(side.values.numel() for side in (*self.queries.values(), *self.keys.values()))

    def compute_weights(self, head: int, rows: Tensor, score_error: float) -> Tensor:
        """Return the weights ``(rows, K)`` that the browser computes, before row sums are applied."""
        query = unpack_side(self.queries[head].pack(score_error))[rows]
        key = unpack_side(self.keys[head // self.group_size].pack(score_error))
        scores = query[:, 1:] @ key[:, 1:].T + query[:, :1] + key[:, 0]
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.visible is not None:
            scores = scores.masked_fill(~torch.from_numpy(self.visible)[rows], -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)


def factor_scores(
    attention: CapturedAttention, batch: int, heads: Sequence[int], shape: tuple[int, int]
) -> ScoreFactors | None:
    """Return the factors of the first ``shape`` queries and keys.

    None if the weights are smaller, or are not the softmax of a masked product.
    """
    num_queries, num_keys = shape
    group_size = attention.query.shape[1] // attention.key.shape[1]
    groups = sorted({head // group_size for head in heads})
    num_codes = attention.query.shape[3] * (len(heads) * num_queries + len(groups) * num_keys)
    is_small = 2 * num_codes <= len(heads) * num_queries * num_keys
    if attention.score_function is not None or attention.score_mod is not None or not is_small:
        return None
    if max(shape) > MAX_LENGTH or not _has_visibility_mask(attention, batch, shape):
        return None
    queries: dict[int, BalancedSide] = {}
    keys: dict[int, BalancedSide] = {}
    for group in groups:
        members = [head for head in heads if head // group_size == group]
        query = attention.query[batch, members, :num_queries].to("cpu", torch.float64) * attention.scale
        key = attention.key[batch, group, :num_keys].to("cpu", torch.float64)
        if not (query.isfinite().all() and key.isfinite().all()):
            return None
        balanced_queries, keys[group] = _balance(query, key, centre_bias=attention.softcap is None)
        queries |= dict(zip(members, balanced_queries, strict=True))
    return ScoreFactors(queries, keys, group_size, find_visible_pairs(attention, batch, shape), attention.softcap)


def _balance(query: Tensor, key: Tensor, *, centre_bias: bool) -> tuple[list[BalancedSide], BalancedSide]:
    """Balance queries ``(H, Q, D)`` of several heads with the keys ``(K, D)`` that they share."""
    query_mean, key_mean = query.mean((0, 1)), key.mean(0)
    key = key - key_mean
    key_bias, row_bias = key @ query_mean, query @ key_mean  # (K,), (H, Q)
    query = query - query_mean
    if centre_bias:  # terms that are the same for all keys change no weight
        key_bias = key_bias - (key_bias.max() + key_bias.min()) / 2
        row_bias = torch.zeros_like(row_bias)
    width = key.shape[1]
    flat = query.reshape(-1, width)
    query_covariance, key_covariance = flat.T @ flat / len(flat), key.T @ key / len(key)
    ridge = REGULARIZATION * key_covariance.trace() + 1e-30
    root = torch.linalg.cholesky(key_covariance + ridge * torch.eye(width, dtype=key.dtype))
    energies, vectors = torch.linalg.eigh(root.T @ query_covariance @ root)
    energies = energies.flip(0).clamp_min(max(float(energies[-1]) * 1e-12, 1e-30))
    vectors = vectors.flip(1)
    to_query = root @ vectors * energies**-0.25
    to_key = torch.linalg.solve_triangular(root.T, vectors, upper=True) * energies**0.25
    query, key = query @ to_query, key @ to_key
    # An error of one side is multiplied by the other one.
    deviation = max(float((query.square().sum(-1).mean() + key.square().sum(-1).mean()).sqrt()), 1e-30)

    def build_side(bias: Tensor, channels: Tensor) -> BalancedSide:
        return BalancedSide(torch.cat([bias[:, None], channels], 1).float(), deviation)

    return [build_side(*side) for side in zip(row_bias, query, strict=True)], build_side(key_bias, key)


def _has_visibility_mask(attention: CapturedAttention, batch: int, shape: tuple[int, int]) -> bool:
    """Return whether the mask only hides pairs, the same in all heads."""
    mask = attention.mask
    if mask is None:
        return True
    mask = _slice_mask(mask, batch, shape)
    if mask.shape[0] > 1:
        return False
    if mask.dtype == torch.bool:
        return True
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min / 2)).all())


def find_visible_pairs(attention: CapturedAttention, batch: int, shape: tuple[int, int]) -> NDArray[np.bool_] | None:
    """Return which queries see which keys ``(Q, K)``; None if all of them do."""
    visible = torch.ones(shape, dtype=torch.bool)
    if attention.mask is not None:
        mask = _slice_mask(attention.mask, batch, shape)[0].cpu()
        visible &= mask if mask.dtype == torch.bool else mask == 0
    if attention.diagonal is not None:
        distances = torch.arange(shape[1]) - torch.arange(shape[0])[:, None] - attention.diagonal  # (Q, K)
        visible &= distances <= 0
        if attention.window is not None:
            visible &= distances > -attention.window
    return None if visible.all() else visible.numpy()


def _slice_mask(mask: Tensor, batch: int, shape: tuple[int, int]) -> Tensor:
    """Return the mask of a sequence ``(H or 1, Q or 1, K or 1)``."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask[batch if len(mask) > 1 else 0, :, : shape[0], : shape[1]]


def unpack_side(data: bytes) -> Tensor:
    """Unpack queries or keys ``(length, 1 + channels)``, with the bias first."""
    length, num_channels, num_wide, bias_step, step = HEADER.unpack_from(data)
    planes = np.frombuffer(data, np.int8, offset=HEADER.size).reshape(-1, length)
    codes = planes[:num_channels].astype(np.float32)
    codes[:num_wide] += np.float32(256) * planes[num_channels:]
    values: Tensor = torch.from_numpy(codes).T * step
    values[:, 0] *= bias_step / step
    return values


def compress_side(side: BalancedSide, score_error: float) -> bytes:
    """Pack and compress queries or keys."""
    # Codes hardly repeat. A small buffer gives each few channels a Huffman code of their own.
    compressor = zlib.compressobj(level=6, memLevel=6, strategy=zlib.Z_HUFFMAN_ONLY)
    return compressor.compress(side.pack(score_error)) + compressor.flush()


def compress_mask(visible: NDArray[np.bool_]) -> bytes:
    """Compress which queries see which keys: one bit each, row by row, lowest bit first."""
    return zlib.compress(np.packbits(visible, bitorder="little").tobytes())


def compute_relative_errors(weights: FloatArray, rounded: FloatArray) -> FloatArray:
    """Return the relative errors of the weights that are at least as large as the mean."""
    is_large = weights >= max(float(weights.mean()), 1e-30)
    return np.asarray(np.abs(rounded[is_large] / weights[is_large] - 1), np.float32)
