"""Mask classes. Users create them with :mod:`jumok.attention.masks`.

The classes for packed sequences are in :mod:`jumok.attention.packed_masks`.

Most masks are *bands*: query ``i`` may attend to the keys ``first[i] … last[i]``. Padding, causal, window and
packed documents are bands, and so is every ``&`` of them. A band is two integers per row, so no path has to
build a Q×K tensor for it. Everything that a path needs to know (rows without any key, keys that no query
sees, blocks that are full or empty) follows from these integers. ``|``, ``~`` and ``tensor`` create masks
that need not be bands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from jumok.attention.caching import BoundedCache, get_cuda_graph_scope, is_capturing_cuda_graph, is_tracing
from jumok.errors import InputError

T = TypeVar("T")

MAX_SCAN_ELEMENTS = 1 << 24  # elements materialised at a time when a mask that is not a band is scanned
MASK_CACHE_SIZE = 16  # cached values per mask, such as its band for one shape


class AttentionShape(NamedTuple):
    """The sizes of the attention in which a mask is used."""

    num_leading_dims: int  # dimensions in front of the queries: batch, heads
    num_queries: int
    num_keys: int
    device: torch.device


class Band(NamedTuple):
    """Query ``i`` may attend to the keys ``first[…, i] … last[…, i]``, both included.

    Both have shape ``(*leading, Q)``. A dimension along which all values are equal may have size 1.
    """

    first: Tensor
    last: Tensor


# ------------------------------------------------------------------------------------ base class


class Mask:
    """What each query may attend to. Masks are immutable. Combine them with ``&``, ``|`` and ``~``.

    >>> import jumok
    >>> (jumok.masks.causal() & jumok.masks.padding([2, 3])).to_dense(3, 3).int()
    tensor([[[1, 0, 0],
             [1, 1, 0],
             [1, 1, 0]],
    <BLANKLINE>
            [[1, 0, 0],
             [1, 1, 0],
             [1, 1, 1]]], dtype=torch.int32)
    """

    @property
    def num_leading_dims(self) -> int:
        """The number of leading dimensions that the mask itself has."""
        raise NotImplementedError

    def to_band(self, shape: AttentionShape) -> Band | None:
        """Return the mask as a band, or None if it is not a band."""
        return None

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        """Return some rows as a boolean tensor ``(*leading, rows, K)``.

        A dimension along which all values are equal may have size 1.
        """
        raise NotImplementedError

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        """Raise if the mask does not fit an attention of these sizes. Never waits for the GPU."""

    def conjuncts(self) -> tuple[Mask, ...]:
        """Return the masks whose ``&`` this mask is."""
        return (self,)

    def leaves(self) -> tuple[Mask, ...]:
        """Return the masks from which this mask is combined by any operators."""
        return (self,)

    def is_query_independent(self) -> bool:
        """Return whether all queries of a batch row see the same keys."""
        return False

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        """Return whether every query is known to see a key, without reading values from a device."""
        return False

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        """Return whether every key is known to be seen by a query, or the other keys are known to be zero.

        Values are not read from a device.
        """
        return False

    def includes_diagonal(self) -> bool:
        """Return whether every query that sees any key also sees the key at its own position."""
        return False

    def includes_first_key(self) -> bool:
        """Return whether every query that sees any key also sees the first key."""
        return False

    def __and__(self, other: Mask) -> Mask:
        return AndMask(self, _require_mask(other))

    __rand__ = __and__  # raises the same error if the left operand is not a mask

    def __or__(self, other: Mask) -> Mask:
        return OrMask(self, _require_mask(other))

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return NotMask(self)

    def __bool__(self) -> bool:
        raise InputError("masks combine with &, | and ~ (not with and, or and not); test for a mask with `is None`")

    def to_dense(
        self,
        num_queries: int,
        num_keys: int,
        device: torch.device | str = "cpu",
        num_leading_dims: int | None = None,
    ) -> Tensor:
        """Return the whole mask as a boolean tensor ``(*leading, Q, K)``.

        It raises the same errors as ``attend`` for queries and keys of these lengths.

        Args:
            num_queries: Q.
            num_keys: K.
            device: the device of the result.
            num_leading_dims: the number of leading dimensions of the attention, if the mask itself has fewer.

        >>> import jumok
        >>> jumok.masks.causal().to_dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        for name, length in (("num_queries", num_queries), ("num_keys", num_keys)):
            if not isinstance(length, int) or length < 0:
                raise InputError(f"to_dense({name}={length!r}): expected an integer, 0 or more")
        shape = AttentionShape(
            max(self.num_leading_dims, num_leading_dims or 0), num_queries, num_keys, torch.device(device)
        )
        leaf_shapes = [leaf.to_dense_rows(shape, slice(0, 0)).shape[:-2] for leaf in self.leaves()]
        try:
            leading_shape = torch.broadcast_shapes(*leaf_shapes)
        except RuntimeError:
            listed = ", ".join(str(tuple(leaf_shape)) for leaf_shape in leaf_shapes)
            raise InputError(f"the mask's parts have leading dimensions that do not fit: {listed}") from None
        for leaf in self.leaves():
            # A tensor on another device is copied.
            leaf_device = leaf.allowed.device if isinstance(leaf, DenseMask) else shape.device
            leaf.check_shape(leading_shape, shape._replace(device=leaf_device))
        dense = self.to_dense_rows(shape, slice(0, num_queries))
        return dense.expand(*dense.shape[:-2], num_queries, num_keys)

    def find_nonempty_rows(self, shape: AttentionShape) -> Tensor | None:
        """Return which queries see any key, ``(*leading, Q)`` up to broadcasting, or None if all do."""
        if self.has_no_empty_rows(shape):
            return None

        def compute() -> Tensor:
            band = self.to_band(shape)
            if band is not None:
                return band.last.clamp(max=shape.num_keys - 1) >= band.first.clamp(min=0)
            return torch.cat([chunk.any(-1) for chunk in self._iter_row_chunks(shape)], dim=-1)

        return self.get_or_compute(("rows", shape), compute)

    def find_visible_keys(self, shape: AttentionShape) -> Tensor | None:
        """Return which keys any query sees, ``(*leading, K)`` up to broadcasting, or None if all are seen."""
        if self.has_no_hidden_keys(shape):
            return None

        def compute() -> Tensor:
            band = self.to_band(shape)
            if band is not None:
                return _find_covered_keys(band, shape.num_keys)
            chunks = (chunk.any(-2) for chunk in self._iter_row_chunks(shape))
            return functools.reduce(torch.logical_or, chunks)

        return self.get_or_compute(("keys", shape), compute)

    def _iter_row_chunks(self, shape: AttentionShape) -> Iterator[Tensor]:
        """Yield the dense mask in chunks of rows, so that a scan never takes Q×K elements."""
        sample = self.to_dense_rows(shape, slice(0, 2))
        if sample.shape[-2] < 2:  # all rows are equal, or there is only one
            yield sample
            return
        chunk_size = max(1, 2 * MAX_SCAN_ELEMENTS // max(1, sample.numel()))
        for start in range(0, shape.num_queries, chunk_size):
            yield self.to_dense_rows(shape, slice(start, min(start + chunk_size, shape.num_queries)))

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return a value derived from the mask, computed once and cached on the mask."""
        if is_tracing():
            return compute()
        cache: BoundedCache = self.__dict__.setdefault("_cache", BoundedCache(MASK_CACHE_SIZE))
        store = True
        if is_capturing_cuda_graph() and key not in cache:
            # Tensors made during the capture hold values only when that graph runs.
            scope = get_cuda_graph_scope()
            key, store = (scope, key), scope is not None
        with torch.inference_mode(False):  # a value computed in inference mode may be needed in training
            return cache.get_or_compute(key, compute, store=store)


# ------------------------------------------------------------------------------------- mask types


class BandMask(Mask):
    """A mask that is always a band."""

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        band = self.to_band(shape)
        assert band is not None

        def compute() -> Tensor:
            first, last = (_slice_rows(x, rows, -1)[..., None] for x in band)
            keys = torch.arange(shape.num_keys, device=shape.device)
            return (keys >= first) & (keys <= last)

        return self.get_or_compute(("row", shape), compute) if band.first.shape[-1] == 1 else compute()


@dataclass(frozen=True, eq=False)
class PaddingMask(BandMask):
    """Every query of a batch row sees the same contiguous keys ``first … last``."""

    first: Tensor  # (*leading)
    last: Tensor  # (*leading)
    min_length: int  # the fewest keys of any row; like the next two, known on the host
    max_end: int  # the largest last key of any row, plus one
    max_first: int  # the largest first key of any row
    num_keys: int | None = None  # the number of keys of the 0/1 mask that this was created from
    padding_is_zero: bool = False  # whether the keys that no query sees are known to be zero

    @property
    def num_leading_dims(self) -> int:
        return self.first.dim()

    def is_query_independent(self) -> bool:
        return True

    def to_band(self, shape: AttentionShape) -> Band:
        def compute() -> Band:
            ends = (move_to_device(x, shape.device)[..., None] for x in (self.first, self.last))
            return Band(*(align_leading_dims(x, self.num_leading_dims, shape.num_leading_dims) for x in ends))

        return self.get_or_compute(("band", shape), compute)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.num_keys is not None:
            return _check_zero_one_shape((*self.first.shape, self.num_keys), leading_shape, shape)
        if self.max_end > shape.num_keys:
            raise InputError(
                f"the padding mask has a length of {self.max_end}, but there are only {shape.num_keys} keys; "
                "give the number of real keys of each row"
            )
        return check_leading_shape("the padding mask's lengths", self.first.shape, leading_shape)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.min_length > 0

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        return self.padding_is_zero or (self.min_length >= shape.num_keys and shape.num_queries > 0)

    def includes_first_key(self) -> bool:
        return self.max_first == 0

    def __repr__(self) -> str:
        if self.num_keys is None:
            return f"padding({(self.last + 1).tolist()})"
        return f"from_zero_one({(*self.first.shape, self.num_keys)})"


@dataclass(frozen=True, eq=False)
class KeyMask(Mask):
    """Every query of a batch row sees the same keys, which need not be contiguous."""

    allowed: Tensor  # (*leading, K), on the host

    @property
    def num_leading_dims(self) -> int:
        return self.allowed.dim() - 1

    def is_query_independent(self) -> bool:
        return True

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        allowed = self.get_or_compute(shape.device, lambda: move_to_device(self.allowed, shape.device))
        return align_leading_dims(allowed[..., None, :], self.num_leading_dims, shape.num_leading_dims)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        _check_zero_one_shape(self.allowed.shape, leading_shape, shape)

    def __repr__(self) -> str:
        return f"from_zero_one({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class WindowMask(BandMask):
    """Keys near the diagonal. A causal mask is a window without a left end that ends at the diagonal."""

    left: int | None
    right: int | None
    offset: Tensor | None  # the key at which the diagonal starts; None means K − Q

    @property
    def num_leading_dims(self) -> int:
        return 0 if self.offset is None else self.offset.dim()

    def to_band(self, shape: AttentionShape) -> Band:
        def compute() -> Band:
            diagonal = torch.arange(shape.num_queries, device=shape.device)
            if self.offset is None:
                diagonal = diagonal + (shape.num_keys - shape.num_queries)
            else:
                diagonal = diagonal + move_to_device(self.offset, shape.device)[..., None]
            diagonal = align_leading_dims(diagonal, self.num_leading_dims, shape.num_leading_dims)
            max_reach = shape.num_queries + shape.num_keys  # a larger reach changes nothing and may overflow
            first = torch.zeros_like(diagonal) if self.left is None else diagonal - min(self.left, max_reach)
            if self.right is None:
                last = torch.full_like(diagonal, shape.num_keys - 1)
            else:
                last = diagonal + min(self.right, max_reach)
            return Band(first, last)

        return self.get_or_compute(("band", shape), compute)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.offset is not None:
            check_leading_shape("the mask's offset", self.offset.shape, leading_shape)

    @property
    def is_causal(self) -> bool:
        """Whether the mask is causal and aligned bottom-right."""
        return self.left is None and self.right == 0 and self.offset is None

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.offset is None and shape.num_queries <= shape.num_keys

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        sees_all_previous = self.left is None and shape.num_queries > 0
        return self.offset is None and (sees_all_previous or shape.num_queries >= shape.num_keys)

    def includes_diagonal(self) -> bool:
        return True

    def includes_first_key(self) -> bool:
        return self.left is None

    def __repr__(self) -> str:
        offset = "" if self.offset is None else f"offset={self.offset.tolist()}"
        if self.left is None and self.right == 0:
            return f"causal({offset})"
        return f"window({self.left}, {self.right}{', ' + offset if offset else ''})"


@dataclass(frozen=True, eq=False)
class DenseMask(Mask):
    """A boolean tensor, which broadcasts from the right as tensors do."""

    allowed: Tensor  # (…, Q, K)

    @property
    def num_leading_dims(self) -> int:
        return self.allowed.dim() - 2

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        dense = _slice_rows(self.allowed, rows, -2).to(shape.device)
        return dense.reshape(*[1] * (shape.num_leading_dims - self.num_leading_dims), *dense.shape)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.allowed.device != shape.device:
            raise InputError(
                f"the mask tensor is on {self.allowed.device}, the query on {shape.device}; move the mask with .to()"
            )
        scores_shape = (*leading_shape, shape.num_queries, shape.num_keys)
        check_broadcast("the mask tensor", self.allowed.shape, scores_shape)

    def __repr__(self) -> str:
        return f"tensor({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class AdditiveMask(Mask):
    """A tensor of 0 and −inf that SDPA adds to the scores, used as it is, without any checks of its values.

    Its creator guarantees that every query sees a key and that the keys that no query sees are zero. It
    broadcasts from the right. :func:`jumok.masks.from_additive` does not create it, but a ``DenseMask``.
    """

    values: Tensor  # (…, Q, K), in the dtype of the query

    @property
    def num_leading_dims(self) -> int:
        return self.values.dim() - 2

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return self.to_additive_rows(shape, rows) == 0

    def to_additive_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        """Return the same as ``to_dense_rows``, with 0 for True and −inf for False."""
        values = _slice_rows(self.values, rows, -2)
        return values.reshape(*[1] * (shape.num_leading_dims - self.num_leading_dims), *values.shape)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        scores_shape = (*leading_shape, shape.num_queries, shape.num_keys)
        check_broadcast("the mask tensor", self.values.shape, scores_shape)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return True

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        return True

    def __repr__(self) -> str:
        return f"additive({tuple(self.values.shape)})"


@dataclass(frozen=True, eq=False)
class _BinaryMask(Mask):
    a: Mask
    b: Mask

    @property
    def num_leading_dims(self) -> int:
        return max(self.a.num_leading_dims, self.b.num_leading_dims)

    def leaves(self) -> tuple[Mask, ...]:
        return (*self.a.leaves(), *self.b.leaves())

    def is_query_independent(self) -> bool:
        return self.a.is_query_independent() and self.b.is_query_independent()

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        self.a.check_shape(leading_shape, shape)
        self.b.check_shape(leading_shape, shape)


class AndMask(_BinaryMask):
    """``a & b``. The intersection of two bands is a band."""

    def conjuncts(self) -> tuple[Mask, ...]:
        return (*self.a.conjuncts(), *self.b.conjuncts())

    def to_band(self, shape: AttentionShape) -> Band | None:
        def compute() -> Band | None:
            a, b = self.a.to_band(shape), self.b.to_band(shape)
            if a is None or b is None:
                return None
            return Band(torch.maximum(a.first, b.first), torch.minimum(a.last, b.last))

        return self.get_or_compute(("band", shape), compute)

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return self.a.to_dense_rows(shape, rows) & self.b.to_dense_rows(shape, rows)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        # Known if every conjunct lets query i see the key at its own position (all are aligned bottom-right),
        # or if every conjunct lets it see key 0.
        masks = self.conjuncts()
        if not all(mask.has_no_empty_rows(shape) for mask in masks):
            return False
        return all(mask.includes_diagonal() for mask in masks) or all(mask.includes_first_key() for mask in masks)

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        return shape.num_queries == shape.num_keys and all(
            mask.includes_diagonal() and mask.has_no_hidden_keys(shape) for mask in self.conjuncts()
        )

    def __repr__(self) -> str:
        return f"{self.a!r} & {self.b!r}"


class OrMask(_BinaryMask):
    """``a | b``."""

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return self.a.to_dense_rows(shape, rows) | self.b.to_dense_rows(shape, rows)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.a.has_no_empty_rows(shape) or self.b.has_no_empty_rows(shape)

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        return self.a.has_no_hidden_keys(shape) or self.b.has_no_hidden_keys(shape)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"


@dataclass(frozen=True, eq=False)
class NotMask(Mask):
    """``~a``."""

    a: Mask

    @property
    def num_leading_dims(self) -> int:
        return self.a.num_leading_dims

    def leaves(self) -> tuple[Mask, ...]:
        return self.a.leaves()

    def is_query_independent(self) -> bool:
        return self.a.is_query_independent()

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        self.a.check_shape(leading_shape, shape)

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return ~self.a.to_dense_rows(shape, rows)

    def __repr__(self) -> str:
        return f"~({self.a!r})"


# ---------------------------------------------------------------------------------------- helpers


def move_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting. CUDA has read ``x`` when the call returns."""
    return x.to(device, non_blocking=device.type == "cuda")


def _slice_rows(x: Tensor, rows: slice, dim: int) -> Tensor:
    """Return some rows of ``x``, or its only row if all rows are equal."""
    if x.shape[dim] == 1:
        return x
    return x[..., rows] if dim == -1 else x[..., rows, :]


def align_leading_dims(x: Tensor, num_mask_dims: int, num_leading_dims: int) -> Tensor:
    """Insert dimensions of size 1 after the mask's own leading dimensions, which stay leftmost."""
    return x.reshape(*x.shape[:num_mask_dims], *[1] * (num_leading_dims - num_mask_dims), *x.shape[num_mask_dims:])


def _find_covered_keys(band: Band, num_keys: int) -> Tensor:
    """Return which keys are in the band of any row: +1 where a band starts, −1 after its end, cumulated."""
    first, last = torch.broadcast_tensors(band.first.clamp(min=0), band.last.clamp(max=num_keys - 1))
    is_nonempty = (first <= last).int()
    changes = torch.zeros(*first.shape[:-1], num_keys + 1, dtype=torch.int32, device=first.device)
    changes.scatter_add_(-1, first.clamp(max=num_keys), is_nonempty)
    changes.scatter_add_(-1, (last + 1).clamp(min=0), -is_nonempty)
    return changes.cumsum(-1)[..., :num_keys] > 0


def _require_mask(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"a mask combines with another mask, not with {type(other).__name__}; "
        "wrap a boolean tensor (True = may attend) with masks.tensor(t)"
    )


def broadcasts_from_left(shape: Sequence[int], target_shape: Sequence[int]) -> bool:
    """Return whether ``shape`` broadcasts to the first dimensions of ``target_shape``."""
    return len(shape) <= len(target_shape) and all(
        size in (1, target) for size, target in zip(shape, target_shape, strict=False)
    )


def check_leading_shape(name: str, shape: Sequence[int], leading_shape: Sequence[int]) -> None:
    """Raise unless a mask's own leading dimensions fit those of the query."""
    if not broadcasts_from_left(shape, leading_shape):
        raise InputError(
            f"{name}: shape {tuple(shape)} does not fit the leading dimensions {tuple(leading_shape)} of the "
            "query; they align from the left, so one number per batch row has shape (batch,)"
        )


def _check_zero_one_shape(mask_shape: Sequence[int], leading_shape: Sequence[int], shape: AttentionShape) -> None:
    if mask_shape[-1] != shape.num_keys:
        raise InputError(
            f"the 0/1 mask has shape {tuple(mask_shape)}, but there are {shape.num_keys} keys; its last "
            "dimension needs one number for every key, including those of a cache"
        )
    if not broadcasts_from_left(mask_shape[:-1], leading_shape):
        raise InputError(
            f"the 0/1 mask has shape {tuple(mask_shape)}, but the leading dimensions are "
            f"{tuple(leading_shape)}; give it as (batch, keys), without dimensions of 1 for heads or queries"
        )


def check_broadcast(name: str, shape: Sequence[int], scores_shape: Sequence[int]) -> None:
    """Raise unless a tensor of this shape broadcasts to the shape of the scores."""
    if not broadcasts_from_left(shape[::-1], scores_shape[::-1]):
        raise InputError(
            f"{name} has shape {tuple(shape)}, but the scores have {tuple(scores_shape)}, to which it must "
            "broadcast from the right: (batch, keys) is t[:, None, None] for scores (batch, heads, queries, "
            "keys); a 0/1 mask of shape (batch, keys) goes through masks.from_zero_one"
        )
