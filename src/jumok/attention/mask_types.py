"""The kinds of mask, and what each can tell of itself. They are made by :mod:`jumok.attention.masks`.

Those of packed sequences are in :mod:`jumok.attention.packings`.

Most masks are *bands*: query ``i`` may attend to the keys ``first[i] … last[i]``. Padding, causal,
window and packed documents are bands, and so is every ``&`` of them. A band is two whole numbers a
row, so that no path has to build a Q×K tensor for it; and what the paths want to know (rows with
nothing allowed, keys that nobody sees, blocks that are full or empty) follows from those numbers.
``|``, ``~`` and ``tensor`` give masks that need not be bands.
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

MAX_SCAN_ELEMENTS = 1 << 24  # mask elements held at one time when a mask that is no band is looked through
MASK_CACHE_SIZE = 16  # things that a mask keeps, such as its band for one size; the oldest goes first


class AttentionShape(NamedTuple):
    """The attention that a mask is used in: ``leading`` dimensions in front of Q queries and K keys."""

    num_leading_dims: int
    num_queries: int
    num_keys: int
    device: torch.device


class Band(NamedTuple):
    """Query ``i`` may attend to the keys ``first[…, i] … last[…, i]``, both included.

    Shapes ``(*leading, Q)``; a dimension in which all is alike may be 1.
    """

    first: Tensor
    last: Tensor


# -------------------------------------------------------------------- what every mask can tell


class Mask:
    """What each query may attend to. Combine with ``&``, ``|`` and ``~``; a mask never changes once made.

    >>> import jumok
    >>> (jumok.masks.causal() & jumok.masks.padding([2, 3])).dense(3, 3).int()
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
        """How many leading dimensions the mask has itself."""
        raise NotImplementedError

    def to_band(self, shape: AttentionShape) -> Band | None:
        """The mask as a band, or None when it is none."""
        return None

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        """Some rows, ``(*leading, rows, K)``, boolean; a dimension in which all is alike may be 1."""
        raise NotImplementedError

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        """Raise when the mask does not fit an attention of these sizes. Never waits for the GPU."""

    def conjuncts(self) -> tuple[Mask, ...]:
        """The masks of which this one is the ``&``."""
        return (self,)

    def leaves(self) -> tuple[Mask, ...]:
        """The masks of which this one is combined in any way."""
        return (self,)

    def is_query_independent(self) -> bool:
        """Whether every query of a row of the batch sees the same keys."""
        return False

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        """True when it is known, without looking at numbers on a device, that every query has a key."""
        return False

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        """True when it is known likewise that every key has a query, or that the others hold zeros."""
        return False

    def includes_diagonal(self) -> bool:
        """Whether, if it lets query i see anything, it lets it see the key of its own place."""
        return False

    def includes_first_key(self) -> bool:
        """The same of the first key."""
        return False

    def __and__(self, other: Mask) -> Mask:
        return AndMask(self, _require_mask(other))

    __rand__ = __and__  # what is no mask and stands on the left is refused with the same words

    def __or__(self, other: Mask) -> Mask:
        return OrMask(self, _require_mask(other))

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return NotMask(self)

    def __bool__(self) -> bool:
        raise InputError(
            "masks combine with &, | and ~ (not with and, or and not); test for a mask with `is None`"
        )

    def to_dense(
        self,
        num_queries: int,
        num_keys: int,
        device: torch.device | str = "cpu",
        num_leading_dims: int | None = None,
    ) -> Tensor:
        """The whole mask as a boolean tensor ``(*leading, Q, K)``.

        ``leading``: how many leading dimensions the attention has, where that is more than the mask's own.
        What ``attend`` refuses of queries and keys of these lengths, is refused here as well.

        >>> import jumok
        >>> jumok.masks.causal().dense(2, 3)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        for name, length in (("queries", num_queries), ("keys", num_keys)):
            if not isinstance(length, int) or length < 0:
                raise InputError(f"dense({name}={length!r}): a whole number, 0 or more, is expected")
        at = AttentionShape(
            max(self.num_leading_dims, num_leading_dims or 0), num_queries, num_keys, torch.device(device)
        )
        own = [leaf.to_dense_rows(at, slice(0, 0)).shape[:-2] for leaf in self.leaves()]
        try:
            whole = torch.broadcast_shapes(*own)
        except RuntimeError:
            shown = ", ".join(str(tuple(shape)) for shape in own)
            raise InputError(f"the mask's parts have leading dimensions that do not fit: {shown}") from None
        for leaf in self.leaves():
            # A tensor that lies elsewhere comes along.
            leaf.check_shape(
                whole, at._replace(device=leaf.allowed.device) if isinstance(leaf, DenseMask) else at
            )
        part = self.to_dense_rows(at, slice(0, num_queries))
        return part.expand(*part.shape[:-2], num_queries, num_keys)

    def find_nonempty_rows(self, shape: AttentionShape) -> Tensor | None:
        """Which queries may attend to anything, ``(*leading, Q)`` up to broadcasting; None: all of them."""
        if self.has_no_empty_rows(shape):
            return None

        def look() -> Tensor:
            band = self.to_band(shape)
            if band is not None:
                return band.last.clamp(max=shape.num_keys - 1) >= band.first.clamp(min=0)
            return torch.cat([part.any(-1) for part in self._iter_row_chunks(shape)], dim=-1)

        return self.get_or_compute(("rows", shape), look)

    def find_visible_keys(self, shape: AttentionShape) -> Tensor | None:
        """Which keys some query may attend to, ``(*leading, K)`` up to broadcasting; None: all of them."""
        if self.has_no_hidden_keys(shape):
            return None

        def look() -> Tensor:
            band = self.to_band(shape)
            if band is not None:
                return _find_covered_keys(band, shape.num_keys)
            return functools.reduce(torch.logical_or, (part.any(-2) for part in self._iter_row_chunks(shape)))

        return self.get_or_compute(("keys", shape), look)

    def _iter_row_chunks(self, shape: AttentionShape) -> Iterator[Tensor]:
        """The whole mask, some rows at a time, so that looking through it never takes Q×K elements."""
        sample = self.to_dense_rows(shape, slice(0, 2))
        if sample.shape[-2] < 2:  # all rows are alike, or there is only one
            yield sample
            return
        step = max(1, 2 * MAX_SCAN_ELEMENTS // max(1, sample.numel()))
        for start in range(0, shape.num_queries, step):
            yield self.to_dense_rows(shape, slice(start, min(start + step, shape.num_queries)))

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """What was worked out once for a size and a device holds for the mask's whole life."""
        if is_tracing():
            return compute()
        memo: BoundedCache = self.__dict__.setdefault("_memo", BoundedCache(MASK_CACHE_SIZE))
        keep = True
        if is_capturing_cuda_graph() and not memo.contains(
            key
        ):  # what is made now holds numbers only when its graph runs
            recording = get_cuda_graph_scope()
            key, keep = (recording, key), recording is not None
        with torch.inference_mode(False):  # what is worked out in inference may be needed in training
            return memo.get_or_compute(key, compute, store=keep)


