"""One captured attention, and the scores and weights of any part of it.

An attention is stored as the inputs that it was computed from: queries, keys, scale, mask. That is O(n·d),
whatever kernel ran. Scores and weights are computed again for the requested part, never for all of Q×K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jumok.errors import InputError

AxisIndex = slice | Tensor  # indices along one axis: a slice without a step, or integers (N,)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class CapturedAttention:
    """One attention as a model computed it. Tensors are references to the model's own, or moved to the CPU.

    ``softmax(score_mod(softcap(scale · query keyᵀ)) + mask)``: all but the queries and keys are optional.

    >>> attention = CapturedAttention(torch.randn(1, 6, 5, 8), torch.randn(1, 2, 7, 8), scale=8**-0.5)
    >>> attention.shape  # six heads share two heads of keys
    (1, 6, 5, 7)
    >>> attention.compute_weights(0, slice(4, 6), slice(0, 5), slice(0, 7)).shape  # of the last two heads
    torch.Size([2, 5, 7])
    """

    query: Tensor  # (B, H, Q, D); a batch of 1, of queries or keys, and a single head are expanded
    key: Tensor  # (B, G, K, D); query head h uses key head h // (H // G)
    scale: float = 1.0
    softcap: float | None = None  # softcap · tanh(score / softcap), before score_mod and mask
    mask: Tensor | None = None  # bool (True: visible) or additive; broadcasts to (B, H, Q, K)
    diagonal: int | None = None  # causal: query i may attend to key j iff j <= i + diagonal …
    window: int | None = None  # … and, if given, j > i + diagonal - window
    # FlexAttention's score_mod and mask_mod combined: (scores, b, h, q, k) -> scores; the indices broadcast.
    score_mod: ScoreMod | None = None
    # Replaces scale · query keyᵀ: maps (B, H, some queries, Dq) and all keys (B, G, K, Dk) to
    # (B, H, some queries, K). It always gets the whole batch, as it may depend on the batch index and key.
    score_function: ScoreFunction | None = None
    lse: Tensor | None = None  # (B, H, Q) natural logarithm of Σ exp(score) of each row, if the kernel returns it

    def __post_init__(self) -> None:
        if self.query.dim() == self.key.dim() == 4:
            query, key = _broadcast_heads(self.query, self.key)
            if query is not self.query or key is not self.key:
                object.__setattr__(self, "query", query)
                object.__setattr__(self, "key", key)
        _check_attention(self)

    @functools.cached_property
    def _row_sums(self) -> _RowSums:
        return _RowSums(self.shape[:3], self.lse)

    @classmethod
    def from_scores(cls, scores: Tensor, lse: Tensor | None = None) -> CapturedAttention:
        """Capture complete scores ``(B, H, Q, K)``, which take the place of the queries."""
        no_keys = scores.new_zeros(()).expand(scores.shape[0], 1, scores.shape[3], 1)
        return cls(scores, no_keys, score_function=return_scores, lse=lse)

    @classmethod
    def from_weights(cls, weights: Tensor) -> CapturedAttention:
        """Capture complete weights ``(B, H, Q, K)``: their logarithms are scores that need no normalization."""
        return cls.from_scores(weights.log(), lse=weights.new_zeros(weights.shape[:3]))

    @classmethod
    def from_sparse_weights(
        cls, rows: Tensor, keys: Tensor, weights: Tensor, shape: Sequence[int]
    ) -> CapturedAttention:
        """Capture the nonzero weights ``(N,)`` of a map ``(B, H, Q, K)``.

        ``rows`` are their indices in all B · H · Q rows, ``keys`` those of their keys. Weights at the same place are
        added.
        """
        batch, heads, num_queries, num_keys = shape
        row_numbers = torch.arange(batch * heads * num_queries, device=rows.device)
        order = rows.argsort(stable=True)
        offsets = torch.searchsorted(rows[order], row_numbers.to(rows.dtype))
        counts = torch.bincount(rows, minlength=len(row_numbers))
        return cls(
            row_numbers.view(batch, heads, num_queries, 1),
            weights.new_zeros(()).expand(batch, 1, num_keys, 1),
            score_function=_SparseScores(offsets, counts, keys[order], weights[order]),
            lse=weights.new_zeros(batch, heads, num_queries),
        )

    @property
    def has_only_scores(self) -> bool:
        """Whether it was captured by :meth:`from_scores`."""
        return self.score_function is return_scores

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Q, K)."""
        batch, heads, queries = self.query.shape[:3]
        return batch, heads, queries, self.key.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The type that scores and weights are computed in: float64 if the queries are, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    def find_visible_keys(self, rows: slice) -> slice:
        """Return the keys that diagonal and window leave for any of these rows; a mask may block more."""
        num_keys = self.shape[3]
        if self.diagonal is None:
            return slice(0, num_keys)
        stop = min(max(rows.stop + self.diagonal, 0), num_keys)
        start = 0 if self.window is None else max(rows.start + self.diagonal - self.window + 1, 0)
        return slice(min(start, stop), stop)

    def compute_scores(self, batch: int, heads: AxisIndex, rows: AxisIndex, cols: AxisIndex) -> Tensor:
        """Return the scores ``(heads, rows, cols)`` of one batch index, in :attr:`dtype`; -inf: masked."""
        heads, rows, cols = (_normalize_index(x, n) for x, n in zip((heads, rows, cols), self.shape[1:], strict=True))
        with torch.no_grad(), torch.autocast(self.query.device.type, enabled=False):
            scores = self._compute_unmasked_scores(batch, heads, rows, cols)
            h, q, k = (_to_positions(x, scores.device) for x in (heads, rows, cols))
            h, q = h[:, None, None], q[:, None]
            if self.score_mod is not None:
                b = torch.full((), batch, device=scores.device)
                scores.copy_(self.score_mod(scores, b, h, q, k))
            if self.mask is not None:
                _apply_mask(_slice_mask(self.mask, batch, heads, rows, cols).to(scores.device), scores)
            if self.diagonal is not None and not self._is_unmasked(rows, cols):
                scores.masked_fill_(k > q + self.diagonal, -torch.inf)
                if self.window is not None:
                    scores.masked_fill_(k <= q + (self.diagonal - self.window), -torch.inf)
        return scores

    def compute_weights(self, batch: int, heads: AxisIndex, rows: AxisIndex, cols: AxisIndex) -> Tensor:
        """Return the weights ``(heads, rows, cols)``, before dropout; zeros in a row without a visible key.

        The sum of a row needs all its keys. It is cached: once it is known, or if the kernel returns it, the
        keys that are not requested cost nothing.
        """
        heads, rows, cols = (_normalize_index(x, n) for x, n in zip((heads, rows, cols), self.shape[1:], strict=True))
        sums = self._row_sums.get(batch, heads, rows)
        if sums is not None:
            max_score, exp_sum = sums
            weights = self.compute_scores(batch, heads, rows, cols).sub_(max_score[..., None]).exp_()
            return weights.div_(exp_sum[..., None])
        visible = self.find_visible_keys(rows) if isinstance(rows, slice) else slice(0, self.shape[3])
        weights = self.compute_scores(batch, heads, rows, visible)
        max_score = weights.amax(-1) if weights.shape[-1] else weights.new_zeros(weights.shape[:-1])
        max_score = max_score.masked_fill_(max_score == -torch.inf, 0.0)
        weights.sub_(max_score[..., None]).exp_()
        exp_sum = weights.sum(-1)
        exp_sum.masked_fill_(exp_sum == 0, 1.0)  # no visible key: 0 / 1
        self._row_sums.store(batch, heads, rows, max_score, exp_sum)
        weights.div_(exp_sum[..., None])
        return weights if cols == visible else _select_columns(weights, visible, cols, self.shape[3])

    def new_zeros(self, *shape: int) -> Tensor:
        """Return zeros on the device and in the type of the weights."""
        return torch.zeros(shape, dtype=self.dtype, device=self.query.device)

    def get_lse(self, batch: int, heads: AxisIndex, rows: AxisIndex) -> Tensor | None:
        """Return ``log Σ exp(score)`` ``(heads, rows)``, if known; 0 for a row without a visible key."""
        heads, rows = _normalize_index(heads, self.shape[1]), _normalize_index(rows, self.shape[2])
        sums = self._row_sums.get(batch, heads, rows)
        return None if sums is None else sums[0] + sums[1].log()

    def store_lse(self, batch: int, heads: AxisIndex, rows: AxisIndex, lse: Tensor) -> None:
        """Cache ``log Σ exp(score)`` ``(heads, rows)``, as computed by a kernel."""
        heads, rows = _normalize_index(heads, self.shape[1]), _normalize_index(rows, self.shape[2])
        lse = lse.where(lse.isfinite(), 0.0)
        self._row_sums.store(batch, heads, rows, lse, torch.ones_like(lse))

    def _compute_unmasked_scores(self, batch: int, heads: AxisIndex, rows: AxisIndex, cols: AxisIndex) -> Tensor:
        """Return the scores before any mask, in a new tensor."""
        if self.score_function is not None:
            all_scores = self.score_function(self.query[:, :, rows], self.key)  # (B, H, rows, K)
            scores = all_scores[batch][heads][..., cols].to(self.dtype, copy=True)
        else:
            query = self.query[batch][heads][:, rows].to(self.dtype) * self.scale
            scores = query @ self.select_keys(batch, heads)[..., cols, :].to(self.dtype).mT
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores

    def select_keys(self, batch: int, heads: AxisIndex) -> Tensor:
        """Return the keys ``(heads or 1, K, D)`` that these query heads use; a copy only if heads differ."""
        keys, group_size = self.key[batch], self.query.shape[1] // self.key.shape[1]
        if group_size == 1:
            return keys[heads]
        if isinstance(heads, slice) and heads.start // group_size == (heads.stop - 1) // group_size:
            return keys[heads.start // group_size][None]
        return keys[_to_positions(heads, keys.device) // group_size]

    def _is_unmasked(self, rows: AxisIndex, cols: AxisIndex) -> bool:
        """Return whether diagonal and window mask nothing in these rows and columns."""
        if self.diagonal is None or not (isinstance(rows, slice) and isinstance(cols, slice)):
            return False
        if cols.stop - 1 > rows.start + self.diagonal:
            return False
        return self.window is None or cols.start > rows.stop - 1 + self.diagonal - self.window


def return_scores(rows: Tensor, keys: Tensor) -> Tensor:
    """Return the queries: a score function for scores in place of queries."""
    return rows


@dataclass(frozen=True, eq=False)
class _SparseScores:
    """A score function for sparse weights, with the numbers of rows in place of queries."""

    offsets: Tensor  # of each row in the following
    counts: Tensor
    keys: Tensor
    weights: Tensor

    def __call__(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the logarithms of the weights ``(B, H, some queries, K)``; -inf where there are none."""
        numbers = rows.flatten().to(self.offsets.device)
        counts = self.counts[numbers]
        row_of_entry = torch.arange(len(numbers), device=counts.device).repeat_interleave(counts)
        first_of_row = (self.offsets[numbers] - counts.cumsum(0) + counts).repeat_interleave(counts)
        entries = first_of_row + torch.arange(len(row_of_entry), device=counts.device)
        whole = self.weights.new_zeros(len(numbers) * keys.shape[2])
        whole.index_add_(0, row_of_entry * keys.shape[2] + self.keys[entries], self.weights[entries])
        return whole.log_().view(*rows.shape[:3], -1).to(rows.device)


class _RowSums:
    """Cache of the largest score and ``Σ exp(score - largest)`` of each row.

    The two are not combined into one logarithm: a row of scores around -1e9 (masked by a large number rather
    than by -inf) would lose all differences between its scores.
    """

    def __init__(self, shape: tuple[int, int, int], lse: Tensor | None) -> None:
        self.shape, self.lse = shape, lse
        self.is_known: Tensor | None = None  # (B, H, Q) bool, on the host: reading it does not wait for a GPU
        self.max_score: Tensor | None = None  # (B, H, Q)
        self.exp_sum: Tensor | None = None

    def get(self, batch: int, heads: AxisIndex, rows: AxisIndex) -> tuple[Tensor, Tensor] | None:
        """Return maximum and sum ``(heads, rows)``; None unless all of them are known."""
        if self.lse is not None:
            lse = self.lse[batch][heads][:, rows]
            # Kernels write -inf or inf for a row without a visible key; all its scores are -inf.
            return lse.where(lse.isfinite(), 0.0), torch.ones_like(lse)
        if self.is_known is None or self.max_score is None or self.exp_sum is None:
            return None
        index = _combine_indices(heads, rows)
        if not self.is_known[batch][tuple(x if isinstance(x, slice) else x.cpu() for x in index)].all():
            return None
        return self.max_score[batch][index], self.exp_sum[batch][index]

    def store(self, batch: int, heads: AxisIndex, rows: AxisIndex, max_score: Tensor, exp_sum: Tensor) -> None:
        if self.is_known is None or self.max_score is None or self.exp_sum is None:
            with torch.inference_mode(False):  # otherwise only inference mode could write to them later
                self.max_score, self.exp_sum = (
                    torch.zeros(self.shape, dtype=max_score.dtype, device=max_score.device) for _ in range(2)
                )
                self.is_known = torch.zeros(self.shape, dtype=torch.bool)
        index = _combine_indices(heads, rows)
        self.max_score[batch][index], self.exp_sum[batch][index] = max_score, exp_sum
        self.is_known[batch][tuple(x if isinstance(x, slice) else x.cpu() for x in index)] = True


def _normalize_index(index: AxisIndex, size: int) -> AxisIndex:
    """Return ``index`` with the bounds of a slice as numbers from 0 to ``size``."""
    if isinstance(index, Tensor):
        return index
    start, stop, step = index.indices(size)
    if step != 1:
        raise InputError(f"{index} is not supported for an axis of {size}; pass a slice without a step or a tensor")
    return slice(start, max(start, stop))


def _to_positions(index: AxisIndex, device: torch.device) -> Tensor:
    """Return the positions that ``index`` selects, ``(N,)``."""
    return torch.arange(index.start, index.stop, device=device) if isinstance(index, slice) else index.to(device)


def _combine_indices(heads: AxisIndex, rows: AxisIndex) -> tuple[AxisIndex, AxisIndex]:
    """Return an index of every head with every row."""
    if isinstance(heads, Tensor) and isinstance(rows, Tensor):
        return heads[:, None].to(rows.device), rows
    return heads, rows


def _select_columns(weights: Tensor, visible: slice, cols: AxisIndex, num_keys: int) -> Tensor:
    """Return the weights of the keys ``cols``, given those of the keys ``visible``; zero elsewhere."""
    if isinstance(cols, slice):
        first, last = max(cols.start, visible.start), min(cols.stop, visible.stop)
        if (first, last) == (cols.start, cols.stop):
            return weights[..., first - visible.start : last - visible.start]
        out = weights.new_zeros(*weights.shape[:-1], cols.stop - cols.start)
        if first < last:
            overlap = weights[..., first - visible.start : last - visible.start]
            out[..., first - cols.start : last - cols.start] = overlap
        return out
    all_weights = torch.nn.functional.pad(weights, (visible.start, num_keys - visible.stop))
    return all_weights[..., cols]


def _slice_mask(mask: Tensor, batch: int, heads: AxisIndex, rows: AxisIndex, cols: AxisIndex) -> Tensor:
    """Return the part of a mask for ``(heads, rows, cols)``; axes of size one stay so."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[batch if len(mask) > 1 else 0]
    mask = mask[heads] if mask.shape[0] > 1 else mask
    mask = mask[:, rows] if mask.shape[1] > 1 else mask
    return mask[..., cols] if mask.shape[2] > 1 else mask


def _apply_mask(mask: Tensor, scores: Tensor) -> None:
    """Mask scores in place. Blocked scores become -inf, even if they were NaN."""
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -torch.inf)
    else:
        # Many libraries write the lowest number of a type for -inf.
        blocked = mask <= torch.finfo(mask.dtype).min / 2
        scores.add_(mask).masked_fill_(blocked, -torch.inf)


def _broadcast_heads(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Expand a batch of 1, of the queries or of the keys, and a single query head. Nothing is copied."""
    if len(query) != len(key):
        batch = len(query) if len(key) == 1 else len(key)
        query, key = (x.expand(batch, -1, -1, -1) if len(x) == 1 else x for x in (query, key))
    if query.shape[1] == 1 < key.shape[1]:
        query = query.expand(-1, key.shape[1], -1, -1)
    return query, key


def _check_attention(attention: CapturedAttention) -> None:
    query, key, mask, lse = attention.query, attention.key, attention.mask, attention.lse
    if query.dim() != 4 or key.dim() != 4:
        raise InputError(
            f"got queries {tuple(query.shape)} and keys {tuple(key.shape)}; (B, H, Q, D) and "
            "(B, G, K, D) are expected: add the missing axes with unsqueeze"
        )
    if len(query) != len(key) or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise InputError(
            f"got queries {tuple(query.shape)} and keys {tuple(key.shape)}; they need the same batch, or "
            "one of them a batch of 1, and the heads of the queries must be a multiple of those of the keys"
        )
    if attention.score_function is None and query.shape[3] != key.shape[3]:
        raise InputError(f"queries have width {query.shape[3]}, keys {key.shape[3]}: a dot product needs the same")
    if mask is not None:
        fits = mask.dim() <= 4 and all(
            n in (1, size) for n, size in zip(reversed(mask.shape), reversed(attention.shape), strict=False)
        )
        if not fits:
            raise InputError(f"got a mask {tuple(mask.shape)}, which does not broadcast to {attention.shape}")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise InputError(f"got a mask of {mask.dtype}; pass bool (True: visible) or floats that are added")
    if attention.window is not None and (attention.diagonal is None or attention.window < 1):
        raise InputError(
            f"window={attention.window} is invalid; it needs a diagonal to count from, and at least one key"
        )
    if lse is not None and lse.shape != attention.shape[:3]:
        raise InputError(f"got lse of shape {tuple(lse.shape)}; {attention.shape[:3]} is expected, one number per row")