# ---------------------------------------------------------------------------- the kinds of mask


class BandMask(Mask):
    """A mask that is always a band."""

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        band = self.to_band(shape)
        assert band is not None

        def look() -> Tensor:
            first, last = (_slice_rows(x, rows, -1)[..., None] for x in band)
            place = torch.arange(shape.num_keys, device=shape.device)
            return (place >= first) & (place <= last)

        return self.get_or_compute(("row", shape), look) if band.first.shape[-1] == 1 else look()


@dataclass(frozen=True, eq=False)
class PaddingMask(BandMask):
    """The same keys ``first … last`` for every query of a row of the batch: padding."""

    first: Tensor  # (*leading)
    last: Tensor
    min_length: int  # known on the host: the fewest keys of a row, …
    max_end: int  # … one more than the last key of any, …
    max_first: int  # … and the latest first key
    num_keys: int | None = None  # how many keys a 0/1 mask was for
    padding_is_zero: bool = False  # known: the keys that no query sees hold zeros

    @property
    def num_leading_dims(self) -> int:
        return self.first.dim()

    def is_query_independent(self) -> bool:
        return True

    def to_band(self, shape: AttentionShape) -> Band:
        def make() -> Band:
            ends = (move_to_device(x, shape.device)[..., None] for x in (self.first, self.last))
            return Band(*(align_leading_dims(x, self.num_leading_dims, shape.num_leading_dims) for x in ends))

        return self.get_or_compute(("band", shape), make)

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
    """The same keys for every query of a row of the batch, in more than one piece."""

    allowed: Tensor  # (*leading, K), on the host

    @property
    def num_leading_dims(self) -> int:
        return self.allowed.dim() - 1

    def is_query_independent(self) -> bool:
        return True

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        on_device = self.get_or_compute(shape.device, lambda: move_to_device(self.allowed, shape.device))
        return align_leading_dims(on_device[..., None, :], self.num_leading_dims, shape.num_leading_dims)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        _check_zero_one_shape(self.allowed.shape, leading_shape, shape)

    def __repr__(self) -> str:
        return f"from_zero_one({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class WindowMask(BandMask):
    """Keys near the diagonal. Causal is the window that is open to the left and ends at the diagonal."""

    left: int | None
    right: int | None
    offset: Tensor | None  # where the diagonal starts; None: K − Q

    @property
    def num_leading_dims(self) -> int:
        return 0 if self.offset is None else self.offset.dim()

    def to_band(self, shape: AttentionShape) -> Band:
        def make() -> Band:
            here = torch.arange(shape.num_queries, device=shape.device)
            if self.offset is None:
                here = here + (shape.num_keys - shape.num_queries)
            else:
                here = here + move_to_device(self.offset, shape.device)[..., None]
            here = align_leading_dims(here, self.num_leading_dims, shape.num_leading_dims)
            far = (
                shape.num_queries + shape.num_keys
            )  # no window needs to reach further, and larger numbers would overflow
            first = torch.zeros_like(here) if self.left is None else here - min(self.left, far)
            last = (
                torch.full_like(here, shape.num_keys - 1)
                if self.right is None
                else here + min(self.right, far)
            )
            return Band(first, last)

        return self.get_or_compute(("band", shape), make)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.offset is not None:
            check_leading_shape("the mask's offset", self.offset.shape, leading_shape)

    @property
    def is_causal(self) -> bool:
        """Plain causal, aligned bottom-right."""
        return self.left is None and self.right == 0 and self.offset is None

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return self.offset is None and shape.num_queries <= shape.num_keys

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        sees_all_before = self.left is None and shape.num_queries > 0
        return self.offset is None and (sees_all_before or shape.num_queries >= shape.num_keys)

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
    """A boolean tensor, aligned from the right as tensors broadcast."""

    allowed: Tensor  # (…, Q, K)

    @property
    def num_leading_dims(self) -> int:
        return self.allowed.dim() - 2

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        part = _slice_rows(self.allowed, rows, -2).to(shape.device)
        return part.reshape(*[1] * (shape.num_leading_dims - self.num_leading_dims), *part.shape)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        if self.allowed.device != shape.device:
            raise InputError(
                f"the mask tensor is on {self.allowed.device}, the query on {shape.device}; "
                "move the mask with .to()"
            )
        check_broadcast(
            "the mask tensor", self.allowed.shape, (*leading_shape, shape.num_queries, shape.num_keys)
        )

    def __repr__(self) -> str:
        return f"tensor({tuple(self.allowed.shape)})"


@dataclass(frozen=True, eq=False)
class AdditiveMask(Mask):
    """A tensor as SDPA adds it to scores, 0 or −inf, whose maker knows all that would have to be looked for.

    Every query has a key, and the keys that none sees hold zeros. So a call takes it as it is, and computes
    nothing. Aligned from the right.
    """

    values: Tensor  # (…, Q, K), in the type of the query

    @property
    def num_leading_dims(self) -> int:
        return self.values.dim() - 2

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return self.to_additive_rows(shape, rows) == 0

    def to_additive_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        """As ``to_dense_rows``, 0 for True and −inf for False."""
        part = _slice_rows(self.values, rows, -2)
        return part.reshape(*[1] * (shape.num_leading_dims - self.num_leading_dims), *part.shape)

    def check_shape(self, leading_shape: Sequence[int], shape: AttentionShape) -> None:
        check_broadcast(
            "the mask tensor", self.values.shape, (*leading_shape, shape.num_queries, shape.num_keys)
        )

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        return True

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ready({tuple(self.values.shape)})"


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
    """``a & b``. Two bands meet in a band."""

    def conjuncts(self) -> tuple[Mask, ...]:
        return (*self.a.conjuncts(), *self.b.conjuncts())

    def to_band(self, shape: AttentionShape) -> Band | None:
        def make() -> Band | None:
            a, b = self.a.to_band(shape), self.b.to_band(shape)
            if a is None or b is None:
                return None
            return Band(torch.maximum(a.first, b.first), torch.minimum(a.last, b.last))

        return self.get_or_compute(("band", shape), make)

    def to_dense_rows(self, shape: AttentionShape, rows: slice) -> Tensor:
        return self.a.to_dense_rows(shape, rows) & self.b.to_dense_rows(shape, rows)

    def has_no_empty_rows(self, shape: AttentionShape) -> bool:
        # Known when every part lets query i see the key of its own place (all bottom-right aligned), or
        # when every part lets it see key 0.
        parts = self.conjuncts()
        each = all(part.has_no_empty_rows(shape) for part in parts)
        diagonal = all(part.includes_diagonal() for part in parts)
        return each and (diagonal or all(part.includes_first_key() for part in parts))

    def has_no_hidden_keys(self, shape: AttentionShape) -> bool:
        parts = self.conjuncts()
        diagonal = all(part.includes_diagonal() for part in parts)
        return (
            diagonal
            and shape.num_queries == shape.num_keys
            and all(part.has_no_hidden_keys(shape) for part in parts)
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


# ------------------------------------------------------------------------------------ small tools


def move_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device. CUDA has read them when the call returns, so there is no wait."""
    return x.to(device, non_blocking=device.type == "cuda")


def _slice_rows(x: Tensor, rows: slice, dim: int) -> Tensor:
    """Some rows of ``x``, or its only one where all rows are alike."""
    if x.shape[dim] == 1:
        return x
    return x[..., rows] if dim == -1 else x[..., rows, :]


def align_leading_dims(x: Tensor, num_mask_dims: int, num_leading_dims: int) -> Tensor:
    """Put dimensions of 1 behind the mask's own leading dimensions, so that those stand leftmost."""
    return x.reshape(
        *x.shape[:num_mask_dims], *[1] * (num_leading_dims - num_mask_dims), *x.shape[num_mask_dims:]
    )


def _find_covered_keys(band: Band, num_keys: int) -> Tensor:
    """Which keys lie in some row's band: +1 where a band begins, −1 behind its end, summed along the keys."""
    first, last = torch.broadcast_tensors(band.first.clamp(min=0), band.last.clamp(max=num_keys - 1))
    some = (first <= last).int()
    edges = torch.zeros(*first.shape[:-1], num_keys + 1, dtype=torch.int32, device=first.device)
    edges.scatter_add_(-1, first.clamp(max=num_keys), some)
    edges.scatter_add_(-1, (last + 1).clamp(min=0), -some)
    return edges.cumsum(-1)[..., :num_keys] > 0


def _require_mask(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"a mask combines with another mask, not with {type(other).__name__}; "
        "wrap a boolean tensor (True = may attend) with masks.tensor(t)"
    )


def _broadcasts_from_left(shape: Sequence[int], target_shape: Sequence[int]) -> bool:
    """Whether the dimensions that are there broadcast to those that are wanted, from the left."""
    return len(shape) <= len(target_shape) and all(
        h in (1, w) for h, w in zip(shape, target_shape, strict=False)
    )


def check_leading_shape(name: str, shape: Sequence[int], leading_shape: Sequence[int]) -> None:
    """Raise unless a mask's own leading dimensions fit those of the query."""
    if not _broadcasts_from_left(shape, leading_shape):
        raise InputError(
            f"{name}: shape {tuple(shape)} does not fit the leading dimensions {tuple(leading_shape)} of the query; "
            "they align from the left, so one number a batch row has shape (batch,)"
        )


def _check_zero_one_shape(
    mask_shape: Sequence[int], leading_shape: Sequence[int], shape: AttentionShape
) -> None:
    if mask_shape[-1] != shape.num_keys:
        raise InputError(
            f"the 0/1 mask has shape {tuple(mask_shape)}, but there are {shape.num_keys} keys; its last dimension is one "
            "number for every key, those of a cache included"
        )
    if not _broadcasts_from_left(mask_shape[:-1], leading_shape):
        raise InputError(
            f"the 0/1 mask has shape {tuple(mask_shape)}, but the leading dimensions are {tuple(leading_shape)}; "
            "give it as (batch, keys), without dimensions of 1 for heads or queries"
        )


def check_broadcast(name: str, shape: Sequence[int], scores_shape: Sequence[int]) -> None:
    """Raise unless a tensor of shape ``have`` broadcasts to the scores' shape ``want``."""
    if not _broadcasts_from_left(shape[::-1], scores_shape[::-1]):
        raise InputError(
            f"{name} has shape {tuple(shape)}, but the scores have {tuple(scores_shape)}, to which it must broadcast "
            "from the right: (batch, keys) is t[:, None, None] for scores (batch, heads, queries, keys); a "
            "0/1 mask of shape (batch, keys) goes through masks.from_zero_one"
        )
